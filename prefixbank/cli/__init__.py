"""Own the command line: its verbs, its global options, and what becomes of errors and warnings.

Each verb is a module of its own with a `run`, whose signature is the verb's options. Nothing here or at the top of a
verb's module imports MLX, SQLAlchemy, alembic, numpy or rich: a verb imports what it needs when it runs.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from os import environ
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from prefixbank.cli.check import run as run_check
from prefixbank.cli.demo import run as run_demo
from prefixbank.cli.eval import run as run_eval
from prefixbank.cli.explain import run as run_explain
from prefixbank.cli.export import run as run_export
from prefixbank.cli.import_ import run as run_import
from prefixbank.cli.init import run as run_init
from prefixbank.cli.ls import run as run_ls
from prefixbank.cli.migrate import run as run_migrate
from prefixbank.cli.options import DEFAULT_BUSY_TIMEOUT_S, PASSING_ON, BankChoice
from prefixbank.cli.output import print_text, say, silence_stdout, warnings_as_lines
from prefixbank.cli.pin import run as run_pin
from prefixbank.cli.prune import run as run_prune
from prefixbank.cli.repair import run as run_repair
from prefixbank.cli.rm import run as run_rm
from prefixbank.cli.serve import run as run_serve
from prefixbank.cli.show import run as run_show
from prefixbank.cli.stats import run as run_stats
from prefixbank.cli.unpin import run as run_unpin
from prefixbank.cli.warm import run as run_warm
from prefixbank.errors import PrefixBankError

__all__ = ["app", "main"]

EXIT_USAGE = 2
EXIT_FAILED = 3
EXIT_INTERRUPTED = 130
ENV_DEBUG = "PREFIXBANK_DEBUG"

# typer brings click along under changing names; this is its base of all errors in a command line.
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="prefixbank",
    help="Keep the KV caches of prompt prefixes in a bank, and look after it.",
    epilog="Exit codes: 0 done, 1 found problems, 2 usage, 3 failed, 10 no bank, 11 busy, 12 schema, 13 corrupt.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich costs 60 ms
)

_VERBS: dict[str, Callable[..., None]] = {
    "demo": run_demo,
    "init": run_init,
    "warm": run_warm,
    "ls": run_ls,
    "show": run_show,
    "explain": run_explain,
    "stats": run_stats,
    "pin": run_pin,
    "unpin": run_unpin,
    "rm": run_rm,
    "prune": run_prune,
    "check": run_check,
    "repair": run_repair,
    "export": run_export,
    "import": run_import,
    "migrate": run_migrate,
}
for _verb, _run in _VERBS.items():
    app.command(_verb)(_run)
app.command("serve", context_settings=PASSING_ON)(run_serve)
app.command("eval", context_settings=PASSING_ON)(run_eval)


def _print_version(wanted: bool) -> None:
    if wanted:
        from prefixbank import __version__

        print_text(f"prefixbank {__version__}")
        raise typer.Exit


@app.callback()
def choose_bank(
    ctx: typer.Context,
    bank: Annotated[
        Path | None,
        typer.Option(
            "--bank",
            metavar="DIR",
            help="The bank root; without it PREFIXBANK_HOME, ./bank if it is a bank, or the user cache folder.",
        ),
    ] = None,
    busy_timeout_s: Annotated[
        float,
        typer.Option(
            "--busy-timeout", metavar="SECONDS", help="How long to wait while another process holds the index."
        ),
    ] = DEFAULT_BUSY_TIMEOUT_S,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Remember which bank the verb works on."""
    ctx.obj = BankChoice(bank, busy_timeout_s)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line (None: the process's own) and return its exit code.

    Every error becomes one line on stderr; with `PREFIXBANK_DEBUG=1` its traceback comes first.
    """
    given = list(sys.argv[1:] if args is None else args)
    with warnings_as_lines():
        try:
            return _run_verb(given or ["--help"])
        except BrokenPipeError:  # of click's own output, the help
            silence_stdout()
            return 0
        except KeyboardInterrupt:
            say("interrupted")
            return EXIT_INTERRUPTED
        except Exception as exc:
            if environ.get(ENV_DEBUG) == "1":
                traceback.print_exc()
            return _complain(exc)


def _run_verb(args: list[str]) -> int:
    # Not `app(args)`: click would print errors in its own form, and end a closed pipe with exit code 1.
    command = get_command(app)
    try:
        with command.make_context("prefixbank", args) as ctx:
            command.invoke(ctx)
    except typer.Exit as exc:
        return exc.exit_code
    return 0


def _complain(error: Exception) -> int:
    """Say in one line what went wrong and return the exit code."""
    if isinstance(error, PrefixBankError):
        say(str(error))
        return error.exit_code
    if isinstance(error, _UsageError):
        message = error.format_message().strip().rstrip(".")
        hint = " goes before the verb" if message.endswith("--bank") else ""
        path = error.ctx.command_path if error.ctx else "prefixbank"
        say(f"{message[:1].lower()}{message[1:]}{hint}: see `{path} --help`")
        return EXIT_USAGE
    say(f"failed: {type(error).__name__}: {error} ({ENV_DEBUG}=1 shows where)")
    return EXIT_FAILED
