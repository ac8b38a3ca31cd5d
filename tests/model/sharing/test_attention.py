"""Attention part by part equals attention over all rows to float32 rounding, in as little memory as it is told."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from prefixbank.kvcache.sharedattention import attend
from prefixbank.kvcache.sharedrows import SharedRows, Span

N_HEADS, N_KV_HEADS, WIDTH = 6, 2, 16
SCALE = WIDTH**-0.5


class Batch:
    """Hold a random batch of five sequences: three levels of shared rows, own rows with left padding."""

    def __init__(self, n_queries: int, dtype: mx.Dtype = mx.float32, n_own: int = 9, stretch: float = 1.0) -> None:
        mx.random.seed(n_queries)

        def random(*shape: int) -> mx.array:
            return (mx.random.normal(shape) * stretch).astype(dtype)

        def rows(n_tokens: int) -> SharedRows:
            return SharedRows(random(1, N_KV_HEADS, n_tokens, WIDTH), random(1, N_KV_HEADS, n_tokens, 2 * WIDTH))

        root, left, right, deep = rows(400), rows(7), rows(13), rows(1)
        self.chains = [(root, left, deep), (root, left), (root, right), (root,), ()]
        self.levels = [
            [Span(root, 0, 4), Span(None, 4, 5)],
            [Span(left, 0, 2), Span(right, 2, 3), Span(None, 3, 5)],
            [Span(deep, 0, 1), Span(None, 1, 5)],
        ]
        self.queries = random(5, N_HEADS, n_queries, WIDTH)
        self.keys = random(5, N_KV_HEADS, n_own, WIDTH)
        self.values = random(5, N_KV_HEADS, n_own, 2 * WIDTH)
        self.sinks = random(N_HEADS)
        padding = mx.array([0, 3, 1, 0, 2])[:, None, None, None]
        at = mx.arange(n_own)
        causal = at[None] <= at[n_own - n_queries :, None]
        self.mask = causal & (at >= padding)

    def expected(self, *, with_sinks: bool = False) -> np.ndarray[Any, Any]:
        """Compute attention over all rows of each sequence, in float64."""
        outputs = []
        for at, chain in enumerate(self.chains):
            keys, values = (
                np.repeat(np.concatenate([*shared, np.asarray(own[at].astype(mx.float32))], axis=1), 3, axis=0)
                for shared, own in (
                    ([np.asarray(rows.keys[0].astype(mx.float32)) for rows in chain], self.keys),
                    ([np.asarray(rows.values[0].astype(mx.float32)) for rows in chain], self.values),
                )
            )
            scores = np.asarray(self.queries[at].astype(mx.float32), np.float64) @ keys.swapaxes(1, 2) * SCALE
            n_shared = sum(rows.n_tokens for rows in chain)
            seen = np.concatenate([np.ones((scores.shape[1], n_shared), bool), np.asarray(self.mask[at, 0])], axis=1)
            scores = np.where(seen, scores, -np.inf)
            highest = scores.max(-1, keepdims=True)
            weights = np.exp(scores - highest)
            total = weights.sum(-1, keepdims=True)
            if with_sinks:
                total = total + np.exp(np.asarray(self.sinks.astype(mx.float32), np.float64)[:, None, None] - highest)
            outputs.append(weights @ values / total)
        return np.stack(outputs)

    def attended(self, **options: Any) -> mx.array:
        return attend(self.queries, self.keys, self.values, self.levels, SCALE, self.mask, **options)

    def merged(self) -> mx.array:
        """Compute it as mlx-lm does with merged caches: each sequence with all its rows, in the model's dtype."""
        longest = max(sum(rows.n_tokens for rows in chain) for chain in self.chains)
        keys, values, masks = [], [], []
        for at, chain in enumerate(self.chains):
            n_padding = longest - sum(rows.n_tokens for rows in chain)
            padded = [(0, 0), (n_padding, 0), (0, 0)]
            keys.append(mx.pad(mx.concatenate([*(rows.keys[0] for rows in chain), self.keys[at]], axis=1), padded))
            values.append(
                mx.pad(mx.concatenate([*(rows.values[0] for rows in chain), self.values[at]], axis=1), padded)
            )
            seen = mx.broadcast_to(mx.arange(longest) >= n_padding, (self.mask.shape[2], longest))
            masks.append(mx.concatenate([seen[None], self.mask[at]], axis=-1))
        return mx.fast.scaled_dot_product_attention(
            self.queries, mx.stack(keys), mx.stack(values), scale=SCALE, mask=mx.stack(masks)
        )


def error(attended: mx.array, expected: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.abs(np.asarray(attended.astype(mx.float32), np.float64) - expected)


@pytest.mark.parametrize("score_bytes", [1 << 28, 40_000, 4_000, 700, 1])
@pytest.mark.parametrize("n_queries", [1, 2, 5])
def test_attention_to_shared_and_own_rows_is_attention_to_all(n_queries: int, score_bytes: int) -> None:
    """The scores' bytes go from all in one product to a row of queries at a time."""
    batch = Batch(n_queries)
    assert error(batch.attended(score_bytes=score_bytes), batch.expected()).max() < 2e-6


@pytest.mark.parametrize("score_bytes", [1 << 28, 700])
@pytest.mark.parametrize("n_queries", [1, 5])
def test_sinks_take_part_once(n_queries: int, score_bytes: int) -> None:
    batch = Batch(n_queries)
    attended = batch.attended(sinks=batch.sinks, score_bytes=score_bytes)
    assert error(attended, batch.expected(with_sinks=True)).max() < 2e-6
    assert error(attended, batch.expected()).max() > 1e-3


def test_scores_far_apart_do_not_overflow() -> None:
    batch = Batch(2, stretch=30.0)
    assert error(batch.attended(), batch.expected()).max() < 1e-3
    assert not mx.isnan(batch.attended()).any().item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_errors_are_no_larger_than_those_of_merged_caches(dtype: mx.Dtype) -> None:
    ours, theirs = [], []
    for n_queries in range(1, 7):
        batch = Batch(n_queries, dtype)
        expected = batch.expected()
        assert batch.attended().dtype == dtype
        for errors, attended in ((ours, batch.attended()), (theirs, batch.merged())):
            of_batch = error(attended, expected)
            errors.append((of_batch.mean(), of_batch.max()))
    (our_mean, our_max), (their_mean, their_max) = (np.mean(errors, axis=0) for errors in (ours, theirs))
    # In float32 both are right to less than the last bit, on average; which is nearer is a matter of chance.
    assert our_mean <= their_mean * (1.1 if dtype == mx.float32 else 1.0)
    assert our_max <= their_max * (1.5 if dtype == mx.float32 else 1.0)


def test_scores_take_no_more_memory_than_they_may() -> None:
    mx.random.seed(0)
    rows = SharedRows(mx.random.normal((1, 2, 4096, 16)), mx.random.normal((1, 2, 4096, 16)))
    queries, own = mx.random.normal((32, 4, 16, 16)), mx.random.normal((32, 2, 16, 16))
    mx.eval(rows.keys, rows.values, queries, own)
    all_scores = 32 * 4 * 16 * 4096 * 4
    peaks = {}
    for score_bytes in (all_scores, all_scores // 16):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(attend(queries, own, own, [[Span(rows, 0, 32)]], 0.25, None, score_bytes=score_bytes))
        peaks[score_bytes] = mx.get_peak_memory() - before
    assert peaks[all_scores] > all_scores
    assert peaks[all_scores // 16] < all_scores // 16 * 2 + 20 * queries.nbytes
