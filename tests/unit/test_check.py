"""Make each fault and see that a check finds it, names it, and changes nothing."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from prefixbank import eviction, shards
from prefixbank.bank import PrefixBank
from prefixbank.check import Finding
from prefixbank.values import ChunkRecord
from tests.fakekv import FakeModel

PROBLEMS = {"missing", "corrupt", "unreadable", "broken-chain", "bytes", "permissions"}
NOTES = {"hole", "evicted", "leftover", "quarantined"}
TOKENS = list(range(10))


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[PrefixBank]:
    """Give a bank that may stay faulty."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as bank:
        FakeModel(bank).name("shots", TOKENS)
        yield bank


def first(bank: PrefixBank) -> ChunkRecord:
    return min(bank.chunks(), key=lambda record: record.start)


def path_of(bank: PrefixBank, record: ChunkRecord) -> Path:
    path: Path = bank._session.shards.path_of(record.file_name)
    return path


def execute(bank: PrefixBank, *statements: str) -> None:
    """Change the index behind the bank's back; foreign keys are not watched."""
    with closing(sqlite3.connect(bank.root / "index.sqlite3", isolation_level=None)) as index:
        for statement in statements:
            index.execute(statement)


def findings(bank: PrefixBank, *, read_data: bool = False) -> list[Finding]:
    report = bank.check(read_data=read_data)
    for finding in report.findings:
        assert finding.kind in (PROBLEMS if finding.problem else NOTES)
        assert finding.message
    assert report.ok == (not report.problems) == (not any(f.problem for f in report.findings))
    assert report.read_data == read_data
    return list(report.findings)


def kinds(bank: PrefixBank, *, read_data: bool = False) -> list[str]:
    return [finding.kind for finding in findings(bank, read_data=read_data)]


def test_nothing_is_found_in_a_bank_that_is_in_order(faulty: PrefixBank, unchanged: Callable[[Path], Any]) -> None:
    with unchanged(faulty.root):
        report = faulty.check(read_data=True)
    assert report.findings == ()
    assert report.n_chunks == 3
    assert report.n_bytes == sum(path.stat().st_size for path in (faulty.root / "shards").rglob("*.safetensors"))


def test_missing(faulty: PrefixBank, unchanged: Callable[[Path], Any]) -> None:
    record = first(faulty)
    path_of(faulty, record).unlink()
    with unchanged(faulty.root):
        (finding,) = findings(faulty)
    assert (finding.kind, finding.subject) == ("missing", record.file_name)


