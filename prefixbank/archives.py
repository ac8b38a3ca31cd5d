"""Own export and import: named prefixes as one file, and such a file, proven whole, into a bank; no SQL, and no arrays.

Nothing of an archive is trusted but the KV itself, which only the model could prove. An import reads and proves all of
it before it changes anything, and then stores through `storing` as any store does, from the archive's rows: the shards'
heads are written anew, what the bank has stays as it is, and a killed import is finished by another.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prefixbank import eviction, exporting
from prefixbank.archivefile import ArchiveReader, require_new_file, write_archive
from prefixbank.chunking import TOKEN_BYTES, FileDigest
from prefixbank.errors import (
    ArchiveError,
    BankReadOnlyError,
    FingerprintMismatchError,
    SchemaError,
    ShardCorruptError,
    StorageError,
)
from prefixbank.files import disk_bytes
from prefixbank.index import chunk_rows, namespace_rows, prefix_rows
from prefixbank.layout import CacheLayout
from prefixbank.manifests import Manifest, chain_of, read_manifest, states_inside
from prefixbank.sealing import describe, seal_of, unsealed
from prefixbank.values import ChunkKey, ChunkRecord, Namespace, PrefixRecord

if TYPE_CHECKING:
    import sqlalchemy as sa

    from prefixbank.session import BankSession

__all__ = ["ArchivedPrefix", "Exported", "Imported", "export_prefixes", "import_prefixes"]

Progress = Callable[[int, int], None]

_READ_STEP = 8 << 20


@dataclass(frozen=True, slots=True)
class ArchivedPrefix:
    """Name one prefix of an archive, whose it is, and what becomes or became of it.

    `action` is `exported`; or at an import `new`, `there` (the bank has it), `replaces` (another one of the name) or
    `kept` (another one has the name, and keeps it: nothing of this one is stored). `refused` says why one that was to
    be stored was not, or is "".
    """

    name: str
    label: str
    fingerprint: str
    salt_digest: str
    n_tokens: int
    pinned: bool
    action: str
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """Say what an archive holds: `n_tokens` token ids in `n_shards` shards, `n_bytes` in all.

    `left_out` are names that nothing can be exported of, each with the reason.
    """

    path: Path
    prefixes: tuple[ArchivedPrefix, ...]
    n_shards: int
    n_tokens: int
    n_bytes: int
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """Say what an import did, or would do.

    The archive has `n_shards` shards; `n_new_chunks` of them were stored, in `n_written_bytes`, and `n_evicted_chunks`
    chunks made room for them.
    """

    path: Path
    prefixes: tuple[ArchivedPrefix, ...]
    n_shards: int
    n_new_chunks: int
    n_written_bytes: int
    n_evicted_chunks: int


def export_prefixes(
    session: BankSession,
    path: Path,
    names: Sequence[str],
    namespace_id: int | None,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the named prefixes (all of them, where no name is given) to a new archive of mode 0600.

    It holds their tokens and no others: a shard that goes on behind a prefix is cut. Raises `ConfigError`,
    `UnknownPrefixError`, `ShardError` for a shard that is not what was stored, `StorageError`: then there is no file.
    """
    require_new_file(path)
    session.settle()
    todo = exporting.plan(session.index, session.shards, session.chunk_tokens, names, namespace_id)
    exported = Exported(
        path=path,
        prefixes=tuple(_archived(todo.manifest, prefix, "exported") for prefix in todo.manifest.prefixes),
        n_shards=len(todo.manifest.shards),
        n_tokens=sum(record.n_tokens for record in todo.manifest.shards),
        n_bytes=todo.n_bytes,
        left_out=todo.left_out,
    )
    if not dry_run:
        write_archive(path, todo.members(session.shards, progress))
    return exported


def _archived(manifest: Manifest, prefix: PrefixRecord, action: str, refused: str = "") -> ArchivedPrefix:
    namespace = manifest.namespaces[prefix.namespace_id]
    return ArchivedPrefix(
        name=prefix.name,
        label=namespace.label,
        fingerprint=namespace.fingerprint,
        salt_digest=namespace.salt_digest,
        n_tokens=prefix.n_tokens,
        pinned=prefix.pinned,
        action=action,
        refused=refused,
    )


