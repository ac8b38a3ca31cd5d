"""Evaluations with lm-evaluation-harness: mlx_lm.evaluate's model class, and a bank's, on the same two tasks.

Both tasks have 8 fixed shots and 50 documents; one scores four choices, one asks for an answer of 8 tokens at most. A
time is that of `simple_evaluate`, tasks and bank opened anew included, the model loaded before.

Result: `{"rows": [...]}`, a row for each model and contender:

    model, contender ("bank, again" finds what "bank, first" has left in the bank)
    median_s, n_repeats, seconds (one a repeat)
    computed_tokens (of prompts and choices), n_tokens (how many there are)
    plain_ratio (how many times faster than mlx-lm, the median over rounds)
    same (scores to 1e-4, greedy flags and texts as mlx-lm's)
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from benchmarks.measuring import interleave, paired_ratio, say
from benchmarks.models import BenchModel
from benchmarks.report import Table, milliseconds
from prefixbank import PrefixBank

__all__ = ["CONTENDERS", "LM_EVAL_MISSING", "can_evaluate", "run", "tables"]

LM_EVAL_MISSING = "no evaluation: it needs lm-eval, pip install 'prefixbank[eval]'"

N_SHOTS, N_DOCS = 8, 50

PLAIN = "mlx-lm"
BANK_FIRST = "bank, first"
BANK_AGAIN = "bank, again"
CONTENDERS = (PLAIN, BANK_FIRST, BANK_AGAIN)

THINGS = ("kettle", "film", "soup", "novel", "hotel", "jacket", "phone", "museum")
GOOD = ("came two days early and works without a fault", "made all of us laugh", "was worth every minute of the way")
BAD = ("broke on the second day", "left us cold and a little sad", "was late, and nobody could say why")


def can_evaluate() -> bool:
    """Tell whether lm-eval is installed."""
    return find_spec("lm_eval") is not None


def run(
    models: Sequence[BenchModel], repeats: int, folder: Path | None, *, n_docs: int = N_DOCS, n_shots: int = N_SHOTS
) -> dict[str, Any]:
    """Measure the contenders on each model; banks and tasks are made below `folder`."""
    rows: list[dict[str, Any]] = []
    for model in models:
        say(f"evaluation: {model.label}")
        with TemporaryDirectory(dir=folder) as temporary:
            rows += _measure(model, _write_tasks(Path(temporary), n_docs, n_shots), Path(temporary), repeats)
    return {"rows": rows}


def _measure(model: BenchModel, tasks: list[dict[str, Any]], place: Path, repeats: int) -> list[dict[str, Any]]:
    from lm_eval.api.model import LM
    from mlx_lm.evaluate import MLXLM

    from prefixbank.evaluating import BankedLM

    class Plain(MLXLM):  # type: ignore[misc]  # mlx-lm is untyped
        """Be mlx-lm's class, of a model that is loaded already."""

        def __init__(self) -> None:
            LM.__init__(self)
            self._model, self.tokenizer = model.model, model.tokenizer
            self._max_tokens, self._batch_size, self._sampler = None, 8, None
            self.use_chat_template = False

    responses: dict[str, list[Any]] = {}
    counts: dict[str, dict[str, int]] = {}

    def plain() -> None:
        responses[PLAIN] = _evaluate(Plain(), tasks)

    def banked(name: str) -> None:
        if name == BANK_FIRST:
            shutil.rmtree(place / "bank", ignore_errors=True)
        with PrefixBank.open(place / "bank") as bank:
            lm = BankedLM(model.attach(bank), use_chat_template=False)
            responses[name] = _evaluate(lm, tasks)
        counts[name] = lm.token_counts()

    contenders: dict[str, Callable[[], None]] = {
        PLAIN: plain,
        BANK_FIRST: lambda: banked(BANK_FIRST),
        BANK_AGAIN: lambda: banked(BANK_AGAIN),
    }
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    banked(BANK_FIRST)  # what the first run of a process costs, and what "again" finds
    for _ in range(repeats):
        for name, times in interleave(contenders, dict.fromkeys(CONTENDERS, 1)).items():
            seconds[name] += times
    n_tokens = counts[BANK_FIRST]["tokens"]
    return [
        {
            "model": model.label,
            "contender": name,
            "median_s": median(times),
            "n_repeats": len(times),
            "seconds": times,
            "n_tokens": n_tokens,
            "computed_tokens": counts[name]["computed"] if name in counts else n_tokens,
            "plain_ratio": paired_ratio(seconds[PLAIN], times),
            "same": _are_same(responses[name], responses[PLAIN]),
        }
        for name, times in seconds.items()
    ]


def _evaluate(lm: Any, tasks: list[dict[str, Any]]) -> list[Any]:
    """Return all responses, in the order of tasks and documents."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    mx.random.seed(0)
    done: Any = lm_eval.simple_evaluate(
        model=lm, tasks=tasks, task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )
    return [
        sample["resps"]
        for task in tasks
        for sample in sorted(done["samples"][task["task"]], key=lambda sample: sample["doc_id"])
    ]


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=0, abs_tol=1e-4)
    return bool(one == other)


def _write_tasks(folder: Path, n_docs: int, n_shots: int) -> list[dict[str, Any]]:
    """Write documents, and return two tasks that read them."""
    draw = random.Random(0)
    files = {}
    for split, n in (("train", n_shots), ("test", n_docs)):
        files[split] = str(folder / f"{split}.jsonl")
        with Path(files[split]).open("w", encoding="utf-8") as lines:
            for number in range(n):
                ends = draw.sample(BAD if number % 2 else GOOD, 2)
                text = (
                    f"We got the {draw.choice(THINGS)} in {draw.choice(THINGS)} street. It {ends[0]}, and it {ends[1]}."
                )
                lines.write(json.dumps({"text": text, "label": number % 2}) + "\n")
    both = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        "fewshot_split": "train",
        "test_split": "test",
        "num_fewshot": n_shots,
        "fewshot_config": {"sampler": "first_n"},
        "description": "Say what each review is like: positive, negative, mixed or neutral.\n\n",
        "doc_to_text": "Review: {{text}}\nSentiment:",
    }
    choices = {
        "task": "benchmark_choices",
        "output_type": "multiple_choice",
        "doc_to_choice": ["positive", "negative", "mixed, but rather positive", "mixed, but rather negative"],
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    answers = {
        "task": "benchmark_answers",
        "output_type": "generate_until",
        "doc_to_target": "{{['positive', 'negative'][label]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [both | choices, both | answers]


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return a table for each model."""
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        by_model.setdefault(row["model"], []).append(row)
    header = ["", "time", "mlx-lm / it", "computed tokens", "of mlx-lm's", "same scores and texts", "rounds"]
    return [
        Table(
            f"Evaluation of two tasks, {label}",
            header,
            [
                [
                    row["contender"],
                    milliseconds(row["median_s"]),
                    f"{row['plain_ratio']:.2f}",
                    f"{row['computed_tokens']:,}",
                    f"{row['computed_tokens'] / row['n_tokens']:.1%}",
                    "yes" if row["same"] else "no",
                    str(row["n_repeats"]),
                ]
                for row in rows
            ],
            ["Times are medians, ratios medians over rounds. Tokens of answers are not counted."],
        )
        for label, rows in by_model.items()
    ]
