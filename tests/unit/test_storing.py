"""Hold storing to its promises: nothing twice, nothing half, tails superseded, and no row without a whole file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefixbank import storing
from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids, unpack_token_ids
from prefixbank.errors import BankReadOnlyError, ConfigError, StorageError
from prefixbank.index import chunk_rows
from prefixbank.shards import ShardWriter
from tests.fakekv import LAYOUT, FakeModel

SHOTS = list(range(1, 11))  # two chunks of 4 and a tail of 2


def shard_files(bank: PrefixBank) -> set[str]:
    return {path.name for path in (bank.root / "shards").rglob("*.safetensors")}


def assert_no_file_too_many(bank: PrefixBank) -> None:
    assert shard_files(bank) == {record.file_name for record in bank.chunks()}
    assert list((bank.root / "tmp").iterdir()) == []


def stored_ids(bank: PrefixBank) -> set[tuple[int, ...]]:
    return {tuple(unpack_token_ids(record.token_ids)) for record in bank.chunks()}


def test_a_prefix_is_stored_whole(bank: PrefixBank, model: FakeModel) -> None:
    stored = model.store(SHOTS)
    assert (stored.n_tokens, stored.n_new_chunks, stored.known_keys, stored.refused) == (10, 3, (), "")
    assert stored.n_written_bytes == sum(path.stat().st_size for path in (bank.root / "shards").rglob("*.safetensors"))
    assert stored.last_key == model.match(SHOTS).chunks[-1].key
    assert stored_ids(bank) == {(1, 2, 3, 4), (5, 6, 7, 8), (9, 10)}
    assert_no_file_too_many(bank)


def test_ten_tokens_take_the_room_of_ten(bank: PrefixBank, model: FakeModel) -> None:
    """Never the padding that caches are grown by."""
    model.store(SHOTS)
    data_bytes = sum(record.n_bytes - record.data_offset for record in bank.chunks())
    assert data_bytes == LAYOUT.data_bytes(10)


def test_nothing_can_be_stored_of_nothing(bank: PrefixBank, model: FakeModel) -> None:
    stored = model.store([])
    assert (stored.n_tokens, stored.last_key, stored.refused) == (0, None, "")
    assert bank.chunks() == []


def test_a_repeat_asks_for_no_row(model: FakeModel) -> None:
    model.store(SHOTS)
    source = model.source(SHOTS)
    stored = model.session.store(model.namespace, pack_token_ids(SHOTS), source)
    assert (stored.n_tokens, stored.n_written_bytes, source.n_asked) == (10, 0, 0)


def test_only_what_is_new_is_written(model: FakeModel) -> None:
    model.store(SHOTS)
    source = model.source([*SHOTS[:8], 20, 21, 22, 23, 24])
    stored = model.session.store(model.namespace, pack_token_ids(source.token_ids), source)
    assert (stored.n_tokens, stored.n_new_chunks, len(stored.known_keys), source.n_asked) == (13, 2, 2, 2)


def test_a_longer_sibling_supersedes_a_tail(bank: PrefixBank, model: FakeModel) -> None:
    for n_tokens in (1, 2, 3, 4):
        model.store([1, 2, 3, 4][:n_tokens])
        assert stored_ids(bank) == {tuple([1, 2, 3, 4][:n_tokens])}
        assert_no_file_too_many(bank)
    assert model.resolve([1, 2, 3, 4]).n_tokens == 4


def test_a_superseded_tails_names_and_pins_move_to_its_successor(bank: PrefixBank, model: FakeModel) -> None:
    model.name("short", [1, 2], pin=True)
    model.name("other", [1, 3])
    model.store([1, 2, 3, 4, 5])
    (short,) = bank.prefixes("short")
    assert short.pinned
    assert short.n_tokens == 2  # it still ends where it did, now inside a longer chunk
    assert short.chunk_key == model.match([1, 2, 3, 4]).chunks[0].key
    (other,) = bank.prefixes("other")
    assert other.chunk_key == model.match([1, 3]).chunks[0].key
    bank.prune(max_bytes=0)
    assert model.resolve([1, 2]).n_tokens == 2


def test_a_tail_that_a_sibling_covers_is_not_stored(bank: PrefixBank, model: FakeModel) -> None:
    model.store(SHOTS)
    for n_tokens in (9, 7, 6, 3, 1):
        stored = model.store(SHOTS[:n_tokens])
        assert (stored.n_tokens, stored.n_new_chunks) == (n_tokens, 0)
        assert stored.last_key == model.match(SHOTS[:n_tokens]).chunks[-1].key
    assert len(bank.chunks()) == 3


def test_tails_that_part_are_kept_side_by_side(bank: PrefixBank, model: FakeModel) -> None:
    model.store([1, 2, 3])
    model.store([1, 2, 9])
    assert stored_ids(bank) == {(1, 2, 3), (1, 2, 9)}


def test_the_second_of_two_writers_of_one_chunk_takes_the_firsts(bank: PrefixBank, model: FakeModel) -> None:
    """Both planned before either wrote; their bytes differ, as a GPU's may. The first one's stay."""
    real_write = ShardWriter.write
    raced = False

    def write(self: ShardWriter, *given: Any) -> Any:
        nonlocal raced
        if not raced:
            raced = True
            assert model.store(SHOTS[:8], b"B").n_new_chunks == 2
        return real_write(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "write", write)
        stored = model.store(SHOTS, b"A")
    assert (stored.n_tokens, stored.n_new_chunks, stored.refused) == (10, 1, "")
    assert_no_file_too_many(bank)
    first, second, third = sorted(bank.chunks(), key=lambda record: record.start)
    for record, flavour in ((first, b"B"), (second, b"B"), (third, b"A")):
        assert model.read(record) == model.source(SHOTS, flavour).joined(record.start, record.n_tokens)


def during_the_write(action: Any) -> Any:
    """Return a patch under which `action` runs after the shards are written and before their rows are."""
    patch = pytest.MonkeyPatch()
    real_publish = ShardWriter.publish
    done: list[bool] = []

    def publish(self: ShardWriter) -> None:
        real_publish(self)
        if not done:
            done.append(True)
            action()

    patch.setattr(ShardWriter, "publish", publish)
    return patch


def test_a_parent_that_is_removed_meanwhile_leaves_nothing_hanging(bank: PrefixBank, model: FakeModel) -> None:
    model.store(SHOTS[:8])
    patch = during_the_write(lambda: bank.prune(max_bytes=0))
    with pytest.warns(match="not stored whole"):
        stored = model.store(SHOTS)
    patch.undo()
    assert (stored.n_tokens, stored.n_new_chunks) == (0, 0)
    assert "removed meanwhile" in stored.refused
    assert bank.chunks() == []
    assert_no_file_too_many(bank)
    assert model.store(SHOTS).n_tokens == 10


def test_a_failed_store_is_not_visible(bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = ShardWriter.write
    n_writes = 0

    def write(self: ShardWriter, *given: Any) -> Any:
        nonlocal n_writes
        n_writes += 1
        if n_writes == 3:
            raise StorageError("disk full")
        return real_write(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", write)
        with pytest.raises(StorageError, match="disk full"):
            model.store(SHOTS)
    assert bank.chunks() == []
    assert shard_files(bank) == set()
    assert_no_file_too_many(bank)


def test_a_store_that_finds_the_index_busy_leaves_no_file(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> int:
        raise StorageError("the index is busy")

    with monkeypatch.context() as patch:
        patch.setattr(chunk_rows, "next_tick", busy)
        with pytest.raises(StorageError, match="busy"):
            model.store(SHOTS)
    assert bank.chunks() == []
    assert_no_file_too_many(bank)


def test_a_long_store_is_committed_in_groups(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "_GROUP_BYTES", 2 * 4096)
    long = list(range(100, 130))  # seven chunks and a tail: groups of 2
    real_publish = ShardWriter.publish
    n_groups = 0

    def publish(self: ShardWriter) -> None:
        nonlocal n_groups
        n_groups += 1
        if n_groups == 3:
            raise StorageError("killed")
        real_publish(self)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "publish", publish)
        with pytest.raises(StorageError, match="killed"):
            model.store(long)
    assert model.resolve(long).n_tokens == 16  # what was committed stays
    assert_no_file_too_many(bank)
    stored = model.store(long)
    assert (stored.n_tokens, stored.n_new_chunks) == (30, 4)
    assert model.resolve(long).n_tokens == 30


def test_in_groups_no_parent_is_older_than_its_child(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "_GROUP_BYTES", 1)
    model.store(SHOTS)
    ages = {record.key: record.last_used for record in bank.chunks()}
    for record in bank.chunks():
        if record.parent_key is not None:
            assert ages[record.parent_key] >= ages[record.key]


def test_a_hole_is_filled_with_the_rows_of_the_whole_chain(bank: PrefixBank, model: FakeModel) -> None:
    model.store(SHOTS)
    second = sorted(bank.chunks(), key=lambda record: record.start)[1]
    model.path_of(second).unlink()
    assert model.resolve(SHOTS).n_tokens == 4
    stored = model.store(SHOTS)
    assert (stored.n_tokens, stored.n_new_chunks) == (10, 1)
    assert model.resolve(SHOTS).n_tokens == 10


@pytest.mark.parametrize("again", [SHOTS, [*SHOTS, 11]], ids=["the same", "longer"])
def test_a_named_tail_that_was_lost_is_stored_again_under_its_name(
    bank: PrefixBank, model: FakeModel, again: list[int]
) -> None:
    model.name("shots", SHOTS, pin=True)
    model.path_of(model.match(SHOTS).chunks[-1]).unlink()
    assert model.resolve(SHOTS).n_tokens == 8
    assert [finding.kind for finding in bank.check().findings] == ["hole"]
    assert model.store(again).n_new_chunks == 1
    assert model.resolve(SHOTS).n_tokens == 10
    (shots,) = bank.prefixes("shots")
    assert shots.chunk_key == model.match(SHOTS).chunks[-1].key
    assert bank.check().findings == ()
    assert_no_file_too_many(bank)
    bank.prune(max_bytes=0)
    assert model.resolve(SHOTS).n_tokens == 10


def test_several_holes_are_filled_at_once_and_hold_up_nothing(bank: PrefixBank, model: FakeModel) -> None:
    model.store(list(range(20)))
    for record in bank.chunks():
        if record.start in (4, 12):
            model.path_of(record).unlink()
    for _ in range(2):
        model.resolve(list(range(20)))
    report = bank.check()
    assert {finding.kind for finding in report.findings} <= {"hole", "missing"}
    model.store(list(range(24)))
    for _ in range(2):
        model.resolve(list(range(24)))
        model.store(list(range(24)))
    assert model.resolve(list(range(24))).n_tokens == 24


def test_a_read_only_bank_stores_nothing(tmp_path: Path) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4) as bank:
        FakeModel(bank).store(SHOTS)
    with PrefixBank.open(tmp_path, read_only=True) as bank:
        model = FakeModel(bank)
        assert model.resolve(SHOTS).n_tokens == 10
        with pytest.raises(BankReadOnlyError):
            model.store([9, 9])
        with pytest.raises(BankReadOnlyError):
            model.name("shots", SHOTS)


@pytest.mark.parametrize("name", ["", " x", "a\nb", "a\0b", "x" * 201, "\t"])
def test_a_name_that_can_not_be_shown_is_refused(model: FakeModel, name: str) -> None:
    with pytest.raises(ConfigError, match="prefix name"):
        model.name(name, SHOTS)


@pytest.mark.parametrize("name", ["sentiment/v3", "x", "étude 7", "x" * 200, "--help", "%s"])
def test_other_names_are_taken_as_they_are(bank: PrefixBank, model: FakeModel, name: str) -> None:
    model.name(name, SHOTS)
    assert [prefix.name for prefix in bank.prefixes(name)] == [name]


def test_the_session_counts_what_is_written(bank: PrefixBank, model: FakeModel) -> None:
    stored = model.store(SHOTS)
    model.store(SHOTS)
    counts = bank.stats().session
    assert counts["stored_chunks"] == 3
    assert counts["written_bytes"] == stored.n_written_bytes
