"""Own the shard format: which rows of which layer lie where in a file; must not open files or know MLX.

A shard is a safetensors file (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header
length, a JSON header padded with spaces to a multiple of 8, then the tensors without gaps. Tensors are named
`<path>.<role>`, the path being the layer's number (and a member's, in a cache made of others). Rows have the shape
`[1, n_heads, n_tokens, width]`, cut to the chunk's true token count; states, where the shard has them, follow the rows.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from prefixbank.errors import SchemaError

__all__ = ["SHARD_FORMAT_VERSION", "CacheLayout", "LayerLayout", "RowArray", "StateArray"]

SHARD_FORMAT_VERSION = "1"

MAX_LAYERS = 10_000
"""More than any model has."""

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U32": 4, "U8": 1}
"""Bytes of one element by safetensors dtype code."""


@dataclass(frozen=True, slots=True)
class RowArray:
    """Describe one array of a layer: `n_heads` rows of `width` elements for each token."""

    role: str
    dtype: str
    n_heads: int
    width: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token of one head."""
        return self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateArray:
    """Describe one array that holds all tokens so far at once, as recurrent layers have them."""

    role: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Return the array's bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Describe one KV cache: its kind (a name in the registry), the kind's settings, and what it holds.

    That is `arrays` of rows, `states`, or, for a cache made of others, `members`. A cache that holds nothing has none.
    """

    kind: str
    settings: tuple[tuple[str, int], ...] = ()
    arrays: tuple[RowArray, ...] = ()
    states: tuple[StateArray, ...] = ()
    members: tuple[LayerLayout, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Describe a prompt cache: one `LayerLayout` for each layer, in order."""

    layers: tuple[LayerLayout, ...]

    def leaves(self) -> Iterator[tuple[str, LayerLayout]]:
        """Yield the caches made of no others by path (`3`, or `3.1` for a member), in the order of the file."""

        def walk(path: str, layout: LayerLayout) -> Iterator[tuple[str, LayerLayout]]:
            if not layout.members:
                yield path, layout
            for number, member in enumerate(layout.members):
                yield from walk(f"{path}.{number}", member)

        for number, layer in enumerate(self.layers):
            yield from walk(str(number), layer)

    def row_arrays(self) -> Iterator[tuple[str, RowArray]]:
        """Yield `(path, array)` of all rows, in the order of the file."""
        for path, leaf in self.leaves():
            for row_array in leaf.arrays:
                yield path, row_array

    def state_arrays(self) -> Iterator[tuple[str, StateArray]]:
        """Yield `(path, array)` of all states, in the order of the file, where they follow the rows."""
        for path, leaf in self.leaves():
            for state_array in leaf.states:
                yield path, state_array

    @property
    def has_state(self) -> bool:
        """Tell whether the cache can be resumed only where its state was stored."""
        return any(True for _ in self.state_arrays())

    @property
    def token_bytes(self) -> int:
        """Return the bytes of KV of one token over all layers."""
        return sum(a.n_heads * a.row_bytes for _, a in self.row_arrays())

    def data_bytes(self, n_tokens: int, *, with_state: bool = False) -> int:
        """Return the bytes of tensors in a shard of `n_tokens`."""
        state_bytes = sum(a.n_bytes for _, a in self.state_arrays()) if with_state else 0
        return n_tokens * self.token_bytes + state_bytes

    def shard_header(self, n_tokens: int, metadata: Mapping[str, str], *, with_state: bool = False) -> bytes:
        """Return the head of a shard file of `n_tokens`, up to where the tensors begin."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0

        def add(name: str, dtype: str, shape: list[int], n_bytes: int) -> None:
            nonlocal offset
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + n_bytes]}
            offset += n_bytes

        for path, a in self.row_arrays():
            add(f"{path}.{a.role}", a.dtype, [1, a.n_heads, n_tokens, a.width], a.n_heads * n_tokens * a.row_bytes)
        if with_state:
            for path, state in self.state_arrays():
                add(f"{path}.{state.role}", state.dtype, list(state.shape), state.n_bytes)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def to_json(self) -> str:
        """Return the layout as JSON; equal neighbours are counted, not repeated."""
        runs = [_to_plain(layer) | {"n_layers": len(list(same))} for layer, same in groupby(self.layers)]
        return json.dumps(runs, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CacheLayout:
        """Return the layout that `to_json` wrote. Raises `SchemaError` for anything else."""
        try:
            layers: list[LayerLayout] = []
            for run in json.loads(text):
                n_layers = int(run["n_layers"])
                if not 0 < n_layers <= MAX_LAYERS - len(layers):  # before a list of so many is made
                    raise ValueError(f"more than {MAX_LAYERS} layers, or fewer than one")
                layers += [_from_plain(run)] * n_layers
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as exc:
            raise SchemaError(f"a cache layout in the index can't be read ({exc}): use a newer prefixbank") from exc
        return cls(tuple(layers))


def _to_plain(layout: LayerLayout) -> dict[str, Any]:
    """Return a layout as plain values; what it has none of is left out."""
    plain: dict[str, Any] = {"kind": layout.kind, "settings": dict(layout.settings)}
    plain["arrays"] = [[a.role, a.dtype, a.n_heads, a.width] for a in layout.arrays]
    if layout.states:
        plain["states"] = [[a.role, a.dtype, list(a.shape)] for a in layout.states]
    if layout.members:
        plain["members"] = [_to_plain(member) for member in layout.members]
    return plain


def _from_plain(plain: Mapping[str, Any]) -> LayerLayout:
    arrays = tuple(RowArray(str(r), _known(d), int(h), int(w)) for r, d, h, w in plain["arrays"])
    states = tuple(
        StateArray(str(r), _known(d), tuple(int(n) for n in shape)) for r, d, shape in plain.get("states", [])
    )
    settings = tuple((str(k), int(v)) for k, v in plain["settings"].items())
    members = tuple(_from_plain(member) for member in plain.get("members", []))
    return LayerLayout(str(plain["kind"]), settings, arrays, states, members)


def _known(dtype: str) -> str:
    if dtype not in ITEM_BYTES:
        raise ValueError("unknown dtype")
    return dtype
