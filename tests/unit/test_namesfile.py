"""Hold `prefixes.json` to it: written before the commit, never behind the index, and noticed where it is damaged."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prefixbank import namesfile
from prefixbank.bank import PrefixBank
from prefixbank.errors import IndexCorruptError, StorageError
from prefixbank.repair import repair
from tests.fakekv import FakeModel

TOKENS = list(range(10))


def names(bank: PrefixBank) -> dict[str, bool]:
    kept = namesfile.read(bank.root)
    return {} if kept is None else {name.name: name.pinned for name in kept.names.values()}


def test_a_bank_without_names_has_no_file(bank: PrefixBank, model: FakeModel) -> None:
    model.store(TOKENS)
    assert not (bank.root / "prefixes.json").exists()
    assert namesfile.read(bank.root) is None


def test_every_change_of_names_and_pins_is_in_the_file(bank: PrefixBank, model: FakeModel) -> None:
    model.name("one", TOKENS)
    model.name("two", TOKENS[:5], pin=True)
    assert names(bank) == {"one": False, "two": True}
    assert stat.S_IMODE((bank.root / "prefixes.json").stat().st_mode) == 0o600
    bank.pin("one")
    bank.unpin("two")
    assert names(bank) == {"one": True, "two": False}
    bank.remove("one")
    assert names(bank) == {"two": False}
    bank.remove("two")
    assert names(bank) == {}


def test_storing_and_evicting_write_no_names(bank: PrefixBank, model: FakeModel) -> None:
    """A longer chunk supersedes the named tail, and later all of it is evicted: the file says where it ended."""
    model.name("one", TOKENS)
    before = (bank.root / "prefixes.json").read_bytes()
    model.store(range(30))
    bank.prune(max_bytes=0)
    assert (bank.root / "prefixes.json").read_bytes() == before
    model.name("two", [7, 7, 7])
    kept = namesfile.read(bank.root)
    assert kept is not None
    assert all(name.end_key for name in kept.names.values()), "where the evicted prefix ended was forgotten"


def test_what_is_acknowledged_is_in_the_file_first(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written with the write lock held; where that fails, the name is not given."""
    model.name("one", TOKENS)

    def fail(*_: object) -> None:
        raise StorageError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(namesfile, "_write", fail)
        with pytest.raises(StorageError, match="no space"):
            bank.pin("one")
    assert [p.pinned for p in bank.prefixes()] == [False]
    assert names(bank) == {"one": False}


def test_a_crash_before_the_commit_leaves_what_was_wanted_and_a_repair_does_it(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.name("one", TOKENS)
    real = namesfile.update

    def die(*given: Any, **named: Any) -> None:
        real(*given, **named)
        raise StorageError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(namesfile, "update", die)
        with pytest.raises(StorageError, match="power cut"):
            bank.pin("one")
    assert (names(bank), [p.pinned for p in bank.prefixes()]) == ({"one": True}, [False])
    assert [f.kind for f in bank.check().findings] == ["names"]
    assert [step.action for step in repair(bank.root).steps] == ["name"]
    assert [p.pinned for p in bank.prefixes()] == [True]
    assert bank.check().findings == ()


def garbled(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b'"pinned": true') + 10 : content.index(b'"pinned": true') + 14] = b"null"
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        garbled,
        lambda path: os.truncate(path, 100),
        lambda path: path.write_bytes(b"[" * 100_000),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("bank.json")),
    ],
    ids=["garbled", "cut", "nested", "fifo", "folder", "link"],
)
def test_a_damaged_file_is_noticed_set_aside_and_written_anew(
    bank: PrefixBank, model: FakeModel, damage: Callable[[Path], Any]
) -> None:
    model.name("one", TOKENS, pin=True)
    damage(bank.root / "prefixes.json")
    with pytest.raises(IndexCorruptError, match="prefixbank repair"):
        namesfile.read(bank.root)
    assert [f.kind for f in bank.check().problems] == ["names"]
    repair(bank.root)
    assert names(bank) == {"one": True}
    assert any(path.name.startswith("prefixes.json-") for path in (bank.root / "quarantine").iterdir())
    assert repair(bank.root).steps == ()


def test_a_flipped_bit_never_passes_as_another_name_or_pin(bank: PrefixBank, model: FakeModel) -> None:
    model.name("one", TOKENS, pin=True)
    path = bank.root / "prefixes.json"
    content = path.read_bytes()
    kept = namesfile.read(bank.root)
    chance = random.Random(5)
    for _ in range(300):
        flipped = bytearray(content)
        at = chance.randrange(len(content) * 8)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        with suppress(IndexCorruptError):
            assert namesfile.read(bank.root) == kept  # white space between the values
    path.write_bytes(content)


def test_names_that_only_the_file_has_outlive_other_changes(bank: PrefixBank, model: FakeModel) -> None:
    """As after an older copy of the index was put back: naming something must not take them out of the file."""
    model.name("one", TOKENS, pin=True)
    with model.session.index.writing() as tx:
        tx.exec_driver_sql("DELETE FROM prefixes")
    model.name("two", TOKENS)
    assert names(bank) == {"one": True, "two": False}
    repair(bank.root)
    assert {p.name: p.pinned for p in bank.prefixes()} == {"one": True, "two": False}
