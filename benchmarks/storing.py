"""What storing costs: time on the way of a prefill, and bytes written for each byte of new KV.

Result, two lists of rows:

`prefill`: prompts that nothing is known of, in pairs, stored and not stored (the same call in a bank opened
read-only), in turn:

    model, n_tokens, n_repeats
    without_s, with_s, flush_s (medians; `flush` right after a prefill with storing)
    slower_by (with by without, less 1: the median over pairs), slower_by_pair (one a pair)

`written`: what a prefill stores: all tokens of its prompt but the last.

    model, n_tokens
    case ("new prompt"; "same prompt again"; "half shared" and "3/5 shared": so much of it is stored, no more. With
    1,024 tokens the half ends with a chunk, whereas 3/5 end inside one, whose known tokens are written again)
    n_new_tokens, new_kv_bytes, written_bytes, written_ratio (written by new; null where nothing is new)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import paired_ratio, random_token_ids, say
from benchmarks.models import BenchModel
from benchmarks.report import Table, milliseconds
from prefixbank import BankedModel, PrefixBank

__all__ = ["DEFAULT_TOKENS", "run", "tables"]

DEFAULT_TOKENS = (1024,)


def run(models: Sequence[BenchModel], tokens: Sequence[int], repeats: int, folder: Path | None) -> dict[str, Any]:
    """Measure each model and prompt length, in a new bank below `folder`."""
    prefill: list[dict[str, Any]] = []
    written: list[dict[str, Any]] = []
    for model in models:
        for n_tokens in tokens:
            say(f"storing: {model.label}, {n_tokens} tokens")
            with TemporaryDirectory(dir=folder) as temporary, ExitStack() as stack:
                root = Path(temporary) / "bank"
                bank = stack.enter_context(PrefixBank.open(root, memory_bytes=0, load="always"))
                llm = model.attach(bank)
                reader = stack.enter_context(PrefixBank.open(root, memory_bytes=0, load="always", read_only=True))
                prefill.append(_measure_prefill(bank, llm, model.attach(reader), n_tokens, repeats))
                written += _measure_written(bank, llm, n_tokens)
    return {"prefill": prefill, "written": written}


def _measure_prefill(
    bank: PrefixBank, storing: BankedModel, not_storing: BankedModel, n_tokens: int, repeats: int
) -> dict[str, Any]:
    """Return the row of one prompt length."""
    with_s: list[float] = []
    without_s: list[float] = []
    flush_s: list[float] = []

    def prefill(llm: BankedModel, seed: int, seconds: list[float]) -> None:
        prompt = random_token_ids(n_tokens, seed)
        started_at = time.perf_counter()
        llm.prefill(prompt)
        seconds.append(time.perf_counter() - started_at)

    def prefill_and_store(seed: int) -> None:
        prefill(storing, seed, with_s)
        started_at = time.perf_counter()
        bank.flush()
        flush_s.append(time.perf_counter() - started_at)

    for number in range(repeats + 1):  # the first pair pays for what is done once
        seeds = (2 * number, 2 * number + 1)
        if number % 2:
            prefill_and_store(seeds[0])
            prefill(not_storing, seeds[1], without_s)
        else:
            prefill(not_storing, seeds[0], without_s)
            prefill_and_store(seeds[1])
    del with_s[0], without_s[0], flush_s[0]
    return {
        "model": storing.label,
        "n_tokens": n_tokens,
        "n_repeats": repeats,
        "without_s": median(without_s),
        "with_s": median(with_s),
        "flush_s": median(flush_s),
        "slower_by": paired_ratio(with_s, without_s) - 1,
        "slower_by_pair": [stored / plain - 1 for stored, plain in zip(with_s, without_s, strict=True)],
    }


def _measure_written(bank: PrefixBank, llm: BankedModel, n_tokens: int) -> list[dict[str, Any]]:
    """Return a row for each case."""
    prompt = random_token_ids(n_tokens, seed="new")
    cases = {"new prompt": prompt, "same prompt again": prompt}
    for case, n_shared in (("half shared", n_tokens // 2), ("3/5 shared", n_tokens * 3 // 5)):
        cases[case] = prompt[:n_shared] + random_token_ids(n_tokens - n_shared, seed=case)
    rows = []
    for case, token_ids in cases.items():
        n_new_tokens = n_tokens - 1 - llm.match(token_ids).n_tokens
        before = _written_bytes(bank)
        llm.prefill(token_ids)
        written_bytes = _written_bytes(bank) - before
        new_kv_bytes = llm.layout.data_bytes(n_new_tokens)
        rows.append(
            {
                "model": llm.label,
                "n_tokens": n_tokens,
                "case": case,
                "n_new_tokens": n_new_tokens,
                "new_kv_bytes": new_kv_bytes,
                "written_bytes": written_bytes,
                "written_ratio": written_bytes / new_kv_bytes if new_kv_bytes else None,
            }
        )
    return rows


def _written_bytes(bank: PrefixBank) -> int:
    """Return the bytes of shards that were written since the bank was opened."""
    bank.flush()
    return bank.stats().session.get("written_bytes", 0)


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the tables of times and of bytes."""
    prefill = [
        [
            row["model"],
            f"{row['n_tokens']:,}",
            f"{row['n_repeats']}",
            *(milliseconds(row[name]) for name in ("without_s", "with_s", "flush_s")),
            f"{row['slower_by']:+.1%}",
        ]
        for row in result["prefill"]
    ]
    written = [
        [
            row["model"],
            row["case"],
            *(f"{row[name]:,}" for name in ("n_tokens", "n_new_tokens", "new_kv_bytes", "written_bytes")),
            "" if row["written_ratio"] is None else f"{row['written_ratio']:.3f}",
        ]
        for row in result["written"]
    ]
    return [
        Table(
            "Prefill of new prompts, with and without storing",
            ["model", "prompt", "pairs", "without", "with", "flush", "slower by"],
            prefill,
        ),
        Table(
            "Bytes written by a prefill",
            ["model", "case", "prompt", "new tokens", "new KV", "written", "written / new"],
            written,
        ),
    ]
