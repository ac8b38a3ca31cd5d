"""Go on from prompt caches in each way that a bank gives them, and compare with cold ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm import generate, stream_generate
from mlx_lm.models.cache import make_prompt_cache

from prefixbank import PrefixBank
from prefixbank.kvcache.capture import leaf_caches
from tests.model.tiny import random_ids

SHARED = random_ids(50)
PROMPTS = [SHARED + random_ids(5, seed=seed) for seed in range(20, 24)]
N_STEPS = 4

Open = Callable[..., Any]


class Walk:
    """Go on from a prompt cache, a few greedy steps far, and compare each step with what a cold cache gives."""

    _cold: ClassVar[dict[tuple[int, tuple[int, ...]], tuple[list[mx.array], list[int]]]] = {}
    cold_answers: ClassVar[dict[tuple[int, tuple[int, ...]], list[Any]]] = {}

    def __init__(self, model: Any, prompt: list[int], prompt_cache: list[Any], rest: list[int]) -> None:
        self.model = model
        self.wanted, self.tokens = self.cold(model, prompt)
        self.prompt_cache = prompt_cache
        self.rest = rest
        self.n_done = 0

    @classmethod
    def forget(cls) -> None:
        """Forget what was cold of models that are gone, or whose weights are other ones now."""
        cls._cold.clear()
        cls.cold_answers.clear()

    @classmethod
    def cold(cls, model: Any, prompt: list[int]) -> tuple[list[mx.array], list[int]]:
        name = id(model), tuple(prompt)
        if name not in cls._cold:
            prompt_cache = make_prompt_cache(model)
            logits = [model(mx.array(prompt)[None], cache=prompt_cache)[0, -1]]
            tokens = []
            for _ in range(N_STEPS):
                tokens.append(int(mx.argmax(logits[-1]).item()))
                logits.append(model(mx.array([[tokens[-1]]]), cache=prompt_cache)[0, -1])
            mx.eval(logits)
            cls._cold[name] = logits, tokens
        return cls._cold[name]

    @property
    def is_done(self) -> bool:
        return self.n_done > N_STEPS

    def step(self) -> None:
        token_ids = self.rest if self.n_done == 0 else [self.tokens[self.n_done - 1]]
        logits = self.model(mx.array(token_ids)[None], cache=self.prompt_cache)[0, -1]
        error = mx.abs(logits - self.wanted[self.n_done]).max().item()
        assert error < 1e-4, f"step {self.n_done} is off by {error}"
        self.n_done += 1

    def finish(self) -> None:
        while not self.is_done:
            self.step()


def goes_on_right(llm: Any, prompt: list[int], resolved: Any) -> None:
    Walk(llm.model, prompt, resolved.prompt_cache, resolved.rest).finish()


def address(prompt_cache: list[Any]) -> tuple[int, ...]:
    """Return where all rows lie."""
    return tuple(
        np.array(rows, copy=False).ctypes.data for one in leaf_caches(prompt_cache) for rows in (one.keys, one.values)
    )


def cold_text(llm: Any, prompt: list[int], n_tokens: int = 8) -> str:
    text: str = generate(llm.model, llm.tokenizer, prompt, max_tokens=n_tokens)
    return text


def answers_as_cold(llm: Any, prompt: Any, n_tokens: int = 5, **options: Any) -> int:
    """Compare tokens and their log-probabilities, which tell what a text may not; returns the cached tokens."""
    token_ids = llm.encode(prompt)
    name = id(llm.model), (*token_ids, -n_tokens)
    if name not in Walk.cold_answers:
        Walk.cold_answers[name] = list(stream_generate(llm.model, llm.tokenizer, token_ids, max_tokens=n_tokens))
    wanted = Walk.cold_answers[name]
    answer = list(llm.stream_generate(prompt, max_tokens=n_tokens, **options))
    assert "".join(r.text for r in answer) == "".join(r.text for r in wanted)
    for one, other in zip(answer, wanted, strict=True):
        assert one.token == other.token
        assert mx.abs(one.logprobs - other.logprobs).max().item() < 1e-4
    return int(answer[0].cached_tokens)


def kept(bank: PrefixBank) -> list[int]:
    """Return the lengths of the prefixes that are kept in memory."""
    return sorted(prefix.n_tokens for prefix in bank._session.memory._kept.values())


Way = Callable[[Any, list[int], ExitStack], tuple[list[Any], list[int]]]


def by_resolve(llm: Any, prompt: list[int], _: ExitStack) -> tuple[list[Any], list[int]]:
    resolved = llm.resolve(prompt)
    return resolved.prompt_cache, resolved.rest


def by_checkout(llm: Any, prompt: list[int], stack: ExitStack) -> tuple[list[Any], list[int]]:
    lease = stack.enter_context(llm.checkout(prompt))
    return lease.prompt_cache, lease.rest


def by_prefill(llm: Any, prompt: list[int], _: ExitStack) -> tuple[list[Any], list[int]]:
    resolved = llm.prefill(prompt)
    return resolved.prompt_cache, resolved.rest


def by_resolve_from_files(llm: Any, prompt: list[int], _: ExitStack) -> tuple[list[Any], list[int]]:
    llm._session.memory.clear()
    return by_resolve(llm, prompt, _)


WAYS: dict[str, Way] = {
    "resolve": by_resolve,
    "checkout": by_checkout,
    "prefill": by_prefill,
    "files": by_resolve_from_files,
}


def held_bytes(prompt_cache: list[Any]) -> int:
    """Return what a prompt cache's arrays take, as mlx-lm counts it."""
    return sum(one.nbytes for one in leaf_caches(prompt_cache) if one is not None)
