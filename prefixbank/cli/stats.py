"""Own `prefixbank stats`: what a bank holds in sums."""

from __future__ import annotations

import typer

from prefixbank.cli.options import JsonOption, open_bank
from prefixbank.cli.output import print_document, print_text
from prefixbank.config import format_size


def run(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show how many prefixes, chunks, tokens and bytes the bank holds."""
    with open_bank(ctx) as bank:
        stats = bank.stats()
    root = str(bank.root.absolute())
    if as_json:
        print_document(
            root=root,
            n_prefixes=stats.n_prefixes,
            n_pinned=stats.n_pinned,
            n_namespaces=stats.n_namespaces,
            n_chunks=stats.n_chunks,
            n_holes=stats.n_holes,
            n_tokens=stats.n_tokens,
            disk_bytes=stats.disk_bytes,
            quarantined_bytes=stats.quarantined_bytes,
            max_bytes=stats.max_bytes,
        )
        return
    budget = "no budget" if stats.max_bytes is None else f"of {format_size(stats.max_bytes)}"
    holes = f" ({stats.n_holes} lost their shard)" if stats.n_holes else ""
    print_text(
        "\n".join(
            [
                f"bank         {root}",
                f"prefixes     {stats.n_prefixes} ({stats.n_pinned} pinned)",
                f"namespaces   {stats.n_namespaces}",
                f"chunks       {stats.n_chunks}{holes}",
                f"tokens       {stats.n_tokens}",
                f"on disk      {format_size(stats.disk_bytes)} ({budget})",
                f"quarantined  {format_size(stats.quarantined_bytes)}",
            ]
        )
    )
