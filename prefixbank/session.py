"""Own an opened bank: its index, shards, options, counters and warnings, and what models do with it.

`PrefixBank` (`bank`) is its face towards users, `BankedModel` (`model`) works on it. No SQL here, and no arrays.
"""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from prefixbank import eviction, fingerprint, namesfile, resolver, restoring, storing
from prefixbank.chunking import TOKEN_BYTES, first_token
from prefixbank.config import BankOptions
from prefixbank.errors import (
    BankReadOnlyError,
    BankWarning,
    ConfigError,
    FingerprintMismatchError,
    PrefixBankError,
)
from prefixbank.index import Index, chunk_rows, namespace_rows, prefix_rows, rates_rows, weights_rows
from prefixbank.layout import CacheLayout
from prefixbank.memory import MemoryTier
from prefixbank.rates import RateBook
from prefixbank.shards import ShardStore
from prefixbank.values import ChunkKey, ChunkRecord, Match, Namespace, PrefixRecord, WeightsFile
from prefixbank.writes import WriteQueue

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["MAX_READERS", "BankSession", "require_prefix_name"]

_NAME = re.compile(r"[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]{0,199}")
MAX_READERS = min(16, os.cpu_count() or 1)
"""How many threads read shards at once."""

_USES_BETWEEN_WRITES = 64
_WRITTEN_BYTES_PER_S = 200e6  # how fast a queue is taken to empty: slower than most disks
_REFUSALS_KEPT = 256
_REFUSED_FOR_S = 60.0  # a prefix that did not fit is not copied again for so long


