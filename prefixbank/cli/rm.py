"""Own `prefixbank rm`: taking a name away, and the chunks that only it stands on."""

from __future__ import annotations

import typer

from prefixbank.cli.options import DryRunOption, JsonOption, NameArgument, open_bank
from prefixbank.cli.output import print_document, print_text
from prefixbank.cli.records import Holdings, plan_text


def run(ctx: typer.Context, name: NameArgument, dry_run: DryRunOption = False, as_json: JsonOption = False) -> None:
    """Take a prefix name away, with the chunks that no other prefix stands on."""
    with open_bank(ctx, to_change=not dry_run) as bank:
        holdings = Holdings(bank)
        plan = holdings.plan_fields(bank.remove(name, dry_run=dry_run))
    if as_json:
        print_document(name=name, dry_run=dry_run, **plan)
    else:
        print_text(f"{name} {'would be' if dry_run else 'is'} removed\n{plan_text(plan, dry_run=dry_run)}")
