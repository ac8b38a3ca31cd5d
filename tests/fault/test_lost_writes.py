"""Cut the power: what was not synced is lost, what was acknowledged is there, and no row lacks its whole file."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.errors import BankWarning, PrefixBankError
from tests.fakekv import FakeModel
from tests.fault import tally
from tests.fault.deeds import BASE, LONGER, OTHER, STATED, hybrid
from tests.fault.replay import MARK, Disk, Operation, lay_out, read_recording
from tests.fault.trap import CHECKOUT, environment

PROMPTS = {"base": BASE, "longer": LONGER, "other": OTHER}


@dataclass(frozen=True)
class Life:
    """Hold what was recorded, and what was acknowledged at each mark; `folder` is the bank root's."""

    folder: Path
    operations: list[Operation]
    promised: list[dict[str, int]]


def record(folder: Path, library: Path, durability: str) -> Life:
    root, file = folder / "life" / "bank", folder / "recording"
    root.parent.mkdir()
    said = subprocess.run(
        [sys.executable, "-m", "tests.fault.recording", root, file, durability],
        cwd=CHECKOUT,
        env=environment(library),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    promised = [json.loads(line) for line in said.splitlines()]
    return Life(root.parent, list(read_recording(file, root)), promised)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Life:
    return record(tmp_path_factory.mktemp("life"), library, "full")


def must_keep_its_word(root: Path, promised: dict[str, int] | None, at: object) -> None:
    """Assert that the bank opens, that each row has its whole file, and that all is there that was promised."""
    if promised is None and not (root / "bank.json").exists():
        return  # it was not a bank yet
    tally.must_not("acknowledged chunks lost", promised is not None and not (root / "bank.json").exists() and at)
    with PrefixBank.open(root, create=False, durability="fast") as bank:
        report = bank.check(read_data=True)
        assert report.ok, (at, report.findings)
        model = FakeModel(bank)
        for name, n_tokens in (promised or {}).items():
            held = (hybrid(bank).resolve(STATED) if name == "stated" else model.resolve(PROMPTS[name])).n_tokens
            tally.must_not("acknowledged chunks lost", held < n_tokens and (at, name, held, n_tokens))
        model.store(LONGER)
        assert model.held(LONGER) == [len(LONGER)]


def cut(life: Life, boundaries: list[int], folder: Path, chance: random.Random | None) -> int:
    """Cut the power in front of each operation in `boundaries` (sorted); returns how often."""
    disk = Disk()
    promised: dict[str, int] | None = None
    n_cuts = 0
    wanted = iter([*boundaries, -1])
    at = next(wanted)
    warnings.simplefilter("error", BankWarning)
    for number, operation in enumerate([*life.operations, Operation(MARK, "", "", len(life.promised), 0)]):
        while number == at:
            target = folder / "cut"
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            lay_out(disk.after_a_cut(chance), target)
            must_keep_its_word(target / "bank", promised, (number, operation.kind, operation.path))
            n_cuts += 1
            tally.count("cuts")
            at = next(wanted)
        if operation.kind == MARK:
            promised = life.promised[operation.inode] if operation.inode < len(life.promised) else promised
        else:
            disk.do(operation)
    return n_cuts


def test_a_disk_that_loses_nothing_has_what_was_written(life: Life) -> None:
    disk = Disk()
    for operation in life.operations:
        if operation.kind != MARK:
            disk.do(operation)
    assert {"create", "write", "sync", "rename", "unlink", "mkdir", "link", MARK} <= {o.kind for o in life.operations}
    there = {
        path.relative_to(life.folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in life.folder.rglob("*")
    }
    assert disk.everything() == there


def test_no_row_lacks_its_shard_when_all_that_is_not_synced_is_lost_at_some_boundary(
    life: Life, tmp_path: Path
) -> None:
    n = len(life.operations)
    assert cut(life, sorted(random.Random(3).sample(range(n + 1), 40)), tmp_path, None) == 40


def test_no_row_lacks_its_shard_when_some_of_what_is_not_synced_is_lost(life: Life, tmp_path: Path) -> None:
    chance = random.Random(4)
    assert cut(life, sorted(chance.choices(range(len(life.operations) + 1), k=40)), tmp_path, chance) == 40


@pytest.mark.long
def test_no_row_lacks_its_shard_when_all_that_is_not_synced_is_lost_at_any_boundary(life: Life, tmp_path: Path) -> None:
    n = len(life.operations) + 1
    assert cut(life, list(range(n)), tmp_path, None) == n


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_no_row_lacks_its_shard_when_anything_of_what_is_not_synced_is_lost(
    life: Life, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    assert cut(life, sorted(chance.choices(range(len(life.operations) + 1), k=200)), tmp_path, chance) == 200


def test_what_a_fast_bank_loses_with_the_power_is_a_miss_and_never_a_wrong_row(library: Path, tmp_path: Path) -> None:
    """With durability="fast" rows may come to name lost files, and the index may be damaged: both are said."""
    life = record(tmp_path, library, "fast")
    chance = random.Random(5)
    disk = Disk()
    n_read = 0
    boundaries = set(chance.sample(range(len(life.operations)), 30))
    for number, operation in enumerate(life.operations):
        if number in boundaries:
            target = tmp_path / "cut"
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            lay_out(disk.after_a_cut(chance), target)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BankWarning)
                try:
                    with PrefixBank.open(target / "bank", create=False) as bank:
                        n_read += sum(FakeModel(bank).held(BASE, LONGER, OTHER))
                except PrefixBankError:
                    pass
        if operation.kind != MARK:
            disk.do(operation)
    assert n_read
