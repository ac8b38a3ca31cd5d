"""Own the bank as users see it: opening, closing, naming, pinning, pruning, checking. No SQL here, and no arrays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prefixbank import check as checking
from prefixbank import eviction
from prefixbank.bankstats import BankStats, collect_stats
from prefixbank.config import BankOptions, Durability, LoadRule, Verify, default_root, parse_duration_s, parse_size
from prefixbank.errors import BankReadOnlyError, ConfigError, PrefixBankError, UnknownPrefixError
from prefixbank.index import chunk_rows, namespace_rows, prefix_rows
from prefixbank.index.namespace_rows import NamespaceUsage
from prefixbank.opening import hold_budget, open_session
from prefixbank.rootfile import refusals
from prefixbank.session import BankSession
from prefixbank.values import ChunkRecord, Namespace, PrefixRecord

if TYPE_CHECKING:
    from prefixbank.archives import Exported, Imported
    from prefixbank.fewshot import FewShotPrompt
    from prefixbank.model import BankedModel
    from prefixbank.prefixfiles import PrefixFile
    from prefixbank.repair import RepairPlan

__all__ = ["PrefixBank"]


class PrefixBank:
    """Keep the KV caches of prompt prefixes on disk, for any number of models. Make one with `PrefixBank.open`.

    Safe to use from several threads, and from several processes at once. It is a context manager that closes itself.
    """

    def __init__(self, session: BankSession) -> None:
        """Face an opened session; `open` makes both."""
        self._session = session
        self.root = session.root

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str] | None = None,
        *,
        create: bool = True,
        max_bytes: int | str | None = None,
        memory_bytes: int | str = "1GB",
        write_queue_bytes: int | str = "1GB",
        load: LoadRule = "auto",
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
            memory_bytes: budget of prompt caches that stay in memory between uses, for `generate`, `checkout` and
                `resolve`; 0 keeps none.
            write_queue_bytes: how many bytes of copied KV may wait to be written (one prefix of any size may); what
                does not fit is not stored, and counted.
            load: `"auto"` computes where that is measured to be faster than loading, `"always"` loads.
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
        try:
            path = Path(root).expanduser() if root is not None else default_root()
        except RuntimeError as exc:  # ~nobody
            raise ConfigError(f"{root} can't be a bank root: {exc}") from exc
        options = BankOptions(
            max_bytes=None if max_bytes is None else parse_size(max_bytes),
            memory_bytes=parse_size(memory_bytes),
            write_queue_bytes=parse_size(write_queue_bytes),
            load=load,
            durability=durability,
            verify=verify,
            read_only=read_only,
            chunk_tokens=chunk_tokens,
            busy_timeout_s=busy_timeout_s,
        )
        with refusals(path):
            bank = cls(open_session(path, options, create=create))
        if not bank.read_only and bank._session.options.max_bytes is not None:
            try:
                hold_budget(bank._session, bank._session.options.max_bytes)
            except PrefixBankError:
                bank.close()
                raise
        return bank

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
            options: `kv_bits`, `kv_group_size`, `quantized_kv_start` and `max_kv_size` as in mlx-lm;
                `prefill_step_size`; `state_every_chunks` to keep the states of recurrent layers each so many chunks
                too (0: not); `tokenizer_config`; `trust_remote_code`.

        Raises `ConfigError` for a model that can't be loaded. A model whose cache can't be stored is loaded all the
        same, with one warning: it works without the bank.
        """
        from prefixbank import attaching  # late: imports MLX

        return attaching.load(
            self._session, path_or_hub_id, adapter_path=adapter_path, salt=salt, precision=precision, **options
        )

    def attach(self, model: Any, tokenizer: Any, *, salt: str | bytes = b"", **options: Any) -> BankedModel:
        """Attach a loaded mlx-lm model and its tokenizer to this bank.

        The model is told from others by the digest of all its parameters and settings, which reads all its weights
        once; `load_model` knows the files and is faster. Options are those of `load_model`.
        """
        from prefixbank import attaching  # late: imports MLX

        return attaching.attach(self._session, model, tokenizer, salt=salt, **options)

    # --- looking and keeping order

    @property
    def read_only(self) -> bool:
        """Tell whether this bank is never written to."""
        return self._session.options.read_only

    def stats(self) -> BankStats:
        """Return what the bank holds and what this process did with it."""
        return collect_stats(self._session)

    def prefixes(self, name: str | None = None) -> list[PrefixRecord]:
        """Return the named prefixes, or those of one name. Raises `UnknownPrefixError` for an unknown name."""
        self._session.settle()
        found = self._session.prefixes(name)
        if name is not None and not found:
            raise UnknownPrefixError(f"no prefix is named {name!r}: `prefixbank ls` lists the names")
        return found

    def prefix_files(self) -> list[PrefixFile]:
        """Return the few-shot prompts in the bank's folder `prefixes/`, each with what is stored of it and its state.

        Stored few-shot prompts that no file is of follow them. Broken files are among them, with their error.
        """
        from prefixbank.prefixfiles import PrefixFiles  # late, here and below: 12 ms

        return PrefixFiles(self.root).with_stored(
            self.prefixes(), lambda prefix: prefix.n_stored_tokens(self.chain(prefix))
        )

    def few_shot(
        self, name: str, *, k: int | None = None, variables: Mapping[str, str | int | float] | None = None
    ) -> FewShotPrompt:
        """Return the few-shot prompt of a file in `prefixes/`, as it is now.

        `k` takes its first examples only, and `variables` are used in place of the file's values; such a variation has
        a name of its own. Raises `UnknownPrefixError`, and `PromptError` for a broken file.
        """
        from prefixbank.prefixfiles import PrefixFiles

        return PrefixFiles(self.root).find(name).read(k=k, variables=variables)

    def namespaces(self, *, empty: bool = False) -> list[NamespaceUsage]:
        """Return the models that have something in the bank, with what it takes; with `empty` all that ever had."""
        self._session.settle()
        with self._session.index.reading() as tx:
            return [usage for usage in namespace_rows.list_usage(tx) if usage.n_chunks or empty]

    def chunks(self, namespace: str | None = None) -> list[ChunkRecord]:
        """Return all chunks, or those of the namespace whose fingerprint begins so."""
        self._session.settle()
        namespace_id = None if namespace is None else self._find_namespace(namespace).id
        with self._session.index.reading() as tx:
            return chunk_rows.list_all(tx, namespace_id)

    def chain(self, prefix: PrefixRecord) -> list[ChunkRecord]:
        """Return the chunks of a named prefix from the root on; [] once it was evicted."""
        self._session.settle()
        if prefix.chunk_key is None:
            return []
        with self._session.index.reading() as tx:
            keys = prefix_rows.chain_keys(tx, [prefix.chunk_key])
            return sorted(chunk_rows.find(tx, list(keys)).values(), key=lambda record: record.start)

    def pin(self, name: str) -> None:
        """Never evict a named prefix. Raises `UnknownPrefixError`, `BankReadOnlyError`."""
        self._set_pinned(name, True)

    def unpin(self, name: str) -> None:
        """Let a named prefix be evicted again. Raises `UnknownPrefixError`, `BankReadOnlyError`."""
        self._set_pinned(name, False)

    def _set_pinned(self, name: str, pinned: bool) -> None:
        with self._session.naming() as tx:
            n_named = prefix_rows.set_pinned(tx, name, pinned)
        if not n_named:
            raise UnknownPrefixError(f"no prefix is named {name!r}: `prefixbank ls` lists the names")

    def remove(self, name: str, *, dry_run: bool = False) -> eviction.PrunePlan:
        """Take a name away and delete the chunks that no other name or prompt stands on; returns what went.

        With `dry_run`, returns what would go. Raises `UnknownPrefixError`, `BankReadOnlyError`.
        """
        self.prefixes(name)
        with self._session.index.reading() as tx:
            todo = eviction.plan_removal(tx, name)
        if dry_run:
            return todo
        self._session.memory.clear()
        with self._session.naming() as tx:
            prefix_rows.delete(tx, name)
        return eviction.execute(self._session.index, self._session.shards, todo)

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
            namespace: touch only chunks of this namespace, given as the beginning of its fingerprint, with `/` and that
                of its salt digest if need be; all of them, where neither `max_bytes` nor `unused_for` is given.
            dry_run: change nothing.

        Pinned prefixes stay. Raises `ConfigError`, `UnknownPrefixError`, `BankReadOnlyError`.
        """
        self._session.settle()
        limit = None if max_bytes is None else parse_size(max_bytes)
        if limit is None and namespace is None:
            limit = self._session.options.max_bytes
        age_s = parse_duration_s(unused_for) if isinstance(unused_for, str) else unused_for
        if age_s is not None and not age_s >= 0:  # nor is it NaN
            raise ConfigError(f"unused_for={unused_for!r} must not be negative")
        policy = eviction.PrunePolicy(
            max_bytes=limit,
            unused_before=None if age_s is None else time.time() - age_s,
            namespace_id=None if namespace is None else self._find_namespace(namespace).id,
        )
        leftovers = eviction.find_leftovers(self._session.index, self._session.shards, time.time())
        if limit is not None:  # files of stores in progress, or that were killed just now, take room too
            unnamed = eviction.find_unnamed(self._session.index, self._session.shards, time.time())
            policy = replace(policy, max_bytes=limit - unnamed.n_young_bytes)
        quarantined = tuple(self._session.shards.iter_files("quarantine"))
        with self._session.index.reading() as tx:
            todo = eviction.plan(tx, policy, quarantined=quarantined, leftovers=leftovers)
        if dry_run:
            return todo
        if self.read_only:
            raise BankReadOnlyError(f"{self.root} is opened read-only: nothing can be pruned")
        self._session.memory.clear()
        return eviction.execute(self._session.index, self._session.shards, todo)

    def export_prefixes(
        self,
        path: str | os.PathLike[str],
        names: Sequence[str] = (),
        *,
        namespace: str | None = None,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Exported:
        """Write named prefixes to a new archive, for `import_prefixes` of another bank; returns what it holds.

        Its token ids and KV reveal the prompts; the file has mode 0600. Without `names` all prefixes are exported, or
        all of the namespace whose fingerprint begins so; with `dry_run` nothing is written. Raises `ConfigError` where
        the file is there already, `UnknownPrefixError`, `ShardError`, `StorageError`.
        """
        from prefixbank import archives  # late: few need it

        namespace_id = None if namespace is None else self._find_namespace(namespace).id
        return archives.export_prefixes(
            self._session, Path(path), names, namespace_id, dry_run=dry_run, progress=progress
        )

    def import_prefixes(
        self,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Imported:
        """Store the prefixes of an archive, with their names and pins; returns what was done, or would be.

        All of the archive is proven before anything is stored, but for the KV itself, which only computing it again
        could prove: import what you would also let into your prompts. What the bank has stays as it is; a name that
        another prefix has stays with that, unless `replace`. Raises `ArchiveError`, `SchemaError`,
        `FingerprintMismatchError`, `StorageError` (it does not fit), `BankReadOnlyError`: then nothing was stored.
        """
        from prefixbank import archives

        return archives.import_prefixes(self._session, Path(path), replaces=replace, dry_run=dry_run, progress=progress)

    def check(
        self, *, read_data: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> checking.CheckReport:
        """Compare index and files and return what is wrong; changes nothing.

        `read_data` reads every shard and proves its digest; `progress` is called with (bytes done, bytes in all).
        """
        self._session.settle()
        with refusals(self.root):
            return checking.check(self._session.index, self._session.shards, read_data=read_data, progress=progress)

    def repair(
        self,
        *,
        read_data: bool = False,
        unproven: bool = False,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> RepairPlan:
        """Put right what `check` finds, and return what was done, or with `dry_run` would be; see `repair.repair`.

        A bank whose index is lost or broken is repaired by `prefixbank.repair.repair(root)`, as it can't be opened.
        """
        from prefixbank.repair import repair  # late: seldom asked for

        if self.read_only and not dry_run:
            raise BankReadOnlyError(f"{self.root} is opened read-only: nothing can be repaired")
        self._session.settle()
        self._session.memory.clear()
        return repair(
            self.root,
            read_data=read_data,
            unproven=unproven,
            dry_run=dry_run,
            durability=self._session.options.durability,
            busy_timeout_s=self._session.options.busy_timeout_s,
            progress=progress,
        )

    def flush(self) -> None:
        """Wait until all that was given to be stored is written, and write down which prefixes were used.

        Raises the first error that a store met since the last flush; a store that was skipped because the queue was
        full is no error, `stats().session["skipped_stores"]` counts those. Does nothing on a read-only bank.
        """
        self._session.flush()

    def close(self) -> None:
        """Write everything down and close. Closing again does nothing. What can't be written is warned of."""
        self._session.close()

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

    def _find_namespace(self, selector: str) -> Namespace:
        """Return the namespace of `FINGERPRINT[/SALT]`, cut short or whole; `FINGERPRINT/` is the one without salt."""
        start, slash, salt = selector.lower().partition("/")
        with self._session.index.reading() as tx:
            all_of_them = namespace_rows.list_all(tx)
        found = [n for n in all_of_them if n.fingerprint.startswith(start) and n.salt_digest.startswith(salt)]
        if slash and not salt:
            found = [n for n in found if not n.salt_digest]
        if len(found) != 1 or len(start) < 4:
            raise UnknownPrefixError(
                f"{len(found) or 'no'} namespaces begin with {selector!r}: give FINGERPRINT or FINGERPRINT/SALT, at "
                "least 4 characters that only one has (`prefixbank ls namespaces`)"
            )
        return found[0]
