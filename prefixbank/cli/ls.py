"""Own `prefixbank ls`: listing what a bank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated

import typer

from prefixbank.cli.options import JsonOption, open_bank
from prefixbank.cli.output import print_document, print_text, say
from prefixbank.cli.records import Fields, Holdings, chunks_table, namespace_fields, namespaces_table, prefixes_table


class Listed(Enum):
    """Name what can be listed."""

    PREFIXES = "prefixes"
    CHUNKS = "chunks"
    NAMESPACES = "namespaces"


def run(
    ctx: typer.Context,
    listed: Annotated[Listed, typer.Argument(metavar="prefixes|chunks|namespaces", help="What to list.")] = (
        Listed.PREFIXES
    ),
    as_json: JsonOption = False,
) -> None:
    """List the named prefixes, the chunks or the namespaces of the bank."""
    with open_bank(ctx) as bank:
        make_table: Callable[[Sequence[Fields]], str]
        if listed is Listed.NAMESPACES:
            found = [namespace_fields(usage) for usage in bank.namespaces()]
            make_table = namespaces_table
        elif listed is Listed.CHUNKS:
            holdings = Holdings(bank)
            found = [holdings.chunk_fields(record) for record in holdings.chunks.values()]
            make_table = chunks_table
        else:
            prefixes = bank.prefixes()
            holdings = Holdings(bank)
            found = [holdings.prefix_fields(prefix) for prefix in prefixes]
            make_table = prefixes_table
    if as_json:
        print_document(root=str(bank.root.absolute()), **{listed.value: found})
        return
    print_text(make_table(found))
    if not found:
        say(f"no {listed.value} in {bank.root}")
