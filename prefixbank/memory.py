"""Own the prompt caches that stay in memory between uses, within a budget of bytes; must not know what is in them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

__all__ = ["PromptCachePool"]


@dataclass(frozen=True, slots=True)
class _Kept:
    prompt_cache: list[Any]
    n_bytes: int


class PromptCachePool:
    """Keep prompt caches by what they hold, the least recently used going first. Safe to use from several threads.

    A cache has one user at a time: `take` hands it out and forgets it, `give` brings it back.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all caches kept."""
        return self._n_bytes

    def take(self, what: Hashable) -> list[Any] | None:
        """Return the cache of that prefix, which is the caller's from now on, or None."""
        with self._lock:
            kept = self._kept.pop(what, None)
            if kept is None:
                return None
            self._n_bytes -= kept.n_bytes
            return kept.prompt_cache

    def give(self, what: Hashable, prompt_cache: list[Any], n_bytes: int) -> None:
        """Keep a cache, in place of one of the same prefix; one larger than the budget is dropped."""
        with self._lock:
            if (old := self._kept.pop(what, None)) is not None:
                self._n_bytes -= old.n_bytes
            if n_bytes > self._max_bytes:
                return
            self._kept[what] = _Kept(prompt_cache, n_bytes)
            self._n_bytes += n_bytes
            while self._n_bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._n_bytes -= dropped.n_bytes

    def clear(self) -> None:
        """Drop all caches."""
        with self._lock:
            self._kept.clear()
            self._n_bytes = 0
