"""Hold tails with states to staying beside longer siblings, and those without to being of no use."""

from __future__ import annotations

from prefixbank.bank import PrefixBank
from tests.fakekv import FakeModel
from tests.unit.states.looking import SHOTS, assert_in_order, kept, row_of


def test_a_tail_without_states_is_of_no_use_and_not_stored(bank: PrefixBank, hybrid: FakeModel) -> None:
    """Nothing is refused: it was not wanted."""
    stored = hybrid.store(SHOTS[:7], ends=[4])
    assert (stored.n_tokens, stored.refused) == (4, "")
    stored = hybrid.store(SHOTS[:7], ends=[6])
    assert (stored.n_tokens, stored.refused, stored.last_key) == (6, "", row_of(bank, 4, 6).key)
    assert hybrid.store(SHOTS[:3]).n_tokens == 0
    assert kept(bank) == {(0, 4): True, (4, 6): True}


def test_a_longer_sibling_does_not_supersede_a_tail_with_states(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.name("short", SHOTS[:2], ends=[2])
    hybrid.store(SHOTS[:3], ends=[3])
    hybrid.store(SHOTS[:8], ends=[8])
    assert kept(bank) == {(0, 2): True, (0, 3): True, (0, 4): False, (4, 8): True}
    assert hybrid.held(SHOTS[:2], SHOTS[:3], SHOTS[:4], SHOTS) == [2, 3, 3, 8]
    (short,) = bank.prefixes("short")
    assert short.chunk_key == row_of(bank, 0, 2).key
    assert_in_order(bank)


def test_a_longer_sibling_does_not_cover_a_tail_with_states(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS[:8], ends=[8])
    stored = hybrid.store(SHOTS[:6], ends=[6])
    assert (stored.n_tokens, stored.n_new_chunks, stored.last_key) == (6, 1, row_of(bank, 4, 6).key)
    assert hybrid.store(SHOTS[:5], ends=[5]).n_new_chunks == 1  # nor does another tail
    assert hybrid.held(SHOTS[:5], SHOTS[:6], SHOTS[:7], SHOTS) == [5, 6, 6, 8]


def test_rows_alone_still_supersede_and_cover(bank: PrefixBank, model: FakeModel, hybrid: FakeModel) -> None:
    """States of one model change nothing for another in the same bank."""
    hybrid.store(SHOTS[:3], ends=[3])
    model.store(SHOTS[:3])
    model.store(SHOTS[:4])
    assert model.store(SHOTS[:2]).n_new_chunks == 0
    own = [r for r in bank.chunks() if r.namespace_id == model.namespace.id]
    assert [(r.start, r.end) for r in own] == [(0, 4)]
    assert model.match(SHOTS).n_known_tokens == model.match(SHOTS).n_tokens == 4
