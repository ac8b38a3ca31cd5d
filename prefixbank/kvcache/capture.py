"""Own reading rows and states out of live prompt caches, and the description of a cache's layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from prefixbank.errors import FingerprintMismatchError, UnsupportedCacheError
from prefixbank.kvcache.kinds import is_list_kind, is_row_kind, is_state_kind, keeps_all_rows, kind_of, window_of
from prefixbank.layout import CacheLayout, LayerLayout, RowArray, StateArray

__all__ = [
    "MLX_DTYPES",
    "UNSIGNED",
    "CacheRecorder",
    "Piece",
    "describe",
    "held_arrays",
    "held_bytes",
    "leaf_caches",
    "n_cached_tokens",
    "sample_rows",
]

Bits = npt.NDArray[Any]

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
    layout = CacheLayout(tuple(_describe(layer_cache) for layer_cache in prompt_cache))
    if not any(leaf.arrays or leaf.states for _, leaf in layout.leaves()):
        raise UnsupportedCacheError("an empty prompt cache has no layout")
    return layout


def _describe(layer_cache: Any) -> LayerLayout:
    kind = kind_of(layer_cache)
    settings = tuple(sorted(kind.settings(layer_cache).items()))
    if is_list_kind(kind):
        members = tuple(_describe(member) for member in kind.members(layer_cache))
        return LayerLayout(kind.name, settings, members=members)
    if is_state_kind(kind):
        states = kind.states(layer_cache)
        _require_one_sequence(layer_cache, states)
        described = tuple(StateArray(role, _CODES[a.dtype], tuple(a.shape)) for role, a in states.items())
        return LayerLayout(kind.name, settings, states=described)
    assert is_row_kind(kind)
    rows = kind.rows(layer_cache)
    _require_one_sequence(layer_cache, rows)
    if any(a.ndim != 4 for a in rows.values()):
        raise UnsupportedCacheError(f"{type(layer_cache).__name__} holds rows that are not [1, n_heads, n, width]")
    arrays = tuple(RowArray(role, _CODES[a.dtype], a.shape[1], a.shape[3]) for role, a in rows.items())
    return LayerLayout(kind.name, settings, arrays)


def _require_one_sequence(layer_cache: Any, arrays: dict[str, mx.array]) -> None:
    for array in arrays.values():
        if array.ndim == 0 or array.shape[0] != 1:
            raise UnsupportedCacheError(
                f"{type(layer_cache).__name__} holds {array.shape}: only caches of one sequence can be stored"
            )
        if array.dtype not in _CODES:
            raise UnsupportedCacheError(f"{type(layer_cache).__name__} holds {array.dtype}, which can't be stored")


def leaf_caches(prompt_cache: Sequence[Any]) -> Iterator[Any]:
    """Yield the caches that are made of no others, in the order of the layout's leaves."""
    for layer_cache in prompt_cache:
        kind = kind_of(layer_cache)
        if is_list_kind(kind) and (members := kind.members(layer_cache)):
            yield from leaf_caches(members)
        else:
            yield layer_cache


def n_cached_tokens(prompt_cache: Sequence[Any]) -> int | None:
    """Return how many tokens the layers have seen; None where no layer knows (recurrent ones don't).

    Empty members don't count. Raises `UnsupportedCacheError` where layers differ.
    """
    counts = {
        kind.n_tokens(leaf)
        for leaf in leaf_caches(prompt_cache)
        if is_row_kind(kind := kind_of(leaf)) and kind.rows(leaf)
    }
    if len(counts) > 1:
        raise UnsupportedCacheError(f"the layers of the cache hold different token counts {sorted(counts)}")
    if counts:
        return counts.pop()
    has_state = any(is_state_kind(kind := kind_of(leaf)) and kind.states(leaf) for leaf in leaf_caches(prompt_cache))
    return None if has_state else 0


def held_arrays(prompt_cache: Sequence[Any]) -> list[mx.array]:
    """Return the arrays of rows and states that a prompt cache holds, room for more rows included."""
    arrays: list[mx.array] = []
    for leaf in leaf_caches(prompt_cache):
        kind = kind_of(leaf)
        if is_row_kind(kind):
            arrays += kind.rows(leaf).values()
        elif is_state_kind(kind):
            arrays += kind.states(leaf).values()
    return arrays


