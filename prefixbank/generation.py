"""Own generating from the bank: results, logits processors that see all tokens, and what is stored afterwards.

Storing waits until the answer is out: it reads rows that stay in the live cache, and must not delay the first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, stream_generate

from prefixbank import computing
from prefixbank.chunking import TOKEN_BYTES, unpack_token_ids
from prefixbank.errors import ConfigError
from prefixbank.promptcaches import Progress, PromptCaches, Resolved
from prefixbank.prompts import EncodedPrompt
from prefixbank.values import Match

if TYPE_CHECKING:
    from prefixbank.kvcache.capture import CacheRecorder
    from prefixbank.model import BankedModel

__all__ = ["BankedResponse", "GenerationOptions", "GenerationResult", "collect", "seeing_all", "stream"]

MAX_RESERVE = 1024
"""How many tokens an answer gets room for in advance at most; beyond that the cache grows as mlx-lm's does."""

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass
class BankedResponse(GenerationResponse):  # type: ignore[misc]  # mlx-lm is untyped
    """Be mlx-lm's `GenerationResponse` for the whole prompt, with what the bank did.

    `prompt_tokens` counts the whole prompt and `prompt_tps` the tokens computed; `ttft_s` is the time in seconds from
    the call to the first token, matching and loading included.
    """

    cached_tokens: int = 0
    computed_tokens: int = 0
    ttft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Hold one answer.

    `token_ids` are the answer's (without an end-of-sequence token), `cached_tokens` came from the bank and
    `computed_tokens` of the prompt were computed. `prompt_cache` is given on request: it holds prompt and answer.
    """

    text: str
    token_ids: list[int]
    cached_tokens: int
    computed_tokens: int
    ttft_s: float
    finish_reason: str | None
    match: Match
    prompt_cache: list[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Hold the options of `BankedModel.generate`, which documents them."""

    max_tokens: int = 256
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    prefill_step_size: int | None = None
    reserve: int | None = None
    hold_back: int = 0
    keep: bool = False
    draft_model: BankedModel | None = None
    num_draft_tokens: int = 2
    progress: Progress | None = None


def stream(
    caches: PromptCaches,
    tokenizer: Any,
    prompt: EncodedPrompt,
    options: GenerationOptions,
    started_at: float,
    outcome: list[Resolved],
    draft: PromptCaches | None = None,
    *,
    lend: bool = False,
) -> Iterator[BankedResponse]:
    """Yield the answer piece by piece; appends what the bank gave to `outcome` first."""
    reserve = options.reserve if options.reserve is not None else min(options.max_tokens, MAX_RESERVE)
    token_ids = unpack_token_ids(prompt.token_ids)
    # What the models have to store afterwards: with a draft model both, each in its own namespace.
    to_store: list[tuple[PromptCaches, Resolved, CacheRecorder | None]]
    if draft is None:
        resolved = caches.resolve(prompt, reserve=reserve, hold_back=options.hold_back, lend=lend)
        ahead, recorder = computing.follow(
            caches, prompt, resolved, options.hold_back, options.prefill_step_size, options.progress
        )
        to_store = [(caches, ahead, recorder)]
        given: dict[str, Any] = {
            "prompt_cache": ahead.prompt_cache,
            "prompt_progress_callback": _shifted(options.progress, len(token_ids) - len(ahead.rest)),
            "logits_processors": seeing_all(options.logits_processors, token_ids[: len(token_ids) - len(ahead.rest)]),
            **caches.options.generate_options(),
        }
    else:
        resolved, drafted = resolve_alike(caches, draft, prompt, reserve, options.hold_back)
        ahead = resolved
        to_store = [(caches, resolved, None), (draft, drafted, None)]
        given = {
            "draft_model": draft.model,
            "num_draft_tokens": options.num_draft_tokens,
            "prompt_cache": [*resolved.prompt_cache, *drafted.prompt_cache],
            # With a draft model mlx-lm shows processors nothing of the prompt but its last token.
            "logits_processors": seeing_all(options.logits_processors, token_ids[:-1]),
        }
    n_cached, n_computed = resolved.match.n_tokens, len(resolved.rest)
    outcome.append(resolved)
    caches.session.count(cached_tokens=n_cached, computed_tokens=n_computed)
    answer: list[int] = []
    ttft_s = 0.0
    done = False
    responses = stream_generate(
        caches.model,
        tokenizer,
        ahead.rest,
        max_tokens=options.max_tokens,
        sampler=options.sampler,
        prefill_step_size=options.prefill_step_size or caches.prefill_step_size,
        **given,
    )
    try:
        with closing(responses):
            for response in responses:
                if not answer:
                    ttft_s = time.perf_counter() - started_at
                    if draft is None:
                        caches.note_computed(len(ahead.rest), len(ahead.rest) / response.prompt_tps)
                answer.append(response.token)
                values = {f.name: getattr(response, f.name) for f in fields(response)}
                yield BankedResponse(
                    **{**values, "prompt_tokens": len(token_ids)},
                    cached_tokens=n_cached,
                    computed_tokens=n_computed,
                    ttft_s=ttft_s,
                )
        done = True
    except GeneratorExit:
        done = True  # the caller has what it wanted
        raise
    finally:
        if done:
            for whose, made, recorder in to_store:
                computing.keep_after_generation(
                    whose, prompt, made, recorder, answer, keep=options.keep, hold_back=options.hold_back
                )


