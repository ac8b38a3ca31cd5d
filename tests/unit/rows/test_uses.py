"""Hold the ticks and hits of chunks to their uses, and the list by use to its order."""

from __future__ import annotations

from dataclasses import replace

from prefixbank.bank import PrefixBank
from prefixbank.index import Index, chunk_rows
from prefixbank.values import ChunkKey
from tests.fakekv import FakeModel
from tests.unit.rows.records import Record, add


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
