"""Own the demo itself: the same queries cold and from the bank, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mlx_lm.generate import stream_generate

from prefixbank.fewshot import FewShotPrompt, RenderedPrompt
from prefixbank.model import BankedModel
from prefixbank.warming import Warmed

__all__ = ["Answer", "DemoReport", "answer", "load_shots", "warm"]

Progress = Callable[[int, int], None]

MAX_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold one query's answer, computed cold by plain mlx-lm and from the bank.

    Times to first token are in seconds, from the call on, tokenising, matching and loading included.
    """

    query: str
    cold_text: str
    text: str
    cached_tokens: int
    computed_tokens: int
    cold_ttft_s: float
    ttft_s: float

    @property
    def equal(self) -> bool:
        """Tell whether both ways gave the same text, as they must."""
        return self.cold_text == self.text

    @property
    def speed_up(self) -> float:
        """Return how many times sooner the first token came from the bank."""
        return self.cold_ttft_s / self.ttft_s


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Hold what the demo did."""

    warmed: Warmed
    warm_s: float
    answers: tuple[Answer, ...]

    @property
    def all_equal(self) -> bool:
        """Tell whether every answer was the same cold and from the bank."""
        return all(answer.equal for answer in self.answers)

    @property
    def median_speed_up(self) -> float:
        """Return the median of the answers' speed-ups."""
        return median(answer.speed_up for answer in self.answers)


def load_shots() -> FewShotPrompt:
    """Return the demo's few-shot prompt: sentiment of reviews, with eight queries."""
    return FewShotPrompt.from_toml(Path(__file__).with_name("sentiment.toml"))


def warm(llm: BankedModel, shots: FewShotPrompt, progress: Progress | None = None) -> tuple[Warmed, float]:
    """Warm the shots into the bank; returns what that did, and the seconds that it took."""
    started_at = time.perf_counter()
    warmed = llm.warm(shots, pin=True, progress=progress)
    return warmed, time.perf_counter() - started_at


def answer(llm: BankedModel, shots: FewShotPrompt, progress: Progress | None = None) -> tuple[Answer, ...]:
    """Answer the shots' queries cold and from the bank, in turn; `progress` is called with (queries done, in all)."""
    _answer_cold(llm, shots.render("warm-up"))  # what the first generation of a process costs is neither's
    answers: list[Answer] = []
    for query in shots.queries:
        if progress is not None:
            progress(len(answers), len(shots.queries))
        prompt = shots.render(query)
        cold_text, cold_ttft_s = _answer_cold(llm, prompt)
        hit = llm.generate(prompt, max_tokens=MAX_TOKENS)
        tokens = (hit.cached_tokens, hit.computed_tokens)
        answers.append(Answer(query, cold_text, hit.text, *tokens, cold_ttft_s, hit.ttft_s))
    return tuple(answers)


def _answer_cold(llm: BankedModel, prompt: RenderedPrompt) -> tuple[str, float]:
    """Return the text that plain mlx-lm gives, and its time to first token in seconds."""
    started_at = time.perf_counter()
    text = ""
    ttft_s = 0.0
    for response in stream_generate(llm.model, llm.tokenizer, llm.encode(prompt), max_tokens=MAX_TOKENS):
        ttft_s = ttft_s or time.perf_counter() - started_at
        text += response.text
    return text, ttft_s
