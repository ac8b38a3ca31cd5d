"""Nobody who uses a kept prefix sees what another one did."""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import combinations_with_replacement
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import batch_generate, generate, stream_generate
from mlx_lm.models.cache import trim_prompt_cache

from prefixbank import PrefixBank
from tests.model.memory.users import (
    PROMPTS,
    SHARED,
    WAYS,
    Walk,
    address,
    answers_as_cold,
    by_checkout,
    by_prefill,
    by_resolve,
    cold_text,
    goes_on_right,
    kept,
)
from tests.model.test_kinds import ALL
from tests.model.tiny import CONFIGS, build_model, random_ids


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        *(("llama", ways) for ways in combinations_with_replacement(WAYS, 2)),
        *((name, (way, "resolve")) for name in ("gemma3_text", "falcon_h1") for way in ("resolve", "prefill", "files")),
    ],
)
def test_two_users_of_one_prefix_do_not_see_each_other(
    name: str, ways: tuple[str, str], models: dict[str, Any], tokenizer: Any, bank: PrefixBank
) -> None:
    llm = bank.attach(models[name], tokenizer)
    llm.warm(SHARED)
    llm.resolve(PROMPTS[3])
    for order in ("first one first", "second one first", "in turn"):
        with ExitStack() as stack:
            walks = []
            for way, prompt in zip(ways, PROMPTS, strict=False):
                walks.append(Walk(llm.model, prompt, *WAYS[way](llm, prompt, stack)))
                assert len(walks[-1].rest) < len(prompt)
            if order == "in turn":
                while not all(walk.is_done for walk in walks):
                    for walk in walks:
                        walk.step()
            else:
                for walk in walks if order == "first one first" else reversed(walks):
                    walk.finish()
        goes_on_right(llm, PROMPTS[2], llm.resolve(PROMPTS[2]))  # nor does who comes later
    with llm.checkout(PROMPTS[3]) as lease:
        goes_on_right(llm, PROMPTS[3], lease)


@pytest.mark.parametrize("name", ALL)
def test_users_in_any_order_are_right(name: str, models: dict[str, Any], tokenizer: Any, bank: PrefixBank) -> None:
    """Many at once, who come, step and go as chance wills, while prefixes grow and are dropped."""
    choose = random.Random(name)
    llm = bank.attach(models[name], tokenizer)
    base = random_ids(70)
    prompts = [base[:n] + random_ids(4, seed=seed) for seed, n in enumerate((70, 50, 50, 37, 32, 32, 20, 5), start=30)]
    llm.warm(base[:50])
    users: list[tuple[Walk, ExitStack]] = []
    for _ in range(40):
        deed = choose.random()
        if deed < 0.35 and len(users) < 5:
            stack = ExitStack()
            prompt = choose.choice(prompts)
            way = choose.choice([by_resolve, by_resolve, by_checkout, by_checkout, by_prefill])
            users.append((Walk(llm.model, prompt, *way(llm, prompt, stack)), stack))
        elif deed < 0.85 and users:
            walk, stack = choose.choice(users)
            if walk.is_done or choose.random() < 0.1:  # some go before they have done
                stack.close()
                users = [user for user in users if user[0] is not walk]
            else:
                walk.step()
        elif deed < 0.97:
            answers_as_cold(llm, choose.choice(prompts), 3, keep=choose.random() < 0.3)
        else:
            bank.prune(max_bytes=choose.choice([0, 200_000]))
        assert bank._session.memory.n_bytes <= bank._session.memory.max_bytes
    for walk, stack in users:
        walk.finish()
        stack.close()
    for prompt in prompts:
        goes_on_right(llm, prompt, llm.resolve(prompt))


def test_nested_checkout_gets_its_own_copy(llm: Any) -> None:
    llm.warm(SHARED)
    with llm.checkout(PROMPTS[0]) as outer, llm.checkout(PROMPTS[1]) as inner, llm.checkout(PROMPTS[2]) as third:
        leases = [outer, inner, third]
        assert [lease.cached_tokens for lease in leases] == [50, 50, 50]
        assert len({place for lease in leases for place in address(lease.prompt_cache)}) == 3 * 4
        for prompt, lease in zip(PROMPTS, leases, strict=False):
            goes_on_right(llm, prompt, lease)


