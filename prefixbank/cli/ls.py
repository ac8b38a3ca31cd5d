"""Own `prefixbank ls`: listing what a bank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Annotated

import typer

from prefixbank.cli.options import JsonOption, open_bank
from prefixbank.cli.output import print_document, print_text, say
from prefixbank.cli.records import (
    Fields,
    Holdings,
    chunks_table,
    files_table,
    namespace_fields,
    namespaces_table,
    prefixes_table,
)


class Listed(Enum):
    """Name what can be listed."""

    PREFIXES = "prefixes"
    FILES = "files"
    CHUNKS = "chunks"
    NAMESPACES = "namespaces"


def run(
    ctx: typer.Context,
    listed: Annotated[Listed, typer.Argument(metavar="prefixes|files|chunks|namespaces", help="What to list.")] = (
        Listed.PREFIXES
    ),
    as_json: JsonOption = False,
) -> None:
    """List the named prefixes, the few-shot files and their state, the chunks or the namespaces of the bank."""
    with open_bank(ctx) as bank:
        make_table: Callable[[Sequence[Fields]], str]
        if listed is Listed.NAMESPACES:
            found = [namespace_fields(usage) for usage in bank.namespaces()]
            make_table = namespaces_table
        elif listed is Listed.CHUNKS:
            holdings = Holdings(bank)
            found = [holdings.chunk_fields(record) for record in holdings.chunks.values()]
            make_table = chunks_table
        elif listed is Listed.FILES:
            found = Holdings(bank).file_fields()
            make_table = files_table
        else:
            prefixes = bank.prefixes()
            holdings = Holdings(bank)
            found = [holdings.prefix_fields(prefix) for prefix in prefixes]
            make_table = partial(prefixes_table, show_file=holdings.files is not None)
    if as_json:
        print_document(root=str(bank.root.absolute()), **{listed.value: found})
        return
    print_text(make_table(found))
    for file in found if listed is Listed.FILES else ():
        if file["error"]:
            say(file["error"])
    if not found:
        say(f"no {listed.value} in {bank.root}")