def held_bytes(prompt_cache: Sequence[Any]) -> int:
    """Return the bytes of all arrays that the caches hold, room for more rows included."""
    attributes = [list(getattr(leaf, "__dict__", {}).values()) for leaf in leaf_caches(prompt_cache)]
    return sum(leaf.nbytes for _, leaf in tree_flatten(attributes) if isinstance(leaf, mx.array))


def sample_rows(prompt_cache: Sequence[Any], n_tokens: int) -> bytes:
    """Return the bits of some rows of the last layer that has rows, at distances from the end of 1, 2, 4, 8, ...

    Each depends on all tokens up to its own, if there are layers below. So they tell a cache whose last rows were cut
    off and made anew for other tokens from one that was not.
    """
    arrays = next((arrays for layer in reversed(prompt_cache) if (arrays := held_arrays([layer]))), [])
    distances = [1 << power for power in range(n_tokens.bit_length()) if 1 << power <= n_tokens]
    places = mx.array([n_tokens - distance for distance in distances])
    rows = [mx.contiguous(mx.take(array.view(UNSIGNED[array.dtype.size]), places, axis=2)) for array in arrays]
    mx.eval(rows)
    return b"".join(np.array(row, copy=False).tobytes() for row in rows)


@dataclass(frozen=True, slots=True)
class Piece:
    """Hold the rows `[start, stop)` of one array as bits, `[n_heads, at least stop - start, width]`.

    An MLX array, evaluated, is `[1, n_heads, ...]`: it is looked at only when the rows are asked for, since on a GPU
    that may bring them to the host.
    """

    start: int
    stop: int
    held: mx.array | Bits

    @property
    def rows(self) -> Bits:
        """Return the rows for numpy; they are not copied where the device's memory is the host's."""
        return np.array(self.held, copy=False)[0] if isinstance(self.held, mx.array) else self.held

    @property
    def n_bytes(self) -> int:
        """Return the bytes held."""
        return int(self.held.nbytes)


