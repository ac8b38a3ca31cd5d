"""Records of chunks and prefixes, and a way to add them to an index and find them there."""

from __future__ import annotations

from collections.abc import Callable

from prefixbank.index import Index, chunk_rows
from prefixbank.values import ChunkKey, ChunkRecord, PrefixRecord

Record = Callable[..., ChunkRecord]
NOW_S = 1_000


def add(index: Index, *records: ChunkRecord, tick: int = 1) -> None:
    with index.writing() as tx:
        for each in records:
            assert chunk_rows.add(tx, each, tick, NOW_S)


def row_of(index: Index, key: ChunkKey) -> ChunkRecord | None:
    with index.reading() as tx:
        return chunk_rows.find(tx, [key]).get(key)


def prefix_of(record: ChunkRecord, name: str, *, pinned: bool = False) -> PrefixRecord:
    return PrefixRecord(name, record.namespace_id, record.key, record.end, pinned, "0" * 64, NOW_S)
