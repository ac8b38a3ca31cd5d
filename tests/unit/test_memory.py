"""Hold the pool of prompt caches to its budget and to one user at a time."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prefixbank.memory import PromptCachePool


def cache(name: object) -> list[Any]:
    return [name]


def test_a_cache_has_one_user_at_a_time() -> None:
    pool = PromptCachePool(100)
    given = cache("a")
    pool.give("a", given, 10)
    assert pool.take("a") is given
    assert pool.take("a") is None
    assert pool.n_bytes == 0


def test_the_least_recently_used_goes_first() -> None:
    pool = PromptCachePool(30)
    for name in "abc":
        pool.give(name, cache(name), 10)
    taken = pool.take("a")
    assert taken is not None
    pool.give("a", taken, 10)  # used now
    pool.give("d", cache("d"), 10)
    assert [pool.take(name) is not None for name in "abcd"] == [True, False, True, True]


def test_the_budget_is_held_at_each_step() -> None:
    pool = PromptCachePool(100)
    sizes = random.Random(3)
    for number in range(300):
        pool.give(number % 17, cache(number), sizes.randrange(0, 120))
        assert pool.n_bytes <= 100


def test_a_cache_takes_the_place_of_one_of_the_same_prefix() -> None:
    pool = PromptCachePool(100)
    pool.give("a", cache("old"), 60)
    pool.give("a", cache("new"), 70)
    assert pool.n_bytes == 70
    assert pool.take("a") == cache("new")


def test_a_cache_larger_than_the_budget_is_dropped_and_pushes_nothing_out() -> None:
    pool = PromptCachePool(100)
    pool.give("a", cache("a"), 50)
    pool.give("huge", cache("huge"), 101)
    assert pool.take("huge") is None
    assert pool.n_bytes == 50
    assert pool.take("a") == cache("a")


def test_a_cache_that_grew_beyond_the_budget_leaves_no_old_one() -> None:
    pool = PromptCachePool(100)
    pool.give("a", cache("old"), 50)
    pool.give("a", cache("grown"), 101)
    assert pool.take("a") is None
    assert pool.n_bytes == 0


@pytest.mark.parametrize("n_bytes", [0, 1])
def test_a_budget_of_nothing_keeps_nothing(n_bytes: int) -> None:
    pool = PromptCachePool(0)
    pool.give("a", cache("a"), n_bytes)
    assert pool.n_bytes == 0


def test_clearing_drops_everything() -> None:
    pool = PromptCachePool(100)
    pool.give("a", cache("a"), 50)
    pool.clear()
    assert pool.n_bytes == 0
    assert pool.take("a") is None


def test_threads_never_share_a_cache() -> None:
    pool = PromptCachePool(64)
    n_caches, n_threads = 8, 8
    for name in range(n_caches):
        pool.give(name, cache(name), 8)
    in_use: set[int] = set()
    lock = threading.Lock()
    start = threading.Barrier(n_threads)

    def work(seed: int) -> int:
        choose = random.Random(seed)
        n_taken = 0
        start.wait()
        for _ in range(400):
            name = choose.randrange(n_caches)
            taken = pool.take(name)
            if taken is None:
                continue
            with lock:
                assert taken == cache(name)
                assert name not in in_use
                in_use.add(name)
            n_taken += 1
            with lock:
                in_use.discard(name)
            pool.give(name, taken, 8)
        return n_taken

    with ThreadPoolExecutor(n_threads) as threads:
        assert sum(threads.map(work, range(n_threads))) > n_threads
    assert pool.n_bytes == 64
    assert all(pool.take(name) == cache(name) for name in range(n_caches))
