"""Own `prefixbank init`: making a bank."""

from __future__ import annotations

from typing import Annotated

import typer

from prefixbank.cli.options import DryRunOption, JsonOption, MaxBytesOption, chosen_bank
from prefixbank.cli.output import print_document, print_text, say
from prefixbank.config import BANK_FILE, BankOptions, format_size, parse_size


def run(
    ctx: typer.Context,
    chunk_tokens: Annotated[
        int | None,
        typer.Option("--chunk-tokens", metavar="N", help="How many token ids a full chunk has (256); fixed for good."),
    ] = None,
    max_bytes: MaxBytesOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the bank root a bank; one that is there already stays as it is."""
    from prefixbank.rootfile import DEFAULT_CHUNK_TOKENS, read_bank_file, require_usable_root

    root = chosen_bank(ctx).root
    wanted = BankOptions(
        max_bytes=None if max_bytes is None else parse_size(max_bytes),
        chunk_tokens=chunk_tokens,
    )
    there = (root / BANK_FILE).exists()
    if not there:
        require_usable_root(root)
    if not there and not dry_run:
        from prefixbank.bank import PrefixBank

        PrefixBank.open(root, chunk_tokens=wanted.chunk_tokens, max_bytes=wanted.max_bytes).close()
    n_chunk_tokens, budget = wanted.chunk_tokens or DEFAULT_CHUNK_TOKENS, wanted.max_bytes
    if there or not dry_run:
        bank_file = read_bank_file(root)
        n_chunk_tokens, budget = bank_file.chunk_tokens, bank_file.max_bytes
        if wanted.chunk_tokens not in (None, n_chunk_tokens) or wanted.max_bytes not in (None, budget):
            say("the bank is there already and keeps what it was made with", "warning: ")
    if as_json:
        print_document(
            root=str(root.absolute()),
            dry_run=dry_run,
            created=not there,
            chunk_tokens=n_chunk_tokens,
            max_bytes=budget,
        )
        return
    done = "is a bank already" if there else "would become a bank" if dry_run else "is a bank now"
    limit = "no budget" if budget is None else f"a budget of {format_size(budget)}"
    print_text(f"{root.absolute()} {done}: {n_chunk_tokens} tokens a chunk, {limit}")
