"""Own allocating MLX arrays to be read into, and moving them to where they are used.

MLX has no call for an array whose contents don't matter. On the CPU `mx.zeros` writes every byte, and first touches
fresh memory there, which takes longer than reading a prefix into it: so that is done from several threads. On a GPU
filling is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import mlx.core as mx

__all__ = ["allocate", "move_to_device"]

Shape = tuple[int, ...]

_PARTS = 4
"""In how many parts arrays are made at once."""


def allocate(wanted: Sequence[tuple[Shape, mx.Dtype]], executor: Executor) -> list[mx.array]:
    """Return evaluated arrays of zeros of the given shapes and dtypes."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return _zeros(wanted)
    n_each = -(-len(wanted) // _PARTS) or 1
    parts = [executor.submit(_zeros, wanted[low : low + n_each]) for low in range(0, len(wanted), n_each)]
    return [array for part in parts for array in part.result()]


def _zeros(wanted: Sequence[tuple[Shape, mx.Dtype]]) -> list[mx.array]:
    arrays = [mx.zeros(shape, dtype) for shape, dtype in wanted]
    mx.eval(arrays)
    return arrays


def move_to_device(arrays: Sequence[mx.array]) -> None:
    """Have the arrays where they will be used; they were filled by the host.

    MLX's CUDA build keeps them in managed memory, whose pages move to the GPU when it first reads them. That is part of
    what loading costs, so it is done here, where the time is taken; elsewhere it is one memory.
    """
    if mx.cuda.is_available() and mx.default_device().type != mx.DeviceType.cpu:
        mx.eval([mx.max(array) for array in arrays if array.size])
