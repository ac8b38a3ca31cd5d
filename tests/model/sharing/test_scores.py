"""Scores of many prompts in batches are those of plain forward passes, with shared rows and with merged caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from prefixbank import ConfigError, PrefixBank, PromptError
from prefixbank.chunking import unpack_token_ids
from prefixbank.kvcache.sharedrows import SharedKVCache
from tests.model.scoring.plainscores import CHOICES, N_RUNS, plain
from tests.model.sharing.test_batches import SHARING
from tests.model.tiny import CONFIGS, build_model, random_ids

HEAD, GROUP = random_ids(60), random_ids(40, seed=8)
PROMPTS = [
    *(HEAD + random_ids(1 + 3 * n, seed=20 + n) for n in range(6)),
    *(HEAD + GROUP + random_ids(9 - n, seed=40 + n) for n in range(5)),
    random_ids(25, seed=7),
    HEAD + GROUP,
    [5],
]
EACH = [CHOICES[: 1 + at % len(CHOICES)] for at in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: build_model(name) for name in CONFIGS}


@pytest.fixture(scope="module")
def expected(models: dict[str, Any]) -> Any:
    known: dict[str, Any] = {}

    def compute(name: str) -> Any:
        if name not in known:
            known[name] = [[plain(models[name], p, c) for c in own] for p, own in zip(PROMPTS, EACH, strict=True)]
        return known[name]

    return compute


@pytest.mark.parametrize("batch_size", [2, 5, 32])
@pytest.mark.parametrize("choice", ["always", "off"])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_equal_a_plain_forward_pass(
    name: str,
    choice: Any,
    batch_size: int,
    models: dict[str, Any],
    expected: Any,
    tokenizer: Any,
    small_bank: PrefixBank,
) -> None:
    if choice == "always" and name not in SHARING:
        pytest.skip("no layer shares")
    llm = small_bank.attach(models[name], tokenizer)
    for _ in range(2):  # the second time from the bank
        results = llm.score_many(PROMPTS, EACH, batch_size=batch_size, shared_attention=choice)
        for result, pairs in zip(results, expected(name), strict=True):
            np.testing.assert_allclose(result.log_probs, [log_prob for log_prob, _ in pairs], atol=1e-4, rtol=0)
            assert result.is_greedy == [is_greedy for _, is_greedy in pairs]
        small_bank.flush()


def test_all_but_the_first_of_a_group_compute_their_own_tokens_alone(llm: Any, small_bank: PrefixBank) -> None:
    prompts = [HEAD + random_ids(5, seed=n) for n in range(6)]
    results = llm.score_many(prompts, CHOICES, shared_attention="always")
    assert sorted(result.computed_tokens for result in results) == [5 + N_RUNS] * 5 + [65 + N_RUNS]
    assert sorted(result.cached_tokens for result in results) == [0] + [60] * 5
    counts = small_bank.stats().session
    assert (counts["computed_tokens"], counts["cached_tokens"]) == (90 + 6 * N_RUNS, 300)
    small_bank.flush()
    assert {token for chunk in small_bank.chunks() for token in unpack_token_ids(chunk.token_ids)} <= set(HEAD)


def test_declared_shots_of_a_single_prompt_are_stored(llm: Any, small_bank: PrefixBank) -> None:
    from tests.model.test_prompts import SHOTS

    llm.score_many([SHOTS.render("the film"), [1, 2, 3]], [" good", " bad"])
    small_bank.flush()
    n_shared = len(llm.shared_token_ids(SHOTS))
    assert llm.match(SHOTS.render("my bike")).n_tokens == n_shared
    llm.generate_many([SHOTS.render("7")], max_tokens=1)
    assert sum(chunk.n_tokens for chunk in small_bank.chunks()) == n_shared


def test_few_forward_passes_are_needed(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    call = type(llm.model).__call__

    def counted(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if inputs.shape != (1, 1):  # a graph that is built to see the layout
            shapes.append(inputs.shape)
        return call(self, inputs, *args, **kwargs)

    prompts = [HEAD + random_ids(5, seed=n) for n in range(6)]
    llm.warm(HEAD)
    monkeypatch.setattr(type(llm.model), "__call__", counted)
    llm.score_many(prompts, [[n] for n in range(50)], shared_attention="off")
    assert shapes == [(6, 3), (6, 2)]  # first tokens of choices need none
    shapes.clear()
    llm.score_many(prompts, [[1, 2, 3], [1, 2, 4], [5, 6]], shared_attention="off")
    assert shapes == [(6, 3), (6, 2), (12, 2)]


def test_batches_stay_within_their_bytes(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixbank import batchweighing

    whole = llm.score_many(PROMPTS, EACH)
    for n_bytes in (1, 100_000, 1_000_000):
        monkeypatch.setattr(batchweighing, "BATCH_BYTES", n_bytes)
        for result, right in zip(llm.score_many(PROMPTS, EACH), whole, strict=True):
            np.testing.assert_allclose(result.log_probs, right.log_probs, atol=1e-4)
    steps = llm.score_many(PROMPTS, EACH, prefill_step_size=2)
    for result, right in zip(steps, whole, strict=True):
        np.testing.assert_allclose(result.log_probs, right.log_probs, atol=1e-4)


@pytest.mark.parametrize(("n_shared", "choice", "expected"), [(63, "auto", 0), (64, "auto", 6), (9, "always", 6)])
def test_scores_share_prefixes_of_64_tokens(
    n_shared: int, choice: Any, expected: int, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    init = SharedKVCache.__init__
    monkeypatch.setattr(SharedKVCache, "__init__", lambda self, *given: made.append(given) or init(self, *given))
    _ = llm._caches.sharing  # tries a batch out
    made.clear()
    llm.score_many([random_ids(n_shared) + random_ids(20, seed=n) for n in range(6)], CHOICES, shared_attention=choice)
    assert sum(bool(chain) for chain, _ in made) == expected * 2  # layers


def test_unknown_token_ids_of_choices_are_refused_before_most_is_computed(llm: Any, small_bank: PrefixBank) -> None:
    prompts = [random_ids(20, seed=n) for n in range(9)]
    with pytest.raises(PromptError, match="prompt 8: choice 1 has the token id 400: the model knows 320"):
        llm.score_many(prompts, [*[CHOICES] * 8, [[1], [400]]], batch_size=2)
    assert small_bank.stats().session["computed_tokens"] <= 60


@pytest.mark.parametrize(
    ("options", "message"), [({"batch_size": 0}, "batch_size=0"), ({"shared_attention": "yes"}, "shared_attention")]
)
def test_unusable_options_are_refused(options: Any, message: str, llm: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.score_many(PROMPTS, CHOICES, **options)
