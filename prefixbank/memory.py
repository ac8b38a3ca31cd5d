"""Own the prefixes that stay in memory between uses, within a budget of bytes; must not know what caches hold."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixbank.chunking import TOKEN_BYTES, common_run
from prefixbank.values import ChunkRecord

__all__ = ["KeptPrefix", "MemoryTier", "Owner"]

Owner = tuple[str, str]
"""Whose KV it is: fingerprint and salt digest."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrefix:
    """Hold the prompt cache of a prefix, evaluated, which nobody uses while it is kept.

    `can_be_cut` tells whether shorter prefixes can be taken from it. `chunks` are those of the bank that hold the
    prefix, as far as they were known. `seed` is what a recorder must know of the cache.
    """

    owner: Owner
    token_ids: bytes
    prompt_cache: list[Any]
    n_bytes: int
    can_be_cut: bool
    chunks: tuple[ChunkRecord, ...] = ()
    seed: Sequence[Any] = field(default=())

    @property
    def n_tokens(self) -> int:
        """Return how many tokens the cache holds."""
        return len(self.token_ids) // TOKEN_BYTES


class MemoryTier:
    """Keep prefixes by their token ids, the least recently used going first. Safe to use from several threads.

    A kept cache is either taken, by one user who may change it, or copied. A copy shares the arrays until one side
    writes to them: MLX writes in place only into what has no other holder.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._n_bytes = 0
        self._kept: OrderedDict[tuple[Owner, bytes], KeptPrefix] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all that is kept."""
        return self._n_bytes

    def find(self, owner: Owner, token_ids: bytes, limit: int) -> tuple[KeptPrefix, int] | None:
        """Return what is kept of the longest prefix of packed token ids, and how many tokens of it can be used."""
        usable = token_ids[: limit * TOKEN_BYTES]
        with self._lock:
            return max(self._usable(owner, usable), key=lambda found: (found[1], -found[0].n_tokens), default=None)

    def _usable(self, owner: Owner, usable: bytes) -> Iterator[tuple[KeptPrefix, int]]:
        for kept in self._kept.values():
            if kept.owner != owner:
                continue
            n_tokens = common_run(kept.token_ids, usable)
            if n_tokens and (kept.can_be_cut or n_tokens == kept.n_tokens):
                yield kept, n_tokens

    def take(self, kept: KeptPrefix) -> bool:
        """Forget a prefix: its cache is the caller's from now on. False where somebody else took it meanwhile."""
        with self._lock:
            if self._kept.get(name := _name(kept)) is not kept:
                return False
            del self._kept[name]
            self._n_bytes -= kept.n_bytes
            return True

    def copied(self, kept: KeptPrefix) -> list[Any] | None:
        """Return a copy of the prefix's cache; None where somebody took it meanwhile."""
        with self._lock:  # who takes a cache may change it, and changes are not for other threads to see half done
            if self._kept.get(name := _name(kept)) is not kept:
                return None
            self._kept.move_to_end(name)
            return copy.deepcopy(kept.prompt_cache)

    def has_room(self, n_bytes: int) -> bool:
        """Tell whether so many bytes could be kept at all."""
        return n_bytes <= self.max_bytes

    def give(self, kept: KeptPrefix) -> None:
        """Keep a prefix, in place of the same one; one larger than the budget is dropped."""
        with self._lock:
            old = self._kept.pop(name := _name(kept), None)
            if old is not None:
                self._n_bytes -= old.n_bytes
            if not self.has_room(kept.n_bytes):
                return
            self._kept[name] = kept
            self._n_bytes += kept.n_bytes
        self.trim_to(self.max_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    def trim_to(self, n_bytes: int) -> None:
        """Drop the least recently used prefixes above so many bytes."""
        with self._lock:
            while self._kept and self._n_bytes > n_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._n_bytes -= dropped.n_bytes

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept.clear()
            self._n_bytes = 0


def _name(kept: KeptPrefix) -> tuple[Owner, bytes]:
    return kept.owner, kept.token_ids
