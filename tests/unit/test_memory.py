"""Hold the memory tier to its budget, to the longest prefix, and to one user of what can be changed."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prefixbank.chunking import pack_token_ids
from prefixbank.memory import KeptPrefix, MemoryTier, Owner

OWNER: Owner = ("ab" * 32, "")


def kept(
    *token_ids: int, n_bytes: int = 10, owner: Owner = OWNER, can_be_cut: bool = True, cache: object = "rows"
) -> KeptPrefix:
    """Return a prefix whose prompt cache is a list of one list."""
    return KeptPrefix(owner, pack_token_ids(token_ids), [[cache]], n_bytes, can_be_cut)


def found(tier: MemoryTier, *token_ids: int, limit: int | None = None, owner: Owner = OWNER) -> Any:
    return tier.find(owner, pack_token_ids(token_ids), len(token_ids) if limit is None else limit)


def holds(tier: MemoryTier, *prefixes: KeptPrefix) -> list[bool]:
    """Tell which prefixes are kept, without using them."""
    return [any(one is prefix for one in tier._kept.values()) for prefix in prefixes]


# --- finding


def test_the_longest_prefix_of_a_prompt_is_found() -> None:
    tier = MemoryTier(100)
    short, long, other = kept(1, 2), kept(1, 2, 3, 4), kept(1, 9)
    for prefix in (short, long, other):
        tier.give(prefix)
    assert found(tier, 1, 2, 3, 4, 5) == (long, 4)
    assert found(tier, 1, 9, 9) == (other, 2)
    assert found(tier, 7) is None
    assert found(tier) is None


def test_a_prompt_may_part_from_a_prefix_that_can_be_cut() -> None:
    tier = MemoryTier(100)
    tier.give(prefix := kept(1, 2, 3, 4))
    assert found(tier, 1, 2, 3, 9) == (prefix, 3)
    assert found(tier, 1, 2, 3) == (prefix, 3)
    assert found(tier, 2, 3) is None


def test_a_prefix_that_can_not_be_cut_is_found_only_whole() -> None:
    tier = MemoryTier(100)
    tier.give(whole := kept(1, 2, 3, can_be_cut=False))
    assert found(tier, 1, 2, 9) is None
    assert found(tier, 1, 2) is None
    assert found(tier, 1, 2, 3) == found(tier, 1, 2, 3, 4) == (whole, 3)
    tier.give(cut := kept(1, 2, 3, 4))
    assert found(tier, 1, 2, 9) == (cut, 2)


def test_no_more_than_the_limit_is_found() -> None:
    tier = MemoryTier(100)
    tier.give(prefix := kept(1, 2, 3, 4))
    assert found(tier, 1, 2, 3, 4, limit=3) == (prefix, 3)
    assert found(tier, 1, 2, 3, 4, limit=0) is None
    tier.clear()
    tier.give(kept(1, 2, 3, 4, can_be_cut=False))
    assert found(tier, 1, 2, 3, 4, limit=3) is None


def test_of_prefixes_that_hold_as_much_the_shortest_is_found() -> None:
    """It has less to copy, and the longer one is left to those who need it."""
    tier = MemoryTier(100)
    long, short = kept(1, 2, 3, 4, 5), kept(1, 2, 3)
    for order in ((long, short), (short, long)):
        tier.clear()
        for prefix in order:
            tier.give(prefix)
        assert found(tier, 1, 2, 3, 9) == (short, 3)
        assert found(tier, 1, 2, 9) == (short, 2)


@pytest.mark.parametrize("other", [("cd" * 32, ""), ("ab" * 32, "salted")])
def test_another_owner_finds_nothing_and_takes_no_place(other: Owner) -> None:
    tier = MemoryTier(100)
    tier.give(mine := kept(1, 2))
    assert found(tier, 1, 2, owner=other) is None
    tier.give(theirs := kept(1, 2, owner=other))
    assert found(tier, 1, 2) == (mine, 2)
    assert found(tier, 1, 2, owner=other) == (theirs, 2)
    assert tier.n_bytes == 20


def test_finding_agrees_with_comparing_token_by_token() -> None:
    choose = random.Random(5)
    for _ in range(150):
        tier = MemoryTier(10**6)
        prefixes = [(tuple(choose.choices((1, 2), k=choose.randrange(1, 9))), choose.random() < 0.5) for _ in range(6)]
        last = dict(prefixes)  # a later one takes the place of the same tokens
        for token_ids, can_be_cut in prefixes:
            tier.give(kept(*token_ids, can_be_cut=can_be_cut))
        prompt = choose.choices((1, 2), k=choose.randrange(1, 9))
        limit = choose.randrange(0, len(prompt) + 1)
        usable = []
        for token_ids, can_be_cut in last.items():
            n = 0
            while n < min(len(token_ids), limit) and token_ids[n] == prompt[n]:
                n += 1
            if n and (can_be_cut or n == len(token_ids)):
                usable.append((n, -len(token_ids)))
        answer = found(tier, *prompt, limit=limit)
        assert (None if answer is None else (answer[1], -answer[0].n_tokens)) == max(usable, default=None)


# --- taking and copying


def test_what_is_taken_is_one_users_own() -> None:
    tier = MemoryTier(100)
    tier.give(prefix := kept(1, 2))
    assert tier.take(prefix)
    assert not tier.take(prefix)
    assert tier.copied(prefix) is None
    assert found(tier, 1, 2) is None
    assert tier.n_bytes == 0


def test_what_was_replaced_meanwhile_can_not_be_taken() -> None:
    """By a prefix of the very same token ids: who found the old one must not take the new one."""
    tier = MemoryTier(100)
    tier.give(old := kept(1, 2))
    tier.give(new := kept(1, 2))
    assert not tier.take(old)
    assert tier.copied(old) is None
    assert tier.n_bytes == 10
    assert tier.take(new)


def test_a_copy_and_the_kept_cache_do_not_see_each_others_changes() -> None:
    tier = MemoryTier(100)
    tier.give(prefix := kept(1, 2, cache="old"))
    first, second = tier.copied(prefix), tier.copied(prefix)
    assert first is not None
    assert second is not None
    first[0][0] = "changed"
    first.append("more")
    assert second == prefix.prompt_cache == [["old"]]
    assert holds(tier, prefix) == [True]
    assert tier.n_bytes == 10


# --- budget


def test_the_least_recently_used_goes_first() -> None:
    tier = MemoryTier(30)
    a, b, c, d = kept(1), kept(2), kept(3), kept(4)
    for prefix in (a, b, c):
        tier.give(prefix)
    tier.copied(a)  # a copy is a use, a look is none
    found(tier, 2)
    tier.give(d)
    assert holds(tier, a, b, c, d) == [True, False, True, True]
    assert tier.take(c)
    tier.give(c)  # given back: used now
    tier.give(kept(5))
    assert holds(tier, a, c, d) == [False, True, True]


def test_as_many_go_as_must() -> None:
    tier = MemoryTier(30)
    prefixes = [kept(number) for number in range(3)]
    for prefix in prefixes:
        tier.give(prefix)
    tier.give(large := kept(7, n_bytes=15))
    assert holds(tier, *prefixes, large) == [False, False, True, True]
    assert tier.n_bytes == 25


def test_a_prefix_takes_the_place_of_the_same_one() -> None:
    tier = MemoryTier(100)
    tier.give(old := kept(1, 2, n_bytes=60))
    tier.give(beside := kept(3, n_bytes=30))
    tier.give(new := kept(1, 2, n_bytes=70))
    assert holds(tier, old, beside, new) == [False, True, True]
    assert tier.n_bytes == 100


def test_a_prefix_larger_than_the_budget_is_dropped_and_pushes_nothing_out() -> None:
    tier = MemoryTier(100)
    tier.give(small := kept(1, n_bytes=100))
    tier.give(huge := kept(2, n_bytes=101))
    assert holds(tier, small, huge) == [True, False]
    assert tier.n_bytes == 100
    assert (tier.has_room(100), tier.has_room(101)) == (True, False)


def test_a_prefix_that_grew_beyond_the_budget_leaves_no_old_one() -> None:
    tier = MemoryTier(100)
    tier.give(kept(1, n_bytes=50))
    tier.give(kept(1, n_bytes=101))
    assert found(tier, 1) is None
    assert tier.n_bytes == 0


def test_a_budget_of_nothing_keeps_nothing() -> None:
    tier = MemoryTier(0)
    tier.give(kept(1, n_bytes=1))
    assert found(tier, 1) is None
    assert tier.n_bytes == 0
    assert not tier.has_room(1)


def test_the_budget_is_held_at_each_step() -> None:
    tier = MemoryTier(100)
    choose = random.Random(3)
    for _ in range(500):
        prefix = kept(choose.randrange(17), n_bytes=choose.randrange(1, 120))
        if choose.random() < 0.3 and (there := found(tier, choose.randrange(17))) is not None:
            assert tier.take(there[0])
        tier.give(prefix)
        assert tier.n_bytes == sum(one.n_bytes for one in tier._kept.values()) <= 100


def test_clearing_drops_everything() -> None:
    tier = MemoryTier(100)
    tier.give(prefix := kept(1, n_bytes=50))
    tier.clear()
    assert tier.n_bytes == 0
    assert found(tier, 1) is None
    assert not tier.take(prefix)
    tier.give(prefix)
    assert tier.n_bytes == 50


# --- threads


def test_threads_never_share_what_they_took_and_never_copy_it_half_changed() -> None:
    n_prefixes, n_threads = 6, 8
    tier = MemoryTier(8 * n_prefixes)
    for number in range(n_prefixes):
        tier.give(kept(number, n_bytes=8, cache=[number] * 8))
    in_use: set[int] = set()
    lock = threading.Lock()
    start = threading.Barrier(n_threads)

    def work(seed: int) -> tuple[int, int]:
        choose = random.Random(seed)
        n_taken = n_copied = 0
        start.wait()
        for _ in range(300):
            number = choose.randrange(n_prefixes)
            there = found(tier, number)
            if there is None:
                continue
            prefix, _ = there
            if choose.random() < 0.5:
                copied = tier.copied(prefix)
                if copied is not None:
                    assert copied == [[[number] * 8]]
                    n_copied += 1
            elif tier.take(prefix):
                with lock:
                    assert number not in in_use
                    in_use.add(number)
                rows = prefix.prompt_cache[0][0]
                for at in range(8):
                    rows[at] = -1
                for at in range(8):
                    rows[at] = number
                n_taken += 1
                with lock:
                    in_use.discard(number)
                tier.give(kept(number, n_bytes=8, cache=rows))
            assert tier.n_bytes <= tier.max_bytes
        return n_taken, n_copied

    with ThreadPoolExecutor(n_threads) as threads:
        done = list(threads.map(work, range(n_threads)))
    assert min(sum(counts) for counts in zip(*done, strict=True)) > n_threads
    assert tier.n_bytes == 8 * n_prefixes
    assert all(found(tier, number)[0].prompt_cache == [[[number] * 8]] for number in range(n_prefixes))
