"""Own the rows of measured rates: how fast a device computes and loads the prefixes of a namespace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import sqlalchemy as sa

from prefixbank.index.soundness import require_types, signatures
from prefixbank.schema import namespaces, rates
from prefixbank.values import Rates

__all__ = ["find", "list_all", "remember"]

_COLUMNS = [rates.c[field.name] for field in fields(Rates)]
_SIGNATURES = signatures(Rates)


def _from_row(row: Sequence[Any]) -> Rates:
    require_types("rates", row, _SIGNATURES)
    return Rates(*row)


def find(tx: sa.Connection, namespace_id: int, device: str) -> Rates | None:
    """Return what was measured for a namespace on a device, or None."""
    query = sa.select(*_COLUMNS).where(rates.c.namespace_id == namespace_id, rates.c.device == device)
    row = tx.execute(query).one_or_none()
    return None if row is None else _from_row(row)


def remember(tx: sa.Connection, measured: Rates) -> None:
    """Keep what was measured, in place of what was before; does nothing where the namespace is gone."""
    of_these = (rates.c.namespace_id == measured.namespace_id, rates.c.device == measured.device)
    tx.execute(sa.delete(rates).where(*of_these))
    namespace = sa.select(namespaces.c.id).where(namespaces.c.id == measured.namespace_id)
    if tx.execute(namespace).one_or_none() is not None:
        tx.execute(sa.insert(rates).values(**asdict(measured)))


def list_all(tx: sa.Connection) -> list[Rates]:
    """Return all that was measured, by namespace and device."""
    query = sa.select(*_COLUMNS).order_by(rates.c.namespace_id, rates.c.device)
    return [_from_row(row) for row in tx.execute(query)]
