"""Hold whole processes to the rules that only they show: imports, streams, pipes closed early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.banks import FilledBank

HEAVY = ["mlx", "mlx_lm", "numpy", "alembic", "rich", "transformers", "sqlalchemy.orm"]
VERBS = [
    "ls",
    "ls files",
    "ls chunks",
    "ls namespaces --json",
    "show short",
    "stats --json",
    "check --read-data",
    "pin short",
    "unpin short",
    "prune",
    "export archive.tar",
    "import archive.tar",
    "rm short",
]

IMPORTED = """
import sys
from prefixbank.cli import main
root, heavy, *verbs = sys.argv[1:]
for verb in verbs:
    assert main(["--bank", root, *verb.split()]) == 0, verb
    print(verb, [name for name in heavy.split(",") if name in sys.modules], file=sys.stderr)
"""


def run_process(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefixbank", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload,no-any-return]


def test_the_module_runs_as_a_program(filled: FilledBank) -> None:
    done = run_process("--bank", str(filled.root), "ls", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["schema"] == 1
    done = run_process("--bank", str(filled.root / "nowhere"), "ls")
    assert (done.returncode, done.stdout) == (10, "")


def test_the_command_line_imports_nothing_heavy() -> None:
    script = "import sys, prefixbank.cli; print([n for n in sys.argv[1].split(',') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script, ",".join([*HEAVY, "sqlalchemy"])], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_verbs_that_need_no_model_import_no_mlx(filled: FilledBank) -> None:
    (filled.root / "prefixes").mkdir()
    (filled.root / "prefixes" / "short.toml").write_text("instructions = 'x'")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, str(filled.root), ",".join(HEAVY), *VERBS],
        cwd=filled.root.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr.splitlines()) == (0, [f"{verb} []" for verb in VERBS])


def _run_into_closed_pipe(*args: str) -> tuple[int, str]:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "prefixbank", *args],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(write_end)
    return done.returncode, done.stderr


@pytest.mark.parametrize("verb", ["ls", "ls --json", "--help", "show short"])
def test_a_pipe_closed_early_is_no_error(filled: FilledBank, verb: str) -> None:
    assert _run_into_closed_pipe("--bank", str(filled.root), *verb.split()) == (0, "")


def test_a_pipe_closed_early_hides_no_problem_and_stops_no_work(filled: FilledBank) -> None:
    root = str(filled.root)
    assert _run_into_closed_pipe("--bank", root, "rm", "short") == (0, "")
    assert run_process("--bank", root, "show", "short").returncode == 2
    next(filled.root.glob("shards/*/*")).unlink()
    assert _run_into_closed_pipe("--bank", root, "check") == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_stdout_that_is_full_ends_with_3(filled: FilledBank) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "prefixbank", "--bank", str(filled.root), "ls"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (3, "prefixbank: stdout can't be written: No space left on device\n")


def test_stdout_takes_any_name_in_any_encoding(filled: FilledBank) -> None:
    filled.store("prüfung", [1, 2, 3])
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = run_process("--bank", str(filled.root), "ls", env=ascii_only)
    assert done.returncode == 0
    assert "pr\\xfcfung" in done.stdout
    done = run_process("--bank", str(filled.root), "ls", "--json", env=ascii_only)
    assert "prüfung" in {prefix["name"] for prefix in json.loads(done.stdout)["prefixes"]}
