"""Own `prefixbank export`: named prefixes as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prefixbank.cli.options import DryRunOption, JsonOption, open_bank
from prefixbank.cli.output import print_document, print_text, progress_bar, say, table, yes_no
from prefixbank.config import format_size

REVEALS = "It holds token ids and KV, and both reveal these prompts word for word: keep it as you keep the prompts."


def run(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to make.", show_default=False)],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Prefix names; without any, all of them.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="FP",
            help="Only prefixes of this namespace (the first digits of its fingerprint).",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write named prefixes, with their KV, to a new file for `import`.

    The file is a tar, and its KV and token ids reveal the prompts: it gets mode 0600. Of a salt it holds a digest.
    """
    with open_bank(ctx) as bank, progress_bar("exporting") as progress:
        done = bank.export_prefixes(file, names or (), namespace=namespace, dry_run=dry_run, progress=progress)
    for name, why in done.left_out:
        say(f"{name} is left out: {why}", "warning: ")
    if as_json:
        print_document(
            file=str(file.absolute()),
            dry_run=dry_run,
            prefixes=[archived_fields(prefix) for prefix in done.prefixes],
            left_out=[{"name": name, "reason": why} for name, why in done.left_out],
            n_shards=done.n_shards,
            n_tokens=done.n_tokens,
            n_bytes=done.n_bytes,
            reveals_prompts=True,
        )
        return
    n = len(done.prefixes)
    print_text(
        f"{archived_table(done.prefixes)}\n"
        f"{file} {'would hold' if dry_run else 'holds'} {n} prefix{'es' if n != 1 else ''}: "
        f"{done.n_tokens:,} tokens in {done.n_shards} shards, {format_size(done.n_bytes)}.\n{REVEALS}"
    )


def archived_fields(prefix: Any) -> dict[str, Any]:
    """Return a prefix of an archive as fields."""
    from dataclasses import asdict

    return {**asdict(prefix), "salt_digest": prefix.salt_digest or None, "refused": prefix.refused or None}


def archived_table(prefixes: Any) -> str:
    """Return the prefixes of an archive as a table."""
    rows = [
        [p.name, p.label, p.fingerprint[:12], yes_no(bool(p.salt_digest)), f"{p.n_tokens}", yes_no(p.pinned), p.action]
        for p in prefixes
    ]
    return table(["name", "model", "fingerprint", "salted", "tokens", "pinned", "action"], rows, right=("tokens",))
