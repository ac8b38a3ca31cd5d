"""Take archives apart and put them together again, as somebody would who means harm."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixbank.archivefile import _member_header
from prefixbank.chunking import FileDigest
from prefixbank.sealing import seal, unsealed

Member = tuple[str, bytes]


def pack(members: Iterable[Member]) -> bytes:
    """Return an archive of these members, in the one form that is read."""
    blocks = [_member_header(name, len(content)) + padded(content) for name, content in members]
    return b"".join(blocks) + bytes(1024)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pack_with_tar(members: Iterable[tuple[tarfile.TarInfo, bytes]], format: int = tarfile.GNU_FORMAT) -> bytes:
    """Return a tar as Python's own module writes it."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


@dataclass
class Parts:
    """Hold what an archive is made of, to be changed."""

    manifest: dict[str, Any]
    shards: list[Member]

    @classmethod
    def of(cls, path: Path) -> Parts:
        """Take an archive apart with Python's own tar module."""
        with tarfile.open(path) as archive:
            members = [(info.name, archive.extractfile(info).read()) for info in archive]  # type: ignore[union-attr]
        return cls(json.loads(members[0][1]), members[1:])

    def pack(self, text: str | bytes | None = None) -> bytes:
        """Put the archive together; `text` in place of the manifest."""
        content = json.dumps(self.manifest) if text is None else text
        content = content.encode() if isinstance(content, str) else content
        return pack([("manifest.json", content), *self.shards])

    def replace_shard(self, number: int, content: bytes, **fields: Any) -> None:
        """Put other bytes in a shard's place, and all that the manifest says of them right."""
        entry = self.manifest["shards"][number]
        entry |= {"n_bytes": len(content), "digest": FileDigest(content).hexdigest(), **fields}
        name = f"shards/{entry['chunk_key']}.safetensors"
        self.shards[number] = (name, content)

    def change_metadata(self, number: int, **texts: str) -> None:
        """Say something else in a shard's metadata, with header length, seal, size and digest right again."""
        content = self.shards[number][1]
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header["__metadata__"] |= texts
        self.replace_header(number, json.dumps(header, separators=(",", ":")))

    def replace_header(self, number: int, text: str) -> None:
        """Put another header in front of a shard's tensors, with length, seal, size and digest right again."""
        content = self.shards[number][1]
        tensors = content[8 + int.from_bytes(content[:8], "little") :]
        header = text.encode() + b" " * (-len(text.encode()) % 8)
        head = unsealed(len(header).to_bytes(8, "little") + header)
        self.replace_shard(number, seal(head, [memoryview(tensors)]) + tensors)

    def header(self, number: int) -> str:
        """Return a shard's header."""
        content = self.shards[number][1]
        return content[8 : 8 + int.from_bytes(content[:8], "little")].decode()

    def rename_shard(self, number: int, key: str) -> None:
        """Give a shard another chunk key in manifest and member name; not in its metadata."""
        self.manifest["shards"][number]["chunk_key"] = key
        self.shards[number] = (f"shards/{key}.safetensors", self.shards[number][1])


def with_value(text: str, name: str, value: str) -> str:
    """Return a JSON text with the first value of a key spelled otherwise."""
    changed, n = re.subn(rf'"{name}": ?[^,}}\]]+', f'"{name}": {value}', text, count=1)
    assert n == 1
    return changed


def infos(parts: Parts) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the members of the archive for `pack_with_tar`."""
    yield tarfile.TarInfo("manifest.json"), json.dumps(parts.manifest).encode()
    for name, content in parts.shards:
        yield tarfile.TarInfo(name), content
