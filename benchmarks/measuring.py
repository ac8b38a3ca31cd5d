"""Own running a model the way mlx-lm does, and timing contenders in turn."""

from __future__ import annotations

import ctypes
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import mlx.core as mx

from benchmarks.models import VOCAB

__all__ = ["N_SUFFIX", "compute", "give_memory_back", "interleave", "paired_ratio", "random_token_ids", "say"]

N_SUFFIX = 16
"""How many tokens a prompt has behind its stored prefix."""

PREFILL_STEP = 2048  # mlx-lm's default


def say(text: str) -> None:
    """Tell what is being measured, on stderr."""
    print(text, file=sys.stderr, flush=True)


def random_token_ids(n_tokens: int, seed: int | str) -> list[int]:
    """Return token ids; each seed has its own."""
    return random.Random(str(seed)).choices(range(VOCAB), k=n_tokens)


def compute(model: Any, token_ids: Sequence[int], prompt_cache: list[Any]) -> None:
    """Run tokens through a model and evaluate the logits of the last one.

    As mlx-lm does, in steps, and without the logits of all steps but the last, which takes `N_SUFFIX` tokens: so cold
    and cached prompts end alike.
    """
    end = max(len(token_ids) - N_SUFFIX, 0)
    for start in range(0, end, PREFILL_STEP):
        model(mx.array(token_ids[start : min(start + PREFILL_STEP, end)])[None], cache=prompt_cache)
        mx.eval([layer_cache.state for layer_cache in prompt_cache])
    logits = model(mx.array(token_ids[end:])[None], cache=prompt_cache)
    mx.eval(logits[:, -1], [layer_cache.state for layer_cache in prompt_cache])


def give_memory_back() -> None:
    """Give freed memory back to the system, so that what is allocated next is fresh."""
    mx.clear_cache()
    with suppress(AttributeError, OSError):  # only glibc has it, see malloc_trim(3)
        ctypes.CDLL(None).malloc_trim(0)


def interleave(contenders: Mapping[str, Callable[[], object]], repeats: Mapping[str, int]) -> dict[str, list[float]]:
    """Return each contender's seconds, one figure a repeat.

    The contenders run in turn, each round beginning with the next one, so that a slow moment of the machine meets all
    of them. A contender of fewer repeats takes part in the first rounds only.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(max(repeats[name] for name in names)):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            if number < repeats[name]:
                started_at = time.perf_counter()
                contenders[name]()
                seconds[name].append(time.perf_counter() - started_at)
    return seconds


def paired_ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds of one contender's time by another's, in the rounds that both ran."""
    return median(mine / its for mine, its in zip(seconds, others, strict=False))
