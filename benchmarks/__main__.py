"""Time to the first token behind a stored prefix: cold, from mlx-lm's own prompt-cache file, and from a bank.

    python -m benchmarks [--model DIR] [--tokens 256 1024 4096] [--repeats 7] [--json]

Without `--model` it measures a random Llama-shaped float32 model and the demo's SmolLM2-135M-Instruct. Every repeat
runs the contenders one after another, so that a slow moment of the machine meets all of them; the page cache is warm.
"First token" is the forward pass of 16 further tokens after the cache was made available, evaluated.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import prefixbank.kvcache  # noqa: F401  (loads a real BLAS before mlx)

# isort: split
import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from prefixbank import BankedModel, PrefixBank
from prefixbank.demo.smollm2 import fetch_smollm2

N_SUFFIX = 16


def run_tokens(model: Any, token_ids: list[int], prompt_cache: list[Any]) -> None:
    """Compute tokens in steps of 512, and evaluate the last one's logits."""
    for low in range(0, len(token_ids), 512):
        logits = model(mx.array(token_ids[low : low + 512])[None], cache=prompt_cache)
        mx.eval([layer.state for layer in prompt_cache])
    mx.eval(logits[:, -1])


def measure(llm: BankedModel, n_tokens: int, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Return seconds to the first token by contender, one figure a repeat."""
    token_ids = random.Random(0).choices(range(250), k=n_tokens + N_SUFFIX)
    prefix, suffix = token_ids[:n_tokens], token_ids[n_tokens:]
    file = folder / "prompt-cache.safetensors"
    live = make_prompt_cache(llm.model)
    run_tokens(llm.model, prefix, live)
    save_prompt_cache(str(file), live)
    llm.put(prefix, live)

    def cold() -> None:
        run_tokens(llm.model, token_ids, make_prompt_cache(llm.model))

    def mlx_lm_file() -> None:
        prompt_cache = load_prompt_cache(str(file))
        mx.eval([layer.state for layer in prompt_cache])
        run_tokens(llm.model, suffix, prompt_cache)

    def bank_disk() -> None:
        resolved = llm.resolve(token_ids)
        assert resolved.cached_tokens == n_tokens
        run_tokens(llm.model, resolved.rest, resolved.prompt_cache)

    def bank_checkout() -> None:
        with llm.checkout(token_ids) as lease:
            assert lease.cached_tokens == n_tokens
            run_tokens(llm.model, lease.rest, lease.prompt_cache)

    contenders: dict[str, Callable[[], None]] = {
        "cold": cold,
        "mlx-lm file": mlx_lm_file,
        "bank, disk": bank_disk,
        "bank, checkout": bank_checkout,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for name, contend in contenders.items():
        if name != "cold":
            contend()  # opens files and compiles; cold has nothing to get ready
    for _ in range(repeats):
        for name, contend in contenders.items():
            started_at = time.perf_counter()
            contend()
            seconds[name].append(time.perf_counter() - started_at)
    return seconds


def llama_shaped() -> Any:
    """Return a random float32 model of 8 layers with 8 KV heads of 128."""
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=1024,
            num_hidden_layers=8,
            intermediate_size=2048,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            vocab_size=1024,
        )
    )
    mx.eval(model.parameters())
    return model


def main() -> None:
    """Run, and print a table or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="an mlx-lm model instead of the two built-in ones")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary, PrefixBank.open(Path(temporary) / "bank") as bank:
        real = bank.load_model(options.model or fetch_smollm2())
        models = {str(options.model or "SmolLM2-135M, float32 on CPU"): real}
        if options.model is None:
            models["random llama, 8 x 8 x 128, float32"] = bank.attach(llama_shaped(), real.tokenizer)
        for label, llm in models.items():
            for n_tokens in options.tokens:
                print(f"{label}: {n_tokens} tokens ...", file=sys.stderr)
                seconds = measure(llm, n_tokens, Path(temporary), options.repeats)
                medians = {name: median(times) for name, times in seconds.items()}
                rows.append({"model": label, "n_tokens": n_tokens, "median_s": medians})
    machine = {
        "machine": f"{platform.system()} {platform.machine()}",
        "device": str(mx.default_device()),
        "versions": {name: version(name) for name in ("prefixbank", "mlx", "mlx-lm")},
        "repeats": options.repeats,
    }
    if options.json:
        print(json.dumps({"schema": 1, **machine, "rows": rows}, indent=2))
        return
    print(machine)
    names = list(rows[0]["median_s"])
    print(f"{'model':36} {'tokens':>7} " + " ".join(f"{name:>15}" for name in names) + "  cold / disk  file / disk")
    for row in rows:
        medians = row["median_s"]
        times = " ".join(f"{medians[name] * 1e3:12.1f} ms" for name in names)
        ratios = [medians[name] / medians["bank, disk"] for name in ("cold", "mlx-lm file")]
        print(f"{row['model']:36} {row['n_tokens']:>7} {times} {ratios[0]:12.1f} {ratios[1]:12.1f}")


if __name__ == "__main__":
    main()
