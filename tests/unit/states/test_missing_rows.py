"""Hold stores whose source lacks rows to stopping there, and to taking nothing away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids, unpack_token_ids
from prefixbank.storing import Stored
from tests.fakekv import FakeModel
from tests.unit.states.looking import SHOTS, kept, row_of, said


def store_known(model: FakeModel, token_ids: list[int], n_known: int, ends: Sequence[int] = ()) -> Stored:
    source = replace(model.source(token_ids), n_known=n_known, ends=ends)
    stored: Stored = model.session.store(model.namespace, pack_token_ids(token_ids), source)
    return stored


@pytest.mark.parametrize(("n_known", "n_stored"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (10, 8), (11, 11)])
def test_a_source_that_lacks_rows_stores_up_to_there(
    bank: PrefixBank, model: FakeModel, n_known: int, n_stored: int
) -> None:
    stored = store_known(model, SHOTS[:11], n_known)
    assert (stored.n_tokens, stored.refused) == (n_stored, "")
    assert model.resolve(SHOTS).n_tokens == n_stored
    assert bank.stats().session.get("refused_stores", 0) == 0


def test_a_source_that_lacks_rows_goes_on_from_what_is_there(bank: PrefixBank, model: FakeModel) -> None:
    model.store(SHOTS[:8])
    stored = store_known(model, SHOTS, 0)
    assert (stored.n_tokens, stored.n_new_chunks, stored.refused) == (8, 0, "")


def test_states_without_their_rows_are_not_stored(bank: PrefixBank, hybrid: FakeModel) -> None:
    stored = store_known(hybrid, SHOTS, 6, ends=[5, 6, 7, 8, 12])
    assert (stored.n_tokens, stored.refused, stored.last_key) == (6, "", row_of(bank, 4, 6).key)
    assert kept(bank) == {(0, 4): False, (4, 5): True, (4, 6): True}
    assert said(hybrid, SHOTS) == (6, 6, "partial")


def test_a_chunk_keeps_its_rows_where_the_states_come_without_any(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS)
    stored = store_known(hybrid, SHOTS, 0, ends=[4])
    assert (stored.n_tokens, stored.refused) == (12, "")
    assert said(hybrid, SHOTS) == (0, 12, "no-state")
    assert {tuple(unpack_token_ids(r.token_ids)) for r in bank.chunks()} == {
        (1, 2, 3, 4),
        (5, 6, 7, 8),
        (9, 10, 11, 12),
    }
