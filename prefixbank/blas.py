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

__all__ = ["load_blas"]

_OPENBLAS = "libopenblas.so.0"


def _candidates() -> list[str]:
    """Return the libraries to try: MKL where the `cpu` extra puts it, else the system's OpenBLAS."""
    folders = dict.fromkeys(Path(prefix) / "lib" for prefix in (sys.prefix, sys.base_prefix))
    mkl = [str(path) for folder in folders for path in sorted(folder.glob("libmkl_rt.so*"))]
    return [*mkl, _OPENBLAS]


@cache
def load_blas() -> str | None:
    """Load a real BLAS before mlx is imported, once for this process.

    Returns the library's name, or None where none is needed, none is installed, or mlx is already loaded.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or "mlx.core" in sys.modules:
        return None
    for name in _candidates():
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None
