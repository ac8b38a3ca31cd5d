"""Scores of many prompts equal those of one at a time, and each shared run is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prefixbank import PrefixBank
from prefixbank.chunking import unpack_token_ids
from tests.model.scoring.plainscores import CHOICES, N_RUNS, is_plain, score, score_many
from tests.model.test_kinds import ALL
from tests.model.test_prompts import SHOTS
from tests.model.tiny import random_ids


@pytest.mark.parametrize("name", ALL)
def test_many_prompts_equal_one_by_one_and_compute_shared_runs_once(
    name: str, models: dict[str, Any], tokenizer: Any, open_bank: Callable[..., PrefixBank]
) -> None:
    model = models[name]
    shared, other = random_ids(60), random_ids(50, seed=9)
    prompts = [(other if n % 2 else shared) + random_ids(6 + n, seed=20 + n) for n in range(8)] + [
        random_ids(40, seed=40)
    ]
    bank = open_bank()
    llm = bank.attach(model, tokenizer)
    seen: list[tuple[int, int]] = []
    results = score_many(llm, prompts, CHOICES, progress=lambda *done: seen.append(done))
    assert seen == [(n, 9) for n in range(1, 10)]
    for prompt, result in zip(prompts, results, strict=True):
        assert is_plain(model, result, prompt, CHOICES)
    tails = sum(6 + n for n in range(8)) + 40
    assert sum(r.computed_tokens for r in results) == 60 + 50 + tails + 9 * N_RUNS
    bank.flush()
    stored = {tuple(unpack_token_ids(chunk.token_ids)) for chunk in bank.chunks()}
    known = {tuple(run[low : low + 16]) for run in (shared, other) for low in range(0, 64, 16)}
    assert stored == known - {()}, "what only one prompt has is not stored"


def test_many_prompts_without_memory_work_from_disk(llm: Any) -> None:
    prompts = [SHOTS.render(query) for query in ("a great soup", "the film", "my bike", "the film")]
    choices = [" positive", " negative"]
    n_shared = len(llm.shared_token_ids(SHOTS))
    results = score_many(llm, prompts, choices)
    n_whole = len(llm.encode(prompts[1]))  # the same prompt again leaves its last token to compute
    assert sorted(r.cached_tokens for r in results) == [0, n_shared, n_shared, n_whole - 1]
    for prompt, result in zip(prompts, results, strict=True):
        np.testing.assert_allclose(result.log_probs, score(llm, prompt, choices).log_probs, atol=1e-4)


def test_choices_may_be_given_for_each_prompt(llm: Any) -> None:
    prompts = [random_ids(20, seed=seed) for seed in range(3)]
    for choices in (
        [[" a", " b"], [" the lamp"], [" positive", " zip", " 7"]],
        [[[1], [2, 3]], [[4]], [[5, 6], [7], [8]]],
    ):
        results = score_many(llm, prompts, choices)
        for prompt, own, result in zip(prompts, choices, results, strict=True):
            assert result.log_probs == pytest.approx(score(llm, prompt, own).log_probs, abs=1e-4)
    for shared in ([[1], [2, 3]], [" a", " b"], [np.array([1]), [2]]):
        results = score_many(llm, iter(prompts), shared)
        assert [len(r.choices) for r in results] == [2, 2, 2]
    assert score_many(llm, [], [" a"]) == []


def test_content_free_prompts_are_scored_once_for_the_same_choices(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixbank.weighing import ChoiceWeights

    prompts = [SHOTS.render(query) for query in ("a great soup", "the film", "my bike")]
    blanks = [SHOTS.render("N/A"), SHOTS.render("")]
    own = [[" positive", " negative"], [" good", " bad"], [" positive", " negative"]]
    expected = [score(llm, prompt, c, calibrate=blanks).scores for prompt, c in zip(prompts, own, strict=True)]
    make, n_made = ChoiceWeights.__init__, 0

    def counted(self: Any, *given: Any) -> None:
        nonlocal n_made
        n_made += 1
        make(self, *given)

    monkeypatch.setattr(ChoiceWeights, "__init__", counted)
    for result, scores in zip(score_many(llm, prompts, own, calibrate=blanks), expected, strict=True):
        np.testing.assert_allclose(result.scores, scores, atol=1e-4)
    assert n_made == 3 + 2 * 2
