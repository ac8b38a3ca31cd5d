"""Own opening a bank: making it, completing its options, replacing a lost index, and holding it to its budget."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import replace
from pathlib import Path

from prefixbank import eviction
from prefixbank.config import BankOptions
from prefixbank.errors import BankNotFoundError, BankWarning, ConfigError, PrefixBankError
from prefixbank.files import disk_bytes
from prefixbank.index import Index, chunk_rows
from prefixbank.rootfile import INDEX_FILE, create_root, finish_root, is_bank, read_bank_file
from prefixbank.session import BankSession
from prefixbank.shards import ShardStore

__all__ = ["hold_budget", "open_session"]


def open_session(path: Path, options: BankOptions, *, create: bool) -> BankSession:
    """Open the bank at `path`, or make one there; see `PrefixBank.open`."""
    path = path.absolute()  # the working directory may change while the bank is open
    if create and not options.read_only and not is_bank(path):
        create_root(path)
        Index.create_file(path / INDEX_FILE)
        _migrate(path, options)
        finish_root(path, chunk_tokens=options.chunk_tokens, max_bytes=options.max_bytes)
    options = _complete(path, options)
    if not options.read_only:
        _replace_lost_index(path, options)
    elif not (path / INDEX_FILE).exists():
        raise BankNotFoundError(f"{path / INDEX_FILE} is gone: open the bank for writing to make it anew")
    index = _open_index(path, options)
    try:
        index.require_current()
    except PrefixBankError:
        index.close()
        raise
    shards = ShardStore(path, durability=options.durability, verify=options.verify)
    return BankSession(path, index, shards, options)


def hold_budget(session: BankSession, max_bytes: int) -> None:
    """Evict what is above the budget, and warn where pins keep it there."""
    quarantined = tuple(session.shards.iter_files("quarantine"))
    with session.index.reading() as tx:
        knows_nothing = chunk_rows.disk_bytes(tx) == 0
    unnamed = eviction.find_unnamed(session.index, session.shards, time.time())
    policy = eviction.PrunePolicy(max_bytes=max_bytes - unnamed.n_young_bytes)
    # The files that a lost index leaves take room like any other; looking for them reads every folder, so that is
    # done only where the index is as new. They go only if they must: an index can be rebuilt from them.
    leftovers = eviction.find_leftovers(session.index, session.shards, time.time()) if knows_nothing else ()
    fits = sum(disk_bytes(file.n_bytes) for file in (*leftovers, *quarantined)) <= max_bytes
    with session.index.reading() as tx:
        todo = eviction.plan(tx, policy, quarantined=quarantined, leftovers=unnamed.old if fits else leftovers)
    if todo.chunks or todo.files:
        eviction.execute(session.index, session.shards, todo)
    if todo.kept_bytes > max_bytes - unnamed.n_young_bytes:
        session.warn(
            "budget",
            f"{session.root} is above its budget of {max_bytes} bytes by what is pinned, or was left by "
            "processes that were killed within the hour: unpin something",
        )


def _open_index(path: Path, options: BankOptions) -> Index:
    return Index(
        path / INDEX_FILE,
        read_only=options.read_only,
        durability=options.durability,
        busy_timeout_s=options.busy_timeout_s,
    )


def _migrate(path: Path, options: BankOptions) -> None:
    index = _open_index(path, options)
    try:
        index.migrate()
    finally:
        index.close()


def _complete(path: Path, given: BankOptions) -> BankOptions:
    """Return the options with what the bank itself says."""
    bank_file = read_bank_file(path)
    if given.chunk_tokens not in (None, bank_file.chunk_tokens):
        raise ConfigError(
            f"{path} was made with chunk_tokens={bank_file.chunk_tokens}: leave the option out, or make a new bank"
        )
    read_only = given.read_only
    if not read_only and not os.access(path, os.W_OK):
        read_only = True
        warnings.warn(f"{path} can't be written: the bank is used read-only", BankWarning, stacklevel=4)
    return replace(
        given,
        max_bytes=given.max_bytes if given.max_bytes is not None else bank_file.max_bytes,
        read_only=read_only,
        chunk_tokens=bank_file.chunk_tokens,
    )


def _replace_lost_index(path: Path, options: BankOptions) -> None:
    """Make an index anew that was deleted or emptied; the shards it knew are left where they are."""
    index_path = path / INDEX_FILE
    if Index.create_file(index_path) or index_path.stat().st_size == 0:
        _migrate(path, options)
        warnings.warn(
            f"{index_path} was lost and is made anew: what was stored is no longer known; `prefixbank repair` takes "
            "its files up again, and `prefixbank prune` deletes them",
            BankWarning,
            stacklevel=4,
        )
