"""How fast a device computes and loads, by namespace: what a match is worth."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rates",
        sa.Column(
            "namespace_id",
            sa.Integer,
            sa.ForeignKey("namespaces.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("device", sa.Text, primary_key=True),
        sa.Column("compute_s", sa.Float),
        sa.Column("compute_s_per_token", sa.Float),
        sa.Column("load_s", sa.Float),
        sa.Column("load_s_per_byte", sa.Float),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("rates")
