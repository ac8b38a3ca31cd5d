"""Own `prefixbank warm`: storing prefixes ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixbank.cli import models
from prefixbank.cli.options import DryRunOption, JsonOption, MaxBytesOption, chosen_bank
from prefixbank.cli.output import EXIT_PROBLEMS, print_document, print_text, progress_bar, say, table, yes_no
from prefixbank.cli.sources import (
    JsonLinesOption,
    SourcePrompt,
    parse_variables,
    read_prefix_files,
    read_prompts,
)
from prefixbank.config import BANK_FILE, format_size, parse_size
from prefixbank.errors import ConfigError

if TYPE_CHECKING:
    from prefixbank.bank import PrefixBank
    from prefixbank.model import BankedModel
    from prefixbank.warming import Replaced, WarmPlan


Fields = dict[str, Any]


class Boundaries(Enum):
    """Name where models with recurrent layers can go on from."""

    END = "end"
    EXAMPLES = "examples"


class Old(Enum):
    """Name what becomes of an old version."""

    DROP = "drop"
    KEEP = "keep"
    LEAVE = "leave"


def run(
    ctx: typer.Context,
    model: models.ModelOption,
    source: Annotated[
        str,
        typer.Argument(
            metavar="[SOURCE]",
            help="A few-shot prompt (.toml, or the name of one in the bank's folder prefixes), one JSON prompt a line "
            "(.jsonl), or a text file; - is stdin.",
            show_default=False,
        ),
    ] = "-",
    all_files: Annotated[
        bool, typer.Option("--all", help="Warm all few-shot files in the bank's folder prefixes.")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="What the prefix is called.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict it; a pin needs a name.")] = False,
    k: Annotated[
        int | None, typer.Option("-k", metavar="K", help="Take only the first K examples of a few-shot file.")
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--var", metavar="NAME=VALUE", help="The value of a variable of a few-shot file; any number."),
    ] = None,
    old: Annotated[
        Old,
        typer.Option(
            "--old",
            help="The stored version of a few-shot prompt that has changed: drop it, keep it as NAME@DIGEST, or leave "
            "it without a name until it is evicted.",
        ),
    ] = Old.DROP,
    boundaries: Annotated[
        Boundaries | None,
        typer.Option(
            "--boundaries",
            help="Where models with recurrent layers can go on from: at the end, or behind each of the examples too "
            "(without it as the file says).",
            show_default=False,
        ),
    ] = None,
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

    Makes the bank where there is none. With -n, says how many bytes and seconds that would take. Exit code 1 says that
    the budget refused a prefix, or that with --all a file could not be warmed; the others are all the same.
    """
    root = chosen_bank(ctx).root
    budget = None if max_bytes is None else parse_size(max_bytes)
    errors: list[dict[str, str]] = []
    prompts: Iterator[SourcePrompt]
    if all_files:
        if source != "-" or as_lines or name is not None or k is not None or variables:
            raise ConfigError(
                "--all takes all few-shot files as they are: leave out SOURCE, --jsonl, --name, -k, --var"
            )
        readable, errors = read_prefix_files(root, pin=pin)
        prompts = iter(readable)
        if not readable:
            _finish([], errors, dry_run=dry_run, as_json=as_json)
    else:
        prompts = read_prompts(
            source, as_lines=as_lines, name=name, pin=pin, root=root, k=k, variables=parse_variables(variables or ())
        )
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
        options = {"old": old.value, "boundaries": None if boundaries is None else boundaries.value}
        warm_one = _planner(llm, options) if dry_run else _warmer(llm, options)
        try:
            for given in prompts:
                try:
                    done.append(warm_one(given))
                except ConfigError as exc:
                    error = str(exc) if str(exc).startswith(given.where) else f"{given.where}: {exc}"
                    if not all_files:
                        raise type(exc)(error) from exc
                    errors.append({"source": given.where, "name": given.name or "", "error": error})
        except BaseException:  # what is stored stays stored when a later prompt fails
            if done:
                _print(done, errors, dry_run=dry_run, as_json=as_json)
            raise
    _finish(done, errors, dry_run=dry_run, as_json=as_json)


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


def _warmer(llm: BankedModel, options: dict[str, Any]) -> Callable[[SourcePrompt], Fields]:
    def warm(given: SourcePrompt) -> Fields:
        with progress_bar(f"warming {given.name or given.where}") as progress:
            warmed = llm.warm(given.prompt, name=given.name, pin=given.pin, progress=progress, **options)
        return _fields(
            given,
            n_tokens=warmed.n_tokens,
            stored_tokens=warmed.stored_tokens,
            cached_tokens=warmed.cached_tokens,
            written_bytes=warmed.written_bytes,
            seconds=warmed.seconds,
            replaced=warmed.replaced,
            old=options["old"],
        )

    return warm


