"""Own `prefixbank eval`: `mlx_lm.evaluate` with a bank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefixbank.cli.options import MaxBytesOption, chosen_bank
from prefixbank.cli.output import print_text, say
from prefixbank.config import parse_size

DEFAULT_MEMORY_BYTES = "1GB"


def run(
    ctx: typer.Context,
    include_path: Annotated[
        Path | None,
        typer.Option("--include-path", metavar="DIR", help="A folder with the yaml files of tasks of your own."),
    ] = None,
    max_bytes: MaxBytesOption = None,
    memory_bytes: Annotated[
        str, typer.Option("--memory-bytes", metavar="SIZE", help="The budget of prompt caches in memory.")
    ] = DEFAULT_MEMORY_BYTES,
    wants_help: Annotated[
        bool, typer.Option("--help", "-h", help="Show this message and mlx_lm.evaluate's, and exit.")
    ] = False,
) -> None:
    """Evaluate a model as mlx_lm.evaluate does, all its options included, with shared prefixes from the bank.

    Scores, texts and the results file are the same. Makes the bank where there is none.
    """
    from prefixbank.blas import load_blas

    load_blas()  # before mlx
    budget = None if max_bytes is None else parse_size(max_bytes)
    memory_budget = parse_size(memory_bytes)
    if wants_help:
        print_text(ctx.get_help() + "\n\nOptions of mlx_lm.evaluate:\n")
    from prefixbank import harness
    from prefixbank.bank import PrefixBank

    try:
        arguments = harness.parse_arguments(["--help"] if wants_help else ctx.args, ctx.command_path)
    except SystemExit as exc:  # argparse has said why
        raise typer.Exit(exc.code if isinstance(exc.code, int) else 2) from exc
    tasks = harness.find_tasks(arguments.tasks, include_path)
    choice = chosen_bank(ctx)
    with PrefixBank.open(
        choice.root, max_bytes=budget, memory_bytes=memory_budget, busy_timeout_s=choice.busy_timeout_s
    ) as bank:
        counts = harness.evaluate(bank, arguments, tasks).token_counts()
    say(
        f"{counts['tokens']:,} tokens of prompts and choices: {counts['computed']:,} computed, {counts['from_bank']:,} "
        f"read from the bank, {counts['shared_in_memory']:,} shared in memory"
    )
