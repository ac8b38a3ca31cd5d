"""Own the choice of BLAS for mlx's CPU build; must know nothing of banks.

mlx's CPU build on Linux carries a reference BLAS (2-5 GFLOP/s on two cores; MKL gives 105-125). The dynamic linker
takes the first library that offers the symbols, so a real one must be loaded, globally, before `mlx.core` is.
macOS (Accelerate) and CUDA need nothing.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path

__all__ = ["blas_came_too_late", "load_blas"]

_OPENBLAS = "libopenblas.so.0"


def _candidates() -> list[str]:
    """Return the libraries to try: MKL where the `cpu` extra puts it, else the system's OpenBLAS."""
    folders = dict.fromkeys(Path(prefix) / "lib" for prefix in (sys.prefix, sys.base_prefix))
    mkl = [str(path) for folder in folders for path in sorted(folder.glob("libmkl_rt.so*"))]
    return [*mkl, _OPENBLAS]


def _is_needed() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def blas_came_too_late() -> bool:
    """Tell whether a real BLAS is installed and mlx works without it, because it was imported before prefixbank."""
    return _is_needed() and load_blas() is None and any(Path(name).is_file() for name in _candidates())


@cache
def load_blas() -> str | None:
    """Load a real BLAS before mlx is imported, once for this process.

    Returns the library's name, or None where none is needed, none is installed, or mlx is already loaded.
    """
    if not _is_needed() or "mlx.core" in sys.modules:
        return None
    for name in _candidates():
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None
