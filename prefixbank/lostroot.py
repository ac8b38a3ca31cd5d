"""Own what a bank's chunks say of its `bank.json` where that is lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from prefixbank.errors import ShardError
from prefixbank.proving import read_place
from prefixbank.rootfile import DEFAULT_CHUNK_TOKENS, MAX_CHUNK_TOKENS
from prefixbank.shards import FILE_NAME, ShardStore
from prefixbank.values import ChunkRecord

__all__ = ["find_chunk_tokens"]


def find_chunk_tokens(records: Sequence[ChunkRecord], shards: ShardStore) -> int:
    """Return how many tokens a full chunk of a bank has, as its rows say, or its shards where there are none.

    It decides which chunks are looked for, and nothing is taken for another prefix if it is wrong. Raises
    `StorageError`.
    """
    if records:
        return from_places((record.start, record.n_tokens) for record in records)
    return from_places(_places(shards))


def _places(shards: ShardStore) -> Iterator[tuple[int, int]]:
    for file in shards.iter_files("shards"):
        if FILE_NAME.fullmatch(file.name):
            with suppress(ShardError):
                yield read_place(shards, file.name)


def from_places(places: Iterable[tuple[int, int]]) -> int:
    """Return the number that fits starts and lengths of chunks.

    Chunks begin at its multiples, and none is longer: where one that others stand on is there, it is its length. Where
    that does not tell, it may be any number that fits: chunks of fewer tokens are found all the same.
    """
    starts, longest = 0, 1
    for start, n_tokens in places:
        starts, longest = math.gcd(starts, start), max(longest, n_tokens)
    if not starts:
        return min(max(longest, DEFAULT_CHUNK_TOKENS), MAX_CHUNK_TOKENS)
    fitting = [n for n in range(longest, min(starts, MAX_CHUNK_TOKENS) + 1) if starts % n == 0]
    if (longest not in fitting and DEFAULT_CHUNK_TOKENS in fitting) or not fitting:
        return DEFAULT_CHUNK_TOKENS
    return fitting[0]
