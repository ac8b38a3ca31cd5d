"""Own the shard format: which rows of which layer lie where in a file; must not open files or know MLX.

A shard is a safetensors file (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header
length, a JSON header padded with spaces to a multiple of 8, then the tensors without gaps. Tensors are named
`<layer>.<role>` and have the shape `[1, n_heads, n_tokens, width]`, cut to the chunk's true token count.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from prefixbank.errors import SchemaError

__all__ = ["SHARD_FORMAT_VERSION", "CacheLayout", "LayerLayout", "RowArray"]

SHARD_FORMAT_VERSION = "1"

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
class LayerLayout:
    """Describe one layer's KV cache: its kind (a name in the registry), the kind's settings and its arrays."""

    kind: str
    settings: tuple[tuple[str, int], ...]
    arrays: tuple[RowArray, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Describe a prompt cache: one `LayerLayout` for each layer, in order."""

    layers: tuple[LayerLayout, ...]

    def row_arrays(self) -> Iterator[tuple[int, RowArray]]:
        """Yield `(layer, array)` in the order of the file."""
        for layer, layout in enumerate(self.layers):
            for row_array in layout.arrays:
                yield layer, row_array

    @property
    def token_bytes(self) -> int:
        """Return the bytes of KV of one token over all layers."""
        return sum(a.n_heads * a.row_bytes for _, a in self.row_arrays())

    def data_bytes(self, n_tokens: int) -> int:
        """Return the bytes of tensors in a shard of `n_tokens`."""
        return n_tokens * self.token_bytes

    def shard_header(self, n_tokens: int, metadata: Mapping[str, str]) -> bytes:
        """Return the head of a shard file of `n_tokens`, up to where the tensors begin."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for layer, a in self.row_arrays():
            end = offset + a.n_heads * n_tokens * a.row_bytes
            header[f"{layer}.{a.role}"] = {
                "dtype": a.dtype,
                "shape": [1, a.n_heads, n_tokens, a.width],
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def to_json(self) -> str:
        """Return the layout as JSON; equal neighbours are counted, not repeated."""
        runs = [
            {
                "n_layers": len(list(same)),
                "kind": layer.kind,
                "settings": dict(layer.settings),
                "arrays": [[a.role, a.dtype, a.n_heads, a.width] for a in layer.arrays],
            }
            for layer, same in groupby(self.layers)
        ]
        return json.dumps(runs, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> CacheLayout:
        """Return the layout that `to_json` wrote. Raises `SchemaError` for anything else."""
        try:
            layers: list[LayerLayout] = []
            for run in json.loads(text):
                arrays = tuple(
                    RowArray(str(role), str(dtype), int(n_heads), int(width))
                    for role, dtype, n_heads, width in run["arrays"]
                )
                if any(a.dtype not in ITEM_BYTES for a in arrays):
                    raise ValueError("unknown dtype")
                settings = tuple((str(k), int(v)) for k, v in run["settings"].items())
                layers += [LayerLayout(str(run["kind"]), settings, arrays)] * int(run["n_layers"])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as exc:
            raise SchemaError(f"a cache layout in the index can't be read ({exc}): use a newer prefixbank") from exc
        return cls(tuple(layers))
