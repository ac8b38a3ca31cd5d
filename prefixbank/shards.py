"""Own the shard files: their names, their atomic writing and their verified reading; must not know rows or MLX.

A shard is written under `tmp/`, synced, renamed to `shards/ab/<chunk key>-<random>.safetensors`, and its folder synced,
before its row is committed. The random part makes every file name its writer's own: a shard is never overwritten, and
whoever deletes one (after its row) can't hit a newer file of the same chunk.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prefixbank.chunking import FileDigest
from prefixbank.config import Durability, Verify
from prefixbank.errors import ShardCorruptError, ShardMissingError, StorageError
from prefixbank.runs import Buffer, blocks, read_runs, write_runs
from prefixbank.values import ChunkKey, ChunkRecord

__all__ = ["FileOnDisk", "ShardStore", "ShardWriter", "WrittenShard", "make_private_folder"]

BLOCK_BYTES = 4096
"""What files are rounded up to when the budget is counted, as file systems do."""

SUFFIX = ".safetensors"
_READ_STEP = 8 << 20
_DIGEST_BYTES = 512 << 10
"""How much is read before its digest is taken: it should still be in the processor's second-level cache."""

_Identity = tuple[bytes, int, int, int, int]
"""What a proven file must still be: digest, device, inode, length and time of its last change in nanoseconds."""


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


@dataclass(frozen=True, slots=True)
class FileOnDisk:
    """Describe a file found in the bank: path relative to the bank root, length, age of its last change."""

    path: str
    n_bytes: int
    mtime_s: float


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
        and `StorageError` where the system refuses (too many files, no permission): then the shard may be whole.
        """
        if record.file_name is None:
            raise ShardMissingError(f"the shard of chunk {record.key.hex()} was lost earlier")
        path = self.path_of(record.file_name)
        try:
            # A FIFO put in the shard's place must not block, a link must not lead elsewhere.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise ShardMissingError(f"{path} is gone") from exc
        except OSError as exc:
            if path.is_symlink():
                raise ShardCorruptError(f"{path} is a link") from exc
            raise StorageError(f"{path} can't be read: {exc.strerror or exc}") from exc
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size != record.n_bytes:
                raise ShardCorruptError(f"{path} is not the file of {record.n_bytes} bytes that was stored")
            yield descriptor
        finally:
            os.close(descriptor)

    def read_into(self, record: ChunkRecord, runs: Sequence[Buffer]) -> None:
        """Read a shard's tensors into `runs`, in file order, and prove the whole file by its digest.

        The runs' bytes must sum up to those of the tensors. On an error they hold garbage. Raises as `open_shard`
        does, and `ShardCorruptError` for another digest.
        """
        with self.open_shard(record) as descriptor:
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
        target = self.root / "quarantine" / file_name
        try:
            make_private_folder(target.parent)
            self.path_of(file_name).rename(target)
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

    def iter_files(self, folder: str) -> Iterator[FileOnDisk]:
        """Yield what lies in `shards`, `tmp` or `quarantine`, folders aside; what vanishes meanwhile is left out."""
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
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield FileOnDisk(path, status.st_size, status.st_mtime)


class ShardWriter:
    """Write shards as a group: `write` each, `publish` all, then `keep` those whose rows are committed."""

    def __init__(self, store: ShardStore, *, sync: bool) -> None:
        self._store = store
        self._sync = sync
        self._temporary: list[tuple[Path, WrittenShard]] = []
        self._published: dict[str, Path] = {}

    def write(self, key: ChunkKey, header: bytes, runs: Iterable[Buffer]) -> WrittenShard:
        """Write one shard to a temporary file and sync it. Raises `StorageError`."""
        file_name = f"{key.hex()}-{secrets.token_hex(4)}{SUFFIX}"
        temporary = self._store.root / "tmp" / file_name
        digest = FileDigest(header)
        n_bytes = len(header)
        try:
            make_private_folder(temporary.parent)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
                pending: list[Buffer] = [memoryview(header)]
                for run in runs:
                    digest.update(run)  # type: ignore[arg-type]  # any contiguous buffer
                    n_bytes += run.nbytes
                    pending.append(run)
                write_runs(descriptor, pending)
                if self._sync:
                    sync(descriptor)
            except BaseException:
                # After a failed write or sync the file's state is unknown: never try it again.
                with suppress(OSError):
                    temporary.unlink()
                raise
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise StorageError(f"{temporary} can't be written: {exc.strerror or exc}") from exc
        written = WrittenShard(file_name, len(header), n_bytes, digest.digest())
        self._temporary.append((temporary, written))
        return written

    def publish(self) -> None:
        """Rename the written files to their places and sync the folders. Raises `StorageError`."""
        folders: dict[Path, None] = {}
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

    def keep(self, file_name: str) -> None:
        """Leave a published shard in its place when the group ends: its row is committed."""
        self._published.pop(file_name)

    def discard(self) -> None:
        """Delete all that was written and not kept."""
        for path in [*(path for path, _ in self._temporary), *self._published.values()]:
            with suppress(OSError):
                path.unlink()
        self._temporary.clear()
        self._published.clear()


def _identity(record: ChunkRecord, status: os.stat_result) -> _Identity:
    return record.digest, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
