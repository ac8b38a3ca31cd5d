"""Hold the rows of chunks to their rules when they are added, deleted, healed and filled again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixbank.chunking import pack_token_ids
from prefixbank.errors import StorageError
from prefixbank.index import Index, chunk_rows, prefix_rows
from tests.unit.rows.records import NOW_S, Record, add, prefix_of, row_of


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
