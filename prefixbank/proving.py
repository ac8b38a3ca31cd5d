"""Own proving a shard that no row describes by what it says of itself; knows no rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from prefixbank.chunking import FileDigest
from prefixbank.errors import ShardCorruptError, StorageError
from prefixbank.files import open_regular
from prefixbank.sealing import MAX_HEADER_BYTES, ShardDescription, claimed_place, describe, seal_of, unsealed
from prefixbank.shards import ShardStore, WrittenShard

__all__ = ["ProvenShard", "prove", "read_place"]

_READ_STEP = 8 << 20

Sealed = Literal["whole", "broken", "no"]
"""Whether a shard's seal proves its bytes, disproves them, or is not there (shards of older versions)."""


@dataclass(frozen=True, slots=True)
class ProvenShard:
    """Hold what a shard without a row says of itself; chunk, header and length are proven, the tensors if `sealed`."""

    description: ShardDescription
    file: WrittenShard
    sealed: Sealed
    mtime_s: float


def prove(shards: ShardStore, file_name: str, chunk_tokens: int) -> ProvenShard:
    """Prove a shard that no row describes by what it says of itself; it is read whole, a part at a time.

    Raises `ShardMissingError`, `StorageError`, `SchemaError` for a newer format, and `ShardCorruptError` for
    whatever is no shard of this name and of this bank. The bytes of the tensors are proven where `sealed` is
    "whole"; see `ProvenShard`.
    """
    path = shards.path_of(file_name)
    with open_regular(path) as descriptor:
        status = os.fstat(descriptor)
        head = _read_head(descriptor, status.st_size)
        description = describe(head, status.st_size, chunk_tokens)
        if not file_name.startswith(description.key.hex() + "-"):
            raise ShardCorruptError(f"{path} holds another chunk than its name says")
        digest, own = FileDigest(head), FileDigest(unsealed(head))
        n_bytes = len(head)
        while block := _pread(descriptor, _READ_STEP, n_bytes):
            n_bytes += len(block)
            digest.update(block)
            own.update(block)
    if n_bytes != status.st_size:
        raise ShardCorruptError(f"{path} changed while it was read")
    seal_kept = seal_of(head)
    sealed: Sealed = "no" if seal_kept is None else "whole" if seal_kept == own.hexdigest() else "broken"
    return ProvenShard(
        description, WrittenShard(file_name, len(head), n_bytes, digest.digest()), sealed, status.st_mtime
    )


def read_place(shards: ShardStore, file_name: str) -> tuple[int, int]:
    """Return where a shard says that its chunk begins, and how many tokens it holds. Raises as `prove` does."""
    with open_regular(shards.path_of(file_name)) as descriptor:
        return claimed_place(_read_head(descriptor, os.fstat(descriptor).st_size))


def _read_head(descriptor: int, n_bytes: int) -> bytes:
    """Return the head of a shard file of `n_bytes`, up to where its tensors begin."""
    length = int.from_bytes(_pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, n_bytes - 8):
        raise ShardCorruptError(f"a header of {length} bytes does not fit into a shard of {n_bytes}")
    head = _pread(descriptor, 8 + length, 0)
    if len(head) != 8 + length:
        raise ShardCorruptError("a shard ended inside its header")
    return head


def _pread(descriptor: int, n_bytes: int, offset: int) -> bytes:
    """Read at most `n_bytes` at an offset; `StorageError` for an input/output error."""
    try:
        return os.pread(descriptor, n_bytes, offset)
    except OSError as exc:
        raise StorageError(f"a shard can't be read: {exc.strerror or exc}") from exc
