"""Own computing what a resolved prompt cache lacks, and storing what was computed.

On the way to a generation, storing is never waited for: the new rows are copied once, and a thread of the bank writes
them. What was asked for by name (`put`, `warm`) is stored at once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from prefixbank.chunking import TOKEN_BYTES, pack_token_ids, unpack_token_ids
from prefixbank.errors import ConfigError, FingerprintMismatchError, PrefixBankError
from prefixbank.kvcache.capture import CacheRecorder, n_cached_tokens
from prefixbank.kvcache.probe import quantize
from prefixbank.layout import CacheLayout
from prefixbank.promptcaches import REASON_COMPUTED, Progress, PromptCaches, Resolved
from prefixbank.prompts import EncodedPrompt
from prefixbank.storing import Stored
from prefixbank.values import Namespace

__all__ = ["compute", "follow", "keep_after_generation", "recorder_for", "store", "store_behind"]


def recorder_for(caches: PromptCaches, resolved: Resolved) -> CacheRecorder | None:
    """Return a recorder of what will be computed behind a resolved prefix; None where none is needed."""
    try:
        layout = caches.identity.layout
    except PrefixBankError:  # said when the prompt was matched
        return None
    if caches.session.read_only or caches.quantises_later:  # caches to be quantised hold everything themselves
        return None
    return CacheRecorder(layout, resolved.seed or None)


def compute(
    caches: PromptCaches,
    prompt_cache: list[Any],
    token_ids: list[int],
    start: int,
    end: int,
    prefill_step_size: int | None,
    progress: Progress | None,
    recorder: CacheRecorder | None = None,
    boundaries: Collection[int] = (),
) -> None:
    """Run the tokens `[start, end)` through the model in steps that end at chunk boundaries.

    Steps also end at the given boundaries and each `state_every_chunks` chunks, and there the recorder takes the
    states of recurrent layers.
    """
    chunk_tokens = caches.session.chunk_tokens
    every = caches.state_every_chunks * chunk_tokens
    boundaries = {*boundaries, *(range(every, end + 1, every) if every else ())}
    step = prefill_step_size or caches.prefill_step_size
    if step < 1:
        raise ConfigError(f"prefill_step_size={step} must be at least 1")
    if progress is not None:
        progress(start, end)
    n_tokens = end - start
    started_at = time.perf_counter()
    with wired_limit(caches.model, [generation_stream]), mx.stream(generation_stream):
        while start < end:
            stop = min(start + step, end, *(boundary for boundary in boundaries if boundary > start))
            aligned = stop - stop % chunk_tokens
            if stop < end and stop not in boundaries and aligned > start:
                stop = aligned
            caches.model(mx.array(token_ids[start:stop])[None], cache=prompt_cache)
            quantize(prompt_cache, caches.options)
            mx.eval([layer_cache.state for layer_cache in prompt_cache if layer_cache is not None])
            if recorder is not None and recorder.must_follow:
                recorder.record(start, stop, prompt_cache, with_state=stop in boundaries)
            mx.clear_cache()
            start = stop
            if progress is not None:
                progress(start, end)
    if n_tokens > 0:
        caches.note_computed(n_tokens, time.perf_counter() - started_at)


def store(
    caches: PromptCaches,
    token_ids: bytes,
    prompt_cache: Sequence[Any],
    n_held: int | None = None,
    recorder: CacheRecorder | None = None,
    made_from: Resolved | None = None,
) -> Stored:
    """Store the KV of packed token ids from a live cache, of as many as are known. Raises the bank's errors.

    How many tokens the cache holds it knows itself, unless all layers are recurrent: then it is `n_held`, or all
    token ids. `recorder` has followed its making, which began with `made_from`.
    """
    todo = _to_store(caches, token_ids, prompt_cache, n_held, made_from)
    if todo is None:
        return Stored(0, None)
    namespace, layout, n_held = todo
    recorder = recorder or CacheRecorder(layout)
    recorder.finish(prompt_cache, n_held)
    return caches.session.store(namespace, token_ids[: n_held * TOKEN_BYTES], recorder)


def store_behind(
    caches: PromptCaches,
    token_ids: bytes,
    resolved: Resolved,
    n_held: int | None = None,
    recorder: CacheRecorder | None = None,
) -> None:
    """Store a resolved cache that was gone on with as `store` does, but on the bank's own thread.

    Only the rows behind those of the match are copied: the bank has the others. Where it fails it is merely a pity.
    """
    prompt_cache = resolved.prompt_cache
    session = caches.session
    if session.read_only or not token_ids:
        return
    try:
        todo = _to_store(caches, token_ids, prompt_cache, n_held, resolved)
        if todo is None:
            return
        namespace, layout, n_held = todo
        token_ids = token_ids[: n_held * TOKEN_BYTES]
        n_tokens = len(token_ids) // TOKEN_BYTES
        n_known = min(resolved.match.n_stored_tokens, n_tokens)
        copy_from = n_known - n_known % session.chunk_tokens
        n_bytes = layout.data_bytes(n_tokens - copy_from, with_state=True)
        if session.can_queue(namespace, token_ids, n_bytes):
            recorder = recorder or CacheRecorder(layout)
            recorder.finish(prompt_cache, n_held, copied=(copy_from, n_tokens))
            session.store_behind(namespace, token_ids, recorder, n_bytes)
    except (PrefixBankError, RuntimeError) as exc:
        caches.warn_of(exc, "store")


def _to_store(
    caches: PromptCaches,
    token_ids: bytes,
    prompt_cache: Sequence[Any],
    n_held: int | None,
    made_from: Resolved | None,
) -> tuple[Namespace, CacheLayout, int] | None:
    """Return whose the cache's KV is, its layout, and how many tokens of it there are to store; None for none.

    Raises `FingerprintMismatchError` where the model is not the one any more that the making began with.
    """
    if made_from is not None and not caches.is_of_these_weights(made_from):
        caches.identify()  # raises what keeps it from being known
        raise FingerprintMismatchError("the model's weights were swapped while a prefix was computed: it is not stored")
    n_counted = n_cached_tokens(prompt_cache)
    if n_counted is not None:
        n_held = n_counted
    elif n_held is None:
        n_held = len(token_ids) // TOKEN_BYTES
    if n_held == 0:
        return None
    whose = caches.for_length(n_held)
    if whose is not caches.for_length(len(token_ids) // TOKEN_BYTES):
        return None  # what is shorter than the start is kept as it was before it was quantised
    namespace, layout = whose.identify()
    return namespace, layout, n_held


def follow(
    caches: PromptCaches,
    encoded: EncodedPrompt,
    resolved: Resolved,
    hold_back: int,
    prefill_step_size: int | None,
    progress: Progress | None,
) -> tuple[Resolved, CacheRecorder | None]:
    """Compute what is to be stored and must be recorded step by step; all but the last token at most.

    Returns the rest still to compute and the recorder; None where the finished cache will hold everything itself.
    """
    if caches.quantises_later and not caches.session.read_only:
        return _store_before_quantising(caches, encoded, resolved, hold_back, prefill_step_size), None
    recorder = recorder_for(caches, resolved)
    if recorder is None or not recorder.must_follow:
        return resolved, None
    n_prompt = len(encoded.token_ids) // TOKEN_BYTES
    boundaries = caches.parting(resolved.match)
    if encoded.n_shared_tokens is not None:
        boundaries.add(encoded.n_shared_tokens)
    n_last = min(n_prompt - max(hold_back, 1), max(caches.n_to_store(encoded, hold_back), *boundaries, 0))
    start = resolved.match.n_tokens
    if n_last <= start:
        return resolved, recorder
    token_ids = unpack_token_ids(encoded.token_ids)
    whole = None if progress is None else lambda done, _: progress(done, n_prompt)
    prompt_cache = resolved.prompt_cache
    compute(caches, prompt_cache, token_ids, start, n_last, prefill_step_size, whole, recorder, boundaries)
    seed = recorder.seed(n_last - n_last % caches.session.chunk_tokens)
    if caches.is_of_these_weights(resolved):
        caches.keep_copy(encoded.token_ids[: n_last * TOKEN_BYTES], prompt_cache, resolved.match.chunks, seed)
    return replace(resolved, rest=token_ids[n_last:], computed_tokens=n_last - start), recorder


def _store_before_quantising(
    caches: PromptCaches,
    encoded: EncodedPrompt,
    resolved: Resolved,
    hold_back: int,
    prefill_step_size: int | None,
) -> Resolved:
    """Compute and store what is to be stored, if the cache is not quantised by then; returns what is left."""
    n_last = min(caches.n_to_store(encoded, hold_back), len(encoded.token_ids) // TOKEN_BYTES - 1)
    start = resolved.match.n_tokens
    if n_last <= start or caches.for_length(n_last) is caches:
        return resolved
    token_ids = unpack_token_ids(encoded.token_ids)
    prompt_cache = resolved.prompt_cache
    compute(caches, prompt_cache, token_ids, start, n_last, prefill_step_size, None)
    store_behind(caches, encoded.token_ids[: n_last * TOKEN_BYTES], resolved, n_last)
    return replace(resolved, rest=token_ids[n_last:], computed_tokens=n_last - start)


def keep_after_generation(
    caches: PromptCaches,
    encoded: EncodedPrompt,
    resolved: Resolved,
    recorder: CacheRecorder | None,
    answer: Sequence[int],
    *,
    keep: bool,
    hold_back: int,
) -> None:
    """Store what a generation should leave: the declared shots, else full chunks; with `keep`, everything.

    A cache that was lent stays in memory for as many tokens.
    """
    n_prompt = len(encoded.token_ids) // TOKEN_BYTES
    n_tokens = caches.n_to_store(encoded, hold_back)
    if recorder is not None:
        n_tokens = max(n_tokens, *recorder.state_ends(), 0)
    whole = encoded.token_ids + pack_token_ids(answer)
    token_ids = whole if keep else whole[: n_tokens * TOKEN_BYTES]
    # mlx-lm has run every token that it gave out through the model, the last one included.
    n_held = n_prompt + len(answer) if recorder is not None else None
    found = resolved.match
    n_there = found.n_stored_tokens
    if found.reason == REASON_COMPUTED:  # what is not worth a look is not worth a shard
        n_there = found.n_known_tokens or n_prompt
    if len(token_ids) // TOKEN_BYTES > n_there:
        store_behind(caches, token_ids, resolved, n_held, recorder)
    # Where prompts part, the next one will too: that much of the cache it can take without a copy.
    n_kept = found.n_tokens if found.parted and not keep else max(len(token_ids) // TOKEN_BYTES, found.n_tokens)
    caches.take_back(resolved, whole[: n_kept * TOKEN_BYTES])
