"""Own storing a prefix: which chunks are new, their shards, their rows, and the tails that they supersede.

Files come before rows, parents before children, and every file has its writer's own name; so two processes may store
one prefix at once, and a crash leaves extra files, never a row without a whole file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from prefixbank import eviction
from prefixbank.chunking import (
    TOKEN_BYTES,
    chunk_key,
    common_run,
    first_token,
    full_chunks,
    unpack_token_ids,
)
from prefixbank.files import disk_bytes
from prefixbank.index import Index, chunk_rows, prefix_rows
from prefixbank.layout import SHARD_FORMAT_VERSION, CacheLayout
from prefixbank.resolver import MAX_CANDIDATES
from prefixbank.runs import Buffer
from prefixbank.sealing import SEAL, UNSEALED
from prefixbank.shards import ShardStore, WrittenShard
from prefixbank.values import ChunkKey, ChunkRecord, Namespace

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["Held", "RowSource", "Stored", "plan_shards", "shard_header", "store", "supersede"]

_GROUP_BYTES = 256 << 20
"""About how much is written before its rows are committed: a long store that is killed keeps most of its work."""


class Held(Protocol):
    """Know what a prompt cache holds: all that a plan asks of one."""

    def has_rows(self, start: int, n_tokens: int) -> bool:
        """Tell whether the rows of the tokens `[start, start + n_tokens)` are known."""
        ...

    def state_ends(self) -> list[int]:
        """Return the token offsets at which states of recurrent layers are known, sorted."""
        ...


class RowSource(Held, Protocol):
    """Give out what a prompt cache holds, in the order of a shard (`kvcache.capture.CacheRecorder`)."""

    def state_runs(self, end: int) -> Iterator[Buffer]:
        """Yield the states after `end` tokens."""
        ...

    def runs(self, start: int, n_tokens: int) -> Iterator[Buffer]:
        """Yield the rows of the tokens `[start, start + n_tokens)`."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """Say what a store did.

    `n_tokens` leading tokens are now in the bank, `last_key` being the chunk that holds the last of them (None for
    none) and `known_keys` the chunks that were there before. `refused` says why something was not stored, or is "".
    """

    n_tokens: int
    last_key: ChunkKey | None
    known_keys: tuple[ChunkKey, ...] = ()
    n_new_chunks: int = 0
    n_written_bytes: int = 0
    refused: str = ""


@dataclass(frozen=True, slots=True)
class _Draft:
    """Hold one chunk that is to be stored: its record but for the file, and the head of its shard.

    `row` is the same chunk without states, where it is there and the draft is to take its place.
    """

    record: ChunkRecord
    header: bytes
    n_bytes: int
    row: ChunkRecord | None

    @property
    def disk_bytes(self) -> int:
        """Return what the shard will take on disk."""
        return disk_bytes(self.n_bytes)


def plan_shards(
    index: Index, namespace: Namespace, token_ids: bytes, chunk_tokens: int, source: Held, *, only_add: bool = False
) -> dict[ChunkKey, int]:
    """Return the bytes of each shard that `store` would write. Changes nothing."""
    layout = CacheLayout.from_json(namespace.layout)
    with index.reading() as tx:
        _, drafts = _plan(tx, namespace, token_ids, chunk_tokens, layout, source, only_add)
    return {draft.record.key: draft.n_bytes for draft in drafts}


def store(
    index: Index,
    shards: ShardStore,
    namespace: Namespace,
    token_ids: bytes,
    chunk_tokens: int,
    source: RowSource,
    max_bytes: int | None,
    *,
    only_add: bool = False,
) -> Stored:
    """Store the whole of the packed `token_ids`, tail included; what is there already is not written again.

    With `only_add` nothing that has a shard gives way to what is new: no chunk to the same one with states, no tail to
    a longer sibling.

    Makes room first by evicting what was used least recently; where that can't be enough, nothing is stored and
    `refused` says so. Raises `StorageError`, `BankBusyError` and the like; what was committed by then stays.
    """
    layout = CacheLayout.from_json(namespace.layout)
    n_asked = len(token_ids) // TOKEN_BYTES
    with index.reading() as tx:
        known, drafts = _plan(tx, namespace, token_ids, chunk_tokens, layout, source, only_add)
    there = list(known)
    n_new_chunks = n_written_bytes = 0
    refused = ""
    needed = sum(draft.disk_bytes for draft in drafts)
    in_use = {record.key for record in known} | {draft.record.key for draft in drafts}
    if drafts and max_bytes is not None and not eviction.make_room(index, shards, max_bytes, needed, in_use):
        there = _there(known, drafts)
        drafts = []
        refused = (
            f"{needed} bytes do not fit into the budget of {max_bytes} bytes beside what is pinned or in use: "
            "raise max_bytes"
        )
    for group in _groups(drafts):
        added, whole = _store_group(index, shards, group, source, there, only_add=only_add)
        n_new_chunks += len(added)
        n_written_bytes += sum(record.n_bytes for record in added)
        if not whole:
            with index.reading() as tx:
                there = _there(*_plan(tx, namespace, token_ids, chunk_tokens, layout, source, only_add))
            break
        there += [draft.record for draft in group]
    chain_there = _unbroken(there)
    n_tokens = min(chain_there[-1].end, n_asked) if chain_there else 0
    n_wanted = n_asked
    if layout.has_state:  # a tail without states is not wanted
        n_wanted = max(n_asked - n_asked % chunk_tokens, *(end for end in (0, *source.state_ends()) if end <= n_asked))
    if n_tokens < n_wanted and not refused and source.has_rows(n_tokens, n_wanted - n_tokens):
        refused = "a chunk key is another prefix's, or a parent chunk was removed meanwhile"
    last_key = chain_there[-1].key if chain_there else None
    return Stored(n_tokens, last_key, tuple(r.key for r in known), n_new_chunks, n_written_bytes, refused)


def _there(known: list[ChunkRecord], drafts: list[_Draft]) -> list[ChunkRecord]:
    """Return the chunks of a plan that are there, whether or not they were to be replaced."""
    return known + [draft.row for draft in drafts if draft.row is not None]


def _unbroken(records: list[ChunkRecord]) -> list[ChunkRecord]:
    """Return the records in their order, up to the first gap; of several that begin together, the longest."""
    longest: dict[int, ChunkRecord] = {}
    for record in records:
        if record.start not in longest or record.end > longest[record.start].end:
            longest[record.start] = record
    end = 0
    chain = []
    while (record_there := longest.get(end)) is not None:
        chain.append(record_there)
        end = record_there.end
    return chain


def _plan(
    tx: sa.Connection,
    namespace: Namespace,
    token_ids: bytes,
    chunk_tokens: int,
    layout: CacheLayout,
    source: Held,
    only_add: bool,
) -> tuple[list[ChunkRecord], list[_Draft]]:
    """Return the chunks of the prefix that are there, and drafts of those that are not, each from the root on.

    A chunk whose key belongs to other token ids, or whose rows the source does not know, ends the plan: nothing can be
    stored behind it.
    """
    n_tokens = len(token_ids) // TOKEN_BYTES
    states = {end for end in source.state_ends() if 0 < end <= n_tokens}
    keys = list(full_chunks(namespace.root_key, token_ids, chunk_tokens))
    rows = chunk_rows.find(tx, [key for _, key in keys])
    known: list[ChunkRecord] = []
    drafts: list[_Draft] = []

    def add(record: ChunkRecord, row: ChunkRecord | None) -> bool:
        """Sort a wanted chunk into the known ones or the drafts; False ends the plan."""
        if row is not None and not chunk_rows.same_chunk(row, record):
            return False
        has_rows = source.has_rows(record.start, record.n_tokens)
        if row is not None and row.file_name is None:
            row = None  # a hole
        if row is not None and (only_add or not (has_rows and chunk_rows.replaced_by(row, record))):
            known.append(row)
            return True
        if has_rows:
            drafts.append(_draft(record, row, layout, namespace))
        return has_rows

    def tails(start: int, parent_key: ChunkKey | None) -> None:
        """Add what ends inside the chunk at `start`: where states are known, and at the end of the prefix."""
        ends = {end for end in states if start < end < start + chunk_tokens}
        if start < n_tokens < start + chunk_tokens and not (layout.has_state and n_tokens not in states):
            ends.add(n_tokens)
        for end in sorted(ends):
            ids = token_ids[start * TOKEN_BYTES : end * TOKEN_BYTES]
            if end not in states and (covering := _covering(tx, namespace, parent_key, start, ids)) is not None:
                known.append(covering)
                continue
            key = chunk_key(parent_key or namespace.root_key, ids)
            record = _record(namespace, parent_key, key, start, ids, has_state=end in states)
            add(record, chunk_rows.find(tx, [key]).get(key))

    parent_key: ChunkKey | None = None
    for start, key in keys:
        tails(start, parent_key)
        end = start + chunk_tokens
        ids = token_ids[start * TOKEN_BYTES : end * TOKEN_BYTES]
        record = _record(namespace, parent_key, key, start, ids, has_state=end in states)
        if not add(record, rows.get(key)):
            return known, drafts
        parent_key = key
    tails(len(keys) * chunk_tokens, parent_key)
    return known, drafts


def _covering(
    tx: sa.Connection, namespace: Namespace, parent_key: ChunkKey | None, start: int, ids: bytes
) -> ChunkRecord | None:
    """Return the shortest chunk that begins with the tail's token ids, if there is one: the tail needs no shard."""
    n_tokens = len(ids) // TOKEN_BYTES
    siblings = chunk_rows.children(tx, namespace.id, parent_key, first_token(ids), MAX_CANDIDATES)
    covering = [s for s in siblings if s.start == start and common_run(s.token_ids, ids) == n_tokens]
    return min(covering, key=lambda sibling: sibling.n_tokens, default=None)


