"""Own `prefixbank serve`: `mlx_lm.server` with a bank behind it."""

from __future__ import annotations

from typing import Annotated

import typer

from prefixbank.cli import models
from prefixbank.cli.options import DEFAULT_BUSY_TIMEOUT_S, MaxBytesOption, chosen_bank
from prefixbank.cli.output import print_text, say
from prefixbank.config import parse_size

BUSY_TIMEOUT_S = 2.0
"""How long to wait for another process's transaction, if it is not said: requests wait as long."""

DEFAULT_MEMORY_BYTES = "1GB"


def run(
    ctx: typer.Context,
    max_bytes: MaxBytesOption = None,
    memory_bytes: Annotated[
        str | None,
        typer.Option(
            "--memory-bytes",
            metavar="SIZE",
            help=f"The budget of prompt caches in memory (--prompt-cache-bytes, or {DEFAULT_MEMORY_BYTES}).",
        ),
    ] = None,
    salt: models.SaltOption = "",
    precision: models.PrecisionOption = "auto",
    wants_help: Annotated[
        bool, typer.Option("--help", "-h", help="Show this message and mlx_lm.server's, and exit.")
    ] = False,
) -> None:
    """Serve models as mlx_lm.server does, all its options included, with their prompt caches in the bank.

    Hits survive a restart. Makes the bank where there is none; SIGINT and SIGTERM close it.
    """
    from prefixbank.blas import load_blas

    load_blas()  # before mlx
    budget = None if max_bytes is None else parse_size(max_bytes)
    memory_budget = None if memory_bytes is None else parse_size(memory_bytes)
    if wants_help:
        print_text(ctx.get_help() + "\n\nOptions of mlx_lm.server:\n")
    from prefixbank import serving
    from prefixbank.bank import PrefixBank

    try:
        arguments = serving.parse_arguments(["--help"] if wants_help else ctx.args, ctx.command_path)
    except SystemExit as exc:  # argparse has said why
        raise typer.Exit(exc.code if isinstance(exc.code, int) else 2) from exc
    if memory_budget is None:
        memory_budget = arguments.prompt_cache_bytes
    choice = chosen_bank(ctx)
    patient = choice.busy_timeout_s != DEFAULT_BUSY_TIMEOUT_S
    with PrefixBank.open(
        choice.root,
        max_bytes=budget,
        memory_bytes=DEFAULT_MEMORY_BYTES if memory_budget is None else memory_budget,
        busy_timeout_s=choice.busy_timeout_s if patient else BUSY_TIMEOUT_S,
    ) as bank:
        serving.serve(bank, arguments, _say_where, precision=precision, salt=salt)


def _say_where(host: str, port: int) -> None:
    say(f"serving at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
