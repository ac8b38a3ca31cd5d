"""Own which layers of a model can share rows between sequences, from how many tokens on it pays, and such caches.

A layer shares if a small batch shows that its attention goes through the hook, over exactly what its cache gave.
Windows and recurrent layers stay as mlx-lm batches them: a window holds few rows, a state none. Whether sharing pays
is measured, on this device and for this model's shapes, against what mlx-lm does with merged caches.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import CacheList, KVCache

from prefixbank.errors import UnsupportedCacheError
from prefixbank.kvcache.capture import leaf_caches
from prefixbank.kvcache.probe import CacheOptions, is_on_gpu, new_prompt_cache
from prefixbank.kvcache.sharedattention import attend, shared_attention
from prefixbank.kvcache.sharedrows import Chain, SharedKVCache, SharedRows, Span

__all__ = ["MOST_STEPS", "SharedPrefix", "Sharing"]

_TRIED_TOKENS = (32, 64, 128, 256, 512, 1024)
_TRIED_OWN = 32
_TRIED_LAYERS = 4
_TRIES = 5
_GPU_MARGIN = 0.8
"""What part of merged attention's time shared attention may take on GPUs, where its many small kernels cost more in a
whole model than among themselves (docs/performance.md)."""
MOST_STEPS = 32
"""More steps than these are as likely as not cut short by the end of an answer."""
_TOLERANCE = 0.05
"""By what part of the largest logit two ways of attention may differ in half precision, with a wide margin."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Hold the rows of a prefix's first `n_tokens` tokens, for sequences to share.

    `chains` has each leaf's rows, level by level; None for leaves that do not share.
    """

    n_tokens: int = 0
    chains: tuple[Chain | None, ...] = field(default=(), repr=False)


class Sharing:
    """Make prompt caches of one model whose sequences share rows. Build it once for a model: it tries things out."""

    def __init__(self, model: nn.Module, options: CacheOptions) -> None:
        self._model = model
        self._options = options
        self._shapes: tuple[int, int, int, mx.Dtype] | None = None  # heads of keys, widths of both, dtype
        self.leaves = self._leaves_that_share()
        self._least: dict[tuple[int, int], int | None] = {}

    @property
    def empty(self) -> SharedPrefix:
        """Return the prefix of no tokens."""
        n_leaves = sum(1 for _ in leaf_caches(new_prompt_cache(self._model, self._options)))
        return SharedPrefix(0, tuple(() if leaf in self.leaves else None for leaf in range(n_leaves)))

    # --- making caches

    def extended(self, prefix: SharedPrefix, prompt_cache: Sequence[Any], n_tokens: int) -> SharedPrefix:
        """Return the prefix with a live cache's rows up to `n_tokens` as one more level.

        The first level is the cache's own buffer; a deeper one is a copy, so that the rows before it go with their
        cache.
        """
        chains: list[Chain | None] = []
        for chain, leaf in zip(prefix.chains, leaf_caches(prompt_cache), strict=True):
            if chain is None:
                chains.append(None)
                continue
            rows = SharedRows(*(r[..., prefix.n_tokens : n_tokens, :] for r in (leaf.keys, leaf.values)))
            if prefix.n_tokens:
                rows = SharedRows(mx.contiguous(rows.keys), mx.contiguous(rows.values))
            chains.append((*chain, rows))
        mx.eval([[chain[-1].keys, chain[-1].values] for chain in chains if chain])
        return SharedPrefix(n_tokens, tuple(chains))

    def behind(self, prefix: SharedPrefix, prompt_cache: Sequence[Any], n_tokens: int) -> list[Any]:
        """Return the prompt cache of one sequence of `n_tokens`, which are a live cache's, behind a shared prefix.

        Rows behind the prefix are its own. The live cache stays as it is.
        """
        chains = iter(prefix.chains)
        return [self._behind(layer_cache, chains, prefix.n_tokens, n_tokens) for layer_cache in prompt_cache]

    def _behind(self, layer_cache: Any, chains: Iterator[Chain | None], start: int, stop: int) -> Any:
        if type(layer_cache) is CacheList and layer_cache.caches:
            made = copy.copy(layer_cache)
            made.caches = tuple(self._behind(member, chains, start, stop) for member in layer_cache.caches)
            return made
        chain = next(chains)
        if chain is None:
            return copy.deepcopy(layer_cache)
        own = KVCache()
        if stop > start:
            own.keys, own.values = (rows[..., start:stop, :] for rows in (layer_cache.keys, layer_cache.values))
            own.offset = stop - start
        return SharedKVCache(chain, own)

    # --- which layers

    def _leaves_that_share(self) -> frozenset[int]:
        """Try sharing out on a tiny batch; return the indexes of the leaves that may share, none where in doubt."""
        try:
            with mx.stream(generation_stream):
                return self._tried_out()
        except Exception:  # models raise whatever they like; then caches are merged as mlx-lm does it
            return frozenset()

    def _tried_out(self) -> frozenset[int]:
        prompt_cache = new_prompt_cache(self._model, self._options)
        self._model(mx.array([[1, 2, 3]]), cache=prompt_cache)
        leaves = list(leaf_caches(prompt_cache))
        candidates = {at for at, leaf in enumerate(leaves) if type(leaf) is KVCache and leaf.keys is not None}
        for _ in range(3):
            if not candidates:
                break
            self.leaves = frozenset(candidates)
            refused = self._refused(prompt_cache, candidates)
            if not refused:
                some = leaves[min(candidates)]
                self._shapes = (some.keys.shape[1], some.keys.shape[3], some.values.shape[3], some.keys.dtype)
                return frozenset(candidates) if self._agrees(prompt_cache) else frozenset()
            candidates -= refused
        return frozenset()

    def _refused(self, prompt_cache: Sequence[Any], candidates: set[int]) -> set[int]:
        """Return which leaves the model does not read as it should. Builds a graph, and computes none of it."""
        batch = self._batch(prompt_cache)
        members = list(_members(batch))
        try:
            with shared_attention(self._model):
                self._model(mx.array([[4, 5], [6, 7]]), cache=batch)
        except UnsupportedCacheError:
            return {at for at in candidates if members[at].is_refused} or candidates
        return {at for at in candidates if members[at].is_unread}

    def _batch(self, prompt_cache: Sequence[Any]) -> list[Any]:
        prefix = self.extended(self.empty, prompt_cache, 2)
        rows = [self.behind(prefix, prompt_cache, 3) for _ in range(2)]
        return [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]

    def _agrees(self, prompt_cache: Sequence[Any]) -> bool:
        """Compare the logits of a tiny batch, with shared rows and alone."""
        batch = self._batch(prompt_cache)
        with shared_attention(self._model):
            shared = self._model(mx.array([[4, 5], [6, 7]]), cache=batch).astype(mx.float32)
        for row, ids in zip(shared, ([4, 5], [6, 7]), strict=True):
            alone = self._model(mx.array([ids]), cache=copy.deepcopy(list(prompt_cache)))[0].astype(mx.float32)
            worst = mx.abs(row - alone).max() / mx.maximum(mx.abs(alone).max(), 1e-6)
            if not float(worst) <= _TOLERANCE:
                return False
        return True

    # --- whether it pays

    def least_tokens(self, n_sequences: int, n_steps: int) -> int | None:
        """Return how long a prefix must be for that many sequences to run faster with shared rows, for so many steps.

        None where they never do, or no layer shares. What merging costs counts too, and more for fewer steps. Measured
        at the next lower powers of two, with the numbers of steps that `MOST_STEPS` allows.
        """
        if not self.leaves or n_sequences < 2:
            return None
        rounded = _rounded(n_sequences), _rounded(min(max(n_steps, 1), MOST_STEPS))
        if rounded not in self._least:
            self._least[rounded] = next((n for n in _TRIED_TOKENS if self._is_faster(*rounded, n)), None)
        return self._least[rounded]

    def _is_faster(self, n_sequences: int, n_steps: int, n_tokens: int) -> bool:
        assert self._shapes is not None
        n_kv_heads, width, value_width, dtype = self._shapes
        args = getattr(self._model, "args", None)
        n_heads = getattr(args, "num_attention_heads", None) or n_kv_heads

        def random(*shape: int) -> mx.array:
            return mx.random.normal(shape, key=mx.random.key(next(seeds))).astype(dtype)

        seeds = count()
        with mx.stream(generation_stream):
            queries = random(n_sequences, n_heads, 1, width)
            shared = SharedRows(random(1, n_kv_heads, n_tokens, width), random(1, n_kv_heads, n_tokens, value_width))
            own = (
                random(n_sequences, n_kv_heads, _TRIED_OWN, width),
                random(n_sequences, n_kv_heads, _TRIED_OWN, value_width),
            )

            alone = KVCache()
            alone.keys, alone.values, alone.offset = shared.keys, shared.values, n_tokens

            def merge() -> tuple[mx.array, mx.array]:
                batch = KVCache.merge([alone] * n_sequences)
                return batch.keys, batch.values

            masks = [mx.ones((n_sequences, 1, 1, n), mx.bool_) for n in (n_tokens + _TRIED_OWN, _TRIED_OWN)]
            merged = [mx.concatenate(list(rows), axis=2) for rows in zip(merge(), own, strict=True)]
            mx.eval(queries, shared.keys, shared.values, own, merged, masks)
            scale = width**-0.5
            levels = [[Span(shared, 0, n_sequences)]]
            of_merging = _least_seconds(merge)
            with_merged = _least_seconds(
                lambda: mx.fast.scaled_dot_product_attention(queries, *merged, scale=scale, mask=masks[0])
            )
            with_shared = _least_seconds(lambda: attend(queries, *own, levels, scale, masks[1]))
        margin = _GPU_MARGIN if is_on_gpu() else 1.0
        return with_shared <= (with_merged + of_merging / n_steps) * margin


def _members(batch: Sequence[Any]) -> Iterator[Any]:
    for layer_cache in batch:
        if type(layer_cache) is CacheList and layer_cache.caches:
            yield from _members(layer_cache.caches)
        else:
            yield layer_cache


def _rounded(number: int) -> int:
    """Return the next lower power of two."""
    return 1 << (number.bit_length() - 1)


def _least_seconds(run: Callable[[], Any]) -> float:
    """Return the shortest time of a few: what else the machine does only adds to it.

    It is that of one layer among several, which keep a GPU busy.
    """
    seconds = []
    for _ in range(_TRIES + 1):
        started_at = time.perf_counter()
        mx.eval([run() for _ in range(_TRIED_LAYERS)])
        seconds.append((time.perf_counter() - started_at) / _TRIED_LAYERS)
    return min(seconds[1:])
