"""Own the batch cache in which sequences that share a prefix hold its rows once, and each its own rows behind it.

Both classes go where mlx-lm's `KVCache` and `BatchKVCache` go, so that its `BatchGenerator` works with them: it merges,
extends, filters and splits batches by these methods. A sequence's prefix is a chain of `SharedRows`, for several levels
of sharing. Attention over them is `sharedattention`'s; a model that reads keys and values in its own way must not be
given these caches.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

__all__ = ["SharedBatchKVCache", "SharedKVCache", "SharedRows", "Span", "is_mask_of_own_rows"]


@dataclass(frozen=True, eq=False, slots=True)
class SharedRows:
    """Hold rows that several sequences attend to: keys and values, `[1, n_kv_heads, n_tokens, head_dim]`."""

    keys: mx.array
    values: mx.array

    @property
    def n_tokens(self) -> int:
        """Return how many tokens the rows are of."""
        return int(self.keys.shape[2])

    def __deepcopy__(self, memo: Any) -> SharedRows:
        return self  # mlx-lm copies batches when it splits them


Chain = tuple[SharedRows, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Say that the sequences `[start, stop)` of a batch share rows at one level of their chains; None for no rows."""

    rows: SharedRows | None
    start: int
    stop: int


class SharedKVCache:
    """Hold one sequence: a chain of shared rows and its own rows behind them."""

    def __init__(self, chain: Chain, own: KVCache) -> None:
        self.chain = chain
        self.own = own

    @property
    def offset(self) -> int:
        """Return how many tokens the cache holds."""
        return self.own.offset + sum(rows.n_tokens for rows in self.chain)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the sequence's own rows."""
        return int(self.own.nbytes)

    @property
    def state(self) -> Any:
        """Return the own rows, as `KVCache` does."""
        return self.own.state

    @staticmethod
    def merge(caches: Sequence[SharedKVCache]) -> SharedBatchKVCache:
        """Return a batch of the sequences; shared rows are not copied."""
        return SharedBatchKVCache.merge(caches)


class SharedBatchKVCache(BatchKVCache):  # type: ignore[misc]  # mlx-lm is untyped
    """Hold a batch of sequences: `BatchKVCache` with their own rows, left-padded, and each sequence's chain.

    `offset` counts the shared rows too: it is the position of the next token.
    """

    def __init__(self, left_padding: list[int]) -> None:
        super().__init__(left_padding)
        self.chains: list[Chain] = [()] * len(left_padding)
        self._levels: list[list[Span]] | None = None
        self._fetched: tuple[mx.array, mx.array] | None = None
        self.is_refused = False  # by the hook: attention was not what it should be

    @classmethod
    def merge(cls, caches: Sequence[SharedKVCache]) -> Self:
        """Return a batch of the sequences; shared rows are not copied."""
        batch = super().merge([cache.own for cache in caches])
        made = cls([0] * len(caches))
        made.keys, made.values, made.left_padding, made._idx = (
            batch.keys,
            batch.values,
            batch.left_padding,
            batch._idx,
        )
        made.chains = [cache.chain for cache in caches]
        n_shared = [sum(rows.n_tokens for rows in chain) for chain in made.chains]
        made.offset = batch.offset + mx.array(n_shared)
        return made

    @property
    def levels(self) -> list[list[Span]]:
        """Return, for each level of the chains, which runs of sequences share which rows."""
        if self._levels is None:
            depth = max(map(len, self.chains), default=0)
            self._levels = [_spans([c[at] if at < len(c) else None for c in self.chains]) for at in range(depth)]
        return self._levels

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add own rows and return all own rows; attention adds the shared ones."""
        self._fetched = super().update_and_fetch(keys, values)
        return self._fetched

    def take_fetched(self, keys: mx.array, values: mx.array) -> bool:
        """Tell, once, whether these are what was fetched last: else attention is over something else."""
        fetched, self._fetched = self._fetched, None
        return fetched is not None and keys is fetched[0] and values is fetched[1]

    @property
    def is_unread(self) -> bool:
        """Tell whether rows were fetched that attention never took."""
        return self._fetched is not None

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array:
        """Return the mask of the own rows, `[batch, 1, N, n_own + N]`; of a window, which hides shared rows, one that
        `is_mask_of_own_rows` does not know.
        """
        mask = super().make_mask(N, return_array=return_array, window_size=window_size)
        if window_size is None:
            _MASKS.made = [*getattr(_MASKS, "made", [])[-1:], mask]
        return mask

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep the sequences of these indices."""
        super().filter(batch_indices)
        self.chains = [self.chains[index] for index in batch_indices]
        self._levels = self._fetched = None

    def extend(self, other: SharedBatchKVCache) -> None:
        """Add the sequences of another batch."""
        super().extend(other)
        self.chains = [*self.chains, *other.chains]
        self._levels = self._fetched = None

    def extract(self, idx: int) -> SharedKVCache:
        """Return one sequence."""
        return SharedKVCache(self.chains[idx], super().extract(idx))


def is_mask_of_own_rows(mask: Any) -> bool:
    """Tell whether a mask is what a `SharedBatchKVCache` made last in this thread."""
    return any(mask is made for made in getattr(_MASKS, "made", []))


_MASKS = threading.local()
"""The last masks that were made in each thread: a model asks one layer's cache for the mask of all layers."""


def _spans(rows: Sequence[SharedRows | None]) -> list[Span]:
    spans, start = [], 0
    for _, group in groupby(rows, key=id):
        members = list(group)
        spans.append(Span(members[0], start, start + len(members)))
        start += len(members)
    return spans
