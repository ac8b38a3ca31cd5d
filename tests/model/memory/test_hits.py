"""Prefixes kept in memory: no file is read, and nothing copied without need."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm import generate

from prefixbank import PrefixBank
from tests.model.memory.users import (
    PROMPTS,
    SHARED,
    Open,
    address,
    answers_as_cold,
    cold_text,
    goes_on_right,
    kept,
)
from tests.model.test_kinds import ALL, RECURRENT, ROWS_ONLY
from tests.model.test_prompts import SHOTS
from tests.model.tiny import random_ids


@pytest.mark.parametrize("name", ALL)
def test_second_resolve_of_a_prefix_reads_no_file(
    name: str, models: dict[str, Any], tokenizer: Any, bank: PrefixBank, no_shard_is_read: Any
) -> None:
    llm = bank.attach(models[name], tokenizer)
    llm.warm(SHARED)
    bank._session.memory.clear()
    first = llm.resolve(PROMPTS[0])
    assert (first.match.in_memory, first.cached_tokens) == (False, 50)
    with no_shard_is_read():
        others = [llm.resolve(prompt) for prompt in PROMPTS[1:]]
    for prompt, resolved in zip(PROMPTS, [first, *others], strict=True):
        assert resolved.cached_tokens == resolved.match.n_tokens == 50
        assert resolved.rest == prompt[50:]
        goes_on_right(llm, prompt, resolved)
    assert all(resolved.match.in_memory and resolved.match.n_bytes == 0 for resolved in others)
    assert bank.stats().session["memory_hits"] == 3


def test_hits_in_memory_do_without_the_folder_of_shards(llm: Any, bank: PrefixBank) -> None:
    cold = [cold_text(llm, prompt) for prompt in PROMPTS]
    llm.warm(SHARED)
    hidden = bank.root / "shards"
    hidden.rename(hidden.with_name("elsewhere"))
    for prompt, text in zip(PROMPTS, cold, strict=True):
        assert llm.generate(prompt, max_tokens=8).text == text
        goes_on_right(llm, prompt, llm.resolve(prompt))
    hidden.with_name("elsewhere").rename(hidden)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])  # deepseek-v3.2 makes some arrays anew at each step itself
def test_checkout_of_the_same_prefix_copies_nothing(
    name: str, models: dict[str, Any], tokenizer: Any, bank: PrefixBank, no_shard_is_read: Any
) -> None:
    """Not even after generations have appended to it in place."""
    llm = bank.attach(models[name], tokenizer)
    llm.warm(SHARED, reserve=64)
    addresses = set()
    with no_shard_is_read():
        for prompt in PROMPTS * 2:
            with llm.checkout(prompt) as lease:
                addresses.add(address(lease.prompt_cache))
                assert (lease.cached_tokens, lease.rest) == (50, prompt[50:])
                text = generate(llm.model, tokenizer, lease.rest, prompt_cache=lease.prompt_cache, max_tokens=8)
                assert text == cold_text(llm, prompt)
                addresses.add(address(lease.prompt_cache))
    assert len(addresses) == 1
    assert bank.stats().session["memory_hits"] == len(PROMPTS) * 2


def test_generations_copy_nothing_either(llm: Any, bank: PrefixBank, no_shard_is_read: Any) -> None:
    llm.warm(SHARED, reserve=64)
    with llm.checkout(PROMPTS[0]) as lease:
        before = address(lease.prompt_cache)
    with no_shard_is_read():
        for prompt in PROMPTS:
            del lease  # what somebody else still holds is copied when it is written to
            result = llm.generate(prompt, max_tokens=8)
            assert (result.text, result.cached_tokens) == (cold_text(llm, prompt), 50)
            for number, _ in enumerate(stream := llm.stream_generate(prompt, max_tokens=8)):
                if number == 3:
                    stream.close()  # the caller has what it wanted
            with llm.checkout(prompt) as lease:
                assert address(lease.prompt_cache) == before
    assert kept(bank) == [50]


def test_match_says_what_is_in_memory(llm: Any) -> None:
    llm.warm(SHARED)
    found = llm.match(PROMPTS[0])
    assert (found.in_memory, found.n_tokens, found.n_bytes, found.reason) == (True, 50, 0, "partial")
    assert found.loading_pays
    found = llm.match([*SHARED, 1])
    assert (found.in_memory, found.n_tokens, found.reason) == (True, 50, "all")
    held_back = llm.match([*SHARED, 1], hold_back=11)
    assert (held_back.in_memory, held_back.n_tokens, held_back.reason) == (True, 40, "all")
    assert not llm.match([7, 7, 7]).in_memory


def test_files_that_hold_more_are_preferred(open_bank: Open, llama: Any, tokenizer: Any) -> None:
    llm = open_bank().attach(llama, tokenizer)
    longer = SHARED + random_ids(20, seed=2)
    llm.warm(SHARED)
    open_bank(memory_bytes=0).attach(llama, tokenizer).warm(longer)
    resolved = llm.resolve([*longer, 1])
    assert (resolved.match.in_memory, resolved.cached_tokens) == (False, 70)
    goes_on_right(llm, [*longer, 1], resolved)
    again = llm.resolve([*longer, 1])
    assert (again.match.in_memory, again.cached_tokens) == (True, 70)
    goes_on_right(llm, [*longer, 1], again)


# --- parts of what is kept


@pytest.mark.parametrize("name", ALL)
def test_prefixes_are_taken_in_part_from_caches_that_can_be_cut_and_whole_from_others(
    name: str, models: dict[str, Any], tokenizer: Any, bank: PrefixBank, no_shard_is_read: Any
) -> None:
    llm = bank.attach(models[name], tokenizer)
    llm.warm(SHARED)
    llm.resolve(PROMPTS[0])
    assert kept(bank) == [50]
    for n_shared in (49, 33, 32, 20, 16, 3):
        prompt = SHARED[:n_shared] + random_ids(6, seed=n_shared)
        found = llm.match(prompt)
        if name in ROWS_ONLY:
            assert (found.in_memory, found.n_tokens) == (True, n_shared)
            with no_shard_is_read():
                resolved = llm.resolve(prompt)
        else:
            assert not found.in_memory
            assert found.n_tokens == (0 if name in RECURRENT else n_shared)
            resolved = llm.resolve(prompt)
        goes_on_right(llm, prompt, resolved)
    with no_shard_is_read():  # what was taken in part is still there as a whole
        assert llm.resolve(PROMPTS[1]).cached_tokens == 50
    goes_on_right(llm, PROMPTS[1], llm.resolve(PROMPTS[1]))


def test_lending_a_part_leaves_the_whole(llm: Any, bank: PrefixBank) -> None:
    llm.warm(SHARED)
    prompt = SHARED[:33] + random_ids(5, seed=5)
    with llm.checkout(prompt) as lease:
        assert (lease.match.in_memory, lease.cached_tokens, kept(bank)) == (True, 33, [50])
        goes_on_right(llm, prompt, lease)
    assert kept(bank) == [33, 50]
    assert answers_as_cold(llm, SHARED[:20] + random_ids(5, seed=6)) == 20
    assert kept(bank) == [20, 33, 50]
    goes_on_right(llm, PROMPTS[0], llm.resolve(PROMPTS[0]))


@pytest.mark.parametrize("name", ALL)
def test_generations_from_memory_give_the_cold_texts(
    name: str, models: dict[str, Any], tokenizer: Any, bank: PrefixBank
) -> None:
    llm = bank.attach(models[name], tokenizer)
    n_shared = len(llm.shared_token_ids(SHOTS))
    for n_round in range(3):
        for query in ("a great soup", "the film", "my bike"):
            n_cached = answers_as_cold(llm, SHOTS.render(query))
            assert n_cached >= (n_shared if n_round else 0)
    assert bank.stats().session["memory_hits"] >= 6


@pytest.mark.parametrize("name", ALL)
def test_repeated_and_growing_prompts_give_the_cold_texts(
    name: str, models: dict[str, Any], tokenizer: Any, bank: PrefixBank
) -> None:
    llm = bank.attach(models[name], tokenizer)
    base = random_ids(90)
    prompts = [base[:40], base[:55], base, base[:30] + random_ids(30, seed=4), base, base[:55]]
    for prompt in prompts:
        answers_as_cold(llm, prompt)
    assert bank.stats().session["memory_hits"] >= 1


@pytest.mark.parametrize("name", ALL)
def test_conversations_go_on_from_memory(
    name: str, models: dict[str, Any], tokenizer: Any, bank: PrefixBank, no_shard_is_read: Any
) -> None:
    llm = bank.attach(models[name], tokenizer)
    prompt = random_ids(50)
    for turn in range(3):
        result = llm.generate(prompt, max_tokens=12, keep=True)
        assert result.text == cold_text(llm, prompt, 12)
        if turn and name in ROWS_ONLY:
            assert result.match.in_memory
            assert result.cached_tokens >= len(prompt) - 7
        prompt = prompt + result.token_ids + random_ids(6, seed=turn)
