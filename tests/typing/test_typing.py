"""Hold the public door to its types, as a strict user of mypy meets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEADER = """\
from prefixbank import Example, FewShotPrompt, GenerationResult, Match, PrefixBank

with PrefixBank.open("bank", max_bytes="20GB") as bank:
    model = bank.load_model("a-model", salt="team")
    shots = FewShotPrompt("Name the mood.", [Example("I like it.", "good")], name="mood")
    prompt = shots.render("It rains.")
    found = model.match(prompt)
    answer = model.generate(prompt, max_tokens=8)
"""
RIGHT = """\
    match: Match = found
    result: GenerationResult = answer
    n_saved: int = found.n_tokens + answer.cached_tokens
    print(result.text.upper(), match.reason, bank.stats().max_bytes, n_saved)
    reveal_type(bank)
    reveal_type(found)
    reveal_type(answer)
    reveal_type(answer.token_ids)
    reveal_type(model.warm(shots, pin=True).name)
"""
REVEALED = [
    "prefixbank.bank.PrefixBank",
    "prefixbank.values.Match",
    "prefixbank.generation.GenerationResult",
    "list[int]",
    "str | None",
]
WRONG = """\
    PrefixBank.open("bank", durability="sometimes")
    Example("only an input")
    FewShotPrompt(["no text"])
    n_chars: int = answer.text
    found.n_tokens = 3
    model.generate(prompt, max_tokens="8")
    model.generate(prompt, maximum=8)
    bank.chunkz()
"""


def mypy(folder: Path, source: str) -> tuple[int, str]:
    """Run mypy on a program outside the checkout; returns its exit code and what it says."""
    program = folder / "program.py"
    program.write_text(source)
    config = folder / "mypy.ini"
    # mlx and mlx-lm have no complete types, which is no affair of who uses prefixbank.
    config.write_text(
        "[mypy]\n[mypy-mlx.*,mlx_lm.*,transformers.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", str(config), str(program)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder whose cache both tests use."""
    return tmp_path_factory.mktemp("typing")


def test_a_program_of_the_readme_is_typed_strictly(folder: Path) -> None:
    exit_code, output = mypy(folder, HEADER + RIGHT)
    assert exit_code == 0, output
    revealed = [line.split("Revealed type is ")[1].strip('"') for line in output.splitlines() if "Revealed" in line]
    assert [name.replace("builtins.", "") for name in revealed] == REVEALED


def test_each_wrong_use_is_an_error(folder: Path) -> None:
    exit_code, output = mypy(folder, HEADER + WRONG)
    first = HEADER.count("\n") + 1
    wrong = {int(line.split(":")[1]) for line in output.splitlines() if ": error:" in line}
    assert exit_code == 1, output
    assert wrong == set(range(first, first + WRONG.count("\n"))), output
