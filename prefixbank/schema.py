"""Own the index's tables, its SQLite settings and its upgrade; must not know what the rows are used for.

Tables are SQLAlchemy Core tables, not ORM classes: rows leave the index as the frozen values of `values`, and the
import of `sqlalchemy.orm` (0.12 s) would cost each reading verb of the CLI a third of its time.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, exc

from prefixbank.config import Durability
from prefixbank.errors import (
    BankBusyError,
    BankReadOnlyError,
    IndexCorruptError,
    PrefixBankError,
    SchemaError,
    StorageError,
)

__all__ = [
    "APPLICATION_ID",
    "HEAD_REVISION",
    "bank_state",
    "chunks",
    "has_declared_tables",
    "is_system_error",
    "make_engine",
    "metadata",
    "namespaces",
    "prefixes",
    "rates",
    "read_revision",
    "require_current",
    "translating",
    "upgrade",
    "weights_digests",
]

APPLICATION_ID = 0x70666278  # "pfbx"
HEAD_REVISION = "0003"
KNOWN_REVISIONS = ("0001", "0002", "0003")

_one_migration_at_a_time = threading.Lock()
"""Alembic keeps the connection that it works on in module globals: two threads would swap theirs."""


class _Bytes(sa.LargeBinary):
    """Give bytes as sqlite3 does. SQLAlchemy would make bytes of a damaged number: as many zeros as it says."""

    cache_ok = True

    def result_processor(self, dialect: object, coltype: object) -> None:
        return None


metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

bank_state = sa.Table(
    "bank_state",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("tick", sa.BigInteger, nullable=False),
    sa.Column("disk_bytes", sa.BigInteger, nullable=False),
    sa.CheckConstraint("id = 1", name="single_row"),
)

namespaces = sa.Table(
    "namespaces",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("root_key", _Bytes(16), nullable=False),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("salt_digest", sa.String(64), nullable=False),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("layout", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("fingerprint", "salt_digest"),
    sqlite_autoincrement=True,
)

chunks = sa.Table(
    "chunks",
    metadata,
    sa.Column("key", _Bytes(16), primary_key=True),
    # RESTRICT: a chunk's parent can't go, nor change its token ids, while the chunk is there; so a chain of rows whose
    # token ids agree with a prompt is the very chain under which each shard was computed.
    sa.Column("parent_key", _Bytes(16), sa.ForeignKey("chunks.key", ondelete="RESTRICT")),
    sa.Column("namespace_id", sa.Integer, sa.ForeignKey("namespaces.id"), nullable=False),
    sa.Column("start", sa.Integer, nullable=False),
    sa.Column("n_tokens", sa.Integer, nullable=False),
    sa.Column("first_token", sa.BigInteger, nullable=False),
    sa.Column("token_ids", _Bytes, nullable=False),
    sa.Column("file_name", sa.String(64)),
    sa.Column("data_offset", sa.Integer, nullable=False),
    sa.Column("n_bytes", sa.BigInteger, nullable=False),
    sa.Column("disk_bytes", sa.BigInteger, nullable=False),
    sa.Column("digest", _Bytes(16), nullable=False),
    sa.Column("has_state", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("last_used", sa.BigInteger, nullable=False),
    sa.Column("last_used_at", sa.BigInteger, nullable=False),
    sa.Column("hits", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Index(None, "parent_key", "namespace_id", "first_token", "last_used"),
    sa.Index(None, "last_used", "start"),
    sa.Index(None, "namespace_id"),
)

prefixes = sa.Table(
    "prefixes",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column(
        "namespace_id",
        sa.Integer,
        sa.ForeignKey("namespaces.id", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("chunk_key", _Bytes(16), sa.ForeignKey("chunks.key", ondelete="SET NULL")),
    sa.Column("n_tokens", sa.Integer, nullable=False),
    sa.Column("pinned", sa.Boolean, nullable=False),
    sa.Column("source_digest", sa.String(64), nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Index(None, "chunk_key"),
)

weights_digests = sa.Table(
    "weights_digests",
    metadata,
    sa.Column("path", sa.Text, primary_key=True),
    sa.Column("device", sa.BigInteger, nullable=False),
    sa.Column("inode", sa.BigInteger, nullable=False),
    sa.Column("n_bytes", sa.BigInteger, nullable=False),
    sa.Column("mtime_ns", sa.BigInteger, nullable=False),
    sa.Column("ctime_ns", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
)

rates = sa.Table(
    "rates",
    metadata,
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


@contextmanager
def translating(index_path: Path) -> Iterator[None]:
    """Turn SQLAlchemy's and sqlite3's errors into ours; the message names the index and what to do."""
    try:
        yield
    except (exc.SQLAlchemyError, sqlite3.Error) as error:
        raise _translated(error, index_path) from error
    except UnicodeDecodeError as error:  # by sqlite3, where SQLite's own message quotes damaged bytes
        raise IndexCorruptError(f"{index_path} is damaged (a text is no UTF-8): run `prefixbank repair`") from error


def _translated(error: Exception, index_path: Path) -> PrefixBankError:
    """Return our error for one of SQLite's (result codes: https://www.sqlite.org/rescode.html)."""
    if isinstance(error, exc.TimeoutError):
        return BankBusyError(f"{index_path} is in use by too many threads: try again")
    cause = error.orig if isinstance(error, exc.DBAPIError) else error
    extended_code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    code = extended_code & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return BankBusyError(f"another process holds {index_path}: try again, or raise the time limit")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return IndexCorruptError(f"{index_path} is damaged ({cause}): run `prefixbank repair`")
    if extended_code in (sqlite3.SQLITE_READONLY_ROLLBACK, sqlite3.SQLITE_READONLY_RECOVERY):
        return BankReadOnlyError(
            f"a process died while it wrote to {index_path}, and only a writer can mend that: open the bank once "
            "without read_only, or run `prefixbank prune`"
        )
    if code == sqlite3.SQLITE_READONLY:
        return BankReadOnlyError(f"{index_path} can't be written: open the bank with read_only=True")
    if code == sqlite3.SQLITE_ERROR and "no such" in str(cause):
        return SchemaError(f"{index_path} lacks a table or column ({cause}): it is no index of ours")
    refused = StorageError(f"the index {index_path} could not be used: {cause}")
    refused.index_is_full = code == sqlite3.SQLITE_FULL
    return refused


