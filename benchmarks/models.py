"""Own the models that are measured, and how banks are opened for them.

Prompts are token ids throughout, so that random models need no tokenizer of their own. Random weights are as good as
real ones here: what is measured are times and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixbank import BankedModel, PrefixBank
from prefixbank.demo.smollm2 import fetch_smollm2

__all__ = ["BUILT_IN", "VOCAB", "BenchModel", "KVOnlyModel", "kv_only", "load"]

VOCAB = 1000
"""Token ids are below this: every model knows as many."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """Hold a loaded model.

    `label` is what tables call it, its KV written as layers x heads x width; `max_tokens` is the longest context it was
    made for.
    """

    label: str
    model: Any
    tokenizer: Any
    max_tokens: int | None = None

    def attach(self, bank: PrefixBank) -> BankedModel:
        """Attach the model to a bank of this run.

        In a bank that lives for one run a label is one model, so the weights need not be digested.
        """
        return bank.attach(self.model, self.tokenizer, label=self.label, file_parts={"benchmark": self.label})


def load(name: str) -> BenchModel:
    """Return a built-in model, or any mlx-lm model by its folder or hub id. Raises `PrefixBankError`."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    return _loaded(name, name)


def _loaded(label: str, path_or_hub_id: str | Path) -> BenchModel:
    with TemporaryDirectory() as temporary, PrefixBank.open(Path(temporary) / "bank") as bank:
        llm = bank.load_model(path_or_hub_id)
    max_tokens = getattr(getattr(llm.model, "args", None), "max_position_embeddings", None)
    return BenchModel(label, llm.model, llm.tokenizer, max_tokens)


# --- random models


class ByteTokenizer:
    """Stand in for a transformers tokenizer: a token id is a byte of the text."""

    bos_token = None
    eos_token_id = None
    chat_template = None

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the UTF-8 bytes of a text."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text of token ids; those that are no bytes become question marks."""
        return bytes(i if i < 128 else ord("?") for i in token_ids).decode()

    def get_vocab(self) -> dict[str, int]:
        """Return no special tokens."""
        return {}

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: Any) -> list[int]:
        """Return the contents, one after another."""
        return self.encode("\n".join(message["content"] for message in messages))


def _random_llama(label: str, dtype: mx.Dtype, **shape: Any) -> BenchModel:
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, **shape))
    model.set_dtype(dtype)
    for layer in model.layers:  # one after another, so that few arrays are there in float32 at once
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    model.eval()
    return BenchModel(label, model, TokenizerWrapper(ByteTokenizer()))


def tiny() -> BenchModel:
    """Return a llama of 2 layers that computes next to nothing: what is left is overhead."""
    return _random_llama(
        "random llama 2 x 2 x 8, float32",
        mx.float32,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
    )


def small() -> BenchModel:
    """Return a llama that is small enough for a CPU to decode large batches."""
    return _random_llama(
        "random llama 8 x 4 x 64, float32",
        mx.float32,
        hidden_size=256,
        num_hidden_layers=8,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=1024,
    )


def large() -> BenchModel:
    """Return a llama with the KV of one of 8B parameters, but narrow, so that a CPU can compute it."""
    return _random_llama(
        "random llama 32 x 8 x 128, float32",
        mx.float32,
        hidden_size=256,
        num_hidden_layers=32,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=1024,
    )


def llama_8b() -> BenchModel:
    """Return a llama of 8B parameters with random bfloat16 weights (16 GB), for GPUs."""
    return _random_llama(
        "random llama-8B 32 x 8 x 128, bfloat16",
        mx.bfloat16,
        hidden_size=4096,
        num_hidden_layers=32,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=False,
    )


def smollm2() -> BenchModel:
    """Return the demo's model, fetched the first time. Raises `DemoModelError`."""
    return _loaded("SmolLM2-135M", fetch_smollm2())


BUILT_IN: dict[str, Callable[[], BenchModel]] = {
    "tiny": tiny,
    "small": small,
    "smollm2": smollm2,
    "large": large,
    "llama-8b": llama_8b,
}
"""The models that `--model` knows by name."""


# --- a model that computes nothing


class KVOnlyModel(nn.Module):
    """Append rows to each layer's cache and compute nothing: what is left is the handling of KV."""

    def __init__(self, n_layers: int, n_heads: int, width: int, dtype: mx.Dtype, max_step: int = 2048) -> None:
        super().__init__()
        self.n_layers = n_layers
        self.rows = mx.random.normal((1, n_heads, max_step, width), dtype, key=mx.random.key(0))
        mx.eval(self.rows)

    def make_cache(self) -> list[KVCache]:
        """Return an empty cache for each layer, as `make_prompt_cache` asks for."""
        return [KVCache() for _ in range(self.n_layers)]

    def __call__(self, token_ids: mx.array, cache: list[KVCache]) -> mx.array:
        rows = self.rows[:, :, : token_ids.shape[1]]
        for layer_cache in cache:
            layer_cache.update_and_fetch(rows, rows)
        return mx.zeros((1, token_ids.shape[1], 1))


def kv_only(n_layers: int = 32, n_heads: int = 8, width: int = 128) -> BenchModel:
    """Return a model that only keeps float16 KV of that shape."""
    model = KVOnlyModel(n_layers, n_heads, width, mx.float16)
    label = f"KV only {n_layers} x {n_heads} x {width}, float16"
    return BenchModel(label, model, TokenizerWrapper(ByteTokenizer()))
