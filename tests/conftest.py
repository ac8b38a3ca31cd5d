"""Fixtures for all tests: a bank that must be found in order when the test is over, and a model without MLX."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from prefixbank.blas import load_blas

load_blas()  # before anything imports mlx

from prefixbank.bank import PrefixBank  # noqa: E402
from tests.fakekv import FakeModel  # noqa: E402

# Machines are slow at times, and CI must not find by chance what a developer would have to find again.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[PrefixBank]:
    """Give a bank with chunks of 4 tokens in which a check must find nothing when the test is over."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as opened:
        yield opened
        report = opened.check(read_data=True)
        assert report.ok, report.findings


@pytest.fixture
def model(bank: PrefixBank) -> FakeModel:
    """Give a model without MLX that stores and reads made-up rows in `bank`."""
    return FakeModel(bank)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Give `os.umask`, and put the old one back."""
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and time of change of all files below a folder."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))  # SQLite makes them for readers, too
    }


@pytest.fixture
def unchanged() -> Callable[[Path], object]:
    """Give a context manager that asserts that no file below a folder is changed, made or deleted inside."""

    @contextmanager
    def watching(root: Path) -> Iterator[None]:
        before = snapshot(root)
        yield
        assert snapshot(root) == before

    return watching
