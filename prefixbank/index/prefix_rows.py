"""Own the rows of named prefixes and their pins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa

from prefixbank.index.chunk_rows import KEYS_PER_QUERY
from prefixbank.index.soundness import require_types, signatures
from prefixbank.schema import chunks, prefixes
from prefixbank.values import ChunkKey, PrefixRecord

__all__ = ["delete", "list_all", "move", "name", "pinned_chain_keys", "rename", "set_pinned"]


_COLUMNS = [prefixes.c[field.name] for field in fields(PrefixRecord)]
_SIGNATURES = signatures(PrefixRecord)


def _from_row(row: Sequence[Any]) -> PrefixRecord:
    require_types("prefixes", row, _SIGNATURES)
    return PrefixRecord(*row)


def _where(prefix_name: str, namespace_id: int | None) -> list[sa.ColumnElement[bool]]:
    conditions = [prefixes.c.name == prefix_name]
    if namespace_id is not None:
        conditions.append(prefixes.c.namespace_id == namespace_id)
    return conditions


def list_all(tx: sa.Connection, prefix_name: str | None = None) -> list[PrefixRecord]:
    """Return the named prefixes (those of one name, one for each namespace, if it is given), sorted by name."""
    query = sa.select(*_COLUMNS).order_by(prefixes.c.name, prefixes.c.namespace_id)
    if prefix_name is not None:
        query = query.where(*_where(prefix_name, None))
    return [_from_row(row) for row in tx.execute(query)]


def name(tx: sa.Connection, prefix: PrefixRecord) -> None:
    """Give a stored prefix its name, in place of what had this name in its namespace.

    A pin that the name had stays; `pinned=False` does not take it away. A prefix that was evicted meanwhile gets a name
    that holds nothing.
    """
    where = _where(prefix.name, prefix.namespace_id)
    was_pinned = tx.execute(sa.select(prefixes.c.pinned).where(*where)).scalar_one_or_none()
    tx.execute(sa.delete(prefixes).where(*where))
    key = tx.execute(sa.select(chunks.c.key).where(chunks.c.key == prefix.chunk_key)).scalar_one_or_none()
    tx.execute(
        sa.insert(prefixes).values(
            name=prefix.name,
            namespace_id=prefix.namespace_id,
            chunk_key=key,
            n_tokens=prefix.n_tokens,
            pinned=prefix.pinned or bool(was_pinned),
            source_digest=prefix.source_digest,
            created_at=prefix.created_at,
        )
    )


def rename(tx: sa.Connection, prefix: PrefixRecord, new_name: str) -> bool:
    """Give a named prefix, with its pin, another name, in place of what had it; False where it is not there any more.

    Its chunk may have been superseded by one that covers it since the record was read.
    """
    of_this = (*_where(prefix.name, prefix.namespace_id), prefixes.c.source_digest == prefix.source_digest)
    if tx.execute(sa.select(prefixes.c.name).where(*of_this)).one_or_none() is None:
        return False
    delete(tx, new_name, prefix.namespace_id)
    tx.execute(sa.update(prefixes).where(*of_this).values(name=new_name))
    return True


def set_pinned(tx: sa.Connection, prefix_name: str, pinned: bool, namespace_id: int | None = None) -> int:
    """Pin or unpin a name and return how many prefixes have it."""
    where = _where(prefix_name, namespace_id)
    return tx.execute(sa.update(prefixes).where(*where).values(pinned=pinned)).rowcount


def delete(tx: sa.Connection, prefix_name: str, namespace_id: int | None = None) -> int:
    """Take a name away and return how many prefixes had it. The chunks stay."""
    return tx.execute(sa.delete(prefixes).where(*_where(prefix_name, namespace_id))).rowcount


def move(tx: sa.Connection, from_key: ChunkKey, to_key: ChunkKey) -> None:
    """Let the names of one chunk name another, which begins with the same token ids."""
    tx.execute(sa.update(prefixes).where(prefixes.c.chunk_key == from_key).values(chunk_key=to_key))


def chain_keys(tx: sa.Connection, last_keys: Iterable[ChunkKey]) -> set[ChunkKey]:
    """Return the keys of the chunks that the given ones end, themselves included."""
    columns = (chunks.c.key, chunks.c.parent_key)
    known: set[ChunkKey] = set()
    pending = list(last_keys)
    for low in range(0, len(pending), KEYS_PER_QUERY):
        asked = pending[low : low + KEYS_PER_QUERY]
        ends = sa.select(*columns).where(chunks.c.key.in_(asked)).cte("chain", recursive=True)
        chain = ends.union(sa.select(*columns).join(ends, chunks.c.key == ends.c.parent_key))
        known.update(ChunkKey(key) for key in tx.execute(sa.select(chain.c.key)).scalars())
    return known


def pinned_chain_keys(tx: sa.Connection) -> set[ChunkKey]:
    """Return the keys of all chunks that a pinned prefix stands on."""
    ends = tx.execute(
        sa.select(prefixes.c.chunk_key).where(prefixes.c.pinned, prefixes.c.chunk_key.is_not(None))
    ).scalars()
    return chain_keys(tx, {ChunkKey(key) for key in ends})
