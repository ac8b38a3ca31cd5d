"""Batches of queries behind one prefix: mlx-lm's merged caches, which hold it once a query, and rows that all share.

Both run through mlx-lm's `BatchGenerator`, with 8 tokens a query behind the prefix, all read together. What
`generate_many` would choose by its own measurements is said beside it.

Result: `{"rows": [...], "scores": [...]}`. A row for each model, batch, prefix length
and contender ("merged", "shared"):

    model, n_queries, n_tokens (of the prefix), contender
    first_s (to the first token of all queries), step_s (of each later token): medians
    queries_per_s (of 32 tokens each)
    first_seconds, step_seconds (one a round)
    peak_bytes (what MLX held at most above the model and the prefix; the median)
    is_chosen (whether "auto" shares here)

`scores` has a row for each model and contender, of 4 choices behind 64 queries on one prefix: contender ("mlx-lm" is
`mlx_lm.evaluate`'s loglikelihood, if lm-eval is installed; "one by one" `score`, the others `score_many`), n_tokens,
median_s, seconds, queries_per_s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.measuring import compute, interleave, paired_ratio, random_token_ids, say
from benchmarks.models import BenchModel
from benchmarks.report import Table, milliseconds
from prefixbank import PrefixBank
from prefixbank.kvcache.probe import CacheOptions, is_on_gpu
from prefixbank.kvcache.sharedattention import shared_attention
from prefixbank.kvcache.sharing import Sharing

__all__ = ["DEFAULT_QUERIES", "DEFAULT_TOKENS", "run", "tables"]

DEFAULT_QUERIES = (1, 4, 16, 64)
DEFAULT_TOKENS = (256, 1024, 4096)
N_OWN = 8
N_STEPS = 8
N_ANSWER = 32

MERGED, SHARED = "merged", "shared"

N_SCORED, N_CHOICES, CHOICE_TOKENS, QUERY_TOKENS = 64, 4, 3, 32
MAX_MERGED_PART = 0.4
"""Merged caches that would take more than this part of the memory are not measured."""


@dataclass(slots=True)
class _Round:
    first_s: float
    step_s: float
    peak_bytes: int


def run(
    models: Sequence[BenchModel],
    queries: Sequence[int],
    lengths: Sequence[int],
    repeats: int,
    folder: Path | None,
    *,
    n_scored: int = N_SCORED,
) -> dict[str, Any]:
    """Measure all models, batches and prefix lengths, then scores on the second-longest prefix."""
    rows: list[dict[str, Any]] = []
    scores: list[dict[str, Any]] = []
    for model in models:
        sharing = Sharing(model.model, CacheOptions())
        if not sharing.leaves:
            say(f"{model.label}: no layer can share")
            continue
        for n_tokens in lengths:
            prompt_cache = make_prompt_cache(model.model)
            compute(model.model, random_token_ids(n_tokens, "prefix"), prompt_cache)
            for n_queries in queries:
                say(f"{model.label}: {n_queries} queries behind {n_tokens:,} tokens")
                rows += _rows(model, sharing, prompt_cache, n_queries, n_tokens, repeats)
        scores += _scores(model, sorted(lengths)[-2:][0], n_scored, repeats, folder)
    return {"rows": rows, "scores": scores}


def _rows(
    model: BenchModel,
    sharing: Sharing,
    prompt_cache: list[Any],
    n_queries: int,
    n_tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    rounds: dict[str, list[_Round]] = {MERGED: [], SHARED: []}
    n_bytes = sum(cache.nbytes for cache in prompt_cache) * n_queries
    contenders = [MERGED, SHARED] if n_bytes <= _memory_bytes() * MAX_MERGED_PART else [SHARED]
    for number in range(repeats + 1):
        for name in contenders if number % 2 else reversed(contenders):
            measured = _decode(model, sharing if name == SHARED else None, prompt_cache, n_queries, n_tokens)
            if number:  # the first round warms up
                rounds[name].append(measured)
    least = sharing.least_tokens(n_queries, N_ANSWER)
    return [
        {
            "model": model.label,
            "n_queries": n_queries,
            "n_tokens": n_tokens,
            "contender": name,
            "first_s": (first_s := median(r.first_s for r in rounds[name])),
            "step_s": (step_s := median(r.step_s for r in rounds[name])),
            "queries_per_s": n_queries / (first_s + step_s * (N_ANSWER - 1)),
            "first_seconds": [r.first_s for r in rounds[name]],
            "step_seconds": [r.step_s for r in rounds[name]],
            "peak_bytes": int(median(r.peak_bytes for r in rounds[name])),
            "is_chosen": least is not None and least <= n_tokens,
        }
        for name in contenders
    ]


def _memory_bytes() -> int:
    """Return the memory of what MLX computes on."""
    on_gpu = int(mx.device_info().get("total_memory", 0)) if is_on_gpu() else 0
    return on_gpu or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _decode(
    model: BenchModel, sharing: Sharing | None, prompt_cache: list[Any], n_queries: int, n_tokens: int
) -> _Round:
    """Read the queries and decode a few tokens; with `sharing` behind shared rows."""
    if sharing is None:
        caches = [prompt_cache] * n_queries  # merging copies them
    else:
        prefix = sharing.extended(sharing.empty, prompt_cache, n_tokens)
        caches = [sharing.behind(prefix, prompt_cache, n_tokens) for _ in range(n_queries)]
    mx.clear_cache()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    generator = BatchGenerator(model.model, completion_batch_size=n_queries, prefill_batch_size=n_queries)
    with closing(generator), shared_attention(model.model) if sharing else nullcontext():
        started_at = time.perf_counter()
        generator.insert(
            [random_token_ids(N_OWN, f"query {n}") for n in range(n_queries)],
            [N_STEPS + 2] * n_queries,
            caches=caches,
        )
        generator.next_generated()
        first_s = time.perf_counter() - started_at
        started_at = time.perf_counter()
        for _ in range(N_STEPS):
            generator.next_generated()
        mx.synchronize(generation_stream)
        step_s = (time.perf_counter() - started_at) / N_STEPS
    return _Round(first_s, step_s, mx.get_peak_memory() - held)


# --- scores


def _scores(model: BenchModel, n_tokens: int, n_scored: int, repeats: int, folder: Path | None) -> list[dict[str, Any]]:
    say(f"{model.label}: {N_CHOICES} choices behind {n_scored} queries on {n_tokens:,} tokens")
    prefix = random_token_ids(n_tokens, "scored prefix")
    prompts = [prefix + random_token_ids(QUERY_TOKENS, f"scored {n}") for n in range(n_scored)]
    choices = [random_token_ids(CHOICE_TOKENS, f"choice {n}") for n in range(N_CHOICES)]
    with TemporaryDirectory(dir=folder) as root, PrefixBank.open(Path(root) / "bank", memory_bytes="4GB") as bank:
        llm = model.attach(bank)
        llm.warm(prefix)
        contenders: dict[str, Callable[[], object]] = {
            "one by one": lambda: [llm.score(prompt, choices) for prompt in prompts],
            "merged": lambda: llm.score_many(prompts, choices, shared_attention="off"),
            "shared": lambda: llm.score_many(prompts, choices, shared_attention="always"),
            "auto": lambda: llm.score_many(prompts, choices),
        }
        if (plain := _loglikelihood(model, prompts, choices)) is not None:
            contenders = {"mlx-lm": plain, **contenders}
        contenders["auto"]()
        n_rounds = {name: min(repeats, 3) if name in ("mlx-lm", "one by one") else repeats for name in contenders}
        seconds = interleave(contenders, n_rounds)
    return [
        {
            "model": model.label,
            "contender": name,
            "n_tokens": n_tokens,
            "n_queries": n_scored,
            "median_s": median(times),
            "seconds": times,
            "queries_per_s": n_scored / median(times),
        }
        for name, times in seconds.items()
    ]


def _loglikelihood(
    model: BenchModel, prompts: Sequence[list[int]], choices: Sequence[list[int]]
) -> Callable[[], object] | None:
    """Return mlx_lm.evaluate's way of scoring the same token ids; None without lm-eval."""
    try:
        from mlx_lm.evaluate import MLXLM
    except ImportError:
        return None

    class Tokens(MLXLM):  # type: ignore[misc]
        """`MLXLM` for texts that are token ids written out."""

        def __init__(self) -> None:
            self._model, self._max_tokens = model.model, 1 << 20

        def _tokenize(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
            return [tuple(map(int, text.split())) for text in texts]

    class Request:
        def __init__(self, prompt: Sequence[int], choice: Sequence[int]) -> None:
            self.args = " ".join(map(str, prompt)), " " + " ".join(map(str, choice))

    requests = [Request(prompt, choice) for prompt in prompts for choice in choices]
    plain = Tokens()
    return lambda: plain.loglikelihood(requests)


# --- tables


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the tables of batches and of scores for each model."""
    by_model: dict[str, dict[tuple[int, int], dict[str, dict[str, Any]]]] = {}
    for row in result["rows"]:
        of_model = by_model.setdefault(row["model"], {})
        of_model.setdefault((row["n_queries"], row["n_tokens"]), {})[row["contender"]] = row
    return [_batches_table(label, rows) for label, rows in by_model.items()] + [
        _scores_table(label, [row for row in result["scores"] if row["model"] == label]) for label in by_model
    ]


def _batches_table(label: str, rows: Mapping[tuple[int, int], Mapping[str, dict[str, Any]]]) -> Table:
    header = ["queries", "prefix", "first merged", "shared", "ratio", "step merged", "shared", "ratio"]
    header += ["queries/s", "", "peak merged", "shared", "ratio", "auto"]
    lines = []
    for (n_queries, n_tokens), found in rows.items():
        shared, merged = found[SHARED], found.get(MERGED)
        cells = [f"{n_queries:,}", f"{n_tokens:,}"]
        for name in ("first", "step"):
            times = [milliseconds(one[f"{name}_s"]) if one else "-" for one in (merged, shared)]
            ratio = paired_ratio(merged[f"{name}_seconds"], shared[f"{name}_seconds"]) if merged else None
            cells += [*times, f"{ratio:.2f}" if ratio else "-"]
        cells += [f"{one['queries_per_s']:.1f}" if one else "-" for one in (merged, shared)]
        cells += [f"{one['peak_bytes'] / 2**20:,.0f} MiB" if one else "-" for one in (merged, shared)]
        cells.append(f"{shared['peak_bytes'] / merged['peak_bytes']:.2f}" if merged else "-")
        lines.append([*cells, SHARED if shared["is_chosen"] else MERGED])
    notes = ["Time ratios say how many times faster shared is (medians over rounds); memory's what part it takes."]
    return Table(f"Queries behind one prefix, {label}", header, lines, notes)


def _scores_table(label: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    base = rows[0]
    lines = [
        [
            row["contender"],
            milliseconds(row["median_s"]),
            f"{row['queries_per_s']:.1f}",
            f"{paired_ratio(base['seconds'], row['seconds']):.2f}",
        ]
        for row in rows
    ]
    title = f"{N_CHOICES} choices behind {base['n_queries']} queries on {base['n_tokens']:,} tokens, {label}"
    return Table(title, ["contender", "time", "queries/s", f"times {base['contender']}"], lines)
