"""Hold the verified reading of shard files to it: right bytes or an error, whatever lies in the file's place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from prefixbank import shards
from prefixbank.bank import PrefixBank
from prefixbank.errors import ShardCorruptError, ShardError, ShardMissingError, StorageError
from prefixbank.layout import CacheLayout, LayerLayout, RowArray
from prefixbank.values import ChunkRecord
from tests.fakekv import FakeModel, empty_runs

TOKENS = [3, 1, 4, 1]


@pytest.fixture
def record(model: FakeModel, bank: PrefixBank) -> Any:
    """Give the record of one stored chunk; what the test put in its shard's place is taken away afterwards."""
    model.store(TOKENS)
    (stored,) = bank.chunks()
    path = model.path_of(stored)
    content = path.read_bytes()
    yield stored
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)


def expected(model: FakeModel) -> bytes:
    return model.source(TOKENS).joined(0, 4)


def test_rows_come_back_bit_for_bit(model: FakeModel, record: ChunkRecord) -> None:
    assert model.read(record) == expected(model)


def test_more_runs_than_one_call_takes_are_written_and_read(bank: PrefixBank) -> None:
    many = CacheLayout((LayerLayout("kv", (), (RowArray("keys", "U8", 2500, 1), RowArray("values", "F16", 700, 3))),))
    model = FakeModel(bank, "many heads", layout=many)
    model.store(range(6))
    assert model.resolve(range(6)).n_tokens == 6


