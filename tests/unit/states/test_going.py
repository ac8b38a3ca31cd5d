"""Hold states to going when they should, by use or by name, and to coming back after they were lost."""

from __future__ import annotations

from prefixbank.bank import PrefixBank
from prefixbank.index import chunk_rows
from prefixbank.values import PrefixRecord
from tests.fakekv import HYBRID, FakeModel
from tests.unit.states.looking import BLOCK, SHOTS, assert_in_order, kept, row_of, said


def test_eviction_takes_states_by_their_use(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS[:8], ends=[2, 6, 8])
    hybrid.use(SHOTS[:6])
    with bank._session.index.reading() as tx:
        all_bytes = chunk_rows.disk_bytes(tx)
    gone = bank.prune(max_bytes=all_bytes - BLOCK)
    assert [(p.record.start, p.record.end) for p in gone.chunks] == [(4, 8)]
    assert hybrid.held(SHOTS, SHOTS[:5]) == [6, 2]
    assert_in_order(bank)
    bank.prune(max_bytes=0)
    assert bank.chunks() == []
    assert_in_order(bank)


def test_a_chunk_with_tails_behind_it_outlives_them(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS[:6], ends=[6])
    hybrid.store(SHOTS[:8], ends=[8])
    planned = bank.prune(max_bytes=0, dry_run=True)
    assert [(p.record.start, p.record.end) for p in planned.chunks][-1] == (0, 4)
    first = row_of(bank, 0, 4)
    with bank._session.index.writing() as tx:
        assert not chunk_rows.delete(tx, first)


def test_pinned_states_outlive_a_prune_and_their_siblings_do_not(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS, ends=[4, 7, 12])
    hybrid.name("six", SHOTS[:6], ends=[6], pin=True)
    bank.prune(max_bytes=0)
    assert kept(bank) == {(0, 4): True, (4, 6): True}
    assert said(hybrid, SHOTS) == (6, 6, "partial")
    assert_in_order(bank)


def test_a_removed_name_takes_its_states_along(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.name("six", SHOTS[:6], ends=[6])
    hybrid.name("eight", SHOTS[:8], ends=[8])
    bank.remove("six")
    assert hybrid.held(SHOTS[:6], SHOTS) == [0, 8]
    bank.remove("eight")
    assert bank.chunks() == []


def test_a_pruned_middle_chunk(bank: PrefixBank, hybrid: FakeModel) -> None:
    """Its file is lost: what stands on it can't be reached, what lies before can; stored again, all is there."""
    hybrid.store([*SHOTS, 13], ends=[2, 6, 8, 13])
    hybrid.path_of(row_of(bank, 4, 8)).unlink()
    assert "missing" in {finding.kind for finding in bank.check().findings}
    assert hybrid.resolve([*SHOTS, 13]).n_tokens == 0  # as long as nobody has noticed, a match promised more
    hole = row_of(bank, 4, 8)
    assert (hole.file_name, hole.has_state, hole.disk_bytes) == (None, False, 0)
    assert said(hybrid, [*SHOTS, 13]) == (6, 6, "lost")
    assert said(hybrid, [*SHOTS[:7]]) == (6, 6, "partial")
    assert_in_order(bank)
    stored = hybrid.store([*SHOTS, 13], ends=[8, 13])
    assert (stored.n_tokens, stored.n_new_chunks) == (13, 1)
    assert said(hybrid, [*SHOTS, 13]) == (13, 13, "all")
    assert said(hybrid, SHOTS) == (8, 12, "no-state")
    assert_in_order(bank)


def test_a_hole_with_states_that_is_filled_without(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS, ends=[4, 8])
    path = hybrid.path_of(row_of(bank, 4, 8))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # in the states
    path.write_bytes(content)
    assert [f.kind for f in bank.check(read_data=True).problems] == ["corrupt"]
    assert hybrid.resolve(SHOTS).n_tokens == 4
    assert said(hybrid, SHOTS) == (4, 4, "lost")
    assert hybrid.store(SHOTS).n_new_chunks == 1
    assert kept(bank) == {(0, 4): True, (4, 8): False, (8, 12): False}
    assert said(hybrid, SHOTS) == (4, 12, "no-state")
    assert_in_order(bank)
    assert hybrid.store(SHOTS, ends=[8]).n_new_chunks == 1
    assert said(hybrid, SHOTS) == (8, 12, "no-state")
    assert_in_order(bank)


def test_a_named_tail_with_states_that_was_lost_is_stored_again(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.name("six", SHOTS[:6], ends=[6], pin=True)
    hybrid.path_of(row_of(bank, 4, 6)).unlink()
    hybrid.resolve(SHOTS[:6])
    assert [finding.kind for finding in bank.check().findings] == ["hole"]
    assert hybrid.store(SHOTS[:6], ends=[6]).n_new_chunks == 1
    assert said(hybrid, SHOTS) == (6, 6, "partial")
    bank.prune(max_bytes=0)
    assert said(hybrid, SHOTS) == (6, 6, "partial")


def test_removing_a_name_takes_the_states_inside_its_prefix_along(bank: PrefixBank) -> None:
    model = FakeModel(bank, layout=HYBRID)
    stored = model.store(range(1, 13), ends=[2, 6, 12])
    model.session.name_prefix(PrefixRecord("one", model.namespace.id, stored.last_key, 12, False, "0" * 64, 1))
    plan = bank.remove("one", dry_run=True)
    assert bank.remove("one") == plan
    assert bank.chunks() == []
