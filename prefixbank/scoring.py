"""Own scores of choices behind a prompt: results, normalisation, calibration, and the order of work on many prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixbank.batching import SharedAttention, can_batch, check_shared_attention, scored_from, sharing_for
from prefixbank.batchweighing import weigh_together
from prefixbank.choices import Choice, EncodedChoices, Normalise, checked_choices, encode_choices
from prefixbank.chunking import TOKEN_BYTES
from prefixbank.errors import ConfigError, PromptError
from prefixbank.fewshot import RenderedPrompt
from prefixbank.promptcaches import PromptCaches
from prefixbank.prompts import EncodedPrompt, Prompt, PromptEncoder, named
from prefixbank.tokentrie import fold_small_runs, shared_runs
from prefixbank.weighing import ChoiceWeights

__all__ = ["Choice", "Normalise", "ScoreResult", "score", "score_many"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Hold how probable each choice is behind a prompt; all lists are in the order of the choices.

    `log_probs` are the sums of their tokens' log-probabilities, in nats, and `n_tokens` how many tokens these are.
    `scores` are the same after normalisation and calibration, `probabilities` their softmax over the choices, and
    `best` is the index of the highest (the first of equal ones). `is_greedy` says whether greedy decoding would write
    the choice. `cached_tokens` of the prompt came from the bank, or had been computed for another prompt;
    `computed_tokens` were run through the model, of prompt and choices (without padding).
    """

    choices: list[str]
    log_probs: list[float]
    scores: list[float]
    probabilities: list[float]
    n_tokens: list[int]
    is_greedy: list[bool]
    best: int
    cached_tokens: int
    computed_tokens: int

    @property
    def best_choice(self) -> str:
        """Return the text of the best choice."""
        return self.choices[self.best]

    def ranked(self) -> list[tuple[str, float]]:
        """Return choices and their scores, the best first; equal ones keep their order."""
        return sorted(zip(self.choices, self.scores, strict=True), key=lambda pair: -pair[1])


def score(
    caches: PromptCaches,
    encoder: PromptEncoder,
    tokenizer: Any,
    prompt: Prompt,
    choices: Iterable[Choice],
    *,
    normalise: Normalise = "none",
    calibrate: Prompt | Sequence[Prompt] | None = None,
    prefill_step_size: int | None = None,
    context_tokens: int | None = None,
) -> ScoreResult:
    """Score choices behind one prompt; see `BankedModel.score`. More than `context_tokens` are refused."""
    checked = checked_choices(choices)
    encoded = encode_choices(encoder, tokenizer, prompt, checked)
    encoded.check_lengths(context_tokens)
    encoded.lengths(normalise)
    blanks = [
        named(f"calibrate {n}", encode_choices, encoder, tokenizer, blank, checked)
        for n, blank in enumerate(_content_free(calibrate))
    ]
    free = [ChoiceWeights(caches, blank, prefill_step_size).run() for blank in blanks]
    return _result(ChoiceWeights(caches, encoded, prefill_step_size).run(), free, normalise)


def score_many(
    caches: PromptCaches,
    encoder: PromptEncoder,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    choices: Sequence[Choice] | Sequence[Sequence[Choice]],
    *,
    normalise: Normalise = "none",
    calibrate: Prompt | Sequence[Prompt] | None = None,
    prefill_step_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    batch_size: int = 16,
    shared_attention: SharedAttention = "auto",
    context_tokens: int | None = None,
) -> list[ScoreResult]:
    """Score choices behind many prompts; see `BankedModel.score_many`. More than `context_tokens` are refused."""
    check_shared_attention(shared_attention)
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    prompts = list(prompts)
    if _is_shared(choices):
        each = [checked_choices(choices)] * len(prompts)  # type: ignore[arg-type]
    else:
        each = [named(f"prompt {n}", checked_choices, own) for n, own in enumerate(choices)]
        if len(each) != len(prompts):
            raise PromptError(f"{len(prompts)} prompts were given and choices for {len(each)}")
    jobs = [
        named(f"prompt {n}", encode_choices, encoder, tokenizer, prompt, own)
        for n, (prompt, own) in enumerate(zip(prompts, each, strict=True))
    ]
    for n, job in enumerate(jobs):
        named(f"prompt {n}", job.check_lengths, context_tokens)
    blanks = _content_free(calibrate)
    # Content-free prompts are scored among the others, where their prefix is, and once for the same choices.
    free_at: dict[tuple[str | tuple[int, ...], ...], range] = {}
    for own in each if blanks else ():
        if own not in free_at:
            free_at[own] = range(len(jobs), len(jobs) + len(blanks))
            jobs += [
                named(f"calibrate {n}", encode_choices, encoder, tokenizer, blank, own)
                for n, blank in enumerate(blanks)
            ]
    for job in jobs[:1]:
        job.lengths(normalise)

    def name(at: int) -> str:
        return f"prompt {at}" if at < len(prompts) else "calibrate"

    done = [ChoiceWeights(caches, job, prefill_step_size) for job in jobs]
    n_done = 0
    for indexes in _run(caches, done, name, batch_size, prefill_step_size, shared_attention):
        for _ in indexes:
            n_done += 1
            if progress is not None:
                progress(n_done, len(jobs))
    return [
        _result(done[at], [done[blank] for blank in free_at.get(own, ())], normalise) for at, own in enumerate(each)
    ]


