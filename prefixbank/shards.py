"""Own the shard files: their names, their atomic writing and their verified reading; must not know rows or MLX.

A shard is written under `tmp/`, synced, renamed to `shards/ab/<chunk key>-<random>.safetensors`, and its folder synced,
before its row is committed. The random part makes every file name its writer's own: a shard is never overwritten, and
whoever deletes one (after its row) can't hit a newer file of the same chunk.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prefixbank.chunking import FileDigest
from prefixbank.config import Durability, Verify
from prefixbank.errors import IndexCorruptError, ShardCorruptError, ShardMissingError, StorageError
from prefixbank.files import FileOnDisk, disk_bytes, make_private_folder, open_regular, sync, sync_folder
from prefixbank.runs import Buffer, blocks, read_runs, write_runs
from prefixbank.sealing import seal
from prefixbank.values import ChunkKey, ChunkRecord

__all__ = ["FILE_NAME", "ShardStore", "ShardWriter", "WrittenShard"]

SUFFIX = ".safetensors"
FILE_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.safetensors")
NOTE_SUFFIX = ".note"
_READ_STEP = 8 << 20
_DIGEST_BYTES = 512 << 10
"""How much is read before its digest is taken: it should still be in the processor's second-level cache."""

_Identity = tuple[bytes, int, int, int, int, int]
"""What a proven file must still be: digest, where its tensors begin, device, inode, length and time of its last change
in nanoseconds."""


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """Describe a published shard file that no row names yet."""

    file_name: str
    data_offset: int
    n_bytes: int
    digest: bytes

    @property
    def disk_bytes(self) -> int:
        """Return what the file takes on disk."""
        return disk_bytes(self.n_bytes)