def test_appending_to_a_lease_and_giving_it_back_leaves_the_prefix(llm: Any, bank: PrefixBank) -> None:
    llm.warm(SHARED)
    for prompt in PROMPTS:
        with llm.checkout(prompt) as lease:
            generate(llm.model, llm.tokenizer, lease.rest, prompt_cache=lease.prompt_cache, max_tokens=30)
        assert kept(bank) == [50]
        resolved = llm.resolve(PROMPTS[0])
        assert (resolved.match.in_memory, resolved.prompt_cache[0].offset) == (True, 50)
        goes_on_right(llm, PROMPTS[0], resolved)


def test_prompt_cache_of_a_result_is_the_callers_own(llm: Any, bank: PrefixBank) -> None:
    llm.warm(SHARED)
    for _ in range(2):
        result = llm.generate(PROMPTS[0], max_tokens=4, return_prompt_cache=True)
        assert result.match.in_memory
        trim_prompt_cache(result.prompt_cache, 30)
        llm.model(mx.array(random_ids(30, seed=9))[None], cache=result.prompt_cache)
        goes_on_right(llm, PROMPTS[1], llm.resolve(PROMPTS[1]))
        answers_as_cold(llm, PROMPTS[2])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_generation_that_fails_half_way_spoils_nothing(llm: Any, bank: PrefixBank, error: type[BaseException]) -> None:
    llm.warm(SHARED)
    n_asked = 0

    def sampler(logits: mx.array) -> mx.array:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 3:
            raise error
        return mx.argmax(logits, axis=-1)

    with pytest.raises(error):
        llm.generate(PROMPTS[0], sampler=sampler, max_tokens=8)
    for prompt in PROMPTS:
        answers_as_cold(llm, prompt)
        goes_on_right(llm, prompt, llm.resolve(prompt))


@pytest.mark.parametrize("name", [name for name in ALL if name != "llama4"])
def test_caches_from_memory_work_in_batches(
    name: str, models: dict[str, Any], tokenizer: Any, bank: PrefixBank
) -> None:
    llm = bank.attach(models[name], tokenizer)
    llm.warm(SHARED)
    llm.resolve(PROMPTS[0])
    for _ in range(2):
        resolved = [llm.resolve(prompt) for prompt in PROMPTS]
        assert all(one.match.in_memory for one in resolved)
        batch = batch_generate(
            llm.model,
            tokenizer,
            [one.rest for one in resolved],
            prompt_caches=[one.prompt_cache for one in resolved],
            max_tokens=6,
        )
        assert batch.texts == [cold_text(llm, prompt, 6) for prompt in PROMPTS]


def test_draft_models_keep_their_own_prefixes(llm: Any, bank: PrefixBank, llama: Any, tokenizer: Any) -> None:
    draft = bank.attach(build_model(seed=3), tokenizer)
    for _ in range(3):
        for prompt in PROMPTS:
            result = llm.generate(prompt, draft_model=draft, max_tokens=8)
            assert result.text == cold_text(llm, prompt)
            assert draft.generate(prompt, max_tokens=8).text == cold_text(draft, prompt)
    assert bank.stats().session["memory_hits"] > 0


@pytest.mark.parametrize("start", [0, 40])
def test_quantised_caches_are_right_from_memory(
    bank: PrefixBank, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    monkeypatch.setitem(CONFIGS, "wide heads", {**CONFIGS["llama"], "hidden_size": 128})
    settings = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    llm = bank.attach(build_model("wide heads"), tokenizer, **settings)
    for _ in range(3):
        for prompt in PROMPTS:
            wanted = list(stream_generate(llm.model, tokenizer, prompt, max_tokens=6, **settings))
            answer = list(llm.stream_generate(prompt, max_tokens=6))
            assert [r.token for r in answer] == [r.token for r in wanted]
            # Prefixes are quantised after other steps than mlx-lm's one: the rows behind attend to other roundings.
            assert all(mx.abs(a.logprobs - w.logprobs).max() < 0.05 for a, w in zip(answer, wanted, strict=True))
    stats = bank.stats()
    assert (stats.memory_bytes > 0) is (start == 0)  # what is quantised in time can't be cut back
    assert (stats.session.get("memory_hits", 0) > 0) is (start == 0)
