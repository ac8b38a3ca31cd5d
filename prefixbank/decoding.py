"""Own decoding the answers of many prompts: in batches where mlx-lm can do it exactly, one by one where not."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, stream_generate
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from prefixbank.errors import PrefixBankError
from prefixbank.generation import LogitsProcessor, Sampler, seeing_all
from prefixbank.kvcache.capture import leaf_caches
from prefixbank.kvcache.probe import new_prompt_cache, probe_layout
from prefixbank.layout import LayerLayout
from prefixbank.promptcaches import PromptCaches
from prefixbank.triewalk import Job

__all__ = ["can_batch", "decode"]

_NO_LIMIT = 2**31 - 1


def can_batch(caches: PromptCaches) -> bool:
    """Tell whether mlx-lm decodes prompt caches of the model together, and each as it would alone.

    It refuses quantised and chunked ones, forgets the first rows that a window was told to keep, and fails on layers
    whose states have empty slots. Classes that are not mlx-lm's own may do anything.
    """
    if caches.options.kv_bits is not None:
        return False
    prompt_cache = new_prompt_cache(caches.model, caches.options)
    if not all(type(layer_cache) in (KVCache, RotatingKVCache, ArraysCache, CacheList) for layer_cache in prompt_cache):
        return False
    try:
        layout = probe_layout(caches.model, caches.options)
        leaves = zip(layout.leaves(), leaf_caches(prompt_cache), strict=True)
        return all(_can_merge(leaf, described) for (_, described), leaf in leaves)
    except PrefixBankError:
        return False


def _can_merge(leaf: Any, described: LayerLayout) -> bool:
    if type(leaf) is ArraysCache:
        return len(leaf.cache) == len(described.states)
    return bool(described.arrays) and (type(leaf) is KVCache or (type(leaf) is RotatingKVCache and leaf.keep == 0))


def decode(
    caches: PromptCaches,
    tokenizer: Any,
    jobs: Iterable[Job],
    *,
    max_tokens: int,
    sampler: Sampler | None,
    logits_processors: Sequence[LogitsProcessor] | None,
    batch_size: int,
    prefill_step_size: int | None,
) -> Generator[list[Job], None, None]:
    """Yield the jobs that are done, those that end together in one list; asks for more jobs as there is room."""
    step = prefill_step_size or caches.prefill_step_size
    if batch_size == 1 or not can_batch(caches):
        for job in jobs:
            _decode_alone(caches, tokenizer, job, max_tokens, sampler, logits_processors, step)
            yield [job]
        return
    generator = BatchGenerator(
        caches.model,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        sampler=None if sampler is None else _by_rows(sampler),
        logits_processors=list(logits_processors or ()),
        completion_batch_size=batch_size,
        prefill_batch_size=min(batch_size, 8),
        prefill_step_size=step,
    )
    with closing(generator):
        running: dict[int, Job] = {}
        for job in jobs:
            job.batched = True
            (uid,) = generator.insert(
                [job.rest],
                [max_tokens if max_tokens > 0 else _NO_LIMIT],
                caches=[job.prompt_cache],
                all_tokens=[job.before if logits_processors else []],
            )
            job.prompt_cache = []  # the batch has it
            running[uid] = job
            while len(running) >= batch_size:
                if done := _step(generator, running, tokenizer):
                    yield done
        while running:
            if done := _step(generator, running, tokenizer):
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
