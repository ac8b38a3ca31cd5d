"""Own `prefixes.json`: names and pins once more beside the index, so that a lost index loses none of them.

The file is written inside the transaction that changes a name, before it is committed (the one file that is). So
whatever was acknowledged is in the file, and a crash between leaves a file that is one change ahead: where file and
index differ, the file says what was wanted last, and what only the index has is kept.

A name is kept by where its prefix ends: the parent of its last chunk, and the key that the chunk would have if it ended
with the prefix. That stays true when a longer chunk supersedes the one of today, so that storing writes no names.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixbank.chunking import TOKEN_BYTES, chunk_key
from prefixbank.errors import IndexCorruptError, StorageError
from prefixbank.files import make_private_folder, set_aside, sync, sync_folder
from prefixbank.index import chunk_rows, namespace_rows, prefix_rows
from prefixbank.rootfile import NAMES_FILE
from prefixbank.values import ChunkKey, ChunkRecord, Namespace

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["NAMES_FILE", "KeptName", "KeptNames", "of_index", "read", "update"]

FORMAT_VERSION = 1

_NameKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class KeptName:
    """Hold a prefix name as the file keeps it; `end_key` is None for a prefix that was evicted."""

    name: str
    fingerprint: str
    salt_digest: str
    n_tokens: int
    pinned: bool
    source_digest: str
    created_at: int
    parent_key: str | None = None
    start: int | None = None
    end_key: str | None = None

    @property
    def key(self) -> _NameKey:
        """Return what only one name has."""
        return self.name, self.fingerprint, self.salt_digest

    def without_place(self) -> KeptName:
        """Return the name without where it ends: what a user would call the same."""
        return replace(self, parent_key=None, start=None, end_key=None)

    def ends_in(self, chunk: ChunkRecord, root_key: ChunkKey) -> bool:
        """Tell whether the prefix ends with or inside a chunk of its namespace."""
        if chunk.start != self.start or (chunk.parent_key.hex() if chunk.parent_key else None) != self.parent_key:
            return False
        n_inside = self.n_tokens - chunk.start
        ids = chunk.token_ids[: n_inside * TOKEN_BYTES]
        return 0 < n_inside <= chunk.n_tokens and chunk_key(chunk.parent_key or root_key, ids).hex() == self.end_key


@dataclass(frozen=True, slots=True)
class KeptNames:
    """Hold all names, and the namespaces that they belong to (whose `id` says nothing)."""

    names: dict[_NameKey, KeptName]
    namespaces: dict[tuple[str, str], Namespace]

    def same_as(self, other: KeptNames) -> bool:
        """Tell whether both say the same names and pins, wherever they end."""
        return {key: name.without_place() for key, name in self.names.items()} == {
            key: name.without_place() for key, name in other.names.items()
        }


NO_NAMES = KeptNames({}, {})


def of_index(tx: sa.Connection) -> KeptNames:
    """Return the names that the index has."""
    prefixes = prefix_rows.list_all(tx)
    if not prefixes:
        return NO_NAMES
    namespaces = {namespace.id: namespace for namespace in namespace_rows.list_all(tx)}
    rows = chunk_rows.find(tx, list({p.chunk_key for p in prefixes if p.chunk_key is not None}))
    names = []
    for prefix in prefixes:
        namespace = namespaces.get(prefix.namespace_id)
        if namespace is None:
            raise IndexCorruptError(f"the name {prefix.name!r} is of no namespace: run `prefixbank repair`")
        kept = KeptName(
            prefix.name,
            namespace.fingerprint,
            namespace.salt_digest,
            prefix.n_tokens,
            prefix.pinned,
            prefix.source_digest,
            prefix.created_at,
        )
        chunk = None if prefix.chunk_key is None else rows.get(prefix.chunk_key)
        if chunk is not None:
            ids = chunk.token_ids[: (prefix.n_tokens - chunk.start) * TOKEN_BYTES]
            kept = replace(
                kept,
                parent_key=chunk.parent_key.hex() if chunk.parent_key else None,
                start=chunk.start,
                end_key=chunk_key(chunk.parent_key or namespace.root_key, ids).hex(),
            )
        names.append(kept)
    of_names = {(name.fingerprint, name.salt_digest) for name in names}
    return KeptNames(
        {name.key: name for name in names},
        {key: n for n in namespaces.values() if (key := (n.fingerprint, n.salt_digest)) in of_names},
    )


def read(root: Path) -> KeptNames | None:
    """Return what the file says; None without one. Raises `IndexCorruptError` for a damaged one, `StorageError`."""
    path = root / NAMES_FILE
    try:
        # A FIFO or folder in the file's place must not hang or be read.
        if not path.is_file() and not os.path.lexists(path):
            return None
        if path.is_symlink() or not path.is_file():
            raise IndexCorruptError(f"{path} is no file: run `prefixbank repair`")
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StorageError(f"{path} can't be read: {exc.strerror or exc}") from exc
    try:
        stored: dict[str, Any] = json.loads(content.decode())
        digest = stored.pop("digest")
        if stored["format"] != "prefixbank names" or stored["format_version"] != FORMAT_VERSION:
            raise ValueError("its format is unknown")
        if digest != _digest(stored):
            raise ValueError("its bytes are not those that were written")
        names = [KeptName(**{f.name: kept[f.name] for f in fields(KeptName)}) for kept in stored["names"]]
        namespaces = [
            Namespace(**{**kept, "id": 0, "root_key": ChunkKey(bytes.fromhex(kept["root_key"]))})
            for kept in stored["namespaces"]
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise IndexCorruptError(f"{path} is damaged ({exc}): run `prefixbank repair`") from exc
    return KeptNames({name.key: name for name in names}, {(n.fingerprint, n.salt_digest): n for n in namespaces})


def update(root: Path, before: KeptNames, after: KeptNames, *, durable: bool) -> None:
    """Write the file for a transaction that turned the names `before` into `after`, and is to be committed next.

    What the file has and the index had not (an older copy of it was put back, say) stays, as does where an evicted
    prefix ended. A damaged file is set aside. Killed inside, the old file is there, or the new one. Raises
    `StorageError`.
    """
    try:
        kept = read(root)
    except IndexCorruptError:
        set_aside(root / NAMES_FILE)
        kept = None
    if kept is None and not after.names:
        return
    old = kept or NO_NAMES
    names = {key: name for key, name in old.names.items() if key not in before.names}
    for key, name in after.names.items():
        known = old.names.get(key)
        if name.end_key is None and known is not None and known.without_place() == name:
            name = known
        names[key] = name
    namespaces = old.namespaces | after.namespaces
    new = KeptNames(names, {key: namespaces[key] for _, *rest in names for key in [(rest[0], rest[1])]})
    if new != kept:
        _write(root / NAMES_FILE, new, durable)


def _write(path: Path, kept: KeptNames, durable: bool) -> None:
    plain: dict[str, Any] = {
        "format": "prefixbank names",
        "format_version": FORMAT_VERSION,
        "namespaces": [_plain(namespace) for namespace in kept.namespaces.values()],
        "names": [asdict(kept.names[key]) for key in sorted(kept.names)],
    }
    text = json.dumps({**plain, "digest": _digest(plain)}, indent=1) + "\n"
    temporary = path.parent / "tmp" / f"{path.name}.{uuid.uuid4().hex[:8]}"
    try:
        make_private_folder(temporary.parent)
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(text)
                file.flush()
                if durable:
                    sync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            sync_folder(path.parent)
    except OSError as exc:
        raise StorageError(f"{path} can't be written: {exc.strerror or exc}") from exc


def _plain(namespace: Namespace) -> dict[str, Any]:
    values = asdict(namespace)
    del values["id"]
    return {**values, "root_key": namespace.root_key.hex()}


def _digest(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def find_end(kept: KeptName, chunks: Sequence[ChunkRecord], root_key: ChunkKey) -> ChunkRecord | None:
    """Return which of some chunks of the name's namespace the prefix ends in, or None.

    One with a shard, if there is one, and with the states at this end; else the longest, which supersedes the others.
    """

    def rank(chunk: ChunkRecord) -> tuple[bool, bool, int]:
        return chunk.file_name is not None, chunk.has_state and chunk.end == kept.n_tokens, chunk.n_tokens

    return max((chunk for chunk in chunks if kept.ends_in(chunk, root_key)), key=rank, default=None)
