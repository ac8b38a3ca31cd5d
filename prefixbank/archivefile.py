"""Own an archive as a file: a tar of which every byte but the contents is known beforehand; must not know chunks.

Only one form of tar is written and read: ustar (POSIX.1-1988, pax(1) "ustar Interchange Format"), regular files, no
owner, no time, no compression. A member's header follows from its name and length, so a reader compares it byte for
byte with the one that must be there: links, devices, sparse files, pax headers, other names, duplicates and whatever
else tar knows need no rules of their own, and nothing in the file decides how much is read or where to.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prefixbank.errors import ArchiveError, ConfigError, StorageError
from prefixbank.files import sync, sync_folder
from prefixbank.runs import read_runs, write_runs

__all__ = ["ArchiveReader", "archive_bytes", "require_new_file", "write_archive"]

MANIFEST_MEMBER = "manifest.json"
MAX_MANIFEST_BYTES = 32 << 20
MAX_MEMBER_BYTES = 8**11 - 1
"""What eleven octal digits can say."""

_BLOCK = 512
_END = bytes(2 * _BLOCK)

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK": "zip"}
_TYPES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a folder",
    b"6": "a FIFO",
    b"S": "a sparse file",
    b"x": "a pax header",
    b"g": "a pax header",
    b"L": "a GNU long name",
    b"K": "a GNU long name",
}


def _member_header(name: str, n_bytes: int) -> bytes:
    """Return the block in front of a member: mode 0600, nobody's, of no time."""
    fields = [
        name.encode("ascii").ljust(100, b"\0"),
        b"0000600\0" + b"0000000\0" * 2,
        b"%011o\0" % n_bytes,
        b"%011o\0" % 0,
        b" " * 8,  # the checksum counts itself as blanks
        b"0" + bytes(100),
        b"ustar\x0000" + bytes(64),
        b"0000000\0" * 2 + bytes(155 + 12),
    ]
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _BLOCK) * _BLOCK


def archive_bytes(lengths: Iterable[int]) -> int:
    """Return the length of an archive whose members have these lengths."""
    return sum(_BLOCK + _padded(n_bytes) for n_bytes in lengths) + len(_END)


def require_new_file(path: Path) -> None:
    """Raise `ConfigError` unless a file can be made at `path` that is not there yet."""
    try:
        if os.path.lexists(path):
            raise ConfigError(f"{path} is there already: delete it, or give another name")
        if not path.parent.is_dir():
            raise ConfigError(f"{path.parent} is no folder: make it first")
    except (OSError, ValueError) as exc:  # not to be looked into; a null character
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError(f"{str(path)!r} can't be a file: {exc}") from exc


def write_archive(path: Path, members: Iterable[tuple[str, int, Iterable[bytes]]]) -> None:
    """Write a new archive of mode 0600: whole and synced, or not at all. Members are name, length and content.

    Killed inside, a file `.<name>.<8 hex>.tmp` stays beside it. Raises `ConfigError` where the file is there already,
    `StorageError`, and what the contents raise.
    """
    require_new_file(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)  # the umask may have taken more away
            for name, n_bytes, content in members:
                write_runs(descriptor, [memoryview(_member_header(name, n_bytes))])
                written = 0
                for block in content:
                    write_runs(descriptor, [memoryview(block)])
                    written += len(block)
                assert written == n_bytes, "a member has another length than was said"
                write_runs(descriptor, [memoryview(bytes(_padded(n_bytes) - n_bytes))])
            write_runs(descriptor, [memoryview(_END)])
            sync(descriptor)
            _publish(temporary, path)
        finally:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                temporary.unlink()
        sync_folder(path.parent)
    except OSError as exc:
        raise StorageError(f"{path} can't be written: {exc.strerror or exc}") from exc


def _publish(temporary: Path, path: Path) -> None:
    """Give the finished file its name, unless another file has it by now."""
    try:
        os.link(temporary, path)
    except FileExistsError as exc:
        raise ConfigError(f"{path} was made meanwhile: give another name") from exc
    except OSError:  # a file system without hard links
        require_new_file(path)
        temporary.rename(path)


