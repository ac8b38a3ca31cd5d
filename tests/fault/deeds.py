"""Hold the table of what a bank is made to do while it is killed, failed or interrupted at each file operation.

A deed is a way to prepare a bank and something to do to it. To put another one to the tests, add it to `DEEDS`: what
must hold follows from how the bank looks before and after it (`look`).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from prefixbank import storing
from prefixbank.bank import PrefixBank
from prefixbank.errors import BankWarning
from prefixbank.index import Index
from prefixbank.repair import repair
from prefixbank.rootfile import INDEX_FILE
from prefixbank.values import PrefixRecord
from tests.fakekv import HYBRID, FakeModel
from tests.fault.together import BLOCK, files_there

BASE = list(range(10))
"""Stored before: two full chunks of 4 and a tail of 2, named `base`."""
LONGER = list(range(22))
"""Three more full chunks, the first of which covers the tail, and a new tail."""
OTHER = [7, 7, 7, 7, 7]
STATED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
LONG = list(range(400))

Arm = Callable[[], None]
View = dict[str, object]


@dataclass(frozen=True)
class Deed:
    """Say how to prepare a bank, and what to do: `act` calls `arm` in front of the first step that counts.

    `at_once`: nobody may ever see more than nothing of it and less than all. `is_new`: there is no bank before.
    `evicts`: a budget may take away anything that is not pinned. `frees`: on a disk that is and stays full, files may
    go whose rows then can't. `first` is done before anybody looks, where the bank
    is not in order to begin with: it is of an older schema, or lost a shard.
    """

    prepare: Callable[[PrefixBank], None]
    act: Callable[[Path, Arm], None]
    at_once: bool = True
    is_new: bool = False
    evicts: bool = False
    frees: bool = False
    first: Callable[[Path], None] | None = None


def hybrid(bank: PrefixBank) -> FakeModel:
    return FakeModel(bank, "hybrid", layout=HYBRID)


def prepare(bank: PrefixBank) -> None:
    """Store BASE, named `base`, OTHER, named and pinned `other`, and the beginning of STATED for another model."""
    model = FakeModel(bank)
    model.name("base", BASE)
    model.name("other", OTHER, pin=True)
    hybrid(bank).store(STATED[:6], ends=[4, 6])


def look(root: Path, deed: Deed | None = None) -> View:
    """Return what the bank has, as whoever opens it next finds it; fails unless it is in order without any repair."""
    if deed is not None and deed.first is not None:
        deed.first(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BankWarning)
        with PrefixBank.open(root, chunk_tokens=4) as bank:
            report = bank.check(read_data=True)
            assert report.ok, report.findings
            model, other = FakeModel(bank), hybrid(bank)
            view: View = {
                "base": model.resolve(BASE).n_tokens,
                "longer": model.resolve(LONGER).n_tokens,
                "long": model.resolve(LONG).n_tokens,
                "other": model.resolve(OTHER).n_tokens,
                "stated": other.resolve(STATED).n_tokens,
            }
            for prefix in bank.prefixes():
                view[f"name {prefix.name}"] = prefix.n_stored_tokens(bank.chain(prefix)) >= prefix.n_tokens
            return view


def age(root: Path, seconds: float = 7200) -> None:
    """Let all files without whom a bank can do be so much older."""
    then = time.time() - seconds
    for path in files_there(root, notes=True):
        os.utime(root / path, (then, then))


# --- what to prepare


def with_leftovers(bank: PrefixBank) -> None:
    prepare(bank)
    (bank.root / "tmp" / "old.safetensors").write_bytes(b"x" * 5000)
    folder = bank.root / "shards" / "ab"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "abcd.safetensors").write_bytes(b"y" * 5000)
    age(bank.root)


def corrupt(bank: PrefixBank) -> None:
    prepare(bank)
    path = FakeModel(bank).path_of(FakeModel(bank).match(BASE).chunks[1])
    path.write_bytes(bytes(path.stat().st_size))


def missing(bank: PrefixBank) -> None:
    prepare(bank)
    FakeModel(bank).path_of(FakeModel(bank).match(BASE).chunks[1]).unlink()


def without_index(bank: PrefixBank) -> None:
    """Lose the index. The shards are old: a repair that is not the first leaves those of the last minute alone."""
    prepare(bank)
    age(bank.root)
    bank.close()
    (bank.root / INDEX_FILE).unlink()


def with_a_broken_index(bank: PrefixBank) -> None:
    prepare(bank)
    age(bank.root)
    bank.close()
    with closing(sqlite3.connect(bank.root / INDEX_FILE)) as index, index:
        index.execute("UPDATE chunks SET token_ids = zeroblob(16) WHERE start = 4")


def with_a_damaged_bank_file(bank: PrefixBank) -> None:
    prepare(bank)
    age(bank.root)
    (bank.root / "bank.json").write_bytes(b"garbage")


def with_all_kinds_of_damage(bank: PrefixBank) -> None:
    """Put an older index back: it lacks a row, names a file that is gone; another is damaged, and a mode is open."""
    with_leftovers(bank)
    bank.close()
    index, older = bank.root / INDEX_FILE, bank.root.with_name("older")
    shutil.copy(index, older)
    with PrefixBank.open(bank.root) as bank_after:
        model = FakeModel(bank_after)
        model.store(LONGER)  # the tail of BASE goes, three chunks and a new tail come
        path = model.path_of(model.match(OTHER).chunks[0])
    shutil.copy(older, index)
    older.unlink()
    path.write_bytes(bytes(path.stat().st_size))
    index.chmod(0o644)
    age(bank.root)


def of_first_schema(bank: PrefixBank) -> None:
    """Take the index back to the first schema; states of recurrent layers were not known then."""
    model = FakeModel(bank)
    model.name("base", BASE)
    model.name("other", OTHER, pin=True)
    bank.close()
    with closing(sqlite3.connect(bank.root / INDEX_FILE)) as index, index:
        index.execute("DROP TABLE rates")
        index.execute("ALTER TABLE chunks DROP COLUMN has_state")
        index.execute("UPDATE alembic_version SET version_num = '0001'")


# --- what to do


def on_bank(do: Callable[[PrefixBank, FakeModel], object]) -> Callable[[Path, Arm], None]:
    """Open the bank first, then arm, then do it; closing counts too."""

    def act(root: Path, arm: Arm) -> None:
        with PrefixBank.open(root) as bank:
            model = FakeModel(bank)
            arm()
            do(bank, model)

    return act


def create(root: Path, arm: Arm) -> None:
    arm()
    PrefixBank.open(root, chunk_tokens=4).close()


def open_again(root: Path, arm: Arm) -> None:
    arm()
    PrefixBank.open(root).close()


def open_with_less(root: Path, arm: Arm) -> None:
    arm()
    PrefixBank.open(root, max_bytes=4 * BLOCK).close()


def store_in_groups(root: Path, arm: Arm) -> None:
    storing._GROUP_BYTES = 1
    on_bank(lambda _, model: model.store(LONGER))(root, arm)


def store_in_a_full_bank(root: Path, arm: Arm) -> None:
    with PrefixBank.open(root, max_bytes=9 * BLOCK) as bank:
        model = FakeModel(bank)
        arm()
        model.store(LONGER)


def store_and_spill(_: PrefixBank, model: FakeModel) -> None:
    """Store with a page cache of one page: dirty pages reach the file inside the transaction."""
    with model.session.index.reading() as tx:
        tx.exec_driver_sql("PRAGMA cache_size=1")
        tx.exec_driver_sql("PRAGMA cache_spill=1")
    model.store(LONG)


def import_longer(root: Path, arm: Arm) -> None:
    """Import an archive of LONGER, which goes on behind what is there."""
    source = root.with_name("source")
    shutil.rmtree(source, ignore_errors=True)  # what a killed one left
    with PrefixBank.open(source / "bank", chunk_tokens=4, durability="fast") as bank:
        FakeModel(bank).name("longer", LONGER)
        bank.export_prefixes(source / "archive.tar")
    on_bank(lambda bank, _: bank.import_prefixes(source / "archive.tar"))(root, arm)


def export_base(root: Path, arm: Arm) -> None:
    archive = root.with_name("archive.tar")
    archive.unlink(missing_ok=True)
    on_bank(lambda bank, _: bank.export_prefixes(archive))(root, arm)


def migrate(root: Path, arm: Arm) -> None:
    index = Index(root / INDEX_FILE, read_only=False, durability="full", busy_timeout_s=15)
    try:
        assert index.revision == "0001"
        arm()
        index.migrate()
    finally:
        index.close()


def finish_migration(root: Path) -> None:
    index = Index(root / INDEX_FILE, read_only=False, durability="fast", busy_timeout_s=15)
    index.migrate()
    index.close()


def do_repair(root: Path, arm: Arm) -> None:
    arm()
    repair(root, read_data=True)


def finish_repair(root: Path) -> None:
    repair(root, read_data=True, durability="fast")


def read_base(root: Path) -> None:
    with PrefixBank.open(root) as bank:
        FakeModel(bank).resolve(BASE)


def new_version(bank: PrefixBank, model: FakeModel) -> None:
    """Do what warming a changed few-shot file does: store the new version, give it the name, drop the old one."""
    (old,) = bank.prefixes("base")
    stored = model.store(LONGER[:6] + LONGER)
    new = PrefixRecord("base", model.namespace.id, stored.last_key, stored.n_tokens, False, "1" * 64, 2)
    model.session.name_prefix(new, replace(old, source_digest="0" * 64))
    model.session.drop_replaced(old)


DEEDS: dict[str, Deed] = {
    "create": Deed(prepare, create, is_new=True),
    "open": Deed(prepare, open_again),
    "open with a smaller budget": Deed(prepare, open_with_less, frees=True),
    "store": Deed(prepare, on_bank(lambda _, model: model.store(LONGER))),
    "store in groups": Deed(prepare, store_in_groups, at_once=False),
    "store with states": Deed(prepare, on_bank(lambda bank, _: hybrid(bank).store(STATED, ends=[4, 6, 8, 10]))),
    "store in a full bank": Deed(prepare, store_in_a_full_bank, at_once=False, evicts=True, frees=True),
    "store and spill": Deed(prepare, on_bank(store_and_spill)),
    "first store of a model": Deed(prepare, on_bank(lambda bank, _: FakeModel(bank, "new").store(BASE))),
    "prune": Deed(with_leftovers, on_bank(lambda bank, _: bank.prune(max_bytes=0)), frees=True),
    "rm": Deed(prepare, on_bank(lambda bank, _: bank.remove("base")), at_once=False, frees=True),
    "import": Deed(prepare, import_longer, at_once=False),
    "export": Deed(prepare, export_base),
    "migrate": Deed(of_first_schema, migrate, first=finish_migration),
    "read": Deed(prepare, on_bank(lambda _, model: model.held(BASE, OTHER))),
    "read a corrupt shard": Deed(corrupt, on_bank(lambda _, model: model.resolve(BASE)), first=read_base),
    "read past a missing shard": Deed(missing, on_bank(lambda _, model: model.resolve(BASE)), first=read_base),
    "note a use": Deed(prepare, on_bank(lambda _, model: model.use(BASE))),
    "pin": Deed(prepare, on_bank(lambda bank, _: bank.pin("base"))),
    "new version": Deed(prepare, on_bank(new_version), at_once=False, frees=True),
    "repair a lost index": Deed(without_index, do_repair, first=finish_repair),
    "repair a broken index": Deed(with_a_broken_index, do_repair, first=finish_repair),
    "repair a damaged bank file": Deed(with_a_damaged_bank_file, do_repair, first=finish_repair),
    "repair an older index": Deed(with_all_kinds_of_damage, do_repair, first=finish_repair),
    "check": Deed(with_leftovers, on_bank(lambda bank, _: bank.check(read_data=True))),
}
"""What is done, by name."""


def make(deed: Deed, root: Path) -> None:
    """Make the bank of a deed as it is before."""
    if not deed.is_new:
        with PrefixBank.open(root, chunk_tokens=4, durability="fast") as bank:
            deed.prepare(bank)


def between(before: View, after: View, seen: View, *, evicts: bool = False) -> Iterator[str]:
    """Yield what is wrong with a state that lies between two: things that are neither there nor gone."""
    if evicts:
        gone = {name: type(there)(0) if "other" not in name else there for name, there in before.items()}  # type: ignore[call-arg]
        yield from (text for text in between(gone, after, seen) if [*between(gone, before, seen)])
        return
    for name in before.keys() | after.keys() | seen.keys():
        low, high, now = before.get(name, False), after.get(name, False), seen.get(name, False)
        if isinstance(low, bool) or isinstance(high, bool):
            allowed = now in (low, high)
        else:
            assert isinstance(low, int)
            assert isinstance(high, int)
            assert isinstance(now, int)
            allowed = min(low, high) <= now <= max(low, high)
        if not allowed:
            yield f"{name} is {now}, not between {low} and {high}"
