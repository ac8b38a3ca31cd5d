"""Hold reading shards in parts, and digests taken in passing, to what whole and careful reads give."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbank import restoring, shards
from prefixbank.bank import PrefixBank
from prefixbank.errors import ShardCorruptError, ShardMissingError
from prefixbank.layout import CacheLayout, LayerLayout, RowArray
from prefixbank.restoring import Readers, _parts
from prefixbank.runs import blocks
from prefixbank.values import ChunkRecord
from tests.fakekv import HYBRID, FakeModel, empty_runs

TOKENS = [3, 1, 4, 1]
N_THREADS = 3


@pytest.fixture
def record(model: FakeModel, bank: PrefixBank) -> Iterator[ChunkRecord]:
    """Give the record of one stored chunk, whose shard is whole again when the test is over."""
    model.store(TOKENS)
    (stored,) = bank.chunks()
    path = model.path_of(stored)
    content = path.read_bytes()
    yield stored
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)


@pytest.fixture
def readers() -> Iterator[Readers]:
    made = Readers(N_THREADS)
    yield made
    made.close()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even the shards of tests be worth several reads."""
    monkeypatch.setattr(restoring, "_MIN_PART_BYTES", 16)


def n_data_bytes(record: ChunkRecord) -> int:
    return record.n_bytes - record.data_offset


def prove(model: FakeModel, record: ChunkRecord) -> None:
    model.read(record)
    assert model.session.shards.is_proven(record)


def read_in_parts(model: FakeModel, record: ChunkRecord, n_bytes: int) -> bytes:
    """Read a shard in parts of about `n_bytes`, the last one first."""
    runs = empty_runs(model.layout, record.n_tokens, with_state=record.has_state)
    views = [memoryview(run).cast("B") for run in runs]
    for offset, part in reversed(list(_parts(views, n_bytes))):
        model.session.shards.read_part(record, offset, part)
    return b"".join(run.tobytes() for run in runs)


def submit(
    model: FakeModel, readers: Readers, record: ChunkRecord, *, n_shards: int = 1, n_bytes: int | None = None
) -> tuple[list[Any], Callable[[], bytes]]:
    """Begin to read a shard as `load` does; returns the parts' futures, and what returns the bytes."""
    runs = empty_runs(model.layout, record.n_tokens, with_state=record.has_state)
    views = [memoryview(run).cast("B") for run in runs]
    futures = readers.submit(
        model.session.shards, record, n_data_bytes(record) if n_bytes is None else n_bytes, views, n_shards=n_shards
    )

    def joined() -> bytes:
        for future in futures:
            future.result()
        return b"".join(run.tobytes() for run in runs)

    return futures, joined


# --- parts


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 60))
def test_parts_are_all_runs_in_order_each_with_its_place(lengths: list[int], n_bytes: int) -> None:
    runs = [memoryview(bytearray(length)) for length in lengths]
    parts = list(_parts(runs, n_bytes))
    assert [run for _, part in parts for run in part] == runs
    at = 0
    for offset, part in parts:
        assert offset == at
        at += sum(run.nbytes for run in part)
    assert all(sum(run.nbytes for run in part) >= n_bytes for _, part in parts[:-1])
    assert all(sum(run.nbytes for run in part[:-1]) < n_bytes for _, part in parts)  # no larger than must be


@pytest.mark.parametrize("n_bytes", [1, 7, 24, 25, 100, 10**6])
def test_parts_give_the_bytes_of_the_whole(model: FakeModel, record: ChunkRecord, n_bytes: int) -> None:
    prove(model, record)
    assert read_in_parts(model, record, n_bytes) == model.source(TOKENS).joined(0, 4)


def test_parts_of_shards_with_states_give_the_bytes_of_the_whole(bank: PrefixBank) -> None:
    model = FakeModel(bank, "hybrid", layout=HYBRID)
    model.store(TOKENS, ends=[4])
    (record,) = bank.chunks()
    prove(model, record)
    for n_bytes in (1, 50, 4000, 10**6):
        assert read_in_parts(model, record, n_bytes) == model.source(TOKENS).joined(0, 4, with_state=True)


