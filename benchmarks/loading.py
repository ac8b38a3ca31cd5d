"""Loading a prefix from disk, without any arithmetic: a model that only keeps KV, 32 layers x 8 heads x 128, float16.

Result, three lists of rows:

`hits`: a prefix loaded and 16 tokens appended, for each prefix length, contender, and state of the allocators ("cold":
all freed memory was given back before; "warm": right after a run of the same contender, whose freed memory can be used
again, as in a server that answers prompt after prompt):

    n_tokens, contender, allocator, n_repeats
    load_s, append_s, total_s (medians), seconds (totals, one a repeat)
    n_bytes (of the prefix's KV), bytes_per_s (n_bytes by load_s)
    times_faster_than_file (in total; the median over rounds)
    share_of_bare_read (the bare read's time by load_s; the median over rounds)

`checkout`: a prefix lent from memory and given back, 32 layers x 1 head x 32: n_tokens, n_repeats, checkout_s,
give_back_s (medians), same_memory (whether each time the very same buffers were lent).

`peak_memory`: what one hit takes in a new process; `peak_memory` says which fields.
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
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from benchmarks import peak_memory
from benchmarks.bare_read import BareRead
from benchmarks.measuring import N_SUFFIX, compute, give_memory_back, paired_ratio, random_token_ids, say
from benchmarks.models import BenchModel, kv_only
from benchmarks.report import Table, milliseconds
from prefixbank import PrefixBank

__all__ = ["CHECKOUT_TOKENS", "DEFAULT_TOKENS", "run", "tables"]

DEFAULT_TOKENS = (2000, 2048)
"""mlx-lm's files hold whole steps of 256 tokens: behind 2,000 the suffix finds room, behind 2,048 the cache grows."""

CHECKOUT_TOKENS = (256, 1024, 4096, 16384, 32768)
CHECKOUT_REPEATS = 20

BARE_READ = "bare read"
MLX_LM_FILE = "mlx-lm file"
BANKS = {f"bank, verify={verify}": verify for verify in ("never", "once", "always")}

Times = dict[tuple[str, str], list[float]]
"""Seconds, one figure a repeat, by contender and state of the allocator."""


def run(
    tokens: Sequence[int],
    repeats: int,
    folder: Path | None,
    *,
    shape: tuple[int, int, int] = (32, 8, 128),
    checkout_tokens: Sequence[int] = CHECKOUT_TOKENS,
) -> dict[str, Any]:
    """Measure hits, checkouts and peak memory, with KV of `shape` (layers, heads, width)."""
    model = kv_only(*shape)
    hits: list[dict[str, Any]] = []
    peaks: list[dict[str, Any]] = []
    for n_tokens in tokens:
        say(f"loading: {n_tokens} tokens")
        with TemporaryDirectory(dir=folder) as temporary:
            bank_root, file = Path(temporary) / "bank", Path(temporary) / "prompt-cache.safetensors"
            prompt = random_token_ids(n_tokens + N_SUFFIX, seed=n_tokens)
            n_bytes = _store(model, bank_root, file, prompt[:n_tokens])
            hits += _measure_hits(model, bank_root, file, prompt, n_bytes, repeats)
            peaks += [peak_memory.measure(shape, bank_root, file, n_tokens, name) for name in peak_memory.CONTENDERS]
    say("loading: checkout")
    return {"hits": hits, "checkout": _measure_checkout(checkout_tokens, folder), "peak_memory": peaks}


def _store(model: BenchModel, bank_root: Path, file: Path, prefix: list[int]) -> int:
    """Store a prefix in a new bank and in a file of mlx-lm's; returns the bytes of its KV."""
    with PrefixBank.open(bank_root) as bank:
        llm = model.attach(bank)
        prompt_cache = model.model.make_cache()
        compute(model.model, prefix, prompt_cache)
        llm.put(prefix, prompt_cache)
        save_prompt_cache(str(file), prompt_cache)
        return llm.layout.data_bytes(len(prefix))


