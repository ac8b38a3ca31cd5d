"""Let each file operation of a generation's bank fail: the text is that of a cold start, and no row is lost by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault import tally
from tests.fault.trap import CHECKOUT, environment

N_WARMED = 4  # 60 tokens in chunks of 16


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long, id="each"), pytest.param(40, id="some")])
def test_a_generation_goes_on_whatever_file_operation_of_its_bank_fails(
    library: Path, tmp_path: Path, step: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fault.generating", tmp_path, str(step)],
        cwd=CHECKOUT,
        env=environment(library),
        stdout=subprocess.PIPE,
        check=False,
    )
    tally.must_not("signals", ended.returncode < 0 and ended.returncode)
    assert ended.returncode == 0
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert sum(result["hit"] for result in results) >= 10
    tally.count("failed operations", sum(result["hit"] for result in results))
    tally.must_not("wrong tokens", [result["at"] for result in results if not result["right"]])
    tally.must_not("acknowledged chunks lost", [r["at"] for r in results if r["n_kept"] < N_WARMED])