def test_short_reads_of_a_part_are_gone_on_with(
    model: FakeModel, record: ChunkRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(model, record)
    real = os.pread

    def preadv(descriptor: int, views: list[memoryview], offset: int) -> int:
        block = real(descriptor, min(5, views[0].nbytes), offset)
        views[0][: len(block)] = block
        return len(block)

    monkeypatch.setattr(shards.os, "preadv", preadv, raising=False)
    assert read_in_parts(model, record, 30) == model.source(TOKENS).joined(0, 4)


# --- how many


def test_a_proven_shard_is_read_in_parts_at_once(
    model: FakeModel, record: ChunkRecord, readers: Readers, small_parts: None
) -> None:
    prove(model, record)
    futures, joined = submit(model, readers, record)
    assert 2 <= len(futures) <= 2 * N_THREADS
    assert joined() == model.source(TOKENS).joined(0, 4)


@pytest.mark.parametrize(("n_shards", "most"), [(1, 6), (2, 3), (3, 2), (5, 2), (6, 1), (100, 1)])
def test_the_more_shards_the_fewer_parts(
    model: FakeModel, record: ChunkRecord, readers: Readers, small_parts: None, n_shards: int, most: int
) -> None:
    """Together they keep each thread busy twice."""
    prove(model, record)
    futures, joined = submit(model, readers, record, n_shards=n_shards)
    assert len(futures) <= most
    assert (len(futures) > 1) == (most > 1)
    assert joined() == model.source(TOKENS).joined(0, 4)


def test_a_small_shard_is_read_at_once(model: FakeModel, record: ChunkRecord, readers: Readers) -> None:
    prove(model, record)
    futures, joined = submit(model, readers, record)
    assert len(futures) == 1
    assert joined() == model.source(TOKENS).joined(0, 4)


def test_a_shard_that_is_not_proven_yet_is_read_whole_and_proven(
    model: FakeModel, record: ChunkRecord, readers: Readers, small_parts: None
) -> None:
    futures, joined = submit(model, readers, record)
    assert len(futures) == 1
    assert joined() == model.source(TOKENS).joined(0, 4)
    assert len(submit(model, readers, record)[0]) > 1


@pytest.mark.parametrize(("verify", "in_parts"), [("always", False), ("never", True)])
def test_verify_says_whether_a_shard_is_ever_read_in_parts(
    tmp_path: Path, readers: Readers, small_parts: None, verify: Any, in_parts: bool
) -> None:
    with PrefixBank.open(tmp_path / "other", chunk_tokens=4, verify=verify) as bank:
        model = FakeModel(bank)
        model.store(TOKENS)
        (record,) = bank.chunks()
        for _ in range(2):
            futures, joined = submit(model, readers, record)
            assert (len(futures) > 1) is in_parts
            assert joined() == model.source(TOKENS).joined(0, 4)


@pytest.mark.parametrize("surplus", [-1, 1])
def test_a_shard_of_another_layout_is_refused_unread(
    model: FakeModel, record: ChunkRecord, readers: Readers, small_parts: None, surplus: int
) -> None:
    futures, _ = submit(model, readers, record, n_bytes=n_data_bytes(record) + surplus)
    (error,) = [future.exception() for future in futures]
    assert isinstance(error, ShardCorruptError)
    assert "layout" in str(error)


# --- what changed since it was proven


def touch(path: Path) -> None:
    later = path.stat().st_mtime_ns + 1
    os.utime(path, ns=(later, later))


def flip(path: Path) -> None:
    """Change one byte, in place, with the times that this gives."""
    before = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    if path.stat().st_mtime_ns == before:  # within the grain of the clock
        touch(path)


def put_another_in_its_place(path: Path) -> None:
    """Another file of the same bytes and times: another inode."""
    status = path.stat()
    shutil.copyfile(path, path.with_name("copy"))
    path.with_name("copy").replace(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


CHANGES = {"touched": touch, "flipped": flip, "another inode": put_another_in_its_place, "cut": cut}


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changed_after_it_was_proven_is_not_proven_any_more(
    model: FakeModel, record: ChunkRecord, readers: Readers, small_parts: None, change: str
) -> None:
    prove(model, record)
    CHANGES[change](model.path_of(record))
    assert not model.session.shards.is_proven(record)
    with pytest.raises(ShardCorruptError):
        read_in_parts(model, record, 30)
    futures, joined = submit(model, readers, record)
    assert len(futures) == 1  # whole, with its digest
    if change in ("touched", "another inode"):
        assert joined() == model.source(TOKENS).joined(0, 4)
        assert model.session.shards.is_proven(record)
    else:
        with pytest.raises(ShardCorruptError):
            joined()
        assert not model.session.shards.is_proven(record)


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changes_between_two_parts_is_refused(
    model: FakeModel, record: ChunkRecord, readers: Readers, small_parts: None, change: str
) -> None:
    prove(model, record)
    real = model.session.shards.is_proven

    def proven_for_the_last_time(asked: ChunkRecord) -> bool:
        answer: bool = real(asked)
        CHANGES[change](model.path_of(record))
        return answer

    model.session.shards.is_proven = proven_for_the_last_time
    try:
        futures, _ = submit(model, readers, record)
    finally:
        del model.session.shards.is_proven
    assert len(futures) > 1
    assert all(isinstance(future.exception(), ShardCorruptError) for future in futures)


def test_a_shard_that_went_is_not_proven_and_is_missed(model: FakeModel, record: ChunkRecord) -> None:
    prove(model, record)
    model.path_of(record).unlink()
    assert not model.session.shards.is_proven(record)
    with pytest.raises(ShardMissingError):
        read_in_parts(model, record, 30)


def test_a_hole_is_not_proven(model: FakeModel, record: ChunkRecord) -> None:
    hole = ChunkRecord(record.key, None, 1, 0, 4, record.token_ids, None, 0, 0, 0, b"")
    assert not model.session.shards.is_proven(hole)


def test_a_proof_is_of_one_digest(model: FakeModel, record: ChunkRecord) -> None:
    """The same file, but a row that says that other bytes were stored."""
    from dataclasses import replace

    prove(model, record)
    other = replace(record, digest=bytes(16))
    assert not model.session.shards.is_proven(other)
    with pytest.raises(ShardCorruptError):
        model.read(other)


# --- digests in passing


@given(st.lists(st.binary(max_size=40), max_size=30), st.one_of(st.none(), st.integers(1, 60)))
def test_blocks_are_all_bytes_in_order(runs: list[bytes], n_bytes: int | None) -> None:
    made = list(blocks([memoryview(run) for run in runs], n_bytes))
    assert b"".join(bytes(view) for block in made for view in block) == b"".join(runs)
    assert all(view.nbytes for block in made for view in block)
    assert all(made)
    if n_bytes is None:
        assert len(made) <= 1
    else:
        assert all(sum(view.nbytes for view in block) >= n_bytes for block in made[:-1])


@pytest.mark.parametrize("block_bytes", [1, 100, 4096])
def test_any_flipped_byte_is_noticed(
    model: FakeModel, record: ChunkRecord, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """At whatever place of the header, a run or a block it lies, and however runs and blocks lie to each other."""
    monkeypatch.setattr(shards, "_DIGEST_BYTES", block_bytes)
    path = model.path_of(record)
    content = path.read_bytes()
    step = 1 if block_bytes == 100 else 7
    with path.open("r+b", buffering=0) as file:
        for at in range(0, len(content), step):
            os.pwrite(file.fileno(), bytes([content[at] ^ 0x10]), at)
            with pytest.raises(ShardCorruptError):
                model.read(record)
            os.pwrite(file.fileno(), content[at : at + 1], at)
    assert model.read(record) == model.source(TOKENS).joined(0, 4)


def test_a_flipped_byte_around_the_edges_of_real_blocks_is_noticed(bank: PrefixBank) -> None:
    """Runs of 300,000 bytes: each block of half a megabyte ends inside the file's second, fourth ... run."""
    wide = CacheLayout((LayerLayout("kv", (), (RowArray("keys", "U8", 5, 75_000),)),))
    model = FakeModel(bank, "wide", layout=wide)
    model.store(TOKENS)
    (record,) = bank.chunks()
    path = model.path_of(record)
    edges = [record.data_offset + n * 300_000 for n in range(6)] + [n * shards._DIGEST_BYTES for n in range(3)]
    with path.open("r+b", buffering=0) as file:
        for at in {at + near for at in edges for near in (-1, 0, 1) if 0 <= at + near < record.n_bytes}:
            before = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([before[0] ^ 0x80]), at)
            with pytest.raises(ShardCorruptError):
                model.read(record)
            os.pwrite(file.fileno(), before, at)
    assert model.read(record) == model.source(TOKENS).joined(0, 4)


@pytest.mark.parametrize("block_bytes", [1, 50, 10**6])
def test_runs_that_do_not_take_all_bytes_are_refused(
    model: FakeModel, record: ChunkRecord, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(shards, "_DIGEST_BYTES", block_bytes)
    for n_tokens in (3, 5):
        with pytest.raises(ShardCorruptError):
            model.session.shards.read_into(record, empty_runs(model.layout, n_tokens))
    assert not model.session.shards.is_proven(record)


def test_blocks_swapped_in_the_file_are_noticed(
    model: FakeModel, record: ChunkRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_DIGEST_BYTES", 32)
    path = model.path_of(record)
    content = path.read_bytes()
    at = record.data_offset
    path.write_bytes(content[:at] + content[at + 32 : at + 64] + content[at : at + 32] + content[at + 64 :])
    with pytest.raises(ShardCorruptError):
        model.read(record)
