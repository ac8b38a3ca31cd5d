"""Play recorded file operations back onto a disk that loses what was not synced.

The recording is `shim.c`'s. The disk follows POSIX to the letter: data are safe once their file was synced, names once
their folder was. What is not safe may be there or not, each write and each folder's later names for themselves; a file
may also have its new length and zeros in place of its bytes.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.fault.trap import KINDS

_HEAD = struct.Struct("<IIIIQQQ")
MARK = "mark"


@dataclass(frozen=True)
class Operation:
    """Describe one change: `inode` tells files apart whatever they are called; a mark's is its number."""

    kind: str
    path: str
    other: str
    inode: int
    offset: int
    data: bytes = field(repr=False, default=b"")


def read_recording(path: Path, root: Path) -> Iterator[Operation]:
    """Yield the operations of a recording, with paths relative to the bank root's parent."""
    content = path.read_bytes()
    at = 0

    def relative(text: bytes) -> str:
        return PurePosixPath(text.decode()).relative_to(root.parent).as_posix() if text else ""

    while at < len(content):
        kind, length, other_length, _, inode, offset, n_bytes = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        name, other = content[at : at + length], content[at + length : at + length + other_length]
        at += length + other_length
        data = b""
        named = MARK if kind == len(KINDS) else KINDS[kind]
        if named == "write":
            data = content[at : at + n_bytes]
            at += n_bytes
        yield Operation(named, relative(name), relative(other), inode, offset, data)


@dataclass
class File:
    """Hold one file: the bytes that are safe, and the changes since, as (offset, data) or (size, None) for a cut."""

    safe: bytes = b""
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def bytes_with(self, chosen: Sequence[bool], zeroed: Sequence[bool]) -> bytes:
        content = bytearray(self.safe)
        for (offset, data), is_there, is_zeroed in zip(self.changes, chosen, zeroed, strict=True):
            if not is_there:
                continue
            if data is None:
                del content[offset:]
                content.extend(bytes(max(offset - len(content), 0)))
                continue
            content.extend(bytes(max(offset - len(content), 0)))
            content[offset : offset + len(data)] = bytes(len(data)) if is_zeroed else data
        return bytes(content)


Entry = File | None
"""What a name stands for; None is a folder."""


class Disk:
    """Hold what is safe on a disk, and what would be lost with the power."""

    def __init__(self) -> None:
        self.names: dict[str, Entry] = {}
        self._safe: dict[str, Entry] = {}
        self._pending: dict[str, list[tuple[str, Entry, bool]]] = {}  # by folder: name, what, is it there
        self._files: dict[int, File] = {}

    def _set(self, path: str, entry: Entry, there: bool) -> None:
        if there:
            self.names[path] = entry
        else:
            self.names.pop(path, None)
        self._pending.setdefault(str(PurePosixPath(path).parent), []).append((path, entry, there))

    def do(self, operation: Operation) -> None:
        """Carry one operation out."""
        path = operation.path
        if operation.kind == "create":
            self._files[operation.inode] = file = File()
            self._set(path, file, True)
        elif operation.kind == "mkdir":
            self._set(path, None, True)
        elif operation.kind == "write":
            self._files[operation.inode].changes.append((operation.offset, operation.data))
        elif operation.kind == "truncate":
            self._files[operation.inode].changes.append((operation.offset, None))
        elif operation.kind == "unlink":
            self._set(path, self.names[path], False)
        elif operation.kind in ("rename", "link"):
            entry = self.names[path]
            if operation.kind == "rename":
                self._set(path, entry, False)
            self._set(operation.other, entry, True)
        elif operation.kind == "sync":
            if path == "." or (path in self.names and self.names[path] is None):
                for name, entry, there in self._pending.pop(path, []):
                    if there:
                        self._safe[name] = entry
                    else:
                        self._safe.pop(name, None)
            else:
                file = self._files[operation.inode]
                everything = [True] * len(file.changes)
                file.safe, file.changes = file.bytes_with(everything, [False] * len(everything)), []

    def everything(self) -> dict[str, bytes | None]:
        """Return all files and folders (None) as whoever looks at them sees them."""
        return {
            name: entry and entry.bytes_with([True] * len(entry.changes), [False] * len(entry.changes))
            for name, entry in self.names.items()
        }

    def after_a_cut(self, chance: random.Random | None) -> dict[str, bytes | None]:
        """Return the files (and folders: None) that a power cut leaves; without `chance`, only what is safe."""
        names = dict(self._safe)
        for changes in self._pending.values():
            kept = chance.randrange(len(changes) + 1) if chance is not None else 0
            for name, entry, there in changes[:kept]:
                if there:
                    names[name] = entry
                else:
                    names.pop(name, None)
        contents: dict[str, bytes | None] = {}
        drawn: dict[int, bytes] = {}
        for name, entry in sorted(names.items(), key=lambda pair: pair[0]):
            parent = str(PurePosixPath(name).parent)
            if parent != "." and contents.get(parent, b"") is not None:
                continue  # its folder was lost
            if entry is None:
                contents[name] = None
                continue
            if id(entry) not in drawn:
                n = len(entry.changes)
                chosen = [chance is not None and chance.random() < 0.5 for _ in range(n)]
                zeroed = [chance is not None and chance.random() < 0.3 for _ in range(n)]
                drawn[id(entry)] = entry.bytes_with(chosen, zeroed)
            contents[name] = drawn[id(entry)]
        return contents


def lay_out(contents: dict[str, bytes | None], folder: Path) -> None:
    """Write files and folders to a real disk."""
    for name, content in contents.items():
        path = folder / name
        if content is None:
            path.mkdir(mode=0o700)
        else:
            path.write_bytes(content)
            path.chmod(0o600)
