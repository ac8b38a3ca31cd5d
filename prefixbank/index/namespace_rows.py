"""Own the rows of namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import sqlalchemy as sa

from prefixbank.index.soundness import is_digest, require, require_types, signatures
from prefixbank.schema import chunks, namespaces
from prefixbank.values import Namespace

__all__ = ["NamespaceUsage", "agree", "ensure", "find", "list_all", "list_usage"]


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """Say how much of the bank one namespace takes."""

    namespace: Namespace
    n_chunks: int
    n_tokens: int
    disk_bytes: int
    last_used_at: int


_COLUMNS = [namespaces.c[field.name] for field in fields(Namespace)]
_SIGNATURES = signatures(Namespace)


def _from_row(row: Sequence[Any]) -> Namespace:
    require_types("namespaces", row, _SIGNATURES)
    namespace = Namespace(*row)
    require(
        "namespaces",
        is_digest(namespace.fingerprint) and (not namespace.salt_digest or is_digest(namespace.salt_digest)),
    )
    return namespace


def find(tx: sa.Connection, fingerprint: str, salt_digest: str) -> Namespace | None:
    """Return the namespace of a fingerprint and salt, or None."""
    row = tx.execute(
        sa.select(*_COLUMNS).where(namespaces.c.fingerprint == fingerprint, namespaces.c.salt_digest == salt_digest)
    ).one_or_none()
    return None if row is None else _from_row(row)


def agree(known: Namespace | None, wanted: Namespace) -> bool:
    """Tell whether a stored namespace is what its fingerprint and salt make it: an import may have brought it."""
    return known is not None and (known.root_key, known.layout) == (wanted.root_key, wanted.layout)


def ensure(tx: sa.Connection, wanted: Namespace) -> Namespace:
    """Return the stored namespace equal to `wanted` (its `id` does not count), adding it where it is missing.

    One that does not `agree` is set right where it has no chunks, and returned as it is where it has.
    """
    known = find(tx, wanted.fingerprint, wanted.salt_digest)
    values = asdict(wanted)
    del values["id"]
    if known is None:
        tx.execute(sa.insert(namespaces).values(**values))
    elif agree(known, wanted) or _has_chunks(tx, known.id):
        return known
    else:
        tx.execute(sa.update(namespaces).where(namespaces.c.id == known.id).values(**values))
    added = find(tx, wanted.fingerprint, wanted.salt_digest)
    assert added is not None
    return added


def _has_chunks(tx: sa.Connection, namespace_id: int) -> bool:
    return tx.execute(sa.select(chunks.c.key).where(chunks.c.namespace_id == namespace_id).limit(1)).first() is not None


def list_all(tx: sa.Connection) -> list[Namespace]:
    """Return every namespace, the oldest first; looks at no chunk."""
    return [_from_row(row) for row in tx.execute(sa.select(*_COLUMNS).order_by(namespaces.c.id))]


def list_usage(tx: sa.Connection) -> list[NamespaceUsage]:
    """Return every namespace with what it holds, the oldest first."""
    rows = tx.execute(
        sa.select(
            *_COLUMNS,
            sa.func.count(chunks.c.key).label("n_chunks"),
            sa.func.coalesce(sa.func.sum(chunks.c.n_tokens), 0).label("n_tokens"),
            sa.func.coalesce(sa.func.sum(chunks.c.disk_bytes), 0).label("disk_bytes"),
            sa.func.coalesce(sa.func.max(chunks.c.last_used_at), 0).label("last_used_at"),
        )
        .outerjoin(chunks, chunks.c.namespace_id == namespaces.c.id)
        .group_by(namespaces.c.id)
        .order_by(namespaces.c.id)
    )
    n = len(_COLUMNS)
    return [NamespaceUsage(_from_row(row[:n]), *row[n:]) for row in rows]
