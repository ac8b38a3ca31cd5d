"""Lose or damage `bank.json`: nobody makes another bank of what is there, and a repair brings it back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.errors import BankNotFoundError, PrefixBankError, SchemaError
from prefixbank.lostroot import from_places
from prefixbank.repair import repair
from prefixbank.rootfile import restore_bank_file
from tests.fakekv import FakeModel
from tests.fault.test_index_lost import fill, make_old, must_hold_all

LOSSES: dict[str, Callable[[Path], Any]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\xff" * 100),
    "no chunk_tokens": lambda path: path.write_text(json.dumps({"format": "prefixbank", "format_version": 1})),
    "chunk_tokens out of range": lambda path: path.write_text(path.read_text().replace(": 4,", ": 0,")),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as bank:
        fill(bank)
    make_old(tmp_path / "bank")
    return tmp_path / "bank"


@pytest.mark.parametrize("index", ["there", "lost too"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_repair_makes_a_lost_bank_file_anew(
    root: Path, loss: str, index: str, unchanged: Callable[[Path], Any]
) -> None:
    LOSSES[loss](root / "bank.json")
    if index == "lost too":
        (root / "index.sqlite3").unlink()
    with unchanged(root):
        for create in (True, False):
            with pytest.raises(PrefixBankError, match="prefixbank repair"):
                PrefixBank.open(root, create=create)
        planned = repair(root, dry_run=True)
    assert repair(root).steps == planned.steps
    assert planned.steps[0].action == "bank-file"
    assert "chunk_tokens=4" in planned.steps[0].message
    assert repair(root).steps == ()
    if loss != "deleted":
        assert any(path.name.startswith("bank.json-") for path in (root / "quarantine").iterdir()), "it is deleted"
    with PrefixBank.open(root) as bank:
        must_hold_all(bank)


def test_a_repair_killed_after_it_set_a_damaged_bank_file_aside_is_finished_by_the_next(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LOSSES["garbage"](root / "bank.json")
    with monkeypatch.context() as patch:
        patch.setattr("prefixbank.rootfile.finish_root", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            restore_bank_file(root, 4)
    assert not (root / "bank.json").exists()
    repair(root)
    with PrefixBank.open(root) as bank:
        must_hold_all(bank)


def test_a_bank_file_of_a_newer_version_is_refused_and_left(root: Path, unchanged: Callable[[Path], Any]) -> None:
    (root / "bank.json").write_text(
        (root / "bank.json").read_text().replace('"format_version": 1', '"format_version": 2')
    )
    with unchanged(root), pytest.raises(SchemaError, match="upgrade"):
        repair(root)


@pytest.mark.parametrize("left", ["nothing", "empty folders", "an empty index"])
def test_what_an_interrupted_creation_leaves_is_no_lost_bank(tmp_path: Path, left: str) -> None:
    root = tmp_path / "bank"
    if left != "nothing":
        PrefixBank.open(root).close()
        (root / "bank.json").unlink()
    if left == "empty folders":
        (root / "index.sqlite3").unlink()
    with pytest.raises(BankNotFoundError, match="init"):
        repair(root)
    with PrefixBank.open(root, chunk_tokens=8) as bank:
        assert FakeModel(bank).store([1, 2]).n_tokens == 2


@pytest.mark.parametrize(
    ("places", "chunk_tokens"),
    [
        ([(0, 4), (4, 4), (8, 2)], 4),
        ([(0, 64), (64, 64), (128, 1)], 64),
        ([(0, 1), (1, 1)], 1),
        ([(0, 256), (512, 3)], 256),  # the second is lost
        ([(0, 10)], 256),  # any number from 10 on finds it
        ([(0, 300)], 300),
        ([(512, 3)], 256),
        ([(48, 5)], 6),
        ([], 256),
        ([(7, 9)], 256),  # no bank has these
    ],
)
def test_the_length_of_a_chunk_follows_from_where_chunks_begin(
    places: list[tuple[int, int]], chunk_tokens: int
) -> None:
    assert from_places(places) == chunk_tokens
