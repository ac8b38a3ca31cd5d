"""Put into each column of the index what no row of ours can hold: right rows, a miss or an error of ours, no more."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.errors import PrefixBankError
from prefixbank.index import Index, rates_rows, weights_rows
from prefixbank.rootfile import INDEX_FILE
from prefixbank.schema import metadata
from prefixbank.values import Rates, WeightsFile
from tests.fault import tally
from tests.fault.test_index_lost import fill, use_and_repair

VALUES = ["7", "-1", str(2**62), "1.5", "'x'", f"x'{'ff' * 16}'", "x''", "CAST(x'd4ff' AS TEXT)", "NULL"]
WEIGHTS = WeightsFile("/m/model.safetensors", 1, 2, 100, 5, 6)
DIGEST = "0f" * 32
COLUMNS = [(table.name, column.name) for table in metadata.sorted_tables for column in table.columns]


def open_index(root: Path) -> Index:
    return Index(root / INDEX_FILE, read_only=False, durability="fast", busy_timeout_s=1)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        fill(bank)
    with closing(open_index(root)) as index, index.writing() as tx:
        rates_rows.remember(tx, Rates(1, "cpu", 0.1, 0.2, None, None, 1))
        weights_rows.remember(tx, {WEIGHTS: DIGEST})
    return root


def damage(root: Path, table: str, column: str, value: str) -> bool:
    """Set a column of the newest row to a value; returns False where SQLite itself turns that down."""
    with closing(sqlite3.connect(root / INDEX_FILE, isolation_level=None)) as index:
        index.execute("PRAGMA ignore_check_constraints=ON")
        where = f"rowid = (SELECT max(rowid) FROM {table})"
        try:
            return index.execute(f"UPDATE {table} SET {column} = {value} WHERE {where}").rowcount > 0
        except sqlite3.IntegrityError:
            return False


def use_memos(root: Path) -> None:
    """Assert that what is remembered beside chunks and names is as it was, or not there, or an error of ours."""
    with suppress(PrefixBankError), closing(open_index(root)) as index:
        with suppress(PrefixBankError), index.reading() as tx:
            assert weights_rows.recall(tx, WEIGHTS) in (DIGEST, None)
        with index.reading() as tx:
            rates_rows.find(tx, 1, "cpu")
            rates_rows.list_all(tx)


@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")
@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_what_no_row_can_hold_is_noticed_and_a_repair_puts_it_right(
    template: Path, tmp_path: Path, table: str, column: str
) -> None:
    n_damaged = 0
    for number, value in enumerate(VALUES):
        root = tmp_path / str(number)
        shutil.copytree(template, root)
        n_damaged += damage(root, table, column, value)
        tally.count("damaged inputs")
        use_memos(root)
        use_and_repair(root)
        with closing(open_index(root)) as index, index.reading() as tx:
            rates_rows.list_all(tx)
        shutil.rmtree(root)
    assert n_damaged >= 3, "hardly anything was damaged"
