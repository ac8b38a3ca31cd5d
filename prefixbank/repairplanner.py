"""Own what a repair is to do: reads a bank, its index broken or not, and lists what to put right, and what is left.

Nothing is believed that is not proven, and nothing damaged is deleted: it goes to the quarantine.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from prefixbank import namesfile
from prefixbank.check import private_files, private_folders
from prefixbank.config import BANK_FILE
from prefixbank.errors import IndexCorruptError, PrefixBankError, ShardError, ShardMissingError, StorageError
from prefixbank.eviction import GRACE_S
from prefixbank.files import FileOnDisk
from prefixbank.foundlings import SETTLING_S, sort_foundlings
from prefixbank.index import Index, chunk_rows, namespace_rows
from prefixbank.indexfile import Salvage, judge, salvage
from prefixbank.lostnames import plan_names
from prefixbank.lostroot import find_chunk_tokens
from prefixbank.proving import prove
from prefixbank.repairplan import RepairPlan, RepairStep
from prefixbank.rootfile import INDEX_FILE, bank_file_state, read_bank_file
from prefixbank.shards import ShardStore
from prefixbank.values import ChunkKey, ChunkRecord, Namespace

__all__ = ["Progress", "RepairPlanner"]

Progress = Callable[[int, int], None]
"""Gets how many bytes were read, and of how many."""


@dataclass
class RepairPlanner:
    """Read a bank and list what is to be put right. Changes nothing.

    `read_data` also reads the shards that have rows; `unproven` takes up shards whose bytes nothing proves.
    """

    root: Path
    shards: ShardStore
    read_data: bool
    unproven: bool
    busy_timeout_s: float
    progress: Progress | None

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
            opened = Index(
                self.root / INDEX_FILE, read_only=read_only, durability="full", busy_timeout_s=self.busy_timeout_s
            )
            with closing(opened) as index, index.reading() as tx:
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
        chunk_tokens, is_lost = self._chunk_tokens(records, steps)
        named = {record.file_name for record in records}
        files = list(self.shards.iter_files("shards", folders_as_shards=True))
        unnamed = [file for file in files if file.name not in named or not self.shards.is_in_place(file)]
        total = sum(f.n_bytes for f in unnamed) + (sum(r.n_bytes for r in records) if self.read_data else 0)
        n_done = 0

        def advance(n_bytes: int) -> None:
            nonlocal n_done
            n_done += n_bytes
            if self.progress is not None:
                self.progress(n_done, total)

        lost, corrected = self._look_at(records, files, chunk_tokens, steps, left, advance)
        gone = {record.key for record, _ in lost}
        rows = {r.key: replace(r, file_name=None, has_state=False) if r.key in gone else r for r in records} | {
            r.key: r for r in corrected
        }
        found = sort_foundlings(
            self.shards,
            unnamed,
            rows,
            namespaces,
            chunk_tokens,
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
        names, name_spaces = plan_names(self.root, in_index, saved.names, rows, found.taken, namespaces, steps)
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
            chunk_tokens if is_lost else None,
        )

    def _chunk_tokens(self, records: list[ChunkRecord], steps: list[RepairStep]) -> tuple[int, bool]:
        """Return how many tokens a full chunk has, and whether `bank.json` does not say so and is to be made anew."""
        state = bank_file_state(self.root)
        if state == "sound":
            return read_bank_file(self.root).chunk_tokens, False
        chunk_tokens = find_chunk_tokens(records, self.shards)
        why = f"it is {state}: made anew with chunk_tokens={chunk_tokens}, as the chunks say, and without a budget"
        steps.insert(0, RepairStep("bank-file", BANK_FILE, why))
        return chunk_tokens, True

    def _look_at(
        self,
        records: list[ChunkRecord],
        files: list[FileOnDisk],
        chunk_tokens: int,
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
                if (right := self._corrected(record, chunk_tokens)) is not None:
                    corrected.append(right)
                    steps.append(RepairStep("correct", record.file_name, "the file is whole, its row was damaged"))
                    continue
                path = str(self.shards.path_of(str(record.file_name)).relative_to(self.root))
                lost.append((record, FileOnDisk(path, 0, 0.0)))
                steps.append(RepairStep("set-aside", path, str(exc)))
            except StorageError as exc:
                left.append(RepairStep("left", record.file_name, str(exc), needs_hand=True))
        return lost, corrected

    def _corrected(self, record: ChunkRecord, chunk_tokens: int) -> ChunkRecord | None:
        """Return a row as the file that it names proves it to be; None where the file is not proven."""
        try:
            proven = prove(self.shards, str(record.file_name), chunk_tokens)
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