def _measure_hits(
    model: BenchModel, bank_root: Path, file: Path, prompt: list[int], n_bytes: int, repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each contender and state of the allocator."""
    n_tokens = len(prompt) - N_SUFFIX
    with ExitStack() as stack:
        banks = {
            name: stack.enter_context(PrefixBank.open(bank_root, memory_bytes=0, verify=verify, load="always"))
            for name, verify in BANKS.items()
        }
        llms = {name: model.attach(bank) for name, bank in banks.items()}
        bare_read = stack.enter_context(BareRead(sorted((bank_root / "shards").rglob("*.safetensors"))))

        def from_file() -> list[Any]:
            prompt_cache = load_prompt_cache(str(file))
            mx.eval([layer_cache.state for layer_cache in prompt_cache])
            return prompt_cache

        def from_bank(name: str) -> list[Any]:
            resolved = llms[name].resolve(prompt)
            if resolved.cached_tokens != n_tokens:
                raise RuntimeError(f"{name} loaded {resolved.cached_tokens} of {n_tokens} tokens")
            return resolved.prompt_cache

        contenders = {BARE_READ: bare_read, MLX_LM_FILE: from_file} | {name: partial(from_bank, name) for name in llms}
        for load in contenders.values():  # files opened, digests proven once
            load()
        loads, totals = _time_in_turn(contenders, partial(compute, model.model, prompt[n_tokens:]), repeats)
    return [
        {
            "n_tokens": n_tokens,
            "contender": name,
            "allocator": allocator,
            "n_repeats": repeats,
            "load_s": (load_s := median(load_times)),
            "append_s": median(total - load for total, load in zip(totals[name, allocator], load_times, strict=True)),
            "total_s": median(totals[name, allocator]),
            "seconds": totals[name, allocator],
            "n_bytes": n_bytes,
            "bytes_per_s": n_bytes / load_s,
            "times_faster_than_file": paired_ratio(totals[MLX_LM_FILE, allocator], totals[name, allocator]),
            "share_of_bare_read": paired_ratio(loads[BARE_READ, allocator], load_times),
        }
        for (name, allocator), load_times in loads.items()
    ]


def _time_in_turn(
    contenders: Mapping[str, Callable[[], list[Any] | None]], append: Callable[[list[Any]], None], repeats: int
) -> tuple[Times, Times]:
    """Return the seconds of loading, and of loading with appending, as `measuring.interleave` takes turns."""
    names = list(contenders)
    loads: Times = {(name, allocator): [] for allocator in ("cold", "warm") for name in names}
    totals: Times = {both: [] for both in loads}
    for number in range(repeats):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            give_memory_back()
            for allocator in ("cold", "warm"):
                started_at = time.perf_counter()
                prompt_cache = contenders[name]()
                loads[name, allocator].append(time.perf_counter() - started_at)
                if prompt_cache is not None:
                    append(prompt_cache)
                totals[name, allocator].append(time.perf_counter() - started_at)
                del prompt_cache
    return loads, totals


def _measure_checkout(tokens: Sequence[int], folder: Path | None) -> list[dict[str, Any]]:
    """Return a row for each prefix length. Narrow heads: what is copied by mistake shows in the buffers' addresses."""
    model = kv_only(32, 1, 32)
    rows = []
    with (
        TemporaryDirectory(dir=folder) as temporary,
        PrefixBank.open(Path(temporary) / "bank", memory_bytes="4GB") as bank,
    ):
        llm = model.attach(bank)
        for n_tokens in tokens:
            prompt = random_token_ids(n_tokens + N_SUFFIX, seed=n_tokens)
            prompt_cache = model.model.make_cache()
            compute(model.model, prompt[:n_tokens], prompt_cache)
            llm.put(prompt[:n_tokens], prompt_cache)
            taken: list[float] = []
            given_back: list[float] = []
            addresses = []
            for _ in range(CHECKOUT_REPEATS + 1):
                started_at = time.perf_counter()
                with llm.checkout(prompt) as lease:
                    taken.append(time.perf_counter() - started_at)
                    compute(model.model, lease.rest, lease.prompt_cache)
                    addresses.append([_address(layer_cache.keys) for layer_cache in lease.prompt_cache])
                    started_at = time.perf_counter()
                given_back.append(time.perf_counter() - started_at)
            rows.append(
                {
                    "n_tokens": n_tokens,
                    "n_repeats": CHECKOUT_REPEATS,
                    "checkout_s": median(taken[1:]),  # the first one loaded it
                    "give_back_s": median(given_back[1:]),
                    "same_memory": all(lent == addresses[0] for lent in addresses),
                }
            )
    return rows


def _address(array: mx.array) -> int:
    """Return where an array lies in memory."""
    return int(np.array(array, copy=False).ctypes.data)


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the tables of hits, checkouts and peak memory."""
    hits = [
        [
            f"{row['contender']}, {row['allocator']}",
            f"{row['n_tokens']:,}",
            *(milliseconds(row[name]) for name in ("load_s", "append_s", "total_s")),
            f"{row['bytes_per_s'] / 2**30:.2f} GiB/s",
            f"{row['times_faster_than_file']:.2f}",
            f"{row['share_of_bare_read']:.2f}",
        ]
        for row in result["hits"]
    ]
    checkouts = [
        [
            f"{row['n_tokens']:,}",
            milliseconds(row["checkout_s"]),
            milliseconds(row["give_back_s"]),
            "yes" if row["same_memory"] else "no",
        ]
        for row in result["checkout"]
    ]
    peaks = [
        [row["contender"], f"{row['n_tokens']:,}", f"{row['kv_bytes'] / 2**20:,.1f} MiB"]
        + [f"{row[name]:.2f}" for name in ("rss_ratio", "mlx_ratio")]
        for row in result["peak_memory"]
    ]
    return [
        Table(
            "Loading from disk and appending 16 tokens (KV only, nothing computed)",
            ["contender, allocator", "prefix", "load", "append", "total", "rate", "file / this", "bare read / load"],
            hits,
        ),
        Table("Checkout of a prefix that is in memory", ["prefix", "checkout", "give back", "same memory"], checkouts),
        Table("Peak memory of a hit, by the prefix's KV", ["contender", "prefix", "KV", "resident", "mlx"], peaks),
    ]
