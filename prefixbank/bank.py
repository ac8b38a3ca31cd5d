"""Own the bank as users see it: opening, closing, naming, pinning, pruning, checking. No SQL here, and no arrays.

What goes on the way to a generation is `BankedModel`'s (`model`), which calls the methods at the end of `PrefixBank`.
"""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prefixbank import check as checking
from prefixbank import eviction, fingerprint, resolver, storing
from prefixbank.config import BANK_FILE, BankOptions, Durability, Verify, default_root, parse_duration_s, parse_size
from prefixbank.errors import (
    BankNotFoundError,
    BankReadOnlyError,
    BankWarning,
    ConfigError,
    PrefixBankError,
    UnknownPrefixError,
)
from prefixbank.index import Index, chunk_rows, namespace_rows, prefix_rows, weights_rows
from prefixbank.index.namespace_rows import NamespaceUsage
from prefixbank.layout import CacheLayout
from prefixbank.memory import PromptCachePool
from prefixbank.rootfile import INDEX_FILE, create_root, finish_root, read_bank_file
from prefixbank.shards import ShardStore, disk_bytes
from prefixbank.values import ChunkKey, ChunkRecord, Match, Namespace, PrefixRecord

if TYPE_CHECKING:
    from prefixbank.model import BankedModel

__all__ = ["BankStats", "PrefixBank"]

_NAME = re.compile(r"[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]{0,199}")
_USES_BETWEEN_WRITES = 64
_MAX_READERS = 8


@dataclass(frozen=True, slots=True)
class BankStats:
    """Say what a bank holds and what this process did with it.

    `disk_bytes` are the shards' bytes on disk in whole blocks, `max_bytes` their budget (None: no limit). `session` counts
    since the bank was opened: `matches`, `hits`, `cached_tokens`, `computed_tokens`, `stored_chunks`, `written_bytes`,
    `refused_stores`, `failures`; `unsupported` counts attempts by the cause that kept a model out of the bank.
    """

    root: Path
    n_chunks: int
    n_tokens: int
    n_holes: int
    n_namespaces: int
    n_prefixes: int
    n_pinned: int
    disk_bytes: int
    quarantined_bytes: int
    max_bytes: int | None
    memory_bytes: int
    session: dict[str, int]
    unsupported: dict[str, int]


