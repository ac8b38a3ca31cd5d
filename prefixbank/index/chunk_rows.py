"""Own the rows of chunks, the tick that orders their use, and the sum of their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields

import sqlalchemy as sa

from prefixbank.chunking import first_token
from prefixbank.schema import bank_state, chunks, prefixes
from prefixbank.values import ChunkKey, ChunkRecord

__all__ = [
    "Totals",
    "add",
    "children",
    "count_children",
    "delete",
    "find",
    "heal",
    "iter_by_use",
    "list_all",
    "replaced_by",
    "same_chunk",
    "shorter_siblings",
    "totals",
    "touch",
    "with_state",
]

_COLUMNS = [chunks.c[field.name] for field in fields(ChunkRecord)]  # all but first_token, which only queries need
KEYS_PER_QUERY = 10_000  # SQLite binds 32,766 parameters at most


@dataclass(frozen=True, slots=True)
class Totals:
    """Say how much the index knows of: chunks, tokens in them, and bytes on disk."""

    n_chunks: int
    n_tokens: int
    disk_bytes: int
    n_holes: int


def _from_row(row: Sequence[object]) -> ChunkRecord:
    return ChunkRecord(*row)  # type: ignore[arg-type]  # the columns are selected in the fields' order


def same_chunk(left: ChunkRecord, right: ChunkRecord) -> bool:
    """Tell whether two records are the same token ids at the same place of the same chain; keys prove nothing."""
    return (
        left.parent_key == right.parent_key
        and left.namespace_id == right.namespace_id
        and left.start == right.start
        and left.token_ids == right.token_ids
    )


def find(tx: sa.Connection, keys: Sequence[ChunkKey]) -> dict[ChunkKey, ChunkRecord]:
    """Return the rows of the given keys that exist. Whether a row is the chunk that was meant is the caller's check."""
    found: dict[ChunkKey, ChunkRecord] = {}
    for low in range(0, len(keys), KEYS_PER_QUERY):
        query = sa.select(*_COLUMNS).where(chunks.c.key.in_(keys[low : low + KEYS_PER_QUERY]))
        for row in tx.execute(query):
            record = _from_row(row)
            found[record.key] = record
    return found


def children(
    tx: sa.Connection, namespace_id: int, parent_key: ChunkKey | None, beginning: int, limit: int
) -> list[ChunkRecord]:
    """Return the chunks with a shard behind `parent_key` that begin with token `beginning`, the last used first."""
    query = (
        sa.select(*_COLUMNS)
        .where(
            chunks.c.parent_key.is_not_distinct_from(parent_key),
            chunks.c.namespace_id == namespace_id,
            chunks.c.first_token == beginning,
            chunks.c.file_name.is_not(None),
        )
        .order_by(chunks.c.last_used.desc())
        .limit(limit)
    )
    return [_from_row(row) for row in tx.execute(query)]


def children_of(tx: sa.Connection, namespace_id: int, parent_key: ChunkKey | None, limit: int) -> list[ChunkRecord]:
    """Return chunks with a shard that stand on `parent_key`, whatever they begin with."""
    query = (
        sa.select(*_COLUMNS)
        .where(
            chunks.c.parent_key.is_not_distinct_from(parent_key),
            chunks.c.namespace_id == namespace_id,
            chunks.c.file_name.is_not(None),
        )
        .limit(limit)
    )
    return [_from_row(row) for row in tx.execute(query)]


def count_children(tx: sa.Connection, key: ChunkKey) -> int:
    """Return how many chunks stand directly on this one."""
    return tx.execute(sa.select(sa.func.count()).where(chunks.c.parent_key == key)).scalar_one()


def with_state(
    tx: sa.Connection, namespace_id: int, parent_keys: Sequence[ChunkKey], beginning: int
) -> list[ChunkRecord]:
    """Return the chunks with states that stand on the given ones, or are first chunks with token `beginning`."""
    found: list[ChunkRecord] = []
    first = chunks.c.parent_key.is_(None) & (chunks.c.first_token == beginning)
    for low in range(0, max(len(parent_keys), 1), KEYS_PER_QUERY):
        behind = chunks.c.parent_key.in_(parent_keys[low : low + KEYS_PER_QUERY])
        query = sa.select(*_COLUMNS).where(
            chunks.c.namespace_id == namespace_id,
            chunks.c.has_state,
            chunks.c.file_name.is_not(None),
            (behind | first) if low == 0 else behind,
        )
        found += [_from_row(row) for row in tx.execute(query)]
    return found


def shorter_siblings(tx: sa.Connection, record: ChunkRecord, *, with_state: bool = False) -> list[ChunkRecord]:
    """Return the tails that `record` covers: same parent, and their token ids are its first ones.

    Tails with states are where those can be resumed: they are other ones, returned only `with_state`.
    """
    rows = tx.execute(
        sa.select(*_COLUMNS).where(
            chunks.c.parent_key.is_not_distinct_from(record.parent_key),
            chunks.c.namespace_id == record.namespace_id,
            chunks.c.first_token == first_token(record.token_ids),
            chunks.c.n_tokens < record.n_tokens,
            chunks.c.has_state == with_state,
        )
    )
    return [tail for tail in map(_from_row, rows) if record.token_ids.startswith(tail.token_ids)]


