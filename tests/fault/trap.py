"""Load `shim.c` under a process, and tell it at which file operation that process dies, stops, or is failed.

The library counts the file operations below one folder, SQLite's among them. It must be loaded when the process starts:
`environment` says how. It is built by the machine's C compiler; where there is none, or no Linux, tests are skipped.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
KINDS = (
    "open", "create", "read", "write", "sync", "rename", "link", "unlink",
    "mkdir", "truncate", "chmod", "close", "stat", "lock", "list",
)  # fmt: skip
MODES = ("off", "count", "kill before", "kill within", "stop", "interrupt", "fail", "short")
CHANGING = frozenset(KINDS) - {"open", "read", "stat", "list"}
"""What can leave a trace on the disk: to die before a `read` is to die after what came before it."""


def why_not() -> str:
    """Return why the library can't be used on this machine, or ""."""
    if sys.platform != "linux":
        return "LD_PRELOAD is Linux's"
    return "" if shutil.which("cc") else "there is no C compiler (cc)"


def build(folder: Path) -> Path:
    """Build the library in a folder and return its path."""
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """Return the environment of a process that is to suffer."""
    return {**os.environ, "LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1"}  # threads and forks do not mix


@dataclass(frozen=True)
class Trap:
    """Say what happens at the n-th operation of these kinds; with `stays`, at all later ones too."""

    mode: str
    nth: int = 0
    kinds: Iterable[str] = KINDS
    errno: int = 0
    stays: bool = False


class Shim:
    """Control the library that this process was started under."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None)
        self._c.trap_arm.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_uint, ctypes.c_int, ctypes.c_int)
        self._c.trap_mark.argtypes = (ctypes.c_long,)
        self._c.trap_seen.restype = ctypes.c_long
        self._c.trap_kinds.restype = ctypes.c_char_p
        self._c.trap_hit.restype = ctypes.c_char_p

    def watch(self, root: Path) -> None:
        """Begin to know which open files lie below `root`; nothing happens to them yet."""
        self._c.trap_root(os.fsencode(root))
        self._c.trap_arm(MODES.index("count"), 0, 0, 0, 0)

    def arm(self, trap: Trap) -> None:
        mask = sum(1 << KINDS.index(kind) for kind in trap.kinds)
        self._c.trap_arm(MODES.index(trap.mode), trap.nth, mask, trap.errno, trap.stays)

    def rest(self) -> None:
        """Let nothing happen any more; files are still known, and what was seen can be asked for."""
        self._c.trap_rest()

    def record(self, descriptor: int) -> None:
        """Write all changes to an open file outside the root, for `replay`."""
        self._c.trap_record(descriptor)

    def mark(self, number: int) -> None:
        """Put a number into what is recorded: it was acknowledged by now."""
        self._c.trap_mark(number)

    @property
    def seen(self) -> list[str]:
        """Return the kinds of the operations since it was armed."""
        text: bytes = self._c.trap_kinds()
        return [KINDS[letter - ord("A")] for letter in text]

    @property
    def n_seen(self) -> int:
        n: int = self._c.trap_seen()
        return n

    @property
    def hit(self) -> str:
        """Return the path at which it happened, or ""."""
        path: bytes = self._c.trap_hit()
        return path.decode()

    @property
    def retried(self) -> bool:
        """Tell whether a file or folder was synced again after that had failed (SQLite's own files aside)."""
        return bool(self._c.trap_retried())
