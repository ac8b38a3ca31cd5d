"""Own `prefixbank stats`: what a bank holds in sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from prefixbank.cli.options import JsonOption, open_bank
from prefixbank.cli.output import print_document, print_text, utc
from prefixbank.config import format_size

if TYPE_CHECKING:
    from prefixbank.values import Namespace, Rates


def run(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show how many prefixes, chunks, tokens and bytes the bank holds."""
    with open_bank(ctx) as bank:
        stats = bank.stats()
        names = {usage.namespace.id: usage.namespace for usage in bank.namespaces(empty=True)}
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
            rates=[_rates_fields(rates, names[rates.namespace_id]) for rates in stats.rates],
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
                *(_speed(rates, names[rates.namespace_id]) for rates in stats.rates),
            ]
        )
    )


def _rates_fields(rates: Rates, namespace: Namespace) -> dict[str, Any]:
    return {
        "fingerprint": namespace.fingerprint,
        "salt_digest": namespace.salt_digest or None,
        "label": namespace.label,
        "device": rates.device,
        "compute_s": rates.compute_s,
        "compute_s_per_token": rates.compute_s_per_token,
        "load_s": rates.load_s,
        "load_s_per_byte": rates.load_s_per_byte,
        "updated_at": utc(rates.updated_at),
    }


def _speed(rates: Rates, namespace: Namespace) -> str:
    """Say how fast a model's prefixes were computed and loaded, leaving out what was not measured."""
    speeds = []
    if rates.compute_s_per_token:
        speeds.append(f"computing {1 / rates.compute_s_per_token:.0f} tokens/s")
    if rates.load_s_per_byte:
        speeds.append(f"loading {format_size(round(1 / rates.load_s_per_byte))}/s")
    return f"speed        {', '.join(speeds) or 'unknown'} ({namespace.label}, {rates.device})"
