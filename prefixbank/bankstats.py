"""Own the numbers of a bank: what it holds, and what this process did with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefixbank.files import disk_bytes
from prefixbank.index import chunk_rows, namespace_rows, prefix_rows, rates_rows
from prefixbank.session import BankSession
from prefixbank.values import Rates

__all__ = ["BankStats", "collect_stats"]


@dataclass(frozen=True, slots=True)
class BankStats:
    """Say what a bank holds and what this process did with it.

    `disk_bytes` are the shards' bytes on disk in whole blocks, `max_bytes` their budget (None: no limit). `session`
    counts since the bank was opened: `matches`, `hits`, `memory_hits`, `computed_by_choice` (where loading would have
    taken longer), `cached_tokens`, `computed_tokens`, `loaded_tokens` (from disk), `stored_chunks`, `written_bytes`,
    `refused_stores` (no budget), `skipped_stores` (the queue was full), `failed_stores`, `failures`; `unsupported`
    counts attempts by the cause that kept a model out of the bank. `rates` are the measured speeds by namespace and
    device.
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
    rates: tuple[Rates, ...] = ()


def collect_stats(session: BankSession) -> BankStats:
    """Return the numbers of an opened bank; what this process is about to write is written first."""
    session.settle()
    with session.index.reading() as tx:
        rates = tuple(rates_rows.list_all(tx))
        totals = chunk_rows.totals(tx)
        prefixes = prefix_rows.list_all(tx)
        usages = namespace_rows.list_usage(tx)
    return BankStats(
        root=session.root,
        n_chunks=totals.n_chunks,
        n_tokens=totals.n_tokens,
        n_holes=totals.n_holes,
        n_namespaces=sum(1 for usage in usages if usage.n_chunks),
        n_prefixes=len(prefixes),
        n_pinned=sum(prefix.pinned for prefix in prefixes),
        disk_bytes=totals.disk_bytes,
        quarantined_bytes=sum(disk_bytes(f.n_bytes) for f in session.shards.iter_files("quarantine")),
        max_bytes=session.options.max_bytes,
        memory_bytes=session.memory.n_bytes,
        session=dict(session.counts),
        unsupported=dict(session.unsupported),
        rates=rates,
    )
