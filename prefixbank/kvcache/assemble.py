"""Own building prompt caches around buffers that shards are read into: no concatenation, no second copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from prefixbank.errors import FingerprintMismatchError
from prefixbank.kvcache.capture import MLX_DTYPES, UNSIGNED, Piece, describe, leaf_caches
from prefixbank.kvcache.kinds import (
    ListKind,
    RowKind,
    StateKind,
    Window,
    keeps_all_rows,
    kind_named,
    kind_of,
    window_of,
)
from prefixbank.layout import ITEM_BYTES, CacheLayout, LayerLayout, RowArray

__all__ = ["PromptCacheBuffers", "cut_to"]

Bits = npt.NDArray[Any]


class _Rows:
    """Hold the buffer of one array of rows: `[1, n_heads, stop - start, width]` for the tokens `[start, stop)`.

    Without a window that is everything and room behind it; with one it is what the window needs, from the start of the
    last chunk on at least (its rows are needed to store the chunk anew when it grows), and the kept rows apart.
    """

    def __init__(self, array: RowArray, window: Window | None, n_tokens: int, last_start: int, stop: int) -> None:
        self.array = array
        self.start = 0
        self.n_kept = 0
        if window is not None:
            n_recent, n_kept = window
            self.start = max(min(n_tokens - n_recent, last_start), 0)
            if n_tokens <= n_recent + n_kept or self.start <= n_kept:
                self.start = 0
            else:
                self.n_kept = n_kept
        self.stop = stop
        dtype = UNSIGNED[ITEM_BYTES[array.dtype]]
        self.buffer = mx.zeros((1, array.n_heads, self.stop - self.start, array.width), dtype)
        self.kept = mx.zeros((1, array.n_heads, self.n_kept, array.width), dtype)

    def view(self) -> None:
        """Open the buffers for reading into; call it once they are evaluated."""
        self.rows: Bits = np.array(self.buffer, copy=False)[0]
        self.kept_rows: Bits = np.array(self.kept, copy=False)[0]

    def runs(self, start: int, stop: int) -> Iterator[Bits]:
        """Yield the places of the rows `[start, stop)`, head by head; rows that are not needed go nowhere."""
        low = min(max(self.start, start), stop)
        n_kept = min(max(self.n_kept - start, 0), low - start)
        n_unused = low - start - n_kept
        for head, kept in zip(self.rows, self.kept_rows, strict=True):
            if n_kept:
                yield kept[start : start + n_kept]
            if n_unused:
                yield np.empty((n_unused, self.array.width), head.dtype)
            if low < stop:
                yield head[low - self.start : stop - self.start]

    def needed(self, window: Window | None, n_tokens: int) -> mx.array:
        """Return the rows that a cache of `n_tokens` is made of."""
        dtype = MLX_DTYPES[self.array.dtype]
        rows = self.buffer.view(dtype)
        if window is None:
            return rows
        n_recent, n_kept = window
        low = 0 if n_tokens <= n_recent + n_kept else n_tokens - n_recent
        recent = rows[..., low - self.start : n_tokens - self.start, :]
        if low == 0 or n_kept == 0:
            return mx.contiguous(recent)
        kept = self.kept.view(dtype) if self.n_kept else rows[..., :n_kept, :]
        return mx.concatenate([kept, recent], axis=2)


class PromptCacheBuffers:
    """Hold the final KV buffers of one prompt cache while shards are read into them.

    Rows that all tokens need have room behind the prefix for the rest of the prompt and the answer, so that the first
    generated token re-allocates nothing.
    """

    def __init__(self, layout: CacheLayout, n_tokens: int, last_start: int, stop: int, capacity: int) -> None:
        """Make room for a prefix of `n_tokens` whose last chunk is `[last_start, stop)`, and for `capacity` in all."""
        self._layout = layout
        self._windows = [window_of(leaf) for _, leaf in layout.leaves() for _ in leaf.arrays]
        self._rows = [
            _Rows(a, window, n_tokens, last_start, capacity if window is None else stop)
            for (_, a), window in zip(layout.row_arrays(), self._windows, strict=True)
        ]
        self._states = [mx.zeros(a.shape, UNSIGNED[ITEM_BYTES[a.dtype]]) for _, a in layout.state_arrays()]
        mx.eval([rows.buffer for rows in self._rows], [rows.kept for rows in self._rows], self._states)
        for rows in self._rows:
            rows.view()
        self._state_views: list[Bits] = [np.array(state, copy=False).reshape(-1) for state in self._states]

    def need(self, start: int, stop: int) -> bool:
        """Tell whether any row of the tokens `[start, stop)` is part of the cache."""
        return any(stop > rows.start or start < rows.n_kept for rows in self._rows)

    def runs(self, start: int, n_tokens: int) -> list[Bits]:
        """Return the places of the rows `[start, start + n_tokens)`, in the order of a shard."""
        return [run for rows in self._rows for run in rows.runs(start, start + n_tokens)]

    def state_runs(self, *, wanted: bool) -> list[Bits]:
        """Return the places of the states, in the order of a shard; nowhere, if they are not wanted."""
        if wanted:
            return self._state_views
        return [np.empty(math.prod(view.shape), view.dtype) for view in self._state_views]

    def build(self, n_tokens: int) -> tuple[list[Any], list[list[Piece]]]:
        """Hand the buffers over to mlx-lm caches of `n_tokens`; call it once, after all reading.

        Returns the prompt cache, and for each array of rows what a recorder needs to know of it: the rows of a window,
        those of the last chunk included.
        """
        seeds: list[list[Piece]] = []
        ready: list[mx.array] = []
        for rows, window in zip(self._rows, self._windows, strict=True):
            ready.append(rows.needed(window, n_tokens))
            seeds.append([] if window is None else [Piece(rows.start, n_tokens, rows.rows)])
            if window is None:
                rows.rows = rows.kept_rows = np.empty(0)  # MLX may write in place only into what nobody else holds
        states = [
            state.view(MLX_DTYPES[a.dtype])
            for state, (_, a) in zip(self._states, self._layout.state_arrays(), strict=True)
        ]
        self._state_views = []
        self._states = []
        mx.eval(ready, states)
        for rows, window in zip(self._rows, self._windows, strict=True):
            if window is None:
                del rows.buffer
        row_source, state_source = iter(ready), iter(states)
        ready, states = [], []
        prompt_cache = [_rebuild(layer, n_tokens, row_source, state_source) for layer in self._layout.layers]
        return prompt_cache, seeds


def _rebuild(layout: LayerLayout, n_tokens: int, rows: Iterator[mx.array], states: Iterator[mx.array]) -> Any:
    """Return the cache of one layer, taking its arrays from the sources in the layout's order."""
    kind = kind_named(layout.kind)
    if isinstance(kind, ListKind):
        return kind.join([_rebuild(member, n_tokens, rows, states) for member in layout.members])
    if isinstance(kind, StateKind):
        return kind.restore(layout, {a.role: next(states) for a in layout.states})
    assert isinstance(kind, RowKind)
    arrays: Mapping[str, mx.array] = {a.role: next(rows) for a in layout.arrays}
    return kind.rebuild(layout, arrays, n_tokens) if arrays else kind.empty(dict(layout.settings))


def cut_to(prompt_cache: Sequence[Any], layout: CacheLayout, n_tokens: int) -> list[Any]:
    """Return a prompt cache of the first `n_tokens` of a live one; its arrays are shared, not copied.

    Raises `FingerprintMismatchError` where the live cache is of another layout, holds fewer tokens, or can't be cut.
    """
    if not keeps_all_rows(layout) or describe(prompt_cache) != layout:
        raise FingerprintMismatchError("the prompt cache is of another layout than it was")
    arrays: list[mx.array] = []
    for leaf in leaf_caches(prompt_cache):
        kind = kind_of(leaf)
        if isinstance(kind, RowKind) and (rows := kind.rows(leaf)):
            if kind.n_tokens(leaf) < n_tokens:
                raise FingerprintMismatchError("the prompt cache holds fewer tokens than it did")
            arrays += rows.values()
    source = iter(arrays)
    return [_rebuild(layer, n_tokens, source, iter(())) for layer in layout.layers]
