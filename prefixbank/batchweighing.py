"""Own running many prompts and the choices behind them through the model in batches.

What prompts share is computed once and stored, as for `generate_many`; of choices nothing is ever stored. The rests of
several prompts are read as one batch, then the runs of all their choices, level by level of their trees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from prefixbank.batching import SharedFrom
from prefixbank.choices import Branch, branches
from prefixbank.kvcache.sharedattention import shared_attention
from prefixbank.kvcache.sharing import Sharing
from prefixbank.promptcaches import PromptCaches
from prefixbank.prompts import named
from prefixbank.triewalk import Job, TrieWalk, declared_prefixes
from prefixbank.weighing import BATCH_BYTES, ChoiceWeights, in_tiles, padded_rows, weigh

__all__ = ["weigh_together"]

Follower = tuple[int, ChoiceWeights, Branch]
"""A run of choices, whose it is, and which sequence of a batch it follows on."""


def weigh_together(
    caches: PromptCaches,
    jobs: Sequence[ChoiceWeights],
    name: Callable[[int], str],
    *,
    sharing: Sharing | None,
    shared_from: SharedFrom,
    batch_size: int,
    prefill_step_size: int | None,
) -> Iterator[list[int]]:
    """Run all jobs, up to `batch_size` of them together; yield the indexes of those that are done.

    Raises `PromptError` for a job that can't be run, with the `name` of its index.
    """
    walk = TrieWalk(
        caches,
        [job.encoded.prompt.token_ids for job in jobs],
        prefill_step_size=prefill_step_size,
        sharing=sharing,
        n_together=batch_size,
        shared_from=shared_from,
        declared=declared_prefixes([job.encoded.prompt for job in jobs]),
    )
    batches = _Batches(caches, jobs, name, prefill_step_size or caches.prefill_step_size, is_shared=walk.shares)
    waiting: list[Job] = []
    for ready in walk:
        if waiting and (len(waiting) == batch_size or not batches.have_room([*waiting, ready])):
            yield batches.run(waiting)
            waiting = []
        waiting.append(ready)
    if waiting:
        yield batches.run(waiting)


class _Batches:
    """Run batches of prompts that are ready, and their choices."""

    def __init__(
        self,
        caches: PromptCaches,
        jobs: Sequence[ChoiceWeights],
        name: Callable[[int], str],
        step: int,
        *,
        is_shared: bool,
    ) -> None:
        self._caches = caches
        self._name = name
        self._jobs = jobs
        self._step = step
        self._is_shared = is_shared
        self._n_vocabulary = 0

    def have_room(self, ready: Sequence[Job]) -> bool:
        """Tell whether prompts and their choices fit into a batch's bytes, as far as that is known before."""
        return sum(map(self._n_bytes, ready)) <= BATCH_BYTES

    def _n_bytes(self, ready: Job) -> int:
        suffixes = self._jobs[ready.index].encoded.suffixes
        n_cache_bytes = 0 if self._is_shared else sum(layer_cache.nbytes for layer_cache in ready.prompt_cache)
        return len(suffixes) * n_cache_bytes + self._logits_bytes(sum(map(len, suffixes)))

    def _logits_bytes(self, n_tokens: int) -> int:
        return n_tokens * self._n_vocabulary * 8

    def run(self, ready: Sequence[Job]) -> list[int]:
        """Run prompts and all their choices; return their indexes."""
        layers = zip(*(job.prompt_cache for job in ready), strict=True)
        hook: AbstractContextManager[None] = shared_attention(self._caches.model) if self._is_shared else nullcontext()
        with hook, wired_limit(self._caches.model, [generation_stream]), mx.stream(generation_stream):
            batch = [layer[0].merge(list(layer)) for layer in layers]
            logits = self._read([job.rest for job in ready], batch)
            self._check(logits.shape[-1])
            followers: list[Follower] = []
            for at, job in enumerate(ready):
                weights = self._jobs[job.index]
                weights.computed_tokens = job.n_computed
                weights.cached_tokens = job.found.n_prompt_tokens - job.n_computed
                job.prompt_cache = []  # the batch has it
                followers += [(at, weights, b) for b in branches(dict(enumerate(weights.encoded.suffixes)))]
            self._descend(batch, logits, followers)
        for job in ready:
            weights = self._jobs[job.index]
            self._caches.session.count(computed_tokens=weights.computed_tokens - job.n_computed)
        return [job.index for job in ready]

    def _check(self, n_vocabulary: int) -> None:
        if not self._n_vocabulary:
            self._n_vocabulary = n_vocabulary
            for index, weights in enumerate(self._jobs):  # now, before more is computed
                named(self._name(index), weights.check_vocabulary, n_vocabulary)

    def _read(self, rests: Sequence[list[int]], batch: list[Any]) -> mx.array:
        """Read what is left of the prompts; return the logits behind their last tokens, `[batch, vocabulary]`."""
        # Logits of many tokens would take much memory: the last two of each have a step of their own.
        if any(len(rest) > 2 for rest in rests):
            with _padding([max(len(rest) - 2, 0) for rest in rests], batch) as n_tokens:
                token_ids = padded_rows([rest[:-2] for rest in rests], n_tokens)
                for start, stop in _steps(n_tokens, self._step):
                    self._caches.model(token_ids[:, start:stop], cache=batch)
                    mx.eval([layer_cache.state for layer_cache in batch])
        lasts = [rest[-2:] for rest in rests]
        with _padding(list(map(len, lasts)), batch) as n_tokens:
            logits = self._caches.model(padded_rows(lasts, n_tokens), cache=batch)
        return mx.stack([logits[row, len(last) - 1] for row, last in enumerate(lasts)])

    def _descend(self, batch: list[Any], logits: mx.array, followers: Sequence[Follower]) -> None:
        """Add up runs that follow on a batch (which is written into) and its last logits, and all that follows them."""
        self._add_first(logits, followers)
        left = [follower for follower in followers if follower[2].children or len(follower[2].token_ids) > 1]
        tiles = list(self._tiles(batch, left))
        for place, tile in enumerate(tiles, 1):
            own = copy.deepcopy(batch) if place < len(tiles) else batch
            for layer_cache in own:
                layer_cache.filter([at for at, _, _ in tile])
            last = self._follow(own, tile)
            below = [(at, whose, child) for at, (_, whose, run) in enumerate(tile) for child in run.children]
            if below:
                self._descend(own, last, below)

    def _add_first(self, logits: mx.array, followers: Sequence[Follower]) -> None:
        """Add up first tokens, which need no forward pass."""
        rows = mx.array([at for at, _, _ in followers])
        chosen, greedy = weigh(logits[rows], mx.array([[run.token_ids[0]] for _, _, run in followers]))
        for (_, weights, run), (log_prob,), (is_greedy,) in zip(followers, chosen, greedy, strict=True):
            weights.add(run, 0, log_prob, is_greedy)

    def _tiles(self, batch: list[Any], followers: Sequence[Follower]) -> Iterator[list[Follower]]:
        """Return runs to compute together, of similar lengths."""
        n_rows = max((at for at, _, _ in followers), default=0) + 1
        n_cache_bytes = sum(layer_cache.nbytes for layer_cache in batch) // n_rows
        by_length = sorted(followers, key=lambda given: len(given[2].token_ids))
        return in_tiles(by_length, lambda f: n_cache_bytes + self._logits_bytes(len(f[2].token_ids)), BATCH_BYTES)

    def _follow(self, batch: list[Any], tile: Sequence[Follower]) -> mx.array:
        """Run a batch's runs, add up all tokens but the first ones; return the logits behind their last tokens.

        The last token is run only where something follows on it.
        """
        runs = [run for _, _, run in tile]
        inputs = [run.token_ids if run.children else run.token_ids[:-1] for run in runs]
        for (_, weights, _), ids in zip(tile, inputs, strict=True):
            weights.computed_tokens += len(ids)
        lasts: dict[int, mx.array] = {}
        with _padding(list(map(len, inputs)), batch) as n_tokens:
            token_ids, wanted = (padded_rows(r, n_tokens) for r in (inputs, [run.token_ids[1:] for run in runs]))
            for start, stop in _steps(n_tokens, self._step):
                logits = self._caches.model(token_ids[:, start:stop], cache=batch)
                chosen, greedy = weigh(logits, wanted[:, start:stop, None])
                for row, ((_, weights, run), ids) in enumerate(zip(tile, inputs, strict=True)):
                    for at in range(start, min(len(run.token_ids) - 1, stop)):
                        weights.add(run, at + 1, chosen[row][at - start][0], greedy[row][at - start][0])
                    if start < len(ids) <= stop:
                        lasts[row] = logits[row, len(ids) - 1 - start]
        return mx.stack([lasts[row] for row in range(len(tile))])


@contextmanager
def _padding(lengths: list[int], batch: list[Any]) -> Iterator[int]:
    """Tell a batch's caches how many tokens of each sequence come, so that what is padded is cut off afterwards.

    Gives the length to which all are padded: two at least. mlx-lm writes single tokens into windows' rings, behind
    which it masks several tokens wrongly (0.32.2: `BatchRotatingKVCache.make_mask` takes a ring's index for its size).
    """
    longest = max(2, *lengths)
    padding = [longest - length for length in lengths]
    if any(padding):
        for layer_cache in batch:
            layer_cache.prepare(lengths=lengths, right_padding=padding)
    yield longest
    if any(padding):
        for layer_cache in batch:
            layer_cache.finalize()


def _steps(n_tokens: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the starts and stops of steps, none of which is of a single token."""
    start = 0
    while start < n_tokens:
        stop = min(start + max(step, 2), n_tokens)
        if stop == n_tokens - 1:
            stop = n_tokens
        yield start, stop
        start = stop
