"""Own the way from a llama GGUF file to an mlx-lm model directory, tokenizer included.

GGUF's names: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import prefixbank.kvcache  # noqa: F401  (loads a real BLAS before mlx)

# isort: split
import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from prefixbank.demo.modelfolder import write_json

__all__ = ["convert_gguf", "restore_rope_rows"]

GROUP_SIZE = 32  # weights that share one scale, in GGUF's Q4 and Q8 blocks
CONTROL_TOKEN = 3  # GGUF's token type for special tokens

# llama.cpp's tensor names and Hugging Face's, for the "llama" architecture
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf: Path, model_dir: Path) -> None:
    """Write an mlx-lm model directory from a llama GGUF file with 4-bit and 8-bit blocks.

    Nothing is quantised anew: `mx.load` gives GGUF's blocks as MLX's affine ones, scales float16.
    """
    loaded: Any = mx.load(os.fspath(gguf), return_metadata=True)
    tensors, metadata = loaded
    metadata = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in metadata.items()}
    weights = _convert_weights(tensors, metadata)
    mx.save_safetensors(os.fspath(model_dir / "model.safetensors"), weights, {"format": "mlx"})
    config = _model_config(weights, metadata)
    write_json(model_dir / "config.json", config)
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(model_dir / "generation_config.json", ids)
    _build_tokenizer(metadata).save(os.fspath(model_dir / "tokenizer.json"))
    write_json(model_dir / "tokenizer_config.json", _tokenizer_config(metadata))


def _convert_weights(tensors: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Rename the tensors and put the rows of q and k back in Hugging Face's order."""
    n_heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for gguf_name, tensor in tensors.items():
        stem, leaf = gguf_name.rsplit(".", 1)  # leaf: weight, scales or biases
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        part = layer[2] if layer else stem
        module = f"model.layers.{layer[1]}.{TENSOR_NAMES[part]}" if layer else TENSOR_NAMES[part]
        if part in n_heads:
            tensor = restore_rope_rows(tensor, n_heads[part])
        if tensor.dtype == mx.float32:  # the norms; packed blocks are uint32, scales float16
            tensor = tensor.astype(mx.float16)
        weights[f"{module}.{leaf}"] = mx.contiguous(tensor)
    return weights


def restore_rope_rows(tensor: Any, n_heads: int) -> Any:
    """Undo llama.cpp's interleaving of each head's two rotary halves.

    `tensor: [n_heads * head_dim, n_columns]`. Whole rows move, so packed blocks need no unpacking.
    llama.cpp's side: `LlamaModel.permute` in its convert_hf_to_gguf.py.
    """
    n_pairs = tensor.shape[0] // n_heads // 2
    rows = tensor.reshape(n_heads, n_pairs, 2, -1)
    return rows.swapaxes(1, 2).reshape(tensor.shape)


def _model_config(weights: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Say in config.json's words what the GGUF metadata says; bits are read off the shapes."""
    llama = {k.removeprefix("llama."): v for k, v in metadata.items() if k.startswith("llama.")}
    ids = {k: metadata[f"tokenizer.ggml.{k}_token_id"] for k in ("bos", "eos", "padding")}
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"}
    for module in (name.removesuffix(".scales") for name in weights if name.endswith(".scales")):
        n_words, n_groups = (weights[f"{module}.{k}"].shape[-1] for k in ("weight", "scales"))
        if (bits := n_words * 32 // (n_groups * GROUP_SIZE)) != 4:
            quantization[module] = {"group_size": GROUP_SIZE, "bits": bits}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),  # was a float32
        "rope_theta": llama["rope.freq_base"],
        "max_position_embeddings": llama["context_length"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["padding"],
        "quantization": quantization,
    }


def _build_tokenizer(metadata: dict[str, Any]) -> Any:
    """Rebuild the byte-level BPE tokenizer from GGUF's vocabulary and merges.

    GGUF's pre-tokenizer "smollm" stands for single digits, then GPT-2's byte-level rule.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    typed = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, token_type in typed if token_type == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    gguf_names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{gguf_name}_token_id"]]
        for name, gguf_name in gguf_names.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **named,
    }
