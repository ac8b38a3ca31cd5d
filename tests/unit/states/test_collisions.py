"""Hold states to exactness where keys collide: a miss or the right ones, never another prefix's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from prefixbank import chunking
from prefixbank.bank import PrefixBank
from prefixbank.index import chunk_rows
from prefixbank.layout import CacheLayout
from tests.fakekv import HYBRID, STATES_ONLY, FakeModel
from tests.unit.states.looking import assert_in_order, said


@pytest.fixture
def quiet_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefixBank]:
    """Give a bank; the check must find it in order although keys collide."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4, durability="fast") as bank:
        yield bank
        assert_in_order(bank)


def constant(_data: bytes) -> bytes:
    return b"K" * 16


def eight_bits(data: bytes) -> bytes:
    return (xxhash.xxh3_64_intdigest(data) & 0xFF).to_bytes(16, "big")


def test_a_colliding_tail_never_gives_its_states_away(quiet_bank: PrefixBank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "_hash128", constant)
    hybrid = FakeModel(quiet_bank, "hybrid", layout=HYBRID)
    hybrid.store([1, 2], ends=[2])
    with pytest.warns(match="another prefix's"):
        stored = hybrid.store([1, 3], b"B", ends=[2])
    assert (stored.n_tokens, stored.last_key) == (0, None)
    assert hybrid.store([1, 2], b"B", ends=[2]).n_new_chunks == 0
    assert hybrid.store([7, 8, 9], b"B", ends=[3]).refused
    assert said(hybrid, [1, 2, 3]) == (2, 2, "partial")
    assert said(hybrid, [1, 3]) == (0, 1, "no-state")
    assert said(hybrid, [7, 8, 9]) == (0, 0, "none")
    with quiet_bank._session.index.reading() as tx:
        assert len(chunk_rows.list_all(tx)) == 1


@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")
@pytest.mark.parametrize("poor", [constant, eight_bits], ids=["0", "8"])
@pytest.mark.parametrize("layout", [HYBRID, STATES_ONLY], ids=["hybrid", "states only"])
def test_colliding_keys_give_a_miss_or_the_right_states(
    quiet_bank: PrefixBank, monkeypatch: pytest.MonkeyPatch, poor: Any, layout: CacheLayout
) -> None:
    monkeypatch.setattr(chunking, "_hash128", poor)
    model, other = (FakeModel(quiet_bank, label, layout=layout) for label in ("model", "other"))
    n_found = 0
    for number in range(80):
        token_ids = [int(digit) % 2 for digit in f"{number * 7919:017b}"][-(number % 13 + 1) :]
        user, flavour = (model, b"A") if number % 3 else (other, b"B")
        ends = sorted({number % len(token_ids), len(token_ids)})
        stored = user.store(token_ids, flavour, ends=ends)
        if stored.n_tokens == len(token_ids):
            assert user.resolve(token_ids, [flavour]).n_tokens == len(token_ids)
        n_found += model.resolve([*token_ids, 0, 1], [b"A"]).n_tokens > 0  # reads, and compares the states
        n_found += other.resolve([*token_ids, 1, 0], [b"B"]).n_tokens > 0
    assert n_found
