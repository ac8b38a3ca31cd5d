"""Own what is removed and in which order: a plan is made, then that plan is executed; a dry run stops after the first.

Eviction is LRU by the bank's tick. A chunk goes only when no other stands on it and no pinned prefix needs it. Rows go
first, files after the commit: a crash between leaves a file that nothing names, and a later prune sweeps it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from prefixbank.errors import StorageError
from prefixbank.files import FileOnDisk, disk_bytes
from prefixbank.index import Index, chunk_rows, prefix_rows
from prefixbank.shards import ShardStore
from prefixbank.values import ChunkKey, ChunkRecord, PrefixRecord

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["PlannedChunk", "PrunePlan", "PrunePolicy", "execute", "find_leftovers", "plan"]

GRACE_S = 3600
"""How old a file without a row must be to count as left over: a store may be about to commit its row."""

_ROWS_PER_TRANSACTION = 2000
_FIRST_ROOM_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class PrunePolicy:
    """Say what may stay. Pinned prefixes always do.

    `max_bytes`: of shards and quarantined files on disk; `unused_before`: chunks last used before this time (seconds
    since the epoch) go; `namespace_id`: only chunks of this namespace may go, all of them if nothing else is said.
    """

    max_bytes: int | None = None
    unused_before: float | None = None
    namespace_id: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Name one chunk to remove and why: `budget`, `unused`, `namespace`, `hole` or `removed`.

    The record comes without its token ids: a plan may list a whole bank.
    """

    record: ChunkRecord
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """List what to remove, in the order of removal, children before their parents.

    `kept_bytes` is what the bank takes on disk once the plan is executed; it is above the budget only where pins are.
    """

    chunks: tuple[PlannedChunk, ...] = ()
    files: tuple[FileOnDisk, ...] = ()
    kept_bytes: int = 0

    @property
    def freed_bytes(self) -> int:
        """Return the bytes on disk that the plan frees."""
        freed = sum(planned.record.disk_bytes for planned in self.chunks)
        return freed + sum(disk_bytes(file.n_bytes) for file in self.files)


def plan(
    tx: sa.Connection,
    policy: PrunePolicy,
    *,
    quarantined: tuple[FileOnDisk, ...] = (),
    leftovers: tuple[FileOnDisk, ...] = (),
    protected: Set[ChunkKey] = frozenset(),
) -> PrunePlan:
    """Return what to remove so that the policy holds. Changes nothing."""
    kept_bytes = chunk_rows.disk_bytes(tx)
    files = list(leftovers)
    quarantined_bytes = sum(disk_bytes(file.n_bytes) for file in quarantined)
    if policy.max_bytes is not None and kept_bytes + quarantined_bytes > policy.max_bytes:
        files += quarantined
        quarantined_bytes = 0
    kept_bytes += quarantined_bytes
    chosen: list[PlannedChunk] = []
    for planned in _removable(tx, policy, kept_bytes, protected):
        chosen.append(planned)
        kept_bytes -= planned.record.disk_bytes
    return PrunePlan(tuple(chosen), tuple(files), kept_bytes)


def _removable(
    tx: sa.Connection, policy: PrunePolicy, kept_bytes: int, protected: Set[ChunkKey]
) -> Iterator[PlannedChunk]:
    """Yield the chunks that must go, least recently used first, until the policy holds."""
    whole_namespace = policy.namespace_id is not None and policy.max_bytes is None and policy.unused_before is None
    must_stay = protected | prefix_rows.pinned_chain_keys(tx)
    removed_children: Counter[ChunkKey] = Counter()
    passed: dict[ChunkKey, tuple[ChunkRecord, int]] = {}  # came up while something still stood on them

    def reason(record: ChunkRecord) -> str | None:
        if record.file_name is None:
            return "hole"
        if whole_namespace:
            return "namespace"
        if policy.unused_before is not None and record.last_used_at < policy.unused_before:
            return "unused"
        if policy.max_bytes is not None and kept_bytes > policy.max_bytes:
            return "budget"
        return None

    with closing(chunk_rows.iter_by_use(tx, policy.namespace_id)) as rows:
        for row in rows:
            candidate: tuple[ChunkRecord, int] | None = row
            while candidate is not None:
                record, n_children = candidate
                why = None if record.key in must_stay else reason(record)
                if why is None:
                    break
                if n_children > removed_children[record.key]:
                    passed[record.key] = candidate
                    break
                yield PlannedChunk(record, why)
                kept_bytes -= record.disk_bytes
                if record.parent_key is None:
                    break
                removed_children[record.parent_key] += 1
                candidate = passed.pop(record.parent_key, None)
            over = policy.max_bytes is not None and kept_bytes > policy.max_bytes
            if not over and not whole_namespace and policy.unused_before is None:
                return


