"""Own the bare read: files read by a few threads into memory that is there already, the bound of any loading."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from prefixbank.session import MAX_READERS

__all__ = ["BareRead"]

PIECE_BYTES = 8 << 20


class BareRead:
    """Read the same whole files again and again, into buffers that were touched before. Ends its threads on exit."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.n_bytes = 0
        self._executor = ThreadPoolExecutor(MAX_READERS)
        self._pieces: list[tuple[Path, int, memoryview]] = []
        for file in files:
            buffer = np.ones(file.stat().st_size, np.uint8)
            self.n_bytes += buffer.nbytes
            for start in range(0, buffer.nbytes, PIECE_BYTES):
                self._pieces.append((file, start, memoryview(buffer[start : start + PIECE_BYTES])))

    def __call__(self) -> None:
        """Read all files once."""
        if sum(self._executor.map(_read, self._pieces)) != self.n_bytes:
            raise RuntimeError("a file changed while it was measured")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown()


def _read(piece: tuple[Path, int, memoryview]) -> int:
    path, start, buffer = piece
    n_read = 0
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while n_read < buffer.nbytes and (n_more := file.readinto(buffer[n_read:])):
            n_read += n_more
    return n_read
