"""Hold the writing of shard files to its order, modes and completeness."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixbank import files, shards, storing
from prefixbank.bank import PrefixBank
from prefixbank.chunking import FileDigest
from prefixbank.errors import StorageError
from prefixbank.files import disk_bytes, make_private_folder
from prefixbank.index import chunk_rows
from prefixbank.shards import ShardStore, ShardWriter
from prefixbank.values import ChunkKey
from tests.fakekv import FakeModel

KEY = ChunkKey(bytes(range(16)))
TOKENS = list(range(10))


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    for name in ("shards", "tmp", "quarantine"):
        make_private_folder(tmp_path / name)
    return ShardStore(tmp_path, durability="full", verify="once")


def files_in(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if not path.is_dir()]


def write(writer: ShardWriter, content: bytes = b"rows") -> shards.WrittenShard:
    return writer.write(KEY, b"header--", [np.frombuffer(content, np.uint8)])


def test_a_shard_lies_in_a_folder_of_its_key_under_a_name_of_its_writer(store: ShardStore) -> None:
    with store.writer() as writer:
        first, second = write(writer), write(writer)
        assert files_in(store.root) == sorted(f"tmp/{w.file_name}" for w in (first, second))
        writer.publish()
        for written in (first, second):
            writer.keep(written.file_name)
    assert first.file_name != second.file_name
    for written in (first, second):
        assert written.file_name.startswith(KEY.hex())
        assert written.file_name.endswith(".safetensors")
    assert files_in(store.root) == sorted(f"shards/00/{w.file_name}" for w in (first, second))


def test_what_is_written_is_described(store: ShardStore) -> None:
    with store.writer() as writer:
        written = write(writer)
        writer.publish()
        content = store.path_of(written.file_name).read_bytes()
    assert content == b"header--rows"
    assert (written.data_offset, written.n_bytes, written.disk_bytes) == (8, 12, 4096)
    assert written.digest == FileDigest(content).digest()


def test_what_is_not_kept_is_deleted(store: ShardStore) -> None:
    with store.writer() as writer:
        kept, dropped = write(writer), write(writer)
        writer.publish()
        write(writer)
        writer.keep(kept.file_name)
    assert files_in(store.root) == [f"shards/00/{kept.file_name}"]
    with pytest.raises(ZeroDivisionError), store.writer() as writer:
        write(writer)
        writer.publish()
        write(writer)
        raise ZeroDivisionError
    assert files_in(store.root) == [f"shards/00/{kept.file_name}"]
    assert dropped.file_name != kept.file_name


def test_a_source_that_fails_leaves_no_file(store: ShardStore) -> None:
    def rows() -> Iterator[Any]:
        yield np.zeros(8, np.uint8)
        raise RuntimeError("no memory left")

    with pytest.raises(RuntimeError, match="no memory"), store.writer() as writer:
        writer.write(KEY, b"header--", rows())
    assert files_in(store.root) == []


@pytest.mark.parametrize("mask", [0, 0o022, 0o777])
def test_files_and_folders_are_private_whatever_the_umask(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    tmp_path.chmod(0o755)
    umask(mask)
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as bank:
        FakeModel(bank).store(TOKENS)
        umask(0o022)
        found = {path: stat.S_IMODE(path.stat().st_mode) for path in [bank.root, *bank.root.rglob("*")]}
    assert len(found) > 10
    assert {path.name: oct(mode) for path, mode in found.items() if path.is_dir() and mode != 0o700} == {}
    assert {path.name: oct(mode) for path, mode in found.items() if path.is_file() and mode != 0o600} == {}


def test_the_indexs_journal_is_private(tmp_path: Path, umask: Callable[[int], int]) -> None:
    umask(0)
    with PrefixBank.open(tmp_path / "bank") as bank, bank._session.index.writing() as tx:
        chunk_rows.next_tick(tx)
        tx.exec_driver_sql("PRAGMA cache_spill = 1")
        journals = [path for path in bank.root.iterdir() if path.name.startswith("index.sqlite3-")]
        assert journals
        assert [stat.S_IMODE(path.stat().st_mode) for path in journals] == [0o600] * len(journals)


def test_a_root_that_others_could_look_into_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    PrefixBank.open(tmp_path).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record, in order: files and folders that are synced, renames, rows, and deleted files."""
    recorded: list[str] = []
    path_of: dict[int, Path] = {}
    real_open, real_rename, real_unlink, real_add = os.open, os.rename, os.unlink, chunk_rows.add

    def open_(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        descriptor = real_open(path, flags, mode, **rest)
        path_of[descriptor] = Path(path)
        return descriptor

    def kind(path: Path) -> str:
        if path.suffix == ".safetensors":
            return "file"
        return "shards" if path.name == "shards" else "folder"

    def rename(source: Any, target: Any, **rest: Any) -> None:
        real_rename(source, target, **rest)
        recorded.append("rename")

    def unlink(path: Any, **rest: Any) -> None:
        real_unlink(path, **rest)
        if str(path).endswith(".safetensors"):
            recorded.append("unlink")

    def add(*given: Any) -> bool:
        recorded.append("row")
        return real_add(*given)

    for module in (files, shards):
        monkeypatch.setattr(module, "sync", lambda descriptor: recorded.append(f"sync {kind(path_of[descriptor])}"))
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(chunk_rows, "add", add)
    return recorded


def test_files_are_synced_before_renames_before_folders_before_rows(model: FakeModel, calls: list[str]) -> None:
    model.store(TOKENS)
    renamed = calls.index("rename")
    assert calls[:renamed] == ["sync file"] * 3
    assert calls[renamed : renamed + 3] == ["rename"] * 3
    row = calls.index("row")
    synced = calls[renamed + 3 : row]
    assert synced.count("sync folder") == len({record.file_name[:2] for record in model.bank.chunks()})  # type: ignore[index]
    assert synced.count("sync shards") == 1  # new folders are entries of `shards`
    assert calls[row:] == ["row"] * 3


def test_a_superseded_tail_is_deleted_after_its_row(model: FakeModel, calls: list[str]) -> None:
    model.store(TOKENS)
    calls.clear()
    committed: list[int] = []
    real_group = storing._store_group
    with pytest.MonkeyPatch.context() as patch:
        real_unlink = ShardStore.unlink

        def unlink(self: ShardStore, path: Path) -> bool:
            with model.session.index.reading() as tx:  # only after the commit can others see that the row is gone
                committed.append(sum(1 for row in chunk_rows.list_all(tx) if row.file_name == path.name))
            return real_unlink(self, path)

        patch.setattr(ShardStore, "unlink", unlink)
        model.store([*TOKENS, 10])
    assert real_group is storing._store_group
    assert committed == [0]
    assert calls[-1] == "unlink"
    assert calls.index("row") < calls.index("unlink")


def test_fast_durability_syncs_nothing(tmp_path: Path, calls: list[str]) -> None:
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4, durability="fast") as bank:
        calls.clear()
        FakeModel(bank).store(TOKENS)
        assert calls == ["rename"] * 3 + ["row"] * 3
        assert bank.check(read_data=True).ok


