"""Own attention of a batch to rows that its sequences share: part by part, joined by their sums; and its hook.

All queries that share rows attend to them as one matrix product, and to their own rows each for itself. By what the
exponentials of each part's scores sum up to, the outputs are joined to what attention over all rows gives: exact but
for rounding (Juravsky et al., "Hydragen", 2024, https://arxiv.org/abs/2402.05099). Scores, statistics and the join are
float32 for every model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from prefixbank.errors import UnsupportedCacheError
from prefixbank.kvcache.probe import is_on_gpu
from prefixbank.kvcache.sharedrows import SharedBatchKVCache, SharedRows, Span, is_mask_of_own_rows

__all__ = ["SCORE_BYTES", "attend", "shared_attention"]

SCORE_BYTES = 256 << 20
"""How many bytes the scores of one product take at most, and their softmax once more; a single query's may be more."""

_GPU_TILE_BYTES = 8 << 20
"""How many bytes of scores a GPU computes at a time: on an H200 steps took three times as long from 16 MiB on."""

_HOOKED = "scaled_dot_product_attention"

Part = tuple[mx.array, ...]
"""Attention to some of the rows, float32: the normalised output `[batch, n_kv_heads, n_groups * n_queries, head_dim]`,
and, `[..., 1]`, the highest score and the weight that the softmax gave it.

The exponentials of the scores sum up to `exp(highest) / weight`. That says what a log-sum-exp does, without the
rounding of a logarithm, and without a second pass over the scores' exponentials.
"""


