"""Own turning down what no row of ours can hold: SQLite keeps any value in any column, and has no checksums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, get_args, get_type_hints

from prefixbank.errors import IndexCorruptError
from prefixbank.sealing import SHA256_FORM

__all__ = ["Signatures", "is_digest", "require", "require_types", "signatures"]

Signatures = frozenset[tuple[type, ...]]


def signatures(record_type: type) -> Signatures:
    """Return the types of values that a row can have which becomes such a record, in the order of its fields."""
    return frozenset(product(*map(_types, get_type_hints(record_type).values())))


def _types(hint: Any) -> tuple[type, ...]:
    """Return the types that a field's annotation stands for."""
    if members := get_args(hint):
        return tuple(one for member in members for one in _types(member))
    return (getattr(hint, "__supertype__", hint),)


def require_types(table: str, row: Sequence[object], allowed: Signatures) -> None:
    """Raise `IndexCorruptError` unless the row's values are of types that rows of the table have."""
    require(table, tuple(map(type, row)) in allowed)


def require(table: str, is_sound: bool) -> None:
    """Raise `IndexCorruptError` for a row that is not sound. No value is quoted: it may be of a prompt."""
    if not is_sound:
        raise IndexCorruptError(f"a row of the index's {table} is damaged: run `prefixbank repair`")


def is_digest(value: str) -> bool:
    """Tell whether a text is a digest as the index holds it: 64 hexadecimal digits."""
    return SHA256_FORM.fullmatch(value) is not None
