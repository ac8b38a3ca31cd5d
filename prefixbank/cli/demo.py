"""Own `prefixbank demo`: the same eight queries cold and from the bank, on a real model."""

from __future__ import annotations

from dataclasses import asdict
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixbank.cli import models
from prefixbank.cli.options import JsonOption, chosen_bank
from prefixbank.cli.output import print_document, print_text, progress_bar, say, table, yes_no
from prefixbank.config import ENV_HOME

if TYPE_CHECKING:
    from prefixbank.demo.run import Answer, DemoReport

EXIT_TEXTS_DIFFER = 1


def run(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH_OR_ID",
            help="Any mlx-lm model; without it SmolLM2-135M-Instruct is fetched (90 MB).",
        ),
    ] = None,
    precision: models.PrecisionOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer eight reviews cold and from the bank, on a real model, and compare.

    Uses ./bank unless --bank or PREFIXBANK_HOME says otherwise. The texts must be equal: exit code 1 if they are not.
    """
    from prefixbank.bank import PrefixBank
    from prefixbank.demo.smollm2 import fetch_smollm2

    choice = chosen_bank(ctx)
    root = choice.root if choice.given_root is not None or environ.get(ENV_HOME) else Path("bank")
    folder = model if model is not None else str(fetch_smollm2())
    with PrefixBank.open(root, busy_timeout_s=choice.busy_timeout_s) as bank:
        say(f"loading {folder}")
        llm = models.load_model(
            bank, folder, adapter=None, salt="", kv_bits=None, kv_group_size=None, precision=precision
        )
        from prefixbank.demo.run import DemoReport, answer, load_shots, warm

        shots = load_shots()
        with progress_bar("warming the prompt") as progress:
            warmed, warm_s = warm(llm, shots, progress)
        with progress_bar("answering, cold and from the bank") as progress:
            report = DemoReport(warmed, warm_s, answer(llm, shots, progress))
    if as_json:
        _print_json(report, root)
    else:
        _print_table(report, root)
    if not report.all_equal:
        raise typer.Exit(EXIT_TEXTS_DIFFER)


def _print_json(report: DemoReport, root: Path) -> None:
    print_document(
        root=str(root.absolute()),
        warmed=asdict(report.warmed),
        warm_s=report.warm_s,
        answers=[asdict(a) | {"equal": a.equal, "speed_up": a.speed_up} for a in report.answers],
        median_speed_up=report.median_speed_up,
        all_equal=report.all_equal,
    )


def _print_table(report: DemoReport, root: Path) -> None:
    warmed = report.warmed
    origin = (
        f"computed and stored in {report.warm_s:.1f} s"
        if warmed.computed_tokens
        else "there already, from an earlier run"
    )
    print_text(f"The prompt's {warmed.n_tokens} tokens are in {root.absolute()}: {origin}.\n")
    numbers = ["cached", "computed", "cold s", "bank s", "speed-up"]
    print_text(
        table(["review", "answer", "equal", *numbers], [_row(a) for a in report.answers], right=numbers),
    )
    print_text(f"\nFirst token {report.median_speed_up:.1f} times sooner from the bank (median).")
    if report.all_equal:
        print_text("All texts are equal to those computed cold.")
    else:
        say("texts differ between cold and bank: please report this, with the output of `prefixbank demo --json`")


def _row(answer: Answer) -> list[str]:
    review = answer.query if len(answer.query) <= 40 else f"{answer.query[:39]}…"
    return [
        review,
        answer.text.strip().split("\n")[0],
        yes_no(answer.equal),
        str(answer.cached_tokens),
        str(answer.computed_tokens),
        f"{answer.cold_ttft_s:.2f}",
        f"{answer.ttft_s:.2f}",
        f"{answer.speed_up:.1f}",
    ]
