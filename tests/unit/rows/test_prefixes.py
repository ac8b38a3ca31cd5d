"""Hold the rows of prefixes to their rules: names, pins, and the chains that they stand for."""

from __future__ import annotations

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.index import Index, chunk_rows, prefix_rows
from prefixbank.values import ChunkKey
from tests.fakekv import FakeModel
from tests.unit.rows.records import Record, add, prefix_of


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
