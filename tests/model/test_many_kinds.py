"""Many prompts of models whose caches mlx-lm can't decode together: one by one, and the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from prefixbank import BankWarning, PrefixBank
from prefixbank.batching import can_batch
from tests.model.manyprompts import ablations, answers, cold, n_unique, seen
from tests.model.tiny import FROM_DISK


def test_quantised_caches_are_decoded_one_by_one(tokenizer: Any, small_bank: PrefixBank) -> None:
    from mlx_lm.models import llama

    mx.random.seed(0)
    args = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 320, "head_dim": 32}
    model = llama.Model(
        llama.ModelArgs(model_type="llama", num_attention_heads=2, num_key_value_heads=2, rms_norm_eps=1e-5, **args)
    )
    mx.eval(model.parameters())
    for start in (0, 40):
        settings = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
        llm = small_bank.attach(model, tokenizer, **settings)
        prompts = ablations()
        for _ in range(2):
            results = answers(llm, prompts, max_tokens=6)
            assert not any(result.batched for result in results)
            assert seen(results) == [cold(llm, prompt, max_tokens=6, **settings) for prompt in prompts]
            small_bank.flush()


def test_windows_that_keep_their_first_rows_are_decoded_one_by_one(llama: Any, tokenizer: Any, bank_root: Path) -> None:
    class Plain(nn.Module):
        """A model that brings no cache of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = llama
            self.layers = llama.layers

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return llama(inputs, cache=cache)

    with PrefixBank.open(bank_root, chunk_tokens=16, **FROM_DISK) as bank:
        llm = bank.attach(Plain(), tokenizer, max_kv_size=40)
        results = answers(llm, ablations(), max_tokens=6)
        assert not any(result.batched for result in results)
        assert seen(results) == [cold(llm, prompt, max_tokens=6, max_kv_size=40) for prompt in ablations()]


def test_states_with_empty_slots_are_decoded_one_by_one(llama: Any, tokenizer: Any, small_bank: PrefixBank) -> None:
    """mlx-lm's batches fail where they take such a cache out."""

    class Slots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama
            self.layers = llama.layers

        def make_cache(self) -> list[Any]:
            return [CacheList(KVCache(), ArraysCache(2)) for _ in self.layers]

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            for layer_cache in cache or ():
                layer_cache[1][0] = mx.zeros((inputs.shape[0], 1, 4))
            return llama(inputs, cache=None if cache is None else [layer_cache[0] for layer_cache in cache])

    llm = small_bank.attach(Slots(), tokenizer)
    results = answers(llm, ablations(), max_tokens=3)
    assert not any(result.batched for result in results)
    assert seen(results) == [cold(llm, prompt, max_tokens=3) for prompt in ablations()]


class _OwnCache(KVCache):
    """A cache class that no bank knows."""


def test_caches_that_the_bank_does_not_know_are_answered_all_the_same(
    llama: Any, tokenizer: Any, small_bank: PrefixBank
) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama
            self.layers = llama.layers

        def make_cache(self) -> list[Any]:
            return [_OwnCache() for _ in self.layers]

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return llama(inputs, cache=cache)

    with pytest.warns(BankWarning, match="_OwnCache"):
        llm = small_bank.attach(Own(), tokenizer)
    assert not can_batch(llm._caches)
    prompts = ablations()
    results = answers(llm, prompts, max_tokens=4)
    assert seen(results) == [cold(llm, prompt, max_tokens=4) for prompt in prompts]
    assert sum(result.computed_tokens for result in results) <= 1.01 * n_unique(llm, prompts) + len(prompts)