def import_prefixes(
    session: BankSession,
    path: Path,
    *,
    replaces: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Store what an archive holds, after all of it was proven; with `dry_run` only say what that would do.

    Names that other prefixes have stay with those, unless it `replaces` them. Killed inside, the prefixes that were
    named are whole. Raises `ArchiveError`, `SchemaError` and `FingerprintMismatchError` for an archive that is refused,
    `StorageError` where it does not fit: then nothing was changed.
    """
    if session.read_only and not dry_run:
        raise BankReadOnlyError(f"{session.root} is opened read-only: nothing can be imported")
    session.settle()
    with ArchiveReader.open(path) as reader:
        archive = _Archive(reader, session.chunk_tokens)
        todo = _plan(session, archive, replaces)
        archive.prove_data(progress)
        evicted = _make_room(session, archive, todo, dry_run=dry_run)
        n_new_chunks, n_written_bytes = len(todo.new_bytes), sum(todo.new_bytes.values())
        done = [_archived(archive.manifest, prefix, action) for prefix, action, _ in todo.prefixes]
        if not dry_run:
            done, n_new_chunks, n_written_bytes = _carry_out(session, archive, todo)
    return Imported(path, tuple(done), len(archive.records), n_new_chunks, n_written_bytes, evicted)


class _Archive:
    """Hold an open archive that is what its manifest says; every shard's head is proven, its data once asked for."""

    def __init__(self, reader: ArchiveReader, chunk_tokens: int) -> None:
        self._reader = reader
        content = reader.read_manifest()
        try:
            self.manifest = read_manifest(content)
        except (ArchiveError, SchemaError) as exc:
            raise type(exc)(f"{reader.path} is refused: {exc}") from exc
        if self.manifest.chunk_tokens != chunk_tokens:
            raise FingerprintMismatchError(
                f"{reader.path} has chunks of {self.manifest.chunk_tokens} tokens, and this bank of {chunk_tokens}: "
                f"import it into a bank made with `init --chunk-tokens {self.manifest.chunk_tokens}`"
            )
        members = [(record.file_name or "", record.n_bytes) for record in self.manifest.shards]
        self._offsets = dict(zip((r.key for r in self.manifest.shards), reader.require_members(members), strict=True))
        self.layouts = [CacheLayout.from_json(namespace.layout) for namespace in self.manifest.namespaces]
        self.records: dict[ChunkKey, ChunkRecord] = {}
        for record in self.manifest.shards:
            self.records[record.key] = self._proven(record)

    def _proven(self, record: ChunkRecord) -> ChunkRecord:
        """Return a shard's record with its token ids.

        What a head may get wrong is the matter of `sealing.describe`; here it must also be that of this very place.
        """
        namespace = self.manifest.namespaces[record.namespace_id]
        header = self._header(record)
        try:
            found = describe(header, record.n_bytes, self.manifest.chunk_tokens)
        except ShardCorruptError as exc:
            raise ArchiveError(f"{record.file_name} is no shard: {exc}") from exc
        if found.key != record.key or (found.parent_key, found.start, found.n_tokens, found.has_state) != (
            record.parent_key,
            record.start,
            record.n_tokens,
            record.has_state,
        ):
            raise ArchiveError(f"{record.file_name} is another chunk than its manifest says")
        if (found.fingerprint, found.salt_digest, found.root_key, found.layout) != (
            namespace.fingerprint,
            namespace.salt_digest,
            namespace.root_key,
            namespace.layout,
        ):
            raise ArchiveError(f"{record.file_name} is of another model, salt or cache layout than its manifest says")
        return replace(record, token_ids=found.token_ids)

    def _header(self, record: ChunkRecord) -> bytes:
        """Return the head of a shard, whose length its manifest decides."""
        header = bytes(self._reader.read(self._offsets[record.key], record.data_offset))
        if int.from_bytes(header[:8], "little") != len(header) - 8:
            raise ArchiveError(f"{record.file_name} has a head of another length than its layout leaves")
        return header

    def prove_data(self, progress: Progress | None = None) -> None:
        """Read every shard and prove its digest and its seal. Raises `ArchiveError`."""
        done = 0
        for record in self.records.values():
            header = self._header(record)
            digest, own = FileDigest(header), FileDigest(unsealed(header))
            offset = self._offsets[record.key] + len(header)
            left = record.n_bytes - len(header)
            while left:
                step = min(left, _READ_STEP)
                block = self._reader.read(offset, step)
                digest.update(block)
                own.update(block)
                offset, left = offset + step, left - step
            self._require(record, digest)
            if seal_of(header) not in (None, own.hexdigest()):
                raise ArchiveError(f"{record.file_name} has other bytes than its seal says")
            done += record.n_bytes
            if progress is not None:
                progress(done, self.manifest.n_shard_bytes)

    def read(self, record: ChunkRecord) -> memoryview:
        """Return a shard's tensors, proven again: the file may have been changed meanwhile. Raises `ArchiveError`."""
        header = self._header(record)
        content = self._reader.read(self._offsets[record.key] + len(header), record.n_bytes - len(header))
        digest = FileDigest(header)
        digest.update(content)
        self._require(record, digest)
        return memoryview(content)

    def _require(self, record: ChunkRecord, digest: FileDigest) -> None:
        if digest.digest() != record.digest:
            raise ArchiveError(f"{record.file_name} has other bytes than its manifest says")

    def rows_of(self, prefix: PrefixRecord) -> _ArchivedRows:
        """Return what the archive holds of a prefix, for `storing`."""
        assert prefix.chunk_key is not None
        chain = chain_of(self.records[prefix.chunk_key], self.records)
        return _ArchivedRows(self, chain, self.layouts[prefix.namespace_id])


class _ArchivedRows:
    """Give out a prefix's shards as a live prompt cache would give its rows and states: a `storing.RowSource`."""

    def __init__(self, archive: _Archive, chain: list[ChunkRecord], layout: CacheLayout) -> None:
        self._archive = archive
        self._layout = layout
        self.chain = chain
        self.token_ids = b"".join(record.token_ids for record in chain)
        inside = states_inside(chain, archive.records.values()) if layout.has_state else []
        self.records = {
            (r.start, r.n_tokens): r
            for r in [*inside, *chain]
            if self.token_ids[TOKEN_BYTES * r.start :].startswith(r.token_ids)
        }

    def has_rows(self, start: int, n_tokens: int) -> bool:
        return (start, n_tokens) in self.records

    def state_ends(self) -> list[int]:
        return sorted(record.end for record in self.records.values() if record.has_state)

    def runs(self, start: int, n_tokens: int) -> Iterator[memoryview]:
        yield self._archive.read(self.records[start, n_tokens])[: self._layout.data_bytes(n_tokens)]

    def state_runs(self, end: int) -> Iterator[memoryview]:
        record = next(r for r in self.records.values() if r.has_state and r.end == end)
        yield self._archive.read(record)[self._layout.data_bytes(record.n_tokens) :]


@dataclass(frozen=True, slots=True)
class _Todo:
    """Hold what an import will do: each prefix with its action and what has its name, and the bytes of each new shard.

    `namespaces` are those of the archive as the bank knows them; id 0 for those that it does not.
    """

    namespaces: list[Namespace]
    prefixes: list[tuple[PrefixRecord, str, PrefixRecord | None]]
    new_bytes: dict[ChunkKey, int]


def _plan(session: BankSession, archive: _Archive, replaces: bool) -> _Todo:
    """Return what an import will do. Raises `FingerprintMismatchError` where the bank has something else there."""
    with session.index.reading() as tx:
        roots = {namespace.root_key: namespace for namespace in namespace_rows.list_all(tx)}
        namespaces = []
        for wanted in archive.manifest.namespaces:
            known = namespace_rows.find(tx, wanted.fingerprint, wanted.salt_digest)
            if known is not None and not namespace_rows.agree(known, wanted):
                raise FingerprintMismatchError(
                    f"the archive says another cache layout or root key of namespace {wanted.fingerprint[:12]} than "
                    "this bank: one of them is not the model's"
                )
            if known is None and wanted.root_key in roots:
                raise FingerprintMismatchError("the archive has a root key that is another namespace's in this bank")
            namespaces.append(known or replace(wanted, id=0))
        rows = chunk_rows.find(tx, list(archive.records))
        for key, row in rows.items():
            record = archive.records[key]
            if not chunk_rows.same_chunk(row, replace(record, namespace_id=namespaces[record.namespace_id].id)):
                raise FingerprintMismatchError("a chunk key of the archive is another prefix's in this bank")
        prefixes = []
        # The longest first: what covers a tail makes the tail unnecessary.
        for prefix in sorted(archive.manifest.prefixes, key=lambda prefix: -prefix.n_tokens):
            namespace = namespaces[prefix.namespace_id]
            there = [p for p in prefix_rows.list_all(tx, prefix.name) if p.namespace_id == namespace.id]
            old = there[0] if there else None
            prefixes.append((prefix, _action(tx, archive, prefix, old, replaces), old))
    new_bytes: dict[ChunkKey, int] = {}
    for prefix, action, _ in prefixes:
        if action != "kept":
            rows_of = archive.rows_of(prefix)
            namespace = namespaces[prefix.namespace_id]
            new_bytes |= session.plan_shards(namespace, rows_of.token_ids, rows_of, only_add=True)
    return _Todo(namespaces, prefixes, new_bytes)


def _action(
    tx: sa.Connection, archive: _Archive, prefix: PrefixRecord, old: PrefixRecord | None, replaces: bool
) -> str:
    """Return what becomes of a prefix whose name `old` has; see `ArchivedPrefix`."""
    if old is None:
        return "new"
    if (old.n_tokens, old.source_digest) == (prefix.n_tokens, prefix.source_digest):
        keys = prefix_rows.chain_keys(tx, [] if old.chunk_key is None else [old.chunk_key])
        chain = sorted(chunk_rows.find(tx, list(keys)).values(), key=lambda record: record.start)
        stored_ids = b"".join(record.token_ids for record in chain)
        if not chain or stored_ids.startswith(archive.rows_of(prefix).token_ids):
            return "there"  # or it was, and was evicted
    return "replaces" if replaces else "kept"


def _make_room(session: BankSession, archive: _Archive, todo: _Todo, *, dry_run: bool) -> int:
    """Evict what the new shards need the room of, and return how many chunks. Raises `StorageError`."""
    needed = sum(map(disk_bytes, todo.new_bytes.values()))
    try:
        free = shutil.disk_usage(session.root).free
    except OSError as exc:
        raise StorageError(f"{session.root} can't be looked into: {exc.strerror or exc}") from exc
    if needed > free:
        raise StorageError(f"the archive needs {needed} bytes on disk, and {free} are free")
    max_bytes = session.options.max_bytes
    if max_bytes is None or not needed:
        return 0
    room = eviction.plan_room(session.index, session.shards, max_bytes, needed, archive.records.keys())
    if room is None:
        raise StorageError(
            f"the archive needs {needed} bytes, which do not fit into the budget of {max_bytes} bytes beside what is "
            "pinned or in use: raise max_bytes"
        )
    return len(room.chunks) if dry_run else len(eviction.execute(session.index, session.shards, room).chunks)


def _carry_out(session: BankSession, archive: _Archive, todo: _Todo) -> tuple[list[ArchivedPrefix], int, int]:
    """Store and name one prefix after another; returns what became of each, and the new chunks and bytes."""
    done = []
    n_new_chunks = n_written_bytes = 0
    for prefix, action, old in todo.prefixes:
        if action == "kept":
            done.append(_archived(archive.manifest, prefix, action))
            continue
        namespace = session.namespace(todo.namespaces[prefix.namespace_id])
        source = archive.rows_of(prefix)
        stored = session.store(namespace, source.token_ids, source, only_add=True)
        n_new_chunks += stored.n_new_chunks
        n_written_bytes += stored.n_written_bytes
        refused = stored.refused
        if stored.n_tokens < prefix.n_tokens:
            refused = refused or "others changed the bank meanwhile: import it again"
        elif action != "there" or (old is not None and old.chunk_key is None):
            record = replace(prefix, namespace_id=namespace.id, chunk_key=stored.last_key)
            with session.naming() as tx:
                there = [p for p in prefix_rows.list_all(tx, prefix.name) if p.namespace_id == namespace.id]
                if there == ([] if old is None else [old]):
                    prefix_rows.name(tx, record)
                else:
                    refused = "its name was given to another prefix meanwhile"
        done.append(_archived(archive.manifest, prefix, action, refused))
    return done, n_new_chunks, n_written_bytes