Tile = tuple[mx.array, mx.array, mx.array, mx.array | None]
"""Queries, keys, values and mask of one product."""


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    levels: list[list[Span]],
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None = None,
    score_bytes: int = SCORE_BYTES,
) -> mx.array:
    """Return the attention of each sequence to its shared rows and its own.

    Args:
        queries: `[batch, n_heads, n_queries, head_dim]`.
        keys: the own rows, `[batch, n_kv_heads, n_own, head_dim]`; `values` may have another width.
        levels: which sequences share which rows.
        scale: of the scores.
        mask: of the own rows, `[batch or 1, 1, n_queries, n_own]`, True where seen; the shared rows are all seen.
        sinks: one score a head that takes part in the softmax and adds nothing, `[n_heads]`.
        score_bytes: how many bytes the scores of one product take at most.
    """
    batch, n_heads, n_queries, _ = queries.shape
    n_kv_heads = keys.shape[1]
    grouped = (queries.astype(mx.float32) * scale).reshape(batch, n_kv_heads, n_heads // n_kv_heads * n_queries, -1)
    parts = [_level_part(grouped, spans, score_bytes, values.shape[-1]) for spans in levels]
    parts.append(_own_part(grouped, keys, values, mask, n_queries, score_bytes))
    sink = None
    if sinks is not None:
        sink = mx.repeat(sinks.astype(mx.float32).reshape(1, n_kv_heads, -1, 1), n_queries, axis=2)
    joined = _compiled(_joined)(parts) if sink is None else _joined(parts, sink)
    return joined.astype(queries.dtype).reshape(batch, n_heads, n_queries, -1)


def _joined(parts: list[Part], sink: mx.array | None = None) -> mx.array:
    """Weigh the parts' outputs by what the exponentials of their scores sum up to."""
    highest = parts[0][1] if sink is None else mx.maximum(parts[0][1], sink)
    for _, of_part, _ in parts[1:]:
        highest = mx.maximum(highest, of_part)
    sums = [mx.exp(of_part - highest) / weight for _, of_part, weight in parts]
    output, total = parts[0][0] * sums[0], sums[0]
    for (of_part, _, _), sum_of_part in zip(parts[1:], sums[1:], strict=True):
        output, total = output + of_part * sum_of_part, total + sum_of_part
    if sink is not None:
        total = total + mx.exp(sink - highest)
    return output / total


def _level_part(queries: mx.array, spans: list[Span], score_bytes: int, width: int) -> Part:
    """Attend to the shared rows of one level."""
    parts: list[Part] = []
    for span in spans:
        of_span = queries if span.stop - span.start == queries.shape[0] else queries[span.start : span.stop]
        if span.rows is None:
            nothing = mx.full((*of_span.shape[:3], 1), -mx.inf, mx.float32)
            parts.append((mx.zeros((*of_span.shape[:3], width), mx.float32), nothing, mx.ones_like(nothing)))
        else:
            parts.append(_shared_part(of_span, span.rows, score_bytes))
    return _concatenated(parts, axis=0)


def _shared_part(queries: mx.array, rows: SharedRows, score_bytes: int) -> Part:
    """Attend to rows that all sequences share: one product a head, of the queries of all sequences."""
    batch, n_kv_heads, n_rows, _ = queries.shape
    tile = max(1, score_bytes // (n_kv_heads * rows.n_tokens * 4))
    if tile >= batch * n_rows:
        return tuple(_compiled(_attend_together)(queries, rows.keys, rows.values))
    flat = queries.swapaxes(0, 1).flatten(1, 2)
    keys, values = rows.keys[0].astype(mx.float32), rows.values[0].astype(mx.float32)
    tiles = _in_turn((flat[:, low : low + tile], keys, values, None) for low in range(0, batch * n_rows, tile))
    return tuple(part.reshape(n_kv_heads, batch, n_rows, -1).swapaxes(0, 1) for part in _concatenated(tiles, axis=1))


def _attend_together(queries: mx.array, keys: mx.array, values: mx.array) -> list[mx.array]:
    batch, n_kv_heads, n_rows, _ = queries.shape
    # Three axes: MLX's CUDA build (0.32.4) copies transposed keys of four.
    flat = queries.swapaxes(0, 1).flatten(1, 2)
    own = keys[0].astype(mx.float32), values[0].astype(mx.float32)
    tile = max(1, _GPU_TILE_BYTES // (n_kv_heads * keys.shape[2] * 4)) if is_on_gpu() else batch * n_rows
    tiles = [_softmax(flat[:, low : low + tile], *own, None) for low in range(0, batch * n_rows, tile)]
    part = _concatenated(tiles, axis=1)
    return [of_part.reshape(n_kv_heads, batch, n_rows, -1).swapaxes(0, 1) for of_part in part]


def _own_part(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, n_queries: int, score_bytes: int
) -> Part:
    """Attend to each sequence's own rows, in tiles of sequences, or of one sequence's queries."""
    batch, n_kv_heads, n_rows, _ = queries.shape
    n_own = keys.shape[2]
    if mask is not None:
        mask = mx.broadcast_to(mask[:, :, None], (batch, 1, n_rows // n_queries, n_queries, n_own))
        mask = mask.reshape(batch, 1, n_rows, n_own)
    n_fit = score_bytes // (n_kv_heads * n_own * 4)
    tile = max(1, min(n_rows, n_fit))
    n_together = max(1, n_fit // n_rows)

    def tiles() -> Iterator[Tile]:
        for first in range(0, batch, n_together):
            some = slice(first, first + n_together)
            own = keys[some].astype(mx.float32), values[some].astype(mx.float32)
            for low in range(0, n_rows, tile):
                rows = slice(low, low + tile)
                yield queries[some, :, rows], *own, None if mask is None else mask[some, :, rows]

    parts = _in_turn(tiles())
    n_tiles = -(-n_rows // tile)
    by_sequences = [_concatenated(parts[at : at + n_tiles], axis=2) for at in range(0, len(parts), n_tiles)]
    return _concatenated(by_sequences, axis=0)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as MLX runs it in fewer steps on GPUs, where starting a step costs more than most do."""
    return _compile(function) if is_on_gpu() else function


@lru_cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return mx.compile(function)


def _in_turn(tiles: Iterable[Tile]) -> list[Part]:
    """Attend tile by tile, each computed before the next one: MLX takes memory for all that it has been asked for."""
    parts: list[Part] = []
    for queries, keys, values, mask in tiles:
        if parts:
            mx.eval(parts[-1])
        parts.append(_softmax(queries, keys, values, mask))
    return parts


def _softmax(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> Part:
    """Attend to all rows, with scaled queries."""
    scores = queries @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1)
    return weights @ values, mx.max(scores, axis=-1, keepdims=True), mx.max(weights, axis=-1, keepdims=True)


def _concatenated(parts: list[Part], axis: int) -> Part:
    if len(parts) == 1:
        return parts[0]
    return tuple(mx.concatenate(list(pieces), axis=axis) for pieces in zip(*parts, strict=True))


# --- the hook


def _attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stand in for mlx-lm's function of that name; differs for shared caches only."""
    if not isinstance(cache, SharedBatchKVCache):
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    if not cache.take_fetched(keys, values) or not is_mask_of_own_rows(mask):
        cache.is_refused = True
        raise UnsupportedCacheError("this model's attention is not over what its cache gave, or has a mask of its own")
    return attend(queries, keys, values, cache.levels, scale, mask, sinks)


_LOCK = threading.Lock()
_USERS: dict[str, int] = {}


@contextmanager
def shared_attention(model: nn.Module) -> Iterator[None]:
    """Let the model's layers attend to shared caches while the block runs.

    The function that mlx-lm's models call for attention is replaced in the modules that define the model's layers, as
    long as any thread is in such a block. With any other cache it calls mlx-lm's own.
    """
    modules = _modules_of(model)
    with _LOCK:
        for name in modules:
            if not _USERS.get(name):
                setattr(sys.modules[name], _HOOKED, _attention)
            _USERS[name] = _USERS.get(name, 0) + 1
    try:
        yield
    finally:
        with _LOCK:
            for name in modules:
                _USERS[name] -= 1
                if not _USERS[name]:
                    setattr(sys.modules[name], _HOOKED, base.scaled_dot_product_attention)


def _modules_of(model: nn.Module) -> list[str]:
    """Return the Python modules whose functions the model's layers call, and which have mlx-lm's attention."""
    names = {cls.__module__ for layer in model.modules() for cls in type(layer).__mro__}
    ours = (base.scaled_dot_product_attention, _attention)
    return sorted(name for name in names if getattr(sys.modules.get(name), _HOOKED, None) in ours)
