"""Hold the search for chunks to finding all that it should, however many, and to reading no more."""

from __future__ import annotations

import re

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids
from prefixbank.index import Index, chunk_rows
from prefixbank.values import ChunkKey, ChunkRecord
from tests.fakekv import HYBRID, FakeModel
from tests.unit.rows.records import NOW_S, Record, add


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
