"""How an index grows: opening, matching, noting uses and pruning with 10^3 to 10^6 chunks.

    python -m benchmarks.index_growth [--chunks 1000 10000 100000 1000000] [--matches 500] [--json]

Each bank is a real one in a temporary folder: chains of 128 chunks of 256 token ids in one namespace, stored one after
another; all begin with the same token, as prompts do. Their shards are empty files: matching and opening read none, and
pruning deletes them. The page cache is warm. A million chunks take 2.3 GB and some minutes.

* open: `PrefixBank.open` in a process that has imported all, without and with a budget (that holds).
* match: a prompt of 32,768 stored tokens and 32 others, of a chain taken at random.
* again: the same with 32 other tokens behind, given the chunks of the match before.
* unknown: a prompt of 32,800 tokens of which only the first is known, from as many chains as are looked at (256).
* 64 uses: noting and writing down that 64 chains, taken at random, were used.
* prune: of a tenth of the chunks, by budget: planning, rows and files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import sqlalchemy as sa

from prefixbank import resolver
from prefixbank.bank import PrefixBank
from prefixbank.chunking import TOKEN_BYTES, first_token, full_chunks, root_key
from prefixbank.layout import CacheLayout, LayerLayout, RowArray
from prefixbank.rootfile import INDEX_FILE
from prefixbank.schema import bank_state, chunks
from prefixbank.values import ChunkRecord, Match, Namespace

CHUNK_TOKENS = 256
CHAIN_CHUNKS = 128
QUERY_TOKENS = 32
SIZES = (1_000, 10_000, 100_000, 1_000_000)
_UNKNOWN = 10**9  # the number of the first chain that no bank holds
_BEGINNING = (1).to_bytes(TOKEN_BYTES, "little")
_CHAIN_BYTES = CHAIN_CHUNKS * CHUNK_TOKENS * TOKEN_BYTES
_CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES
_CHAINS_PER_TRANSACTION = 400
_LAYOUT = CacheLayout((LayerLayout("kv", (), (RowArray("keys", "F16", 3, 64), RowArray("values", "F16", 3, 64))),) * 30)
_DISK_BYTES = 5_902_336  # of 256 tokens of that layout, SmolLM2-135M in half precision


def chain_ids(number: int) -> bytes:
    """Return the packed token ids of a chain; the same for the same number. All begin with the same token."""
    return _BEGINNING + random.Random(number).randbytes(_CHAIN_BYTES - TOKEN_BYTES)


def namespace_of(bank: PrefixBank) -> Namespace:
    """Return the one namespace that all chunks are of."""
    fingerprint = "1d" * 32
    wanted = Namespace(0, root_key(fingerprint), fingerprint, "", "growth", _LAYOUT.to_json(), 1)
    return bank._session.namespace(wanted)


def build(root: Path, n_chunks: int) -> None:
    """Make a bank of so many chunks at `root`, with an empty file for each."""
    with PrefixBank.open(root, chunk_tokens=CHUNK_TOKENS, durability="fast") as bank:
        namespace = namespace_of(bank)
        n_chains = -(-n_chunks // CHAIN_CHUNKS)
        for low in range(0, n_chains, _CHAINS_PER_TRANSACTION):
            with bank._session.index.writing() as tx:
                tx.exec_driver_sql("PRAGMA cache_size=-1000000")
                for number in range(low, min(low + _CHAINS_PER_TRANSACTION, n_chains)):
                    rows = chain_rows(namespace, number)[: n_chunks - number * CHAIN_CHUNKS]
                    tx.execute(sa.insert(chunks), rows)
                    for row in rows:
                        path = bank._session.shards.path_of(row["file_name"])
                        if not path.parent.is_dir():
                            path.parent.mkdir(mode=0o700)
                        path.touch(0o600)
                        os.utime(path, (1_700_000_000, 1_700_000_000))  # a prune asks the index about old files
                    tick_and_bytes = {
                        "tick": number + 1,
                        "disk_bytes": bank_state.c.disk_bytes + len(rows) * _DISK_BYTES,
                    }
                    tx.execute(sa.update(bank_state).values(tick_and_bytes))


def chain_rows(namespace: Namespace, number: int) -> list[dict[str, Any]]:
    """Return the rows of one chain, as a store would have put them."""
    token_ids = chain_ids(number)
    random_part = random.Random(-number - 1)
    rows = []
    parent_key = None
    for start, key in full_chunks(namespace.root_key, token_ids, CHUNK_TOKENS):
        ids = token_ids[start * TOKEN_BYTES :][:_CHUNK_BYTES]
        rows.append(
            {
                "key": key,
                "parent_key": parent_key,
                "namespace_id": namespace.id,
                "start": start,
                "n_tokens": CHUNK_TOKENS,
                "first_token": first_token(ids),
                "token_ids": ids,
                "file_name": f"{key.hex()}-{random_part.randbytes(4).hex()}.safetensors",
                "data_offset": 12_288,
                "n_bytes": _DISK_BYTES - 100,
                "disk_bytes": _DISK_BYTES,
                "digest": random_part.randbytes(16),
                "has_state": False,
                "last_used": number + 1,
                "last_used_at": 1_700_000_000 + number,
                "hits": 0,
                "created_at": 1_700_000_000 + number,
            }
        )
        parent_key = key
    return rows


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that it takes."""
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def warm(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, and the 99th percentile."""
    return {"p50_s": median(seconds), "p99_s": quantiles(seconds, n=100)[98]}


def measure_open(root: Path, repeats: int = 9) -> dict[str, float]:
    """Return median seconds of opening a bank, without and with a budget."""

    def times(**options: Any) -> list[float]:
        seconds = []
        for _ in range(repeats + 1):
            started_at = time.perf_counter()
            bank = PrefixBank.open(root, **options)
            seconds.append(time.perf_counter() - started_at)
            bank.close()
        return seconds[1:]

    return {"open_s": median(times()), "open_with_budget_s": median(times(max_bytes=1 << 60))}


def measure_match(bank: PrefixBank, n_chains: int, n_matches: int) -> dict[str, dict[str, float]]:
    """Return how long matches take: of stored prompts, of those whose chunks are known, and of unknown prompts."""
    namespace = namespace_of(bank)
    choose = random.Random(0)
    seconds: dict[str, list[float]] = {"match": [], "match_again": [], "match_unknown": []}

    def match(name: str, prompt: bytes, known: Sequence[ChunkRecord] = ()) -> Match:
        token_ids = prompt + choose.randbytes(QUERY_TOKENS * TOKEN_BYTES)
        limit = len(token_ids) // TOKEN_BYTES - 1
        started_at = time.perf_counter()
        found = resolver.match(bank._session.index, namespace, token_ids, CHUNK_TOKENS, limit, known)
        seconds[name].append(time.perf_counter() - started_at)
        return found

    for number in range(n_matches + 1):
        prompt = chain_ids(choose.randrange(n_chains))
        found = match("match", prompt)
        assert len(found.chunks) == CHAIN_CHUNKS
        assert match("match_again", prompt, found.chunks) == found
        assert match("match_unknown", chain_ids(_UNKNOWN + number)).n_tokens == 1
    return {name: spread(of_name[1:]) for name, of_name in seconds.items()}


def measure_uses(bank: PrefixBank, n_chains: int, repeats: int = 5) -> dict[str, float]:
    """Return median seconds of noting that 64 chains were used, and of writing that down."""
    namespace = namespace_of(bank)
    choose = random.Random(1)
    seconds = []
    for _ in range(repeats):
        prompts = [chain_ids(choose.randrange(n_chains)) for _ in range(64)]
        uses = [bank._session.match(namespace, prompt, CHAIN_CHUNKS * CHUNK_TOKENS) for prompt in prompts]
        started_at = time.perf_counter()
        for use in uses:
            bank._session.note_use(use)
        bank.flush()
        seconds.append(time.perf_counter() - started_at)
    return {"uses_s": median(seconds)}


def measure_prune(bank: PrefixBank, n_chunks: int) -> dict[str, float]:
    """Return the seconds of a dry run that would remove a tenth of the chunks, and of the prune that removes it."""
    kept_bytes = (n_chunks - n_chunks // 10) * _DISK_BYTES
    plan_s = timed(lambda: bank.prune(max_bytes=kept_bytes, dry_run=True))
    started_at = time.perf_counter()
    removed = bank.prune(max_bytes=kept_bytes)
    prune_s = time.perf_counter() - started_at
    assert len(removed.chunks) == n_chunks // 10
    return {"plan_s": plan_s, "prune_s": prune_s}


def measure(n_chunks: int, root: Path, n_matches: int) -> dict[str, Any]:
    """Make a bank of so many chunks at `root` and return what was measured."""
    build_s = timed(lambda: build(root, n_chunks))
    row: dict[str, Any] = {"n_chunks": n_chunks, "build_s": build_s, "index_bytes": (root / INDEX_FILE).stat().st_size}
    n_chains = n_chunks // CHAIN_CHUNKS
    row |= measure_open(root)
    warm(root / INDEX_FILE)
    with PrefixBank.open(root) as bank:
        row |= measure_match(bank, n_chains, n_matches)
        row |= measure_uses(bank, n_chains)
        row |= measure_prune(bank, n_chunks)
        row["index_bytes_after_prune"] = (root / INDEX_FILE).stat().st_size
    return row


def run(sizes: Sequence[int] = SIZES, n_matches: int = 500) -> list[dict[str, Any]]:
    """Measure banks of these numbers of chunks, one after another."""
    rows = []
    for n_chunks in sizes:
        print(f"index of {n_chunks:,} chunks ...", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="prefixbank-growth-") as temporary:
            rows.append(measure(n_chunks, Path(temporary) / "bank", n_matches))
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return what was measured as text, one line a size."""
    names = ("match", "match_again", "match_unknown")
    header = f"{'chunks':>9} {'index':>9} {'open':>8} {'+budget':>8}"
    for name in names:
        header += f" {name.removeprefix('match_') + ' p50':>11} {'p99':>8}"
    lines = [header + f" {'64 uses':>8} {'plan':>8} {'prune':>8}"]
    for row in rows:
        line = f"{row['n_chunks']:>9,} {row['index_bytes'] / 1e6:>6.1f} MB"
        line += f" {row['open_s'] * 1e3:>5.1f} ms {row['open_with_budget_s'] * 1e3:>5.1f} ms"
        for name in names:
            line += f" {row[name]['p50_s'] * 1e3:>8.2f} ms {row[name]['p99_s'] * 1e3:>5.2f} ms"
        lines.append(line + f" {row['uses_s'] * 1e3:>5.0f} ms {row['plan_s']:>6.2f} s {row['prune_s']:>6.2f} s")
    return "\n".join(lines)


def main() -> None:
    """Run, and print a table or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index_growth", description=__doc__.split("\n")[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--matches", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = run(options.chunks, options.matches)
    machine = {
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }
    if options.json:
        print(json.dumps({"schema": 1, **machine, "rows": rows}, indent=2))
        return
    print(machine)
    print(table(rows))


if __name__ == "__main__":
    main()
