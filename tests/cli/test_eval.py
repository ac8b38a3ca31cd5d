"""`prefixbank eval` is mlx_lm.evaluate with a bank: its options, results file and table, and errors in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.banks import Outcome
from tests.model import evaltasks
from tests.model.evaltasks import ANSWERS, BROKEN, CHOICES, DRAWN, ROLLING

# mlx_lm.evaluate knows no folder of tasks.
PLAIN = """
import sys
from prefixbank.blas import load_blas
load_blas()
from mlx_lm import evaluate
from lm_eval.tasks import TaskManager
whole, tasks = evaluate.lm_eval.simple_evaluate, TaskManager(include_path=sys.argv.pop(1), include_defaults=False)
evaluate.lm_eval.simple_evaluate = lambda **options: whole(task_manager=tasks, **options)
evaluate.main()
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval")
    return evaltasks.write_tasks(tmp_path_factory.mktemp("tasks"))


def process(*command: str) -> Outcome:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Outcome(done.returncode, done.stdout, done.stderr)


def banked(root: Path, *options: str) -> Outcome:
    return process("-m", "prefixbank", "--bank", str(root), "eval", *options)


def table(outcome: Outcome) -> str:
    return outcome.out.partition("Results:\n")[2]


def said(outcome: Outcome) -> list[str]:
    return [line for line in outcome.err.splitlines() if line.startswith("prefixbank:")]


def n_of(outcome: Outcome, what: str) -> int:
    """Return a number from the line that says how many tokens were computed."""
    (line,) = [line for line in said(outcome) if " computed, " in line]
    return int(line[: line.index(f" {what}")].rpartition(" ")[2].replace(",", ""))


@pytest.mark.parametrize(
    "options",
    [
        ["--no-apply-chat-template"],
        ["--fewshot-as-multiturn", "--num-shots", "5", "--limit", "20", "--batch-size", "3", "--seed", "7"],
    ],
    ids=["plain", "chat"],
)
def test_results_file_and_table_are_mlx_lms_and_a_second_run_computes_less(
    tasks: Path, root: Path, tiny_model: Path, tmp_path: Path, options: list[str]
) -> None:
    given = ["--model", str(tiny_model), "--tasks", CHOICES, ANSWERS, ROLLING, *options, "--output-dir"]
    plain = process("-c", PLAIN, str(tasks), *given, str(tmp_path / "plain"))
    assert plain.code == 0, plain.err
    n_computed = []
    for folder in ("first", "second"):
        own = banked(root, *given, str(tmp_path / folder), "--include-path", str(tasks), "--max-bytes", "1GB")
        assert own.code == 0, own.err
        assert table(own) == table(plain) != ""
        (wanted,), (found,) = ((tmp_path / name).iterdir() for name in ("plain", folder))
        assert (found.name, found.read_text("utf-8")) == (wanted.name, wanted.read_text("utf-8"))
        assert len(said(own)) == 1, own.err  # no warning
        n_computed.append(n_of(own, "computed"))
    assert n_of(own, "read from the bank") > 0
    assert n_of(own, "tokens of") == sum(n_of(own, what) for what in ("computed", "read", "shared"))
    assert n_computed[0] < n_of(own, "tokens of") / 3
    assert n_computed[1] < n_computed[0]


def test_drawn_shots_are_told_of_in_one_line(tasks: Path, root: Path, tiny_model: Path, tmp_path: Path) -> None:
    given = ["--model", str(tiny_model), "--limit", "12", "--include-path", str(tasks), "--output-dir", str(tmp_path)]
    done = banked(root, *given, "--tasks", CHOICES, DRAWN)
    assert done.code == 0, done.err
    (warning,) = [line for line in said(done) if "warning" in line]
    assert warning.startswith(f"prefixbank: warning: {DRAWN}: new shots are drawn")
    assert "sampler: first_n" in warning


def test_what_is_wrong_with_tasks_or_model_is_one_line(
    run: Callable[..., Outcome], tasks: Path, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.yaml").write_text(
        f"task: other\ninclude: {tasks / (CHOICES + '.yaml')}\ndoc_to_text: '{{{{ nothing.there }}}}'\n", "utf-8"
    )
    model = ["--model", str(tiny_model), "--output-dir", str(tmp_path / "out")]
    for options, code, message in (
        ([*model, "--tasks", BROKEN, "--include-path", str(tasks)], 3, f"can't be loaded ({BROKEN})"),
        ([*model, "--tasks", "other", "--include-path", str(tmp_path)], 3, "can't be loaded (other): UndefinedError"),
        ([*model, "--tasks", CHOICES, "--include-path", str(tmp_path / "none")], 3, "is no folder"),
        ([*model, "--tasks", f"{tasks}/{CHOICES}.yaml"], 3, "--include-path"),
        (
            ["--model", str(tmp_path / "no"), "--tasks", CHOICES, "--include-path", str(tasks)],
            2,
            "is no folder and could not be downloaded",
        ),
    ):
        done = run("eval", *options)
        assert done.code == code, (options, done.err)
        assert message in said(done)[-1], (options, done.err)
        assert "Traceback" not in done.err


def test_unknown_tasks_are_named_before_a_bank_is_made(
    run: Callable[..., Outcome], tasks: Path, root: Path, tmp_path: Path
) -> None:
    """And before the model is loaded. lm-eval's own tasks are known beside those of the folder."""
    (tmp_path / "bad.yaml").write_text("task: bad_reviews\noutput_type: [", "utf-8")
    (tmp_path / f"{CHOICES}.yaml").write_text((tasks / f"{CHOICES}.yaml").read_text("utf-8"), "utf-8")
    given = ["--model", "none", "--include-path", str(tmp_path), "--tasks", "hellaswag", CHOICES]
    for name, hint in ((CHOICES[:-1], f"did you mean {CHOICES}"), ("bad_reviews", "or its yaml is broken")):
        done = run("eval", *given, name)
        assert done.code == 3, done.err
        assert f"there is no task {name!r}" in said(done)[-1]
        assert hint in said(done)[-1]
    assert not root.exists()


def test_help_shows_both_kinds_of_options(root: Path) -> None:
    pytest.importorskip("lm_eval")
    for flag in ("--help", "-h"):
        done = banked(root, flag)
        assert (done.code, done.err) == (0, "")
        for option in (
            "--max-bytes",
            "--include-path",
            "--num-shots",
            "--fewshot-as-multiturn",
            "--chat-template-args",
        ):
            assert option in done.out
        assert "usage: prefixbank eval" in done.out
    assert not root.exists()


def test_wrong_options_are_refused_before_a_bank_is_made(run: Callable[..., Outcome], root: Path) -> None:
    pytest.importorskip("lm_eval")
    given = ["--model", "none", "--tasks", "hellaswag"]
    for options in (
        [],
        ["--model", "none"],
        [*given, "--limit", "few"],
        [*given, "--max-bytes", "much"],
        [*given, "--memory-bytes", "-1"],
        [*given, "--chat-template-args", "[1]"],
        [*given, "--shots", "3"],
    ):
        done = run("eval", *options)
        assert done.code == 2, options
    assert not root.exists()


def test_a_missing_harness_is_told_with_what_to_install(root: Path) -> None:
    main = "import sys; sys.modules['lm_eval'] = None; from prefixbank.cli import main; sys.exit(main())"
    done = process("-c", main, "--bank", str(root), "eval", "--model", "none", "--tasks", "hellaswag")
    assert done.code == 3
    assert "pip install 'prefixbank[eval]'" in done.err
    assert not root.exists()
