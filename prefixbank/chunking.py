"""Own chunk keys and file digests: the only importer of xxhash; must know nothing of files, rows or arrays.

A chunk key is xxh3_128(parent key ‖ little-endian uint32 token ids), so one prefix has one address in every bank with
the same `chunk_tokens`. xxh3 is no cryptographic hash: second preimages can be built at will. Keys locate; what proves
a chunk are the token ids that the index keeps.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterator, Sequence

import xxhash

from prefixbank.errors import PromptError
from prefixbank.values import ChunkKey

__all__ = [
    "FileDigest",
    "chunk_key",
    "common_run",
    "first_token",
    "full_chunks",
    "pack_token_ids",
    "root_key",
    "unpack_token_ids",
]

TOKEN_BYTES = 4
FileDigest = xxhash.xxh3_128
"""A streaming hash (`update`, `digest`) for whole shard files; 16 bytes."""


def _hash128(data: bytes) -> bytes:
    """Return the 16 bytes that address `data`. Tests put a poor hash here."""
    return xxhash.xxh3_128_digest(data)


def root_key(fingerprint: str, salt: bytes = b"") -> ChunkKey:
    """Return the parent key of every first chunk of a namespace."""
    return ChunkKey(_hash128(bytes.fromhex(fingerprint) + salt))


def chunk_key(parent_key: ChunkKey, token_ids: bytes) -> ChunkKey:
    """Return the address of the prefix that ends with `token_ids` (packed) behind `parent_key`."""
    return ChunkKey(_hash128(parent_key + token_ids))


def full_chunks(
    parent_key: ChunkKey, token_ids: bytes, chunk_tokens: int, start: int = 0
) -> Iterator[tuple[int, ChunkKey]]:
    """Yield `(start, key)` of each full chunk of the packed `token_ids` from token `start` on; `start` counts tokens.

    `parent_key` is that of the chunk that ends at `start`, or a root key.
    """
    step = chunk_tokens * TOKEN_BYTES
    for low in range(start * TOKEN_BYTES, len(token_ids) - step + 1, step):
        parent_key = chunk_key(parent_key, token_ids[low : low + step])
        yield low // TOKEN_BYTES, parent_key


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32. Raises `PromptError` for anything else than ids in [0, 2**32)."""
    try:
        if isinstance(token_ids, bytes | bytearray):
            raise TypeError("bytes are no sequence of ids")  # array would take four of them as one id
        packed = array.array("I", token_ids)
    except (TypeError, OverflowError) as exc:
        raise PromptError(f"token ids must be integers from 0 to 2**32 - 1: {exc}") from exc
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """Return the token ids of little-endian uint32 bytes."""
    token_ids = array.array("I", packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def first_token(packed: bytes) -> int:
    """Return the first token id of packed ones."""
    return int.from_bytes(packed[:TOKEN_BYTES], "little")


def common_run(left: bytes, right: bytes) -> int:
    """Return how many leading token ids two packed runs have in common."""
    limit = min(len(left), len(right)) // TOKEN_BYTES
    if left[: limit * TOKEN_BYTES] == right[: limit * TOKEN_BYTES]:
        return limit
    low, high = 0, 1  # the first `low` agree; most runs part early
    while high < limit and left[: high * TOKEN_BYTES] == right[: high * TOKEN_BYTES]:
        low, high = high, high * 2
    high = min(high, limit)  # the first `high` do not agree
    while high - low > 1:
        middle = (low + high) // 2
        if left[: middle * TOKEN_BYTES] == right[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
