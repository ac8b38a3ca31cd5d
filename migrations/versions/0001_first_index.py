"""The first index: state, namespaces, chunks, prefixes, digests of weights files."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

APPLICATION_ID = 0x70666278  # "pfbx"


def upgrade() -> None:
    state = op.create_table(
        "bank_state",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("tick", sa.BigInteger, nullable=False),
        sa.Column("disk_bytes", sa.BigInteger, nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_bank_state_single_row")),
    )
    op.bulk_insert(state, [{"id": 1, "tick": 0, "disk_bytes": 0}])
    op.create_table(
        "namespaces",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("root_key", sa.LargeBinary(16), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("salt_digest", sa.String(64), nullable=False),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("layout", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("fingerprint", "salt_digest", name=op.f("uq_namespaces_fingerprint_salt_digest")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "chunks",
        sa.Column("key", sa.LargeBinary(16), primary_key=True),
        sa.Column("parent_key", sa.LargeBinary(16), sa.ForeignKey("chunks.key", ondelete="RESTRICT")),
        sa.Column("namespace_id", sa.Integer, sa.ForeignKey("namespaces.id"), nullable=False),
        sa.Column("start", sa.Integer, nullable=False),
        sa.Column("n_tokens", sa.Integer, nullable=False),
        sa.Column("first_token", sa.BigInteger, nullable=False),
        sa.Column("token_ids", sa.LargeBinary, nullable=False),
        sa.Column("file_name", sa.String(64)),
        sa.Column("data_offset", sa.Integer, nullable=False),
        sa.Column("n_bytes", sa.BigInteger, nullable=False),
        sa.Column("disk_bytes", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.LargeBinary(16), nullable=False),
        sa.Column("last_used", sa.BigInteger, nullable=False),
        sa.Column("last_used_at", sa.BigInteger, nullable=False),
        sa.Column("hits", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_index(
        op.f("ix_chunks_parent_key_namespace_id_first_token_last_used"),
        "chunks",
        ["parent_key", "namespace_id", "first_token", "last_used"],
    )
    op.create_index(op.f("ix_chunks_last_used_start"), "chunks", ["last_used", "start"])
    op.create_index(op.f("ix_chunks_namespace_id"), "chunks", ["namespace_id"])
    op.create_table(
        "prefixes",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column(
            "namespace_id",
            sa.Integer,
            sa.ForeignKey("namespaces.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("chunk_key", sa.LargeBinary(16), sa.ForeignKey("chunks.key", ondelete="SET NULL")),
        sa.Column("n_tokens", sa.Integer, nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("source_digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_index(op.f("ix_prefixes_chunk_key"), "prefixes", ["chunk_key"])
    op.create_table(
        "weights_digests",
        sa.Column("path", sa.Text, primary_key=True),
        sa.Column("device", sa.BigInteger, nullable=False),
        sa.Column("inode", sa.BigInteger, nullable=False),
        sa.Column("n_bytes", sa.BigInteger, nullable=False),
        sa.Column("mtime_ns", sa.BigInteger, nullable=False),
        sa.Column("ctime_ns", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
    )
    if op.get_bind().dialect.name == "sqlite":
        op.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def downgrade() -> None:
    for table in ("weights_digests", "prefixes", "chunks", "namespaces", "bank_state"):
        op.drop_table(table)
