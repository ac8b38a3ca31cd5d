"""Hold eviction to its order and its pins, and its plans to what is then done."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixbank import eviction
from prefixbank.bank import PrefixBank
from prefixbank.errors import BankReadOnlyError, UnknownPrefixError
from prefixbank.eviction import PrunePolicy
from prefixbank.index import chunk_rows
from prefixbank.values import ChunkRecord
from tests.fakekv import FakeModel, disk_usage

BLOCK = 4096
"""What one chunk of the fake model takes on disk."""

A, B, C, D = ([letter] * 4 for letter in (1, 2, 3, 4))


def starts(chunks: tuple[eviction.PlannedChunk, ...]) -> list[int]:
    return [planned.record.start for planned in chunks]


def test_what_was_used_least_recently_goes_first(bank: PrefixBank, model: FakeModel) -> None:
    for token_ids in (A, B, C):
        model.store(token_ids)
    model.use(A)
    gone = bank.prune(max_bytes=2 * BLOCK)
    assert [planned.reason for planned in gone.chunks] == ["budget"]
    assert model.held(A, B, C) == [4, 0, 4]
    bank.prune(max_bytes=BLOCK)
    assert model.held(A, B, C) == [4, 0, 0]


def test_the_clock_does_not_order_eviction(bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for token_ids, now in ((A, 3e9), (B, 1e9), (C, 2e9)):
        set_clock(monkeypatch, now)
        model.store(token_ids)
    bank.prune(max_bytes=2 * BLOCK)
    assert model.held(A, B, C) == [0, 4, 4]


def test_a_match_alone_is_no_use(bank: PrefixBank, model: FakeModel) -> None:
    model.store(A)
    model.store(B)
    model.match(A)
    bank.prune(max_bytes=BLOCK)
    assert model.held(A, B) == [0, 4]


def test_uses_that_are_not_written_yet_count_in_a_prune(bank: PrefixBank, model: FakeModel) -> None:
    model.store(A)
    model.store(B)
    model.session.note_use(model.match(A))  # notes are written in groups
    bank.prune(max_bytes=BLOCK)
    assert model.held(A, B) == [4, 0]


def test_children_go_before_their_parents(bank: PrefixBank, model: FakeModel) -> None:
    model.store([*A, *B, *C, 9])
    model.store([*A, *B, *D])
    planned = bank.prune(max_bytes=0, dry_run=True)
    assert len(planned.chunks) == 5
    gone: set[Any] = set()
    for each in planned.chunks:
        assert each.record.parent_key not in gone
        gone.add(each.record.key)
    assert bank.prune(max_bytes=3 * BLOCK).freed_bytes == 2 * BLOCK
    assert model.held([*A, *B, *C, 9], [*A, *B, *D]) == [8, 12]


def test_a_parent_that_others_stand_on_outlives_its_age(bank: PrefixBank, model: FakeModel) -> None:
    model.store(A)
    model.store(D)
    model.store([*A, *B])
    bank.prune(max_bytes=2 * BLOCK)
    assert model.held([*A, *B], D) == [8, 0]


def test_a_parent_that_is_older_than_its_child_goes_right_behind_it(bank: PrefixBank, model: FakeModel) -> None:
    """Uses never leave it so; a chunk must not be kept for ever where something did."""
    for token_ids in ([*A, *B], C, D):
        model.store(token_ids)
    child = model.match([*A, *B]).chunks[1]
    with model.session.index.writing() as tx:
        chunk_rows.touch(tx, [child.key], 3, 1)
    removed = bank.prune(max_bytes=0)
    assert bank.chunks() == []
    assert [(planned.record.last_used, planned.record.start) for planned in removed.chunks] == [
        (2, 0),
        (3, 4),
        (1, 0),
        (3, 0),
    ]


def test_the_longer_part_of_a_prompt_goes_before_the_shared_one(bank: PrefixBank, model: FakeModel) -> None:
    for last in (B, C, D):
        model.store([*A, *last])
    for n_left in (3, 2, 1):
        bank.prune(max_bytes=n_left * BLOCK)
        assert model.held(A) == [4]


@pytest.mark.parametrize("pin", [True, False])
def test_prune_keeps_pinned_prefixes(bank: PrefixBank, model: FakeModel, pin: bool) -> None:
    model.name("shots", [*A, *B, 7], pin=pin)
    model.store([*A, *C])
    model.store([*A, *B, *D])
    removed = bank.prune(max_bytes=0)
    assert model.held([*A, *B, 7], [*A, *C]) == ([9, 4] if pin else [0, 0])
    assert removed.kept_bytes == disk_usage(bank) == (3 * BLOCK if pin else 0)
    assert bank.prefixes("shots")[0].pinned == pin


def test_unpinned_prefixes_are_evicted_again_and_keep_their_name(bank: PrefixBank, model: FakeModel) -> None:
    model.name("shots", A, pin=True)
    bank.unpin("shots")
    bank.prune(max_bytes=0)
    (prefix,) = bank.prefixes("shots")
    assert prefix.chunk_key is None
    assert bank.chain(prefix) == []
    assert [finding.kind for finding in bank.check().findings] == ["evicted"]
    bank.pin("shots")
    model.name("shots", A)
    assert bank.prefixes("shots")[0].pinned
    for unknown in (bank.pin, bank.unpin, bank.remove, bank.prefixes):
        with pytest.raises(UnknownPrefixError, match="nobody"):
            unknown("nobody")


def test_a_prefix_that_is_pinned_after_the_plan_stays(bank: PrefixBank, model: FakeModel) -> None:
    model.name("shots", [*A, *B])
    model.store(C)
    with model.session.index.reading() as tx:
        todo = eviction.plan(tx, PrunePolicy(max_bytes=0))
    bank.pin("shots")
    done = eviction.execute(model.session.index, model.session.shards, todo)
    assert [planned.record.start for planned in done.chunks] == [0]
    assert model.held([*A, *B], C) == [8, 0]


def test_a_chunk_that_was_built_upon_after_the_plan_stays(bank: PrefixBank, model: FakeModel) -> None:
    model.store(A)
    with model.session.index.reading() as tx:
        todo = eviction.plan(tx, PrunePolicy(max_bytes=0))
    model.store([*A, *B])
    assert eviction.execute(model.session.index, model.session.shards, todo).chunks == ()
    assert model.held([*A, *B]) == [8]


def test_a_chunk_that_was_stored_again_after_the_plan_stays(bank: PrefixBank, model: FakeModel) -> None:
    model.store(A)
    with model.session.index.reading() as tx:
        todo = eviction.plan(tx, PrunePolicy(max_bytes=0))
    bank.prune(max_bytes=0)
    model.store(A)
    assert eviction.execute(model.session.index, model.session.shards, todo).chunks == ()
    assert model.held(A) == [4]


def test_a_hole_that_nothing_stands_on_any_more_goes(bank: PrefixBank, model: FakeModel) -> None:
    model.store([*A, *B])
    model.path_of(model.match(A).chunks[0]).unlink()
    assert model.held([*A, *B]) == [0]
    assert bank.stats().n_holes == 1
    assert [planned.reason for planned in bank.prune(max_bytes=0).chunks] == ["budget"]
    assert [planned.reason for planned in bank.prune(max_bytes=0).chunks] == ["hole"]
    assert bank.chunks() == []


def set_clock(monkeypatch: pytest.MonkeyPatch, now_s: float) -> None:
    for module in ("bank", "session", "storing"):
        monkeypatch.setattr(f"prefixbank.{module}.time.time", lambda: now_s)


DAY_S = 86400.0


@pytest.mark.parametrize("unused_for", ["30d", 30 * DAY_S])
def test_what_was_unused_for_so_long_goes(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch, unused_for: str | float
) -> None:
    set_clock(monkeypatch, 1e9)
    model.store([*A, *B])
    model.name("pinned", C, pin=True)
    model.store(D)
    set_clock(monkeypatch, 1e9 + 10 * DAY_S)
    model.use(A)
    set_clock(monkeypatch, 1e9 + 30 * DAY_S)
    assert bank.prune(unused_for=unused_for).chunks == ()
    set_clock(monkeypatch, 1e9 + 30 * DAY_S + 1)
    removed = bank.prune(unused_for=unused_for)
    assert [planned.reason for planned in removed.chunks] == ["unused"] * 2
    assert model.held([*A, *B], C, D) == [4, 4, 0]
    set_clock(monkeypatch, 1e9 + 40 * DAY_S + 1)
    bank.prune(unused_for=unused_for)
    assert model.held(A, C) == [0, 4]


def test_pruning_a_namespace_touches_no_other(bank: PrefixBank, model: FakeModel) -> None:
    other = FakeModel(bank, "other")
    for user in (model, other):
        user.store([*A, *B, 1])
        user.name("shots", C, pin=True)
    removed = bank.prune(namespace=model.namespace.fingerprint[:8].upper())
    assert [planned.reason for planned in removed.chunks] == ["namespace"] * 3
    assert model.held([*A, *B, 1], C) == [0, 4]
    assert other.held([*A, *B, 1], C) == [9, 4]
    bank.prune(namespace=other.namespace.fingerprint, max_bytes=3 * BLOCK)
    assert other.held([*A, *B, 1], C) == [4, 4]
    assert model.held(C) == [4]


@pytest.mark.parametrize("fingerprint", ["", "ab", "zzzz", "0000000000"])
def test_a_namespace_that_is_not_named_clearly_is_refused(bank: PrefixBank, model: FakeModel, fingerprint: str) -> None:
    model.store(A)
    with pytest.raises(UnknownPrefixError, match="namespaces begin with"):
        bank.prune(namespace=fingerprint)
    assert model.held(A) == [4]


@pytest.mark.parametrize(
    "policy", [{"max_bytes": 3 * BLOCK}, {"unused_for": 0}, {"max_bytes": 0}, {"max_bytes": "1GB"}, {}], ids=str
)
def test_a_dry_run_changes_nothing_and_says_what_is_then_done(
    bank: PrefixBank, model: FakeModel, unchanged: Callable[[Path], Any], policy: dict[str, Any]
) -> None:
    choose = random.Random(5)
    for _ in range(12):
        model.store([choose.randrange(2) for _ in range(choose.randrange(1, 15))])
    model.name("pinned", [1, 1, 1, 1, 0], pin=True)
    with unchanged(bank.root):
        planned = bank.prune(**policy, dry_run=True)
    before = disk_usage(bank)
    assert bank.prune(**policy) == planned
    assert disk_usage(bank) == before - planned.freed_bytes == planned.kept_bytes


def test_removing_a_name_keeps_what_others_need(bank: PrefixBank, model: FakeModel) -> None:
    model.name("one", [*A, *B, 1])
    model.name("two", [*A, *C])
    model.name("same", [*A, *B, 1])
    model.store([*D, *A])
    assert bank.remove("same").chunks == ()
    planned = bank.remove("one", dry_run=True)
    assert len(bank.prefixes("one")) == 1
    assert starts(planned.chunks) == [8, 4]
    assert bank.remove("one") == planned
    assert model.held([*A, *B, 1], [*A, *C], [*D, *A]) == [4, 8, 8]
    assert [prefix.name for prefix in bank.prefixes()] == ["two"]


def test_removing_a_pinned_name_frees_it(bank: PrefixBank, model: FakeModel) -> None:
    model.name("shots", [*A, *B], pin=True)
    assert len(bank.remove("shots").chunks) == 2
    assert bank.chunks() == []


def test_removing_a_name_keeps_what_longer_prompts_stand_on(bank: PrefixBank, model: FakeModel) -> None:
    model.name("shots", [*A, *B])
    model.store([*A, *B, *C])
    assert bank.remove("shots").chunks == ()
    assert model.held([*A, *B, *C]) == [12]


def test_a_read_only_bank_removes_nothing(tmp_path: Path, unchanged: Callable[[Path], Any]) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4) as bank:
        FakeModel(bank).name("shots", A)
    with unchanged(tmp_path), PrefixBank.open(tmp_path, read_only=True) as bank:
        assert len(bank.prune(max_bytes=0, dry_run=True).chunks) == 1
        assert len(bank.remove("shots", dry_run=True).chunks) == 1
        for action in (
            lambda: bank.prune(max_bytes=0),
            lambda: bank.remove("shots"),
            lambda: bank.pin("shots"),
            lambda: bank.unpin("shots"),
        ):
            with pytest.raises(BankReadOnlyError):
                action()


def test_deleting_more_rows_than_one_transaction_holds(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_ROWS_PER_TRANSACTION", 3)
    model.store(list(range(50)))
    planned = bank.prune(max_bytes=0, dry_run=True)
    assert len(planned.chunks) == 13
    assert bank.prune(max_bytes=0) == planned
    assert disk_usage(bank) == 0


def test_a_shard_that_is_gone_already_does_not_stop_eviction(bank: PrefixBank, model: FakeModel) -> None:
    model.store([*A, *B, *C])
    missing: ChunkRecord = bank.chunks()[1]
    model.path_of(missing).unlink()
    assert len(bank.prune(max_bytes=0).chunks) == 3
    assert bank.chunks() == []