class ShardStore:
    """Write, read, set aside and delete the shard files of one bank."""

    def __init__(self, root: Path, *, durability: Durability, verify: Verify) -> None:
        self.root = root
        self._sync = durability == "full"
        self._verify = verify
        self._verified: set[_Identity] = set()

    def path_of(self, file_name: str) -> Path:
        """Return where the shard of that name lies."""
        return self.root / "shards" / file_name[:2] / file_name

    def is_in_place(self, file: FileOnDisk) -> bool:
        """Tell whether a file lies where a shard of its name does."""
        return str(self.path_of(file.name)) == f"{self.root}/{file.path}"

    @contextmanager
    def writer(self) -> Iterator[ShardWriter]:
        """Write shards as a group; those that were not kept when the block ends are deleted again."""
        writer = ShardWriter(self, sync=self._sync)
        try:
            yield writer
        finally:
            writer.discard()

    @contextmanager
    def open_shard(self, record: ChunkRecord) -> Iterator[int]:
        """Open a chunk's shard for reading: a file descriptor, closed when the block ends.

        Readers take no lock: a file that is deleted meanwhile stays readable through the descriptor. Raises
        `ShardMissingError` only for a file that is not there, `ShardCorruptError` for one of another length or type,
        `StorageError` where the system refuses (too many files, no permission) and `IndexCorruptError` where the row is
        damaged: then the shard may be whole.
        """
        if record.file_name is None:
            raise ShardMissingError(f"the shard of chunk {record.key.hex()} was lost earlier")
        _require_sound(record, record.file_name)
        path = self.path_of(record.file_name)
        with open_regular(path) as descriptor:
            if os.fstat(descriptor).st_size != record.n_bytes:
                raise ShardCorruptError(f"{path} is not the file of {record.n_bytes} bytes that was stored")
            yield descriptor

    def read_into(self, record: ChunkRecord, runs: Sequence[Buffer]) -> None:
        """Read a shard's tensors into `runs`, in file order, and prove the whole file by its digest.

        The runs' bytes must sum up to those of the tensors. On an error they hold garbage. Raises as `open_shard`
        does, and `ShardCorruptError` for another digest.
        """
        with self.open_shard(record) as descriptor:
            if record.data_offset + sum(run.nbytes for run in runs) != record.n_bytes:
                raise ShardCorruptError(f"shard {record.file_name} does not hold the tensors that its row says")
            if self._needs_no_digest(record, identity := _identity(record, os.fstat(descriptor))):
                self._read_whole(record, descriptor, record.data_offset, runs)
                return
            header = memoryview(bytearray(record.data_offset))
            digest = FileDigest()
            self._read_whole(record, descriptor, 0, [header, *runs], digest)
            if digest.digest() != record.digest:
                raise ShardCorruptError(f"shard {record.file_name} has other bytes than were stored")
            self._verified.add(identity)

    def is_proven(self, record: ChunkRecord) -> bool:
        """Tell whether a chunk's shard is there and may be read without taking its digest (again)."""
        if record.file_name is None:
            return False
        try:
            status = self.path_of(record.file_name).lstat()
        except OSError:
            return False
        return self._needs_no_digest(record, _identity(record, status))

    def read_part(self, record: ChunkRecord, offset: int, runs: Sequence[Buffer]) -> None:
        """Read a part of a proven shard's tensors, `offset` bytes behind their beginning, into `runs`.

        Raises as `open_shard` does, and `ShardCorruptError` where the file is not the proven one any more.
        """
        with self.open_shard(record) as descriptor:
            if not self._needs_no_digest(record, _identity(record, os.fstat(descriptor))):
                raise ShardCorruptError(f"shard {record.file_name} changed while it was read")
            self._read_whole(record, descriptor, record.data_offset + offset, runs)

    def _needs_no_digest(self, record: ChunkRecord, identity: _Identity) -> bool:
        return self._verify == "never" or (self._verify == "once" and identity in self._verified)

    def _read_whole(
        self,
        record: ChunkRecord,
        descriptor: int,
        offset: int,
        runs: Sequence[Buffer],
        digest: FileDigest | None = None,
    ) -> None:
        """Fill the runs from `offset` on; the digest takes each block while it is in the processor's cache."""
        for block in blocks(runs, _DIGEST_BYTES if digest is not None else None):
            wanted = sum(view.nbytes for view in block)
            n_bytes = read_runs(descriptor, block, offset)
            offset += n_bytes
            if n_bytes != wanted:
                raise ShardCorruptError(f"shard {record.file_name} ended after {offset} bytes")
            if digest is not None:
                for view in block:
                    digest.update(view)
        if digest is not None and offset != record.n_bytes:
            raise ShardCorruptError(f"shard {record.file_name} has {record.n_bytes} bytes, of which {offset} were read")

    def verify(self, record: ChunkRecord) -> None:
        """Prove a whole shard file by its digest, without keeping it in memory. Raises as `read_into` does."""
        with self.open_shard(record) as descriptor:
            digest = FileDigest()
            try:
                while block := os.read(descriptor, _READ_STEP):
                    digest.update(block)
            except OSError as exc:
                raise StorageError(f"shard {record.file_name} can't be read: {exc.strerror or exc}") from exc
            if digest.digest() != record.digest:
                raise ShardCorruptError(f"shard {record.file_name} has other bytes than were stored")

    def quarantine(self, file_name: str) -> Path | None:
        """Move a shard aside, after its row was healed; returns where to, or None where it is gone already."""
        return self.quarantine_path(self.path_of(file_name))

    def quarantine_path(self, path: Path) -> Path | None:
        """Move any file aside; returns where to, or None where it is gone already or can't be moved."""
        target = self.root / "quarantine" / path.name
        try:
            make_private_folder(target.parent)
            if os.path.lexists(target):  # what was set aside before stays
                target = target.with_name(f"{path.name}-{secrets.token_hex(4)}")
            path.rename(target)
        except (OSError, StorageError):
            return None
        return target

    def unlink(self, path: Path) -> bool:
        """Delete a file, after its row; returns False where it is gone already. Raises `StorageError`."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise StorageError(f"{path} can't be deleted: {exc.strerror or exc}") from exc
        return True

    def write_note(self, file_names: Iterable[str]) -> Path | None:
        """Note in `tmp` that these files of `shards` may be there without a row; returns the note.

        Whoever publishes or deletes shards leaves the note there if it is killed: so that what it left counts at once,
        and nobody need look through all folders for it. No note is no error: it is all the same to the shards.
        """
        names = "\n".join(file_names)
        if not names:
            return None
        note = self.root / "tmp" / f"{secrets.token_hex(8)}{NOTE_SUFFIX}"
        try:
            descriptor = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, names.encode())
            finally:
                os.close(descriptor)
        except OSError:
            with suppress(OSError):
                note.unlink()
            return None
        return note

    def iter_noted(self) -> Iterator[FileOnDisk]:
        """Yield what lies in `tmp`, and what the notes there name: files that may have no row."""
        seen = set()
        for file in self.iter_files("tmp"):
            yield file
            if not file.path.endswith(NOTE_SUFFIX):
                continue
            try:
                names = (self.root / file.path).read_text("ascii", "replace").split("\n")
            except OSError:  # it has done its work
                continue
            for name in names:
                if not FILE_NAME.fullmatch(name) or name in seen:
                    continue
                seen.add(name)
                try:
                    status = self.path_of(name).lstat()
                except OSError:
                    continue
                yield FileOnDisk(f"shards/{name[:2]}/{name}", status.st_size, status.st_mtime)

    def iter_files(self, folder: str, *, folders_as_shards: bool = False) -> Iterator[FileOnDisk]:
        """Yield what lies in `shards`, `tmp` or `quarantine`, folders aside; what vanishes meanwhile is left out.

        With `folders_as_shards` folders that have the name of a shard are among them.
        """
        pending = [folder]
        while pending:
            parent = pending.pop()
            try:
                entries = list(os.scandir(self.root / parent))
            except FileNotFoundError:
                continue
            except OSError as exc:
                raise StorageError(f"{self.root / parent} can't be listed: {exc.strerror}") from exc
            for entry in entries:
                path = f"{parent}/{entry.name}"  # pathlib would take most of the time where there are a million
                is_shard = folders_as_shards and FILE_NAME.fullmatch(entry.name)
                if entry.is_dir(follow_symlinks=False) and not is_shard:
                    pending.append(path)
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError as exc:
                    raise StorageError(f"{self.root / path} can't be looked at: {exc.strerror}") from exc
                yield FileOnDisk(path, status.st_size, status.st_mtime)


class ShardWriter:
    """Write shards as a group: `write` each, `publish` all, then `keep` those whose rows are committed."""

    def __init__(self, store: ShardStore, *, sync: bool) -> None:
        self._store = store
        self._sync = sync
        self._temporary: list[tuple[Path, WrittenShard]] = []
        self._published: dict[str, Path] = {}
        self._notes: list[Path] = []

    def write(self, key: ChunkKey, header: bytes, runs: Iterable[Buffer]) -> WrittenShard:
        """Write one shard to a temporary file, with its seal in the header, and sync it. Raises `StorageError`."""
        file_name = f"{key.hex()}-{secrets.token_hex(4)}{SUFFIX}"
        temporary = self._store.root / "tmp" / file_name
        try:
            make_private_folder(temporary.parent)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                try:
                    os.fchmod(descriptor, 0o600)
                    pending = list(runs)
                    header = seal(header, pending)
                    digest = FileDigest(header)
                    for run in pending:
                        digest.update(run)  # type: ignore[arg-type]  # any contiguous buffer
                    n_bytes = len(header) + sum(run.nbytes for run in pending)
                    write_runs(descriptor, [memoryview(header), *pending])
                    if self._sync:
                        sync(descriptor)
                finally:
                    os.close(descriptor)  # which may be what says that a quota is used up
            except BaseException:
                # After a failed write or sync the file's state is unknown: never try it again.
                with suppress(OSError):
                    temporary.unlink()
                raise
        except OSError as exc:
            raise StorageError(f"{temporary} can't be written: {exc.strerror or exc}") from exc
        written = WrittenShard(file_name, len(header), n_bytes, digest.digest())
        self._temporary.append((temporary, written))
        return written

    def publish(self) -> None:
        """Rename the written files to their places and sync the folders. Raises `StorageError`."""
        folders: dict[Path, None] = {}
        self.note(written.file_name for _, written in self._temporary)
        try:
            for temporary, written in self._temporary:
                target = self._store.path_of(written.file_name)
                if not target.parent.is_dir():
                    make_private_folder(target.parent)
                    folders[target.parent.parent] = None
                temporary.rename(target)
                self._published[written.file_name] = target
                folders[target.parent] = None
            self._temporary.clear()
            if self._sync:
                for folder in folders:
                    sync_folder(folder)
        except OSError as exc:
            raise StorageError(f"shards can't be published: {exc.strerror or exc}") from exc

    def note(self, file_names: Iterable[str]) -> None:
        """Note files that may be in `shards` without a row until the group ends: see `ShardStore.write_note`."""
        note = self._store.write_note(file_names)
        if note is not None:
            self._notes.append(note)

    def require_published(self) -> None:
        """Assert, with the index's write lock held, that all published shards are in their places.

        If this process slept, or the clock was set, they may have been swept as left over; who sweeps holds the lock
        too. Raises `StorageError`.
        """
        for path in self._published.values():
            try:
                path.lstat()
            except OSError as exc:
                raise StorageError(f"{path} went before its row was there: store it again") from exc

    def keep(self, file_name: str) -> None:
        """Leave a published shard in its place when the group ends: its row is committed."""
        self._published.pop(file_name)

    def discard(self) -> None:
        """Delete all that was written and not kept."""
        for path in [*(path for path, _ in self._temporary), *self._published.values(), *self._notes]:
            with suppress(OSError):
                path.unlink()
        self._notes.clear()
        self._temporary.clear()
        self._published.clear()


def _require_sound(record: ChunkRecord, file_name: str) -> None:
    """Raise `IndexCorruptError` for a name or an offset that no shard has: SQLite has no checksums."""
    if not FILE_NAME.fullmatch(file_name) or not 0 <= record.data_offset <= record.n_bytes:
        raise IndexCorruptError(f"the row of chunk {record.key.hex()} is damaged: run `prefixbank repair`")


def _identity(record: ChunkRecord, status: os.stat_result) -> _Identity:
    return (
        record.digest,
        record.data_offset,
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
    )
