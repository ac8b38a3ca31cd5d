"""Hold the budget: by every store, after reopening, and with all files that take room counted."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from prefixbank import eviction
from prefixbank.bank import PrefixBank
from prefixbank.errors import BankBusyError
from tests.fakekv import FakeModel, disk_usage

BLOCK = 4096
"""What one chunk of the fake model takes on disk."""

A, B, C, D = ([letter] * 4 for letter in (1, 2, 3, 4))


@pytest.mark.parametrize("n_blocks", [1, 3, 8])
def test_the_budget_is_held_by_every_store(tmp_path: Path, n_blocks: int) -> None:
    choose = random.Random(n_blocks)
    with PrefixBank.open(tmp_path, chunk_tokens=4, durability="fast", max_bytes=n_blocks * BLOCK) as bank:
        model = FakeModel(bank)
        for _ in range(40):
            token_ids = [choose.randrange(3) for _ in range(choose.randrange(1, 4 * n_blocks))]
            stored = model.store(token_ids)
            assert stored.n_tokens == len(token_ids)
            assert disk_usage(bank) <= n_blocks * BLOCK
            assert model.held(token_ids) == [len(token_ids)]
        assert bank.stats().disk_bytes == disk_usage(bank)
        assert bank.check(read_data=True).findings == ()


def test_a_store_does_not_evict_what_it_builds_upon(tmp_path: Path) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4, max_bytes=3 * BLOCK) as bank:
        model = FakeModel(bank)
        model.store(A)
        model.store(B)
        model.store(C)
        assert model.store([*A, *D]).n_tokens == 8
        assert model.held([*A, *D], B, C) == [8, 0, 4]


@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")
@pytest.mark.parametrize("pinned", [False, True])
def test_what_does_not_fit_is_refused_and_evicts_nothing(tmp_path: Path, pinned: bool) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4, max_bytes=2 * BLOCK) as bank:
        model = FakeModel(bank)
        model.name("a", A, pin=pinned)
        model.store(B)
        stored = model.store([*C, *D] if pinned else [*C, *D, 5])
        assert (stored.n_tokens, stored.n_written_bytes) == (0, 0)
        assert "budget of 8192 bytes" in stored.refused
        assert model.held(A, B) == [4, 4]
        assert bank.stats().session["refused_stores"] == 1
        assert model.store([*B, *C] if not pinned else C).refused == ""
        assert disk_usage(bank) <= 2 * BLOCK


def test_a_refused_store_is_told_once(tmp_path: Path) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4, max_bytes=0) as bank:
        model = FakeModel(bank)
        with pytest.warns(match="raise max_bytes") as told:
            model.store(A)
            model.store(B)
        assert len(told) == 1


def test_reopening_with_a_smaller_budget_holds_it_at_once_and_over_all_models(tmp_path: Path) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4) as bank:
        old, new = FakeModel(bank, "old"), FakeModel(bank, "new")
        for token_ids in (A, B, C):
            old.store(token_ids)
        for token_ids in (A, B):
            new.store(token_ids)
        assert disk_usage(bank) == 5 * BLOCK
    with PrefixBank.open(tmp_path, max_bytes=3 * BLOCK) as bank:
        assert disk_usage(bank) == 3 * BLOCK
        assert FakeModel(bank, "old").held(A, B, C) == [0, 0, 4]
        assert FakeModel(bank, "new").held(A, B) == [4, 4]
    PrefixBank.open(tmp_path, max_bytes=0, read_only=True).close()
    with PrefixBank.open(tmp_path) as bank:
        assert disk_usage(bank) == 3 * BLOCK


def test_a_budget_that_pins_exceed_is_told_when_the_bank_is_opened(tmp_path: Path) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4) as bank:
        FakeModel(bank).name("a", [*A, *B], pin=True)
    with pytest.warns(match="pinned"):
        bank = PrefixBank.open(tmp_path, max_bytes=BLOCK)
    with bank:
        assert FakeModel(bank).held([*A, *B]) == [8]


def age(bank: PrefixBank, seconds: float, *folders: str) -> None:
    """Make the files in folders of the bank look older."""
    for folder in folders:
        for path in (bank.root / folder).rglob("*"):
            if path.is_file():
                then = path.stat().st_mtime - seconds
                os.utime(path, (then, then))


def test_leftovers_are_deleted_only_after_the_grace(bank: PrefixBank, model: FakeModel) -> None:
    model.store(A)
    (bank.root / "tmp" / "half.safetensors").write_bytes(b"half a shard")
    folder = bank.root / "shards" / "ab"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)
    (folder / "abcd.safetensors").write_bytes(b"a shard whose row was never committed")
    age(bank, eviction.GRACE_S - 60, "tmp", "shards")
    assert bank.prune().files == ()
    assert bank.check().findings == ()
    age(bank, 120, "tmp", "shards")
    assert {finding.kind for finding in bank.check().findings} == {"leftover"}
    planned = bank.prune(dry_run=True)
    removed = bank.prune()
    assert removed == planned
    assert {file.path for file in removed.files} == {"tmp/half.safetensors", "shards/ab/abcd.safetensors"}
    assert removed.freed_bytes == 2 * BLOCK
    assert model.held(A) == [4]
    assert bank.check().findings == ()


def test_a_file_of_a_shards_name_in_another_folder_is_left_over(bank: PrefixBank, model: FakeModel) -> None:
    model.store(A)
    (named,) = (bank.root / "shards").rglob("*.safetensors")
    copies = [
        bank.root / "tmp" / named.name,
        bank.root / "shards" / named.name,
        bank.root / "shards" / "zz" / named.name,
    ]
    for copy in copies:
        copy.parent.mkdir(mode=0o700, exist_ok=True)
        copy.write_bytes(named.read_bytes())
    age(bank, eviction.GRACE_S + 60, "tmp", "shards")
    removed = bank.prune()
    assert {bank.root / file.path for file in removed.files} == set(copies)
    assert model.held(A) == [4]


def test_files_that_a_lost_index_knew_do_not_count_for_ever(tmp_path: Path) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4) as bank:
        FakeModel(bank).store([*A, *B, *C])
        age(bank, eviction.GRACE_S + 60, "shards")
    (tmp_path / "index.sqlite3").unlink()
    with pytest.warns(match="made anew"):
        bank = PrefixBank.open(tmp_path, max_bytes=2 * BLOCK)
    with bank:
        assert FakeModel(bank).store([*A, *D]).n_tokens == 8
        assert disk_usage(bank) <= 2 * BLOCK


def lowest_free_descriptor() -> int:
    probe = os.dup(0)
    os.close(probe)
    return probe


def test_a_budget_that_can_not_be_held_leaves_no_bank_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4) as bank:
        FakeModel(bank).store(A)

    def busy(*_: object) -> None:
        raise BankBusyError("another process holds the index")

    monkeypatch.setattr(eviction, "execute", busy)
    before = lowest_free_descriptor()
    with pytest.raises(BankBusyError):
        PrefixBank.open(tmp_path, max_bytes=0)
    assert lowest_free_descriptor() == before


def test_quarantined_files_count_and_go_first(bank: PrefixBank, model: FakeModel) -> None:
    model.store(A)
    model.store(B)
    first = model.match(A).chunks[0]
    model.path_of(first).write_bytes(b"damaged")
    assert model.held(A, B) == [0, 4]
    assert bank.stats().quarantined_bytes == BLOCK
    assert bank.prune(max_bytes=2 * BLOCK).files == ()
    removed = bank.prune(max_bytes=BLOCK)
    assert [file.path for file in removed.files] == [f"quarantine/{first.file_name}"]
    assert removed.chunks == ()
    assert disk_usage(bank) == removed.kept_bytes == BLOCK
    assert model.held(B) == [4]


def test_quarantined_files_make_room_for_a_store(tmp_path: Path) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4, max_bytes=2 * BLOCK) as bank:
        model = FakeModel(bank)
        model.store(A)
        model.store(B)
        (damaged,) = model.match(A).chunks
        model.path_of(damaged).write_bytes(bytes(damaged.n_bytes))
        model.held(A)
        assert disk_usage(bank) == 2 * BLOCK
        assert model.store(C).n_tokens == 4
        assert model.held(B, C) == [4, 4]
        assert disk_usage(bank) == 2 * BLOCK
