"""Own reading rows out of live prompt caches, and the description of a cache's layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from prefixbank.errors import FingerprintMismatchError, UnsupportedCacheError
from prefixbank.kvcache.kinds import kind_of
from prefixbank.layout import CacheLayout, LayerLayout, RowArray

__all__ = ["MLX_DTYPES", "UNSIGNED", "CapturedCache", "describe", "n_cached_tokens"]

MLX_DTYPES: dict[str, mx.Dtype] = {
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "U32": mx.uint32,
    "U8": mx.uint8,
}
"""MLX's dtypes by safetensors code."""

_CODES = {dtype: code for code, dtype in MLX_DTYPES.items()}
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
"""The unsigned dtype of each width: numpy can't view bfloat16, and rows are moved as bits anyway."""


def describe(prompt_cache: Sequence[Any]) -> CacheLayout:
    """Return the layout of a prompt cache that holds at least one token; evaluates nothing.

    Raises `UnsupportedCacheError` for a class without adapter, a dtype that shards don't know, or a batch.
    """
    layers = []
    for layer_cache in prompt_cache:
        kind = kind_of(layer_cache)
        arrays = kind.arrays(layer_cache)
        if not arrays:
            raise UnsupportedCacheError(f"an empty {type(layer_cache).__name__} has no layout")
        row_arrays = []
        for role, rows in arrays.items():
            if rows.ndim != 4 or rows.shape[0] != 1:
                raise UnsupportedCacheError(
                    f"{type(layer_cache).__name__} holds {rows.shape}: only caches of one sequence can be stored"
                )
            if rows.dtype not in _CODES:
                raise UnsupportedCacheError(f"KV of dtype {rows.dtype} can't be stored")
            row_arrays.append(RowArray(role, _CODES[rows.dtype], rows.shape[1], rows.shape[3]))
        settings = tuple(sorted(kind.settings(layer_cache).items()))
        layers.append(LayerLayout(kind.name, settings, tuple(row_arrays)))
    if not layers:
        raise UnsupportedCacheError("a prompt cache without layers can't be stored")
    return CacheLayout(tuple(layers))


def n_cached_tokens(prompt_cache: Sequence[Any]) -> int:
    """Return how many tokens all layers hold. Raises `UnsupportedCacheError` where they differ."""
    counts = {kind_of(layer_cache).n_tokens(layer_cache) for layer_cache in prompt_cache}
    if len(counts) != 1:
        raise UnsupportedCacheError(f"the layers of the cache hold different token counts {sorted(counts)}")
    return counts.pop()


class CapturedCache:
    """Give out the rows of a live prompt cache, bit for bit, without copying them.

    The views keep the arrays alive; use them before the cache's next step, which may write into the same memory behind
    the rows given out, never over them.
    """

    def __init__(self, prompt_cache: Sequence[Any], layout: CacheLayout) -> None:
        """Evaluate the cache's arrays. Raises `FingerprintMismatchError` unless it has the layout."""
        self.n_tokens = n_cached_tokens(prompt_cache)
        found = describe(prompt_cache)
        if found != layout:
            raise FingerprintMismatchError(
                "the prompt cache is of another layout (cache class, heads, width or dtype) than this model's"
            )
        arrays = [rows for layer_cache in prompt_cache for rows in kind_of(layer_cache).arrays(layer_cache).values()]
        bits = [rows.view(UNSIGNED[rows.dtype.size]) for rows in arrays]
        mx.eval(bits)
        self._views: list[npt.NDArray[Any]] = [np.array(rows, copy=False)[0] for rows in bits]

    def runs(self, start: int, n_tokens: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows `[start, start + n_tokens)` of each layer, array and head, in the order of a shard."""
        for view in self._views:
            for head in view:
                yield np.ascontiguousarray(head[start : start + n_tokens])
