"""How far half precision moves the logits and argmax of a batch, with merged caches and with shared rows.

The queries of the demo's few-shot prompt are decoded greedily in float32; then model and KV are put into bfloat16 and
float16, and the same tokens are run through both kinds of caches as one batch.

Result: `{"rows": [...]}`, a row for each model, dtype and contender ("merged", "shared"):

    model, dtype, contender, n_positions
    mean_error, max_error (of the logits, against float32)
    n_flips (positions whose argmax is not float32's), n_apart (whose argmax is not the other contender's)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.measuring import compute, say
from benchmarks.models import BenchModel
from benchmarks.report import Table
from prefixbank.chunking import unpack_token_ids
from prefixbank.demo.run import load_shots
from prefixbank.kvcache.probe import CacheOptions
from prefixbank.kvcache.sharedattention import shared_attention
from prefixbank.kvcache.sharing import Sharing
from prefixbank.prompts import PromptEncoder

__all__ = ["run", "tables"]

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
N_ANSWER = 32


def run(models: Sequence[BenchModel], *, n_answer: int = N_ANSWER) -> dict[str, Any]:
    """Compare both kinds of caches for each model."""
    rows: list[dict[str, Any]] = []
    for model in models:
        say(f"{model.label}: logits in half precision")
        encoder = PromptEncoder(model.tokenizer)
        shots = load_shots()
        prompts = [unpack_token_ids(encoder.encode(shots.render(query)).token_ids) for query in shots.queries]
        n_shared = min(_n_alike(prompts[0], other) for other in prompts[1:])
        prefix, rests = prompts[0][:n_shared], [prompt[n_shared:] for prompt in prompts]
        original = tree_map(lambda array: array, model.model.parameters())  # trees of their own
        model.model.set_dtype(mx.float32)
        expected, answers = _greedy(model.model, prefix, rests, n_answer)
        for name, dtype in DTYPES.items():
            model.model.set_dtype(dtype)
            found = {way: _forced(model.model, prefix, rests, answers, way) for way in ("merged", "shared")}
            rows += [_row(model.label, name, way, found, expected) for way in found]
            model.model.update(original)
            model.model.set_dtype(mx.float32)
        model.model.update(original)
    return {"rows": rows}


def _n_alike(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _batch(model: Any, prefix: list[int], n: int, way: str) -> tuple[list[Any], Any]:
    prompt_cache = make_prompt_cache(model)
    compute(model, prefix, prompt_cache)
    if way == "merged":
        sequences = [prompt_cache] * n
    else:
        sharing = Sharing(model, CacheOptions())
        shared = sharing.extended(sharing.empty, prompt_cache, len(prefix))
        sequences = [sharing.behind(shared, prompt_cache, len(prefix)) for _ in range(n)]
    batch = [layer[0].merge(list(layer)) for layer in zip(*sequences, strict=True)]
    return batch, shared_attention(model) if way == "shared" else nullcontext()


def _greedy(
    model: Any, prefix: list[int], rests: list[list[int]], n_answer: int
) -> tuple[list[mx.array], list[list[int]]]:
    """Return the logits `[n_answer, vocabulary]` and answers of each query alone."""
    shared = make_prompt_cache(model)
    compute(model, prefix, shared)
    logits, answers = [], []
    for rest in rests:
        prompt_cache = copy.deepcopy(shared)
        steps = [model(mx.array([rest]), cache=prompt_cache)[:, -1]]
        while len(steps) < n_answer:
            steps.append(model(mx.argmax(steps[-1], axis=-1)[None], cache=prompt_cache)[:, -1])
            mx.eval(steps[-1])
        logits.append(mx.concatenate(steps).astype(mx.float32))
        answers.append([int(step.argmax().item()) for step in steps])
    return logits, answers


def _forced(
    model: Any, prefix: list[int], rests: list[list[int]], answers: list[list[int]], way: str
) -> list[mx.array]:
    """Return the logits of the same tokens, in one batch."""
    batch, hook = _batch(model, prefix, len(rests), way)
    lengths = [len(rest) for rest in rests]
    longest = max(lengths)
    with hook:
        for layer_cache in batch:
            layer_cache.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
        padded = mx.array([[*rest, *[0] * (longest - len(rest))] for rest in rests])
        first = model(padded, cache=batch)
        for layer_cache in batch:
            layer_cache.finalize()
        steps = [mx.stack([first[row, length - 1] for row, length in enumerate(lengths)])]
        for at in range(len(answers[0]) - 1):
            steps.append(model(mx.array([[answer[at]] for answer in answers]), cache=batch)[:, -1])
            mx.eval(steps[-1])
    return list(mx.stack(steps, axis=1).astype(mx.float32))


def _row(
    label: str, dtype: str, way: str, found: Mapping[str, list[mx.array]], expected: list[mx.array]
) -> dict[str, Any]:
    ours, theirs, right = (
        mx.stack(logits) for logits in (found[way], *(found[w] for w in found if w != way), expected)
    )
    errors = mx.abs(ours - right)
    return {
        "model": label,
        "dtype": dtype,
        "contender": way,
        "n_positions": right.shape[0] * right.shape[1],
        "mean_error": errors.mean().item(),
        "max_error": errors.max().item(),
        "n_flips": int((ours.argmax(-1) != right.argmax(-1)).sum().item()),
        "n_apart": int((ours.argmax(-1) != theirs.argmax(-1)).sum().item()),
    }


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return one table for each model."""
    header = ["dtype", "caches", "mean error", "max error", "other argmax than float32", "than the other caches"]
    found = []
    for label in dict.fromkeys(row["model"] for row in result["rows"]):
        lines = [
            [
                row["dtype"],
                row["contender"],
                f"{row['mean_error']:.4f}",
                f"{row['max_error']:.3f}",
                f"{row['n_flips']} of {row['n_positions']}",
                f"{row['n_apart']}",
            ]
            for row in result["rows"]
            if row["model"] == label
        ]
        found.append(Table(f"Logits of a batch in half precision, {label}", header, lines))
    return found
