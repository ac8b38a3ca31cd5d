"""Own the index: its file, its transactions and all its rows; must not know shard files or arrays.

`Index` opens transactions; the modules beside it hold the queries of one kind of row each and take the open
transaction as their first argument. No transaction is open during file or model work: callers collect what they need,
leave, work, and come back.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import event

from prefixbank.config import Durability
from prefixbank.errors import BankNotFoundError, BankReadOnlyError, StorageError
from prefixbank.schema import (
    HEAD_REVISION,
    KNOWN_REVISIONS,
    make_engine,
    read_revision,
    require_current,
    translating,
    upgrade,
)

__all__ = ["Index"]


class Index:
    """Open transactions on one index file. Safe to use from several threads and processes."""

    def __init__(self, path: Path, *, read_only: bool, durability: Durability, busy_timeout_s: float) -> None:
        self.path = path
        self.read_only = read_only
        self._engine = make_engine(path, read_only=read_only, durability=durability, busy_timeout_s=busy_timeout_s)
        self.connections: list[object] = []
        event.listen(self._engine, "connect", lambda connection, _record: self.connections.append(connection))
        event.listen(self._engine, "close", lambda connection, _record: self.connections.remove(connection))
        self._pid = os.getpid()
        self._identity = self._stat_identity()
        self._closed = False

    @staticmethod
    def create_file(path: Path) -> bool:
        """Create an empty index file of mode 0600 and tell whether it was not there before.

        SQLite gives its journal the mode of the database, so this also keeps the journal private.
        """
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                os.fchmod(descriptor, 0o600)  # the umask may have taken more away
            finally:
                os.close(descriptor)
        except FileExistsError:
            return False
        except OSError as exc:
            raise StorageError(f"{path} can't be created: {exc.strerror}") from exc
        return True

    @property
    def revision(self) -> str | None:
        """Return the index's migration, or None where the file is still empty."""
        with self.reading() as tx:
            return read_revision(tx)

    def require_current(self) -> None:
        """Raise `SchemaError` unless this version can work with the index. Changes nothing."""
        require_current(self.revision, self.path)

    def migrate(self) -> None:
        """Bring the index to the newest revision, all of it or nothing. Raises `SchemaError` for a newer one."""
        with self.writing() as tx:
            revision = read_revision(tx)
            if revision == HEAD_REVISION:
                return
            if revision is not None and revision not in KNOWN_REVISIONS:
                require_current(revision, self.path)
            upgrade(tx)

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a transaction that sees one state of the index and changes nothing."""
        with self._transaction(writes=False) as tx:
            yield tx

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction that holds the write lock from its first statement; commits unless the block raises."""
        if self.read_only:
            raise BankReadOnlyError(f"{self.path} is opened read-only")
        with self._transaction(writes=True) as tx:
            yield tx

    @contextmanager
    def _transaction(self, *, writes: bool) -> Iterator[sa.Connection]:
        if self._pid != os.getpid():
            raise BankNotFoundError(f"{self.path} was opened by the process that forked this one: open the bank again")
        if self._closed:
            raise BankNotFoundError(f"{self.path} was closed: open the bank again")
        if self._stat_identity() != self._identity:
            # A live connection to a deleted file keeps "succeeding".
            raise BankNotFoundError(f"{self.path} was replaced while it was open: open the bank again")
        with (
            translating(self.path),
            self._engine.connect().execution_options(writes=writes) as tx,
            tx.begin(),
        ):
            yield tx

    def _stat_identity(self) -> tuple[int, int]:
        try:
            status = self.path.stat()
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise BankNotFoundError(f"the index {self.path} is gone: open the bank again") from exc
        except OSError as exc:
            raise StorageError(f"the index {self.path} can't be looked at: {exc.strerror or exc}") from exc
        return status.st_dev, status.st_ino

    def close(self) -> None:
        """Close all connections; transactions are refused from now on. Closing again does nothing."""
        self._closed = True
        if self._pid == os.getpid():
            self._engine.dispose()

    def abandon(self) -> None:
        """Never close the connections, in a process that was forked: SQLite would undo the other's transaction.

        Nor must they be collected, ever (https://www.sqlite.org/howtocorrupt.html#_carrying_an_open_database_across_a_fork_).
        """
        self._closed = True
        for connection in self.connections:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
