"""Quantised KV: a hit equals what the same settings give, and what is not quantised yet is kept as it is."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import batch_generate, generate
from mlx_lm.models import llama

from prefixbank import ConfigError, PrefixBank
from prefixbank.kvcache.capture import describe
from tests.model.test_kinds import go_on, same_bits
from tests.model.tiny import build_model, random_ids

SETTINGS = {"kv_bits": 8, "kv_group_size": 32}


@pytest.fixture(scope="module")
def model() -> Any:
    """A llama with heads of 32: groups of the quantisation must fit into them."""
    mx.random.seed(0)
    args = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 320, "head_dim": 32}
    made = llama.Model(
        llama.ModelArgs(model_type="llama", num_attention_heads=2, num_key_value_heads=2, rms_norm_eps=1e-5, **args)
    )
    mx.eval(made.parameters())
    return made


@pytest.mark.parametrize("start", [0, 20, 32, 33])
@pytest.mark.parametrize("boundary", [16, 19, 20, 21, 31, 32, 33, 34, 48, 61])
def test_restored_cache_goes_on_bit_for_bit_as_the_live_one(
    start: int, boundary: int, model: Any, tokenizer: Any, small_bank: PrefixBank
) -> None:
    llm = small_bank.attach(model, tokenizer, prefill_step_size=16, quantized_kv_start=start, **SETTINGS)
    token_ids = random_ids(boundary)
    live = llm.prefill([*token_ids, 1])
    hit = llm.resolve([*token_ids, 7])
    assert hit.cached_tokens == boundary
    is_quantised = type(hit.prompt_cache[0]).__name__ == "QuantizedKVCache"
    assert is_quantised == (boundary >= start)
    assert describe(hit.prompt_cache) == describe(live.prompt_cache)
    assert same_bits(go_on(model, hit.prompt_cache, [7]), go_on(model, live.prompt_cache, [7]))


def test_prefixes_below_the_start_are_shared_with_the_model_unquantised(
    model: Any, tokenizer: Any, small_bank: PrefixBank
) -> None:
    plain = small_bank.attach(model, tokenizer)
    later = small_bank.attach(model, tokenizer, quantized_kv_start=40, **SETTINGS)
    plain.warm(random_ids(30))
    assert later.match([*random_ids(30), 1]).n_tokens == 30
    later.warm(random_ids(60))
    assert later.match([*random_ids(60), 1]).n_tokens == 60
    assert plain.match([*random_ids(60), 1]).n_tokens == 30
    # What parts below the start goes on from what is not quantised yet.
    assert later.match([*random_ids(35), 5, 6]).n_tokens == 30


@pytest.mark.parametrize("start", [0, 40])
def test_generate_stores_and_hits_on_both_sides_of_the_start(
    start: int, model: Any, tokenizer: Any, small_bank: PrefixBank
) -> None:
    llm = small_bank.attach(model, tokenizer, quantized_kv_start=start, **SETTINGS)
    for n_tokens, n_stored in ((36, 32), (70, 64)):
        prompt = random_ids(n_tokens, seed=n_tokens)
        cold = generate(model, tokenizer, prompt, max_tokens=10, quantized_kv_start=start, **SETTINGS)
        results = [llm.generate(prompt, max_tokens=10) for _ in range(3)]
        assert [result.text for result in results] == [cold] * 3
        assert [result.cached_tokens for result in results] == [0, n_stored, n_stored]


def test_quantised_later_needs_caches_that_can_be(tokenizer: Any, small_bank: PrefixBank) -> None:
    with pytest.raises(ConfigError, match="leave quantized_kv_start at 0"):
        small_bank.attach(build_model("falcon_h1"), tokenizer, kv_bits=8, kv_group_size=32, quantized_kv_start=9)
    with pytest.raises(ConfigError, match="can't be quantised so"):  # mlx-lm has no quantised windows
        small_bank.attach(build_model("gemma3_text"), tokenizer, kv_bits=8, kv_group_size=32)
    with pytest.raises(ConfigError, match="can't be quantised so"):  # heads of 8 hold no group of 64
        small_bank.attach(build_model("llama"), tokenizer, kv_bits=8, kv_group_size=64)


def test_batches_of_quantised_caches_are_refused_clearly(model: Any, tokenizer: Any, small_bank: PrefixBank) -> None:
    llm = small_bank.attach(model, tokenizer, **SETTINGS)
    llm.warm(random_ids(20))
    resolved = [llm.resolve([*random_ids(20), 1, 2]) for _ in range(2)]
    with pytest.raises(ValueError, match="does not yet support batching with history"):
        batch_generate(model, tokenizer, [r.rest for r in resolved], prompt_caches=[r.prompt_cache for r in resolved])
