"""What docs/integrations.md shows works as it stands there, with a tiny model in place of the one that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("openai")

from tests.model.serverprocess import ServerProcess, banked

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
NAMED_MODEL = "mlx-community/Llama-3.2-3B-Instruct-4bit"
NAMED_URL = "http://127.0.0.1:8080/v1"
SNIPPETS = dict(re.findall(r"<!-- snippet: (.+?) -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))

Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path, save_tiny: Callable[..., Path]) -> Run:
    """Give a function that runs a snippet twice, each in a process of its own, and returns the second one's output."""
    model = save_tiny()

    def run_twice(name: str, url: str = "") -> list[str]:
        text = SNIPPETS[name].replace(NAMED_MODEL, str(model)).replace(NAMED_URL, url)
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run_twice


@pytest.fixture
def server(tmp_path: Path, save_tiny: Callable[..., Path]) -> Iterator[ServerProcess]:
    with banked(tmp_path / "bank", "--model", str(save_tiny())) as server:
        yield server


def test_every_snippet_is_run_here() -> None:
    text = PAGE.read_text("utf-8")
    assert len(SNIPPETS) == text.count("```python")
    assert set(SNIPPETS) == {"generate", "batch_generate", "openai", "dspy", "langchain"}


@pytest.mark.parametrize("name", ["generate", "batch_generate"])
def test_mlx_lm_goes_on_from_the_bank(name: str, run: Run) -> None:
    numbers = [int(line.rsplit(" ", 1)[-1]) for line in run(name) if "cached" in line]
    assert numbers
    assert all(numbers)


@pytest.mark.parametrize("name", ["openai", "dspy", "langchain"])
def test_clients_of_the_server_get_hits(name: str, run: Run, server: ServerProcess) -> None:
    if name != "openai":
        pytest.importorskip({"dspy": "dspy", "langchain": "langchain_openai"}[name])
    lines = run(name, server.url)
    assert int(lines[-1].rsplit(" ", 1)[-1]) > 100