class BankSession:
    """Hold one opened bank. Safe to use from several threads."""

    def __init__(self, root: Path, index: Index, shards: ShardStore, options: BankOptions) -> None:
        """Hold an opened index and store; `options` are complete (`chunk_tokens` is set)."""
        assert options.chunk_tokens is not None
        self.root = root
        self.index = index
        self.shards = shards
        self.options = options
        self.chunk_tokens: int = options.chunk_tokens
        self.memory = MemoryTier(options.memory_bytes)
        self.rates = RateBook()
        self.counts: Counter[str] = Counter()
        self.unsupported: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._writes = WriteQueue(options.write_queue_bytes, self._say_write_failed)
        self._uses: list[tuple[ChunkKey, ...]] = []
        self._refused: dict[tuple[int, bytes], float] = {}
        self._lost: set[ChunkKey] = set()
        self._device = ""
        self._warned: set[str] = set()
        self._closed = False
        _opened.add(self)

    @property
    def read_only(self) -> bool:
        """Tell whether this bank is never written to."""
        return self.options.read_only

    def abandon(self) -> None:
        """Be closed, in a process that was forked: its threads are the other's, and so is SQLite's connection.

        No lock that a thread of the other held may be waited for, and nothing be written or closed.
        """
        self._closed = True
        self._lock = threading.Lock()
        self._writes = WriteQueue(0, self._say_write_failed)
        self._writes.close()
        self._uses = []
        self.memory = MemoryTier(0)
        self.rates = RateBook()
        self.index.abandon()

    def flush(self) -> None:
        """Wait until all that was given to be stored is written; then write down uses and rates.

        Raises the first error that a store met since the last flush. Does nothing on a read-only bank.
        """
        self.settle()
        self._writes.raise_failure()

    def settle(self) -> None:
        """Do what `flush` does, but for the errors of stores: whoever looks at the bank sees what this process did."""
        self._writes.wait()
        self._note()

    def _note(self) -> None:
        """Write down what is still in memory: which prefixes were used, and what was measured."""
        if self.read_only:
            return
        now_s = int(time.time())
        with self._lock:
            uses, self._uses = self._uses, []
        rates = self.rates.take_new(self._device, now_s)
        if not uses and not rates:
            return
        with self.index.writing() as tx:
            chunk_rows.touch_many(tx, uses, now_s)
            for measured in rates:
                rates_rows.remember(tx, measured)

    def _note_behind(self) -> None:
        try:
            self._note()
        except PrefixBankError as exc:
            self.warn("note", f"which prefixes were used could not be noted: {exc}")

    def close(self) -> None:
        """Write everything down and close. Closing again does nothing. What can't be written is warned of."""
        if self._closed:
            return
        self._closed = True
        try:
            self._writes.close()
            self._note()
        except PrefixBankError as exc:
            self.warn("flush", f"which prefixes were used could not be noted: {exc}")
        finally:
            self.memory.max_bytes = 0  # a model may still be used without the bank
            self.memory.clear()
            if "_readers" in self.__dict__:
                self._readers.close()
            self.index.close()

    def warn(self, cause: str, message: str) -> None:
        """Warn once for each cause, and count each time."""
        with self._lock:
            self.counts["failures"] += 1
            if cause in self._warned:
                return
            self._warned.add(cause)
        warnings.warn(message, BankWarning, stacklevel=3)

    def count(self, **amounts: int) -> None:
        """Add to the counters of this session."""
        with self._lock:
            self.counts.update(amounts)

    def count_unsupported(self, cause: str) -> None:
        """Count a prompt that went past the bank because of its model's cache."""
        with self._lock:
            self.unsupported[cause] += 1

    def digest_files(self, files: list[Path]) -> dict[str, str]:
        """Return the SHA-256 of files by name; unchanged files are not read again, if the bank can be written."""

        def recall(state: WeightsFile) -> str | None:
            try:
                with self.index.reading() as tx:
                    return weights_rows.recall(tx, state)
            except PrefixBankError as exc:
                self.warn("memo", f"digests of weights could not be looked up: {exc}")
                return None

        def remember(digests: dict[WeightsFile, str]) -> None:
            if self.read_only:
                return
            try:
                with self.index.writing() as tx:
                    weights_rows.remember(tx, digests)
            except PrefixBankError as exc:
                self.warn("memo", f"digests of weights could not be kept: {exc}")

        return fingerprint.digest_files(files, recall, remember)

    def namespace(self, wanted: Namespace) -> Namespace:
        """Return the namespace as the index knows it, adding it where it is missing and the bank can be written."""
        with self.index.reading() as tx:
            known = namespace_rows.find(tx, wanted.fingerprint, wanted.salt_digest)
        if not self.read_only and not namespace_rows.agree(known, wanted):
            with self.index.writing() as tx:
                known = namespace_rows.ensure(tx, wanted)
        if known is not None and not namespace_rows.agree(known, wanted):
            raise FingerprintMismatchError(
                f"namespace {wanted.fingerprint[:12]} has chunks of another cache layout or salt: they came with an "
                f"archive that lies; `prefixbank prune --namespace {wanted.fingerprint}/{wanted.salt_digest}` removes "
                "them"
            )
        return known or wanted

    def recall_rates(self, namespace: Namespace, device: str) -> None:
        """Begin with the rates that an earlier process measured on this device."""
        self._device = device
        with self.index.reading() as tx:
            self.rates.recall(namespace, rates_rows.find(tx, namespace.id, device))

    def match(
        self,
        namespace: Namespace,
        token_ids: bytes,
        limit: int,
        known: Sequence[ChunkRecord] = (),
        n_at_hand: int = 0,
    ) -> Match:
        """Return the longest stored prefix of packed token ids, of at most `limit` tokens, and whether loading it pays.

        `known` may be the chunks of an earlier match. What this process is about to store is waited for, where it is
        more than `n_at_hand` tokens, and faster than computing them again.
        """
        if any(record.key in self._lost for record in known):
            known = ()  # what became of a lost shard's row only the whole walk says
        while True:
            found = resolver.match(self.index, namespace, token_ids, self.chunk_tokens, limit, known)
            n_there = max(found.n_tokens, n_at_hand)
            n_coming = min(self._writes.n_covered(namespace.id, token_ids), limit) - n_there
            if n_coming <= 0 or not self._worth_waiting(namespace, n_coming):
                break
            self._writes.wait()
        if not found.n_tokens:
            return found
        estimate = self.rates.estimate(namespace, found.n_tokens, found.n_bytes)
        return replace(
            found,
            load_s=estimate.load_s,
            compute_s=estimate.compute_s,
            loading_pays=self.options.load == "always" or estimate.loading_pays,
        )

    def _worth_waiting(self, namespace: Namespace, n_tokens: int) -> bool:
        saved_s = self.rates.estimate(namespace, n_tokens, 0).compute_s
        known_to_be_slower = saved_s is not None and saved_s < self._writes.n_bytes / _WRITTEN_BYTES_PER_S
        return self.options.load == "always" or not known_to_be_slower

    def load(self, namespace: Namespace, found: Match, layout: CacheLayout, reserve: int) -> restoring.Loaded:
        """Read a match into a new prompt cache; shards that fail are healed or set aside, and shorten it."""
        started_at = time.perf_counter()
        loaded = restoring.load(found, layout, self.shards, self._readers, reserve)
        if not loaded.failures:
            self.rates.loaded(namespace, found.n_bytes, time.perf_counter() - started_at)
        self.count(loaded_tokens=loaded.match.n_tokens)
        for record, error in loaded.failures:
            self._lost.add(record.key)
            self.warn(type(error).__name__, f"{error}: its tokens are computed again")
            if not self.read_only:
                self._heal(record, error)
        return loaded

    def _heal(self, record: ChunkRecord, error: PrefixBankError) -> None:
        try:
            restoring.heal(self.index, self.shards, record, error)
        except PrefixBankError as exc:  # what was loaded in front of the lost shard is right all the same
            self.warn("heal", f"a lost shard could not be struck off the index: {exc}")

    def note_use(self, found: Match) -> None:
        """Count a match that was used, and note the use for LRU; notes are written in groups, on the writing thread."""
        self.count(hits=1)
        if self.read_only or not found.chunks:
            return
        with self._lock:
            self._uses.append(tuple(record.key for record in found.chunks))
            due = len(self._uses) % _USES_BETWEEN_WRITES == 0
        if due:
            self._writes.submit(0, b"", 0, self._note_behind)

    def can_queue(self, namespace: Namespace, token_ids: bytes, n_bytes: int) -> bool:
        """Tell whether `store_behind` would take a prefix; counts it where the queue is full."""
        name = namespace.id, token_ids
        if time.monotonic() < self._refused.get(name, 0.0):
            return False
        if self._writes.n_covered(namespace.id, token_ids) == len(token_ids) // TOKEN_BYTES:
            return False  # it is on its way
        if self._writes.has_room(n_bytes):
            return True
        self.count(skipped_stores=1)
        return False

    def store_behind(self, namespace: Namespace, token_ids: bytes, source: storing.RowSource, n_bytes: int) -> None:
        """Store packed token ids on the writing thread; `source` holds `n_bytes` of copied rows. Never waits.

        A store is skipped, and counted, where the queue is full. One that fails is warned of once, and counted.
        """
        if not self._writes.submit(namespace.id, token_ids, n_bytes, lambda: self.store(namespace, token_ids, source)):
            self.count(skipped_stores=1)

    def _say_write_failed(self, error: Exception) -> None:
        self.count(failed_stores=1)
        self.warn(
            f"store {type(error).__name__}", f"a prefix could not be stored: {error}; generation goes on without it"
        )

    def store(
        self, namespace: Namespace, token_ids: bytes, source: storing.RowSource, *, only_add: bool = False
    ) -> storing.Stored:
        """Store packed token ids, all of them, with their rows from `source`; warns once where the budget refuses."""
        if self.read_only:
            raise BankReadOnlyError(f"{self.root} is opened read-only: nothing can be stored")
        self._note()
        stored = storing.store(
            self.index,
            self.shards,
            namespace,
            token_ids,
            self.chunk_tokens,
            source,
            self.options.max_bytes,
            only_add=only_add,
        )
        self.count(stored_chunks=stored.n_new_chunks, written_bytes=stored.n_written_bytes)
        if stored.n_new_chunks and self.options.max_bytes is not None:
            # Others may have stored since room was made.
            eviction.make_room(self.index, self.shards, self.options.max_bytes, 0, frozenset())
        if stored.refused:
            if len(self._refused) >= _REFUSALS_KEPT:
                self._refused.clear()
            self._refused[namespace.id, token_ids] = time.monotonic() + _REFUSED_FOR_S
            self.count(refused_stores=1)
            self.warn("refused", f"a prefix was not stored whole: {stored.refused}")
        return stored

    def plan_shards(
        self, namespace: Namespace, token_ids: bytes, source: storing.Held, *, only_add: bool = False
    ) -> dict[ChunkKey, int]:
        """Return the bytes of each shard that storing packed token ids would write."""
        return storing.plan_shards(self.index, namespace, token_ids, self.chunk_tokens, source, only_add=only_add)

    def name_prefix(self, prefix: PrefixRecord, old: PrefixRecord | None = None, keep_as: str | None = None) -> bool:
        """Give a stored prefix a name, in place of what had it. Raises `ConfigError` for a name that can't be one.

        With `keep_as`, `old`, if it still has the name, is called that from now on; returns whether it is. Its pin
        stays with both.
        """
        require_prefix_name(prefix.name)
        kept = False
        with self.naming() as tx:
            if old is not None and keep_as is not None and (kept := prefix_rows.rename(tx, old, keep_as)):
                prefix = replace(prefix, pinned=prefix.pinned or old.pinned)
            prefix_rows.name(tx, prefix)
        return kept

    @contextmanager
    def naming(self) -> Iterator[sa.Connection]:
        """Open a transaction that changes names or pins; `prefixes.json` has them before it is committed."""
        with self.index.writing() as tx:
            before = namesfile.of_index(tx)
            yield tx
            after = namesfile.of_index(tx)
            namesfile.update(self.root, before, after, durable=self.options.durability == "full")

    def plan_replaced(self, old: PrefixRecord, still_needed: Set[ChunkKey] = frozenset()) -> eviction.PrunePlan:
        """Return the chunks that only a prefix stands on whose name moves on; see `eviction.plan_replaced`."""
        with self.index.reading() as tx:
            return eviction.plan_replaced(tx, old, still_needed)

    def drop_replaced(self, old: PrefixRecord) -> eviction.PrunePlan:
        """Delete the chunks that only a prefix stands on whose name has moved on; returns what went."""
        return eviction.execute(self.index, self.shards, self.plan_replaced(old))

    def prefixes(self, name: str | None = None) -> list[PrefixRecord]:
        """Return the named prefixes, or those of one name."""
        with self.index.reading() as tx:
            return prefix_rows.list_all(tx, name)

    def first_chunks(self, token_ids: bytes) -> list[tuple[Namespace, ChunkRecord]]:
        """Return, for each namespace, the first chunks that begin with the same token; for explanations."""
        with self.index.reading() as tx:
            return [
                (namespace, record)
                for namespace in namespace_rows.list_all(tx)
                for record in chunk_rows.children(tx, namespace.id, None, first_token(token_ids), 64)
            ]

    def next_chunks(self, namespace: Namespace, parent_key: ChunkKey | None) -> Sequence[ChunkRecord]:
        """Return some chunks that stand on `parent_key`, whatever they begin with; for explanations."""
        with self.index.reading() as tx:
            return chunk_rows.children_of(tx, namespace.id, parent_key, 64)

    @cached_property
    def _readers(self) -> restoring.Readers:
        return restoring.Readers(MAX_READERS)


_opened: weakref.WeakSet[BankSession] = weakref.WeakSet()


def _abandon_all() -> None:
    for session in list(_opened):
        session.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def require_prefix_name(name: str) -> None:
    """Raise `ConfigError` for what can't be a prefix name.

    Names are never made paths of; but whoever writes `..` or half a surrogate pair (bytes that are no UTF-8) into one
    means no name.
    """
    if not _NAME.fullmatch(name) or ".." in name.split("/") or any("\ud800" <= c <= "\udfff" for c in name):
        raise ConfigError(f"{name!r} can't be a prefix name: use 1 to 200 printable characters, and no .. as a part")
