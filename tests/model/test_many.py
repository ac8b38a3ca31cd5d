"""Answers to many prompts: what one cold generation at a time gives, each shared run computed once, and kept."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixbank import Example, FewShotPrompt, PrefixBank
from prefixbank.many import in_order
from prefixbank.triewalk import TrieWalk
from prefixbank.values import Match
from tests.model.manyprompts import (
    HEAD,
    NOT_BATCHED,
    SHOTS,
    ablations,
    answers,
    as_completed,
    cold,
    joined,
    mixed,
    n_unique,
    oddities,
    query,
    seen,
)
from tests.model.tiny import CONFIGS, FROM_DISK, build_model, build_tokenizer, random_ids


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: build_model(name) for name in CONFIGS}


# --- the same answers


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_one_cold_generation_at_a_time(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    llm = small_bank.attach(models[name], tokenizer)
    prompts = [*ablations(), *mixed(), *oddities()]
    random.Random(0).shuffle(prompts)
    wanted = [cold(llm, prompt, max_tokens=10) for prompt in prompts]
    first = answers(llm, prompts, max_tokens=10, batch_size=5)
    small_bank.flush()
    again = answers(llm, prompts, max_tokens=10, batch_size=3)
    assert seen(first) == seen(again) == wanted
    assert all(result.batched == (name not in NOT_BATCHED) for result in first)
    n_computed = sum(result.computed_tokens for result in first)
    assert n_computed <= 1.01 * n_unique(llm, prompts) + len(prompts)
    assert sum(result.computed_tokens for result in again) < n_computed  # shared runs come from the bank
    assert all(r.cached_tokens + r.computed_tokens == len(p) for r, p in zip(first, prompts, strict=True))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in NOT_BATCHED])
def test_long_answers_leave_windows_behind_in_batches(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    llm = small_bank.attach(models[name], tokenizer)
    prompts = [random_ids(n, seed=n) for n in (1, 23, 24, 25, 60)] + [HEAD + query(1), HEAD + query(2)]
    results = answers(llm, prompts, max_tokens=40, batch_size=4)
    assert all(result.batched for result in results)
    assert seen(results) == [cold(llm, prompt, max_tokens=40) for prompt in prompts]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_any_batch_size_gives_the_same_answers_in_input_order(batch_size: int, llm: Any) -> None:
    prompts = [*mixed(), *oddities()]
    results = answers(llm, prompts, max_tokens=6, batch_size=batch_size)
    assert [result.index for result in results] == list(range(len(prompts)))
    assert seen(results) == [cold(llm, prompt, max_tokens=6) for prompt in prompts]
    assert all(result.batched == (batch_size > 1) for result in results)
    assert all(result.ttft_s > 0 for result in results)


def test_texts_chats_and_rendered_shots_are_prompts_alike(llm: Any) -> None:
    shots = FewShotPrompt("Say whether it is good.", (Example("lovely", "good"), Example("broke", "bad")))
    chat = [{"role": "user", "content": "hello"}]
    prompts = [shots.render("great soup"), shots.render("a dull film"), "the lamp", chat, mx.array([1, 2, 3])]
    wanted = [cold(llm, llm.encode(prompt), max_tokens=5) for prompt in prompts]
    assert seen(answers(llm, iter(prompts), max_tokens=5)) == wanted


def test_answers_end_at_an_end_of_sequence_as_mlx_lm_ends_them(
    llama: Any, small_bank: PrefixBank, tokenizer: Any
) -> None:
    plain = small_bank.attach(llama, tokenizer)
    prompts = [HEAD + query(seed) for seed in range(8)]
    frequent = {ids[2] for ids, _, _ in (cold(plain, prompt, max_tokens=5) for prompt in prompts)}
    llm = small_bank.attach(llama, TokenizerWrapper(build_tokenizer(), eos_token_ids=frequent))
    wanted = [cold(llm, prompt, max_tokens=9) for prompt in prompts]
    assert {reason for _, _, reason in wanted} == {"stop", "length"} or {r for _, _, r in wanted} == {"stop"}
    assert seen(answers(llm, prompts, max_tokens=9, batch_size=3)) == wanted
    assert seen(answers(llm, prompts, max_tokens=9, batch_size=1)) == wanted
    assert seen(answers(llm, prompts, max_tokens=1)) == [cold(llm, prompt, max_tokens=1) for prompt in prompts]
    assert seen(answers(llm, prompts[:1], max_tokens=-1)) == [cold(llm, prompts[0], max_tokens=-1)]


def test_as_completed_gives_short_answers_first_and_all_of_them(llm: Any, llama: Any, small_bank: PrefixBank) -> None:
    prompts = mixed()
    given = list(as_completed(llm, prompts, max_tokens=4, batch_size=2))
    assert sorted(index for index, _ in given) == list(range(len(prompts)))
    assert all(result.index == index for index, result in given)
    assert [index for index, _ in given] != sorted(index for index, _ in given)  # depth first
    assert seen(in_order(given)) == [cold(llm, prompt, max_tokens=4) for prompt in prompts]


def test_no_prompts_have_no_answers(llm: Any) -> None:
    assert answers(llm, []) == []


# --- samplers and logits processors


@pytest.mark.parametrize("batch_size", [1, 4])
def test_logits_processors_see_all_token_ids_of_their_prompt(batch_size: int, llm: Any) -> None:
    prompts = [*ablations()[:6], [5], [5]]
    contexts: list[list[int]] = []

    def processor(token_ids: mx.array, logits: mx.array) -> mx.array:
        contexts.append(token_ids.tolist())
        return logits.at[:, token_ids[-1]].add(-1e9)  # never the same token twice running

    results = answers(llm, prompts, max_tokens=4, batch_size=batch_size, logits_processors=[processor])
    for prompt, result in zip(prompts, results, strict=True):
        for n in range(4):
            assert prompt + result.token_ids[:n] in contexts
    assert seen(results) == [cold(llm, p, max_tokens=4, logits_processors=[processor]) for p in prompts]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_samplers_need_not_know_of_batches(batch_size: int, llm: Any) -> None:
    prompts = mixed()

    def second_best(logprobs: mx.array) -> mx.array:
        return mx.argsort(logprobs.flatten())[-2]

    def second_best_of_rows(logprobs: mx.array) -> mx.array:
        return mx.argsort(logprobs, axis=-1)[:, -2]

    wanted = [cold(llm, prompt, max_tokens=5, sampler=second_best_of_rows) for prompt in prompts]
    for sampler in (second_best_of_rows, second_best):
        if batch_size > 1 or sampler is second_best_of_rows:  # alone, the sampler is mlx-lm's business
            assert seen(answers(llm, prompts, max_tokens=5, batch_size=batch_size, sampler=sampler)) == wanted


def test_equal_prompts_are_sampled_each_and_computed_once_where_greedy(llm: Any) -> None:
    prompts = [HEAD] * 20
    greedy = answers(llm, prompts, max_tokens=3)
    assert [result.computed_tokens for result in greedy] == [30] + [0] * 19
    assert [result.cached_tokens for result in greedy] == [0] + [30] * 19
    mx.random.seed(3)
    sampled = answers(llm, prompts, max_tokens=3, sampler=lambda logprobs: mx.random.categorical(logprobs))
    assert len({tuple(result.token_ids) for result in sampled}) > 5
    assert sum(result.computed_tokens for result in sampled) <= 29 + 20


def test_results_of_equal_prompts_are_apart(llm: Any) -> None:
    one, other = answers(llm, [HEAD, HEAD], max_tokens=3)
    one.token_ids.clear()
    assert other.token_ids


# --- what is computed and what is stored


def test_shared_runs_are_computed_once(llm: Any, small_bank: PrefixBank) -> None:
    prompts = [*ablations(), *mixed()]
    n_before = small_bank.stats().session.get("computed_tokens", 0)
    results = answers(llm, prompts, max_tokens=2)
    n_computed = sum(result.computed_tokens for result in results)
    assert n_unique(llm, prompts) <= n_computed <= 1.01 * n_unique(llm, prompts) + len(prompts)
    assert small_bank.stats().session.get("computed_tokens", 0) - n_before == n_computed


def test_many_short_runs_stay_within_a_hundredth(llm: Any) -> None:
    """Runs of one to four tokens, everywhere: each is hardly worth a step, but all of them together are."""
    draw = random.Random(5)
    prompts = [[draw.randrange(3) for _ in range(draw.randint(1, 14))] for _ in range(150)]
    results = answers(llm, prompts, max_tokens=1, batch_size=16)
    assert sum(result.computed_tokens for result in results) <= 1.01 * n_unique(llm, prompts) + len(prompts)
    assert seen(results)[::10] == [cold(llm, prompt, max_tokens=1) for prompt in prompts[::10]]


def test_prompts_seen_once_leave_nothing_in_the_bank(llm: Any, small_bank: PrefixBank) -> None:
    answers(llm, [random_ids(100, seed=seed) for seed in range(5)], max_tokens=3)
    small_bank.flush()
    assert small_bank.chunks() == []


def test_shared_runs_are_stored_with_their_tails_and_rests_are_not(llm: Any, small_bank: PrefixBank) -> None:
    shared = random_ids(53)
    answers(llm, [shared + random_ids(60, seed=seed) for seed in range(2, 6)], max_tokens=3)
    small_bank.flush()
    assert sorted(chunk.n_tokens for chunk in small_bank.chunks()) == [5, 16, 16, 16]
    assert llm.match([*shared, 1]).n_tokens == 53


def test_a_run_is_stored_before_the_longer_ones_behind_it(llm: Any, small_bank: PrefixBank) -> None:
    """Many prompts may be answered before the first of those is computed, and the run be killed."""
    shared, more = random_ids(53), random_ids(30, seed=3)
    prompts = [shared + query(n) for n in (1, 2, 4)] + [shared + more + query(n) for n in (1, 2)]
    stream = as_completed(llm, prompts, max_tokens=2, batch_size=1)
    next(stream)
    small_bank.flush()
    assert llm.match(shared + more).n_tokens == 53
    assert len(list(stream)) == 4
    small_bank.flush()
    assert llm.match([*shared, *more, 1]).n_tokens == 83


def test_runs_of_a_few_tokens_behind_a_stored_one_are_not_stored(llm: Any, small_bank: PrefixBank) -> None:
    """Queries that begin alike by chance would bring a shard each."""
    shared = random_ids(53)
    prompts = [[*shared, first, *random_ids(20, seed=seed)] for seed in range(40) for first in (1, 2, 3)]
    answers(llm, prompts, max_tokens=1)
    small_bank.flush()
    assert sorted(chunk.n_tokens for chunk in small_bank.chunks()) == [5, 16, 16, 16]


@pytest.mark.parametrize("chunk_tokens", [16, 64])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_runs_in_runs_are_all_resumed(
    name: str, chunk_tokens: int, models: dict[str, Any], tokenizer: Any, bank_root: Path
) -> None:
    """Where states and windows are stored, too: at the end of each run."""
    prompts = ablations()
    with PrefixBank.open(bank_root, chunk_tokens=chunk_tokens, **FROM_DISK) as bank:
        answers(bank.attach(models[name], tokenizer), prompts, max_tokens=2)
    with PrefixBank.open(bank_root, **FROM_DISK) as bank:
        llm = bank.attach(models[name], tokenizer)
        results = answers(llm, prompts, max_tokens=2)
        runs = [joined(SHOTS[:k]) for k in range(len(SHOTS) + 1) for _ in (1, 2)]
        n_rests = sum(len(prompt) - len(run) for prompt, run in zip(prompts, runs, strict=True))
        # Runs of less than 16 tokens are computed again: two shots, by the two prompts that end with each.
        assert sum(result.computed_tokens for result in results) <= n_rests + 2 * (5 + 9)
        assert all(llm.match([*run, 1]).n_tokens >= len(run) - 9 for run in runs)
        assert bank.check(read_data=True).ok


def test_what_is_in_the_bank_is_not_computed(llm: Any, small_bank: PrefixBank) -> None:
    lone = random_ids(90, seed=8)
    llm.warm(HEAD + SHOTS[0])
    llm.warm(lone)
    written = small_bank.stats().session.get("written_bytes", 0)
    prompts = [HEAD + SHOTS[0] + query(1), HEAD + SHOTS[0] + query(2), [*lone, 4]]
    results = answers(llm, prompts, max_tokens=4)
    small_bank.flush()
    assert [result.computed_tokens for result in results] == [len(query(1)), len(query(2)), 1]
    assert [result.match.n_tokens for result in results] == [63, 63, 90]
    assert small_bank.stats().session.get("written_bytes", 0) == written
    assert seen(results) == [cold(llm, prompt, max_tokens=4) for prompt in prompts]


def test_prefixes_in_memory_are_used_and_stay_as_they_were(llama: Any, tokenizer: Any, bank_root: Path) -> None:
    with PrefixBank.open(bank_root, chunk_tokens=16, load="always") as bank:
        llm = bank.attach(llama, tokenizer)
        llm.warm(HEAD + SHOTS[0])
        prompts = [HEAD + SHOTS[0] + query(seed) for seed in range(6)]
        wanted = [cold(llm, prompt, max_tokens=6) for prompt in prompts]
        for _ in range(3):
            assert seen(answers(llm, prompts, max_tokens=6, batch_size=2)) == wanted
        assert bank.stats().session.get("memory_hits", 0) > 0
        assert llm.generate(prompts[0], max_tokens=6).text == wanted[0][1]


def test_hold_back_computes_the_last_tokens_of_each_prompt(llm: Any) -> None:
    prompts = [[*HEAD, 1, 2], [*HEAD, 1, 3]]
    results = answers(llm, prompts, max_tokens=3, hold_back=10)
    assert [result.computed_tokens for result in results] == [32, 10]
    assert seen(results) == [cold(llm, prompt, max_tokens=3) for prompt in prompts]
    assert [r.computed_tokens for r in answers(llm, prompts, max_tokens=3, hold_back=99)] == [32, 32]


def test_caches_live_no_longer_than_their_part_of_the_trie(llm: Any) -> None:
    """A chain of runs, each inside the one before, holds one cache and those of the batch."""
    whole = random_ids(400)
    prompts = [whole[:n] + random_ids(3, seed=n) for n in range(20, 400, 20) for _ in (1, 2)]
    for n, _ in enumerate(as_completed(llm, prompts, max_tokens=2, batch_size=2)):
        if n % 9 == 8:
            gc.collect()
            assert sum(1 for held in gc.get_objects() if type(held) is KVCache) <= 2 * 5  # two layers each


def test_loading_pays_for_what_is_not_at_hand_already(llama: Any, tokenizer: Any, bank_root: Path) -> None:
    found = Match(101, 100, 1, "all", load_s=1.0, compute_s=2.0)
    with PrefixBank.open(bank_root) as bank:
        walk = TrieWalk(bank.attach(llama, tokenizer)._caches, [])
        assert walk._pays(found, 100)
        assert not walk._pays(found, 40)  # those take 0.8 s
        assert not walk._pays(found, 0)
        assert walk._pays(replace(found, in_memory=True), 1)
        assert walk._pays(replace(found, load_s=None), 1)
