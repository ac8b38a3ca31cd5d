"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.real_model
def test_example_runs_as_it_stands(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert len(example.splitlines()) <= 24
    lines = []
    for _ in range(2):  # the second run starts from the bank of the first
        done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=True)
        lines.append(done.stdout.splitlines())
    assert lines[0] == lines[1]
    assert [re.sub(r"\d+", "N", line) for line in lines[0]] == [
        "negative (N tokens from the bank, N computed)",
        "positive (N tokens from the bank, N computed)",
    ]
    assert (tmp_path / "bank" / "bank.json").is_file()


def test_commands_are_the_ones_that_ci_finds() -> None:
    text = README.read_text("utf-8")
    for name, last in (("demo", "prefixbank demo"), ("test", "python -m pytest")):
        (command,) = re.findall(rf"<!-- {name} command -->\n```sh\n(.*)\n```", text)
        assert command.endswith(last)
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
