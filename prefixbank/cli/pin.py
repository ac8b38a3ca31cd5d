"""Own `prefixbank pin`, and what it has in common with `unpin`."""

from __future__ import annotations

import typer

from prefixbank.cli.options import DryRunOption, JsonOption, NameArgument, open_bank
from prefixbank.cli.output import print_document, print_text, say


def run(ctx: typer.Context, name: NameArgument, dry_run: DryRunOption = False, as_json: JsonOption = False) -> None:
    """Never evict a named prefix."""
    set_pinned(ctx, name, True, dry_run=dry_run, as_json=as_json)


def set_pinned(ctx: typer.Context, name: str, pinned: bool, *, dry_run: bool, as_json: bool) -> None:
    """Pin or unpin a name for every model that has it, and say so."""
    with open_bank(ctx, to_change=not dry_run) as bank:
        prefixes = bank.prefixes(name)
        if not dry_run:
            (bank.pin if pinned else bank.unpin)(name)
    n_changed = sum(prefix.pinned != pinned for prefix in prefixes)
    if as_json:
        print_document(name=name, dry_run=dry_run, pinned=pinned, n_prefixes=len(prefixes), n_changed=n_changed)
    else:
        verb = "pinned" if pinned else "unpinned"
        done = f"was {verb} already" if not n_changed else f"would be {verb}" if dry_run else f"is {verb}"
        print_text(f"{name} {done}")
    if pinned and any(prefix.chunk_key is None for prefix in prefixes):
        say(f"{name} was evicted, so the pin holds nothing yet: warm it again", "warning: ")
