"""Hold storing and matching to exactness where keys collide: a miss or the right chain, never a wrong row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from prefixbank import chunking
from prefixbank.bank import PrefixBank
from prefixbank.index import chunk_rows
from prefixbank.shards import ShardWriter
from tests.fakekv import FakeModel


def constant(_data: bytes) -> bytes:
    return b"K" * 16


def of_bits(n_bits: int) -> Any:
    def poor(data: bytes) -> bytes:
        return (xxhash.xxh3_64_intdigest(data) & ((1 << n_bits) - 1)).to_bytes(16, "big")

    return poor


@pytest.fixture
def quiet_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefixBank]:
    """Give a bank; the check must find it in order although keys collide."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4, durability="fast") as bank:
        yield bank
        assert bank.check(read_data=True).ok


def some_prompts(seed: int, n: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(3) for _ in range(choose.randrange(1, 18))] for _ in range(n)]


@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")
@pytest.mark.parametrize("poor", [constant, of_bits(1), of_bits(3), of_bits(8)], ids=["0", "1", "3", "8"])
def test_colliding_keys_give_a_miss_or_the_right_rows(
    quiet_bank: PrefixBank, monkeypatch: pytest.MonkeyPatch, poor: Any
) -> None:
    monkeypatch.setattr(chunking, "_hash128", poor)
    model, other = FakeModel(quiet_bank), FakeModel(quiet_bank, "other")
    prompts = some_prompts(1, 60)
    n_found = 0
    for number, token_ids in enumerate(prompts):
        user, flavour = (model, b"A") if number % 3 else (other, b"B")
        stored = user.store(token_ids, flavour)
        assert user.resolve(token_ids, [flavour]).n_tokens >= stored.n_tokens  # what was acknowledged is found
        for asked in (prompts[number // 2], [*token_ids, 0]):
            n_found += model.resolve(asked, [b"A"]).n_tokens > 0
            n_found += other.resolve(asked, [b"B"]).n_tokens > 0
    assert n_found
    quiet_bank.prune(max_bytes=5 * 4096)
    for token_ids in prompts:
        model.resolve(token_ids, [b"A"])
        other.resolve(token_ids, [b"B"])


def test_a_key_that_belongs_to_other_token_ids_ends_the_store(
    quiet_bank: PrefixBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "_hash128", constant)
    model = FakeModel(quiet_bank)
    assert model.store([1, 2, 3, 4]).n_tokens == 4
    with pytest.warns(match="another prefix's"):
        stored = model.store([5, 6, 7, 8, 9])
    assert (stored.n_tokens, stored.last_key, stored.n_new_chunks) == (0, None, 0)
    assert model.resolve([5, 6, 7, 8, 9]).n_tokens == 0
    assert model.resolve([1, 2, 3, 4, 5]).n_tokens == 4


def preimage(data: bytes) -> bytes:
    """Hash the chunks of token ids 8 to 15 as those of 0 to 7: a second preimage for each."""
    if len(data) == 32:
        ids = [token_id & 7 for token_id in chunking.unpack_token_ids(data[16:])]
        data = data[:16] + chunking.pack_token_ids(ids)
    return xxhash.xxh3_128_digest(data)


@pytest.mark.parametrize("n_shared", [0, 4], ids=["parent", "grandparent"])
def test_a_parent_that_is_swapped_for_a_collision_meanwhile_gets_no_child(
    quiet_bank: PrefixBank, monkeypatch: pytest.MonkeyPatch, n_shared: int
) -> None:
    """The chain was evicted and another one of the same keys stored while the child's shard was being written.

    With a child in it, the other chain would hold rows that were computed behind other token ids.
    """
    monkeypatch.setattr(chunking, "_hash128", preimage)
    model = FakeModel(quiet_bank)
    between = [2] * n_shared  # chunks that both chains have, behind the one that differs
    mine = [1, 2, 3, 4, *between]
    theirs = [9, 10, 11, 12, *between]
    model.store(mine)
    real_publish = ShardWriter.publish
    swapped = False

    def publish(self: ShardWriter) -> None:
        nonlocal swapped
        real_publish(self)
        if not swapped:
            swapped = True
            quiet_bank.prune(max_bytes=0)
            assert model.store(theirs).n_tokens == len(theirs)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "publish", publish)
        with pytest.warns(match="not stored whole"):
            stored = model.store([*mine, 5, 6, 7])
    assert swapped
    assert stored.n_tokens == 0
    assert model.resolve([*theirs, 5, 6, 7]).n_tokens == len(theirs)
    with model.session.index.reading() as tx:
        assert len(chunk_rows.list_all(tx)) == len(theirs) // 4
