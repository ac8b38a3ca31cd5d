"""Own putting right what a check finds: a plan is made, then that plan is executed; a dry run stops after the first.

Nothing is believed that is not proven, and nothing damaged is deleted: it goes to the quarantine. Whatever process is
killed at whatever step, the index agrees with the shards that it names, and the next repair finishes.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prefixbank import namesfile
from prefixbank.check import private_files, private_folders
from prefixbank.config import Durability
from prefixbank.errors import (
    BankBusyError,
    IndexCorruptError,
    PrefixBankError,
    ShardError,
    ShardMissingError,
    StorageError,
)
from prefixbank.eviction import GRACE_S
from prefixbank.foundlings import SETTLING_S, Foundling, sort_foundlings
from prefixbank.index import Index, chunk_rows, namespace_rows, prefix_rows
from prefixbank.indexfile import IndexState, Salvage, judge, open_index, replace_index, salvage
from prefixbank.namesfile import NAMES_FILE, KeptName, KeptNames, find_end
from prefixbank.proving import prove
from prefixbank.rootfile import INDEX_FILE, read_bank_file
from prefixbank.shards import FileOnDisk, ShardStore
from prefixbank.storing import supersede
from prefixbank.values import ChunkKey, ChunkRecord, Namespace, PrefixRecord

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["RepairPlan", "RepairStep", "repair"]

Action = Literal[
    "new-index",
    "take-up",
    "hole",
    "forget",
    "correct",
    "set-aside",
    "delete",
    "name",
    "write-names",
    "recount",
    "chmod",
]
Progress = Callable[[int, int], None]

_ROWS_PER_TRANSACTION = 20_000


@dataclass(frozen=True, slots=True)
class RepairStep:
    """Say one thing that is done (or, in `left`, that is not) to a file, chunk key or name, and why."""

    action: Action | Literal["left"]
    subject: str
    message: str
    needs_hand: bool = False
    """Of what is left: whether it stays so until somebody does something."""


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """List what is to be done, in order, and what is left as it is; the rest is what executing it takes."""

    steps: tuple[RepairStep, ...]
    left: tuple[RepairStep, ...]
    index: IndexState
    lost: tuple[tuple[ChunkRecord, FileOnDisk | None], ...] = ()
    corrected: tuple[ChunkRecord, ...] = ()
    taken: tuple[Foundling, ...] = ()
    names: tuple[tuple[KeptName, ChunkKey | None], ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    moved: tuple[FileOnDisk, ...] = ()
    deleted: tuple[FileOnDisk, ...] = ()
    modes: tuple[tuple[Path, int], ...] = ()

    @property
    def ok(self) -> bool:
        """Tell whether nothing is left that needs a hand."""
        return not any(step.needs_hand for step in self.left)


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
    chunks were used, and rates, begin anew. `read_data` also reads the shards that have rows; those without are always
    read. `unproven` takes up shards of older versions whose bytes nothing proves. Others may use the bank meanwhile;
    those that have a replaced index open must open the bank again.

    Raises `SchemaError` for an index of another version (nothing is changed), `BankBusyError` where another repair
    runs, `BankNotFoundError`, `StorageError`.
    """
    root = root.absolute()
    chunk_tokens = read_bank_file(root).chunk_tokens
    shards = ShardStore(root, durability=durability, verify="always")
    work = _Work(root, shards, chunk_tokens, read_data, unproven, durability, busy_timeout_s, progress)
    if dry_run:
        return work.plan(read_only=True)
    with _alone(root):
        todo = work.plan(read_only=False)
        work.execute(todo)
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
class _Work:
    """Hold what planning and executing have in common."""

    root: Path
    shards: ShardStore
    chunk_tokens: int
    read_data: bool
    unproven: bool
    durability: Durability
    busy_timeout_s: float
    progress: Progress | None

    def _open_index(self, *, read_only: bool) -> Index:
        return open_index(
            self.root / INDEX_FILE,
            read_only=read_only,
            durability=self.durability,
            busy_timeout_s=self.busy_timeout_s,
        )

    def plan(self, *, read_only: bool) -> RepairPlan:
        """Return what is to be done. Changes nothing."""
        state, why = judge(self.root / INDEX_FILE, read_only=read_only, busy_timeout_s=self.busy_timeout_s)
        steps: list[RepairStep] = []
        left: list[RepairStep] = []
        saved = Salvage()
        records: list[ChunkRecord] = []
        namespaces: list[Namespace] = []
        in_index = namesfile.NO_NAMES
        if state == "sound":
            with closing(self._open_index(read_only=read_only)) as index, index.reading() as tx:
                records = chunk_rows.list_all(tx)
                namespaces = namespace_rows.list_all(tx)
                in_index = namesfile.of_index(tx)
                kept_sum = chunk_rows.disk_bytes(tx)
            if kept_sum != sum(record.disk_bytes for record in records):
                steps.append(RepairStep("recount", INDEX_FILE, "the sum of bytes on disk is not that of its rows"))
        else:
            if state == "broken":
                saved = salvage(self.root / INDEX_FILE, self.busy_timeout_s)
            done = "is set aside and made anew" if state == "broken" else "is made anew"
            steps.append(RepairStep("new-index", INDEX_FILE, f"{why}: it {done} from the shards"))
        named = {record.file_name for record in records}
        files = list(self.shards.iter_files("shards", folders_as_shards=True))
        unnamed = [file for file in files if file.path.rpartition("/")[2] not in named or not self._in_place(file)]
        total = sum(f.n_bytes for f in unnamed) + (sum(r.n_bytes for r in records) if self.read_data else 0)
        n_done = 0

        def advance(n_bytes: int) -> None:
            nonlocal n_done
            n_done += n_bytes
            if self.progress is not None:
                self.progress(n_done, total)

        lost, corrected = self._look_at(records, files, steps, left, advance)
        gone = {record.key for record, _ in lost}
        rows = {r.key: replace(r, file_name=None, has_state=False) if r.key in gone else r for r in records} | {
            r.key: r for r in corrected
        }
        found = sort_foundlings(
            self.shards,
            unnamed,
            rows,
            namespaces,
            self.chunk_tokens,
            known_digests=saved.digests,
            unproven=self.unproven,
            settling_s=SETTLING_S if state == "sound" else -1e9,
            progress=advance,
        )
        for foundling in found.taken:
            name = foundling.record.file_name
            if name is None:
                steps.append(
                    RepairStep("hole", foundling.record.key.hex(), "its shard is damaged, and others stand on it")
                )
            else:
                steps.append(RepairStep("take-up", name, "it is whole, and the index has no row for it"))
        moved = tuple(file for fate, file, _ in found.others if fate == "set-aside")
        deleted = [file for fate, file, _ in found.others if fate == "delete"]
        for fate, file, reason in found.others:
            step = RepairStep(fate, file.path, reason, needs_hand=fate == "left" and "--unproven" in reason)
            (left if fate == "left" else steps).append(step)
        for file in self.shards.iter_files("tmp"):
            if time.time() - file.mtime_s > GRACE_S:
                deleted.append(file)
                steps.append(RepairStep("delete", file.path, "a write that was never finished"))
        names, name_spaces = self._plan_names(
            in_index, saved.names, rows, found.taken, namespaces, steps, rebuilt=state != "sound"
        )
        modes = self._plan_modes(records, gone, steps)
        return RepairPlan(
            tuple(steps),
            tuple(left),
            state,
            tuple(lost),
            tuple(corrected),
            tuple(found.taken),
            names,
            name_spaces,
            moved,
            tuple(deleted),
            modes,
        )

    def _in_place(self, file: FileOnDisk) -> bool:
        return str(self.shards.path_of(file.path.rpartition("/")[2])) == f"{self.root}/{file.path}"

    def _look_at(
        self,
        records: list[ChunkRecord],
        files: list[FileOnDisk],
        steps: list[RepairStep],
        left: list[RepairStep],
        advance: Callable[[int], None],
    ) -> tuple[list[tuple[ChunkRecord, FileOnDisk | None]], list[ChunkRecord]]:
        """Return the rows whose shard is lost, each with what lies in its place, and corrected rows of whole shards."""
        lost: list[tuple[ChunkRecord, FileOnDisk | None]] = []
        corrected: list[ChunkRecord] = []
        for record in records:
            if record.file_name is None:
                continue
            try:
                if self.read_data:
                    self.shards.verify(record)
                    advance(record.n_bytes)
                else:
                    with self.shards.open_shard(record):
                        pass
            except ShardMissingError as exc:
                lost.append((record, None))
                steps.append(RepairStep("forget", record.file_name, str(exc)))
            except (ShardError, IndexCorruptError) as exc:
                if (right := self._corrected(record)) is not None:
                    corrected.append(right)
                    steps.append(RepairStep("correct", record.file_name, "the file is whole, its row was damaged"))
                    continue
                path = str(self.shards.path_of(str(record.file_name)).relative_to(self.root))
                lost.append((record, FileOnDisk(path, 0, 0.0)))
                steps.append(RepairStep("set-aside", path, str(exc)))
            except StorageError as exc:
                left.append(RepairStep("left", record.file_name, str(exc), needs_hand=True))
        return lost, corrected

    def _corrected(self, record: ChunkRecord) -> ChunkRecord | None:
        """Return a row as the file that it names proves it to be; None where the file is not proven."""
        try:
            proven = prove(self.shards, str(record.file_name), self.chunk_tokens)
        except PrefixBankError:
            return None
        said = proven.description
        if proven.sealed != "whole" or (said.key, said.token_ids) != (record.key, record.token_ids):
            return None
        return replace(
            record,
            data_offset=proven.file.data_offset,
            n_bytes=proven.file.n_bytes,
            disk_bytes=proven.file.disk_bytes,
            digest=proven.file.digest,
            has_state=said.has_state,
        )

    def _plan_names(
        self,
        in_index: KeptNames,
        saved: KeptNames,
        rows: dict[ChunkKey, ChunkRecord],
        taken: list[Foundling],
        namespaces: list[Namespace],
        steps: list[RepairStep],
        *,
        rebuilt: bool,
    ) -> tuple[tuple[tuple[KeptName, ChunkKey | None], ...], tuple[Namespace, ...]]:
        """Return the names to give, each with the chunk that it ends in, and the namespaces that they are of."""
        try:
            kept = namesfile.read(self.root)
        except IndexCorruptError as exc:
            steps.append(RepairStep("set-aside", NAMES_FILE, str(exc)))
            kept = None
        known = kept or namesfile.NO_NAMES
        wanted = KeptNames(saved.names | known.names, saved.namespaces | known.namespaces)
        owners = {(n.fingerprint, n.salt_digest): n for n in (*wanted.namespaces.values(), *namespaces)}
        owners |= {f.owner: f.namespace for f in taken if f.owner not in owners}
        owner_ids = {n.id: (n.fingerprint, n.salt_digest) for n in namespaces}
        # By owner, parent and start, as a name says where it ends.
        places: dict[object, list[ChunkRecord]] = {}
        for owner, chunk in chain(
            ((owner_ids[row.namespace_id], row) for row in rows.values()),
            ((foundling.owner, foundling.record) for foundling in taken),
        ):
            places.setdefault((owner, chunk.parent_key.hex() if chunk.parent_key else None), []).append(chunk)
        given: list[tuple[KeptName, ChunkKey | None]] = []
        for key, name in sorted(wanted.names.items()):
            owner = (name.fingerprint, name.salt_digest)
            there = in_index.names.get(key)
            if owner not in owners:
                continue
            end = find_end(name, places.get((owner, name.parent_key), ()), owners[owner].root_key)
            same = there is not None and there.without_place() == name.without_place()
            if same and (end is None or (there is not None and there.end_key is not None)):
                continue
            what = "restored" if there is None else "put right"
            pin = ", pinned" if name.pinned else ""
            state = f"{name.n_tokens} tokens{pin}" if end is not None else f"its KV is gone{pin}: warm it again"
            steps.append(RepairStep("name", name.name, f"{what}: {state}"))
            given.append((name, None if end is None else end.key))
        will_be = {**in_index.names, **{name.key: name for name, _ in given}}
        if will_be and (kept is None or set(will_be) != set(kept.names)):
            steps.append(RepairStep("write-names", NAMES_FILE, "it lacked names that the index has"))
        of_names = {(name.fingerprint, name.salt_digest) for name, _ in given}
        return tuple(given), tuple(owners[owner] for owner in sorted(of_names))

    def _plan_modes(
        self, records: list[ChunkRecord], gone: set[ChunkKey], steps: list[RepairStep]
    ) -> tuple[tuple[Path, int], ...]:
        """Return the paths that others may look into, with the mode that they should have."""
        shard_paths = (self.shards.path_of(r.file_name) for r in records if r.file_name and r.key not in gone)
        wanted = [(path, 0o700) for path in private_folders(self.shards)]
        wanted += [(path, 0o600) for path in chain(private_files(self.shards), shard_paths)]
        modes = []
        for path, mode in wanted:
            try:
                status = path.lstat()
            except OSError:
                continue
            is_right_type = stat.S_ISDIR(status.st_mode) if mode == 0o700 else stat.S_ISREG(status.st_mode)
            if is_right_type and stat.S_IMODE(status.st_mode) & 0o077:
                modes.append((path, mode))
                steps.append(RepairStep("chmod", str(path), f"others may look into it: its mode becomes {mode:o}"))
        return tuple(modes)

    def execute(self, todo: RepairPlan) -> None:
        """Do what the plan lists. Killed inside, the bank is in order as far as it got."""
        for path, mode in todo.modes:
            path.chmod(mode)
        if todo.index != "sound":
            replace_index(
                self.root / INDEX_FILE, todo.index, durability=self.durability, busy_timeout_s=self.busy_timeout_s
            )
        with closing(self._open_index(read_only=False)) as index:
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
