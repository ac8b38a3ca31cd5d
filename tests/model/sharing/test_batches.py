"""Batches that share rows give the answers that prompts get one at a time, for each kind of cache, and say so."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base
from mlx_lm.models import llama as llama_module
from mlx_lm.models.cache import KVCache

from prefixbank import ConfigError, PrefixBank
from prefixbank.batching import can_batch
from prefixbank.kvcache import sharing
from prefixbank.kvcache.probe import CacheOptions
from prefixbank.kvcache.sharedattention import shared_attention
from prefixbank.kvcache.sharedrows import SharedBatchKVCache
from prefixbank.kvcache.sharing import Sharing
from tests.model.manyprompts import ablations, answers, as_completed, cold, mixed, n_unique, oddities, seen
from tests.model.tiny import CONFIGS, build_model, random_ids

LEAVES = {
    "llama": {0, 1},
    "llama_sliding": {0},
    "gemma3_text": {2},
    "gpt_oss": {1},
    "qwen3_next": {1},
    "falcon_h1": {1, 3},
    "deepseek_v3": set(),
    "deepseek_v32": set(),
    "llama4": set(),
    "mamba2": set(),
}
"""Which caches share: those of full attention that reads what the cache gives, not latent attention's."""
SHARING = [name for name, leaves in LEAVES.items() if leaves]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: build_model(name) for name in CONFIGS}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_share_whose_attention_is_over_what_the_cache_gave(name: str, models: dict[str, Any]) -> None:
    assert Sharing(models[name], CacheOptions()).leaves == LEAVES[name]