def plan_removal(tx: sa.Connection, prefix_name: str) -> PrunePlan:
    """Return the chunks that only the prefixes of one name need: no other name, no longer prompt stands on them."""
    prefixes = prefix_rows.list_all(tx)
    return _plan_unneeded(
        tx, [p for p in prefixes if p.name == prefix_name], [p for p in prefixes if p.name != prefix_name]
    )


def plan_replaced(tx: sa.Connection, old: PrefixRecord, still_needed: Set[ChunkKey] = frozenset()) -> PrunePlan:
    """Return the chunks that only a named prefix needs whose name moves on, or did, to another.

    Its name may still be its own; `still_needed` are chunks that the other is going to stand on.
    """
    others = [prefix for prefix in prefix_rows.list_all(tx) if prefix != old]
    return _plan_unneeded(tx, [old], others, still_needed)


def _plan_unneeded(
    tx: sa.Connection,
    prefixes: Iterable[PrefixRecord],
    others: Iterable[PrefixRecord],
    still_needed: Set[ChunkKey] = frozenset(),
) -> PrunePlan:
    """Return the chunks that the one prefixes stand on, and neither the others nor a longer prompt does."""
    needed = prefix_rows.chain_keys(tx, {p.chunk_key for p in others if p.chunk_key is not None}) | still_needed
    ends = {p.chunk_key for p in prefixes if p.chunk_key is not None}
    records = chunk_rows.find(tx, list(prefix_rows.chain_keys(tx, ends) - needed))
    # The states kept inside the prefix go with it.
    inside = [tail for record in records.values() for tail in chunk_rows.shorter_siblings(tx, record, with_state=True)]
    records |= {tail.key: tail for tail in inside if tail.key not in needed}
    removed_children: Counter[ChunkKey] = Counter()
    chosen: list[PlannedChunk] = []
    for record in sorted(records.values(), key=lambda record: record.start, reverse=True):
        if chunk_rows.count_children(tx, record.key) <= removed_children[record.key]:
            chosen.append(PlannedChunk(replace(record, token_ids=b""), "removed"))
            if record.parent_key is not None:
                removed_children[record.parent_key] += 1
    kept_bytes = chunk_rows.disk_bytes(tx) - sum(p.record.disk_bytes for p in chosen)
    return PrunePlan(tuple(chosen), (), kept_bytes)


def find_leftovers(index: Index, shards: ShardStore, now_s: float) -> tuple[FileOnDisk, ...]:
    """Return the files that no row names and that are too old to be a store in progress."""
    files = chain(shards.iter_files("shards"), shards.iter_files("tmp"))
    old = [file for file in files if now_s - file.mtime_s > GRACE_S]
    if not old:
        return ()
    with index.reading() as tx:
        named = chunk_rows.file_names(tx)
    return tuple(file for file in old if not _is_named(file, named, shards))


def _is_named(file: FileOnDisk, named: Set[str], shards: ShardStore) -> bool:
    return file.name in named and shards.is_in_place(file)


@dataclass(frozen=True, slots=True)
class Unnamed:
    """Hold the files without a row that `tmp` tells of: those of stores in progress, and of processes that died.

    They take room like any other. `old` ones can be deleted; `n_young_bytes` is what the others take.
    """

    old: tuple[FileOnDisk, ...] = ()
    n_young_bytes: int = 0


def find_unnamed(index: Index, shards: ShardStore, now_s: float) -> Unnamed:
    """Return what lies in `tmp` or is noted there, and has no row. Looks into no other folder."""
    files = list(shards.iter_noted())
    if not files:
        return Unnamed()
    with index.reading() as tx:
        named = chunk_rows.named_among(tx, [file.name for file in files])
    files = [file for file in files if not _is_named(file, named, shards)]
    old = tuple(file for file in files if now_s - file.mtime_s > GRACE_S)
    n_bytes = sum(disk_bytes(file.n_bytes) for file in files)
    return Unnamed(old, n_bytes - sum(disk_bytes(file.n_bytes) for file in old))


