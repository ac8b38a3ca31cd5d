"""Hold the making and recognising of bank roots to their rules."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prefixbank import rootfile
from prefixbank.bank import PrefixBank
from prefixbank.errors import BankNotFoundError, ConfigError, SchemaError, StorageError


def change_bank_file(root: Path, **values: object) -> None:
    path = root / "bank.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Give the root of a closed bank."""
    PrefixBank.open(tmp_path / "bank", chunk_tokens=4).close()
    return tmp_path / "bank"


def test_a_new_root_has_what_the_format_says(root: Path) -> None:
    assert {path.name for path in root.iterdir()} == {
        "bank.json", "CACHEDIR.TAG", "index.sqlite3", "shards", "tmp", "quarantine",
    }  # fmt: skip
    said = json.loads((root / "bank.json").read_text())
    assert said["format"] == "prefixbank"
    assert said["format_version"] == 1
    assert said["chunk_tokens"] == 4
    assert len(said["bank_id"]) == 32
    # the tag's first 43 bytes are fixed: https://bford.info/cachedir/
    assert (root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_the_budget_of_a_new_bank_holds_for_those_who_give_none(tmp_path: Path) -> None:
    PrefixBank.open(tmp_path / "bank", max_bytes="20MB").close()
    with PrefixBank.open(tmp_path / "bank") as bank:
        assert bank.stats().max_bytes == 20_000_000
    with PrefixBank.open(tmp_path / "bank", max_bytes=0) as bank:
        assert bank.stats().max_bytes == 0
    with PrefixBank.open(tmp_path / "bank") as bank:
        assert bank.stats().max_bytes == 20_000_000


def test_a_file_is_no_bank(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for how in ({}, {"create": False}, {"read_only": True}):
        with pytest.raises(BankNotFoundError, match="file"):
            PrefixBank.open(path, **how)  # type: ignore[arg-type]
    with pytest.raises((BankNotFoundError, StorageError)):
        PrefixBank.open(path / "below")
    assert path.read_text() == "mine"


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, unchanged: Callable[[Path], Any]) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with unchanged(tmp_path), pytest.raises(ConfigError, match=r"thesis\.tex"):
        PrefixBank.open(tmp_path)


def test_files_that_people_and_git_put_into_an_empty_root_do_no_harm(tmp_path: Path) -> None:
    for name in (".gitignore", ".gitkeep", ".DS_Store", "README.md"):
        (tmp_path / name).write_text("kept")
    (tmp_path / "prefixes").mkdir()
    PrefixBank.open(tmp_path).close()
    assert (tmp_path / "README.md").read_text() == "kept"


@pytest.mark.parametrize(
    "left", ["CACHEDIR.TAG", "CACHEDIR.TAG.0123abcd", "bank.json.0123abcd", "index.sqlite3", "tmp"]
)
def test_a_creation_that_was_interrupted_is_finished(tmp_path: Path, left: str) -> None:
    if left == "tmp":
        (tmp_path / left).mkdir()
    else:
        (tmp_path / left).touch(mode=0o600)
    with PrefixBank.open(tmp_path) as bank:
        assert bank.check().ok


def test_a_newer_format_is_refused_and_left_alone(root: Path, unchanged: Callable[[Path], Any]) -> None:
    change_bank_file(root, format_version=2)
    with unchanged(root), pytest.raises(SchemaError, match="upgrade prefixbank"):
        PrefixBank.open(root)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b'"prefixbank"',
        b'{"format": "prefixbank"}',
        b'{"format": "prefixbank", "format_version": 1}',
        b'{"format": "prefixbank", "format_version": "1"}',
    ],
)
def test_a_damaged_bank_file_is_a_schema_error(root: Path, content: bytes, unchanged: Callable[[Path], Any]) -> None:
    (root / "bank.json").write_bytes(content)
    for how in ({}, {"create": False}, {"read_only": True}):
        with unchanged(root), pytest.raises(SchemaError, match="damaged"):
            PrefixBank.open(root, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"format": "other"},
        {"chunk_tokens": 0},
        {"chunk_tokens": 70000},
        {"chunk_tokens": "256"},
        {"chunk_tokens": 4.5},
        {"chunk_tokens": None},
        {"max_bytes": "20GB"},
        {"max_bytes": -1},
        {"colour": "blue"},
    ],
    ids=str,
)
def test_a_bank_file_with_values_that_make_no_sense_is_a_schema_error(root: Path, values: dict[str, object]) -> None:
    change_bank_file(root, **values)
    with pytest.raises(SchemaError, match="damaged"):
        PrefixBank.open(root)


def test_a_root_that_can_not_be_is_an_error_of_ours(tmp_path: Path) -> None:
    for root in (tmp_path / ("x" * 300), tmp_path / "a\0b", "~nobody-of-this-name/bank"):
        for how in ({}, {"create": False}, {"read_only": True}):
            with pytest.raises((BankNotFoundError, StorageError, ConfigError)):
                PrefixBank.open(root, **how)  # type: ignore[arg-type]


def test_a_folder_that_can_not_be_listed_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        PrefixBank.open(tmp_path)


def open_at_once(roots: list[Path]) -> list[str]:
    """Open banks from as many threads at the same moment; returns their ids."""
    barrier = threading.Barrier(len(roots))

    def work(root: Path) -> str:
        barrier.wait()
        with PrefixBank.open(root) as bank:
            assert bank.check().ok
        return rootfile.read_bank_file(root).bank_id

    with ThreadPoolExecutor(len(roots)) as threads:
        return list(threads.map(work, roots))


def test_a_bank_that_is_made_by_several_at_once_is_one_bank(tmp_path: Path) -> None:
    for round_ in range(5):
        root = tmp_path / str(round_)
        assert len(set(open_at_once([root] * 6))) == 1
        assert not [path.name for path in root.iterdir() if path.name.startswith(("bank.json.", "CACHEDIR.TAG."))]


def test_several_banks_can_be_made_at_once(tmp_path: Path) -> None:
    assert len(set(open_at_once([tmp_path / str(number) for number in range(6)]))) == 6


def test_a_bank_file_that_can_not_be_written_leaves_no_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rootfile.os, "link", refuse)
        with pytest.raises(StorageError, match="No space left"):
            PrefixBank.open(tmp_path / "bank")
    with pytest.raises(BankNotFoundError):
        PrefixBank.open(tmp_path / "bank", create=False)
    PrefixBank.open(tmp_path / "bank").close()