@pytest.mark.parametrize("prompts", [ablations, mixed, oddities])
@pytest.mark.parametrize("name", SHARING)
def test_answers_are_those_of_one_prompt_at_a_time(
    name: str, prompts: Any, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    """Three at a time, of unequal lengths and ends, so that all the while some leave and others join."""
    llm = small_bank.attach(models[name], tokenizer)
    given = prompts()
    results = answers(llm, given, max_tokens=10, batch_size=3, shared_attention="always")
    assert seen(results) == [cold(llm, prompt, max_tokens=10) for prompt in given]
    assert sum(result.shared_tokens > 0 for result in results) >= len(given) // 2
    assert sum(result.computed_tokens for result in results) <= n_unique(llm, given) * 1.01 + len(given)
    again = answers(llm, given, max_tokens=10, batch_size=16, shared_attention="always")
    assert seen(again) == seen(results)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_members_that_the_bank_has_more_of_keep_it_as_their_own(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    llm = small_bank.attach(models[name], tokenizer)
    shared = random_ids(40)
    prompts = [shared + random_ids(35 + n, seed=n) for n in range(5)]
    for prompt in prompts[:3]:
        llm.warm(prompt[:-1])
    results = answers(llm, prompts, max_tokens=6, batch_size=4, shared_attention="always")
    assert [result.shared_tokens for result in results] == [40] * 5
    assert [result.computed_tokens for result in results if result.index < 3] == [1] * 3
    assert seen(results) == [cold(llm, prompt, max_tokens=6) for prompt in prompts]


def test_rows_are_held_once(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first level is the very buffer that the prefix was computed into."""
    merged: list[list[SharedBatchKVCache]] = []
    merge = SharedBatchKVCache.merge.__func__  # type: ignore[attr-defined]

    def noted(cls: Any, caches: Any) -> Any:
        made = merge(cls, caches)
        merged.append(made)
        return made

    monkeypatch.setattr(SharedBatchKVCache, "merge", classmethod(noted))
    _ = llm._caches.sharing  # tries a batch out
    merged.clear()
    shared = random_ids(300)
    prompts = [shared + random_ids(4, seed=n) for n in range(6)]
    answers(llm, prompts, max_tokens=3, batch_size=6, shared_attention="always")
    rows = {id(chain[0]) for batch in merged for chain in batch.chains}
    assert len(merged) == 2  # a layer each
    assert len(rows) == 2
    for batch in merged:
        assert [chain[0].n_tokens for chain in batch.chains] == [300] * 6
        assert batch.keys.shape[2] == 256  # room for the own rows, in mlx-lm's steps


def test_levels_follow_the_prompts_trie(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    depths: set[tuple[int, ...]] = set()
    levels = SharedBatchKVCache.levels.fget  # type: ignore[attr-defined]

    def noted(self: SharedBatchKVCache) -> Any:
        depths.add(tuple(len(spans) for spans in levels(self)))
        return levels(self)

    monkeypatch.setattr(SharedBatchKVCache, "levels", property(noted))
    head = random_ids(50)
    groups = [head + random_ids(30, seed=40 + n) for n in range(2)]
    prompts = [group + random_ids(5, seed=10 * at + n) for at, group in enumerate(groups) for n in range(3)]
    results = answers(llm, prompts, max_tokens=4, batch_size=6, shared_attention="always")
    assert [result.shared_tokens for result in results] == [80] * 6
    assert (1, 2) in depths  # one run for all, two for three each


def test_samplers_and_processors_see_what_they_do_without(llm: Any) -> None:
    contexts: dict[str, list[list[int]]] = {}
    for mode in ("off", "always"):
        heard: list[list[int]] = []

        def processor(tokens: Any, logits: mx.array, heard: list[list[int]] = heard) -> mx.array:
            heard.append([int(token) for token in tokens])
            return logits * 0.5

        options = {"max_tokens": 4, "logits_processors": [processor], "batch_size": 4, "shared_attention": mode}
        results = answers(llm, mixed(), **options)
        contexts[mode] = sorted(heard)
        assert seen(results) == [cold(llm, p, max_tokens=4, logits_processors=[processor]) for p in mixed()]
    assert contexts["off"] == contexts["always"]


# --- where it does not apply


def test_stats_and_results_say_what_was_shared(llm: Any, small_bank: PrefixBank) -> None:
    answers(llm, ablations(), max_tokens=2, shared_attention="always")
    counts = small_bank.stats().session
    assert (counts["shared_prefixes"], counts.get("merged_prefixes", 0)) == (12, 0)
    results = answers(llm, ablations(), max_tokens=2, shared_attention="off")
    counts = small_bank.stats().session
    assert (counts["shared_prefixes"], counts["merged_prefixes"]) == (12, 12)
    assert {result.shared_tokens for result in results} == {0}


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(SHARING)))
def test_models_without_layers_that_share_are_merged(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    llm = small_bank.attach(models[name], tokenizer)
    results = answers(llm, mixed(), max_tokens=4, shared_attention="always")
    assert seen(results) == [cold(llm, prompt, max_tokens=4) for prompt in mixed()]
    assert {result.shared_tokens for result in results} == {0}
    assert can_batch(llm._caches) == (small_bank.stats().session.get("merged_prefixes", 0) == 9)


class OwnAttention(nn.Module):
    """A llama whose attention is not what its class's module says, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = build_model("llama")
        self.layers = self.inner.layers
        self.way = way

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        real = llama_module.scaled_dot_product_attention

        def other(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
            if self.way == "keys":
                keys = keys * 2
            elif self.way == "mask" and options["mask"] is not None and not isinstance(options["mask"], str):
                options["mask"] = mx.where(options["mask"], 0.0, -1e9)
            elif self.way == "past the hook":
                options.pop("cache")
                return mx.fast.scaled_dot_product_attention(queries, keys, values, **options)
            return real(queries, keys, values, **options)

        llama_module.scaled_dot_product_attention = other
        try:
            return self.inner(inputs, cache=cache)
        finally:
            llama_module.scaled_dot_product_attention = real


@pytest.mark.parametrize("way", ["keys", "mask", "past the hook"])
def test_attention_of_another_kind_is_not_shared(way: str) -> None:
    assert Sharing(OwnAttention(way), CacheOptions()).leaves == frozenset()


def test_full_cache_with_a_windowed_mask_is_not_shared() -> None:
    model = build_model("llama_sliding")
    model.make_cache = lambda: [KVCache(), KVCache()]
    assert Sharing(model, CacheOptions()).leaves == {0}


def test_layer_whose_shared_answer_differs_is_not_shared(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = sys.modules[shared_attention.__module__].attend
    monkeypatch.setattr(sys.modules[shared_attention.__module__], "attend", lambda *given: attend(*given) * 1.5)
    assert Sharing(llama, CacheOptions()).leaves == frozenset()


# --- the choice


def pays_from(n_least: int | None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    asked: list[tuple[int, int, int]] = []

    def is_faster(self: Sharing, n_sequences: int, n_steps: int, n_tokens: int) -> bool:
        asked.append((n_sequences, n_steps, n_tokens))
        return n_least is not None and n_tokens >= n_least

    monkeypatch.setattr(Sharing, "_is_faster", is_faster)
    return asked


def prompts_sharing(*lengths: int) -> list[list[int]]:
    return [random_ids(n, seed=n) + random_ids(5, seed=100 * n + at) for n in lengths for at in range(6)]


@pytest.mark.parametrize(("n_least", "expected"), [(32, {63, 100}), (64, {100}), (128, set()), (None, set())])
def test_prefixes_are_shared_from_the_length_on_that_was_measured(
    n_least: int | None, expected: set[int], llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pays_from(n_least, monkeypatch)
    results = answers(llm, prompts_sharing(63, 100), max_tokens=9, batch_size=6)
    assert {result.shared_tokens for result in results} - {0} == expected
    assert {measured[:2] for measured in asked} == {(4, 8)}  # rounded down, and measured once
    assert len(asked) == len(set(asked))


def test_runs_deeper_in_the_trie_are_weighed_by_what_they_add(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pays_from(32, monkeypatch)
    head = random_ids(63)
    groups = [head + random_ids(n_more, seed=n_more) for n_more in (20, 40)]
    prompts = [group + random_ids(5, seed=10 * at + n) for at, group in enumerate(groups) for n in range(4)]
    results = answers(llm, prompts, max_tokens=2, batch_size=8)
    assert [result.shared_tokens for result in results] == [63] * 4 + [103] * 4


def test_one_at_a_time_is_never_shared(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pays_from(1, monkeypatch)
    results = answers(llm, prompts_sharing(63), max_tokens=2, batch_size=1)
    assert ({result.shared_tokens for result in results}, asked) == ({0}, [])


def test_measuring_says_what_is_faster(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Sharing(llama, CacheOptions())
    for seconds, expected in (
        ([0.0, 2.0, 1.0], True),
        ([0.0, 1.0, 1.0], True),
        ([0.0, 1.0, 1.1], False),
        ([1.0, 1.0, 1.1], True),  # merging costs a second, which counts for eight steps
        ([1.0, 1.0, 1.2], False),
    ):
        left = list(seconds)

        def timed(run: Any, left: list[float] = left) -> float:
            mx.eval(run())  # what is timed works
            return left.pop(0)

        monkeypatch.setattr(sharing, "_least_seconds", timed)
        assert made._is_faster(4, 8, 64) is expected


def test_unknown_choices_are_refused(llm: Any) -> None:
    with pytest.raises(ConfigError, match="shared_attention='on' is unknown"):
        answers(llm, mixed(), shared_attention="on")


# --- the hook


def hooked(model: Any = llama_module) -> bool:
    return model.scaled_dot_product_attention is not base.scaled_dot_product_attention


def test_attention_is_hooked_only_while_a_batch_steps(llm: Any) -> None:
    assert not hooked()
    running = as_completed(llm, mixed(), max_tokens=4, batch_size=3, shared_attention="always")
    for _ in running:
        assert not hooked()
    assert not hooked()


def test_hook_goes_when_a_step_fails(llm: Any) -> None:
    def failing(logits: mx.array) -> mx.array:
        assert hooked()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        answers(llm, mixed(), max_tokens=4, sampler=failing, batch_size=3, shared_attention="always")
    assert not hooked()


def test_hook_stays_until_its_last_user_leaves(llama: Any) -> None:
    with shared_attention(llama):
        with shared_attention(build_model("llama", seed=3)):
            assert hooked()
        assert hooked()
    assert not hooked()


def test_other_models_and_threads_see_nothing_of_it(llama: Any, tokenizer: Any, small_bank: PrefixBank) -> None:
    llm, other = small_bank.attach(llama, tokenizer), build_model("llama", seed=5)
    stranger = small_bank.attach(build_model("llama", seed=6), tokenizer)
    expected = [cold(llm, prompt, max_tokens=8) for prompt in mixed()]
    token_ids = mx.array(random_ids(50))[None]
    plain = other(token_ids)
    theirs = [cold(stranger, prompt, max_tokens=8) for prompt in mixed()]
    mx.eval(plain)
    wrong: list[str] = []

    def share(whose: Any, right: Sequence[Any]) -> None:
        for _ in range(3):
            if seen(answers(whose, mixed(), max_tokens=8, batch_size=4, shared_attention="always")) != right:
                wrong.append("shared")

    def run_alone() -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            for _ in range(30):
                if not mx.array_equal(other(token_ids), plain).item():
                    wrong.append("alone")

    threads = [
        threading.Thread(target=share, args=(stranger, theirs)),
        threading.Thread(target=run_alone),
    ]
    for thread in threads:
        thread.start()
    share(llm, expected)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not hooked()
