"""A lent cache is taken back only if its prefix is surely what it was."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import trim_prompt_cache

from prefixbank import PrefixBank
from prefixbank.kvcache.capture import leaf_caches
from tests.model.memory.users import (
    PROMPTS,
    SHARED,
    goes_on_right,
    kept,
)
from tests.model.tiny import CONFIGS, build_model, random_ids


def refill(llm: Any, prompt_cache: list[Any], n_left: int, token_ids: list[int]) -> None:
    """Cut a cache to `n_left` tokens, as mlx-lm does, and fill it with others."""
    trim_prompt_cache(prompt_cache, prompt_cache_length(prompt_cache) - n_left)
    llm.model(mx.array(token_ids)[None], cache=prompt_cache)


def prompt_cache_length(prompt_cache: list[Any]) -> int:
    return int(next(leaf_caches(prompt_cache)).offset)


def assert_no_length_is_spoilt(llm: Any) -> None:
    """Compare prompts that part from the prefix at each length: any row that is another token's shows."""
    for n_shared in (*range(15, 50, 5), 50):
        prompt = SHARED[:n_shared] + random_ids(3, seed=n_shared)
        goes_on_right(llm, prompt, llm.resolve(prompt))


@pytest.mark.parametrize("n_new", [30, 40])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_lease_that_was_filled_with_other_tokens_is_not_taken_back(
    name: str, n_new: int, models: dict[str, Any], tokenizer: Any, bank: PrefixBank
) -> None:
    llm = bank.attach(models[name], tokenizer)
    llm.warm(SHARED)
    with llm.checkout(PROMPTS[0]) as lease:
        refill(llm, lease.prompt_cache, 20, random_ids(n_new, seed=9))
    assert kept(bank) == []
    assert_no_length_is_spoilt(llm)


@pytest.mark.parametrize("n_new", [1, 10, 29])
def test_lease_that_was_filled_with_fewer_other_tokens_is_not_taken_back(
    n_new: int, llm: Any, bank: PrefixBank
) -> None:
    llm.warm(SHARED)
    with llm.checkout(PROMPTS[0]) as lease:
        refill(llm, lease.prompt_cache, 20, random_ids(n_new, seed=9))
    assert all(n_tokens <= 20 for n_tokens in kept(bank))
    assert_no_length_is_spoilt(llm)


def test_lease_of_a_cache_with_empty_values_that_was_filled_with_other_tokens_is_not_taken_back(
    models: dict[str, Any], tokenizer: Any, bank: PrefixBank
) -> None:
    llm = bank.attach(models["deepseek_v32"], tokenizer)
    llm.warm(SHARED)
    with llm.checkout(PROMPTS[0]) as lease:
        refill(llm, lease.prompt_cache, 20, random_ids(30, seed=9))
    assert_no_length_is_spoilt(llm)


def test_lease_of_a_model_of_one_layer_that_was_filled_with_other_tokens_is_not_taken_back(
    bank: PrefixBank, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "one layer", {**CONFIGS["llama"], "num_hidden_layers": 1})
    llm = bank.attach(build_model("one layer"), tokenizer)
    llm.warm(SHARED)
    with llm.checkout(PROMPTS[0]) as lease:
        refill(llm, lease.prompt_cache, 20, [*random_ids(29, seed=9), SHARED[-1]])
    assert_no_length_is_spoilt(llm)


def test_lease_that_is_used_after_its_block_spoils_nothing(llm: Any) -> None:
    llm.warm(SHARED)
    with llm.checkout(PROMPTS[0]) as lease:
        pass
    refill(llm, lease.prompt_cache, 20, random_ids(30, seed=9))
    assert_no_length_is_spoilt(llm)


@pytest.mark.parametrize("n_left", [0, 1, 20, 49])
def test_lease_that_was_only_cut_is_kept_as_far_as_it_goes(llm: Any, bank: PrefixBank, n_left: int) -> None:
    llm.warm(SHARED)
    with llm.checkout(PROMPTS[0]) as lease:
        trim_prompt_cache(lease.prompt_cache, 50 - n_left)
    assert all(n_tokens <= n_left for n_tokens in kept(bank))
    assert_no_length_is_spoilt(llm)


def test_lease_that_was_cut_and_filled_with_the_same_tokens_is_right(llm: Any) -> None:
    llm.warm(SHARED)
    with llm.checkout(PROMPTS[0]) as lease:
        refill(llm, lease.prompt_cache, 20, SHARED[20:])
    assert_no_length_is_spoilt(llm)


def test_lease_whose_layers_do_not_agree_is_not_taken_back(llm: Any, bank: PrefixBank) -> None:
    llm.warm(SHARED)
    with llm.checkout(PROMPTS[0]) as lease:
        rows = lease.prompt_cache[1].keys[..., :3, :]
        lease.prompt_cache[1].update_and_fetch(mx.ones_like(rows), mx.ones_like(rows))
    assert kept(bank) == []
    assert_no_length_is_spoilt(llm)
