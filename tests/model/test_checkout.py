"""Lending prompt caches: the same prefix again comes from memory, and is never wrong."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate
from mlx_lm.models.cache import KVCache

from prefixbank import PrefixBank
from tests.model.tiny import random_ids

SHARED = random_ids(50)


@pytest.fixture
def small_bank(bank_root: Path) -> Any:
    """A bank that also keeps prefixes in memory."""
    with PrefixBank.open(bank_root, chunk_tokens=16, load="always") as bank:
        yield bank
        report = bank.check(read_data=True)
        assert report.ok, report.findings


@pytest.fixture
def warm_llm(llm: Any) -> Any:
    llm.warm(SHARED)
    return llm


def answer(llm: Any, lease: Any, n_tokens: int = 8) -> str:
    return generate(llm.model, llm.tokenizer, lease.rest, prompt_cache=lease.prompt_cache, max_tokens=n_tokens)


def test_lease_holds_the_prefix_and_the_rest(warm_llm: Any) -> None:
    prompt = SHARED + random_ids(5, seed=2)
    with warm_llm.checkout(prompt) as lease:
        assert lease.rest == prompt[50:]
        assert lease.match.n_tokens == lease.prompt_cache[0].offset == 50
        assert answer(warm_llm, lease) == generate(warm_llm.model, warm_llm.tokenizer, prompt, max_tokens=8)


def test_second_checkout_reads_no_shard_and_copies_nothing(warm_llm: Any, small_bank: PrefixBank) -> None:
    prompts = [SHARED + random_ids(5, seed=seed) for seed in range(6)]
    cold = [generate(warm_llm.model, warm_llm.tokenizer, prompt, max_tokens=8) for prompt in prompts]
    with warm_llm.checkout(prompts[0]) as lease:
        keys = lease.prompt_cache[0].keys
        assert answer(warm_llm, lease) == cold[0]
    hidden = small_bank.root / "shards"
    hidden.rename(hidden.with_name("elsewhere"))
    for prompt, text in zip(prompts[1:], cold[1:], strict=True):
        with warm_llm.checkout(prompt) as lease:
            assert lease.cached_tokens == 50
            assert answer(warm_llm, lease) == text
    hidden.with_name("elsewhere").rename(hidden)
    assert keys.shape[2] >= 50
    assert small_bank.stats().memory_bytes > 0


def test_nested_checkouts_of_one_prefix_do_not_share_a_cache(warm_llm: Any) -> None:
    prompts = [SHARED + random_ids(5, seed=seed) for seed in range(2)]
    cold = [generate(warm_llm.model, warm_llm.tokenizer, prompt, max_tokens=8) for prompt in prompts]
    with warm_llm.checkout(prompts[0]) as outer, warm_llm.checkout(prompts[1]) as inner:
        assert outer.prompt_cache[0] is not inner.prompt_cache[0]
        assert answer(warm_llm, inner) == cold[1]
        assert answer(warm_llm, outer) == cold[0]


def test_concurrent_checkouts_are_right(warm_llm: Any) -> None:
    prompts = [SHARED + random_ids(5, seed=seed) for seed in range(4)]
    cold = [generate(warm_llm.model, warm_llm.tokenizer, prompt, max_tokens=4) for prompt in prompts]
    texts: dict[int, list[str]] = {n: [] for n in range(4)}
    computing = threading.Lock()  # mlx-lm generates in one thread at a time; leases overlap all the same

    def work(n: int) -> None:
        for _ in range(5):
            with warm_llm.checkout(prompts[n]) as lease, computing:
                texts[n].append(answer(warm_llm, lease, 4))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: [cold[n]] * 5 for n in range(4)}


def test_lease_that_was_tampered_with_is_not_taken_back(warm_llm: Any, small_bank: PrefixBank) -> None:
    prompt = [*SHARED, 1, 2]
    with warm_llm.checkout(prompt) as lease:
        lease.prompt_cache[0].offset = 20
    assert small_bank.stats().memory_bytes == 0
    with warm_llm.checkout(prompt) as lease:
        lease.prompt_cache[1] = KVCache()
    assert small_bank.stats().memory_bytes == 0


def test_failure_inside_the_block_does_not_spoil_the_next_lease(warm_llm: Any) -> None:
    prompt = SHARED + random_ids(4, seed=3)
    cold = generate(warm_llm.model, warm_llm.tokenizer, prompt, max_tokens=8)
    with pytest.raises(ZeroDivisionError), warm_llm.checkout(prompt) as lease:
        # One layer is ahead of the other, as after an error in mid-step.
        rows = lease.prompt_cache[0].keys[..., :3, :]
        lease.prompt_cache[0].update_and_fetch(mx.ones_like(rows), mx.ones_like(rows))
        raise ZeroDivisionError
    with warm_llm.checkout(prompt) as lease:
        assert answer(warm_llm, lease) == cold


def test_memory_budget_is_held(bank_root: Path, llama: Any, tokenizer: Any) -> None:
    with PrefixBank.open(bank_root, chunk_tokens=16, memory_bytes=0, load="always") as bank:
        llm = bank.attach(llama, tokenizer)
        llm.warm(SHARED)
        with llm.checkout([*SHARED, 1]) as lease:
            assert lease.cached_tokens == 50
        assert bank.stats().memory_bytes == 0


def test_checkout_without_a_match_lends_an_empty_cache(llm: Any) -> None:
    with llm.checkout([1, 2, 3]) as lease:
        assert (lease.rest, lease.prompt_cache[0].offset) == ([1, 2, 3], 0)


def test_prefixes_whose_keys_collide_never_get_each_others_cache(
    monkeypatch: pytest.MonkeyPatch, small_bank: PrefixBank, llama: Any, tokenizer: Any
) -> None:
    monkeypatch.setattr("prefixbank.chunking._hash128", lambda data: bytes(16))
    llm = small_bank.attach(llama, tokenizer)
    first, second = random_ids(10, seed=1), random_ids(10, seed=2)
    for shared in (first, second):
        llm.warm(shared)
        prompt = [*shared, 1, 2, 3]
        cold = generate(llm.model, llm.tokenizer, prompt, max_tokens=8)
        for _ in range(2):
            with llm.checkout(prompt) as lease:
                assert lease.cached_tokens == 10
                assert answer(llm, lease) == cold
        small_bank.prune(max_bytes=0)  # the key is free for the next prefix; the cache in memory is still there
