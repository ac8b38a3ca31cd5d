"""What many prompts with the same shots take on disk: in a bank, and as mlx-lm's one file a prompt.

The prompts are the demo's: its instructions and examples, each with another query. All bytes are those of whole disk
blocks. Result: `{"rows": [...]}`, a row for each model and way of keeping:

    model, n_prompts, n_shared_tokens (that all prompts begin with), n_tokens (of all prompts together)
    contender:
        "bank, generate": each prompt answered by `generate`, which leaves the shots
        "bank, prefill": each prompt left whole, but for its last token
        "mlx-lm, a file a prompt": each prompt but for its last token in a file by `save_prompt_cache`
    disk_bytes (of the whole bank, its index included), file_ratio (mlx-lm's bytes by these)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_lm.models.cache import save_prompt_cache

from benchmarks.measuring import say
from benchmarks.models import BenchModel
from benchmarks.report import Table
from prefixbank import FewShotPrompt, PrefixBank, RenderedPrompt
from prefixbank.demo.run import load_shots

__all__ = ["N_PROMPTS", "run", "tables"]

N_PROMPTS = 100

BANK_GENERATE = "bank, generate"
BANK_PREFILL = "bank, prefill"
MLX_LM_FILES = "mlx-lm, a file a prompt"

_THINGS = ("kettle", "lamp", "novel", "film", "hotel", "radio", "jacket", "soup", "camera", "garden chair")
_FIRST = ("I bought this {} in March", "My sister gave us the {}", "Nobody had told me about this {}")
_THEN = ("and it has not let me down once", "but it broke within a week", "and the rest of the family likes it too")
_LAST = ("I would choose it again.", "Next time I will look elsewhere.", "It was cheap, and it shows.")


def run(models: Sequence[BenchModel], folder: Path | None, *, n_prompts: int = N_PROMPTS) -> dict[str, Any]:
    """Keep the prompts in each way, in new folders below `folder`."""
    rows: list[dict[str, Any]] = []
    for model in models:
        say(f"disk: {model.label}, {n_prompts} prompts")
        shots = load_shots()
        prompts = [shots.render(query) for query in _queries(n_prompts)]
        with TemporaryDirectory(dir=folder) as temporary:
            rows += _measure(model, shots, prompts, Path(temporary))
    return {"rows": rows}


def _queries(n_queries: int) -> list[str]:
    """Return different reviews of about 30 tokens."""
    choose = random.Random(0)
    queries: dict[str, None] = {}
    while len(queries) < n_queries:
        first, then, last = (choose.choice(parts) for parts in (_FIRST, _THEN, _LAST))
        n_weeks = choose.randrange(2, 90)
        queries[f"{first.format(choose.choice(_THINGS))}, {then}. {n_weeks} weeks of use. {last}"] = None
    return list(queries)


def _measure(
    model: BenchModel, shots: FewShotPrompt, prompts: list[RenderedPrompt], place: Path
) -> list[dict[str, Any]]:
    """Return a row for each way of keeping."""
    with PrefixBank.open(place / "generate", memory_bytes=0, load="always") as bank:
        llm = model.attach(bank)
        for prompt in prompts:
            llm.generate(prompt, max_tokens=1)
        n_shared = len(llm.shared_token_ids(shots))
    file = place / "prompt-cache.safetensors"
    bytes_by_length: dict[int, int] = {}
    lengths = []
    with PrefixBank.open(place / "prefill", memory_bytes=0, load="always") as bank:
        llm = model.attach(bank)
        for prompt in prompts:
            lengths.append(len(llm.encode(prompt)))
            resolved = llm.prefill(prompt)
            if lengths[-1] not in bytes_by_length:  # files of as many tokens are equally long
                save_prompt_cache(str(file), resolved.prompt_cache)
                bytes_by_length[lengths[-1]] = _disk_bytes(file)
                file.unlink()
    file_bytes = sum(bytes_by_length[n_tokens] for n_tokens in lengths)
    disk_bytes = {
        BANK_GENERATE: _disk_bytes(place / "generate"),
        BANK_PREFILL: _disk_bytes(place / "prefill"),
        MLX_LM_FILES: file_bytes,
    }
    return [
        {
            "model": model.label,
            "n_prompts": len(prompts),
            "n_shared_tokens": n_shared,
            "n_tokens": sum(lengths),
            "contender": name,
            "disk_bytes": n_bytes,
            "file_ratio": file_bytes / n_bytes,
        }
        for name, n_bytes in disk_bytes.items()
    ]


def _disk_bytes(path: Path) -> int:
    """Return the bytes that a file, or all files in a folder, take on disk."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    return sum(found.stat().st_blocks * 512 for found in files)


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return one table for all models."""
    lines = [
        [
            row["model"],
            row["contender"],
            *(f"{row[name]:,}" for name in ("n_prompts", "n_shared_tokens", "n_tokens")),
            f"{row['disk_bytes'] / 1e6:,.1f} MB",
            f"{row['file_ratio']:.1f}",
        ]
        for row in result["rows"]
    ]
    header = ["model", "kept as", "prompts", "shared tokens", "all tokens", "on disk", "files / this"]
    return [Table("Disk space of prompts that share their shots", header, lines)]
