"""What docs/integrations.md shows works as it stands there, with a tiny model in place of the one that it names."""

from __future__ import annotations

import json
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

FILES = dict(re.findall(r"<!-- file: (.+?) -->\n```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))

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
    assert set(SNIPPETS) == {"generate", "batch_generate", "openai", "dspy", "langchain", "lm_eval"}


@pytest.mark.parametrize("name", ["generate", "batch_generate"])
def test_mlx_lm_goes_on_from_the_bank(name: str, run: Run) -> None:
    numbers = [int(line.rsplit(" ", 1)[-1]) for line in run(name) if "cached" in line]
    assert numbers
    assert all(numbers)


def test_an_evaluation_of_the_shown_task_computes_a_part_of_its_tokens(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    for split in ("train", "test"):
        docs = [{"text": f"{split} lamp {n} is lovely", "label": n % 2} for n in range(10)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs), "utf-8")
    accuracy, tokens = run("lm_eval")[-2:]
    assert 0 <= float(accuracy) <= 1
    computed, asked = map(int, re.findall(r"\d+", tokens))
    assert computed < asked / 5


@pytest.mark.parametrize("name", ["openai", "dspy", "langchain"])
def test_clients_of_the_server_get_hits(name: str, run: Run, server: ServerProcess) -> None:
    if name != "openai":
        pytest.importorskip({"dspy": "dspy", "langchain": "langchain_openai"}[name])
    lines = run(name, server.url)
    assert int(lines[-1].rsplit(" ", 1)[-1]) > 100