class ArchiveReader:
    """Read the members of an archive that must be there, each by the name and length that it must have."""

    def __init__(self, descriptor: int, path: Path) -> None:
        """Read from an open regular file; `open` makes both."""
        self._descriptor = descriptor
        self.path = path
        self.n_bytes = os.fstat(descriptor).st_size

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[ArchiveReader]:
        """Open an archive. Raises `ConfigError` without one, `ArchiveError` for what is no regular file."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        except (FileNotFoundError, NotADirectoryError, ValueError) as exc:
            raise ConfigError(f"{path} is not there: give an archive that `prefixbank export` made") from exc
        except OSError as exc:
            raise StorageError(f"{path} can't be read: {exc.strerror or exc}") from exc
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ArchiveError(f"{path} is no regular file: an archive is read more than once")
            yield cls(descriptor, path)
        finally:
            os.close(descriptor)

    def read(self, offset: int, n_bytes: int) -> bytearray:
        """Return `n_bytes` from `offset` on. Raises `ArchiveError` where the file ends before, and `StorageError`."""
        into = bytearray(n_bytes if offset + n_bytes <= self.n_bytes else 0)
        if len(into) < n_bytes or read_runs(self._descriptor, [memoryview(into)], offset) != n_bytes:
            raise ArchiveError(f"{self.path} ends too early: it was cut off")
        return into

    def read_manifest(self) -> bytes:
        """Return the first member. Raises `ArchiveError` where it is not the manifest, or too long."""
        block = bytes(self.read(0, min(_BLOCK, self.n_bytes)))
        for magic, program in _COMPRESSED.items():
            if block.startswith(magic):
                raise ArchiveError(f"{self.path} is compressed ({program}): give the archive as export wrote it")
        digits = block[124:135]
        known = len(block) == _BLOCK and len(digits) == 11 and not digits.strip(b"01234567")
        n_bytes = int(digits, 8) if known else 0
        if not known or block != _member_header(MANIFEST_MEMBER, n_bytes):
            raise ArchiveError(f"{self.path} is no archive of prefixbank: {_describe(block, MANIFEST_MEMBER, n_bytes)}")
        if n_bytes > MAX_MANIFEST_BYTES:
            raise ArchiveError(f"{self.path} has a manifest of {n_bytes} bytes: at most {MAX_MANIFEST_BYTES} are read")
        content = bytes(self.read(_BLOCK, n_bytes))
        self._require_zeros(_BLOCK + n_bytes, _padded(n_bytes) - n_bytes)
        return content

    def require_members(self, members: Sequence[tuple[str, int]]) -> list[int]:
        """Return where the contents of the members behind the manifest begin.

        Raises `ArchiveError` unless these members, in this order, are all that the file holds. Reads no contents.
        """
        (n_manifest_bytes,) = (int(self.read(124, 11), 8),)
        expected = archive_bytes([n_manifest_bytes, *(n_bytes for _, n_bytes in members)])
        offsets = []
        at = _BLOCK + _padded(n_manifest_bytes)
        for name, n_bytes in members:
            block = bytes(self.read(at, _BLOCK))
            if block != _member_header(name, n_bytes):
                raise ArchiveError(f"{self.path} is not what its manifest says: {_describe(block, name, n_bytes)}")
            offsets.append(at + _BLOCK)
            at += _BLOCK + _padded(n_bytes)
            if at > self.n_bytes:
                raise ArchiveError(f"{self.path} ends inside {name}: it was cut off")
            self._require_zeros(offsets[-1] + n_bytes, _padded(n_bytes) - n_bytes)
        if self.n_bytes > expected and any(block := bytes(self.read(at, _BLOCK))):
            raise ArchiveError(f"{self.path} is not what its manifest says: {_describe(block, 'its end', 0)}")
        if self.n_bytes != expected:
            raise ArchiveError(f"{self.path} has {self.n_bytes} bytes, and by its manifest must have {expected}")
        self._require_zeros(at, len(_END))
        return offsets

    def _require_zeros(self, offset: int, n_bytes: int) -> None:
        if any(self.read(offset, n_bytes)):
            raise ArchiveError(f"{self.path} has bytes where nothing must be, at {offset}")


def _describe(block: bytes, name: str, n_bytes: int) -> str:
    """Return how a header differs from that of the member which must be there; the file's own words are escaped."""
    if len(block) < _BLOCK or not any(block):
        return f"it ends where {name} must be"
    if block[257:262] != b"ustar":
        return f"there is no member where {name} must be"
    kind = block[156:157]
    if kind not in (b"0", b"\0"):
        return f"where {name} must be is {_TYPES.get(kind, 'something else than a regular file')}"
    found = block[:100].split(b"\0")[0]
    if found != name.encode() or any(block[345:500]):
        return f"where {name} must be is a member named {found!r}"
    if block[124:136] != b"%011o\0" % n_bytes:
        return f"{name} has another length"
    return f"the tar header of {name} is not as export writes it (archives that were packed again are not read)"
