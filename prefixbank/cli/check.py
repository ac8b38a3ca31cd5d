"""Own `prefixbank check`: finding faults."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from prefixbank.cli.options import JsonOption, open_bank
from prefixbank.cli.output import EXIT_PROBLEMS, print_document, print_text, progress_bar, table
from prefixbank.config import format_size


def run(
    ctx: typer.Context,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Also read every shard and prove its bytes by their digest.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find what is wrong with the bank, changing nothing; exit code 1 says that there are problems."""
    with open_bank(ctx) as bank, progress_bar("checking") as progress:
        report = bank.check(read_data=read_data, progress=progress)
    if as_json:
        print_document(
            root=str(bank.root.absolute()),
            ok=report.ok,
            read_data=read_data,
            n_chunks=report.n_chunks,
            n_bytes=report.n_bytes,
            findings=[asdict(finding) for finding in report.findings],
        )
    else:
        rows = [["problem" if f.problem else "note", f.kind, f.subject, f.message] for f in report.findings]
        n_notes = len(report.findings) - len(report.problems)
        how = "all bytes read" if read_data else "bytes not read; --read-data reads them"
        lines = [table(["", "kind", "subject", "message"], rows)] if rows else []
        lines.append(
            f"{len(report.problems)} problems and {n_notes} notes in {report.n_chunks} chunks "
            f"({format_size(report.n_bytes)}; {how})"
        )
        print_text("\n".join(lines))
    if not report.ok:
        raise typer.Exit(EXIT_PROBLEMS)
