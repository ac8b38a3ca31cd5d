"""Own allocating MLX arrays to be read into, without filling them first where that costs time.

MLX has no call for an array whose contents don't matter. On the CPU `mx.zeros` writes every byte from one thread, and
first touches fresh memory there, which takes longer than reading a prefix into it from several threads. `mx.load` from
a file object (documented: "file-like object") allocates each array and asks the object to fill it; `_NoData` leaves it
as it is. On a GPU filling is fast, and `mx.zeros` is used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

__all__ = ["allocate", "move_to_device"]

Shape = tuple[int, ...]

_CODES = {mx.uint8: "U8", mx.uint16: "U16", mx.uint32: "U32"}


def allocate(wanted: Sequence[tuple[Shape, mx.Dtype]]) -> list[mx.array]:
    """Return evaluated arrays of the given shapes and unsigned dtypes, with any contents."""
    if mx.default_device().type != mx.DeviceType.cpu:
        arrays = [mx.zeros(shape, dtype) for shape, dtype in wanted]
        mx.eval(arrays)
        return arrays
    # An array without elements would take no place in the file.
    filled = {str(number): each for number, each in enumerate(wanted) if 0 not in each[0]}
    file: Any = _NoData(filled)
    named: Any = mx.load(file, format="safetensors") if filled else {}
    arrays = [
        named.pop(str(number)) if str(number) in filled else mx.zeros(*each) for number, each in enumerate(wanted)
    ]
    mx.eval(arrays)
    return arrays


def move_to_device(arrays: Sequence[mx.array]) -> None:
    """Have the arrays where they will be used; they were filled by the host.

    MLX's CUDA build keeps them in managed memory, whose pages move to the GPU when it first reads them. That is part of
    what loading costs, so it is done here, where the time is taken; elsewhere it is one memory.
    """
    if mx.cuda.is_available() and mx.default_device().type != mx.DeviceType.cpu:
        mx.eval([mx.max(array) for array in arrays if array.size])


class _NoData:
    """Be a safetensors file, as far as its header; what lies behind that is never written."""

    closed = False

    def __init__(self, tensors: dict[str, tuple[Shape, mx.Dtype]]) -> None:
        header: dict[str, Any] = {}
        offset = 0
        for name, (shape, dtype) in tensors.items():
            n_bytes = dtype.size
            for length in shape:
                n_bytes *= length
            header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [offset, offset + n_bytes]}
            offset += n_bytes
        text = json.dumps(header).encode()
        self._header = struct.pack("<Q", len(text)) + text
        self._length = len(self._header) + offset
        self._position = 0

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._length)[whence]
        return self._position

    def read(self, n_bytes: int) -> bytes:
        found = self._header[self._position : self._position + n_bytes]
        self._position += len(found)
        return found

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        header = self._header[self._position : self._position + view.nbytes]
        view[: len(header)] = header
        self._position += view.nbytes
        return view.nbytes