class PrefixBank:
    """Keep the KV caches of prompt prefixes on disk, for any number of models. Make one with `PrefixBank.open`.

    Safe to use from several threads, and from several processes at once. It is a context manager that closes itself.
    """

    def __init__(self, root: Path, index: Index, shards: ShardStore, options: BankOptions) -> None:
        """Hold an opened index and store; `options` are complete (`chunk_tokens` is set)."""
        assert options.chunk_tokens is not None
        self.root = root
        self.options = options
        self.chunk_tokens: int = options.chunk_tokens
        self.memory = PromptCachePool(options.memory_bytes)
        self._index = index
        self._shards = shards
        self._lock = threading.Lock()
        self._uses: list[tuple[ChunkKey, ...]] = []
        self._session: Counter[str] = Counter()
        self._unsupported: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._closed = False

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str] | None = None,
        *,
        create: bool = True,
        max_bytes: int | str | None = None,
        memory_bytes: int | str = "1GB",
        durability: Durability = "full",
        verify: Verify = "once",
        read_only: bool = False,
        chunk_tokens: int | None = None,
        busy_timeout_s: float = 15.0,
    ) -> Self:
        """Open the bank at `root`, making it first where there is none.

        Args:
            root: the bank root; None takes `PREFIXBANK_HOME`, `./bank` if it is a bank, or the user cache folder.
            create: False raises `BankNotFoundError` where there is no bank.
            max_bytes: budget of shards on disk (`"20GB"`, or bytes); held at once by evicting what was used least
                recently, and at each store. None takes what the bank was made with; that too may be no limit.
            memory_bytes: budget of prompt caches that `checkout` keeps in memory.
            durability: `"full"` syncs files and folders before a store counts as done; `"fast"` leaves that to the
                system: a power cut may then lose what was stored last (damage is found by digest).
            verify: when a shard's digest is proven: `"once"` a process and file state, `"always"` or `"never"`.
            read_only: change nothing, not even what was used when.
            chunk_tokens: token ids in a full chunk (256), fixed when the bank is made.
            busy_timeout_s: how long to wait for another process's transaction.

        Raises:
            ConfigError: an option or folder that makes no sense.
            BankNotFoundError, SchemaError, IndexCorruptError, BankBusyError, StorageError: as their names say.
        """
        path = Path(root) if root is not None else default_root()
        options = BankOptions(
            max_bytes=None if max_bytes is None else parse_size(max_bytes),
            memory_bytes=parse_size(memory_bytes),
            durability=durability,
            verify=verify,
            read_only=read_only,
            chunk_tokens=chunk_tokens,
            busy_timeout_s=busy_timeout_s,
        )
        if create and not read_only and not (path / BANK_FILE).exists():
            create_root(path)
            Index.create_file(path / INDEX_FILE)
            index = _open_index(path, options)
            index.migrate()
            index.close()
            finish_root(path, chunk_tokens=chunk_tokens, max_bytes=options.max_bytes)
        bank = cls._open_existing(path, options)
        if not bank.read_only and bank.options.max_bytes is not None:
            bank._hold_budget()
        return bank

    @classmethod
    def _open_existing(cls, path: Path, given: BankOptions) -> Self:
        bank_file = read_bank_file(path)
        if given.chunk_tokens not in (None, bank_file.chunk_tokens):
            raise ConfigError(
                f"{path} was made with chunk_tokens={bank_file.chunk_tokens}: leave the option out, or make a new bank"
            )
        index_path = path / INDEX_FILE
        read_only = given.read_only
        if not read_only and not os.access(path, os.W_OK):
            read_only = True
            warnings.warn(f"{path} can't be written: the bank is used read-only", BankWarning, stacklevel=4)
        options = BankOptions(
            max_bytes=given.max_bytes if given.max_bytes is not None else bank_file.max_bytes,
            memory_bytes=given.memory_bytes,
            durability=given.durability,
            verify=given.verify,
            read_only=read_only,
            chunk_tokens=bank_file.chunk_tokens,
            busy_timeout_s=given.busy_timeout_s,
        )
        if read_only:
            if not index_path.exists():
                raise BankNotFoundError(f"{index_path} is gone: open the bank for writing to make it anew")
        elif Index.create_file(index_path) or index_path.stat().st_size == 0:
            index = _open_index(path, options)
            index.migrate()
            index.close()
            warnings.warn(
                f"{index_path} was lost and is made anew: what was stored is no longer known, and "
                "`prefixbank prune` deletes its files",
                BankWarning,
                stacklevel=4,
            )
        index = _open_index(path, options)
        try:
            index.require_current()
        except PrefixBankError:
            index.close()
            raise
        shards = ShardStore(path, durability=options.durability, verify=options.verify)
        return cls(path, index, shards, options)

    # --- models

    def load_model(
        self,
        path_or_hub_id: str | os.PathLike[str],
        *,
        adapter_path: str | os.PathLike[str] | None = None,
        salt: str | bytes = b"",
        precision: str = "auto",
        **options: Any,
    ) -> BankedModel:
        """Load a model with `mlx_lm` and attach it to this bank.

        Args:
            path_or_hub_id: a folder, or a Hugging Face hub id.
            adapter_path: folder of a LoRA adapter.
            salt: keeps what is stored apart from what is stored with another salt.
            precision: `"model"` leaves the weights as they are; `"float32"` turns them into float32; `"auto"` does that
                where mlx runs on the CPU and the weights are half-precision, which is unusably slow there.
            options: `kv_bits`, `kv_group_size`, `quantized_kv_start`, `prefill_step_size`, `tokenizer_config`,
                `trust_remote_code`.

        Raises `ConfigError` for a model that can't be loaded. A model whose cache can't be stored is loaded all the
        same, with one warning: it works without the bank.
        """
        from prefixbank.model import BankedModel  # late: imports MLX

        return BankedModel.load(
            self,
            path_or_hub_id,
            adapter_path=adapter_path,
            salt=salt,
            precision=precision,
            **options,
        )

    def attach(self, model: Any, tokenizer: Any, *, salt: str | bytes = b"", **options: Any) -> BankedModel:
        """Attach a loaded mlx-lm model and its tokenizer to this bank.

        The model is told from others by the digest of all its parameters and settings, which reads all its weights once;
        `load_model` knows the files and is faster. Options are those of `load_model`.
        """
        from prefixbank.model import BankedModel  # late: imports MLX

        return BankedModel.attach(self, model, tokenizer, salt=salt, **options)

    # --- looking and keeping order

    @property
    def read_only(self) -> bool:
        """Tell whether this bank is never written to."""
        return self.options.read_only

    def stats(self) -> BankStats:
        """Return what the bank holds and what this process did with it."""
        self.flush()
        with self._index.reading() as tx:
            totals = chunk_rows.totals(tx)
            prefixes = prefix_rows.list_all(tx)
            usages = namespace_rows.list_usage(tx)
        return BankStats(
            root=self.root,
            n_chunks=totals.n_chunks,
            n_tokens=totals.n_tokens,
            n_holes=totals.n_holes,
            n_namespaces=sum(1 for usage in usages if usage.n_chunks),
            n_prefixes=len(prefixes),
            n_pinned=sum(prefix.pinned for prefix in prefixes),
            disk_bytes=totals.disk_bytes,
            quarantined_bytes=sum(disk_bytes(f.n_bytes) for f in self._shards.iter_files("quarantine")),
            max_bytes=self.options.max_bytes,
            memory_bytes=self.memory.n_bytes,
            session=dict(self._session),
            unsupported=dict(self._unsupported),
        )

    def prefixes(self, name: str | None = None) -> list[PrefixRecord]:
        """Return the named prefixes, or those of one name. Raises `UnknownPrefixError` for an unknown name."""
        with self._index.reading() as tx:
            found = prefix_rows.list_all(tx, name)
        if name is not None and not found:
            raise UnknownPrefixError(f"no prefix is named {name!r}: `prefixbank ls` lists the names")
        return found

    def namespaces(self) -> list[NamespaceUsage]:
        """Return the models that have something in the bank, with what it takes."""
        with self._index.reading() as tx:
            return [usage for usage in namespace_rows.list_usage(tx) if usage.n_chunks]

    def chunks(self, namespace: str | None = None) -> list[ChunkRecord]:
        """Return all chunks, or those of the namespace whose fingerprint begins so."""
        namespace_id = None if namespace is None else self._find_namespace(namespace).id
        with self._index.reading() as tx:
            return chunk_rows.list_all(tx, namespace_id)

    def chain(self, prefix: PrefixRecord) -> list[ChunkRecord]:
        """Return the chunks of a named prefix from the root on; [] once it was evicted."""
        if prefix.chunk_key is None:
            return []
        with self._index.reading() as tx:
            keys = prefix_rows.chain_keys(tx, [prefix.chunk_key])
            return sorted(chunk_rows.find(tx, list(keys)).values(), key=lambda record: record.start)

    def pin(self, name: str) -> None:
        """Never evict a named prefix. Raises `UnknownPrefixError`, `BankReadOnlyError`."""
        self._set_pinned(name, True)

    def unpin(self, name: str) -> None:
        """Let a named prefix be evicted again. Raises `UnknownPrefixError`, `BankReadOnlyError`."""
        self._set_pinned(name, False)

    def _set_pinned(self, name: str, pinned: bool) -> None:
        with self._index.writing() as tx:
            n_named = prefix_rows.set_pinned(tx, name, pinned)
        if not n_named:
            raise UnknownPrefixError(f"no prefix is named {name!r}: `prefixbank ls` lists the names")

    def remove(self, name: str, *, dry_run: bool = False) -> eviction.PrunePlan:
        """Take a name away and delete the chunks that no other name or prompt stands on; returns what went.

        With `dry_run`, returns what would go. Raises `UnknownPrefixError`, `BankReadOnlyError`.
        """
        self.prefixes(name)
        with self._index.reading() as tx:
            todo = eviction.plan_removal(tx, name)
        if dry_run:
            return todo
        with self._index.writing() as tx:
            prefix_rows.delete(tx, name)
        return eviction.execute(self._index, self._shards, todo)

    def prune(
        self,
        *,
        max_bytes: int | str | None = None,
        unused_for: str | float | None = None,
        namespace: str | None = None,
        dry_run: bool = False,
    ) -> eviction.PrunePlan:
        """Remove what the policy says and what nothing refers to; returns what went, or with `dry_run` would go.

        Args:
            max_bytes: budget for this prune; None takes the bank's.
            unused_for: also remove what was not used for this long (`"30d"`, or seconds).
            namespace: touch only chunks of the namespace whose fingerprint begins so; all of them, where neither
                `max_bytes` nor `unused_for` is given.
            dry_run: change nothing.

        Pinned prefixes stay. Raises `ConfigError`, `UnknownPrefixError`, `BankReadOnlyError`.
        """
        if not dry_run:
            self.flush()
        limit = None if max_bytes is None else parse_size(max_bytes)
        if limit is None and namespace is None:
            limit = self.options.max_bytes
        age_s = parse_duration_s(unused_for) if isinstance(unused_for, str) else unused_for
        policy = eviction.PrunePolicy(
            max_bytes=limit,
            unused_before=None if age_s is None else time.time() - age_s,
            namespace_id=None if namespace is None else self._find_namespace(namespace).id,
        )
        leftovers = eviction.find_leftovers(self._index, self._shards, time.time())
        quarantined = tuple(self._shards.iter_files("quarantine"))
        with self._index.reading() as tx:
            todo = eviction.plan(tx, policy, quarantined=quarantined, leftovers=leftovers)
        if dry_run:
            return todo
        if self.read_only:
            raise BankReadOnlyError(f"{self.root} is opened read-only: nothing can be pruned")
        return eviction.execute(self._index, self._shards, todo)

    def check(
        self, *, read_data: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> checking.CheckReport:
        """Compare index and files and return what is wrong; changes nothing.

        `read_data` reads every shard and proves its digest; `progress` is called with (bytes done, bytes in all).
        """
        return checking.check(self._index, self._shards, read_data=read_data, progress=progress)

    def flush(self) -> None:
        """Write down what is still in memory: which prefixes were used. Does nothing on a read-only bank."""
        with self._lock:
            uses, self._uses = self._uses, []
        if not uses or self.read_only:
            return
        now_s = int(time.time())
        with self._index.writing() as tx:
            for keys in uses:
                chunk_rows.touch(tx, keys, chunk_rows.next_tick(tx), now_s)

    def close(self) -> None:
        """Flush and close. Closing again does nothing. A bank that can't be flushed is closed with a warning."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
        except PrefixBankError as exc:
            self.warn("flush", f"which prefixes were used could not be noted: {exc}")
        self.memory.clear()
        if "_executor" in self.__dict__:
            self._executor.shutdown()
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PrefixBank({str(self.root)!r}{', read_only=True' if self.read_only else ''})"

    # --- what BankedModel builds on

    def warn(self, cause: str, message: str) -> None:
        """Warn once for each cause, and count each time."""
        with self._lock:
            self._session["failures"] += 1
            if cause in self._warned:
                return
            self._warned.add(cause)
        warnings.warn(message, BankWarning, stacklevel=3)

    def count(self, **amounts: int) -> None:
        """Add to the counters of this session."""
        with self._lock:
            self._session.update(amounts)

    def count_unsupported(self, cause: str) -> None:
        """Count a prompt that went past the bank because of its model's cache."""
        with self._lock:
            self._unsupported[cause] += 1

    def digest_files(self, files: list[Path]) -> dict[str, str]:
        """Return the SHA-256 of files by name; unchanged files are not read again, if the bank can be written."""

        def recall(state: Any) -> str | None:
            with self._index.reading() as tx:
                return weights_rows.recall(tx, state)

        def remember(digests: Any) -> None:
            if self.read_only:
                return
            try:
                with self._index.writing() as tx:
                    weights_rows.remember(tx, digests)
            except PrefixBankError as exc:
                self.warn("memo", f"digests of weights could not be kept: {exc}")

        return fingerprint.digest_files(files, recall, remember)

    def namespace(self, wanted: Namespace) -> Namespace:
        """Return the namespace as the index knows it, adding it where it is missing and the bank can be written."""
        with self._index.reading() as tx:
            known = namespace_rows.find(tx, wanted.fingerprint, wanted.salt_digest)
        if known is not None or self.read_only:
            return known or wanted
        with self._index.writing() as tx:
            return namespace_rows.ensure(tx, wanted)

    def match(self, namespace: Namespace, token_ids: bytes, limit: int) -> Match:
        """Return the longest stored prefix of packed token ids, of at most `limit` tokens."""
        return resolver.match(self._index, namespace, token_ids, self.chunk_tokens, limit)

    def load(self, found: Match, layout: CacheLayout, reserve: int) -> resolver.Loaded:
        """Read a match into a new prompt cache; shards that fail are healed or set aside, and shorten it."""
        loaded = resolver.load(found, layout, self._shards, self._executor, reserve)
        for record, error in loaded.failures:
            self.warn(type(error).__name__, f"{error}: its tokens are computed again")
            if not self.read_only:
                resolver.heal(self._index, self._shards, record, error)
        return loaded

    def note_use(self, found: Match) -> None:
        """Count a match that was used, and note the use for LRU; notes are written in groups."""
        self.count(hits=1)
        with self._lock:
            self._uses.append(tuple(record.key for record in found.chunks))
            due = len(self._uses) >= _USES_BETWEEN_WRITES
        if due:
            self.flush()

    def store(self, namespace: Namespace, token_ids: bytes, source: storing.RowSource) -> storing.Stored:
        """Store packed token ids, all of them, with their rows from `source`; warns once where the budget refuses."""
        if self.read_only:
            raise BankReadOnlyError(f"{self.root} is opened read-only: nothing can be stored")
        self.flush()
        stored = storing.store(
            self._index,
            self._shards,
            namespace,
            token_ids,
            self.chunk_tokens,
            source,
            self.options.max_bytes,
        )
        self.count(stored_chunks=stored.n_new_chunks, written_bytes=stored.n_written_bytes)
        if stored.refused:
            self.count(refused_stores=1)
            self.warn("refused", f"a prefix was not stored whole: {stored.refused}")
        return stored

    def name_prefix(self, prefix: PrefixRecord) -> None:
        """Give a stored prefix a name, in place of what had it. Raises `ConfigError` for a name that can't be one."""
        if not _NAME.fullmatch(prefix.name):
            raise ConfigError(f"{prefix.name!r} can't be a prefix name: use 1 to 200 printable characters")
        with self._index.writing() as tx:
            prefix_rows.name(tx, prefix)

    def first_chunks(self, token_ids: bytes) -> list[tuple[Namespace, ChunkRecord]]:
        """Return, for each namespace, the first chunks that begin with the same token; for explanations."""
        with self._index.reading() as tx:
            return [
                (usage.namespace, record)
                for usage in namespace_rows.list_usage(tx)
                for record in chunk_rows.children(
                    tx, usage.namespace.id, None, int.from_bytes(token_ids[:4], "little"), 64
                )
            ]

    def next_chunks(self, namespace: Namespace, parent_key: ChunkKey | None) -> Sequence[ChunkRecord]:
        """Return some chunks that stand on `parent_key`, whatever they begin with; for explanations."""
        with self._index.reading() as tx:
            return chunk_rows.children_of(tx, namespace.id, parent_key, 64)

    def _find_namespace(self, fingerprint_start: str) -> Namespace:
        with self._index.reading() as tx:
            found = [
                usage.namespace
                for usage in namespace_rows.list_usage(tx)
                if usage.namespace.fingerprint.startswith(fingerprint_start.lower())
            ]
        if len(found) != 1 or len(fingerprint_start) < 4:
            raise UnknownPrefixError(
                f"{len(found) or 'no'} namespaces begin with {fingerprint_start!r}: give at least 4 characters that "
                "only one has (`prefixbank ls namespaces`)"
            )
        return found[0]

    def _hold_budget(self) -> None:
        policy = eviction.PrunePolicy(max_bytes=self.options.max_bytes)
        quarantined = tuple(self._shards.iter_files("quarantine"))
        with self._index.reading() as tx:
            todo = eviction.plan(tx, policy, quarantined=quarantined)
        if todo.chunks or todo.files:
            eviction.execute(self._index, self._shards, todo)
        assert self.options.max_bytes is not None
        if todo.kept_bytes > self.options.max_bytes:
            self.warn(
                "budget",
                f"{self.root} is above its budget of {self.options.max_bytes} bytes by what is pinned: unpin something",
            )

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(_MAX_READERS, os.cpu_count() or 1), "prefixbank-read")


def _open_index(path: Path, options: BankOptions) -> Index:
    return Index(
        path / INDEX_FILE,
        read_only=options.read_only,
        durability=options.durability,
        busy_timeout_s=options.busy_timeout_s,
    )
