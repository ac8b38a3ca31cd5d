"""Own finding the longest stored prefix of a prompt; must know neither SQL nor files.

Chunk keys locate rows, a group in each query; the token ids in the rows prove them, from the root on. The last chunk
may be used in part, so that a match ends where the prompts part, not where a chunk does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from prefixbank.chunking import TOKEN_BYTES, chunk_key, common_run, first_token, full_chunks
from prefixbank.index import Index, chunk_rows
from prefixbank.layout import CacheLayout
from prefixbank.values import ChunkKey, ChunkRecord, Match, Namespace

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["match", "rest_on_states"]

MAX_CANDIDATES = 256
"""How many chunks that may share a beginning with the prompt are compared, the last used first."""

_FIRST_ASKED = 32
"""How many chunks are looked up first; four times as many each time that all of them are there."""

REASON_ALL = "all"
REASON_PARTIAL = "partial"
REASON_NONE = "none"
REASON_LOST = "lost"
REASON_NO_STATE = "no-state"


def match(
    index: Index,
    namespace: Namespace,
    token_ids: bytes,
    chunk_tokens: int,
    limit: int,
    known: Sequence[ChunkRecord] = (),
) -> Match:
    """Return the longest stored prefix of the packed `token_ids`, of at most `limit` tokens. Reads no shard.

    `known` may be the chunks of an earlier match: of those that the prompt begins with, only the last is looked up
    again (see `_proven_chunks`).
    """
    n_prompt_tokens = len(token_ids) // TOKEN_BYTES
    usable = token_ids[: limit * TOKEN_BYTES]
    begun = () if rest_on_states(namespace.layout) else _beginning(known, usable, chunk_tokens)
    with index.reading() as tx:
        chain = _proven_chunks(tx, namespace, usable, chunk_tokens, begun)
        lost = bool(chain) and chain[-1].file_name is None
        if lost:
            chain.pop()
        start = chain[-1].end if chain else 0
        n_tokens = start
        rest = usable[start * TOKEN_BYTES :]
        if rest:
            parent_key = chain[-1].key if chain else None
            candidates = chunk_rows.beginnings(tx, namespace.id, parent_key, first_token(rest), MAX_CANDIDATES)
            runs = [(common_run(ids, rest), -n_bytes, key) for key, of, n_bytes, ids in candidates if of == start]
            # Of equally long runs the smallest file is read.
            for n_common, _, key in sorted(runs, key=lambda run: run[:2], reverse=True):
                if not n_common:
                    break
                record = chunk_rows.find(tx, [key]).get(key)
                if record is not None and record.parent_key == parent_key and _is_sound(namespace, record):
                    chain.append(record)
                    n_tokens += n_common
                    break
        n_known_tokens = n_tokens
        if rest_on_states(namespace.layout):
            chain = _to_last_state(tx, namespace, chain, usable)
            n_tokens = chain[-1].end if chain else 0
            n_known_tokens = max(n_known_tokens, n_tokens)  # it may not have been among the candidates
    if n_tokens == limit and n_tokens:
        reason = REASON_ALL
    elif n_known_tokens > n_tokens:
        reason = REASON_NO_STATE
    elif lost:
        reason = REASON_LOST
    else:
        reason = REASON_PARTIAL if n_tokens else REASON_NONE
    return Match(
        n_prompt_tokens=n_prompt_tokens,
        n_tokens=n_tokens,
        n_bytes=sum(c.n_bytes for c in chain),
        reason=reason,
        chunks=tuple(chain),
        n_known_tokens=n_known_tokens,
    )


def _beginning(known: Sequence[ChunkRecord], usable: bytes, chunk_tokens: int) -> Sequence[ChunkRecord]:
    """Return the known chunks, from the root on, that are full and hold the first token ids of `usable`."""
    step = chunk_tokens * TOKEN_BYTES
    n = 0
    parent_key = None
    for low, record in zip(range(0, len(usable) - step + 1, step), known, strict=False):
        if record.token_ids != usable[low : low + step] or record.parent_key != parent_key or record.file_name is None:
            break
        n += 1
        parent_key = record.key
    return known[:n]


def _proven_chunks(
    tx: sa.Connection, namespace: Namespace, usable: bytes, chunk_tokens: int, begun: Sequence[ChunkRecord]
) -> list[ChunkRecord]:
    """Return the full chunks, from the root on, that are proven to be those of `usable`; the last may be a hole.

    The chunks `begun` were proven by an earlier match. Where the last one's row still names the same file, it is the
    very row of then, since a chunk that is deleted and stored again gets a file of another name; and while a row
    stands, so do its parents, with their token ids. A parent that lost its shard since is not noticed: loading it is
    a miss.
    """
    chain = list(begun[:-1])
    chain += _walk(tx, namespace, usable, chunk_tokens, chain[-1] if chain else None)
    if begun and not (len(chain) >= len(begun) and chain[len(begun) - 1].file_name == begun[-1].file_name):
        return _proven_chunks(tx, namespace, usable, chunk_tokens, ())
    return chain


def _walk(
    tx: sa.Connection, namespace: Namespace, usable: bytes, chunk_tokens: int, parent: ChunkRecord | None
) -> Iterator[ChunkRecord]:
    """Yield the full chunks behind `parent` (None: the root) while their rows prove them, up to the first hole."""
    parent_key, start = (None, 0) if parent is None else (parent.key, parent.end)
    keys = full_chunks(parent_key or namespace.root_key, usable, chunk_tokens, start)
    n_asked = _FIRST_ASKED
    while asked := list(islice(keys, n_asked)):
        rows = chunk_rows.find_chain(tx, [key for _, key in asked])
        for start, key in asked:
            row = rows.get(key)
            if (
                row is None
                or row.parent_key != parent_key
                or row.namespace_id != namespace.id
                or row.start != start
                or row.n_tokens != chunk_tokens
                or row.token_ids != usable[start * TOKEN_BYTES : (start + chunk_tokens) * TOKEN_BYTES]
            ):
                return
            yield row
            if row.file_name is None:
                return
            parent_key = key
        n_asked *= 4


def _is_sound(namespace: Namespace, record: ChunkRecord) -> bool:
    """Tell whether a row's key follows from its token ids: SQLite has no checksums, and a bit may have flipped.

    A full chunk needs no such proof: it was found by the key of the prompt's own token ids.
    """
    return (
        record.namespace_id == namespace.id
        and len(record.token_ids) == record.n_tokens * TOKEN_BYTES
        and chunk_key(record.parent_key or namespace.root_key, record.token_ids) == record.key
    )


@lru_cache(maxsize=64)
def rest_on_states(layout: str) -> bool:
    """Tell whether caches of a layout (as JSON) can be resumed only where states were stored."""
    return CacheLayout.from_json(layout).has_state


def _to_last_state(
    tx: sa.Connection, namespace: Namespace, chain: list[ChunkRecord], usable: bytes
) -> list[ChunkRecord]:
    """Return the chunks up to the last place at which states were stored, the one with the states last."""
    if not usable:
        return []

    def is_whole(record: ChunkRecord) -> bool:
        return record.token_ids == usable[record.start * TOKEN_BYTES : record.end * TOKEN_BYTES]

    whole = [record for record in chain if is_whole(record)]  # the last one may part from the prompt inside
    ends: dict[ChunkKey | None, int] = {None: 0} | {record.key: record.end for record in whole}
    found = chunk_rows.with_state(tx, namespace.id, [record.key for record in whole], usable)
    proven = [
        record
        for record in found
        if ends.get(record.parent_key) == record.start and is_whole(record) and _is_sound(namespace, record)
    ]
    if not proven:
        return []
    last = max(proven, key=lambda record: record.end)
    return [*(record for record in chain if record.end <= last.start), last]
