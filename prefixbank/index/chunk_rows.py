"""Own the rows of chunks, the tick that orders their use, and the sum of their bytes.

What a match asks, and what is written for many chunks at once, goes to sqlite3 itself: SQLAlchemy would take several
times as long to expand a list of keys as SQLite to look them up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from prefixbank.chunking import TOKEN_BYTES, first_token
from prefixbank.index.soundness import require_types, signatures
from prefixbank.schema import bank_state, chunks, prefixes
from prefixbank.values import NO_SHARD, ChunkKey, ChunkRecord

__all__ = [
    "Totals",
    "add",
    "beginnings",
    "children",
    "correct",
    "count_children",
    "delete",
    "delete_many",
    "file_names",
    "find",
    "find_chain",
    "heal",
    "iter_by_use",
    "list_all",
    "named_among",
    "replaced_by",
    "same_chunk",
    "shorter_siblings",
    "totals",
    "touch",
    "touch_many",
    "with_state",
]

_COLUMNS = [chunks.c[field.name] for field in fields(ChunkRecord)]  # all but first_token, which only queries need
_SELECT = str(sa.select(*_COLUMNS))
_SIGNATURES = signatures(ChunkRecord)
_BOOLEAN = _COLUMNS.index(chunks.c.has_state)
KEYS_PER_QUERY = 10_000  # SQLite binds 32,766 parameters at most


@dataclass(frozen=True, slots=True)
class Totals:
    """Say how much the index knows of: chunks, tokens in them, and bytes on disk."""

    n_chunks: int
    n_tokens: int
    disk_bytes: int
    n_holes: int


def _from_row(row: Sequence[object]) -> ChunkRecord:
    require_types("chunks", row, _SIGNATURES)
    return ChunkRecord(*row)  # type: ignore[arg-type]  # the columns are selected in the fields' order


def _sqlite(tx: sa.Connection) -> Any:
    """Return sqlite3's own connection, inside the same transaction; `Index` turns its errors into ours."""
    return tx.connection.driver_connection


def _from_sqlite(row: tuple[Any, ...]) -> ChunkRecord:
    """Return the record of a row of `_SELECT`; sqlite3 knows no booleans."""
    return _from_row((*row[:_BOOLEAN], bool(row[_BOOLEAN]), *row[_BOOLEAN + 1 :]))