def make_engine(index_path: Path, *, read_only: bool, durability: Durability, busy_timeout_s: float) -> sa.Engine:
    """Return an engine on an existing index file; it never creates one.

    Transactions start with an explicit BEGIN: sqlite3's own handling opens none for SELECT, so that a read and the
    write that follows could be torn apart. Writers (execution option `writes`) begin IMMEDIATE: a deferred BEGIN that
    turns into a write fails at once when another writer is there, whatever the time limit.
    """
    uri = f"file:{quote(str(index_path.absolute()))}?mode={'ro' if read_only else 'rw'}"
    # Nothing can write to a read-only file system, and the journal of a killed writer can't be played back there.
    if read_only and _on_read_only_file_system(index_path):
        uri += "&immutable=1"
    engine = sa.create_engine(
        "sqlite+pysqlite://",
        creator=lambda: sqlite3.connect(
            uri, uri=True, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
        ),
        poolclass=sa.QueuePool,
        pool_timeout=max(busy_timeout_s, 0.1),
        hide_parameters=True,  # or the errors behind ours would quote token ids, wherever a traceback is logged
    )

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA foreign_keys=ON")
        if not read_only and _may_be_changed(cursor):
            cursor.execute("PRAGMA journal_mode=DELETE")
            # EXTRA also syncs the folder after the journal is deleted; without it a power cut could bring the
            # journal, and with it the state before the commit, back.
            cursor.execute(f"PRAGMA synchronous={'EXTRA' if durability == 'full' else 'NORMAL'}")
            if sys.platform == "darwin" and durability == "full":
                cursor.execute("PRAGMA fullfsync=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _may_be_changed(cursor: Any) -> bool:
    """Tell whether the index is empty or ours, and no newer: the journal mode is written into the file itself."""
    tables = {row[0] for row in cursor.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return True
    (application_id,) = cursor.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID or "alembic_version" not in tables:
        return False
    revision = cursor.execute("SELECT version_num FROM alembic_version").fetchone()
    return revision is not None and revision[0] in KNOWN_REVISIONS


def _on_read_only_file_system(path: Path) -> bool:
    """Tell whether the file system is mounted read-only (permissions do not count)."""
    import os

    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def read_revision(connection: sa.Connection) -> str | None:
    """Return the migration that the index is at, or None for an empty database file.

    Raises `SchemaError` where the file is a database of something else.
    """
    tables = set(sa.inspect(connection).get_table_names())
    if not tables:
        return None
    application_id = connection.exec_driver_sql("PRAGMA application_id").scalar_one()
    if application_id != APPLICATION_ID or "alembic_version" not in tables:
        raise SchemaError("the file is a SQLite database of another program: give another path")
    return str(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one())


def require_current(revision: str | None, index_path: Path) -> None:
    """Raise `SchemaError` unless the index is at the revision that this version works with."""
    if revision == HEAD_REVISION:
        return
    if revision in KNOWN_REVISIONS or revision is None:
        raise SchemaError(f"{index_path} has an older format: run `prefixbank migrate`")
    raise SchemaError(
        f"{index_path} was written by a newer prefixbank (schema {revision}, this one knows "
        f"{HEAD_REVISION}): upgrade prefixbank"
    )


def has_declared_tables(connection: sa.Connection) -> bool:
    """Tell whether the index has all tables and columns that this version works with."""
    inspector = sa.inspect(connection)
    there = set(inspector.get_table_names())
    return all(
        table.name in there and {c["name"] for c in inspector.get_columns(table.name)} >= {c.name for c in table.c}
        for table in metadata.tables.values()
    )


_REFUSALS = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PROTOCOL,
)


def is_system_error(error: PrefixBankError) -> bool:
    """Tell whether the system refused to read the index, rather than the index being damaged."""
    cause = error.__cause__
    cause = cause.orig if isinstance(cause, exc.DBAPIError) else cause
    return isinstance(cause, OSError) or getattr(cause, "sqlite_errorcode", 0) & 0xFF in _REFUSALS


def migrations_folder() -> Path:
    """Return where the migrations are: inside the installed package, else in the checkout."""
    installed = Path(__file__).parent / "_migrations"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "migrations"


def upgrade(connection: sa.Connection) -> None:
    """Bring the index to the newest revision, inside the caller's transaction: all of it or nothing."""
    from alembic import command  # late: 0.6 s that only a new or an old index needs
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _one_migration_at_a_time:
        command.upgrade(config, "head")
