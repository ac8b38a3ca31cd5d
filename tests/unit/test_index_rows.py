"""Hold the rows of chunks, prefixes, namespaces and digests to their rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from prefixbank.bank import PrefixBank
from prefixbank.chunking import chunk_key, pack_token_ids
from prefixbank.errors import StorageError
from prefixbank.index import Index, chunk_rows, namespace_rows, prefix_rows, rates_rows, weights_rows
from prefixbank.values import ChunkKey, ChunkRecord, PrefixRecord, Rates, WeightsFile
from tests.fakekv import HYBRID, FakeModel

Record = Callable[..., ChunkRecord]
NOW_S = 1_000


@pytest.fixture
def index(model: FakeModel) -> Index:
    found: Index = model.session.index
    return found


@pytest.fixture
def record(model: FakeModel) -> Record:
    """Give a function that makes records of chunks; their files are made up."""

    def make(token_ids: Sequence[int], parent: ChunkRecord | None = None, **changes: Any) -> ChunkRecord:
        packed = pack_token_ids(token_ids)
        key = chunk_key(parent.key if parent else model.namespace.root_key, packed)
        values: dict[str, Any] = {
            "key": key,
            "parent_key": parent.key if parent else None,
            "namespace_id": model.namespace.id,
            "start": parent.end if parent else 0,
            "n_tokens": len(token_ids),
            "token_ids": packed,
            "file_name": f"{key.hex()}-00000000.safetensors",
            "data_offset": 8,
            "n_bytes": 5000,
            "disk_bytes": 8192,
            "digest": b"d" * 16,
        }
        return ChunkRecord(**{**values, **changes})

    return make


@pytest.fixture(autouse=True)
def in_step(model: FakeModel, bank: PrefixBank) -> Any:
    """Assert after each test that the kept sum of bytes is that of the rows; then drop the rows without files."""
    yield
    with model.session.index.writing() as tx:
        assert chunk_rows.disk_bytes(tx) == chunk_rows.totals(tx).disk_bytes
        for row in reversed(chunk_rows.list_all(tx)):
            assert chunk_rows.delete(tx, row)
        assert chunk_rows.disk_bytes(tx) == 0


def add(index: Index, *records: ChunkRecord, tick: int = 1) -> None:
    with index.writing() as tx:
        for each in records:
            assert chunk_rows.add(tx, each, tick, NOW_S)


def row_of(index: Index, key: ChunkKey) -> ChunkRecord | None:
    with index.reading() as tx:
        return chunk_rows.find(tx, [key]).get(key)


def test_a_row_comes_back_as_it_was_added(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 2**32 - 1])
    second = record([5], first, has_state=True)
    add(index, first, second, tick=7)
    as_added = [replace(each, last_used=7, last_used_at=NOW_S, hits=0, created_at=NOW_S) for each in (first, second)]
    keys = [first.key, second.key]
    with index.reading() as tx:
        ways = [
            list(chunk_rows.find(tx, keys).values()),
            list(chunk_rows.find_chain(tx, keys).values()),
            chunk_rows.list_all(tx),
            [
                *chunk_rows.children(tx, first.namespace_id, None, 1, 9),
                *chunk_rows.children(tx, first.namespace_id, first.key, 5, 9),
            ],
        ]
    for rows in ways:
        assert sorted(rows, key=lambda row: row.start) == as_added
        assert {row.has_state for row in rows} == {False, True}
        assert {type(row.has_state) for row in rows} == {bool}


def test_a_row_that_has_its_shard_is_not_replaced(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    add(index, first)
    with index.writing() as tx:
        assert not chunk_rows.add(tx, replace(first, file_name="other", n_bytes=1, disk_bytes=4096), 2, NOW_S)
    found = row_of(index, first.key)
    assert found is not None
    assert (found.file_name, found.last_used) == (first.file_name, 1)


def test_a_chunk_without_its_parent_is_not_added(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    second = record([5], first)
    with index.writing() as tx:
        assert not chunk_rows.add(tx, second, 1, NOW_S)
    assert row_of(index, second.key) is None


def test_sqlite_itself_keeps_a_parent_while_a_chunk_stands_on_it(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    add(index, first, record([5], first))
    with pytest.raises(StorageError, match="FOREIGN KEY"), index.writing() as tx:
        tx.exec_driver_sql("DELETE FROM chunks WHERE parent_key IS NULL")
    assert row_of(index, first.key) is not None


def test_a_chunk_with_children_is_not_deleted(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    second = record([5], first)
    add(index, first, second)
    with index.writing() as tx:
        assert not chunk_rows.delete(tx, first)
        assert chunk_rows.delete(tx, second)
        assert chunk_rows.delete(tx, first)
        assert not chunk_rows.delete(tx, first)  # gone already; counted once


def test_a_chunk_that_was_stored_again_meanwhile_is_neither_deleted_nor_healed(index: Index, record: Record) -> None:
    stale = record([1, 2, 3, 4])
    newer = replace(stale, file_name="newer.safetensors")
    add(index, newer)
    with index.writing() as tx:
        assert not chunk_rows.delete(tx, stale)
        assert not chunk_rows.heal(tx, stale)
    found = row_of(index, stale.key)
    assert found is not None
    assert found.file_name == "newer.safetensors"


def test_healing_deletes_a_row_that_nothing_stands_on(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    add(index, first)
    with index.writing() as tx:
        assert chunk_rows.heal(tx, first)
        assert not chunk_rows.heal(tx, first)
    assert row_of(index, first.key) is None


def test_healing_leaves_a_hole_that_is_filled_again(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    second = record([5], first)
    add(index, first, second)
    with index.writing() as tx:
        assert chunk_rows.heal(tx, first)
        assert not chunk_rows.heal(tx, first)
        assert chunk_rows.disk_bytes(tx) == second.disk_bytes
        assert chunk_rows.totals(tx).n_holes == 1
        assert chunk_rows.children(tx, first.namespace_id, None, 1, 9) == []
    hole = row_of(index, first.key)
    assert hole is not None
    assert (hole.file_name, hole.n_bytes, hole.disk_bytes) == (None, 0, 0)
    again = replace(first, file_name="again.safetensors", n_bytes=9000, disk_bytes=12288)
    add(index, again, tick=3)
    filled = row_of(index, first.key)
    assert filled is not None
    assert (filled.file_name, filled.disk_bytes, filled.last_used) == ("again.safetensors", 12288, 3)


def test_a_hole_is_not_filled_with_other_token_ids(index: Index, record: Record) -> None:
    """Keys can collide; a chunk of the same key and other ids must not slip under the children."""
    first = record([1, 2, 3, 4])
    add(index, first, record([5], first))
    with index.writing() as tx:
        chunk_rows.heal(tx, first)
        for other in (
            replace(first, token_ids=pack_token_ids([1, 2, 3, 9])),
            replace(first, start=4),
            replace(first, parent_key=first.key),
        ):
            assert not chunk_rows.add(tx, other, 2, NOW_S)
        assert chunk_rows.totals(tx).n_holes == 1


def test_children_are_those_of_one_namespace_parent_and_first_token(
    index: Index, bank: PrefixBank, record: Record
) -> None:
    other = FakeModel(bank, "other").namespace
    first = record([1, 2, 3, 4])
    tails = [record([5, number], first) for number in range(4)]
    add(index, first, *tails, record([6], first), record([5, 9]))
    add(index, record([1, 1], namespace_id=other.id, key=ChunkKey(b"o" * 16)))
    with index.writing() as tx:
        for tick, tail in enumerate(tails, 10):
            chunk_rows.touch(tx, [tail.key], tick, NOW_S)
        found = chunk_rows.children(tx, first.namespace_id, first.key, 5, 3)
        assert [child.key for child in found] == [tail.key for tail in reversed(tails[1:])]  # the last used first
        assert [c.token_ids for c in chunk_rows.children(tx, first.namespace_id, None, 5, 9)] == [
            pack_token_ids([5, 9])
        ]
        assert [c.key for c in chunk_rows.children(tx, other.id, None, 1, 9)] == [b"o" * 16]
        assert chunk_rows.count_children(tx, first.key) == 5


def test_shorter_siblings_are_the_tails_that_a_chunk_begins_with(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    covered = [record([5], first), record([5, 6], first)]
    add(index, first, *covered, record([5, 7], first), record([6], first), record([5, 6, 7, 8], first), record([5]))
    with index.reading() as tx:
        found = chunk_rows.shorter_siblings(tx, record([5, 6, 7], first))
    assert {tail.key for tail in found} == {tail.key for tail in covered}


def test_chunks_with_states_are_those_behind_given_ones_and_the_first_ones_of_the_prompt(
    index: Index, bank: PrefixBank, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeModel(bank, "other").namespace
    first, plain = record([1, 2, 3, 4], has_state=True), record([1, 2, 3])
    beginning, parting = record([1, 2], has_state=True), record([1, 3], has_state=True)
    foreign = record([1], namespace_id=other.id, key=ChunkKey(b"o" * 16), has_state=True)
    tails = [record([5, number], first, has_state=number > 0) for number in range(5)]
    behind = record([9], parting, has_state=True)
    add(index, first, plain, beginning, parting, foreign, *tails, behind)
    monkeypatch.setattr(chunk_rows, "KEYS_PER_QUERY", 2)
    with index.reading() as tx:

        def found(parents: list[ChunkRecord]) -> set[ChunkKey]:
            keys = [parent.key for parent in parents]
            rows = chunk_rows.with_state(tx, first.namespace_id, keys, pack_token_ids([1, 2, 3, 4, 5]))
            return {row.key for row in rows}

        assert found([]) == {first.key, beginning.key}
        assert found([first]) == {first.key, beginning.key, *(tail.key for tail in tails[1:])}
        assert found([first, plain, *tails, parting]) == found([first]) | {behind.key}


def test_ticks_never_repeat_and_touching_keeps_parents_as_young_as_children(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    second = record([5], first)
    add(index, first, second)
    with index.writing() as tx:
        ticks = [chunk_rows.next_tick(tx) for _ in range(3)]
        chunk_rows.touch(tx, [first.key, second.key], ticks[-1], 2000)
        chunk_rows.touch(tx, [], 99, 3000)
        rows = chunk_rows.find(tx, [first.key, second.key])
        order = [row.key for row, _ in chunk_rows.iter_by_use(tx)]
    assert ticks == sorted(set(ticks))
    assert {(row.last_used, row.last_used_at, row.hits) for row in rows.values()} == {(ticks[-1], 2000, 1)}
    assert order == [second.key, first.key]  # the child goes first


def test_a_chunk_gets_the_tick_of_its_last_use_and_all_its_hits(index: Index, record: Record) -> None:
    first, other = record([1, 2, 3, 4]), record([9])
    second, third = record([5, 6, 7, 8], first), record([5], first)
    add(index, first, other, second, third)
    uses = [[first, second], [other], [first, third], [other], [first]]
    with index.writing() as tx:
        before = chunk_rows.next_tick(tx)
        chunk_rows.touch_many(tx, [[each.key for each in use] for use in uses], 2000)
        rows = chunk_rows.find(tx, [each.key for each in (first, other, second, third)])
        assert chunk_rows.next_tick(tx) == before + 6
        order = [row.key for row, _ in chunk_rows.iter_by_use(tx)]
        chunk_rows.touch_many(tx, [[first.key]] * 2, 3000)
        again = chunk_rows.find(tx, [first.key])[first.key]
    assert (again.last_used - before, again.last_used_at, again.hits) == (8, 3000, 5)
    said = [(rows[each.key].last_used - before, rows[each.key].hits) for each in (first, second, third, other)]
    assert said == [(5, 3), (1, 1), (3, 1), (4, 2)]
    assert {row.last_used_at for row in rows.values()} == {2000}
    assert order == [each.key for each in (second, third, other, first)]


def test_uses_of_chunks_that_went_meanwhile_are_forgotten(index: Index, record: Record) -> None:
    first, gone = record([1, 2, 3, 4]), record([5])
    add(index, first)
    with index.writing() as tx:
        tick = chunk_rows.next_tick(tx)
        chunk_rows.touch_many(tx, [], 2000)
        chunk_rows.touch_many(tx, [()], 2000)
        chunk_rows.touch_many(tx, [[first.key, gone.key]], 2000)
        assert [(row.key, row.last_used) for row in chunk_rows.list_all(tx)] == [(first.key, tick + 2)]


def test_chunks_are_listed_by_use_with_their_children_and_without_token_ids(
    index: Index, bank: PrefixBank, record: Record
) -> None:
    other = FakeModel(bank, "other").namespace
    first = record([1, 2, 3, 4])
    tails = [record([5], first), record([6], first)]
    foreign = record([1], namespace_id=other.id, key=ChunkKey(b"o" * 16))
    add(index, foreign)
    add(index, first, *tails, tick=2)
    with index.reading() as tx:
        listed = list(chunk_rows.iter_by_use(tx))
        mine = list(chunk_rows.iter_by_use(tx, first.namespace_id))
        rows = chunk_rows.find(tx, [each.key for each in (foreign, first, *tails)])
    assert listed[1:] == mine
    assert [n_children for _, n_children in listed] == [0, 0, 0, 2]
    assert {row.key: row for row, _ in listed} == {key: replace(row, token_ids=b"") for key, row in rows.items()}


def test_a_list_that_is_left_early_holds_no_lock(index: Index, record: Record) -> None:
    add(index, record([1]), record([2]))
    with index.reading() as tx:
        rows = chunk_rows.iter_by_use(tx)
        next(rows)
        rows.close()
    with index.writing() as tx:
        chunk_rows.next_tick(tx)


def test_many_chunks_are_deleted_as_one_would_be(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    second = record([5, 6, 7, 8], first)
    third = record([9], second)
    changed, kept, absent = record([2]), record([3]), record([4])
    add(index, first, second, third, changed, kept)
    with index.writing() as tx:
        prefix_rows.name(tx, prefix_of(third, "shots"))
        before = chunk_rows.disk_bytes(tx)
        assert chunk_rows.delete_many(tx, [first, replace(changed, file_name="stale"), absent]) == set()
        assert chunk_rows.disk_bytes(tx) == before
        assert chunk_rows.delete_many(tx, [third, second, absent, third]) == {third.key, second.key}
        assert chunk_rows.disk_bytes(tx) == before - third.disk_bytes - second.disk_bytes
        assert {row.key for row in chunk_rows.list_all(tx)} == {first.key, changed.key, kept.key}
        assert prefix_rows.list_all(tx)[0].chunk_key is None
        assert chunk_rows.delete_many(tx, []) == set()


def test_a_hole_that_nothing_stands_on_is_deleted_as_a_hole(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    second = record([5], first)
    add(index, first, second)
    with index.writing() as tx:
        chunk_rows.heal(tx, first)
        hole = chunk_rows.find(tx, [first.key])[first.key]
        assert chunk_rows.delete_many(tx, [second, first]) == {second.key}
        assert chunk_rows.delete_many(tx, [hole]) == {first.key}


def test_the_names_of_files_are_those_of_all_chunks_but_holes(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    second = record([5], first)
    add(index, first, second)
    with index.writing() as tx:
        assert chunk_rows.file_names(tx) == {first.file_name, second.file_name}
        chunk_rows.heal(tx, first)
        assert chunk_rows.file_names(tx) == {second.file_name}


def chain_of(record: Record, length: int, first_id: int = 1) -> list[ChunkRecord]:
    records: list[ChunkRecord] = []
    for number in range(length):
        records.append(record([first_id, number], records[-1] if records else None))
    return records


def test_a_chain_is_found_however_its_rows_lie(index: Index, record: Record) -> None:
    together, torn, other = chain_of(record, 9), chain_of(record, 9, 2), chain_of(record, 9, 3)
    add(index, *torn[:2])
    add(index, *together)
    add(index, *(each for pair in zip(torn[2:6], other, strict=False) for each in pair))
    add(index, *torn[6:8])  # the last one is not there
    with index.reading() as tx:
        for chain in (together, torn, other):
            keys = [each.key for each in chain]
            for low in range(9):
                for high in range(low + 1, 10):
                    there = chunk_rows.find(tx, keys[low:high])
                    found = chunk_rows.find_chain(tx, keys[low:high])
                    assert found == (there if keys[low] in there else {})
        strangers = [ChunkKey(b"s" * 16)]
        assert chunk_rows.find_chain(tx, [*strangers, *keys]) == {}
        assert chunk_rows.find_chain(tx, [together[0].key, *strangers, together[1].key]).keys() == {
            together[0].key,
            together[1].key,
        }


def test_no_match_store_use_or_eviction_reads_all_chunks(bank: PrefixBank, index: Index) -> None:
    """Nor all of a namespace, which may be as many. An eviction reads them by use, and stops."""
    statements: list[str] = []
    with index.reading() as tx:
        tx.connection.driver_connection.set_trace_callback(statements.append)
    for model in (FakeModel(bank), FakeModel(bank, "hybrid", layout=HYBRID)):
        model.name("shots", range(11), ends=[4, 6, 11])
        model.match([*range(9), 99])
        model.use(range(11))
    bank.prune(max_bytes=0)
    with index.reading() as tx:
        sqlite = tx.connection.driver_connection
        sqlite.set_trace_callback(None)
        asked = {s for s in statements if s.split(maxsplit=1)[0] in ("SELECT", "WITH", "INSERT", "UPDATE", "DELETE")}
        steps = {step for statement in asked for *_, step in sqlite.execute(f"EXPLAIN QUERY PLAN {statement}")}
    of_chunks = {step for step in steps if re.search(r"\b(chunks|child)\b", step)}
    by_use = "SCAN chunks USING INDEX ix_chunks_last_used_start"
    assert len(of_chunks) > 4
    assert by_use in of_chunks
    assert [s for s in of_chunks - {by_use} if not s.startswith("SEARCH") or "ix_chunks_namespace_id" in s] == []


def test_more_keys_than_sqlite_binds_can_be_asked_for(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    add(index, first)
    asked = [ChunkKey(number.to_bytes(16, "big")) for number in range(33_000)]
    with index.reading() as tx:
        assert list(chunk_rows.find(tx, [*asked, first.key])) == [first.key]


def prefix_of(record: ChunkRecord, name: str, *, pinned: bool = False) -> PrefixRecord:
    return PrefixRecord(name, record.namespace_id, record.key, record.end, pinned, "0" * 64, NOW_S)


def test_a_name_moves_and_its_pin_stays(index: Index, record: Record) -> None:
    first, other = record([1, 2, 3, 4]), record([2])
    add(index, first, other)
    with index.writing() as tx:
        prefix_rows.name(tx, prefix_of(first, "shots", pinned=True))
        prefix_rows.name(tx, prefix_of(other, "shots"))
        (found,) = prefix_rows.list_all(tx, "shots")
        assert found.chunk_key == other.key
        assert found.pinned
        assert prefix_rows.set_pinned(tx, "shots", False) == 1
        assert prefix_rows.set_pinned(tx, "nobody", True) == 0
        assert not prefix_rows.list_all(tx)[0].pinned
        prefix_rows.move(tx, other.key, first.key)
        assert prefix_rows.list_all(tx)[0].chunk_key == first.key


def test_a_prefix_whose_last_chunk_goes_keeps_its_name(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    add(index, first)
    with index.writing() as tx:
        prefix_rows.name(tx, prefix_of(first, "shots", pinned=True))
        assert chunk_rows.delete(tx, first)
        (found,) = prefix_rows.list_all(tx)
        assert (found.chunk_key, found.n_tokens, found.pinned) == (None, 4, True)
        assert prefix_rows.pinned_chain_keys(tx) == set()
        assert prefix_rows.delete(tx, "shots") == 1
        assert prefix_rows.delete(tx, "shots") == 0


def test_healing_a_named_chunk_leaves_a_hole_that_the_name_goes_on_naming(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    add(index, first)
    with index.writing() as tx:
        prefix_rows.name(tx, prefix_of(first, "shots", pinned=True))
        assert chunk_rows.heal(tx, first)
        assert not chunk_rows.heal(tx, first)
        (found,) = prefix_rows.list_all(tx)
        assert found.chunk_key == first.key
        assert chunk_rows.totals(tx).n_holes == 1


def test_a_pin_holds_the_whole_chain(index: Index, record: Record) -> None:
    first = record([1, 2, 3, 4])
    second = record([5, 6, 7, 8], first)
    third = record([9], second)
    add(index, first, second, third, record([8], second), record([7]))
    with index.writing() as tx:
        prefix_rows.name(tx, prefix_of(third, "pinned", pinned=True))
        prefix_rows.name(tx, prefix_of(first, "loose"))
        assert prefix_rows.pinned_chain_keys(tx) == {first.key, second.key, third.key}
        assert prefix_rows.chain_keys(tx, [second.key]) == {first.key, second.key}
        assert prefix_rows.chain_keys(tx, []) == set()


def test_chains_of_more_prefixes_than_sqlite_binds_are_found(
    index: Index, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_rows, "KEYS_PER_QUERY", 2)
    first = record([1, 2, 3, 4])
    tails = [record([5, number], first) for number in range(5)]
    add(index, first, *tails)
    with index.reading() as tx:
        assert prefix_rows.chain_keys(tx, [tail.key for tail in tails]) == {first.key, *(tail.key for tail in tails)}


def test_one_name_can_be_given_once_for_each_namespace(index: Index, bank: PrefixBank, record: Record) -> None:
    other = FakeModel(bank, "other").namespace
    first = record([1, 2, 3, 4])
    foreign = record([1], namespace_id=other.id, key=ChunkKey(b"o" * 16))
    add(index, first, foreign)
    with index.writing() as tx:
        for each in (first, foreign, first):
            prefix_rows.name(tx, prefix_of(each, "shots"))
        assert [p.namespace_id for p in prefix_rows.list_all(tx, "shots")] == [first.namespace_id, other.id]
        assert prefix_rows.set_pinned(tx, "shots", True, other.id) == 1
        assert prefix_rows.pinned_chain_keys(tx) == {foreign.key}


def test_namespaces_are_told_apart_by_fingerprint_and_salt(bank: PrefixBank, index: Index, model: FakeModel) -> None:
    again, salted, other = FakeModel(bank), FakeModel(bank, salt=b"s"), FakeModel(bank, "other")
    assert again.namespace == model.namespace
    assert len({m.namespace.id for m in (model, salted, other)}) == 3
    assert len({m.namespace.root_key for m in (model, salted, other)}) == 3
    with index.reading() as tx:
        assert [usage.n_chunks for usage in namespace_rows.list_usage(tx)] == [0, 0, 0]
        assert namespace_rows.find(tx, "00" * 32, "") is None


def test_a_digest_is_recalled_for_exactly_the_state_it_was_made_of(index: Index) -> None:
    state = WeightsFile("/m/model.safetensors", 1, 2**63 - 1, 100, 5, 6)
    with index.writing() as tx:
        weights_rows.remember(tx, {state: "0f" * 32})
        weights_rows.remember(tx, {state: "ab" * 32})
        assert weights_rows.recall(tx, state) == "ab" * 32
        for name in ("path", "device", "inode", "n_bytes", "mtime_ns", "ctime_ns"):
            value = "/other" if name == "path" else 77
            assert weights_rows.recall(tx, replace(state, **{name: value})) is None
        newer = replace(state, ctime_ns=7)
        weights_rows.remember(tx, {newer: "de" * 32})
        assert weights_rows.recall(tx, state) is None  # one state of a path is kept
        assert tx.execute(sa.text("SELECT count(*) FROM weights_digests")).scalar_one() == 1


def test_rates_come_back_as_they_were_measured_last(bank: PrefixBank, index: Index, model: FakeModel) -> None:
    other = FakeModel(bank, "other").namespace
    measured = Rates(model.namespace.id, "cpu", 0.25, 1e-3, None, None, NOW_S)
    on_gpu = replace(measured, device="Apple M3 Max gpu", compute_s=None, compute_s_per_token=None)
    of_other = Rates(other.id, "cpu", 1.5, 2e-3, 1e-4, 3e-10, NOW_S)
    with index.writing() as tx:
        for each in (measured, on_gpu, of_other):
            rates_rows.remember(tx, each)
        assert rates_rows.find(tx, model.namespace.id, "cpu") == measured
        assert rates_rows.find(tx, model.namespace.id, "cuda") is None
        later = replace(measured, load_s=1e-4, load_s_per_byte=2e-10, compute_s=0.125, updated_at=NOW_S + 1)
        rates_rows.remember(tx, later)
        assert rates_rows.list_all(tx) == [on_gpu, later, of_other]


def test_rates_go_with_their_namespace_and_are_not_kept_without_it(index: Index, model: FakeModel) -> None:
    measured = Rates(model.namespace.id, "cpu", 0.25, 1e-3, 1e-4, 2e-10, NOW_S)
    with index.writing() as tx:
        rates_rows.remember(tx, measured)
        tx.exec_driver_sql("DELETE FROM namespaces")
        assert rates_rows.list_all(tx) == []
        rates_rows.remember(tx, measured)
        assert rates_rows.list_all(tx) == []