def _planner(llm: BankedModel, options: dict[str, Any]) -> Callable[[SourcePrompt], Fields]:
    plans: list[WarmPlan] = []

    def plan(given: SourcePrompt) -> Fields:
        todo = llm.plan_warm(given.prompt, name=given.name, after=plans, **options)
        plans.append(todo)
        fields = _fields(
            given,
            n_tokens=todo.n_tokens,
            stored_tokens=todo.n_tokens,
            cached_tokens=todo.cached_tokens,
            written_bytes=todo.written_bytes,
            seconds=todo.seconds,
            replaced=todo.replaces,
            old=options["old"],
        )
        return fields | {"compute_s": todo.compute_s, "load_s": todo.load_s}

    return plan


def _fields(
    given: SourcePrompt,
    *,
    n_tokens: int,
    stored_tokens: int,
    cached_tokens: int,
    written_bytes: int,
    seconds: float | None,
    replaced: Replaced | None,
    old: str,
) -> Fields:
    from dataclasses import asdict

    return {
        "source": given.where,
        "name": given.name,
        "pinned": given.pin,
        "n_tokens": n_tokens,
        "stored_tokens": stored_tokens,
        "cached_tokens": cached_tokens,
        "computed_tokens": n_tokens - cached_tokens,
        "written_bytes": written_bytes,
        "seconds": seconds,
        "replaced": None if replaced is None else {"old": old, **asdict(replaced)},
    }


def _finish(done: list[Fields], errors: list[dict[str, str]], *, dry_run: bool, as_json: bool) -> None:
    """Print what was done and what could not be, and end with exit code 1 where something is not as it should be."""
    _print(done, errors, dry_run=dry_run, as_json=as_json)
    if errors or any(warmed["stored_tokens"] < warmed["n_tokens"] for warmed in done):
        raise typer.Exit(EXIT_PROBLEMS)


def _print(done: list[Fields], errors: list[dict[str, str]], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_document(dry_run=dry_run, prefixes=done, errors=errors)
    else:
        print_text("\n".join([*([_table(done, dry_run=dry_run)] if done else []), *_notes(done, dry_run=dry_run)]))
    for error in errors:
        say(error["error"])


def _table(done: list[Fields], *, dry_run: bool) -> str:
    amounts = ["tokens", "stored", "from the bank"]
    amounts += ["to compute", "to write", "time"] if dry_run else ["computed", "written", "time"]
    rows = [
        [
            warmed["name"] or warmed["source"],
            *(str(warmed[f]) for f in ("n_tokens", "stored_tokens", "cached_tokens", "computed_tokens")),
            format_size(warmed["written_bytes"]),
            _time(warmed),
            yes_no(warmed["pinned"]),
        ]
        for warmed in done
    ]
    return table(["prefix", *amounts, "pinned"], rows, right=amounts)


def _time(warmed: Fields) -> str:
    """Say how long it took or would take."""
    seconds = warmed["seconds"]
    if seconds is None:
        return "unknown"
    text = f"{seconds:.1f} s" if seconds >= 1 or not seconds else f"{max(seconds * 1000, 1):.0f} ms"
    return f"over {text}" if warmed.get("load_s", 0.0) is None else text


def _notes(done: list[Fields], *, dry_run: bool) -> Iterator[str]:
    """Say what became of old versions, and what several prefixes take together."""
    for warmed in done:
        if (replaced := warmed["replaced"]) is not None:
            fate = {
                Old.DROP.value: f"dropped ({format_size(replaced['freed_bytes'])} freed)",
                Old.KEEP.value: f"kept as {replaced['kept_as']}" if replaced["kept_as"] else "gone (it was evicted)",
                Old.LEAVE.value: "left to eviction",
            }[replaced["old"]]
            verb = "would be" if dry_run else "is"
            yield f"{warmed['name']} has changed: its old version {replaced['source_digest'][:8]} {verb} {fate}"
    if dry_run and len(done) > 1:
        n_bytes = sum(warmed["written_bytes"] for warmed in done)
        times = [warmed["seconds"] for warmed in done]
        known = None if None in times else sum(times)
        some_unknown = any(warmed["load_s"] is None for warmed in done)
        in_all = _time({"seconds": known, "load_s": None if some_unknown else 0.0})
        yield f"in all: {format_size(n_bytes)} to write, time {in_all}"
