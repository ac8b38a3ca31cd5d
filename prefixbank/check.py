"""Own finding what is wrong with a bank; changes nothing.

Findings are compared with the index as it was at the start; what other processes store or delete meanwhile is looked up
again before it is reported.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixbank import namesfile
from prefixbank.chunking import TOKEN_BYTES, chunk_key, root_key
from prefixbank.config import BANK_FILE
from prefixbank.errors import IndexCorruptError, ShardError, ShardMissingError, StorageError
from prefixbank.eviction import find_leftovers
from prefixbank.index import Index, chunk_rows, namespace_rows, prefix_rows
from prefixbank.namesfile import KeptNames
from prefixbank.rootfile import INDEX_FILE
from prefixbank.shards import ShardStore
from prefixbank.values import ChunkRecord, Namespace

__all__ = ["CheckReport", "Finding", "broken_chains", "check", "private_files", "private_folders"]

Progress = Callable[[int, int], None]

RUN_REPAIR = "run `prefixbank repair`"


@dataclass(frozen=True, slots=True)
class Finding:
    """Say one thing that is wrong (`problem`), or worth knowing and harmless (not `problem`).

    `kind` is one of `missing`, `corrupt`, `unreadable`, `broken-chain`, `bytes`, `permissions` (problems), `hole`,
    `evicted`, `leftover`, `quarantined` (not), `names` (a problem where the file is damaged, else not). `subject` is a
    file, chunk key or name.
    """

    kind: str
    subject: str
    message: str
    problem: bool = True


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Hold what a check looked at and found."""

    n_chunks: int
    n_bytes: int
    read_data: bool
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Return the findings that need a hand."""
        return tuple(finding for finding in self.findings if finding.problem)

    @property
    def ok(self) -> bool:
        """Tell whether nothing is wrong."""
        return not self.problems


def check(
    index: Index,
    shards: ShardStore,
    *,
    read_data: bool = False,
    progress: Progress | None = None,
) -> CheckReport:
    """Compare index and files; with `read_data` every shard is read and its digest proven.

    `progress` is called with (bytes done, bytes in all). Raises `IndexCorruptError` and the like where the index itself
    can't be read.
    """
    findings: list[Finding] = []
    with index.reading() as tx:
        integrity = tx.exec_driver_sql("PRAGMA quick_check").scalars().all()
        records = chunk_rows.list_all(tx)
        roots = {namespace.id: namespace for namespace in namespace_rows.list_all(tx)}
        kept_sum = chunk_rows.disk_bytes(tx)
        prefixes = prefix_rows.list_all(tx)
        named = namesfile.of_index(tx)
    findings += [Finding("bytes", "index", f"{text}: {RUN_REPAIR}") for text in integrity if text != "ok"]
    summed = sum(record.disk_bytes for record in records)
    if summed != kept_sum:
        findings.append(
            Finding("bytes", "index", f"the sum of bytes is kept as {kept_sum}, but is {summed}: {RUN_REPAIR}")
        )
    findings += broken_chains(records, list(roots.values()))
    total = sum(record.n_bytes for record in records)
    done = 0
    for record in records:
        findings += _check_shard(index, shards, record, read_data)
        done += record.n_bytes
        if progress is not None:
            progress(done, total)
    findings += [
        Finding("evicted", prefix.name, "its KV was evicted: warm it again", problem=False)
        for prefix in prefixes
        if prefix.chunk_key is None
    ]
    findings += _check_names(shards.root, named)
    findings += _check_modes(shards)
    findings += [
        Finding(
            "leftover",
            file.path,
            "no row names it: `prefixbank repair` takes a whole shard up again, `prefixbank prune` deletes it",
            problem=False,
        )
        for file in find_leftovers(index, shards, time.time())
    ]
    findings += [
        Finding(
            "quarantined",
            file.path,
            "set aside as damaged; delete it once looked at",
            problem=False,
        )
        for file in shards.iter_files("quarantine")
    ]
    return CheckReport(len(records), total, read_data, tuple(findings))


def broken_chains(records: Sequence[ChunkRecord], namespaces: Sequence[Namespace]) -> Iterator[Finding]:
    """Yield what in the rows contradicts itself: keys that do not follow from the token ids, lost or wrong parents."""
    roots = {namespace.id: namespace for namespace in namespaces}
    by_key = {record.key: record for record in records}
    for namespace in namespaces:
        if not namespace.salt_digest and namespace.root_key != root_key(namespace.fingerprint):
            yield Finding("broken-chain", namespace.fingerprint, f"its root key is not its own: {RUN_REPAIR}")
    for record in records:
        namespace_of = roots.get(record.namespace_id)
        parent = by_key.get(record.parent_key) if record.parent_key else None
        parent_key = record.parent_key or (namespace_of.root_key if namespace_of else None)
        if (
            namespace_of is None
            or parent_key is None
            or record.key != chunk_key(parent_key, record.token_ids)
            or record.start != (parent.end if parent else 0)
            or (record.parent_key is not None and parent is None)
            or (parent is not None and parent.namespace_id != record.namespace_id)
            or len(record.token_ids) != record.n_tokens * TOKEN_BYTES
        ):
            yield Finding(
                "broken-chain",
                record.key.hex(),
                f"its key, start or parent does not fit its token ids: {RUN_REPAIR}",
            )


def _check_names(root: Path, of_index: KeptNames) -> Iterator[Finding]:
    try:
        kept = namesfile.read(root)
    except IndexCorruptError as exc:
        yield Finding("names", namesfile.NAMES_FILE, str(exc))
        return
    except StorageError as exc:
        yield Finding("unreadable", namesfile.NAMES_FILE, str(exc))
        return
    if not of_index.same_as(kept or namesfile.NO_NAMES):
        yield Finding(
            "names",
            namesfile.NAMES_FILE,
            f"it has other names or pins than the index: {RUN_REPAIR}",
            problem=False,
        )


def _check_shard(index: Index, shards: ShardStore, record: ChunkRecord, read_data: bool) -> Iterator[Finding]:
    if record.file_name is None:
        yield Finding(
            "hole",
            record.key.hex(),
            "its shard was lost; the next use stores it again",
            problem=False,
        )
        return
    try:
        with shards.open_shard(record) as descriptor:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if read_data:
            shards.verify(record)
    except ShardMissingError as exc:
        with index.reading() as tx:
            row = chunk_rows.find(tx, [record.key]).get(record.key)
        if row is not None and row.file_name == record.file_name:  # else deleted meanwhile
            yield Finding("missing", record.file_name, f"{exc}: {RUN_REPAIR}")
        return
    except ShardError as exc:
        yield Finding("corrupt", record.file_name, f"{exc}: {RUN_REPAIR}{' --read-data' if read_data else ''}")
        return
    except IndexCorruptError as exc:
        yield Finding("broken-chain", record.key.hex(), str(exc))
        return
    except StorageError as exc:
        yield Finding("unreadable", record.file_name, str(exc))
        return
    if mode & 0o077:
        yield Finding("permissions", record.file_name, f"mode {mode:o} lets others read it: {RUN_REPAIR} (chmod 600)")


def _check_modes(shards: ShardStore) -> Iterator[Finding]:
    for path in private_folders(shards):
        if path.is_dir() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            yield Finding("permissions", str(path), f"mode {mode:o} lets others look in: {RUN_REPAIR} (chmod 700)")
    for path in private_files(shards):
        if path.is_file() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            yield Finding("permissions", str(path), f"mode {mode:o} lets others read it: {RUN_REPAIR} (chmod 600)")


def private_folders(shards: ShardStore) -> list[Path]:
    """Return the folders that only their owner may look into."""
    return [shards.root, *(shards.root / name for name in ("shards", "tmp", "quarantine"))]


def private_files(shards: ShardStore) -> list[Path]:
    """Return the files beside the shards that only their owner may read: the index holds token ids, the prompts."""
    return [shards.root / name for name in (INDEX_FILE, BANK_FILE, namesfile.NAMES_FILE)]
