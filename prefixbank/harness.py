"""Own running `mlx_lm.evaluate` with a bank: its arguments, the tasks, and what is said of them.

Its `main` does the work, prints and writes the results; what it is given in place of its own are the model, the parsed
arguments and `simple_evaluate`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from prefixbank.bank import PrefixBank
from prefixbank.errors import BankWarning, ConfigError, EvaluationError
from prefixbank.evaluating import BankedLM, TokenCounts, load_as_it_is

# isort: split
import lm_eval
from lm_eval.api.samplers import ContextSampler
from lm_eval.tasks import TaskManager
from mlx_lm import evaluate as mlx_evaluate

__all__ = ["Tasks", "evaluate", "find_tasks", "parse_arguments"]


def parse_arguments(argv: Sequence[str], prog: str = "mlx_lm.evaluate") -> argparse.Namespace:
    """Return what `mlx_lm.evaluate` makes of its command line. Raises `SystemExit` as argparse does."""

    class Parsed(Exception):
        pass

    class Parser(argparse.ArgumentParser):
        def __init__(self, *_: Any, **options: Any) -> None:
            super().__init__(prog, **options)

        def parse_args(self, *_: Any) -> Any:  # type: ignore[override]
            raise Parsed(super().parse_args(list(argv)))

    # Its parser is made and used inside `main`.
    with _replaced(argparse=_with_parser(Parser)):
        try:
            mlx_evaluate.main()
        except Parsed as parsed:
            arguments = parsed.args[0]
    if not isinstance(arguments.chat_template_args, dict):
        raise ConfigError("--chat-template-args must be a JSON object")
    return arguments


class Tasks(TaskManager):  # type: ignore[misc]  # lm-eval is untyped
    """Find and load tasks as lm-eval does, and remember those that were loaded.

    Raises `EvaluationError` for those that can't be.
    """

    loaded: Mapping[str, Any]

    def load(self, task_list: Any) -> Any:
        """Return tasks and groups."""
        try:
            found = super().load(task_list)
        except Exception as exc:  # yaml, templates, data sets, the user's functions
            reason = str(exc).strip().splitlines()
            what = ", ".join(map(str, task_list))
            raise EvaluationError(
                f"the tasks can't be loaded ({what}): {type(exc).__name__}: {reason[0] if reason else ''}"
            ) from exc
        self.loaded = found["tasks"]
        return found


def find_tasks(names: Sequence[str], include_path: str | os.PathLike[str] | None = None) -> Tasks:
    """Return who has the tasks of these names: lm-eval's own, and those of the yaml files below `include_path`.

    Raises `EvaluationError` for a name that nothing has.
    """
    for name in names:
        if Path(name).name != name:  # the results could not be written: their file is called by the tasks
            raise EvaluationError(f"{name} is no task's name: give its folder with --include-path, and the task's name")
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise EvaluationError(f"--include-path {include_path} is no folder")
        # lm-eval's own index takes ten seconds: whole tasks need nothing of it.
        tasks = Tasks(include_path=str(include_path), include_defaults=False, metadata={})
        if set(names) <= set(tasks.all_subtasks):
            return tasks
    tasks = Tasks(include_path=None if include_path is None else str(include_path), metadata={})
    for name in names:
        if name not in tasks.task_index and not Path(name).is_file():
            alike = difflib.get_close_matches(name, tasks.all_tasks, 3)
            hint = f"did you mean {', '.join(alike)}?" if alike else "--include-path adds a folder of yaml files"
            raise EvaluationError(f"there is no task {name!r}, or its yaml is broken: {hint}")
    return tasks


def evaluate(bank: PrefixBank, arguments: argparse.Namespace, tasks: Tasks) -> BankedLM:
    """Run `mlx_lm.evaluate` with parsed arguments; returns the model, which has counted its tokens.

    Raises `EvaluationError`, `ConfigError` for a model that can't be loaded, and whatever a task raises.
    """
    made: list[BankedLM] = []

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *_: Any) -> Any:  # type: ignore[override]
            return arguments

    class Loaded(BankedLM):  # a class of this run: `main` gives it a chat template
        def __init__(self, path_or_hf_repo: str, *, trust_remote_code: bool, sampler: Any, **options: Any) -> None:
            with redirect_stdout(sys.stderr):
                llm = load_as_it_is(bank, path_or_hf_repo, trust_remote_code=trust_remote_code)
            # That greedy is deterministic can't be seen from mlx-lm's function: equal prompts are computed once.
            super().__init__(llm, sampler=sampler if arguments.temp > 0 else None, **options)
            made.append(self)

    def simple_evaluate(**options: Any) -> Any:
        return lm_eval.simple_evaluate(task_manager=tasks, **options)

    with _replaced(
        argparse=_with_parser(Parser), MLXLM=Loaded, lm_eval=SimpleNamespace(simple_evaluate=simple_evaluate)
    ):
        mlx_evaluate.main()
    warn_of_drawn_shots(tasks.loaded, made[0].counts)
    return made[0]


def warn_of_drawn_shots(tasks: Mapping[str, Any], counts: Mapping[str, TokenCounts]) -> None:
    """Warn once of the tasks that draw new shots for each document, with what their prompts shared."""
    drawing = {name: counts[name] for name, task in tasks.items() if name in counts and _draws_shots(task)}
    if not drawing:
        return
    n_asked = sum(one.asked for one in drawing.values())
    n_saved = n_asked - sum(one.computed for one in drawing.values())
    names = ", ".join(sorted(drawing)[:3]) + (f" and {len(drawing) - 3} more" if len(drawing) > 3 else "")
    share = n_saved / max(n_asked, 1)
    warnings.warn(
        f"{names}: new shots are drawn for each document, and {share:.0%} of {n_asked:,} tokens needed no computing; "
        "`fewshot_config: {sampler: first_n}` in the task's yaml gives all documents the same shots "
        "(and other scores)",
        BankWarning,
        stacklevel=2,
    )


def _draws_shots(task: Any) -> bool:
    """Tell whether a task has shots of lm-eval's default sampler; whole texts have none, whatever their number."""
    if not task.config.num_fewshot or task.OUTPUT_TYPE == "loglikelihood_rolling":
        return False
    return getattr(type(getattr(task, "sampler", None)), "sample", None) is ContextSampler.sample


def _with_parser(parser: type[argparse.ArgumentParser]) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(argparse), "ArgumentParser": parser})


@contextmanager
def _replaced(**names: Any) -> Iterator[None]:
    """Give `mlx_lm.evaluate` other objects under these names while the block runs."""
    with mock.patch.multiple(mlx_evaluate, **names):
        yield
