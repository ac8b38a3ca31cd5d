"""Hold a match of a model with states to its end: at states of that very prefix, never where only rows are."""

from __future__ import annotations

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids
from prefixbank.layout import CacheLayout
from tests.fakekv import HYBRID, STATES_ONLY, FakeModel
from tests.unit.states.looking import SHOTS, assert_in_order, kept, row_of, said


def test_a_match_ends_at_states_and_never_where_only_rows_are(hybrid: FakeModel) -> None:
    stored = hybrid.store(SHOTS, ends=[2, 6, 8])
    assert (stored.n_tokens, stored.refused) == (12, "")
    assert said(hybrid, [99, *SHOTS]) == (0, 0, "none")
    assert said(hybrid, SHOTS[:1]) == (0, 1, "no-state")
    assert said(hybrid, SHOTS[:2]) == (2, 2, "all")
    assert said(hybrid, SHOTS[:5]) == (2, 5, "no-state")
    assert said(hybrid, SHOTS[:6]) == (6, 6, "all")
    assert said(hybrid, SHOTS[:7]) == (6, 7, "no-state")
    assert said(hybrid, [*SHOTS[:6], 99]) == (6, 6, "partial")
    assert said(hybrid, [*SHOTS[:7], 99]) == (6, 7, "no-state")
    assert said(hybrid, [*SHOTS[:2], 99]) == (2, 2, "partial")
    assert said(hybrid, SHOTS) == (8, 12, "no-state")
    assert said(hybrid, [*SHOTS, 99]) == (8, 12, "no-state")


@pytest.mark.parametrize("n_same", range(1, 8))
def test_states_behind_a_chunk_that_the_prompt_parts_in_are_not_its_own(hybrid: FakeModel, n_same: int) -> None:
    """The last chunk of a match may be used in part; what stands on it belongs to other token ids, equal or not."""
    hybrid.store(SHOTS, ends=[10, 12])
    prompt = [*SHOTS[:n_same], 99, *SHOTS[n_same + 1 :]]
    assert said(hybrid, prompt) == (0, n_same, "no-state")
    hybrid.store(SHOTS[:3], ends=[3])
    assert said(hybrid, prompt)[0] == (3 if n_same >= 3 else 0)


def test_the_limit_holds_for_states(hybrid: FakeModel) -> None:
    """The last token is always left to compute: states behind it are of no use."""
    hybrid.store(SHOTS[:8], ends=[6, 8])
    assert said(hybrid, SHOTS[:8], 7) == (6, 7, "no-state")
    assert said(hybrid, SHOTS[:6], 5) == (0, 5, "no-state")
    assert said(hybrid, SHOTS[:7], 6) == (6, 6, "all")
    assert said(hybrid, SHOTS[:7], 0) == (0, 0, "none")


def test_without_any_states_nothing_is_resumed(bank: PrefixBank, hybrid: FakeModel) -> None:
    assert hybrid.store(SHOTS[:8]).n_tokens == 8
    assert said(hybrid, SHOTS) == (0, 8, "no-state")
    assert kept(bank) == {(0, 4): False, (4, 8): False}


@pytest.mark.parametrize("layout", [HYBRID, STATES_ONLY], ids=["hybrid", "states only"])
def test_states_at_several_ends_of_one_chunk_and_at_chunk_ends(bank: PrefixBank, layout: CacheLayout) -> None:
    model = FakeModel(bank, layout=layout)
    stored = model.store(SHOTS[:11], ends=range(1, 12))
    assert (stored.n_tokens, stored.n_new_chunks, stored.refused) == (11, 11, "")
    assert stored.last_key == row_of(bank, 8, 11).key
    assert set(kept(bank).values()) == {True}
    for n_tokens in range(1, 12):
        assert said(model, SHOTS[:n_tokens]) == (n_tokens, n_tokens, "all")
    again = model.source(SHOTS[:11])
    again.ends = range(1, 12)
    assert model.session.store(model.namespace, pack_token_ids(SHOTS[:11]), again).n_new_chunks == 0
    assert again.n_asked == 0
    assert_in_order(bank)


def test_states_beyond_what_is_stored_are_left_out(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS[:6], ends=[0, 6])
    source = hybrid.source(SHOTS)
    source.ends = [0, 3, 9]
    assert hybrid.session.store(hybrid.namespace, pack_token_ids(SHOTS[:5]), source).refused == ""
    assert kept(bank) == {(0, 3): True, (0, 4): False, (4, 6): True}


def test_states_of_another_namespace_never_match(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS, ends=[2, 6, 12])
    for other in (
        FakeModel(bank, "hybrid", salt=b"tenant", layout=HYBRID),
        FakeModel(bank, "other", layout=HYBRID),
    ):
        assert said(other, SHOTS) == (0, 0, "none")
        other.store(SHOTS, b"B", ends=[3])
        assert other.resolve(SHOTS, [b"B"]).n_tokens == 3
        assert other.resolve(SHOTS[:2], [b"B"]).n_tokens == 0
    assert said(hybrid, SHOTS) == (12, 12, "all")
    assert said(hybrid, SHOTS[:3]) == (2, 3, "no-state")


def test_states_are_found_among_more_siblings_than_are_compared(
    hybrid: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixbank.resolver.MAX_CANDIDATES", 2)
    hybrid.store([1, 2, 3], ends=[3])
    for last in range(5):
        hybrid.store([1, 50 + last], ends=[2])
    n_tokens, n_known, _ = said(hybrid, [1, 2, 3, 4])
    assert n_tokens == 3
    assert n_known >= n_tokens
