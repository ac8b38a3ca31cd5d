"""Own `prefixbank unpin`."""

from __future__ import annotations

import typer

from prefixbank.cli.options import DryRunOption, JsonOption, NameArgument
from prefixbank.cli.pin import set_pinned


def run(ctx: typer.Context, name: NameArgument, dry_run: DryRunOption = False, as_json: JsonOption = False) -> None:
    """Let a named prefix be evicted again."""
    set_pinned(ctx, name, False, dry_run=dry_run, as_json=as_json)
