"""Hold chunks to their rows and states where the states come later, are refused, or race with another writer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from prefixbank import eviction, storing
from prefixbank.bank import PrefixBank
from prefixbank.index import chunk_rows
from prefixbank.shards import ShardWriter
from prefixbank.storing import Stored
from tests.fakekv import HYBRID, FakeModel
from tests.unit.states.looking import BLOCK, SHOTS, assert_in_order, kept, row_of, said


def test_a_chunk_gets_its_states_later(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.name("shots", SHOTS, pin=True)
    hybrid.name("first", SHOTS[:4])
    before = row_of(bank, 0, 4)
    with bank._session.index.reading() as tx:
        bytes_before = chunk_rows.disk_bytes(tx)
    stored = hybrid.store(SHOTS[:4], ends=[4])
    after = row_of(bank, 0, 4)
    assert (stored.n_tokens, stored.n_new_chunks, stored.last_key) == (4, 1, before.key)
    assert (after.key, after.parent_key, after.has_state) == (before.key, before.parent_key, True)
    assert after.file_name != before.file_name
    assert not hybrid.path_of(before).exists()
    with bank._session.index.reading() as tx:
        assert chunk_rows.disk_bytes(tx) - bytes_before == after.disk_bytes - before.disk_bytes > 0
    assert kept(bank) == {(0, 4): True, (4, 8): False, (8, 12): False}  # the children stay
    assert said(hybrid, SHOTS) == (4, 12, "no-state")
    assert bank.prefixes("first")[0].chunk_key == before.key
    (shots,) = bank.prefixes("shots")
    assert (shots.pinned, len(bank.chain(shots))) == (True, 3)
    assert_in_order(bank)
    bank.prune(max_bytes=0)
    assert said(hybrid, SHOTS) == (4, 12, "no-state")


def test_a_middle_and_a_last_chunk_get_their_states_later(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS)
    stored = hybrid.store(SHOTS, ends=[8, 10, 12])
    assert (stored.n_tokens, stored.n_new_chunks, stored.refused) == (12, 3, "")
    assert kept(bank) == {(0, 4): False, (4, 8): True, (8, 10): True, (8, 12): True}
    assert hybrid.held(SHOTS[:4], SHOTS[:9], SHOTS[:11], SHOTS) == [0, 8, 10, 12]
    assert_in_order(bank)


def test_a_second_writer_without_states_does_not_take_them_away(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS, ends=[2, 4, 12])
    files = {record.file_name for record in bank.chunks()}
    stored = hybrid.store(SHOTS)
    assert (stored.n_tokens, stored.n_new_chunks) == (12, 0)
    assert {record.file_name for record in bank.chunks()} == files
    assert hybrid.held(SHOTS[:3], SHOTS[:4], SHOTS) == [2, 4, 12]


@pytest.mark.parametrize("first_with", [True, False], ids=["without comes second", "with comes second"])
def test_of_two_writers_at_once_the_one_with_states_wins(
    bank: PrefixBank, hybrid: FakeModel, monkeypatch: pytest.MonkeyPatch, first_with: bool
) -> None:
    """Both planned before either wrote."""
    real_publish = ShardWriter.publish
    raced: list[Stored] = []

    def publish(self: ShardWriter) -> None:
        real_publish(self)
        if not raced:
            raced.append(Stored(0, None))
            raced[0] = hybrid.store(SHOTS[:8], ends=[4, 8] if first_with else [])

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "publish", publish)
        stored = hybrid.store(SHOTS[:8], ends=[] if first_with else [4, 8])
    assert (raced[0].n_new_chunks, raced[0].n_tokens) == (2, 8)
    assert (stored.n_new_chunks, stored.n_tokens, stored.refused) == (0 if first_with else 2, 8, "")
    assert kept(bank) == {(0, 4): True, (4, 8): True}
    assert_in_order(bank)


def test_in_groups_states_come_later_too(bank: PrefixBank, hybrid: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "_GROUP_BYTES", 1)
    hybrid.store(SHOTS)
    stored = hybrid.store([*SHOTS, 13, 14], ends=[1, 4, 7, 8, 12, 14])
    assert (stored.n_tokens, stored.n_new_chunks, stored.refused) == (14, 6, "")
    assert hybrid.held(SHOTS[:3], SHOTS[:7], [*SHOTS, 13, 14]) == [1, 7, 14]
    assert_in_order(bank)


def test_rows_that_are_there_count_where_the_budget_refuses_their_states(tmp_path: Path) -> None:
    """A refused replacement takes nothing away: not the rows, nor what the store says of them."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4, max_bytes=4 * BLOCK) as bank:
        hybrid = FakeModel(bank, "hybrid", layout=HYBRID)
        hybrid.name("shots", SHOTS, pin=True)
        with pytest.warns(match="not stored whole"):
            stored = hybrid.store(SHOTS, ends=[4])
        assert "do not fit" in stored.refused
        assert (stored.n_tokens, stored.last_key) == (12, row_of(bank, 8, 12).key)
        assert kept(bank) == {(0, 4): False, (4, 8): False, (8, 12): False}
        assert_in_order(bank)


def test_rows_that_are_there_count_where_a_child_is_lost_meanwhile(
    bank: PrefixBank, hybrid: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid.store(SHOTS)
    real_publish = ShardWriter.publish
    raced: list[bool] = []

    def publish(self: ShardWriter) -> None:
        real_publish(self)
        if not raced:
            raced.append(True)
            session = bank._session
            in_progress = eviction.find_unnamed(session.index, session.shards, time.time()).n_young_bytes
            bank.prune(max_bytes=BLOCK + in_progress)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "publish", publish)
        with pytest.warns(match="removed meanwhile"):
            stored = hybrid.store([*SHOTS, 13], ends=[4, 13])
    assert (stored.n_tokens, kept(bank)) == (4, {(0, 4): False})
    assert_in_order(bank)
