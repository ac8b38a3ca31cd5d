"""Ask with other token ids that have the very key of stored ones: real second preimages of xxh3_128."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import chunk_key, pack_token_ids, root_key
from tests.fakekv import FakeModel
from tests.fault.preimages import second_preimage

N_CHUNK = 256
N_VOCABULARY = 49152
"""SmolLM2's: the forged ids are below it."""


@pytest.fixture(scope="module")
def forged() -> tuple[list[int], list[int]]:
    """Give a chunk, the first of the model `fake`, and another one with the same key."""
    choose = random.Random(8)
    token_ids = [choose.randrange(N_VOCABULARY) for _ in range(N_CHUNK)]
    parent = root_key(hashlib.sha256(b"fake").hexdigest(), b"")
    other = second_preimage(parent, token_ids)
    assert other != token_ids
    assert max(other) < N_VOCABULARY
    assert chunk_key(parent, pack_token_ids(token_ids)) == chunk_key(parent, pack_token_ids(other))
    return token_ids, other


def n_common(left: list[int], right: list[int]) -> int:
    return next(at for at, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)


@pytest.fixture
def model(tmp_path: Path) -> FakeModel:
    """Give a model whose bank has chunks of the default length; it closes with the test's process."""
    return FakeModel(PrefixBank.open(tmp_path / "bank", durability="fast", verify="always"))


def test_a_prompt_with_a_forged_key_gets_the_rows_of_its_own_tokens_only(
    model: FakeModel, forged: tuple[list[int], list[int]]
) -> None:
    mine, theirs = forged
    behind = list(range(300))
    model.store([*mine, *behind])
    found = model.resolve([*theirs, *behind])  # asserts that the rows are those of the tokens asked for, up to its end
    assert found.n_tokens == n_common(mine, theirs)
    assert model.resolve([*mine, *behind]).n_tokens == N_CHUNK + 300
    model.bank.close()


@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")
def test_a_prefix_whose_key_is_taken_is_refused_and_harms_nothing(
    model: FakeModel, forged: tuple[list[int], list[int]]
) -> None:
    mine, theirs = forged
    model.store([*mine, 1, 2, 3])
    stored = model.store([*theirs, 4, 5, 6])
    assert stored.n_tokens < N_CHUNK
    assert "another prefix's" in stored.refused
    assert model.resolve([*mine, 1, 2, 3]).n_tokens == N_CHUNK + 3
    assert model.resolve([*theirs, 1, 2, 3]).n_tokens <= n_common(mine, theirs)
    assert model.bank.check(read_data=True).ok
    model.bank.close()


@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")
def test_what_stands_on_a_forged_chunk_is_not_found_behind_the_other(
    model: FakeModel, forged: tuple[list[int], list[int]]
) -> None:
    """All chunks behind both have the same keys: they were computed behind the one that is stored."""
    mine, theirs = forged
    behind = [7] * (2 * N_CHUNK)
    model.store([*mine, *behind])
    for _ in range(2):
        assert model.resolve([*theirs, *behind]).n_tokens == n_common(mine, theirs)
        model.store([*theirs, *behind])
    model.bank.prune(max_bytes=0)
    assert model.store([*theirs, *behind]).n_tokens == 3 * N_CHUNK
    assert model.resolve([*theirs, *behind]).n_tokens == 3 * N_CHUNK
    assert model.resolve([*mine, *behind]).n_tokens == n_common(mine, theirs)
    model.bank.close()
