"""Set the clock back and forward in the middle of things: nothing is lost, and the least recently used goes first."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.errors import StorageError
from prefixbank.shards import ShardWriter
from tests.fakekv import FakeModel, disk_usage
from tests.fault.together import BLOCK, files_there, named_files

DAY_S = 86400
A, B, C, D = ([n] * 4 for n in (1, 2, 3, 4))

SetClock = Callable[[float], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Give a function that sets the clock off by some seconds; files get the time of the machine all the same."""
    real = time.time

    def by(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    return by


@pytest.mark.parametrize("off_s", [-DAY_S, 365 * DAY_S])
def test_what_was_used_least_goes_first_whatever_the_clock_says(
    bank: PrefixBank, model: FakeModel, set_clock: SetClock, off_s: float
) -> None:
    for token_ids in (A, B, C):
        model.store(token_ids)
    set_clock(off_s)
    model.use(A)
    set_clock(-off_s)
    model.store(D)
    bank.prune(max_bytes=2 * BLOCK)
    assert model.held(A, B, C, D) == [4, 0, 0, 4]


@pytest.mark.parametrize("off_s", [-DAY_S, 365 * DAY_S])
def test_the_budget_holds_when_the_clock_was_set(tmp_path: Path, set_clock: SetClock, off_s: float) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4, max_bytes=3 * BLOCK) as bank:
        model = FakeModel(bank)
        for number in range(10):
            set_clock(off_s * (number % 2))
            model.store([number] * 4)
            assert disk_usage(bank) <= 3 * BLOCK
        assert model.held([9] * 4, [8] * 4, [7] * 4) == [4, 4, 4]
        assert bank.check(read_data=True).ok


def test_a_shard_that_is_swept_before_its_row_is_there_gets_none(
    bank: PrefixBank, model: FakeModel, set_clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was set forward, or the machine slept for hours, between the file and its row."""
    real = ShardWriter.publish

    def publish(writer: ShardWriter) -> None:
        real(writer)
        set_clock(365 * DAY_S)
        bank.prune()

    monkeypatch.setattr(ShardWriter, "publish", publish)
    with pytest.raises(StorageError, match="store it again"):
        model.store([*A, *B])
    monkeypatch.undo()
    assert bank.chunks() == []
    assert files_there(bank.root, notes=True) == set()
    assert model.store([*A, *B]).n_tokens == 8


def test_a_leftover_that_got_its_row_meanwhile_is_not_swept(
    bank: PrefixBank, model: FakeModel, set_clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefixbank import eviction

    real = eviction.execute
    published = ShardWriter.publish
    planned: list[eviction.PrunePlan] = []

    def publish(writer: ShardWriter) -> None:
        published(writer)
        set_clock(365 * DAY_S)
        planned.append(bank.prune(dry_run=True))

    monkeypatch.setattr(ShardWriter, "publish", publish)
    model.store([*A, *B])
    assert len(planned[0].files) == 3, "two shards and their note"
    assert real(model.session.index, model.session.shards, planned[0]).files == ()
    assert model.held([*A, *B]) == [8]


def test_chunks_of_one_tick_go_children_first_and_whole(bank: PrefixBank, model: FakeModel) -> None:
    for token_ids in ([*A, *B, *C], [*B, *B, *B]):
        model.store(token_ids)
    with model.session.index.writing() as tx:
        tx.exec_driver_sql("UPDATE chunks SET last_used = 7")
    for n_blocks in range(5, -1, -1):
        bank.prune(max_bytes=n_blocks * BLOCK)
        assert sum(model.held([*A, *B, *C], [*B, *B, *B])) == 4 * n_blocks
        assert bank.check(read_data=True).ok


def test_a_budget_that_is_changed_while_others_use_the_bank_holds_for_all(tmp_path: Path) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=4, max_bytes=8 * BLOCK) as bank:
        model = FakeModel(bank)
        for number in range(8):
            model.store([number] * 4)
        with PrefixBank.open(tmp_path, max_bytes=3 * BLOCK) as smaller:
            assert disk_usage(bank) <= 3 * BLOCK
            assert model.held([7] * 4, [6] * 4, [5] * 4, [4] * 4) == [4, 4, 4, 0]
            FakeModel(smaller).store([50] * 4)
            assert disk_usage(bank) <= 3 * BLOCK
        for number in range(20, 26):
            model.store([number] * 4)
        assert disk_usage(bank) == 8 * BLOCK


def test_what_a_killed_store_left_counts_in_the_budget_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files can't be told from those of a store in progress: they take room until they are old."""
    with PrefixBank.open(tmp_path, chunk_tokens=4, max_bytes=6 * BLOCK) as bank:
        model = FakeModel(bank)
        with monkeypatch.context() as patch:
            patch.setattr(ShardWriter, "require_published", lambda _: 1 / 0)
            patch.setattr(ShardWriter, "discard", lambda _: None)  # as SIGKILL leaves it
            with pytest.raises(ZeroDivisionError):
                model.store([*A, *B])
        left = files_there(tmp_path)
        assert len(left) == 2
        for number in range(10, 16):
            model.store([number] * 4)
        assert disk_usage(bank) + BLOCK <= 6 * BLOCK, "shards, and the note"
        assert left <= files_there(tmp_path)
    with PrefixBank.open(tmp_path, max_bytes=4 * BLOCK) as bank:
        assert disk_usage(bank) + BLOCK <= 4 * BLOCK
        assert left <= files_there(tmp_path)
        monkeypatch.setattr(time, "time", lambda real=time.time: real() + 7200)
        FakeModel(bank).store(C)
        assert files_there(tmp_path, notes=True) == named_files(bank), "old ones are swept where there is a budget"
