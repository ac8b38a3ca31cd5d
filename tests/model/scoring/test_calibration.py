"""Scores are normalised by length and calibrated by content-free prompts as plain numbers say."""

from __future__ import annotations

import warnings
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from prefixbank import ConfigError, PromptError
from tests.model.scoring.plainscores import CHOICES, PROMPT, score, score_many
from tests.model.test_prompts import SHOTS
from tests.model.tiny import random_ids


def test_scores_are_normalised_by_length(llm: Any) -> None:
    choices = [" positive", " negative and long", " é"]
    prompt = "review: the lamp\nsentiment:"
    raw = score(llm, prompt, choices)
    assert raw.scores == raw.log_probs
    for unit, lengths in (
        ("tokens", raw.n_tokens),
        ("characters", [9, 18, 2]),
        ("bytes", [9, 18, 3]),
    ):
        result = score(llm, prompt, choices, normalise=unit)
        np.testing.assert_allclose(result.log_probs, raw.log_probs, atol=1e-4)
        np.testing.assert_allclose(result.scores, np.array(raw.log_probs) / lengths, atol=1e-4)
        shares = np.exp(np.array(result.scores))
        np.testing.assert_allclose(result.probabilities, shares / shares.sum(), atol=1e-6)
        assert result.best == int(np.argmax(result.scores))
    with pytest.raises(ConfigError, match="normalise='words'"):
        score(llm, prompt, choices, normalise="words")
    with pytest.raises(ConfigError, match="normalise='words'"):
        score_many(llm, [prompt], choices, normalise="words")


@pytest.mark.parametrize("unit", ["none", "tokens"])
def test_calibration_divides_by_the_mean_of_content_free_probabilities(unit: Any, llm: Any) -> None:
    choices = [" positive", " negative", " neither"]
    blanks = [SHOTS.render(blank) for blank in ("N/A", "", "[MASK]")]

    def shares(prompt: Any) -> Any:
        values = np.exp(np.array(score(llm, prompt, choices, normalise=unit).scores))
        return values / values.sum()

    prompt = SHOTS.render("a dull film")
    for given in (blanks[0], blanks[:1], blanks, tuple(blanks)):
        used = given if isinstance(given, list | tuple) else [given]
        free = np.mean([shares(blank) for blank in used], axis=0)
        expected = shares(prompt) / free
        expected /= expected.sum()
        result = score(llm, prompt, choices, normalise=unit, calibrate=given)
        np.testing.assert_allclose(result.probabilities, expected, atol=1e-5)
        np.testing.assert_allclose(result.scores, np.log(expected), atol=1e-4)
        assert result.best == int(np.argmax(expected))
    itself = score(llm, prompt, choices, calibrate=prompt)
    np.testing.assert_allclose(itself.probabilities, [1 / 3] * 3, atol=1e-5)


def test_content_free_prompts_may_be_of_any_form(llm: Any) -> None:
    ids = llm.encode("N/A")
    chat = [{"role": "user", "content": "N/A"}]
    expected = score(llm, PROMPT, CHOICES, calibrate=ids).scores
    for given in ("N/A", [ids], ["N/A"], mx.array(ids), np.array(ids), [ids, ids]):
        np.testing.assert_allclose(score(llm, PROMPT, CHOICES, calibrate=given).scores, expected, atol=1e-4)
    one, several = (score(llm, PROMPT, CHOICES, calibrate=given).scores for given in (chat, [chat, chat]))
    np.testing.assert_allclose(one, several, atol=1e-4)
    for bad in ([], SHOTS, 7):
        with pytest.raises(PromptError, match="calibrate must be"):
            score(llm, PROMPT, CHOICES, calibrate=bad)
    with pytest.raises(PromptError, match="calibrate 1: the prompt is empty"):
        score(llm, PROMPT, CHOICES, calibrate=["N/A", ""])
    with pytest.raises(PromptError, match="calibrate 0: the prompt is empty"):
        score_many(llm, [PROMPT], CHOICES, calibrate="")


def test_improbable_long_choices_do_not_break_calibration(llm: Any) -> None:
    choices = [[1], random_ids(300), random_ids(200, seed=2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = score(llm, PROMPT, choices, calibrate=[random_ids(10, seed=5), random_ids(12, seed=6)])
    assert np.isfinite(result.scores).all()
    assert np.isclose(sum(result.probabilities), 1)
