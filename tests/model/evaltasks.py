"""Tasks for lm-evaluation-harness: 8 fixed shots and 50 documents, as yaml over JSON lines; no network."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from mlx.utils import tree_map

from tests.model.tiny import build_model

N_SHOTS, N_DOCS = 8, 50
SHARPNESS = {"llama": 3, "gemma3_text": 1, "qwen3_next": 2, "mamba2": 4}
"""What weights are multiplied by: random ones give all documents the same answer."""

WORDS = ["the", "a", "lamp", "kettle", "film", "soup", "zip", "is", "was", "lovely", "cold", "dull", "broken", "again"]

CHOICES = "reviews_choices"
ANSWERS = "reviews_answers"
ROLLING = "reviews_rolling"
DRAWN = "reviews_drawn"
BROKEN = "reviews_broken"
SENTIMENTS = ["positive", "negative", "very positive", "very negative"]


def write_tasks(folder: Path) -> Path:
    """Write the tasks into a folder, which is returned: choices, answers, rolling, drawn shots, and a broken one."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(3)
    for split, n_docs in (("train", 40), ("test", N_DOCS)):
        docs = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(6, 14))), "label": n % 2} for n in range(n_docs)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs), "utf-8")
    base: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {split: str(folder / f"{split}.jsonl") for split in ("train", "test")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "Review: {{text}}\nSentiment:",
        "metadata": {"version": 1.0},
    }
    shots = {"fewshot_split": "train", "num_fewshot": N_SHOTS, "fewshot_config": {"sampler": "first_n"}}
    choices = base | {
        "output_type": "multiple_choice",
        "description": "Say what the reviews are like.\n\n",
        "doc_to_choice": SENTIMENTS,
        "doc_to_target": "label",
        "target_delimiter": " ",
        "metric_list": [{"metric": metric} for metric in ("acc", "acc_norm")],
    }
    answers = base | {
        "output_type": "generate_until",
        "doc_to_target": "{{['positive', 'negative'][label]}}",
        "generation_kwargs": {"until": ["\n", "y"], "max_gen_toks": 6, "do_sample": True, "temperature": 0.7},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    rolling = base | {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    tasks = {
        CHOICES: choices | shots,
        ANSWERS: answers | shots,
        ROLLING: rolling,
        DRAWN: choices | shots | {"fewshot_config": {"sampler": "default"}},
        BROKEN: choices | {"dataset_kwargs": {"data_files": {"test": str(folder / "missing.jsonl")}}},
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **task}), "utf-8")
    return folder


def sharp_model(kind: str) -> Any:
    """Return a random model whose answers depend on what it has read."""
    model = build_model(kind)
    model.update(tree_map(lambda array: array * SHARPNESS[kind] if array.ndim == 2 else array, model.parameters()))
    return model


@contextmanager
def counting_tokens(model: Any) -> Iterator[list[int]]:
    """Give a list to which each pass of tokens through a model adds how many these are, padding included."""
    seen: list[int] = []
    run = type(model).__call__

    def counted(self: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if self is model:
            seen.append(inputs.size)
        return run(self, inputs, *args, **options)

    with mock.patch.object(type(model), "__call__", counted):
        yield seen
