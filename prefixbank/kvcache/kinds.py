"""Own the cache kinds: how each mlx-lm cache class is described, read and rebuilt, and the registry of them.

A kind is an adapter for exactly one cache class (subclasses count as other classes: they may hold other state). There
are three sorts: `RowKind` for caches with one row per token and head, `StateKind` for those whose arrays hold all
tokens at once, and `ListKind` for those made of other caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from prefixbank.errors import UnsupportedCacheError
from prefixbank.layout import CacheLayout, LayerLayout

__all__ = [
    "CacheKind",
    "ListKind",
    "RowKind",
    "StateKind",
    "Window",
    "is_list_kind",
    "is_row_kind",
    "is_state_kind",
    "keeps_all_rows",
    "kind_named",
    "kind_of",
    "register_cache_kind",
    "window_of",
]

Window = tuple[int, int]
"""What a sliding window needs to go on at some token: the last `n_recent` rows, and the first `n_kept` ones."""


class CacheKind(Protocol):
    """Adapt one cache class. `name` is stored in shards and never changes meaning; classes compare by identity."""

    name: str
    cache_class: type

    def settings(self, layer_cache: Any) -> dict[str, int]:
        """Return what besides its arrays makes two caches of this class differ, as small integers."""
        ...


@runtime_checkable
class RowKind(CacheKind, Protocol):
    """Adapt a cache with one row per token and head, none of which changes once it is written."""

    def n_tokens(self, layer_cache: Any) -> int:
        """Return how many tokens the cache has seen."""
        ...

    def rows(self, layer_cache: Any) -> dict[str, mx.array]:
        """Return the rows by role, each `[1, n_heads, n, width]`; {} for an empty cache.

        Without a window the first `n_tokens` of them count, and what lies behind is room. With one, the `n` rows are
        the last ones in temporal order (of at least `n_recent` tokens, if the cache has seen so many) without the kept
        ones.
        """
        ...

    def window(self, settings: Mapping[str, int]) -> Window | None:
        """Return what a cache of these settings needs to go on, or None where it needs all rows."""
        ...

    def empty(self, settings: Mapping[str, int]) -> Any:
        """Return a cache that has seen nothing."""
        ...

    def rebuild(self, layout: LayerLayout, arrays: Mapping[str, mx.array], n_tokens: int) -> Any:
        """Return a cache of `n_tokens`.

        Without a window it holds the first `n_tokens` rows of `arrays` and may write behind them; with one, `arrays`
        are exactly the rows that are needed: the kept ones and the last ones.
        """
        ...


@runtime_checkable
class StateKind(CacheKind, Protocol):
    """Adapt a cache whose arrays hold all tokens at once, and are replaced, never written into."""

    def states(self, layer_cache: Any) -> dict[str, mx.array]:
        """Return the arrays by role; empty slots are left out."""
        ...

    def restore(self, layout: LayerLayout, states: Mapping[str, mx.array]) -> Any:
        """Return a cache that holds the arrays."""
        ...


@runtime_checkable
class ListKind(CacheKind, Protocol):
    """Adapt a cache that is made of others."""

    def members(self, layer_cache: Any) -> Sequence[Any]:
        """Return the caches that it is made of."""
        ...

    def join(self, members: Sequence[Any]) -> Any:
        """Return a cache made of the given ones."""
        ...


class KVCacheKind:
    """Adapt `KVCache`, which over-allocates; keys and values may differ in width and heads (MLA)."""

    name = "kv"
    cache_class: type = KVCache

    def settings(self, layer_cache: Any) -> dict[str, int]:
        return {}

    def n_tokens(self, layer_cache: Any) -> int:
        return int(layer_cache.offset)

    def rows(self, layer_cache: Any) -> dict[str, mx.array]:
        if layer_cache.keys is None:
            return {}
        return {"keys": layer_cache.keys, "values": layer_cache.values}

    def window(self, settings: Mapping[str, int]) -> Window | None:
        return None

    def empty(self, settings: Mapping[str, int]) -> Any:
        return self.cache_class()

    def rebuild(self, layout: LayerLayout, arrays: Mapping[str, mx.array], n_tokens: int) -> Any:
        layer_cache = self.empty({})
        layer_cache.keys, layer_cache.values = arrays["keys"], arrays["values"]
        layer_cache.offset = n_tokens
        return layer_cache


class ConcatenateKVCacheKind(KVCacheKind):
    """Adapt `ConcatenateKVCache`, which hands out its arrays whole: they must end with the last row."""

    name = "concatenate-kv"
    cache_class = ConcatenateKVCache

    def rebuild(self, layout: LayerLayout, arrays: Mapping[str, mx.array], n_tokens: int) -> Any:
        cut = {role: rows[..., :n_tokens, :] for role, rows in arrays.items()}
        return super().rebuild(layout, cut, n_tokens)


class QuantizedKVCacheKind:
    """Adapt `QuantizedKVCache`: keys and values as packed words, scales and biases."""

    name = "quantized-kv"
    cache_class: type = QuantizedKVCache
    _parts = ("packed", "scales", "biases")

    def settings(self, layer_cache: Any) -> dict[str, int]:
        return {"group_size": int(layer_cache.group_size), "bits": int(layer_cache.bits)}

    def n_tokens(self, layer_cache: Any) -> int:
        return int(layer_cache.offset)

    def rows(self, layer_cache: Any) -> dict[str, mx.array]:
        if layer_cache.keys is None:
            return {}
        return {
            f"{tensor}.{part}": rows
            for tensor in ("keys", "values")
            for part, rows in zip(self._parts, getattr(layer_cache, tensor), strict=True)
        }

    def window(self, settings: Mapping[str, int]) -> Window | None:
        return None

    def empty(self, settings: Mapping[str, int]) -> Any:
        return self.cache_class(**settings)

    def rebuild(self, layout: LayerLayout, arrays: Mapping[str, mx.array], n_tokens: int) -> Any:
        layer_cache = self.empty(dict(layout.settings))
        layer_cache.keys = tuple(arrays[f"keys.{part}"] for part in self._parts)
        layer_cache.values = tuple(arrays[f"values.{part}"] for part in self._parts)
        layer_cache.offset = n_tokens
        return layer_cache


class RotatingKVCacheKind:
    """Adapt `RotatingKVCache`: a window of the last `max_size` rows, `keep` of which are the first ones for ever.

    After a step of S > 1 tokens it holds up to max_size - 1 + S rows in temporal order; steps of one token write into a
    ring. Going on from the last `max_size` rows is bit-identical to going on live: a longer step drops all but
    max_size - 1 of them first, and a step of one token overwrites the oldest.
    """

    name = "rotating-kv"
    cache_class: type = RotatingKVCache

    def settings(self, layer_cache: Any) -> dict[str, int]:
        return {"max_size": int(layer_cache.max_size), "keep": int(layer_cache.keep)}

    def n_tokens(self, layer_cache: Any) -> int:
        return int(layer_cache.offset)

    def rows(self, layer_cache: Any) -> dict[str, mx.array]:
        if layer_cache.keys is None:
            return {}
        ordered = {
            "keys": layer_cache._temporal_order(layer_cache.keys),
            "values": layer_cache._temporal_order(layer_cache.values),
        }
        n_held = ordered["keys"].shape[2]
        if n_held < layer_cache.offset:  # rows were dropped behind the kept ones
            return {role: rows[..., layer_cache.keep :, :] for role, rows in ordered.items()}
        return ordered

    def window(self, settings: Mapping[str, int]) -> Window | None:
        return settings["max_size"] - settings["keep"], settings["keep"]

    def empty(self, settings: Mapping[str, int]) -> Any:
        return self.cache_class(settings["max_size"], keep=settings["keep"])

    def rebuild(self, layout: LayerLayout, arrays: Mapping[str, mx.array], n_tokens: int) -> Any:
        layer_cache = self.empty(dict(layout.settings))
        layer_cache.keys, layer_cache.values = arrays["keys"], arrays["values"]
        layer_cache.offset = n_tokens
        layer_cache._idx = arrays["keys"].shape[2]
        return layer_cache


class ChunkedKVCacheKind:
    """Adapt `ChunkedKVCache` (llama4), which drops all but the last `chunk_size` rows before each step."""

    name = "chunked-kv"
    cache_class: type = ChunkedKVCache

    def settings(self, layer_cache: Any) -> dict[str, int]:
        return {"chunk_size": int(layer_cache.chunk_size)}

    def n_tokens(self, layer_cache: Any) -> int:
        return int(layer_cache.offset)

    def rows(self, layer_cache: Any) -> dict[str, mx.array]:
        if layer_cache.keys is None:
            return {}
        n_held = layer_cache.offset - layer_cache.start_position
        return {"keys": layer_cache.keys[..., :n_held, :], "values": layer_cache.values[..., :n_held, :]}

    def window(self, settings: Mapping[str, int]) -> Window | None:
        return settings["chunk_size"], 0

    def empty(self, settings: Mapping[str, int]) -> Any:
        return self.cache_class(**settings)

    def rebuild(self, layout: LayerLayout, arrays: Mapping[str, mx.array], n_tokens: int) -> Any:
        layer_cache = self.empty(dict(layout.settings))
        layer_cache.keys, layer_cache.values = arrays["keys"], arrays["values"]
        layer_cache.offset = n_tokens
        layer_cache.start_position = n_tokens - arrays["keys"].shape[2]
        return layer_cache


class ArraysCacheKind:
    """Adapt `ArraysCache`: slots of recurrent state (Mamba, linear attention, convolutions), some of them empty."""

    name = "arrays"
    cache_class: type = ArraysCache

    def settings(self, layer_cache: Any) -> dict[str, int]:
        return {"n_slots": len(layer_cache.cache)}

    def states(self, layer_cache: Any) -> dict[str, mx.array]:
        if layer_cache.left_padding is not None or layer_cache.lengths is not None:
            raise UnsupportedCacheError("ArraysCache of a padded batch can't be stored")
        return {str(slot): state for slot, state in enumerate(layer_cache.cache) if state is not None}

    def restore(self, layout: LayerLayout, states: Mapping[str, mx.array]) -> Any:
        layer_cache = self.cache_class(dict(layout.settings)["n_slots"])
        for slot, state in states.items():
            layer_cache[int(slot)] = state
        return layer_cache


class CacheListKind:
    """Adapt `CacheList`: several caches of one layer."""

    name = "list"
    cache_class: type = CacheList

    def settings(self, layer_cache: Any) -> dict[str, int]:
        return {}

    def members(self, layer_cache: Any) -> Sequence[Any]:
        return list(layer_cache.caches)

    def join(self, members: Sequence[Any]) -> Any:
        return self.cache_class(*members)


class NoCacheKind:
    """Adapt `None`: a layer that keeps nothing."""

    name = "none"
    cache_class: type = type(None)

    def settings(self, layer_cache: Any) -> dict[str, int]:
        return {}

    def states(self, layer_cache: Any) -> dict[str, mx.array]:
        return {}

    def restore(self, layout: LayerLayout, states: Mapping[str, mx.array]) -> Any:
        return None


@lru_cache(maxsize=256)
def window_of(leaf: LayerLayout) -> Window | None:
    """Return what a stored cache needs to go on, or None where it needs all its rows or has none."""
    kind = kind_named(leaf.kind)
    return kind.window(dict(leaf.settings)) if is_row_kind(kind) else None


def keeps_all_rows(layout: CacheLayout) -> bool:
    """Tell whether a live cache of the layout holds all that it ever held, so that any prefix of it can be taken."""
    return not layout.has_state and all(window_of(leaf) is None for _, leaf in layout.leaves())


# The sort of each kind's class: an isinstance check of a protocol costs 20 microseconds, and a prefix of a few layers
# would take hundreds.
_sorts: dict[type, type] = {}
_by_class: dict[type, CacheKind] = {}
_by_name: dict[str, CacheKind] = {}


def register_cache_kind(kind: CacheKind) -> None:
    """Add an adapter, in place of one for the same class or of the same name. See docs/cache-kinds.md for an example.

    Raises `UnsupportedCacheError` for an object that is no `RowKind`, `StateKind` or `ListKind`.
    """
    sort = next((sort for sort in (RowKind, StateKind, ListKind) if isinstance(kind, sort)), None)
    if sort is None:
        raise UnsupportedCacheError(f"{type(kind).__name__} is no RowKind, StateKind or ListKind")
    _sorts[type(kind)] = sort
    window_of.cache_clear()
    _by_class[kind.cache_class] = kind
    _by_name[kind.name] = kind


def is_row_kind(kind: CacheKind) -> TypeGuard[RowKind]:
    """Tell whether a registered kind adapts a cache of rows."""
    return _sorts[type(kind)] is RowKind


def is_state_kind(kind: CacheKind) -> TypeGuard[StateKind]:
    """Tell whether a registered kind adapts a cache of states."""
    return _sorts[type(kind)] is StateKind


def is_list_kind(kind: CacheKind) -> TypeGuard[ListKind]:
    """Tell whether a registered kind adapts a cache made of others."""
    return _sorts[type(kind)] is ListKind


def kind_of(layer_cache: Any) -> CacheKind:
    """Return the adapter of a layer's cache. Raises `UnsupportedCacheError` that names its class."""
    kind = _by_class.get(type(layer_cache))
    if kind is None:
        raise UnsupportedCacheError(
            f"{type(layer_cache).__name__} can't be stored, since no adapter is registered for it: generation goes on "
            "without the bank"
        )
    return kind


def kind_named(name: str) -> CacheKind:
    """Return the adapter of a stored kind name. Raises `UnsupportedCacheError`."""
    kind = _by_name.get(name)
    if kind is None:
        raise UnsupportedCacheError(f"no adapter for the cache kind {name!r} is registered")
    return kind


for _kind in (
    KVCacheKind(),
    ConcatenateKVCacheKind(),
    QuantizedKVCacheKind(),
    RotatingKVCacheKind(),
    ChunkedKVCacheKind(),
    ArraysCacheKind(),
    CacheListKind(),
    NoCacheKind(),
):
    register_cache_kind(_kind)