def _run(
    caches: PromptCaches,
    jobs: list[ChoiceWeights],
    name: Callable[[int], str],
    batch_size: int,
    prefill_step_size: int | None,
    choice: SharedAttention,
) -> Iterator[list[int]]:
    """Run all jobs, together where mlx-lm's caches can be batched; yield the indexes of those that are done."""
    if batch_size > 1 and len(jobs) > 1 and can_batch(caches):
        sharing = sharing_for(caches, choice)
        yield from weigh_together(
            caches,
            jobs,
            name,
            sharing=sharing,
            shared_from=scored_from(sharing, choice),
            batch_size=batch_size,
            prefill_step_size=prefill_step_size,
        )
        return
    for at, prompt in _in_order([job.encoded for job in jobs], max(caches.session.chunk_tokens // 4, 1)):
        jobs[at].encoded = prompt
        named(name(at), jobs[at].run)
        yield [at]


def _result(scored: ChoiceWeights, free: Sequence[ChoiceWeights], normalise: Normalise) -> ScoreResult:
    """Normalise and calibrate.

    Calibration divides the choices' probabilities by the sum of those behind content-free prompts (the mean, but for a
    factor), and makes their sum one again: the diagonal form of Zhao et al., "Calibrate Before Use" (2021), https://arxiv.org/abs/2102.09690.
    """
    scores = _normalised(scored, normalise)
    if free:
        behind_nothing = np.array([_log_softmax(_normalised(blank, normalise)) for blank in free])
        scores = _log_softmax(_log_softmax(scores) - _log_sum(behind_nothing))
    encoded = scored.encoded
    return ScoreResult(
        choices=list(encoded.texts),
        log_probs=scored.log_probs,
        scores=scores.tolist(),
        probabilities=np.exp(_log_softmax(scores)).tolist(),
        n_tokens=[len(suffix) for suffix in encoded.suffixes],
        is_greedy=scored.is_greedy,
        best=int(np.argmax(scores)),
        cached_tokens=scored.cached_tokens,
        computed_tokens=scored.computed_tokens,
    )


def _normalised(scored: ChoiceWeights, normalise: Normalise) -> Floats:
    return np.array(scored.log_probs, np.float64) / np.array(scored.encoded.lengths(normalise), np.float64)


def _log_softmax(values: Floats) -> Floats:
    return values - _log_sum(values)


def _log_sum(values: Floats) -> Floats:
    """Return the logarithm of the sum of exponentials along the first axis."""
    return np.asarray(np.logaddexp.reduce(values, axis=0), np.float64)


def _content_free(calibrate: Prompt | Sequence[Prompt] | None) -> list[Prompt]:
    """Return one content-free prompt or several as a list."""
    if calibrate is None:
        return []
    if isinstance(calibrate, str | RenderedPrompt) or hasattr(calibrate, "tolist"):
        return [calibrate]  # type: ignore[list-item]
    if not isinstance(calibrate, Sequence) or not calibrate:
        raise PromptError("calibrate must be a prompt or a list of prompts, not empty, or None")
    if isinstance(calibrate[0], Integral | dict):
        return [calibrate]  # type: ignore[list-item]
    return list(calibrate)  # type: ignore[arg-type]


def _is_shared(choices: Any) -> bool:
    """Tell choices that all prompts share from those given for each: the latter are one level deeper."""
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        return True
    first = choices[0]
    return isinstance(first, str) or hasattr(first, "tolist") or (bool(first) and isinstance(first[0], Integral))


def _in_order(jobs: Sequence[EncodedChoices], worth_it: int) -> Iterator[tuple[int, EncodedChoices]]:
    """Yield indices and jobs so that prompts with a common prefix follow each other.

    Of a prompt without declared shots what it shares with others is to be stored, if that is `worth_it` tokens; what
    only one prompt has is not. Runs that save fewer tokens are not worth a shard of their own: of many prompts behind
    the same shots each shares a word or two more with some other one.
    """
    token_ids = [job.prompt.token_ids for job in jobs]
    # The last token is never taken from the bank: recurrent layers must be resumed in front of it.
    root = shared_runs([ids[:-TOKEN_BYTES] for ids in token_ids])
    fold_small_runs(root, worth_it, sys.maxsize)
    n_shared = {member: run.end for run in root.walk() for member in run.members}
    for at in sorted(range(len(jobs)), key=token_ids.__getitem__):
        job = jobs[at]
        if job.prompt.n_shared_tokens is None:
            prompt = EncodedPrompt(token_ids[at], n_shared[at] if n_shared[at] >= worth_it else 0)
            job = replace(job, prompt=prompt)
        yield at, job
