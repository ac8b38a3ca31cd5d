"""Own decoding the answers of many prompts: in batches where mlx-lm can do it exactly, one by one where not."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, stream_generate

from prefixbank.generation import LogitsProcessor, Sampler, seeing_all
from prefixbank.kvcache.sharedattention import shared_attention
from prefixbank.promptcaches import PromptCaches
from prefixbank.triewalk import Job, TrieWalk

__all__ = ["decode"]

_NO_LIMIT = 2**31 - 1
_MOST_MERGED = 8
"""How many prompts are read together where each has a copy of the prefix; mlx-lm's default."""
_STEP_TOKENS = 8 * 2048
"""How many tokens of prompts that share a prefix are read in one step, padding included: mlx-lm's defaults together."""


def decode(
    caches: PromptCaches,
    tokenizer: Any,
    jobs: TrieWalk,
    *,
    max_tokens: int,
    sampler: Sampler | None,
    logits_processors: Sequence[LogitsProcessor] | None,
    batch_size: int,
    prefill_step_size: int | None,
) -> Generator[list[Job], None, None]:
    """Yield the jobs that are done, those that end together in one list; asks for more jobs as there is room.

    `batch_size` is 1 for caches that can't be batched.
    """
    step = prefill_step_size or caches.prefill_step_size
    if batch_size == 1:
        for job in jobs:
            _decode_alone(caches, tokenizer, job, max_tokens, sampler, logits_processors, step)
            yield [job]
        return
    # mlx-lm reads as many prompts together as it merges; with shared rows all of them cost no more memory than a few.
    n_read = batch_size if jobs.shares else min(batch_size, _MOST_MERGED)
    generator = BatchGenerator(
        caches.model,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        sampler=None if sampler is None else _by_rows(sampler),
        logits_processors=list(logits_processors or ()),
        completion_batch_size=batch_size,
        prefill_batch_size=n_read,
        prefill_step_size=min(step, max(_STEP_TOKENS // n_read, 1)) if jobs.shares else step,
    )

    def step_all() -> list[Job]:
        with shared_attention(caches.model) if jobs.shares else nullcontext():
            return _step(generator, running, tokenizer)

    running: dict[int, Job] = {}
    with closing(generator):
        for job in jobs:
            job.batched = True
            caches.session.count(**{"shared_prefixes" if job.shared_tokens else "merged_prefixes": 1})
            (uid,) = generator.insert(
                [job.rest],
                [max_tokens if max_tokens > 0 else _NO_LIMIT],
                caches=[job.prompt_cache],
                all_tokens=[job.before if logits_processors else []],
            )
            job.prompt_cache = []  # the batch has it
            running[uid] = job
            while len(running) >= batch_size:
                if done := step_all():
                    yield done
        while running:
            if done := step_all():
                yield done


def _step(generator: BatchGenerator, running: dict[int, Job], tokenizer: Any) -> list[Job]:
    """Decode a token of each running job; return those that are done, which run no more."""
    done = []
    for response in generator.next_generated():
        job = running[response.uid]
        if not job.ttft_s:
            job.ttft_s = time.perf_counter() - job.started_at
        if response.finish_reason != "stop":
            job.answer.append(response.token)
        if response.finish_reason is not None:
            job.finish_reason = response.finish_reason
            job.text = _text(tokenizer, job.answer)
            done.append(running.pop(response.uid))
    return done


def _decode_alone(
    caches: PromptCaches,
    tokenizer: Any,
    job: Job,
    max_tokens: int,
    sampler: Sampler | None,
    logits_processors: Sequence[LogitsProcessor] | None,
    prefill_step_size: int,
) -> None:
    responses = stream_generate(
        caches.model,
        tokenizer,
        job.rest,
        max_tokens=max_tokens,
        sampler=sampler,
        logits_processors=seeing_all(logits_processors, job.before),
        prompt_cache=job.prompt_cache,
        prefill_step_size=prefill_step_size,
        **caches.options.generate_options(),
    )
    with closing(responses):
        for response in responses:
            if not job.ttft_s:
                job.ttft_s = time.perf_counter() - job.started_at
            job.answer.append(response.token)
            job.finish_reason = response.finish_reason
    if job.finish_reason == "stop":
        job.answer.pop()
    job.prompt_cache = []
    job.text = _text(tokenizer, job.answer)


def _text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of an answer as `mlx_lm.generate` does, which need not be what `decode` returns."""
    detokenizer = tokenizer.detokenizer
    for token_id in token_ids:
        detokenizer.add_token(token_id)
    detokenizer.finalize()
    return str(detokenizer.last_segment)


def _by_rows(sampler: Sampler) -> Sampler:
    """Return a sampler for a batch from one that may know of a single row only."""

    def sample(logprobs: mx.array) -> mx.array:
        sampled = sampler(logprobs)
        if sampled.shape == logprobs.shape[:1]:
            return sampled
        return mx.concatenate([sampler(row[None]).reshape(1) for row in logprobs])

    return sample
