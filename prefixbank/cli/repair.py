"""Own `prefixbank repair`: putting right what a check finds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prefixbank.cli.options import DryRunOption, JsonOption, chosen_bank
from prefixbank.cli.output import EXIT_PROBLEMS, print_document, print_text, progress_bar, table

if TYPE_CHECKING:
    from prefixbank.repair import RepairPlan


def run(
    ctx: typer.Context,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Also read every shard that the index knows and prove its bytes.")
    ] = False,
    unproven: Annotated[
        bool,
        typer.Option("--unproven", help="Also take up shards of older versions, which hold no digest of their bytes."),
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Put right what `check` finds; a lost index is made anew from the shards. What is damaged is moved aside."""
    from prefixbank.repair import repair

    choice = chosen_bank(ctx)
    with progress_bar("repairing") as progress:
        plan = repair(
            choice.root,
            read_data=read_data,
            unproven=unproven,
            dry_run=dry_run,
            busy_timeout_s=choice.busy_timeout_s,
            progress=progress,
        )
    if as_json:
        print_document(
            root=str(choice.root.absolute()),
            dry_run=dry_run,
            ok=plan.ok,
            index=plan.index,
            steps=[{k: v for k, v in asdict(step).items() if k != "needs_hand"} for step in plan.steps],
            left=[{k: v for k, v in asdict(step).items() if k != "action"} for step in plan.left],
        )
    else:
        print_text(_text(plan, dry_run=dry_run))
    if not plan.ok:
        raise typer.Exit(EXIT_PROBLEMS)


def _text(plan: RepairPlan, *, dry_run: bool) -> str:
    rows = [[step.action, step.subject, step.message] for step in (*plan.steps, *plan.left)]
    lines = [table(["", "subject", "why"], rows)] if rows else []
    done = "steps would be taken" if dry_run else "steps taken"
    lines.append(f"{len(plan.steps)} {done}, {len(plan.left)} things left as they are")
    return "\n".join(lines)
