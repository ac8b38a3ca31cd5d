"""Own finding the longest stored prefix of a prompt; must know neither SQL nor files.

Chunk keys locate rows in one query; the token ids in the rows prove them, from the root on. The last chunk may be used
in part, so that a match ends where the prompts part, not where a chunk does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from prefixbank.chunking import TOKEN_BYTES, common_run, first_token, full_chunks
from prefixbank.index import Index, chunk_rows
from prefixbank.layout import CacheLayout
from prefixbank.values import ChunkKey, ChunkRecord, Match, Namespace

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["match", "rest_on_states", "walk"]

MAX_CANDIDATES = 256
"""How many chunks that may share a beginning with the prompt are compared, the last used first."""

REASON_ALL = "all"
REASON_PARTIAL = "partial"
REASON_NONE = "none"
REASON_LOST = "lost"
REASON_NO_STATE = "no-state"


def walk(
    rows: dict[ChunkKey, ChunkRecord],
    keys: Sequence[tuple[int, ChunkKey]],
    namespace_id: int,
    token_ids: bytes,
    chunk_tokens: int,
) -> list[ChunkRecord]:
    """Return the rows, from the root on, that are proven to be the chunks of `token_ids`; holes are included."""
    proven: list[ChunkRecord] = []
    parent_key: ChunkKey | None = None
    for start, key in keys:
        row = rows.get(key)
        ids = token_ids[start * TOKEN_BYTES : (start + chunk_tokens) * TOKEN_BYTES]
        if (
            row is None
            or row.parent_key != parent_key
            or row.namespace_id != namespace_id
            or row.start != start
            or row.token_ids != ids
        ):
            break
        proven.append(row)
        parent_key = key
    return proven


def match(index: Index, namespace: Namespace, token_ids: bytes, chunk_tokens: int, limit: int) -> Match:
    """Return the longest stored prefix of the packed `token_ids`, of at most `limit` tokens. Reads no shard."""
    n_prompt_tokens = len(token_ids) // TOKEN_BYTES
    usable = token_ids[: limit * TOKEN_BYTES]
    keys = list(full_chunks(namespace.root_key, usable, chunk_tokens))
    with index.reading() as tx:
        rows = chunk_rows.find(tx, [key for _, key in keys])
        chain: list[ChunkRecord] = []
        lost = False
        for row in walk(rows, keys, namespace.id, usable, chunk_tokens):
            if row.file_name is None:
                lost = True
                break
            chain.append(row)
        start = chain[-1].end if chain else 0
        n_tokens = start
        rest = usable[start * TOKEN_BYTES :]
        if rest:
            candidates = chunk_rows.children(
                tx,
                namespace.id,
                chain[-1].key if chain else None,
                first_token(rest),
                MAX_CANDIDATES,
            )
            runs = [(common_run(c.token_ids, rest), c) for c in candidates if c.start == start]
            # Of equally long runs the smallest file is read.
            longest = max(runs, key=lambda run: (run[0], -run[1].n_bytes), default=None)
            if longest is not None and longest[0]:
                chain.append(longest[1])
                n_tokens += longest[0]
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
    found = chunk_rows.with_state(tx, namespace.id, [record.key for record in whole], first_token(usable))
    proven = [record for record in found if ends.get(record.parent_key) == record.start and is_whole(record)]
    if not proven:
        return []
    last = max(proven, key=lambda record: record.end)
    return [*(record for record in chain if record.end <= last.start), last]
