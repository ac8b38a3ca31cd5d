"""Own putting a match back together: its shards read into a new prompt cache, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from prefixbank.errors import PrefixBankError, ShardCorruptError, ShardError
from prefixbank.index import Index, chunk_rows
from prefixbank.layout import CacheLayout
from prefixbank.resolver import REASON_LOST
from prefixbank.shards import ShardStore
from prefixbank.values import ChunkRecord, Match

__all__ = ["Loaded", "Readers", "heal", "load"]

_MIN_PART_BYTES = 2 << 20
"""The least that is worth a read of its own."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Hold a prompt cache with its match, which is shorter than asked for where a shard failed.

    `seed` is what a `CacheRecorder` needs to know of the cache to go on from it.
    """

    prompt_cache: list[Any]
    match: Match
    failures: tuple[tuple[ChunkRecord, PrefixBankError], ...]
    seed: Sequence[Sequence[Any]] = ()


class Readers:
    """Read shards from several threads."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self.executor = ThreadPoolExecutor(n_threads, "prefixbank-read")

    def submit(
        self, shards: ShardStore, record: ChunkRecord, n_bytes: int, runs: list[memoryview], *, n_shards: int
    ) -> list[Future[None]]:
        """Begin to read a shard's `n_bytes` of tensors into `runs`.

        Where there are fewer shards than would keep the threads busy, proven ones are read in parts at once.
        """
        if n_bytes + record.data_offset != record.n_bytes:
            wrong: Future[None] = Future()
            wrong.set_exception(ShardCorruptError(f"shard {record.file_name} is not of this model's cache layout"))
            return [wrong]
        n_parts = min(-(-2 * self._n_threads // n_shards), n_bytes // _MIN_PART_BYTES)
        if n_parts < 2 or not shards.is_proven(record):
            return [self.executor.submit(shards.read_into, record, runs)]
        return [
            self.executor.submit(shards.read_part, record, offset, part)
            for offset, part in _parts(runs, -(-n_bytes // n_parts))
        ]

    def close(self) -> None:
        """Wait for what is being read, and end the threads."""
        self.executor.shutdown()


def _parts(runs: list[memoryview], n_bytes: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield the runs in parts of about `n_bytes`, each with the number of bytes in front of it."""
    part: list[memoryview] = []
    offset = size = 0
    for run in runs:
        part.append(run)
        size += run.nbytes
        if size >= n_bytes:
            yield offset, part
            offset, part, size = offset + size, [], 0
    if part:
        yield offset, part


def load(
    found: Match,
    layout: CacheLayout,
    shards: ShardStore,
    readers: Readers,
    reserve: int,
) -> Loaded:
    """Read the shards of a match straight into the buffers of a new prompt cache.

    The buffers have room for the whole prompt and `reserve` tokens. Where a shard fails, the cache ends before it: what
    was read in front of it is right. A match of no tokens gives an empty list, as does a failure of the first shard.
    """
    from prefixbank.kvcache.assemble import PromptCacheBuffers  # late: imports MLX
    from prefixbank.kvcache.kinds import keeps_all_rows

    if not found.chunks:
        return Loaded([], found, ())
    last = found.chunks[-1]
    capacity = max(found.n_prompt_tokens + reserve, last.end)
    buffers = PromptCacheBuffers(layout, found.n_tokens, last.start, last.end, capacity, readers.executor)
    needed = [r for r in found.chunks if r is last or buffers.need(r.start, r.end)]
    futures = []
    for record in needed:
        n_bytes = layout.data_bytes(record.n_tokens, with_state=record.has_state)
        # A chunk that is used in part is read whole, so that its digest proves it; the rows behind
        # the match lie beyond the cache's offset, where the next tokens overwrite them.
        runs = buffers.runs(record.start, record.n_tokens)
        if record.has_state:
            runs += buffers.state_runs(wanted=record is last)
        futures.append(readers.submit(shards, record, n_bytes, runs, n_shards=len(needed)))
    runs = []
    failures: list[tuple[ChunkRecord, PrefixBankError]] = []
    for record, parts in zip(needed, futures, strict=True):
        errors = [error for part in parts if isinstance(error := part.exception(), PrefixBankError)]
        if errors:
            failures.append((record, errors[0]))
        for part in parts:
            if not errors:
                part.result()  # what is no fault of the shard is raised
    if failures:
        found = _cut_before(found, failures[0][0], layout)
        if found.chunks and not keeps_all_rows(layout):  # what a shorter cache needs was not read
            again = load(found, layout, shards, readers, reserve)
            return replace(again, failures=(*failures, *again.failures))
    prompt_cache, seed = buffers.build(found.n_tokens) if found.chunks else ([], [])
    return Loaded(prompt_cache, found, tuple(failures), seed)


def _cut_before(found: Match, failed: ChunkRecord, layout: CacheLayout) -> Match:
    """Return the match as far as it can be resumed in front of a chunk whose shard failed."""
    kept = list(found.chunks[: found.chunks.index(failed)])
    while layout.has_state and kept and not kept[-1].has_state:
        kept.pop()
    return replace(
        found,
        n_tokens=kept[-1].end if kept else 0,
        n_bytes=sum(c.n_bytes for c in kept),
        reason=REASON_LOST,
        chunks=tuple(kept),
    )


def heal(index: Index, shards: ShardStore, record: ChunkRecord, error: PrefixBankError) -> bool:
    """Forget a shard that is missing or corrupt, and set a corrupt file aside; returns whether the index changed.

    A shard that could merely not be read (no permission, too many open files) is left as it is.
    """
    if not isinstance(error, ShardError) or record.file_name is None:
        return False
    with index.writing() as tx:
        healed = chunk_rows.heal(tx, record)
    if healed and isinstance(error, ShardCorruptError):
        shards.quarantine(record.file_name)
    return healed
