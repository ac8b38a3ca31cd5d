"""Own making a batch of one prompt cache: several continuations of one prefix in one forward pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

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

__all__ = ["can_widen", "widen"]

_KNOWN = {ArraysCache, ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache, type(None)}
"""Classes of which all arrays have the batch as their first axis. Others may hold anything."""


def can_widen(prompt_cache: Sequence[Any]) -> bool:
    """Tell whether all layers' caches are of classes that are known to work for a batch of one length."""
    return all(
        can_widen(layer_cache.caches) if type(layer_cache) is CacheList else type(layer_cache) in _KNOWN
        for layer_cache in prompt_cache
    )


def widen(prompt_cache: Sequence[Any], n_rows: int, n_more: int) -> list[Any]:
    """Return a prompt cache of `n_rows` equal sequences, with room for `n_more` tokens; the given one stays as it is.

    mlx-lm's caches of one sequence work for batches of equal lengths too. Its batch classes, which are for unequal
    ones, know neither quantised caches nor llama4's. Shorter continuations are padded on the right: no layer looks
    ahead, so what stands before the padding is not touched by it. The cache can't be used behind it.
    """
    return [_widened(layer_cache, n_rows, n_more) for layer_cache in prompt_cache]


def _widened(layer_cache: Any, n_rows: int, n_more: int) -> Any:
    made = copy.copy(layer_cache)
    if type(layer_cache) is CacheList:
        made.caches = tuple(_widened(member, n_rows, n_more) for member in layer_cache.caches)
        return made
    for name, value in vars(layer_cache).items() if layer_cache is not None else ():
        if type(layer_cache) is KVCache and isinstance(value, mx.array):
            value = _with_room(value, layer_cache.offset + n_more)
        setattr(made, name, _repeated(value, n_rows))
    return made


def _repeated(value: Any, n_rows: int) -> Any:
    if isinstance(value, mx.array):
        return mx.broadcast_to(value, (n_rows, *value.shape[1:]))
    if isinstance(value, list | tuple):
        return type(value)(_repeated(part, n_rows) for part in value)
    return value


def _with_room(rows: mx.array, n_tokens: int) -> mx.array:
    """Return rows, `[1, n_heads, n, width]`, for exactly `n_tokens`, so that one copy holds all that is to come."""
    n_missing = n_tokens - rows.shape[2]
    if n_missing <= 0:
        return rows[..., :n_tokens, :]
    return mx.pad(rows, [(0, 0), (0, 0), (0, n_missing), (0, 0)])
