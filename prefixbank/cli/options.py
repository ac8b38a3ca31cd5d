"""Own the options that several verbs share, and opening the bank that the command line names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixbank.config import default_root

if TYPE_CHECKING:
    from prefixbank.bank import PrefixBank

__all__ = [
    "DEFAULT_BUSY_TIMEOUT_S",
    "PASSING_ON",
    "BankChoice",
    "DryRunOption",
    "JsonOption",
    "MaxBytesOption",
    "NameArgument",
    "chosen_bank",
    "open_bank",
]

DEFAULT_BUSY_TIMEOUT_S = 15.0

NO_LIMIT = 2**63 - 1
"""The budget with which maintenance opens a bank: it removes what it is told to, not what the budget asks for."""

PASSING_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""The settings of a verb that passes on the options that it does not know, to a command of mlx-lm."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", "-n", help="Print what would be done, and change nothing.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The prefix name.", show_default=False)]
MaxBytesOption = Annotated[
    str | None,
    typer.Option("--max-bytes", metavar="SIZE", help="The budget of shards on disk, as 20GB, 512MiB or bytes."),
]


@dataclass(frozen=True, slots=True)
class BankChoice:
    """Hold the global options: which bank root, and how long to wait for its index."""

    given_root: Path | None
    busy_timeout_s: float

    @property
    def root(self) -> Path:
        """Return the bank root that was given, or the default one."""
        return self.given_root if self.given_root is not None else default_root()


def chosen_bank(ctx: typer.Context) -> BankChoice:
    """Return the global options of this command line."""
    choice = ctx.obj
    assert isinstance(choice, BankChoice)
    return choice


def open_bank(ctx: typer.Context, *, to_change: bool = False) -> PrefixBank:
    """Open the bank that is there, read-only unless it is to be changed. Raises `BankNotFoundError` without one."""
    from prefixbank.bank import PrefixBank

    choice = chosen_bank(ctx)
    return PrefixBank.open(
        choice.root,
        create=False,
        read_only=not to_change,
        max_bytes=NO_LIMIT if to_change else None,
        busy_timeout_s=choice.busy_timeout_s,
    )
