"""Damage shards in every way: each is noticed before use, set aside, and costs little; what comes out is right."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import FileDigest
from prefixbank.errors import SchemaError, ShardCorruptError
from prefixbank.layout import CacheLayout, LayerLayout, RowArray
from prefixbank.proving import prove
from prefixbank.repair import repair
from prefixbank.sealing import SEAL, unsealed
from prefixbank.values import ChunkRecord
from tests.fakekv import FakeModel
from tests.fault import tally
from tests.fault.limits import within_limits
from tests.fault.test_index_lost import make_old

SMALLEST = CacheLayout((LayerLayout("kv", (), (RowArray("k", "U8", 1, 1), RowArray("v", "U8", 1, 1))),))
TOKENS = [3, 1, 4, 1]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[FakeModel, ChunkRecord]]:
    """Give a bank that holds the smallest of shards, and may be left faulty."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4, verify="always") as bank:
        model = FakeModel(bank, "s", layout=SMALLEST)
        model.store(TOKENS)
        (record,) = bank.chunks()
        yield model, record


def must_be_refused(model: FakeModel, record: ChunkRecord) -> None:
    with pytest.raises(ShardCorruptError):
        model.read(record)


def test_every_single_bit_flip_of_a_small_shard_is_noticed(small: tuple[FakeModel, ChunkRecord]) -> None:
    """By the read that a row describes, and by the proof of a shard without one."""
    model, record = small
    path = model.path_of(record)
    content = path.read_bytes()
    missed = []
    with path.open("r+b", buffering=0) as file:
        for at in range(8 * len(content)):
            flipped = content[at // 8] ^ (1 << at % 8)
            os.pwrite(file.fileno(), bytes([flipped]), at // 8)
            try:
                model.read(record)
                missed.append(at)
            except ShardCorruptError:
                pass
            try:
                if prove(model.session.shards, record.file_name, 4).sealed == "whole":
                    missed.append(-at)
            except (ShardCorruptError, SchemaError):
                pass
            os.pwrite(file.fileno(), content[at // 8 : at // 8 + 1], at // 8)
    tally.count("damaged inputs", 8 * len(content))
    tally.must_not("wrong tokens", missed)
    assert model.read(record) == model.source(TOKENS).joined(0, 4)
    assert prove(model.session.shards, record.file_name, 4).sealed == "whole"


def flip_at_random(folder: Path, n_flips: int, n_heads: int) -> None:
    arrays = (RowArray("k", "F16", n_heads, 64), RowArray("v", "F16", n_heads, 64))
    layout = CacheLayout((LayerLayout("kv", (), arrays),))
    chance = random.Random(1)
    with PrefixBank.open(folder / "bank", chunk_tokens=256, verify="always") as bank:
        model = FakeModel(bank, layout=layout)
        model.store(list(range(256)))
        (record,) = bank.chunks()
        path = model.path_of(record)
        content = path.read_bytes()
        with path.open("r+b", buffering=0) as file:
            for _ in range(n_flips):
                at = chance.randrange(8 * len(content))
                os.pwrite(file.fileno(), bytes([content[at // 8] ^ (1 << at % 8)]), at // 8)
                must_be_refused(model, record)
                os.pwrite(file.fileno(), content[at // 8 : at // 8 + 1], at // 8)
        tally.count("damaged inputs", n_flips)
        model.read(record)


def test_random_bit_flips_of_a_larger_shard_are_noticed(tmp_path: Path) -> None:
    flip_at_random(tmp_path, 300, 1)


@pytest.mark.long
def test_ten_thousand_random_bit_flips_of_a_larger_shard_are_noticed(tmp_path: Path) -> None:
    flip_at_random(tmp_path, 10_000, 16)


def test_every_truncation_and_some_appended_bytes_are_noticed(small: tuple[FakeModel, ChunkRecord]) -> None:
    model, record = small
    path = model.path_of(record)
    content = path.read_bytes()
    for n_bytes in (*range(len(content)), len(content) + 1, len(content) + 8, len(content) + 4096):
        path.write_bytes(content[:n_bytes] + b" " * (n_bytes - len(content)))
        must_be_refused(model, record)
        with pytest.raises(ShardCorruptError):
            prove(model.session.shards, record.file_name, 4)


def aside(path: Path, make: Callable[[Path], object]) -> None:
    path.rename(path.with_suffix(".aside"))
    make(path)


def bind(path: Path) -> None:
    """Put a socket there. Its path may be longer than a socket's may be, so it is bound from within the folder."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def swap(path: Path) -> None:
    other = next(p for p in sorted(path.parents[1].rglob("*.safetensors")) if p != path)
    spare = path.with_suffix(".spare")
    path.rename(spare)
    other.rename(path)
    spare.rename(other)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "first block zeroed": lambda path: path.write_bytes(bytes(512) + path.read_bytes()[512:]),
    "last bytes zeroed": lambda path: path.write_bytes(path.read_bytes()[:-20] + bytes(20)),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "appended": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "fifo": lambda path: aside(path, os.mkfifo),
    "socket": lambda path: aside(path, bind),
    "link to the shard": lambda path: aside(path, lambda p: p.symlink_to(p.with_suffix(".aside"))),
    "dangling link": lambda path: aside(path, lambda p: p.symlink_to("nowhere")),
    "link to a device": lambda path: aside(path, lambda p: p.symlink_to("/dev/zero")),
    "folder": lambda path: aside(path, Path.mkdir),
    "swapped": swap,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("by", ["use", "repair", "repair of a lost index"])
def test_a_damaged_shard_is_set_aside_whoever_meets_it(tmp_path: Path, damage: str, by: str) -> None:
    root = tmp_path / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        model = FakeModel(bank)
        model.store(range(10))
        middle = next(r for r in bank.chunks() if r.start == 4)
    path = root / "shards" / str(middle.file_name)[:2] / str(middle.file_name)
    with within_limits():
        DAMAGES[damage](path)
        if by == "use":
            with PrefixBank.open(root) as bank:
                n_held = FakeModel(bank).resolve(range(10)).n_tokens
                assert n_held in (0, 4)
        elif by == "repair":
            repair(root, read_data=True)
        else:
            (root / "index.sqlite3").unlink()
            repair(root)
    assert any(p.name.startswith(str(middle.file_name)) for p in (root / "quarantine").iterdir())
    assert not os.path.lexists(path)
    for left in (root / "shards").rglob("*.aside"):
        left.unlink()
    make_old(root)
    repair(root, read_data=True)
    with PrefixBank.open(root) as bank:
        assert bank.check(read_data=True).ok
        model = FakeModel(bank)
        assert model.resolve(range(10)).n_tokens in (0, 4)
        model.store(range(10))
        assert model.resolve(range(10)).n_tokens == 10


def test_what_stands_on_a_damaged_shard_comes_back_with_it(tmp_path: Path) -> None:
    """With the index lost, too: its token ids follow from its key, so that its place is kept as a hole."""
    root = tmp_path / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        FakeModel(bank).name("shots", range(10), pin=True)
        first = next(r for r in bank.chunks() if r.start == 0)
    path = root / "shards" / str(first.file_name)[:2] / str(first.file_name)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (root / "index.sqlite3").unlink()
    assert {"hole", "take-up", "set-aside", "name"} <= {step.action for step in repair(root).steps}
    with PrefixBank.open(root) as bank:
        model = FakeModel(bank)
        assert model.held(range(10)) == [0]
        assert model.store(range(4)).n_new_chunks == 1
        assert model.held(range(10)) == [10]
        bank.prune(max_bytes=0)
        assert model.held(range(10)) == [10]


def test_chunks_whose_parent_is_lost_wait_for_it(tmp_path: Path) -> None:
    root = tmp_path / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        FakeModel(bank).store(range(10))
        first = next(r for r in bank.chunks() if r.start == 0)
    (root / "shards" / str(first.file_name)[:2] / str(first.file_name)).unlink()
    (root / "index.sqlite3").unlink()
    plan = repair(root)
    assert [step.action for step in plan.left] == ["left"] * 2
    with PrefixBank.open(root) as bank:
        FakeModel(bank).store(range(4))
    make_old(root)
    assert [step.action for step in repair(root).steps] == ["take-up"] * 2
    with PrefixBank.open(root) as bank:
        assert FakeModel(bank).held(range(10)) == [10]


def without_seal(path: Path) -> bytes:
    """Turn a shard into one of a version that had no seals; returns its digest."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"][SEAL]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return FileDigest(path.read_bytes()).digest()


def test_shards_of_older_versions_are_taken_up_only_if_proven_or_on_demand(tmp_path: Path) -> None:
    """They have no digest of their bytes: the row of a broken index proves them, else nothing does."""
    root = tmp_path / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        model = FakeModel(bank)
        model.store(range(4))
        (record,) = bank.chunks()
        path = model.path_of(record)
        digest = without_seal(path)
        with model.session.index.writing() as tx:
            size = path.stat().st_size
            offset = size - model.layout.data_bytes(4)
            tx.exec_driver_sql("UPDATE chunks SET digest = ?, n_bytes = ?, data_offset = ?", (digest, size, offset))
            tx.exec_driver_sql("UPDATE bank_state SET disk_bytes = (SELECT sum(disk_bytes) FROM chunks)")
        assert model.held(range(4)) == [4]
    shutil.copytree(root, tmp_path / "broken")
    with PrefixBank.open(tmp_path / "broken") as bank, bank._session.index.writing() as tx:
        tx.exec_driver_sql("UPDATE namespaces SET root_key = zeroblob(16)")
    assert repair(tmp_path / "broken").ok
    (root / "index.sqlite3").unlink()
    plan = repair(root)
    assert not plan.ok
    assert "--unproven" in plan.left[0].message
    with PrefixBank.open(root) as bank:
        assert FakeModel(bank).held(range(4)) == [0]
    make_old(root)
    assert repair(root, unproven=True).ok
    for each in (root, tmp_path / "broken"):
        with PrefixBank.open(each) as bank:
            assert FakeModel(bank).held(range(4)) == [4]


def test_a_whole_shard_whose_row_is_damaged_gets_its_row_back(tmp_path: Path) -> None:
    root = tmp_path / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        FakeModel(bank).store(range(10))
        with bank._session.index.writing() as tx:
            tx.exec_driver_sql("UPDATE chunks SET digest = zeroblob(16) WHERE start = 4")
            tx.exec_driver_sql("UPDATE chunks SET n_bytes = n_bytes + 1 WHERE start = 8")
    assert [step.action for step in repair(root, read_data=True).steps] == ["correct", "correct"]
    with PrefixBank.open(root) as bank:
        assert FakeModel(bank).held(range(10)) == [10]
        assert bank.check(read_data=True).findings == ()


@pytest.mark.parametrize("verify", ["once", "never"])
def test_a_row_with_another_data_offset_never_gives_shifted_rows(tmp_path: Path, verify: Any) -> None:
    """Once its digest is proven a shard is read without it; the offset in its row was part of the proof."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4, verify=verify) as bank:
        model = FakeModel(bank)
        model.store(TOKENS)
        (record,) = bank.chunks()
        model.read(record)
        with pytest.raises(ShardCorruptError):
            model.read(replace(record, data_offset=record.data_offset - 2))


def test_the_seal_is_of_the_whole_file(small: tuple[FakeModel, ChunkRecord]) -> None:
    model, record = small
    content = model.path_of(record).read_bytes()
    head = content[: record.data_offset]
    assert json.loads(head[8:])["__metadata__"][SEAL] == FileDigest(unsealed(head) + content[len(head) :]).hexdigest()