class CacheRecorder:
    """Gather the rows and states of a prompt cache while it is computed, and give them out bit for bit.

    Layers that keep all rows are read once, at `finish`. Sliding windows drop rows, so they are read after each step
    (`record`), and states at the boundaries where they are wanted. Raises `FingerprintMismatchError` unless the cache
    has the layout.
    """

    def __init__(self, layout: CacheLayout, seed: Sequence[Sequence[Piece]] | None = None) -> None:
        """Start; `seed` holds what a restored cache knows of its windows' rows (one sequence for each row array)."""
        self._layout = layout
        self._windows = [window_of(leaf) is not None for _, leaf in layout.leaves() for _ in leaf.arrays]
        self._pieces: list[list[Piece]] = [list(pieces) for pieces in seed] if seed else [[] for _ in self._windows]
        self._states: dict[int, list[Bits]] = {}
        self.must_follow = not keeps_all_rows(layout)
        """Whether steps must be recorded, since the finished cache does not hold everything."""

    def record(self, start: int, stop: int, prompt_cache: Sequence[Any], *, with_state: bool) -> None:
        """Read what a step over the tokens `[start, stop)` added to the windows, and the states if they are wanted."""
        if any(self._windows):
            arrays = self._row_arrays(prompt_cache)
            new = [
                mx.contiguous(rows[..., rows.shape[2] - (stop - start) :, :]) if windowed else None
                for windowed, rows in zip(self._windows, arrays, strict=True)
            ]
            bits = [None if rows is None else rows.view(UNSIGNED[rows.dtype.size]) for rows in new]
            mx.eval([rows for rows in bits if rows is not None])
            for pieces, rows in zip(self._pieces, bits, strict=True):
                if rows is not None:
                    pieces.append(Piece(start, stop, rows))
        if with_state and self._layout.has_state:
            self._states[stop] = self._state_bits(prompt_cache)

    def finish(self, prompt_cache: Sequence[Any], n_tokens: int, *, copied: tuple[int, int] | None = None) -> None:
        """Read what the finished cache of `n_tokens` holds itself.

        With `copied`, the rows of the tokens from the one to the other are copied, and no others read: the cache can go
        on being used, and written into in place, while the recorder gives out its rows.
        """
        if describe(prompt_cache) != self._layout:
            raise FingerprintMismatchError(
                "the prompt cache is of another layout (cache class, heads, width or dtype) than this model's"
            )
        bits = [rows.view(UNSIGNED[rows.dtype.size]) for rows in self._row_arrays(prompt_cache)]
        start, stop = copied or (0, n_tokens)
        if copied is not None:
            bits = [
                mx.contiguous(rows if windowed else rows[..., start:stop, :])
                for windowed, rows in zip(self._windows, bits, strict=True)
            ]
        mx.eval(bits)
        for windowed, pieces, rows in zip(self._windows, self._pieces, bits, strict=True):
            if windowed:
                pieces.append(Piece(n_tokens - rows.shape[2], n_tokens, rows))
            else:
                pieces[:] = [Piece(start, stop, rows)]
        if self._layout.has_state and n_tokens not in self._states:
            self._states[n_tokens] = self._state_bits(prompt_cache)

    def seed(self, start: int) -> list[list[Piece]]:
        """Return what another recorder needs to know to go on from here, of windows' rows from `start` on."""
        return [[piece for piece in pieces if piece.stop > start] for pieces in self._pieces]

    def has_rows(self, start: int, n_tokens: int) -> bool:
        """Tell whether the rows `[start, start + n_tokens)` of all arrays are there."""
        return all(_covers(pieces, start, start + n_tokens) for pieces in self._pieces)

    def state_ends(self) -> list[int]:
        """Return the token offsets at which states were taken, sorted."""
        return sorted(self._states)

    def runs(self, start: int, n_tokens: int) -> Iterator[Bits]:
        """Yield the rows `[start, start + n_tokens)` of each array and head, in the order of a shard."""
        for pieces in self._pieces:
            rows = _cut(pieces, start, start + n_tokens)
            for head in rows:
                yield np.ascontiguousarray(head)

    def state_runs(self, end: int) -> Iterator[Bits]:
        """Yield the states after `end` tokens, in the order of a shard."""
        yield from self._states[end]

    def _row_arrays(self, prompt_cache: Sequence[Any]) -> list[mx.array]:
        arrays: list[mx.array] = []
        for (_, layout), leaf in zip(self._layout.leaves(), leaf_caches(prompt_cache), strict=True):
            kind = kind_of(leaf)
            if layout.arrays and is_row_kind(kind):
                arrays += kind.rows(leaf).values()
        if len(arrays) != len(self._windows):
            raise FingerprintMismatchError("the prompt cache holds other arrays than this model's")
        return arrays

    def _state_bits(self, prompt_cache: Sequence[Any]) -> list[Bits]:
        states = [
            mx.contiguous(state)
            for leaf in leaf_caches(prompt_cache)
            if is_state_kind(kind := kind_of(leaf))
            for state in kind.states(leaf).values()
        ]
        wanted = [(a.dtype, a.shape) for _, a in self._layout.state_arrays()]
        if [(_CODES.get(state.dtype), tuple(state.shape)) for state in states] != wanted:
            raise FingerprintMismatchError("the prompt cache holds states of other shapes than this model's")
        bits = [state.view(UNSIGNED[state.dtype.size]) for state in states]
        mx.eval(bits)
        return [np.array(state, copy=False) for state in bits]


def _covers(pieces: Sequence[Piece], start: int, stop: int) -> bool:
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start <= start < piece.stop:
            start = piece.stop
    return start >= stop


def _cut(pieces: Sequence[Piece], start: int, stop: int) -> Bits:
    """Return the rows `[start, stop)` out of pieces that cover them."""
    parts: list[Bits] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start <= start < piece.stop and start < stop:
            end = min(stop, piece.stop)
            parts.append(piece.rows[:, start - piece.start : end - piece.start])
            start = end
    assert start >= stop, "asked for rows that were not recorded"
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
