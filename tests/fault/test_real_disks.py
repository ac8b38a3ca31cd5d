"""Use a bank on a disk that is really full, on one that is mounted read-only, and as somebody else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.errors import BankReadOnlyError, PrefixBankError, StorageError
from tests.fakekv import FakeModel
from tests.fault.test_forks import in_child
from tests.fault.together import files_there, named_files

N_BYTES = 512 << 10


def mount(*arguments: object) -> bool:
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of half a megabyte in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or not mount("-t", "tmpfs", "-o", f"size={N_BYTES}", "none", folder):
        pytest.skip("mounting a tmpfs takes Linux and its privileges")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_really_full_costs_only_what_does_not_fit(disk: Path) -> None:
    with PrefixBank.open(disk / "bank", chunk_tokens=4) as bank:
        model = FakeModel(bank)
        acknowledged = []
        refused = 0
        for number in range(200):
            try:
                assert model.store([number] * 9).n_tokens == 9
                acknowledged.append(number)
            except StorageError:
                refused += 1
        assert refused
        assert len(acknowledged) > 5
        assert model.held(*([n] * 9 for n in acknowledged)) == [9] * len(acknowledged)
        assert bank.check(read_data=True).ok
        assert files_there(bank.root) == named_files(bank)
        bank.prune(max_bytes=N_BYTES // 4)  # needs no room
        assert model.store([1000] * 9).n_tokens == 9
    with PrefixBank.open(disk / "bank") as bank:
        assert FakeModel(bank).held([1000] * 9) == [9]


def test_a_disk_without_room_makes_no_bank_or_a_whole_one(disk: Path) -> None:
    filler = disk / "filler"
    made = 0
    for n_free in range(0, 40, 3):
        filler.write_bytes(bytes(N_BYTES - 4096 * (n_free + 2)))
        try:
            with PrefixBank.open(disk / f"bank{n_free}", chunk_tokens=4) as bank:
                assert bank.check().ok
                made += 1
        except PrefixBankError:
            filler.unlink()
            with PrefixBank.open(disk / f"bank{n_free}", chunk_tokens=4) as bank:
                assert FakeModel(bank).store([1, 2]).n_tokens == 2
        subprocess.run(["rm", "-r", disk / f"bank{n_free}"], check=True)
    assert 0 < made < 14


def test_a_bank_on_a_disk_that_is_mounted_read_only_is_read_and_not_written(disk: Path) -> None:
    with PrefixBank.open(disk / "bank", chunk_tokens=4) as bank:
        FakeModel(bank).store([1] * 9)
    assert mount("-o", "remount,ro", disk)
    with pytest.warns(match="used read-only"):
        bank = PrefixBank.open(disk / "bank")
    with bank:
        model = FakeModel(bank)
        assert model.held([1] * 9) == [9]
        assert bank.check(read_data=True).ok
        with pytest.raises(BankReadOnlyError):
            model.store([2] * 9)


@pytest.mark.skipif(os.geteuid() != 0, reason="to become somebody else takes root")
def test_a_bank_of_somebody_else_is_refused_and_not_changed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        if parent != Path("/tmp"):
            parent.chmod(0o755)
    root = tmp_path / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        FakeModel(bank).store([1] * 9)

    def as_nobody() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        for folder in (root, root / "new"):
            with pytest.raises(StorageError):
                PrefixBank.open(folder)

    in_child(as_nobody)
    root.chmod(0o755)  # now it may be looked into; the files are still the owner's

    def as_nobody_inside() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(PrefixBankError):
            PrefixBank.open(root)

    in_child(as_nobody_inside)
    root.chmod(0o700)
    with PrefixBank.open(root) as bank:
        assert FakeModel(bank).held([1] * 9) == [9]
