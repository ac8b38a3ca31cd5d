"""Let the n-th file operation of a store fail: it ends in a StorageError, and leaves neither rows nor files."""

from __future__ import annotations

import errno
import itertools
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids
from prefixbank.errors import StorageError
from tests.fakekv import FakeModel
from tests.fault.together import files_there, named_files

BASE = list(range(10))
LONGER = list(range(22))
FILE_OPERATIONS = [(os, "open"), (os, "fchmod"), (os, "writev"), (os, "fsync"), (Path, "mkdir"), (Path, "rename")]


class FailingDisk:
    """Let the n-th file operation fail, once; `done` are the names of all that were asked for."""

    def __init__(self, nth: int, number: int) -> None:
        self.nth = nth
        self.errno = number
        self.done: list[str] = []

    @property
    def failed(self) -> bool:
        return len(self.done) >= self.nth

    def instead_of(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*given: Any, **named: Any) -> Any:
            if str(given[0]).endswith(".note"):  # no store depends on one
                return real(*given, **named)
            self.done.append(name)
            if len(self.done) == self.nth:
                raise OSError(self.errno, os.strerror(self.errno))
            return real(*given, **named)

        return operation

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for owner, name in FILE_OPERATIONS:
            monkeypatch.setattr(owner, name, self.instead_of(name, getattr(owner, name)))


def failure_of(deed: Callable[[], object]) -> StorageError | None:
    try:
        deed()
    except StorageError as error:
        return error
    return None


def state(bank: PrefixBank) -> object:
    """Return all that a store could have changed."""
    with bank._session.index.reading() as tx:
        rows = {table: tx.exec_driver_sql(f"SELECT * FROM {table}").all() for table in ("chunks", "prefixes")}
        counters = tx.exec_driver_sql("SELECT * FROM bank_state").all()
    return rows, counters, files_there(bank.root)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_store_whose_nth_file_operation_fails_changes_nothing(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    model.name("base", BASE)
    before = state(bank)
    seen: list[str] = []
    for nth in itertools.count(1):
        disk = FailingDisk(nth, number)
        with monkeypatch.context() as patch:
            disk.install(patch)
            error = failure_of(lambda: model.store(LONGER))
        if error is None:
            break
        assert os.strerror(number) in str(error)
        seen.append(disk.done[nth - 1])
        assert "fsync" not in disk.done[nth:], "after a failed sync another one may succeed for bytes that were lost"
        assert state(bank) == before
    assert not disk.failed
    used = {name for _, name in FILE_OPERATIONS}
    assert set(seen) == (used - {"fsync"} if sys.platform == "darwin" else used)  # where F_FULLFSYNC takes its place
    assert model.held(BASE, LONGER) == [10, 22]
    assert files_there(bank.root) == named_files(bank)


def test_a_store_in_groups_keeps_the_groups_that_were_committed_before_the_disk_was_full(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixbank.storing._GROUP_BYTES", 1)
    with monkeypatch.context() as patch:
        writev = os.writev
        written = itertools.count(1)

        def until_full(descriptor: int, views: Any) -> int:
            if next(written) > 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return writev(descriptor, views)

        patch.setattr(os, "writev", until_full)
        with pytest.raises(StorageError, match="No space left"):
            model.store(LONGER)
    assert model.held(LONGER) == [12]
    assert files_there(bank.root) == named_files(bank)


def test_an_index_that_can_not_grow_leaves_neither_rows_nor_files(bank: PrefixBank, model: FakeModel) -> None:
    model.store(BASE)
    before = state(bank)
    with bank._session.index.reading() as tx:
        tx.exec_driver_sql(f"PRAGMA max_page_count={tx.exec_driver_sql('PRAGMA page_count').scalar_one()}")
    with pytest.raises(StorageError, match="full"):
        model.store(list(range(400)))
    assert state(bank) == before
    with bank._session.index.reading() as tx:
        tx.exec_driver_sql("PRAGMA max_page_count=1000000")
    assert model.store(list(range(400))).n_tokens == 400


def test_a_commit_that_fails_leaves_no_rows_and_only_files_without_rows(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.store(BASE)
    rows = bank.chunks()
    with monkeypatch.context() as patch:

        def no_commit(_connection: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        patch.setattr(bank._session.index._engine.dialect, "do_commit", no_commit)
        with pytest.raises(StorageError, match="disk I/O error"):
            model.store(LONGER)
    assert bank.chunks() == rows
    assert named_files(bank) <= files_there(bank.root)
    assert model.held(BASE, LONGER) == [10, 10]
    assert model.store(LONGER).n_tokens == len(LONGER)


def test_a_source_that_fails_leaves_neither_rows_nor_files(bank: PrefixBank, model: FakeModel) -> None:
    before = state(bank)
    source = model.source(LONGER[:9])  # it has fewer rows than it is asked for
    with pytest.raises(AssertionError, match="more tokens are asked for"):
        model.session.store(model.namespace, pack_token_ids(LONGER), source)
    assert state(bank) == before
