"""Own what all files of a bank have in common: private folders, syncing, opening nothing but files."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prefixbank.errors import ShardCorruptError, ShardMissingError, StorageError

__all__ = ["FileOnDisk", "disk_bytes", "make_private_folder", "open_regular", "set_aside", "sync", "sync_folder"]

BLOCK_BYTES = 4096
"""What files are rounded up to when the budget is counted, as file systems do."""


@dataclass(frozen=True, slots=True)
class FileOnDisk:
    """Describe a file found in the bank: path relative to the bank root, length, age of its last change."""

    path: str
    n_bytes: int
    mtime_s: float

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rpartition("/")[2]


def disk_bytes(n_bytes: int) -> int:
    """Return a file's length rounded up to whole blocks."""
    return -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES


def make_private_folder(path: Path) -> None:
    """Make a folder of mode 0700, whatever the umask, and the parents that it lacks. Raises `StorageError`."""
    try:
        if not path.parent.exists():
            make_private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        if stat.S_IMODE(path.stat().st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as exc:
        raise StorageError(f"the folder {path} can't be made: {exc.strerror or exc}") from exc


def set_aside(path: Path, as_name: str = "") -> None:
    """Move a file that lies in the bank root to the quarantine, under a new name; one that is gone is no error.

    Raises `StorageError`.
    """
    target = path.parent / "quarantine" / (as_name or f"{path.name}-{secrets.token_hex(4)}")
    try:
        make_private_folder(target.parent)
        path.rename(target)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise StorageError(f"{path} can't be set aside: {exc.strerror or exc}") from exc


def sync(descriptor: int) -> None:
    """Force a file or folder to the disk itself; on macOS that takes F_FULLFSYNC (fcntl(2))."""
    if sys.platform == "darwin":
        import fcntl

        with suppress(OSError):  # some file systems know only fsync
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Force a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a file that must be one: a FIFO put in its place must not block, a link must not lead elsewhere."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise ShardMissingError(f"{path} is gone") from exc
    except OSError as exc:
        if _is_no_file(path):
            raise ShardCorruptError(f"{path} is no file") from exc
        raise StorageError(f"{path} can't be read: {exc.strerror or exc}") from exc
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ShardCorruptError(f"{path} is no file")
        yield descriptor
    except OSError as exc:  # of the caller's block too: the shard may be whole
        raise StorageError(f"{path} can't be read: {exc.strerror or exc}") from exc
    finally:
        with suppress(OSError):  # what was read was read
            os.close(descriptor)


def _is_no_file(path: Path) -> bool:
    """Tell whether something else than a file is known to lie there."""
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