def add(tx: sa.Connection, record: ChunkRecord, tick: int, now_s: int) -> bool:
    """Add a chunk whose shard is published, or give a hole its shard back; `tick` is that of the whole chain's use.

    A chunk with states also takes the place of the same chunk without: see `replaced_by`. Returns False where the row
    is there with a shard as good already (another writer was first), or where the key belongs to other token ids, or
    where the parent is not there: then the caller's file is not needed.
    """
    values = asdict(record) | {
        "first_token": first_token(record.token_ids),
        "last_used": tick,
        "last_used_at": now_s,
        "hits": 0,
        "created_at": now_s,
    }
    wanted = [record.key] if record.parent_key is None else [record.key, record.parent_key]
    known = find(tx, wanted)
    row = known.get(record.key)
    if row is not None:
        if not same_chunk(row, record) or (row.file_name is not None and not replaced_by(row, record)):
            return False
        tx.execute(sa.update(chunks).where(chunks.c.key == record.key).values(**values))
        _add_bytes(tx, -row.disk_bytes)
    elif record.parent_key is not None and record.parent_key not in known:
        return False
    else:
        tx.execute(sa.insert(chunks).values(**values))
    _add_bytes(tx, record.disk_bytes)
    return True


def replaced_by(row: ChunkRecord, record: ChunkRecord) -> bool:
    """Tell whether the new record of a chunk is worth more than its row: it holds states, and the row does not."""
    return record.has_state and not row.has_state


def delete(tx: sa.Connection, record: ChunkRecord) -> bool:
    """Delete a chunk that no other stands on; returns False where it changed meanwhile or has children."""
    if count_children(tx, record.key):
        return False
    gone = tx.execute(sa.delete(chunks).where(*_unchanged(record))).rowcount == 1
    if gone:
        _add_bytes(tx, -record.disk_bytes)
    return gone


def heal(tx: sa.Connection, record: ChunkRecord) -> bool:
    """Forget a shard that was lost: delete the row, or make it a hole where other chunks or names stand on it.

    Returns False where the row changed meanwhile (then it is not this shard's any more).
    """
    named = tx.execute(sa.select(sa.func.count()).where(prefixes.c.chunk_key == record.key)).scalar_one()
    if not named and delete(tx, record):
        return True
    hole = {"file_name": None, "n_bytes": 0, "disk_bytes": 0, "data_offset": 0, "digest": b"", "has_state": False}
    changed = tx.execute(sa.update(chunks).where(*_unchanged(record)).values(**hole)).rowcount == 1
    if changed:
        _add_bytes(tx, -record.disk_bytes)
    return changed


def _unchanged(record: ChunkRecord) -> list[sa.ColumnElement[bool]]:
    return [
        chunks.c.key == record.key,
        chunks.c.file_name.is_not_distinct_from(record.file_name),
    ]


def next_tick(tx: sa.Connection) -> int:
    """Advance the bank's counter and return it."""
    advance = sa.update(bank_state).values(tick=bank_state.c.tick + 1).returning(bank_state.c.tick)
    return int(tx.execute(advance).scalar_one())


def touch(tx: sa.Connection, keys: Sequence[ChunkKey], tick: int, now_s: int, *, hits: int = 1) -> None:
    """Note a use of a chain: all its chunks get one tick, so that no parent is older than its child."""
    if not keys:
        return
    statement = (
        sa.update(chunks)
        .where(chunks.c.key == sa.bindparam("of_key"))
        .values(last_used=tick, last_used_at=now_s, hits=chunks.c.hits + hits)
    )
    tx.execute(statement, [{"of_key": key} for key in keys])


def iter_by_use(tx: sa.Connection, namespace_id: int | None = None) -> Iterator[ChunkRecord]:
    """Yield the chunks from the least to the most recently used, children before their parents."""
    query = sa.select(*_COLUMNS).order_by(chunks.c.last_used, chunks.c.start.desc())
    if namespace_id is not None:
        query = query.where(chunks.c.namespace_id == namespace_id)
    for row in tx.execute(query.execution_options(yield_per=256)):
        yield _from_row(row)


def list_all(tx: sa.Connection, namespace_id: int | None = None) -> list[ChunkRecord]:
    """Return all chunks, by namespace and start."""
    query = sa.select(*_COLUMNS).order_by(chunks.c.namespace_id, chunks.c.start, chunks.c.key)
    if namespace_id is not None:
        query = query.where(chunks.c.namespace_id == namespace_id)
    return [_from_row(row) for row in tx.execute(query)]


def disk_bytes(tx: sa.Connection) -> int:
    """Return the sum of all chunks' bytes on disk, as kept by every add and delete."""
    return int(tx.execute(sa.select(bank_state.c.disk_bytes)).scalar_one())


def totals(tx: sa.Connection) -> Totals:
    """Return the sums over all rows."""
    row = tx.execute(
        sa.select(
            sa.func.count(),
            sa.func.coalesce(sa.func.sum(chunks.c.n_tokens), 0),
            sa.func.coalesce(sa.func.sum(chunks.c.disk_bytes), 0),
            sa.func.count().filter(chunks.c.file_name.is_(None)),
        ).select_from(chunks)
    ).one()
    return Totals(*row)


def _add_bytes(tx: sa.Connection, n_bytes: int) -> None:
    tx.execute(sa.update(bank_state).values(disk_bytes=bank_state.c.disk_bytes + n_bytes))
