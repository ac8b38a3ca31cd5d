"""Own `prefixbank import`: prefixes from the file that `export` made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixbank.cli.export import archived_fields, archived_table
from prefixbank.cli.options import DryRunOption, JsonOption, MaxBytesOption, chosen_bank
from prefixbank.cli.output import EXIT_PROBLEMS, print_document, print_text, progress_bar, say
from prefixbank.config import format_size, parse_size

if TYPE_CHECKING:
    from prefixbank.bank import PrefixBank


TRUST = (
    "Proven are the archive's form and damage, token ids and places; whether the KV is the model's only computing it "
    "again would show: you trust whoever made it."
)


def run(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` made.", show_default=False)],
    replace: Annotated[
        bool, typer.Option("--replace", help="Take a name away from the prefix that has it; without this, it keeps it.")
    ] = False,
    max_bytes: MaxBytesOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Store the prefixes of an archive, with their names and pins.

    All of it is proven first, but for the KV itself: only computing it again would show whether it is the model's, and
    who imports it trusts whoever made it. What the bank has is never overwritten. An archive that does not fit into
    the budget is refused. Exit code 1 says that a prefix was not stored, since its name is another's or the bank
    changed meanwhile.
    """
    limit = None if max_bytes is None else parse_size(max_bytes)
    with _open(ctx, limit, dry_run) as bank, progress_bar("proving") as progress:
        done = bank.import_prefixes(file, replace=replace, dry_run=dry_run, progress=progress)
    if as_json:
        print_document(
            file=str(file.absolute()),
            dry_run=dry_run,
            prefixes=[archived_fields(prefix) for prefix in done.prefixes],
            n_shards=done.n_shards,
            n_new_chunks=done.n_new_chunks,
            written_bytes=done.n_written_bytes,
            n_evicted_chunks=done.n_evicted_chunks,
            kv_is_proven=False,
        )
    else:
        would = "would be" if dry_run else "were"
        evicted = f"; {done.n_evicted_chunks} others {would} evicted for them" if done.n_evicted_chunks else ""
        print_text(
            f"{archived_table(done.prefixes)}\n{done.n_new_chunks} chunks {would} stored, "
            f"{format_size(done.n_written_bytes)}, of {done.n_shards} in the archive{evicted}.\n{TRUST}"
        )
    problems = [prefix for prefix in done.prefixes if prefix.refused or prefix.action == "kept"]
    for prefix in problems:
        why = prefix.refused or "another prefix has that name, and keeps it (--replace takes it away)"
        say(f"{prefix.name} {'would not be' if dry_run else 'was not'} imported: {why}", "warning: ")
    if problems:
        raise typer.Exit(EXIT_PROBLEMS)


def _open(ctx: typer.Context, max_bytes: int | None, dry_run: bool) -> PrefixBank:
    """Open the bank that is there, with its own budget unless another is given."""
    from prefixbank.bank import PrefixBank

    choice = chosen_bank(ctx)
    return PrefixBank.open(
        choice.root, create=False, read_only=dry_run, max_bytes=max_bytes, busy_timeout_s=choice.busy_timeout_s
    )
