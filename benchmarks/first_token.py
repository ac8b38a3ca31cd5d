"""Time to the first token behind a stored prefix: cold, from mlx-lm's two ways of keeping caches, and from a bank.

A time is all from the prompt's token ids to the evaluated logits of its last token, with 16 tokens behind the prefix.
The page cache is warm: files were just written.

Result: `{"rows": [...]}`, a row for each model, prefix length and contender:

    model, n_tokens (of the prefix)
    contender ("mlx-lm LRU" is its `LRUPromptCache`; "bank, auto" may choose to compute instead of loading)
    median_s, n_repeats, seconds (one a repeat)
    cached_tokens (that the contender did not compute)
    cold_ratio (how many times faster than cold, the median over rounds)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, load_prompt_cache, make_prompt_cache, save_prompt_cache

from benchmarks.measuring import N_SUFFIX, compute, interleave, paired_ratio, random_token_ids, say
from benchmarks.models import BenchModel
from benchmarks.report import Table, milliseconds
from prefixbank import BankedModel, PrefixBank

__all__ = ["CONTENDERS", "DEFAULT_TOKENS", "run", "tables"]

DEFAULT_TOKENS = (16, 64, 256, 1024, 2048, 4096)

COLD = "cold"
MLX_LM_FILE = "mlx-lm file"
MLX_LM_LRU = "mlx-lm LRU"
BANK_DISK = "bank, disk"
BANK_AUTO = "bank, auto"
BANK_MEMORY = "bank, memory"
BANK_CHECKOUT = "bank, checkout"
CONTENDERS = (COLD, MLX_LM_FILE, MLX_LM_LRU, BANK_DISK, BANK_AUTO, BANK_MEMORY, BANK_CHECKOUT)

BANKS: dict[str, dict[str, Any]] = {
    BANK_DISK: {"memory_bytes": 0, "load": "always"},
    BANK_AUTO: {"memory_bytes": 0},
    BANK_MEMORY: {"memory_bytes": "8GB", "load": "always"},
    BANK_CHECKOUT: {"memory_bytes": "8GB", "load": "always"},
}
"""How the one bank folder is opened for each contender."""

SHORT_S, MORE_REPEATS = 2.0, 5
"""Where cold is quick there are more rounds, up to so many times as many: as many as it takes this time for."""

LONG_S = 30.0
"""Where cold is slow it takes part in the first rounds only: in as many as fit into this time, in one at least."""


def run(models: Sequence[BenchModel], tokens: Sequence[int], repeats: int, folder: Path | None) -> dict[str, Any]:
    """Measure all contenders on each model and prefix length; banks and files are made below `folder`."""
    rows: list[dict[str, Any]] = []
    for model in models:
        with TemporaryDirectory(dir=folder) as temporary, ExitStack() as stack:
            place = Path(temporary)
            banks = {
                name: stack.enter_context(PrefixBank.open(place / "bank", **options)) for name, options in BANKS.items()
            }
            banked = {name: model.attach(bank) for name, bank in banks.items()}
            banked[BANK_AUTO].prefill(random_token_ids(N_SUFFIX, seed=0))  # what the first run of a process costs
            for n_tokens in tokens:
                if model.max_tokens is not None and n_tokens + N_SUFFIX > model.max_tokens:
                    say(f"first-token: {model.label} ends before {n_tokens} tokens")
                    continue
                say(f"first-token: {model.label}, {n_tokens} tokens")
                prompt = random_token_ids(n_tokens + N_SUFFIX, seed=n_tokens)
                # The bank that may choose does the storing: so it has seen what computing costs, twice.
                banked[BANK_AUTO].prefill(random_token_ids(n_tokens + 1, seed=-n_tokens))
                banks[BANK_AUTO].flush()  # or the queue may have no room for the next
                started_at = time.perf_counter()
                live = banked[BANK_AUTO].prefill(prompt[: n_tokens + 1]).prompt_cache
                prefill_s = time.perf_counter() - started_at
                banks[BANK_AUTO].flush()  # the others read what it stored
                contenders = _contenders(model, banked, prompt, live, place / "prompt-cache.safetensors")
                del live
                rows += _measure(contenders, model.label, n_tokens, repeats, prefill_s)
                del contenders
                mx.clear_cache()
    return {"rows": rows}


def _contenders(
    model: BenchModel, banked: Mapping[str, BankedModel], prompt: list[int], live: list[Any], file: Path
) -> dict[str, Callable[[], int]]:
    """Return what each contender does with a prompt whose prefix is in `live` and in the banks.

    Each returns how many tokens it did not compute.
    """
    n_tokens = len(prompt) - N_SUFFIX
    save_prompt_cache(str(file), live)
    lru = LRUPromptCache()
    lru.insert_cache(model.label, prompt[:n_tokens], live)

    def cold() -> int:
        compute(model.model, prompt, make_prompt_cache(model.model))
        return 0

    def mlx_lm_file() -> int:
        prompt_cache = load_prompt_cache(str(file))
        mx.eval([layer_cache.state for layer_cache in prompt_cache])
        compute(model.model, prompt[n_tokens:], prompt_cache)
        return n_tokens

    def mlx_lm_lru() -> int:
        prompt_cache, rest = lru.fetch_nearest_cache(model.label, prompt)
        compute(model.model, rest, prompt_cache)
        return len(prompt) - len(rest)

    def resolve(name: str) -> int:
        resolved = banked[name].resolve(prompt)
        compute(model.model, resolved.rest, resolved.prompt_cache)
        return resolved.cached_tokens

    def checkout() -> int:
        with banked[BANK_CHECKOUT].checkout(prompt) as lease:
            compute(model.model, lease.rest, lease.prompt_cache)
            return lease.cached_tokens

    return {
        COLD: cold,
        MLX_LM_FILE: mlx_lm_file,
        MLX_LM_LRU: mlx_lm_lru,
        **{name: partial(resolve, name) for name in (BANK_DISK, BANK_AUTO, BANK_MEMORY)},
        BANK_CHECKOUT: checkout,
    }


def _measure(
    contenders: Mapping[str, Callable[[], int]], label: str, n_tokens: int, repeats: int, prefill_s: float
) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    cached_tokens = {name: contend() for name, contend in contenders.items() if name != COLD}
    rounds = max(repeats, min(MORE_REPEATS * repeats, int(SHORT_S / prefill_s)))
    cold_rounds = max(min(rounds, int(LONG_S / prefill_s)), 1)
    seconds = interleave(contenders, {name: cold_rounds if name == COLD else rounds for name in contenders})
    return [
        {
            "model": label,
            "n_tokens": n_tokens,
            "contender": name,
            "median_s": median(times),
            "n_repeats": len(times),
            "seconds": times,
            "cached_tokens": cached_tokens.get(name, 0),
            "cold_ratio": paired_ratio(seconds[COLD], times),
        }
        for name, times in seconds.items()
    ]


RATIOS = {
    "cold/disk": (COLD, BANK_DISK),
    "file/disk": (MLX_LM_FILE, BANK_DISK),
    "LRU/memory": (MLX_LM_LRU, BANK_MEMORY),
    "auto/cold": (BANK_AUTO, COLD),
}
"""The table's ratios: one contender's time by another's."""


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return a table for each model."""
    by_model: dict[str, dict[int, dict[str, Any]]] = {}
    for row in result["rows"]:
        by_model.setdefault(row["model"], {}).setdefault(row["n_tokens"], {})[row["contender"]] = row
    header = ["prefix", *CONTENDERS, *RATIOS, "rounds (cold)"]
    found = []
    for label, by_length in by_model.items():
        lines = []
        for n_tokens, row in by_length.items():
            times = [milliseconds(row[name]["median_s"]) for name in CONTENDERS]
            ratios = [paired_ratio(row[one]["seconds"], row[other]["seconds"]) for one, other in RATIOS.values()]
            rounds = f"{row[BANK_DISK]['n_repeats']} ({row[COLD]['n_repeats']})"
            lines.append([f"{n_tokens:,}", *times, *(f"{ratio:.2f}" for ratio in ratios), rounds])
        computed = [f"{n:,}" for n, row in by_length.items() if row[BANK_AUTO]["cached_tokens"] == 0]
        notes = ["Times are medians, ratios (one's time by the other's) medians over the rounds that both ran."]
        if computed:
            notes.append(f"{BANK_AUTO!r} chose to compute at {', '.join(computed)} tokens.")
        found.append(Table(f"Time to the first token, {label}", header, lines, notes))
    return found
