"""Own building prompt caches around buffers that shards are read into: no concatenation, no second copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from prefixbank.errors import FingerprintMismatchError
from prefixbank.kvcache.capture import MLX_DTYPES, UNSIGNED, describe
from prefixbank.kvcache.kinds import kind_named, kind_of
from prefixbank.layout import ITEM_BYTES, CacheLayout

__all__ = ["PromptCacheBuffers", "cut_to"]


class PromptCacheBuffers:
    """Hold the final KV buffers of one prompt cache while shards are read into them.

    Each buffer is `[1, n_heads, capacity, width]`, with room behind the prefix for the rest of the prompt and the
    answer, so that the first generated token re-allocates nothing.
    """

    def __init__(self, layout: CacheLayout, capacity: int) -> None:
        self._layout = layout
        shapes = [(a, (1, a.n_heads, capacity, a.width)) for _, a in layout.row_arrays()]
        self._buffers = [mx.zeros(shape, UNSIGNED[ITEM_BYTES[a.dtype]]) for a, shape in shapes]
        mx.eval(self._buffers)
        self._views: list[npt.NDArray[Any]] = [np.array(buffer, copy=False)[0] for buffer in self._buffers]

    def runs(self, start: int, n_tokens: int) -> list[npt.NDArray[Any]]:
        """Return the places of the rows `[start, start + n_tokens)`, in the order of a shard."""
        return [head[start : start + n_tokens] for view in self._views for head in view]

    def build(self, n_tokens: int) -> list[Any]:
        """Hand the buffers over to mlx-lm caches of `n_tokens`; call it once, after all reading."""
        self._views = []  # MLX may write in place only into buffers that nobody else holds
        buffers = iter(self._buffers)
        self._buffers = []
        prompt_cache = []
        for layer in self._layout.layers:
            arrays = {a.role: next(buffers).view(MLX_DTYPES[a.dtype]) for a in layer.arrays}
            mx.eval(arrays)
            prompt_cache.append(kind_named(layer.kind).rebuild(layer, arrays, n_tokens))
        return prompt_cache


def cut_to(prompt_cache: Sequence[Any], layout: CacheLayout, n_tokens: int) -> list[Any]:
    """Return a prompt cache of the first `n_tokens` of a live one; its arrays are shared, not copied.

    Raises `FingerprintMismatchError` where the live cache is of another layout or holds fewer tokens.
    """
    if describe(prompt_cache) != layout:
        raise FingerprintMismatchError("the prompt cache is of another layout than it was")
    kept = []
    for layer_cache, layer in zip(prompt_cache, layout.layers, strict=True):
        kind = kind_of(layer_cache)
        if kind.n_tokens(layer_cache) < n_tokens:
            raise FingerprintMismatchError("the prompt cache holds fewer tokens than it did")
        kept.append(kind.rebuild(layer, kind.arrays(layer_cache), n_tokens))
    return kept
