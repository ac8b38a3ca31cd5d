"""Own `prefixbank warm`: storing prefixes ahead of their use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixbank.cli import models
from prefixbank.cli.options import DryRunOption, JsonOption, MaxBytesOption, chosen_bank
from prefixbank.cli.output import print_document, print_text, progress_bar, table, yes_no
from prefixbank.cli.sources import JsonLinesOption, SourceArgument, SourcePrompt, read_prompts
from prefixbank.config import BANK_FILE, format_size, parse_size
from prefixbank.errors import PromptError

if TYPE_CHECKING:
    from prefixbank.bank import PrefixBank
    from prefixbank.model import BankedModel

EXIT_NOT_WHOLE = 1

Fields = dict[str, Any]


def run(
    ctx: typer.Context,
    model: models.ModelOption,
    source: SourceArgument = "-",
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="What the prefix is called.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict it; a pin needs a name.")] = False,
    adapter: models.AdapterOption = None,
    salt: models.SaltOption = "",
    kv_bits: models.KVBitsOption = None,
    kv_group_size: models.KVGroupSizeOption = None,
    precision: models.PrecisionOption = "auto",
    prefill_step_size: models.PrefillStepSizeOption = None,
    max_bytes: MaxBytesOption = None,
    as_lines: JsonLinesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute the KV of prompts and store it: of few-shot prompts what their queries share, of others all.

    Makes the bank where there is none. Exit code 1 says that the budget refused a prefix.
    """
    from prefixbank.rootfile import read_bank_file

    budget = None if max_bytes is None else parse_size(max_bytes)
    prompts = read_prompts(source, as_lines=as_lines, name=name, pin=pin)
    done: list[Fields] = []
    with _open(ctx, budget, dry_run) as bank:
        llm = models.load_model(
            bank,
            model,
            adapter=adapter,
            salt=salt,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            precision=precision,
            prefill_step_size=prefill_step_size,
        )
        n_chunk_tokens = read_bank_file(bank.root).chunk_tokens
        try:
            for given in prompts:
                done.append(_plan(llm, given, n_chunk_tokens) if dry_run else _warm(llm, given))
        finally:  # what is stored stays stored when a later prompt fails
            if done:
                _print(done, dry_run=dry_run, as_json=as_json)
    if any(warmed["stored_tokens"] < warmed["n_tokens"] for warmed in done):
        raise typer.Exit(EXIT_NOT_WHOLE)


@contextmanager
def _open(ctx: typer.Context, max_bytes: int | None, dry_run: bool) -> Iterator[PrefixBank]:
    """Open the bank, or for a dry run without one an empty bank that is thrown away."""
    from prefixbank.bank import PrefixBank

    choice = chosen_bank(ctx)
    if not dry_run:
        with PrefixBank.open(choice.root, max_bytes=max_bytes, busy_timeout_s=choice.busy_timeout_s) as bank:
            yield bank
    elif (choice.root / BANK_FILE).exists():
        with PrefixBank.open(choice.root, read_only=True, busy_timeout_s=choice.busy_timeout_s) as bank:
            yield bank
    else:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory(prefix="prefixbank-") as folder, PrefixBank.open(folder) as bank:
            yield bank


def _warm(llm: BankedModel, given: SourcePrompt) -> Fields:
    with progress_bar(f"warming {given.name or given.where}") as progress:
        try:
            warmed = llm.warm(given.prompt, name=given.name, pin=given.pin, progress=progress)
        except PromptError as exc:
            raise PromptError(f"{given.where}: {exc}") from exc
    return _fields(
        given,
        n_tokens=warmed.n_tokens,
        stored_tokens=warmed.stored_tokens,
        cached_tokens=warmed.cached_tokens,
        written_bytes=warmed.written_bytes,
    )


def _plan(llm: BankedModel, given: SourcePrompt, n_chunk_tokens: int) -> Fields:
    from prefixbank.fewshot import FewShotPrompt

    try:
        shared = isinstance(given.prompt, FewShotPrompt)
        token_ids = llm.shared_token_ids(given.prompt) if shared else llm.encode(given.prompt)
        if not token_ids:
            raise PromptError("these prompts share no token: there is nothing to warm")
    except PromptError as exc:
        raise PromptError(f"{given.where}: {exc}") from exc
    n_tokens = len(token_ids)
    token_bytes = llm.layout.token_bytes
    # A match leaves one token to compute, a warm does not: let it leave one that is not the prompt's.
    n_matched = llm.match([*token_ids, token_ids[-1]]).n_tokens
    # A chunk that is stored in part, or is a shorter tail, is stored anew from its start.
    n_to_store = 0 if n_matched == n_tokens else n_tokens - n_matched + n_matched % n_chunk_tokens
    return _fields(
        given,
        n_tokens=n_tokens,
        stored_tokens=n_tokens,
        cached_tokens=n_matched,
        written_bytes=n_to_store * token_bytes,
    )


def _fields(
    given: SourcePrompt, *, n_tokens: int, stored_tokens: int, cached_tokens: int, written_bytes: int
) -> Fields:
    return {
        "source": given.where,
        "name": given.name,
        "pinned": given.pin,
        "n_tokens": n_tokens,
        "stored_tokens": stored_tokens,
        "cached_tokens": cached_tokens,
        "computed_tokens": n_tokens - cached_tokens,
        "written_bytes": written_bytes,
    }


def _print(done: list[Fields], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_document(dry_run=dry_run, prefixes=done)
        return
    amounts = (
        ["tokens", "stored", "from the bank", "to compute", "to write"]
        if dry_run
        else [
            "tokens",
            "stored",
            "from the bank",
            "computed",
            "written",
        ]
    )
    rows = [
        [
            warmed["name"] or warmed["source"],
            *(str(warmed[f]) for f in ("n_tokens", "stored_tokens", "cached_tokens", "computed_tokens")),
            format_size(warmed["written_bytes"]),
            yes_no(warmed["pinned"]),
        ]
        for warmed in done
    ]
    print_text(table(["prefix", *amounts, "pinned"], rows, right=amounts))
