"""Let several processes use one bank at once: nobody fails, nobody reads a wrong byte, the bank stays in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from tests.fakekv import FakeModel, disk_usage
from tests.fault.together import (
    BLOCK,
    FLAVOURS,
    do_anything,
    files_there,
    growing_prompt,
    make_banks,
    named_files,
    overfill,
    run_together,
    store_the_same,
)

N_BANKS = 20


@pytest.mark.parametrize("n_rounds", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_two_that_store_the_same_prefix_with_other_bytes_never_harm_each_others_shards(
    bank: PrefixBank, n_rounds: int
) -> None:
    run_together(store_the_same, [(bank.root, flavour, n_rounds) for flavour in FLAVOURS])
    model = FakeModel(bank)
    for number in range(n_rounds):
        assert model.resolve(growing_prompt(number), FLAVOURS).n_tokens == len(growing_prompt(number))
    assert files_there(bank.root) == named_files(bank)
    assert not bank.check(read_data=True).findings


def test_many_that_store_read_prune_and_check_at_once_stay_right_and_within_the_budget(tmp_path: Path) -> None:
    budget = 12 * BLOCK
    root = tmp_path / "bank"
    PrefixBank.open(root, chunk_tokens=4, max_bytes=budget).close()
    run_together(do_anything, [(root, seed, 25) for seed in range(6)])
    with PrefixBank.open(root, max_bytes="1GB") as bank:  # so that opening it evicts nothing
        assert disk_usage(bank) <= budget
        assert bank.stats().disk_bytes == disk_usage(bank)
        assert files_there(root) == named_files(bank)
        model = FakeModel(bank)
        for number in range(12):
            found = model.match(growing_prompt(number))
            assert model.resolve(growing_prompt(number), FLAVOURS).n_tokens == found.n_tokens
        assert not bank.check(read_data=True).problems


def test_two_that_fill_the_bank_at_once_hold_the_budget(tmp_path: Path) -> None:
    root = tmp_path / "bank"
    PrefixBank.open(root, chunk_tokens=4, max_bytes=12 * BLOCK).close()
    run_together(overfill, [(root, number, 20) for number in range(2)])
    with PrefixBank.open(root) as bank:
        assert files_there(root) == named_files(bank)
        assert not bank.check(read_data=True).findings


def test_two_that_make_one_bank_at_once_both_use_it(tmp_path: Path) -> None:
    run_together(make_banks, [(tmp_path, number, N_BANKS) for number in range(2)])
    for at in range(N_BANKS):
        root = tmp_path / f"bank{at}"
        with PrefixBank.open(root, create=False) as bank:
            assert FakeModel(bank).held(growing_prompt(3), growing_prompt(7)) == [11, 11]
            assert not bank.check(read_data=True).findings
        left = {path.name for path in root.iterdir()} - {"shards", "tmp", "quarantine"}
        assert left == {"bank.json", "CACHEDIR.TAG", "index.sqlite3"}
