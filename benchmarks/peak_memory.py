"""The most memory that one hit takes: a new process makes one, and tells by how much its memory peaked.

A row holds:

    contender, n_tokens, kv_bytes (of the prefix)
    peak_rss_bytes (resident memory at its peak, less what it was before), rss_ratio (by kv_bytes)
    peak_mlx_bytes (the same by mlx's own account; on GPUs resident memory leaves out the device's), mlx_ratio
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache

from benchmarks.measuring import N_SUFFIX, compute, give_memory_back, random_token_ids
from benchmarks.models import kv_only
from prefixbank import PrefixBank

__all__ = ["CONTENDERS", "measure"]

MLX_LM_FILE = "mlx-lm file"
BANK_DISK = "bank, disk"
CONTENDERS = (MLX_LM_FILE, BANK_DISK)

STATUS = Path("/proc/self/status")  # Linux


def measure(shape: tuple[int, int, int], bank_root: Path, file: Path, n_tokens: int, contender: str) -> dict[str, Any]:
    """Return the row of one contender, with the KV-only model of that shape (layers, heads, width)."""
    command = [sys.executable, "-m", "benchmarks.peak_memory", contender, os.fspath(bank_root), os.fspath(file)]
    command += [str(number) for number in (n_tokens, *shape)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _resident_bytes() -> int:
    """Return the resident memory now; where the system does not tell, its peak so far."""
    if not STATUS.exists():
        return _peak_resident_bytes()
    return _from_status("VmRSS")


def _peak_resident_bytes() -> int:
    """Return the resident memory at its peak.

    Not getrusage's on Linux: that begins with what the process had that started this one.
    """
    if STATUS.exists():
        return _from_status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): bytes there, kilobytes elsewhere


def _forget_peak() -> None:
    """Let the peak begin anew, where the system can (proc(5), clear_refs)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _from_status(name: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _hit(contender: str, bank_root: Path, file: Path, n_tokens: int, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Make one hit in this process, and return the row."""
    model = kv_only(*shape)
    prompt = random_token_ids(n_tokens + N_SUFFIX, seed=n_tokens)
    with PrefixBank.open(bank_root, memory_bytes=0, load="always") as bank:
        llm = model.attach(bank)
        llm.match(prompt)  # what the first look takes is not the hit's
        compute(model.model, prompt[:N_SUFFIX], model.model.make_cache())
        give_memory_back()
        mx.reset_peak_memory()
        _forget_peak()
        rss_before, mlx_before = _resident_bytes(), mx.get_active_memory()
        if contender == MLX_LM_FILE:
            prompt_cache = load_prompt_cache(os.fspath(file))
            mx.eval([layer_cache.state for layer_cache in prompt_cache])
        else:
            prompt_cache = llm.resolve(prompt).prompt_cache
        compute(model.model, prompt[n_tokens:], prompt_cache)
        rss, in_mlx = _peak_resident_bytes() - rss_before, mx.get_peak_memory() - mlx_before
        kv_bytes = llm.layout.data_bytes(n_tokens)
    return {
        "contender": contender,
        "n_tokens": n_tokens,
        "kv_bytes": kv_bytes,
        "peak_rss_bytes": rss,
        "rss_ratio": rss / kv_bytes,
        "peak_mlx_bytes": in_mlx,
        "mlx_ratio": in_mlx / kv_bytes,
    }


def main() -> None:
    """Print the row of one hit as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peak_memory")
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("bank_root", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("n_tokens", type=int)
    parser.add_argument("shape", type=int, nargs=3)
    given = parser.parse_args()
    print(json.dumps(_hit(given.contender, given.bank_root, given.file, given.n_tokens, tuple(given.shape))))


if __name__ == "__main__":
    main()
