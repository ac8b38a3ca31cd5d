"""Own the cache kinds: how each mlx-lm cache class is described, read and rebuilt, and the registry of them.

A kind is an adapter for exactly one cache class (subclasses count as other classes: they may hold other state). All
kinds here keep one row per token and head, never change a row once it is written, and can be resumed at any token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache

from prefixbank.errors import UnsupportedCacheError
from prefixbank.layout import LayerLayout

__all__ = ["CacheKind", "kind_named", "kind_of", "register_cache_kind"]


class CacheKind(Protocol):
    """Adapt one cache class whose state is one row per token and head.

    `name` is stored in shards and never changes meaning. `cache_class` is the class, compared by identity.
    """

    name: str
    cache_class: type

    def settings(self, layer_cache: Any) -> dict[str, int]:
        """Return what besides the rows makes two caches of this class differ, as small integers."""
        ...

    def n_tokens(self, layer_cache: Any) -> int:
        """Return how many tokens the cache holds."""
        ...

    def arrays(self, layer_cache: Any) -> dict[str, mx.array]:
        """Return the rows by role, each `[1, n_heads, at least n_tokens, width]`; {} for an empty cache."""
        ...

    def rebuild(self, layout: LayerLayout, arrays: Mapping[str, mx.array], n_tokens: int) -> Any:
        """Return a cache that holds the first `n_tokens` rows of `arrays` and may write behind them."""
        ...


class KVCacheKind:
    """Adapt `KVCache`, which over-allocates; keys and values may differ in width and heads (MLA)."""

    name = "kv"
    cache_class: type = KVCache

    def settings(self, layer_cache: Any) -> dict[str, int]:
        return {}

    def n_tokens(self, layer_cache: Any) -> int:
        return int(layer_cache.offset)

    def arrays(self, layer_cache: Any) -> dict[str, mx.array]:
        if layer_cache.keys is None:
            return {}
        return {"keys": layer_cache.keys, "values": layer_cache.values}

    def rebuild(self, layout: LayerLayout, arrays: Mapping[str, mx.array], n_tokens: int) -> Any:
        layer_cache = self.cache_class()
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

    def arrays(self, layer_cache: Any) -> dict[str, mx.array]:
        if layer_cache.keys is None:
            return {}
        return {
            f"{tensor}.{part}": rows
            for tensor in ("keys", "values")
            for part, rows in zip(self._parts, getattr(layer_cache, tensor), strict=True)
        }

    def rebuild(self, layout: LayerLayout, arrays: Mapping[str, mx.array], n_tokens: int) -> Any:
        layer_cache = self.cache_class(**dict(layout.settings))
        layer_cache.keys = tuple(arrays[f"keys.{part}"] for part in self._parts)
        layer_cache.values = tuple(arrays[f"values.{part}"] for part in self._parts)
        layer_cache.offset = n_tokens
        return layer_cache


_by_class: dict[type, CacheKind] = {}
_by_name: dict[str, CacheKind] = {}


def register_cache_kind(kind: CacheKind) -> None:
    """Add an adapter, in place of one for the same class or of the same name."""
    _by_class[kind.cache_class] = kind
    _by_name[kind.name] = kind


def kind_of(layer_cache: Any) -> CacheKind:
    """Return the adapter of a layer's cache. Raises `UnsupportedCacheError` that names its class."""
    kind = _by_class.get(type(layer_cache))
    if kind is None:
        raise UnsupportedCacheError(
            f"{type(layer_cache).__name__} can't be stored yet: generation goes on without the bank"
        )
    return kind


def kind_named(name: str) -> CacheKind:
    """Return the adapter of a stored kind name. Raises `UnsupportedCacheError`."""
    kind = _by_name.get(name)
    if kind is None:
        raise UnsupportedCacheError(f"no adapter for the cache kind {name!r} is registered")
    return kind


for _kind in (KVCacheKind(), ConcatenateKVCacheKind(), QuantizedKVCacheKind()):
    register_cache_kind(_kind)
