"""What is kept belongs to one model, and stays within its budget."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest
from mlx_lm import generate

from prefixbank import BankWarning, PrefixBank
from tests.model.memory.users import (
    PROMPTS,
    SHARED,
    WAYS,
    Open,
    Walk,
    answers_as_cold,
    goes_on_right,
    held_bytes,
    kept,
)
from tests.model.test_kinds import ALL
from tests.model.tiny import build_model, random_ids


@pytest.mark.parametrize("way", WAYS)
def test_swapped_weights_never_get_what_the_old_ones_left(way: str, bank: PrefixBank, tokenizer: Any) -> None:
    llm = bank.attach(build_model(), tokenizer)
    old = dict(llm.model.parameters())
    llm.warm(SHARED)
    assert llm.match(PROMPTS[0]).in_memory
    llm.model.update(build_model(seed=5).parameters())
    assert llm.match(PROMPTS[0]).n_tokens == 0
    with ExitStack() as stack:
        prompt_cache, rest = WAYS[way](llm, PROMPTS[0], stack)
        Walk(llm.model, PROMPTS[0], prompt_cache, rest).finish()
    answers_as_cold(llm, PROMPTS[1])
    Walk.forget()
    llm.model.update(old)
    assert llm.match(PROMPTS[0]).n_tokens >= 50
    goes_on_right(llm, PROMPTS[0], llm.resolve(PROMPTS[0]))


def test_lease_whose_weights_were_swapped_meanwhile_is_not_taken_back(bank: PrefixBank, tokenizer: Any) -> None:
    llm = bank.attach(build_model(), tokenizer)
    llm.warm(SHARED)
    with llm.checkout(PROMPTS[0]) as lease:
        llm.model.update(build_model(seed=5).parameters())
        generate(llm.model, tokenizer, lease.rest, prompt_cache=lease.prompt_cache, max_tokens=4)
    assert kept(bank) == []
    assert llm.match(PROMPTS[0]).n_tokens == 0
    goes_on_right(llm, PROMPTS[0], llm.resolve(PROMPTS[0]))


@pytest.mark.parametrize("memory_bytes", [0, "1GB"])
def test_weights_that_are_swapped_while_a_stream_is_open_get_nothing_of_it(
    open_bank: Open, tokenizer: Any, memory_bytes: int | str
) -> None:
    llm = open_bank(memory_bytes=memory_bytes).attach(build_model(), tokenizer)
    prompt = random_ids(64)
    with pytest.warns(BankWarning, match="swapped"), closing(llm.stream_generate(prompt, max_tokens=5)) as stream:
        next(stream)
        llm.model.update(build_model(seed=5).parameters())
    goes_on_right(llm, [*prompt, 7], llm.resolve([*prompt, 7]))


def test_other_salts_and_bank_objects_share_nothing_and_equal_models_share(open_bank: Open, tokenizer: Any) -> None:
    one, other = open_bank(), open_bank()
    llm = one.attach(build_model(), tokenizer)
    llm.warm(SHARED)
    assert llm.match(PROMPTS[0]).in_memory
    assert one.attach(build_model(), tokenizer).match(PROMPTS[0]).in_memory
    assert one.attach(build_model(), tokenizer, salt="tenant").match(PROMPTS[0]).n_tokens == 0
    found = other.attach(build_model(), tokenizer).match(PROMPTS[0])
    assert (found.in_memory, found.n_tokens) == (False, 50)
    assert other.stats().memory_bytes == 0


def test_salted_prefixes_stay_with_their_salt(bank: PrefixBank, llama: Any, tokenizer: Any) -> None:
    llms = [bank.attach(llama, tokenizer, salt=salt) for salt in ("", "a", "b")]
    for llm in llms:
        assert not llm.match(PROMPTS[0]).in_memory
        assert answers_as_cold(llm, PROMPTS[0]) == 0
        assert llm.match(PROMPTS[0]).in_memory


# --- dropping


@pytest.mark.parametrize(
    "drop", [lambda bank: bank.remove("shots"), lambda bank: bank.prune(), lambda bank: bank.prune(max_bytes=0)]
)
def test_removing_and_pruning_empty_the_memory(llm: Any, bank: PrefixBank, drop: Callable[[PrefixBank], Any]) -> None:
    llm.warm(SHARED, name="shots")
    llm.resolve(PROMPTS[0])
    assert bank.stats().memory_bytes > 0
    drop(bank)
    assert bank.stats().memory_bytes == 0
    assert not llm.match(PROMPTS[0]).in_memory
    goes_on_right(llm, PROMPTS[0], llm.resolve(PROMPTS[0]))


def test_closing_empties_the_memory(llm: Any, bank: PrefixBank) -> None:
    llm.warm(SHARED)
    assert kept(bank) == [50]
    bank.close()
    assert (kept(bank), bank._session.memory.n_bytes) == ([], 0)


def test_plans_drop_nothing_from_memory(llm: Any, bank: PrefixBank) -> None:
    llm.warm(SHARED, name="shots")
    before = bank.stats().memory_bytes
    bank.remove("shots", dry_run=True)
    bank.prune(max_bytes=0, dry_run=True)
    assert bank.stats().memory_bytes == before > 0


def test_no_memory_keeps_nothing(open_bank: Open, llama: Any, tokenizer: Any) -> None:
    bank = open_bank(memory_bytes=0)
    llm = bank.attach(llama, tokenizer)
    llm.warm(SHARED)
    for prompt in PROMPTS:
        assert not llm.match(prompt).in_memory
        goes_on_right(llm, prompt, llm.resolve(prompt))
        with llm.checkout(prompt) as lease:
            goes_on_right(llm, prompt, lease)
        answers_as_cold(llm, prompt)
    stats = bank.stats()
    assert (stats.memory_bytes, stats.session.get("memory_hits", 0)) == (0, 0)


def test_prefix_larger_than_the_budget_is_not_kept_and_drops_nothing(
    open_bank: Open, llama: Any, tokenizer: Any
) -> None:
    small, large = random_ids(20, seed=1), random_ids(600, seed=2)
    probe = open_bank(memory_bytes=0).attach(llama, tokenizer)
    for prefix in (small, large):
        probe.warm(prefix)
    n_bytes = held_bytes(probe.resolve([*large, 1], reserve=0).prompt_cache)
    bank = open_bank(memory_bytes=n_bytes - 1)
    llm = bank.attach(llama, tokenizer)
    llm.resolve([*small, 1], reserve=0)
    assert bank.stats().memory_bytes > 0
    llm.resolve([*large, 1], reserve=0)
    with llm.checkout([*large, 1], reserve=0) as lease:
        goes_on_right(llm, [*large, 1], lease)
    assert kept(bank) == [20]
    exact = open_bank(memory_bytes=n_bytes)
    exact.attach(llama, tokenizer).resolve([*large, 1], reserve=0)
    assert (kept(exact), exact.stats().memory_bytes) == ([600], n_bytes)


@pytest.mark.parametrize("name", ALL)
def test_memory_stays_within_its_budget_in_bytes(
    name: str, models: dict[str, Any], tokenizer: Any, open_bank: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is kept counts with all that it holds: room for more rows, states, and rows for the recorder."""
    bank = open_bank(memory_bytes=300_000)
    llm = bank.attach(models[name], tokenizer)
    memory = bank._session.memory
    real = memory.give
    n_given = 0

    def give(prefix: Any) -> None:
        nonlocal n_given
        n_given += 1
        real(prefix)
        held = sum(
            held_bytes(one.prompt_cache) + sum(piece.n_bytes for pieces in one.seed for piece in pieces)
            for one in memory._kept.values()
        )
        assert held == memory.n_bytes <= 300_000

    monkeypatch.setattr(memory, "give", give)
    for seed in range(4):
        prompt = random_ids(40 + 20 * seed, seed=seed)
        llm.generate(prompt, max_tokens=2)
        llm.resolve([*prompt, 1])
        with llm.checkout([*prompt, 2]):
            assert bank.stats().memory_bytes <= 300_000
        assert bank.stats().memory_bytes <= 300_000
    assert n_given >= 4