def test_syncing_reaches_the_disk_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    synced: list[str] = []
    monkeypatch.setattr(files.os, "fsync", lambda _descriptor: synced.append("fsync"))
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _descriptor, command: synced.append(f"fcntl {command}"))
    monkeypatch.setattr(files.sys, "platform", "linux")
    files.sync(0)
    monkeypatch.setattr(files.sys, "platform", "darwin")
    files.sync(0)

    def refuse(*_: object) -> None:
        raise OSError(45, "Operation not supported")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    files.sync(0)
    assert synced == ["fsync", "fcntl 51", "fsync"]


@pytest.mark.parametrize("most", [1, 7, 64])
def test_short_writes_are_gone_on_with(model: FakeModel, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    sizes = cycle(range(1, most + 1))

    def writev(descriptor: int, buffers: list[memoryview]) -> int:
        return os.write(descriptor, b"".join(buffers[:3])[: next(sizes)])

    monkeypatch.setattr(shards.os, "writev", writev)
    model.store(TOKENS)
    assert model.resolve(TOKENS).n_tokens == 10


def test_a_write_that_fails_is_not_tried_again(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    n_syncs = 0

    def fail(_descriptor: int) -> None:
        nonlocal n_syncs
        n_syncs += 1
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "sync", fail)
        with pytest.raises(StorageError, match="Input/output error"):
            model.store(TOKENS)
    assert n_syncs == 1
    assert files_in(model.bank.root / "shards") == files_in(model.bank.root / "tmp") == []
    assert model.bank.chunks() == []


def test_a_rename_that_fails_half_way_leaves_nothing(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real_rename, renames = os.rename, iter([True, True, False])

    def rename(source: Any, target: Any) -> None:
        if not next(renames):
            raise OSError(28, "No space left on device")
        real_rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(StorageError, match="No space left"):
            model.store(TOKENS)
    assert files_in(model.bank.root / "shards") == files_in(model.bank.root / "tmp") == []
    assert model.bank.chunks() == []


def test_deleting_a_file_that_is_gone_is_no_error(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.root / "shards" / "gone"
    assert not store.unlink(path)
    path.touch()
    assert store.unlink(path)
    path.mkdir()
    with pytest.raises(StorageError, match="can't be deleted"):
        store.unlink(path)


def test_files_are_listed_with_their_place_and_size(store: ShardStore) -> None:
    (store.root / "shards" / "ab").mkdir()
    (store.root / "shards" / "ab" / "one").write_bytes(b"123")
    (store.root / "shards" / "two").symlink_to(store.root)
    found = {file.path: file.n_bytes for file in store.iter_files("shards")}
    assert found.keys() == {"shards/ab/one", "shards/two"}
    assert found["shards/ab/one"] == 3
    assert list(store.iter_files("nowhere")) == []


@pytest.mark.parametrize(("n_bytes", "on_disk"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_the_budget_counts_whole_blocks(n_bytes: int, on_disk: int) -> None:
    assert disk_bytes(n_bytes) == on_disk


def test_a_repeat_writes_nothing(model: FakeModel, unchanged: Callable[[Path], Any]) -> None:
    model.store(TOKENS)
    model.session.flush()
    with unchanged(model.bank.root):
        for shorter in range(1, 11):
            stored = model.store(TOKENS[:shorter])
            assert (stored.n_tokens, stored.n_new_chunks, stored.n_written_bytes) == (shorter, 0, 0)
