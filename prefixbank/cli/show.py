"""Own `prefixbank show`: everything about one named prefix or one chunk."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from prefixbank.cli.options import JsonOption, open_bank
from prefixbank.cli.output import print_document, print_text, yes_no
from prefixbank.cli.records import Fields, Holdings, chunks_table, stored_text
from prefixbank.config import format_size
from prefixbank.errors import UnknownPrefixError

if TYPE_CHECKING:
    from prefixbank.values import ChunkRecord, PrefixRecord

_KEY_START = re.compile(r"[0-9a-fA-F]{6,32}")


def run(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A prefix name, or the first 6 or more digits of a chunk key.", show_default=False
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show all that is known of a named prefix, or of one chunk."""
    with open_bank(ctx) as bank:
        prefixes = bank.prefixes()
        holdings = Holdings(bank)
        named = [prefix for prefix in prefixes if prefix.name == name]
        if named:
            shown = [
                holdings.prefix_fields(prefix)
                | {"chunks": [holdings.chunk_fields(record) for record in holdings.chain(prefix)]}
                for prefix in named
            ]
            if as_json:
                print_document(root=str(bank.root.absolute()), prefixes=shown)
            else:
                print_text("\n\n".join(_prefix_text(prefix) for prefix in shown))
            return
        record = _find_chunk(holdings, name)
        standing = [prefix for prefix in prefixes if record in holdings.chain(prefix)]
        chunk = holdings.chunk_fields(record) | _use_fields(standing)
        if as_json:
            print_document(root=str(bank.root.absolute()), chunk=chunk)
        else:
            print_text(_chunk_text(chunk))


def _find_chunk(holdings: Holdings, key_start: str) -> ChunkRecord:
    found = []
    if _KEY_START.fullmatch(key_start):
        found = [c for key, c in holdings.chunks.items() if key.hex().startswith(key_start.lower())]
    if len(found) > 1:
        raise UnknownPrefixError(f"{len(found)} chunk keys begin with {key_start!r}: give more digits")
    if not found:
        raise UnknownPrefixError(
            f"no prefix is named {key_start!r}, and no chunk key begins like this: `prefixbank ls` lists the names, "
            "`prefixbank ls chunks` the keys"
        )
    return found[0]


def _use_fields(standing: list[PrefixRecord]) -> Fields:
    return {
        "prefix_names": sorted({prefix.name for prefix in standing}),
        "pinned": any(prefix.pinned for prefix in standing),
    }


def _prefix_text(prefix: Fields) -> str:
    lines = [
        f"{prefix['name']}",
        f"  model      {prefix['label']}",
        f"  namespace  {_whose(prefix)}",
        f"  tokens     {prefix['n_tokens']}",
        f"  bytes      {format_size(prefix['disk_bytes'])}",
        f"  stored     {stored_text(prefix)}",
        f"  pinned     {yes_no(prefix['pinned'])}",
        f"  source     {prefix['source_digest'] or '-'}",
        f"  file       {_file_text(prefix)}",
        f"  created    {prefix['created_at']}",
        f"  last used  {prefix['last_used_at'] or '-'}",
    ]
    if prefix["chunks"]:
        lines += ["", chunks_table(prefix["chunks"], show_file=True)]
    return "\n".join(lines)


def _file_text(prefix: Fields) -> str:
    """Say which few-shot file a named prefix was made of, and how they compare."""
    if prefix["prefix_file"] is None:
        return "-"
    return f"{prefix['prefix_file']} ({prefix['file_state'] or 'not compared'})"


def _chunk_text(chunk: Fields) -> str:
    return "\n".join(
        [
            f"{chunk['key']}",
            f"  model      {chunk['label']}",
            f"  namespace  {_whose(chunk)}",
            f"  parent     {chunk['parent_key'] or '-'}",
            f"  tokens     {chunk['n_tokens']}, from {chunk['start']}",
            f"  bytes      {format_size(chunk['disk_bytes'])}",
            f"  file       {chunk['file'] or '(lost)'}",
            f"  prefixes   {', '.join(chunk['prefix_names']) or '-'}",
            f"  pinned     {yes_no(chunk['pinned'])}",
            f"  hits       {chunk['hits']}",
            f"  created    {chunk['created_at']}",
            f"  last used  {chunk['last_used_at'] or '-'}",
        ]
    )


def _whose(fields: Fields) -> str:
    salt = f" (salt {fields['salt_digest'][:8]})" if fields["salt_digest"] else ""
    return f"{fields['fingerprint']}{salt}"
