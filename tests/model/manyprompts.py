"""Prompts as pipelines have them, and the answers to them: ours, and mlx-lm's one at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

from mlx_lm import stream_generate

from prefixbank.many import ManyOptions, ManyResult, generate_many, in_order
from prefixbank.tokentrie import n_unique_tokens
from tests.model.tiny import random_ids

NOT_BATCHED = ["llama4"]  # chunks of attention, which mlx-lm can't merge
Answer = tuple[list[int], str, str | None]

HEAD = random_ids(30, seed=99)
SHOTS = [random_ids(n, seed=100 + n) for n in (33, 5, 21, 40, 9)]


def joined(shots: list[list[int]]) -> list[int]:
    """Return instructions and shots."""
    return [*HEAD, *chain.from_iterable(shots)]


def query(seed: int) -> list[int]:
    return random_ids(random.Random(seed).randint(1, 25), seed=seed)


def ablations() -> list[list[int]]:
    """Return prompts with the first k = 0..n shots, two queries each."""
    return [joined(SHOTS[:k]) + query(10 * k + q) for k in range(len(SHOTS) + 1) for q in (1, 2)]


def mixed() -> list[list[int]]:
    """Return prompts with three shots each, as nearest neighbours would be picked."""
    draw = random.Random(4)
    return [joined(draw.sample(SHOTS, 3)) + query(500 + n) for n in range(9)]


def oddities() -> list[list[int]]:
    """Return single tokens, equal prompts, prompts that others begin with, and one that shares nothing."""
    whole = ablations()[9]
    return [[5], [5], [6], whole, whole[:-1], whole[:40], [*whole, 1], random_ids(130, seed=7)]


def answers(llm: Any, prompts: Any, **options: Any) -> list[ManyResult]:
    return in_order(as_completed(llm, prompts, **options))


def as_completed(llm: Any, prompts: Any, **options: Any) -> Iterator[tuple[int, ManyResult]]:
    return generate_many(llm._caches, llm._encoder, llm.tokenizer, prompts, ManyOptions(**options))


def cold(llm: Any, prompt: list[int], **options: Any) -> Answer:
    """Return token ids, text and reason of mlx-lm's own generation."""
    responses = list(stream_generate(llm.model, llm.tokenizer, prompt, **options))
    token_ids = [response.token for response in responses]
    reason = responses[-1].finish_reason
    return token_ids[: -1 if reason == "stop" else None], "".join(r.text for r in responses), reason


def seen(results: list[ManyResult]) -> list[Answer]:
    return [(result.token_ids, result.text, result.finish_reason) for result in results]


def n_unique(llm: Any, prompts: list[Any]) -> int:
    return n_unique_tokens([llm._encoder.encode(prompt).token_ids for prompt in prompts])
