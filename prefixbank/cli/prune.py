"""Own `prefixbank prune`: removing what policy or the budget says, and what nothing refers to."""

from __future__ import annotations

from typing import Annotated

import typer

from prefixbank.cli.options import DryRunOption, JsonOption, MaxBytesOption, chosen_bank, open_bank
from prefixbank.cli.output import print_document, print_text
from prefixbank.cli.records import Holdings, plan_text
from prefixbank.config import parse_duration_s, parse_size


def run(
    ctx: typer.Context,
    max_bytes: MaxBytesOption = None,
    unused_for: Annotated[
        str | None,
        typer.Option(
            "--unused-for", metavar="TIME", help="Also remove chunks that were not used for this long, as 30d."
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="FP",
            help="Remove chunks of this namespace only (the first digits of its fingerprint), all of them if nothing "
            "else is said.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what the budget or the options say and what nothing refers to; pinned prefixes stay."""
    from prefixbank.rootfile import read_bank_file

    limit = None if max_bytes is None else parse_size(max_bytes)
    age_s = None if unused_for is None else parse_duration_s(unused_for)
    if limit is None and namespace is None:
        limit = read_bank_file(chosen_bank(ctx).root).max_bytes
    with open_bank(ctx, to_change=not dry_run) as bank:
        holdings = Holdings(bank)
        plan = bank.prune(max_bytes=limit, unused_for=age_s, namespace=namespace, dry_run=dry_run)
        fields = holdings.plan_fields(plan)
    if as_json:
        print_document(dry_run=dry_run, max_bytes=limit, unused_for_s=age_s, namespace=namespace, **fields)
    else:
        print_text(plan_text(fields, dry_run=dry_run))