@pytest.mark.parametrize("most", [1, 9, 100])
def test_short_reads_are_gone_on_with(
    model: FakeModel, record: ChunkRecord, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Whatever call reads them: the head of the file, too."""
    sizes = cycle(range(1, most + 1))
    real_pread = os.pread

    def preadv(descriptor: int, buffers: list[Any], offset: int) -> int:
        block = real_pread(descriptor, min(next(sizes), memoryview(buffers[0]).nbytes), offset)
        memoryview(buffers[0]).cast("B")[: len(block)] = block
        return len(block)

    monkeypatch.setattr(shards.os, "preadv", preadv)
    monkeypatch.setattr(shards.os, "pread", lambda d, n, offset: real_pread(d, min(n, next(sizes)), offset))
    assert model.read(record) == expected(model)


def test_a_system_without_preadv_reads_the_same(
    model: FakeModel, record: ChunkRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(shards.os, "preadv", raising=False)
    assert model.read(record) == expected(model)


@pytest.mark.parametrize("call", ["preadv", "pread"])
def test_an_input_output_error_is_no_damage(
    model: FakeModel, record: ChunkRecord, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The shard may be whole: it is a miss, and stays where it is."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        if call == "pread":
            patch.delattr(shards.os, "preadv", raising=False)
        patch.setattr(shards.os, call, fail)
        with pytest.raises(StorageError, match="Input/output error"):
            model.read(record)
        assert model.resolve(TOKENS).n_tokens == 0
    assert model.resolve(TOKENS).n_tokens == 4


def test_an_input_output_error_in_a_check_is_an_error_of_ours(
    model: FakeModel, record: ChunkRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "read", fail)
        with pytest.raises(StorageError, match="Input/output error"):
            model.session.shards.verify(record)
        assert [finding.kind for finding in model.bank.check(read_data=True).findings] == ["unreadable"]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_a_shard_that_the_system_does_not_open_is_no_damage(
    model: FakeModel, record: ChunkRecord, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "open", fail)
        with pytest.raises(StorageError, match=os.strerror(code)):
            model.read(record)
        assert model.resolve(TOKENS).n_tokens == 0
    assert model.resolve(TOKENS).n_tokens == 4


def flip(offset: int) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return do


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        path.rename(path.with_name("aside"))
        make(path)

    return do


def link_to_a_copy(path: Path) -> None:
    """The link leads to the right bytes; it is refused all the same."""
    path.symlink_to(path.with_name("aside"))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "first byte": flip(0),
    "header": flip(20),
    "last byte": flip(-1),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "appended": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "fifo": replace_by(os.mkfifo),
    "link": replace_by(link_to_a_copy),
    "dangling link": replace_by(lambda path: path.symlink_to("nowhere")),
    "folder": replace_by(Path.mkdir),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused(model: FakeModel, record: ChunkRecord, damage: str) -> None:
    DAMAGES[damage](model.path_of(record))
    with pytest.raises(ShardCorruptError):
        model.read(record)
    with pytest.raises(ShardCorruptError):
        model.session.shards.verify(record)
    model.path_of(record).with_name("aside").unlink(missing_ok=True)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_a_miss_and_set_aside(model: FakeModel, record: ChunkRecord, damage: str) -> None:
    DAMAGES[damage](model.path_of(record))
    assert model.resolve(TOKENS).n_tokens == 0
    assert model.bank.chunks() == []
    assert [path.name for path in (model.bank.root / "quarantine").iterdir()] == [record.file_name]
    assert not os.path.lexists(model.path_of(record))
    model.path_of(record).with_name("aside").unlink(missing_ok=True)
    assert model.store(TOKENS).n_new_chunks == 1
    assert model.resolve(TOKENS).n_tokens == 4


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_a_shard_that_is_gone_is_a_miss_that_heals(model: FakeModel, record: ChunkRecord, gone: str) -> None:
    model.path_of(record).unlink()
    if gone == "folder":
        model.path_of(record).parent.rmdir()
    with pytest.raises(ShardMissingError):
        model.read(record)
    assert model.resolve(TOKENS).n_tokens == 0
    assert model.bank.chunks() == []
    assert model.store(TOKENS).n_new_chunks == 1
    assert model.resolve(TOKENS).n_tokens == 4


def test_a_hole_has_no_shard(model: FakeModel, record: ChunkRecord) -> None:
    hole = ChunkRecord(record.key, None, 1, 0, 4, record.token_ids, None, 0, 0, 0, b"")
    with pytest.raises(ShardMissingError, match="lost earlier"):
        model.read(hole)


def test_a_shard_that_is_deleted_while_it_is_read_stays_readable(model: FakeModel, record: ChunkRecord) -> None:
    with model.session.shards.open_shard(record) as descriptor:
        model.path_of(record).unlink()
        assert os.pread(descriptor, record.n_bytes, record.data_offset) == expected(model)


def test_reading_leaves_no_descriptor_open(model: FakeModel, record: ChunkRecord) -> None:
    def open_descriptors() -> int:
        probe = os.dup(0)
        os.close(probe)
        return probe  # the lowest that is free

    before = open_descriptors()
    model.read(record)
    flip(-1)(model.path_of(record))
    with pytest.raises(ShardError):
        model.read(record)
    assert open_descriptors() == before


def damage_unseen(path: Path) -> None:
    """Flip a byte and put the times back: what stat says is the same."""
    status = path.stat()
    flip(-1)(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("verify", "first_read", "second_read"),
    [("once", False, True), ("always", False, False), ("never", True, True)],
)
def test_verify_says_when_a_digest_is_proven(tmp_path: Path, verify: Any, first_read: bool, second_read: bool) -> None:
    """Whether a flipped byte passes: at the first read of a process, and after a read that was proven."""

    def passes(model: FakeModel, record: ChunkRecord) -> bool:
        try:
            return model.read(record) != expected(model)
        except ShardCorruptError:
            return False

    for number, proven_before in enumerate((False, True)):
        with PrefixBank.open(tmp_path / str(number), chunk_tokens=4, verify=verify) as bank:
            model = FakeModel(bank)
            model.store(TOKENS)
            (record,) = bank.chunks()
            if proven_before:
                model.read(record)
            damage_unseen(model.path_of(record))
            assert passes(model, record) == (second_read if proven_before else first_read)


def test_once_proves_a_changed_file_again(model: FakeModel, record: ChunkRecord) -> None:
    model.read(record)
    path = model.path_of(record)
    later = path.stat().st_mtime_ns + 10**9
    flip(-1)(path)
    os.utime(path, ns=(later, later))
    with pytest.raises(ShardCorruptError, match="other bytes"):
        model.read(record)


def test_a_failed_proof_is_not_remembered_as_proven(model: FakeModel, record: ChunkRecord) -> None:
    damage_unseen(model.path_of(record))
    for _ in range(2):
        with pytest.raises(ShardCorruptError):
            model.read(record)


def test_runs_of_another_length_than_the_tensors_are_refused(model: FakeModel, record: ChunkRecord) -> None:
    for n_tokens in (3, 5):
        with pytest.raises(ShardCorruptError):
            model.session.shards.read_into(record, empty_runs(model.layout, n_tokens))