def _record(
    namespace: Namespace, parent_key: ChunkKey | None, key: ChunkKey, start: int, ids: bytes, *, has_state: bool
) -> ChunkRecord:
    return ChunkRecord(
        key=key,
        parent_key=parent_key,
        namespace_id=namespace.id,
        start=start,
        n_tokens=len(ids) // TOKEN_BYTES,
        token_ids=ids,
        file_name=None,
        data_offset=0,
        n_bytes=0,
        disk_bytes=0,
        digest=b"",
        has_state=has_state,
    )


def shard_header(record: ChunkRecord, layout: CacheLayout, namespace: Namespace) -> bytes:
    """Return the head of a chunk's shard. Its metadata suffices to rebuild a lost index."""
    return layout.shard_header(
        record.n_tokens,
        {
            "format": "prefixbank",
            "format_version": SHARD_FORMAT_VERSION,
            "fingerprint": namespace.fingerprint,
            "salt_digest": namespace.salt_digest,
            "label": namespace.label,
            "layout": namespace.layout,
            "root_key": namespace.root_key.hex(),
            "chunk_key": record.key.hex(),
            "parent_key": record.parent_key.hex() if record.parent_key else "",
            "start": str(record.start),
            "n_tokens": str(record.n_tokens),
            "token_ids": json.dumps(unpack_token_ids(record.token_ids), separators=(",", ":")),
            SEAL: UNSEALED,
        },
        with_state=record.has_state,
    )


