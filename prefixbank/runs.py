"""Own reading and writing files in runs: many buffers, one after another in the file, in few system calls."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from prefixbank.errors import StorageError

__all__ = ["Buffer", "blocks", "read_runs", "views", "write_runs"]

_IOV_MAX = 1024  # the fewest runs a call that Linux and macOS both take


class Buffer(Protocol):
    """Name what the buffer protocol needs: a contiguous run of bytes with a length in bytes."""

    @property
    def nbytes(self) -> int: ...


def views(runs: Iterable[Buffer]) -> list[memoryview]:
    """Return the bytes of the runs; empty ones are left out."""
    return [view for run in runs if (view := _bytes_of(run)).nbytes]


def _bytes_of(run: Buffer) -> memoryview:
    if isinstance(run, memoryview) and run.format == "B" and run.ndim == 1:
        return run
    return memoryview(run).cast("B")  # type: ignore[arg-type]  # any contiguous buffer


def blocks(runs: Iterable[Buffer], n_bytes: int | None) -> Iterator[list[memoryview]]:
    """Yield the runs as views in blocks of about `n_bytes`, or as one block."""
    block: list[memoryview] = []
    size = 0
    for view in views(runs):
        block.append(view)
        size += view.nbytes
        if n_bytes is not None and size >= n_bytes:
            yield block
            block, size = [], 0
    if block:
        yield block


def write_runs(descriptor: int, runs: Iterable[Buffer]) -> None:
    """Write all runs, whatever number of bytes the system takes at once."""
    left = views(runs)
    first = 0
    while first < len(left):
        done = os.writev(descriptor, left[first : first + _IOV_MAX])
        first = _advance(left, first, done)


def read_runs(descriptor: int, into: Sequence[memoryview], offset: int) -> int:
    """Fill the views from `offset` on; returns the bytes read, fewer than theirs only at the end of the file."""
    left = list(into)
    first = total = 0
    while first < len(left):
        done = _pread(descriptor, left[first : first + _IOV_MAX], offset + total)
        if done == 0:
            break
        total += done
        first = _advance(left, first, done)
    return total


def _advance(left: list[memoryview], first: int, n_bytes: int) -> int:
    """Return the first view that is not done after `n_bytes` more; one that is done in part is cut in place."""
    while first < len(left) and n_bytes >= left[first].nbytes:
        n_bytes -= left[first].nbytes
        first += 1
    if n_bytes:
        left[first] = left[first][n_bytes:]
    return first


def _pread(descriptor: int, into: Sequence[memoryview], offset: int) -> int:
    """Read at `offset` into the views; `StorageError` for an input/output error (the shard may be whole)."""
    try:
        if hasattr(os, "preadv"):
            return os.preadv(descriptor, into, offset)
        block = os.pread(descriptor, into[0].nbytes, offset)
    except OSError as exc:
        raise StorageError(f"a shard can't be read: {exc.strerror or exc}") from exc
    into[0][: len(block)] = block
    return len(block)
