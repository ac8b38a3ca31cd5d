"""Chunks whose shard also holds the states of recurrent layers."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Not in batch mode: SQLite adds a column in place, and copying the table would trip over its own foreign key.
    op.add_column("chunks", sa.Column("has_state", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("chunks", "has_state")