def execute(index: Index, shards: ShardStore, todo: PrunePlan) -> PrunePlan:
    """Remove what the plan lists and return what was removed: less, where others used the bank meanwhile.

    Killed inside, the bank is whole: rows go before their files.
    """
    removed: list[PlannedChunk] = []
    for low in range(0, len(todo.chunks), _ROWS_PER_TRANSACTION):
        group = todo.chunks[low : low + _ROWS_PER_TRANSACTION]
        note = shards.write_note(p.record.file_name for p in group if p.record.file_name is not None)
        try:
            gone = _delete_rows(index, group)
        except StorageError as exc:
            if not exc.index_is_full:
                raise
            _make_first_room(index, shards, group)
            gone = _delete_rows(index, group)
        for planned in group:
            if planned.record.key in gone:
                removed.append(planned)
                if planned.record.file_name is not None:
                    shards.unlink(shards.path_of(planned.record.file_name))
        if note is not None:
            shards.unlink(note)
    return PrunePlan(tuple(removed), _sweep(index, shards, todo.files), todo.kept_bytes)


def _delete_rows(index: Index, group: Sequence[PlannedChunk]) -> set[ChunkKey]:
    with index.writing() as tx:
        pinned = prefix_rows.pinned_chain_keys(tx)  # what was pinned since the plan was made
        unpinned = (planned.record for planned in group if planned.record.key not in pinned)
        return chunk_rows.delete_many(tx, unpinned)


def _make_first_room(index: Index, shards: ShardStore, group: Sequence[PlannedChunk]) -> None:
    """Delete some of the files before their rows: SQLite needs room for its journal, and the disk has none at all.

    Whoever is killed here leaves rows without a file, which are healed when they are used: better than a disk that
    can't be freed.
    """
    with index.reading() as tx:
        pinned = prefix_rows.pinned_chain_keys(tx)
    n_bytes = 0
    for planned in group:
        if planned.record.file_name is not None and planned.record.key not in pinned:
            shards.unlink(shards.path_of(planned.record.file_name))
            n_bytes += planned.record.disk_bytes
        if n_bytes >= _FIRST_ROOM_BYTES:
            return


def _sweep(index: Index, shards: ShardStore, files: tuple[FileOnDisk, ...]) -> tuple[FileOnDisk, ...]:
    """Delete files that have no row, with the index's write lock held: nobody can give them one meanwhile.

    How old they look decides nothing here: clocks are set, and machines sleep in the middle of a store.
    """
    swept: list[FileOnDisk] = []
    for low in range(0, len(files), _ROWS_PER_TRANSACTION):
        group = files[low : low + _ROWS_PER_TRANSACTION]
        with index.writing() as tx:
            named = chunk_rows.named_among(tx, [file.name for file in group])
            swept += [
                file for file in group if not _is_named(file, named, shards) and shards.unlink(shards.root / file.path)
            ]
    return tuple(swept)


def plan_room(
    index: Index, shards: ShardStore, max_bytes: int, needed_bytes: int, protected: Set[ChunkKey]
) -> PrunePlan | None:
    """Return what to evict, least recently used first, so that `needed_bytes` more fit; None where that can't be."""
    unnamed = find_unnamed(index, shards, time.time())
    available = max_bytes - unnamed.n_young_bytes - needed_bytes
    quarantined = tuple(shards.iter_files("quarantine"))
    with index.reading() as tx:
        policy = PrunePolicy(max_bytes=available)
        todo = plan(tx, policy, quarantined=quarantined, leftovers=unnamed.old, protected=protected)
    return todo if todo.kept_bytes <= available else None


def make_room(index: Index, shards: ShardStore, max_bytes: int, needed_bytes: int, protected: Set[ChunkKey]) -> bool:
    """Evict what was used least recently until `needed_bytes` more fit; returns False where that can't be.

    Then nothing is evicted: a store that is refused must not empty the bank.
    """
    todo = plan_room(index, shards, max_bytes, needed_bytes, protected)
    if todo is not None and (todo.chunks or todo.files):
        execute(index, shards, todo)
    return todo is not None