def resolve_alike(
    caches: PromptCaches, draft: PromptCaches, prompt: EncodedPrompt, reserve: int, hold_back: int
) -> tuple[Resolved, Resolved]:
    """Return a model's and its draft model's prompt caches of the same prefix: both get the same rest.

    Raises `ConfigError` for models whose caches mlx-lm can't trim, as speculative decoding must.
    """
    if not (caches.can_run_ahead() and draft.can_run_ahead()):
        raise ConfigError("speculative decoding needs caches that can be trimmed: none with windows, states or kv_bits")
    n_prompt = len(prompt.token_ids) // TOKEN_BYTES
    n_tokens = min(whose.match(prompt, hold_back).n_tokens for whose in (caches, draft))
    while True:
        left = n_prompt - n_tokens
        pair = tuple(whose.resolve(prompt, reserve=reserve, hold_back=left) for whose in (caches, draft))
        lengths = [resolved.match.n_tokens for resolved in pair]
        if lengths[0] == lengths[1]:
            return pair[0], pair[1]
        n_tokens = min(lengths)  # a shard failed: its model goes on from less


def collect(
    responses: Iterator[BankedResponse],
    outcome: list[Resolved],
    eos_token_ids: set[int],
    *,
    with_prompt_cache: bool,
) -> GenerationResult:
    """Return the whole answer of a stream."""
    text = ""
    token_ids: list[int] = []
    last: BankedResponse | None = None
    for response in responses:
        text += response.text
        token_ids.append(response.token)
        last = response
    assert last is not None
    if last.finish_reason == "stop" and token_ids and token_ids[-1] in eos_token_ids:
        token_ids.pop()
    return GenerationResult(
        text=text,
        token_ids=token_ids,
        cached_tokens=last.cached_tokens,
        computed_tokens=last.computed_tokens,
        ttft_s=last.ttft_s,
        finish_reason=last.finish_reason,
        match=outcome[0].match,
        prompt_cache=outcome[0].prompt_cache if with_prompt_cache else None,
    )


def _shifted(progress: Progress | None, n_cached: int) -> Progress | None:
    """Return a callback that counts the whole prompt's tokens, those from the bank as processed."""
    if progress is None:
        return None
    return lambda processed, total: progress(n_cached + processed, n_cached + total)


def seeing_all(
    processors: Sequence[LogitsProcessor] | None, cached_token_ids: list[int]
) -> list[LogitsProcessor] | None:
    """Return processors that are given the whole prompt's token ids: mlx-lm knows only of those it computes."""
    if not processors:
        return None
    cached = mx.array(cached_token_ids, mx.uint32)

    def seeing_all(processor: LogitsProcessor) -> LogitsProcessor:
        def process(token_ids: mx.array, logits: mx.array) -> mx.array:
            return processor(mx.concatenate([cached.astype(token_ids.dtype), token_ids]), logits)

        return process

    return [seeing_all(processor) for processor in processors]
