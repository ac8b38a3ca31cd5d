"""Own putting right what a check finds: a plan is made, then that plan is executed; a dry run stops after the first.

Nothing is believed that is not proven, and nothing damaged is deleted: it goes to the quarantine. Whatever process is
killed at whatever step, the index agrees with the shards that it names, and the next repair finishes.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prefixbank import namesfile
from prefixbank.config import Durability
from prefixbank.errors import BankBusyError, StorageError
from prefixbank.files import FileOnDisk
from prefixbank.index import Index, chunk_rows, namespace_rows, prefix_rows
from prefixbank.indexfile import replace_index
from prefixbank.repairplan import RepairPlan, RepairStep
from prefixbank.repairplanner import Progress, RepairPlanner
from prefixbank.rootfile import INDEX_FILE, bank_file_state, refusals, restore_bank_file
from prefixbank.shards import ShardStore
from prefixbank.storing import supersede
from prefixbank.values import ChunkRecord, PrefixRecord

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["RepairPlan", "RepairStep", "repair"]

_ROWS_PER_TRANSACTION = 20_000


def repair(
    root: Path,
    *,
    read_data: bool = False,
    unproven: bool = False,
    dry_run: bool = False,
    durability: Durability = "full",
    busy_timeout_s: float = 15.0,
    progress: Progress | None = None,
) -> RepairPlan:
    """Put right what `check` finds in the bank at `root`, and return what was done, or with `dry_run` would be.

    A lost or broken index is set aside and made anew from the shards, with the names and pins of `prefixes.json`; when
    chunks were used, and rates, begin anew. A lost or damaged `bank.json` is made anew too, but for a budget that it
    held. `read_data` also reads the shards that have rows; those without are always read. `unproven` takes up shards of
    older versions whose bytes nothing proves. Others may use the bank meanwhile; those that have a replaced index open
    must open the bank again.

    Raises `SchemaError` for an index of another version (nothing is changed), `BankBusyError` where another repair
    runs, `BankNotFoundError`, `StorageError`.
    """
    root = root.absolute()
    bank_file_state(root)
    shards = ShardStore(root, durability=durability, verify="always")
    planner = RepairPlanner(root, shards, read_data, unproven, busy_timeout_s, progress)
    with refusals(root):
        if dry_run:
            return planner.plan(read_only=True)
        with _alone(root):
            todo = planner.plan(read_only=False)
            _Repairer(root, shards, durability, busy_timeout_s).execute(todo)
    return todo


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the bank root against other repairs; the system lets go of it when the process ends, however it does."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise StorageError(f"{root} can't be opened: {exc.strerror or exc}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise BankBusyError(f"another repair of {root} is running: wait for it") from exc
    except OSError:  # a file system without locks: there nobody may run two repairs at once
        pass
    try:
        yield
    finally:
        os.close(descriptor)


@dataclass
class _Repairer:
    """Do what a plan lists."""

    root: Path
    shards: ShardStore
    durability: Durability
    busy_timeout_s: float

    def execute(self, todo: RepairPlan) -> None:
        """Do what the plan lists. Killed inside, the bank is in order as far as it got."""
        if todo.lost_chunk_tokens is not None:
            restore_bank_file(self.root, todo.lost_chunk_tokens)
        for path, mode in todo.modes:
            with suppress(FileNotFoundError):  # deleted meanwhile
                path.chmod(mode)
        index_path = self.root / INDEX_FILE
        if todo.index != "sound":
            replace_index(index_path, todo.index, durability=self.durability, busy_timeout_s=self.busy_timeout_s)
        opened = Index(index_path, read_only=False, durability=self.durability, busy_timeout_s=self.busy_timeout_s)
        with closing(opened) as index:
            self._correct(index, todo)
            self._take_up(index, todo)
            for record, in_place in sorted(todo.lost, key=lambda loss: -loss[0].start):
                with index.writing() as tx:
                    chunk_rows.heal(tx, record)
                if in_place is not None:
                    self._set_aside(in_place)
        for file in todo.moved:
            self._set_aside(file)
        for file in todo.deleted:
            self.shards.unlink(self.root / file.path)

    def _correct(self, index: Index, todo: RepairPlan) -> None:
        if not todo.corrected and not any(step.action == "recount" for step in todo.steps):
            return
        with index.writing() as tx:
            for record in todo.corrected:
                chunk_rows.correct(tx, record)
            chunk_rows.recount(tx)

    def _take_up(self, index: Index, todo: RepairPlan) -> None:
        """Add the rows, parents first, and with the last of them the names: nothing pinned is evicted between."""
        for low in range(0, max(len(todo.taken), 1), _ROWS_PER_TRANSACTION):
            group = todo.taken[low : low + _ROWS_PER_TRANSACTION]
            is_last = low + _ROWS_PER_TRANSACTION >= len(todo.taken)
            with index.writing() as tx:
                ids: dict[tuple[str, str], int] = {}
                tails: list[ChunkRecord] = []
                tick = chunk_rows.next_tick(tx) if group else 0
                for foundling in group:
                    if foundling.owner not in ids:
                        ids[foundling.owner] = namespace_rows.ensure(tx, foundling.namespace).id
                    tails += self._add(tx, replace(foundling.record, namespace_id=ids[foundling.owner]), tick)
                if is_last:
                    self._give_names(tx, todo)
            for tail in tails:
                if tail.file_name is not None:
                    self.shards.unlink(self.shards.path_of(tail.file_name))

    def _add(self, tx: sa.Connection, record: ChunkRecord, tick: int) -> list[ChunkRecord]:
        """Add a row, if its shard is still there, and return the tails that it covers, whose rows went."""
        row = chunk_rows.find(tx, [record.key]).get(record.key)
        if row is not None and row.file_name is not None and not self.shards.path_of(row.file_name).exists():
            chunk_rows.heal(tx, row)  # the very loss that this file makes good
        if record.file_name is not None and not self.shards.path_of(record.file_name).exists():
            return []
        added = chunk_rows.add(tx, record, tick, int(time.time()))
        return supersede(tx, record) if added and record.file_name is not None else []

    def _give_names(self, tx: sa.Connection, todo: RepairPlan) -> None:
        before = namesfile.of_index(tx)
        ids = {(n.fingerprint, n.salt_digest): namespace_rows.ensure(tx, n).id for n in todo.namespaces}
        for name, end in todo.names:
            namespace_id = ids[name.fingerprint, name.salt_digest]
            prefix = PrefixRecord(
                name.name, namespace_id, end, name.n_tokens, name.pinned, name.source_digest, name.created_at
            )
            prefix_rows.name(tx, prefix)
            prefix_rows.set_pinned(tx, name.name, name.pinned, namespace_id)
        namesfile.update(self.root, before, namesfile.of_index(tx), durable=self.durability == "full")

    def _set_aside(self, file: FileOnDisk) -> None:
        self.shards.quarantine_path(self.root / file.path)
