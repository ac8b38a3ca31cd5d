"""Own building prompt caches around buffers that shards are read into: no concatenation, no second copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from prefixbank.errors import FingerprintMismatchError
from prefixbank.kvcache.buffers import allocate, move_to_device
from prefixbank.kvcache.capture import MLX_DTYPES, UNSIGNED, Piece, describe, leaf_caches
from prefixbank.kvcache.kinds import (
    Window,
    is_list_kind,
    is_row_kind,
    is_state_kind,
    keeps_all_rows,
    kind_named,
    kind_of,
    window_of,
)
from prefixbank.layout import ITEM_BYTES, CacheLayout, LayerLayout, RowArray

__all__ = ["PromptCacheBuffers", "cut_to"]

Bits = npt.NDArray[Any]


def _flat(array: Bits) -> memoryview:
    """Return an array's bytes (a memoryview can't be cast where it has none)."""
    return array.reshape(-1).view(np.uint8).data


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

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Return shape and dtype of the buffer, and of the one for the kept rows."""
        dtype = UNSIGNED[ITEM_BYTES[self.array.dtype]]
        lengths = (self.stop - self.start, self.n_kept)
        return [((1, self.array.n_heads, length, self.array.width), dtype) for length in lengths]

    def view(self, buffer: mx.array, kept: mx.array) -> None:
        """Take the buffers, evaluated, and open them for reading into."""
        self.buffer = buffer
        self.kept = kept
        self.rows: Bits = np.array(buffer, copy=False)[0]
        self._bytes = _flat(self.rows)
        self._kept_bytes = _flat(np.array(kept, copy=False))

    def close(self) -> None:
        """Let go of the views: MLX may write in place only into what nobody else holds."""
        self.rows = np.empty(0)
        self._bytes = self._kept_bytes = memoryview(b"")

    def runs(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the places of the rows `[start, stop)`, head by head; rows that are not needed go nowhere."""
        row_bytes = self.array.row_bytes
        low = min(max(self.start, start), stop)
        n_kept = min(max(self.n_kept - start, 0), low - start)
        n_unused = low - start - n_kept
        head_bytes, kept_head_bytes = (self.stop - self.start) * row_bytes, self.n_kept * row_bytes
        first, last = (low - self.start) * row_bytes, (stop - self.start) * row_bytes
        for head in range(self.array.n_heads):
            if n_kept:
                at = head * kept_head_bytes + start * row_bytes
                yield self._kept_bytes[at : at + n_kept * row_bytes]
            if n_unused:
                yield memoryview(bytearray(n_unused * row_bytes))
            if low < stop:
                yield self._bytes[head * head_bytes + first : head * head_bytes + last]

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

    def __init__(
        self, layout: CacheLayout, n_tokens: int, last_start: int, stop: int, capacity: int, executor: Executor
    ) -> None:
        """Make room for a prefix of `n_tokens` whose last chunk is `[last_start, stop)`, and for `capacity` in all."""
        self._layout = layout
        self._windows = [window_of(leaf) for _, leaf in layout.leaves() for _ in leaf.arrays]
        self._rows = [
            _Rows(a, window, n_tokens, last_start, capacity if window is None else stop)
            for (_, a), window in zip(layout.row_arrays(), self._windows, strict=True)
        ]
        states = [(a.shape, UNSIGNED[ITEM_BYTES[a.dtype]]) for _, a in layout.state_arrays()]
        arrays = iter(allocate([shape for rows in self._rows for shape in rows.shapes] + states, executor))
        for rows in self._rows:
            rows.view(next(arrays), next(arrays))
        self._states = list(arrays)
        self._state_views = [_flat(np.array(state, copy=False)) for state in self._states]

    def need(self, start: int, stop: int) -> bool:
        """Tell whether any row of the tokens `[start, stop)` is part of the cache."""
        return any(stop > rows.start or start < rows.n_kept for rows in self._rows)

    def runs(self, start: int, n_tokens: int) -> list[memoryview]:
        """Return the places of the rows `[start, start + n_tokens)`, in the order of a shard."""
        return [run for rows in self._rows for run in rows.runs(start, start + n_tokens)]

    def state_runs(self, *, wanted: bool) -> list[memoryview]:
        """Return the places of the states, in the order of a shard; nowhere, if they are not wanted."""
        if wanted:
            return self._state_views
        return [memoryview(bytearray(view.nbytes)) for view in self._state_views]

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
                rows.close()
        states = [
            state.view(MLX_DTYPES[a.dtype])
            for state, (_, a) in zip(self._states, self._layout.state_arrays(), strict=True)
        ]
        self._state_views = []
        self._states = []
        mx.eval(ready, states)
        move_to_device([*ready, *states])
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
    if is_list_kind(kind):
        return kind.join([_rebuild(member, n_tokens, rows, states) for member in layout.members])
    if is_state_kind(kind):
        return kind.restore(layout, {a.role: next(states) for a in layout.states})
    assert is_row_kind(kind)
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
        if is_row_kind(kind) and (rows := kind.rows(leaf)):
            if kind.n_tokens(leaf) < n_tokens:
                raise FingerprintMismatchError("the prompt cache holds fewer tokens than it did")
            arrays += rows.values()
    source = iter(arrays)
    return [_rebuild(layer, n_tokens, source, iter(())) for layer in layout.layers]