def test_a_shard_that_is_deleted_while_the_check_runs_is_not_missing(
    faulty: PrefixBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row was there when the check began, and is gone when it is looked up again."""
    real_open = shards.ShardStore.open_shard

    def prune_first(self: shards.ShardStore, record: ChunkRecord) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(shards.ShardStore, "open_shard", real_open)
            faulty.prune(max_bytes=0)
        return real_open(self, record)

    monkeypatch.setattr(shards.ShardStore, "open_shard", prune_first)
    assert kinds(faulty) == []


@pytest.mark.parametrize(
    ("damage", "seen_without_reading"),
    [
        (lambda path: os.truncate(path, 100), True),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), True),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), False),
        (lambda path: (path.rename(path.with_name("x")), path.mkdir()), True),
        (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), True),
        (lambda path: (path.rename(path.with_name("x")), os.mkfifo(path)), True),
    ],
    ids=["truncated", "appended", "zeroed", "folder", "link", "fifo"],
)
def test_corrupt(faulty: PrefixBank, damage: Callable[[Path], Any], seen_without_reading: bool) -> None:
    record = first(faulty)
    damage(path_of(faulty, record))
    assert kinds(faulty) == (["corrupt"] if seen_without_reading else [])
    (finding,) = findings(faulty, read_data=True)
    assert (finding.kind, finding.subject) == ("corrupt", record.file_name)


def test_unreadable(faulty: PrefixBank, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied")
        return real_open(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "open", refuse)
        assert kinds(faulty) == ["unreadable"] * 3
    assert kinds(faulty) == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE chunks SET token_ids = zeroblob(16) WHERE start = 4",
        "UPDATE chunks SET start = 5 WHERE start = 4",
        "UPDATE chunks SET n_tokens = 3 WHERE start = 4",
        "UPDATE chunks SET key = zeroblob(16) WHERE start = 8",
        "UPDATE chunks SET parent_key = (SELECT key FROM chunks WHERE start = 0) WHERE start = 8",
        "UPDATE chunks SET namespace_id = 99 WHERE start = 8",
        "DELETE FROM chunks WHERE start = 0",
        "UPDATE namespaces SET root_key = zeroblob(16)",
    ],
)
def test_broken_chain(faulty: PrefixBank, statement: str) -> None:
    execute(faulty, statement)
    assert "broken-chain" in kinds(faulty)


def test_a_child_of_another_namespace_is_a_broken_chain(faulty: PrefixBank) -> None:
    FakeModel(faulty, "other")
    execute(faulty, "UPDATE chunks SET namespace_id = (SELECT max(id) FROM namespaces) WHERE start = 8")
    assert kinds(faulty) == ["broken-chain"]


def test_bytes(faulty: PrefixBank) -> None:
    execute(faulty, "UPDATE bank_state SET disk_bytes = disk_bytes + 4096")
    (finding,) = findings(faulty)
    assert finding.kind == "bytes"
    assert "16384" in finding.message
    assert "12288" in finding.message


@pytest.mark.parametrize("where", ["", "shards", "tmp", "quarantine"])
def test_permissions_of_folders(faulty: PrefixBank, where: str) -> None:
    (faulty.root / where).chmod(0o750)
    (finding,) = findings(faulty)
    assert (finding.kind, finding.subject) == ("permissions", str(faulty.root / where))


def test_permissions_of_shards(faulty: PrefixBank) -> None:
    record = first(faulty)
    path_of(faulty, record).chmod(0o604)
    (finding,) = findings(faulty)
    assert (finding.kind, finding.subject) == ("permissions", record.file_name)
    assert "604" in finding.message


@pytest.mark.parametrize("name", ["index.sqlite3", "bank.json"])
def test_permissions_of_the_index(faulty: PrefixBank, name: str) -> None:
    """It holds the token ids, and with them the prompts."""
    (faulty.root / name).chmod(0o644)
    (finding,) = findings(faulty)
    assert (finding.kind, finding.subject) == ("permissions", str(faulty.root / name))


def test_hole_and_quarantined(faulty: PrefixBank) -> None:
    record = first(faulty)
    path_of(faulty, record).write_bytes(b"damaged")
    FakeModel(faulty).resolve(TOKENS)
    found = {finding.kind: finding.subject for finding in findings(faulty, read_data=True)}
    assert found == {"hole": record.key.hex(), "quarantined": f"quarantine/{record.file_name}"}


def test_evicted(faulty: PrefixBank) -> None:
    faulty.prune(max_bytes=0)
    (finding,) = findings(faulty)
    assert (finding.kind, finding.subject) == ("evicted", "shots")


def test_leftover(faulty: PrefixBank) -> None:
    path = faulty.root / "tmp" / "old.safetensors"
    path.write_bytes(b"half")
    assert kinds(faulty) == []
    then = path.stat().st_mtime - eviction.GRACE_S - 60
    os.utime(path, (then, then))
    (finding,) = findings(faulty)
    assert (finding.kind, finding.subject) == ("leftover", "tmp/old.safetensors")


def test_every_fault_is_found_in_one_go(faulty: PrefixBank) -> None:
    one, two, three = sorted(faulty.chunks(), key=lambda record: record.start)
    path_of(faulty, one).unlink()
    path_of(faulty, two).write_bytes(bytes(two.n_bytes))
    path_of(faulty, three).chmod(0o644)
    execute(faulty, "UPDATE bank_state SET disk_bytes = 1")
    assert sorted(kinds(faulty, read_data=True)) == ["bytes", "corrupt", "missing", "permissions"]


def test_progress_ends_with_all_bytes(faulty: PrefixBank) -> None:
    steps: list[tuple[int, int]] = []
    report = faulty.check(read_data=True, progress=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (report.n_bytes, report.n_bytes)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert {total for _, total in steps} == {report.n_bytes}


def test_a_read_only_bank_can_be_checked(faulty: PrefixBank, unchanged: Callable[[Path], Any]) -> None:
    path_of(faulty, first(faulty)).unlink()
    with unchanged(faulty.root), PrefixBank.open(faulty.root, read_only=True) as reader:
        assert kinds(reader, read_data=True) == ["missing"]