def _draft(record: ChunkRecord, row: ChunkRecord | None, layout: CacheLayout, namespace: Namespace) -> _Draft:
    """Return the draft of a chunk."""
    header = shard_header(record, layout, namespace)
    n_bytes = len(header) + layout.data_bytes(record.n_tokens, with_state=record.has_state)
    return _Draft(record, header, n_bytes, row)


def _groups(drafts: list[_Draft]) -> Iterator[list[_Draft]]:
    group: list[_Draft] = []
    n_bytes = 0
    for draft in drafts:
        group.append(draft)
        n_bytes += draft.disk_bytes
        if n_bytes >= _GROUP_BYTES:
            yield group
            group, n_bytes = [], 0
    if group:
        yield group


def _store_group(
    index: Index,
    shards: ShardStore,
    group: list[_Draft],
    source: RowSource,
    there: list[ChunkRecord],
    *,
    only_add: bool,
) -> tuple[list[ChunkRecord], bool]:
    """Write the shards of a group, then commit their rows; `there` are the prefix's other chunks that are stored.

    Returns the chunks that were added (another writer may have been first) and whether all of the group are there now.
    Where one can't be added, those behind it are left out too.
    """
    added: list[ChunkRecord] = []
    whole = False
    superseded: list[ChunkRecord] = []
    with shards.writer() as writer:
        written = []
        for draft in group:
            record = draft.record
            runs = source.runs(record.start, record.n_tokens)
            states = source.state_runs(record.end) if record.has_state else ()
            shard = writer.write(record.key, draft.header, chain(runs, states))
            written.append(_with_file(record, shard))
        writer.publish()
        now_s = int(time.time())
        with index.writing() as tx:
            writer.require_published()
            # Since the plan was made, the chain may have been evicted and one of the same keys but other token ids
            # stored in its place: these rows must not come to stand on that.
            whole = _still_there(tx, [record for record in there if record.start < group[-1].record.start])
            if whole:
                tick = chunk_rows.next_tick(tx)
                chunk_rows.touch(tx, [record.key for record in there], tick, now_s, hits=0)
            before = chunk_rows.find(tx, [record.key for record in written])
            for record in written if whole else ():
                row = before.get(record.key)
                if only_add and row is not None and row.file_name is not None:  # another writer was first
                    if not chunk_rows.same_chunk(row, record):
                        whole = False
                        break
                elif chunk_rows.add(tx, record, tick, now_s):
                    added.append(record)
                    if row is not None:
                        superseded.append(row)  # its file gives way to one that also holds states
                    superseded += [] if only_add else supersede(tx, record)
                elif not _is_there(tx, record):
                    whole = False
                    break
            writer.note(tail.file_name for tail in superseded if tail.file_name is not None)
            # Kept before the commit, which may come through even where it fails: a file without a row is harmless. Not
            # earlier: a full disk that fails a row must not be filled further by the shards.
            for record in added:
                assert record.file_name is not None
                writer.keep(record.file_name)
            for record in written:
                row = before.get(record.key)
                if row is not None and row.file_name == record.file_name is not None and record not in added:
                    writer.keep(record.file_name)  # a repair found the file, and took it up first
        for tail in superseded:
            if tail.file_name is not None:
                shards.unlink(shards.path_of(tail.file_name))
    return added, whole