def _padded(keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Return the keys, the last one repeated up to a power of two: so few statements are ever prepared."""
    n = 1 << (len(keys) - 1).bit_length()
    return [*keys, *[keys[-1]] * (n - len(keys))]


@cache
def _marks(n: int) -> str:
    return ", ".join("?" * n)


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
        asked = _padded(keys[low : low + KEYS_PER_QUERY])
        rows = _sqlite(tx).execute(f"{_SELECT} WHERE key IN ({_marks(len(asked))})", asked)
        found |= {row[0]: _from_sqlite(row) for row in rows.fetchall()}
    return found


def find_chain(tx: sa.Connection, keys: Sequence[ChunkKey]) -> dict[ChunkKey, ChunkRecord]:
    """Return the rows of chunks that follow each other in a chain, as `find` does; none where the first is missing.

    Chunks that were stored in one go lie one behind the other: they are read from where the first one lies, which
    takes a third of the time of looking them all up. The others are looked up.
    """
    found: dict[ChunkKey, ChunkRecord] = {}
    rows = _sqlite(tx).execute(_SELECT_RUN, (keys[0], len(keys)))
    for key, row in zip(keys, rows, strict=False):
        if row[0] != key:
            break
        found[key] = _from_sqlite(row)
    rows.close()
    return found | find(tx, keys[len(found) :]) if found else {}


_PLACE = "(SELECT rowid FROM chunks WHERE key = ?)"
_SELECT_RUN = f"{_SELECT} WHERE rowid >= {_PLACE} ORDER BY rowid LIMIT ?"


def beginnings(
    tx: sa.Connection, namespace_id: int, parent_key: ChunkKey | None, beginning: int, limit: int
) -> list[tuple[ChunkKey, int, int, bytes]]:
    """Return key, start, bytes and token ids of what `children` returns."""
    rows = _sqlite(tx).execute(f"{_SELECT_BEGINNING} {_CHILDREN}", (parent_key, namespace_id, beginning, limit))
    found: list[tuple[ChunkKey, int, int, bytes]] = rows.fetchall()
    for row in found:
        require_types("chunks", row, _BEGINNING)
    return found


def children(
    tx: sa.Connection, namespace_id: int, parent_key: ChunkKey | None, beginning: int, limit: int
) -> list[ChunkRecord]:
    """Return the chunks with a shard behind `parent_key` that begin with token `beginning`, the last used first."""
    rows = _sqlite(tx).execute(f"{_SELECT} {_CHILDREN}", (parent_key, namespace_id, beginning, limit))
    return [_from_sqlite(row) for row in rows.fetchall()]


_BEGINNING = frozenset({(bytes, int, int, bytes)})
_SELECT_BEGINNING = str(sa.select(chunks.c.key, chunks.c.start, chunks.c.n_bytes, chunks.c.token_ids))
_CHILDREN = (
    "WHERE parent_key IS ? AND namespace_id = ? AND first_token = ? AND file_name IS NOT NULL "
    "ORDER BY last_used DESC LIMIT ?"
)


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
    tx: sa.Connection, namespace_id: int, parent_keys: Sequence[ChunkKey], token_ids: bytes
) -> list[ChunkRecord]:
    """Return the chunks with states that stand on the given ones, and the first chunks that `token_ids` begin with."""
    first = (namespace_id, first_token(token_ids), token_ids)
    found = _sqlite(tx).execute(f"{_SELECT} WHERE {_FIRST} AND {_HAS_STATE}", first).fetchall()
    for low in range(0, len(parent_keys), KEYS_PER_QUERY):
        asked = _padded(parent_keys[low : low + KEYS_PER_QUERY])
        where = f"parent_key IN ({_marks(len(asked))}) AND namespace_id = ? AND {_HAS_STATE}"
        found += _sqlite(tx).execute(f"{_SELECT} WHERE {where}", [*asked, namespace_id]).fetchall()
    return [_from_sqlite(row) for row in found]


_HAS_STATE = "has_state AND file_name IS NOT NULL"
_FIRST = (
    "parent_key IS NULL AND namespace_id = ? AND first_token = ? "
    f"AND token_ids = substr(?, 1, n_tokens * {TOKEN_BYTES})"
)


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
    return bool(delete_many(tx, [record]))


def delete_many(tx: sa.Connection, records: Iterable[ChunkRecord]) -> set[ChunkKey]:
    """Delete chunks one after another, as `delete` does, and return the keys of those that went.

    Children that come first make way for their parents. Of a record only its key, file name and bytes matter.
    """
    connection = _sqlite(tx)
    gone: set[ChunkKey] = set()
    n_bytes = 0
    for record in records:
        if connection.execute(_DELETE, (record.key, record.file_name)).rowcount == 1:
            gone.add(record.key)
            n_bytes += record.disk_bytes
    if gone:
        _add_bytes(tx, -n_bytes)
    return gone


_DELETE = (
    "DELETE FROM chunks WHERE key = ? AND file_name IS ? "
    "AND NOT EXISTS (SELECT 1 FROM chunks AS child WHERE child.parent_key = chunks.key)"
)


def heal(tx: sa.Connection, record: ChunkRecord) -> bool:
    """Forget a shard that was lost: delete the row, or make it a hole where other chunks or names stand on it.

    Returns False where the row changed meanwhile (then it is not this shard's any more).
    """
    named = tx.execute(sa.select(sa.func.count()).where(prefixes.c.chunk_key == record.key)).scalar_one()
    if not named and delete(tx, record):
        return True
    changed = tx.execute(sa.update(chunks).where(*_unchanged(record)).values(**NO_SHARD)).rowcount == 1
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
    return _advance(tx, 1)


def _advance(tx: sa.Connection, n_ticks: int) -> int:
    advance = sa.update(bank_state).values(tick=bank_state.c.tick + n_ticks).returning(bank_state.c.tick)
    return int(tx.execute(advance).scalar_one())


def touch(tx: sa.Connection, keys: Sequence[ChunkKey], tick: int, now_s: int, *, hits: int = 1) -> None:
    """Note a use of a chain: all its chunks get one tick, so that no parent is older than its child."""
    _note(tx, [(tick, now_s, hits, key) for key in keys])


def touch_many(tx: sa.Connection, uses: Sequence[Sequence[ChunkKey]], now_s: int) -> None:
    """Note uses of whole chains, in their order: each gets a tick, and a chunk that of its last use.

    Each chunk is written once, however often it was used. A use of a chunk is one of all its parents, so no parent is
    older than its child.
    """
    if not uses:
        return
    first_tick = _advance(tx, len(uses)) - len(uses) + 1
    ticks = {key: tick for tick, keys in enumerate(uses, first_tick) for key in keys}
    hits = Counter(key for keys in uses for key in keys)
    _note(tx, [(tick, now_s, hits[key], key) for key, tick in ticks.items()])


def _note(tx: sa.Connection, uses: list[tuple[int, int, int, ChunkKey]]) -> None:
    """Write down tick, time, hits and key of each chunk that was used."""
    statement = "UPDATE chunks SET last_used = ?, last_used_at = ?, hits = hits + ? WHERE key = ?"
    _sqlite(tx).executemany(statement, uses)


def iter_by_use(tx: sa.Connection, namespace_id: int | None = None) -> Generator[tuple[ChunkRecord, int], None, None]:
    """Yield each chunk and how many others stand on it, the least recently used first, children before their parents.

    The records come without their token ids, which are most of a row.
    """
    child = chunks.alias("child")
    n_children = sa.select(sa.func.count()).where(child.c.parent_key == chunks.c.key).scalar_subquery()
    columns = [sa.literal_column("x''") if column is chunks.c.token_ids else column for column in _COLUMNS]
    query = sa.select(*columns, n_children).order_by(chunks.c.last_used, chunks.c.start.desc())
    if namespace_id is not None:
        query = query.where(chunks.c.namespace_id == namespace_id)
    with tx.execute(query.execution_options(yield_per=256)) as rows:
        for *row, n in rows:
            yield _from_row(row), n


def list_all(tx: sa.Connection, namespace_id: int | None = None) -> list[ChunkRecord]:
    """Return all chunks, by namespace and start."""
    query = sa.select(*_COLUMNS)
    if namespace_id is not None:
        query = query.where(chunks.c.namespace_id == namespace_id)
    # SQLite would move the token ids about to sort the rows.
    return sorted(map(_from_row, tx.execute(query)), key=attrgetter("namespace_id", "start", "key"))


def file_names(tx: sa.Connection) -> set[str]:
    """Return the names of all shards that rows name."""
    return set(tx.execute(sa.select(chunks.c.file_name).where(chunks.c.file_name.is_not(None))).scalars())


def named_among(tx: sa.Connection, names: Iterable[str]) -> set[str]:
    """Return those of the file names that rows name. A shard's name begins with its chunk's key."""
    keys = {ChunkKey(bytes.fromhex(name[:32])) for name in names if _BEGINS_WITH_KEY.match(name)}
    return {row.file_name for row in find(tx, list(keys)).values() if row.file_name is not None}


_BEGINS_WITH_KEY = re.compile(r"[0-9a-f]{32}")


def disk_bytes(tx: sa.Connection) -> int:
    """Return the sum of all chunks' bytes on disk, as kept by every add and delete."""
    row = tx.execute(sa.select(bank_state.c.disk_bytes)).one()
    require_types("bank_state", row, _ONE_NUMBER)
    return int(row[0])


_ONE_NUMBER = frozenset({(int,)})


def correct(tx: sa.Connection, record: ChunkRecord) -> None:
    """Let a row say of the file that it names what is proven of it; the sum of bytes is left to `recount`."""
    values = {name: getattr(record, name) for name in ("data_offset", "n_bytes", "disk_bytes", "digest", "has_state")}
    tx.execute(sa.update(chunks).where(*_unchanged(record)).values(**values))


def recount(tx: sa.Connection) -> int:
    """Set the kept sum of bytes to what the rows sum up to, and return it."""
    summed = int(tx.execute(sa.select(sa.func.coalesce(sa.func.sum(chunks.c.disk_bytes), 0))).scalar_one())
    tx.execute(sa.update(bank_state).values(disk_bytes=summed))
    return summed


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
