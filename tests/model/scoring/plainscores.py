"""Choices behind a prompt, and their scores by plain forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from prefixbank import ScoreResult
from tests.model.tiny import random_ids

PROMPT = random_ids(70)
CHOICES = [
    [5],
    [5, 9, 11],  # one choice is a prefix of this one
    [5, 9, 12, 40, 41],
    [5, 9, 12, 40, 42, 43],
    [7, 8],
    [30, 31, 32, 33, 34, 35, 36],
    [44, 45, 46],
]
N_RUNS = 2 + 2 + 1 + 1 + 6 + 2
"""[5, 9], behind it [12, 40] and [42], and the others without their last tokens; the tokens that end a choice aren't
run."""


def score(llm: Any, prompt: Any, choices: Any, **options: Any) -> ScoreResult:
    return llm.score(prompt, choices, **options)


def score_many(llm: Any, prompts: Any, choices: Any, **options: Any) -> list[ScoreResult]:
    return llm.score_many(prompts, choices, **options)


def plain(model: Any, prompt: Sequence[int], choice: Sequence[int]) -> tuple[float, bool]:
    """Return the log-probability of token ids behind others by one forward pass over all, and whether it is greedy."""
    token_ids = mx.array([*prompt, *choice])[None]
    logits = model(token_ids, cache=make_prompt_cache(model))[0, len(prompt) - 1 : -1]
    log_probs = nn.log_softmax(logits.astype(mx.float32), axis=-1)
    targets = mx.array(choice)
    chosen = mx.take_along_axis(log_probs, targets[:, None], axis=-1)
    return chosen.sum().item(), bool((mx.argmax(logits, axis=-1) == targets).all().item())


def is_plain(model: Any, result: ScoreResult, prompt: Sequence[int], choices: Sequence[Sequence[int]]) -> bool:
    expected = [plain(model, prompt, choice) for choice in choices]
    np.testing.assert_allclose(result.log_probs, [log_prob for log_prob, _ in expected], atol=1e-4, rtol=0)
    assert result.is_greedy == [greedy for _, greedy in expected]
    assert result.best == int(np.argmax([log_prob for log_prob, _ in expected]))
    return True
