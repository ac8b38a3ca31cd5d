"""The trie of many prompts against a naive one with a node for each token."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbank.chunking import pack_token_ids
from prefixbank.tokentrie import SharedRun, fold_small_runs, n_unique_tokens, shared_runs

Prompts = list[list[int]]
# Few different ids, so that prompts share runs; ids whose bytes sort otherwise than the numbers do.
PROMPTS = st.lists(st.lists(st.sampled_from([0, 1, 256, 65536]), max_size=8), max_size=12)


def packed(prompts: Prompts) -> list[bytes]:
    return [pack_token_ids(prompt) for prompt in prompts]


def prefixes(prompts: Prompts) -> Counter[tuple[int, ...]]:
    """Return each node of the naive trie with the number of prompts that pass through it."""
    return Counter(tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1))


def branchings(prompts: Prompts) -> set[tuple[int, ...]]:
    """Return the nodes of the naive trie at which prompts part or end while others share them."""
    there = prefixes(prompts)
    return {
        node
        for node, n_prompts in there.items()
        if n_prompts > 1 and all(n < n_prompts for other, n in there.items() if other[:-1] == node)
    }


def n_computed(run: SharedRun, prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens are computed when each run is computed once and then the members' rests."""
    return sum((r.end - r.start) + sum(len(prompts[member]) - r.end for member in r.members) for r in run.walk())


@given(PROMPTS)
def test_runs_are_those_of_the_naive_trie(prompts: Prompts) -> None:
    root = shared_runs(packed(prompts))
    runs = [run for run in root.walk() if run is not root]
    ends = [tuple(prompts[run.holder][: run.end]) for run in runs]
    assert len(ends) == len(set(ends))
    assert set(ends) == branchings(prompts)
    assert sorted(member for run in root.walk() for member in run.members) == list(range(len(prompts)))


@given(PROMPTS)
def test_every_branch_shares_the_whole_run(prompts: Prompts) -> None:
    root = shared_runs(packed(prompts))
    for run in root.walk():
        shared = prompts[run.holder][: run.end] if prompts else []
        assert all(prompts[member][: run.end] == shared for member in run.members)
        for child in run.children:
            assert child.start == run.end < child.end
            assert prompts[child.holder][: run.end] == shared
        if run is not root:
            assert len(run.members) + len(run.children) > 1
            parting = [tuple(prompts[other.holder][run.end : run.end + 1]) for other in run.children]
            parting += [tuple(prompts[member][run.end : run.end + 1]) for member in run.members]
            assert not [first for first, n in Counter(parting).items() if n > 1 and first]


@given(PROMPTS)
def test_unique_tokens_are_the_naive_tries_nodes(prompts: Prompts) -> None:
    assert n_unique_tokens(packed(prompts)) == len(prefixes(prompts))


@given(PROMPTS)
def test_each_unique_token_is_computed_once(prompts: Prompts) -> None:
    assert n_computed(shared_runs(packed(prompts)), prompts) == len(prefixes(prompts))


@given(PROMPTS, st.integers(0, 20), st.integers(0, 30))
def test_folding_costs_what_it_says_and_no_more_than_it_may(prompts: Prompts, least: int, most: int) -> None:
    root = shared_runs(packed(prompts))
    n_folded = fold_small_runs(root, least, most)
    assert n_computed(root, prompts) == len(prefixes(prompts)) + n_folded
    assert n_folded <= most
    assert sorted(member for run in root.walk() for member in run.members) == list(range(len(prompts)))
    for run in root.walk():
        assert all(child.start == run.end for child in run.children)
        if run is not root and n_folded + run.n_repeats <= most:
            assert run.n_repeats >= least


def test_no_prompts_have_an_empty_root() -> None:
    root = shared_runs([])
    assert (root.members, root.children, n_unique_tokens([])) == ([], [], 0)


def test_equal_prompts_share_all_of_themselves() -> None:
    root = shared_runs(packed([[5, 6, 7]] * 3))
    (run,) = root.children
    assert (run.start, run.end, sorted(run.members), run.n_repeats) == (0, 3, [0, 1, 2], 6)


def test_a_run_that_many_share_is_not_folded_however_short() -> None:
    prompts = packed([[1, n, n] for n in range(2, 52)])
    root = shared_runs(prompts)
    assert fold_small_runs(root, least_repeats=16, max_repeats=10_000) == 0
    assert [(run.end, len(run.members)) for run in root.children] == [(1, 50)]


@pytest.mark.parametrize("n_prompts", [30_000])
def test_tens_of_thousands_of_prompts_take_seconds(n_prompts: int) -> None:
    shots = [pack_token_ids(range(start, start + 400)) for start in range(0, 4000, 400)]
    prompts = [
        b"".join(shots[(n * step) % 10] for step in (1, 3, 7)) + pack_token_ids([n, n + 1]) for n in range(n_prompts)
    ]
    started_at = time.perf_counter()
    root = shared_runs(prompts)
    fold_small_runs(root, 16, 1000)
    assert time.perf_counter() - started_at < 30
    assert n_computed(root, [range(1202)] * n_prompts) >= n_unique_tokens(prompts)


def test_a_chain_of_prefixes_needs_no_recursion() -> None:
    prompts = [pack_token_ids(range(n)) for n in range(1, 3000)]
    root = shared_runs(prompts)
    assert sum(1 for _ in root.walk()) == 2999
    assert n_unique_tokens(prompts) == 2999