def _with_file(record: ChunkRecord, shard: WrittenShard) -> ChunkRecord:
    return replace(
        record,
        file_name=shard.file_name,
        data_offset=shard.data_offset,
        n_bytes=shard.n_bytes,
        disk_bytes=shard.disk_bytes,
        digest=shard.digest,
    )


def _still_there(tx: sa.Connection, records: list[ChunkRecord]) -> bool:
    """Tell whether the rows of these chunks are what they were; a shard that was lost meanwhile does not count."""
    rows = chunk_rows.find(tx, [record.key for record in records])
    return all(record.key in rows and chunk_rows.same_chunk(rows[record.key], record) for record in records)


def _is_there(tx: sa.Connection, record: ChunkRecord) -> bool:
    """Tell whether another writer stored this very chunk first."""
    row = chunk_rows.find(tx, [record.key]).get(record.key)
    return (
        row is not None
        and row.file_name is not None
        and chunk_rows.same_chunk(row, record)
        and not chunk_rows.replaced_by(row, record)
    )


def supersede(tx: sa.Connection, record: ChunkRecord) -> list[ChunkRecord]:
    """Delete the rows of the tails that a new chunk covers, moving their names to it; returns them."""
    tails = []
    for tail in chunk_rows.shorter_siblings(tx, record):
        prefix_rows.move(tx, tail.key, record.key)
        if chunk_rows.delete(tx, tail):
            tails.append(tail)
    return tails
