"""Fixtures of the fault tests, and the line that a long run ends with (`pytest -m long tests/fault`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault import tally, trap
from tests.fault.stepping import Stepper


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the library that stands between a process and its files."""
    if reason := trap.why_not():
        pytest.skip(reason)
    return trap.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def stepper(library: Path) -> Iterator[Stepper]:
    """Give a server of processes that do deeds with a trap laid."""
    stepper = Stepper(library)
    yield stepper
    stepper.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if "long" in str(config.getoption("-m")).replace("not long", ""):
        terminalreporter.write_sep("=", "faults")
        terminalreporter.write_line(tally.line())
