"""Hold sizes, durations, options and the search for the bank root to what their docstrings say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import platformdirs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbank.bank import PrefixBank
from prefixbank.config import BankOptions, default_root, format_size, parse_duration_s, parse_size
from prefixbank.errors import BankNotFoundError, ConfigError


@pytest.mark.parametrize(
    ("size", "n_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("0", 0),
        ("20GB", 20 * 1000**3),
        ("20 gb", 20 * 1000**3),
        (" 512 MiB ", 512 * 1024**2),
        ("1.5T", 15 * 10**11),
        ("1.5k", 1500),
        ("1KiB", 1024),
        ("2PiB", 2 * 1024**5),
        ("7b", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(size: int | str, n_bytes: int) -> None:
    assert parse_size(size) == n_bytes


@pytest.mark.parametrize(
    "size",
    [
        "",
        "GB",
        "-1",
        "1e9",
        "20XB",
        "1 2",
        "1iB",
        "1i",
        "0x10",
        "nan",
        -1,
        2**63,
        "10000000 TB",
        "9" * 400,
        True,
        None,
        1.5,
    ],
)
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(size)


@given(st.integers(0, 2**53))
def test_a_size_in_bytes_is_exact(n_bytes: int) -> None:
    assert parse_size(n_bytes) == parse_size(str(n_bytes)) == parse_size(f"{n_bytes}B") == n_bytes


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (17_300_000, "17.3 MB"), (20 * 10**9, "20.0 GB"), (3 * 10**15, "3.0 PB")],
)
def test_sizes_are_shown_in_powers_of_1000(n_bytes: int, text: str) -> None:
    assert format_size(n_bytes) == text


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("45", 45), ("45s", 45), ("90m", 5400), ("12h", 43200), ("30d", 2592000), ("2w", 1209600), (" 1.5 H ", 5400)],
)
def test_durations_are_read_as_people_write_them(duration: str, seconds: float) -> None:
    assert parse_duration_s(duration) == seconds


@pytest.mark.parametrize("duration", ["", "d", "-1d", "1y", "1d2h", "inf", "nan"])
def test_what_is_no_duration_is_refused(duration: str) -> None:
    with pytest.raises(ConfigError, match="is no duration"):
        parse_duration_s(duration)


@pytest.mark.parametrize("seconds", [-1, -0.5, float("nan")])
def test_prune_refuses_a_negative_age(bank: PrefixBank, seconds: float) -> None:
    with pytest.raises(ConfigError, match="unused_for"):
        bank.prune(unused_for=seconds)


@pytest.mark.parametrize(
    "option",
    [
        {"durability": "half"},
        {"verify": "sometimes"},
        {"chunk_tokens": 0},
        {"chunk_tokens": 65537},
        {"busy_timeout_s": -1},
        {"busy_timeout_s": float("nan")},
        {"busy_timeout_s": 3601},
    ],
    ids=str,
)
def test_options_outside_their_range_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ConfigError, match=name):
        BankOptions(**option)
    with pytest.raises(ConfigError, match=name):
        PrefixBank.open(tmp_path / "bank", **option)
    assert not (tmp_path / "bank").exists()


def test_options_can_not_be_changed() -> None:
    with pytest.raises(AttributeError):
        BankOptions().read_only = True  # type: ignore[misc]


def test_chunk_tokens_are_fixed_when_the_bank_is_made(tmp_path: Path) -> None:
    PrefixBank.open(tmp_path, chunk_tokens=8).close()
    PrefixBank.open(tmp_path, chunk_tokens=8).close()
    with PrefixBank.open(tmp_path) as bank:
        assert bank._session.chunk_tokens == 8
    with pytest.raises(ConfigError, match="chunk_tokens=8"):
        PrefixBank.open(tmp_path, chunk_tokens=16)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to an empty folder, with an empty user cache and no bank in the environment."""
    monkeypatch.delenv("PREFIXBANK_HOME", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_default_root_is_the_user_cache_where_nothing_else_is_said(elsewhere: Path) -> None:
    (elsewhere / "bank").mkdir()  # a folder of that name alone is no bank
    assert default_root() == elsewhere / "cache" / "prefixbank" / "bank"
    (elsewhere / "bank" / "bank.json").mkdir()
    assert default_root() == elsewhere / "cache" / "prefixbank" / "bank"


def test_default_root_is_the_bank_in_the_working_directory_before_the_user_cache(elsewhere: Path) -> None:
    PrefixBank.open("bank").close()
    assert default_root() == Path("bank")
    with PrefixBank.open() as bank:
        assert bank.root.resolve() == (elsewhere / "bank").resolve()


def test_default_root_is_the_environments_before_the_working_directory(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PrefixBank.open("bank").close()
    monkeypatch.setenv("PREFIXBANK_HOME", str(elsewhere / "home"))
    assert default_root() == elsewhere / "home"
    monkeypatch.setenv("PREFIXBANK_HOME", "")
    assert default_root() == Path("bank")


def test_a_given_root_comes_before_the_environment(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXBANK_HOME", str(elsewhere / "home"))
    with PrefixBank.open(elsewhere / "given") as bank:
        assert bank.root == elsewhere / "given"
    assert not (elsewhere / "home").exists()


def test_a_bank_stays_where_it_is_when_the_working_directory_changes(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PrefixBank.open("here") as bank:
        (elsewhere / "away").mkdir()
        monkeypatch.chdir(elsewhere / "away")
        assert bank.check().ok
        assert bank.stats().n_chunks == 0
        assert not (elsewhere / "away" / "here").exists()


def test_no_bank_is_made_where_none_may_be(tmp_path: Path) -> None:
    for how in ({"create": False}, {"read_only": True}):
        with pytest.raises(BankNotFoundError, match="init"):
            PrefixBank.open(tmp_path / "none", **how)  # type: ignore[arg-type]
        assert not (tmp_path / "none").exists()
