"""Tiny random models, one for each cache kind, and a byte-level tokenizer with a few merges."""

from __future__ import annotations

import random
from typing import Any

import prefixbank.kvcache  # noqa: F401  (loads a real BLAS before mlx)

# isort: split
import mlx.core as mx
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

FROM_DISK: dict[str, Any] = {"load": "always", "memory_bytes": 0}
"""Options of a bank that reads what it gives out from its files: tiny models would be faster to compute."""

VOCAB = 320
CORPUS = ["review: the lamp is lovely\nsentiment: positive\n\n", "the zip broke\nsentiment: negative\n\n"] * 4
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": VOCAB,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON},
    # Multi-head latent attention: keys and values of different widths, one head.
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **COMMON,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,  # experts run on the CPU in float32 only
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "qk_nope_head_dim": 16,
        "rope_scaling": None,
    },
    "llama_sliding": {
        "model_type": "llama",
        **COMMON,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 24,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 24,
        "rope_theta": 10000,
        "rope_scaling": None,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            **COMMON,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 32,
            "attention_bias": False,
            "interleave_moe_layer_step": 1,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "max_position_embeddings": 4096,
            "rope_scaling": None,
            "use_qk_norm": True,
            "no_rope_layers": None,
        },
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        **COMMON,
        "num_key_value_heads": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "qk_nope_head_dim": 16,
        "rope_scaling": None,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **COMMON,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
        "full_attention_interval": 2,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
}


def build_model(name: str = "llama", *, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Any:
    """Return a random model; equal arguments give equal weights."""
    config = CONFIGS[name]
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def build_tokenizer(*, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most VOCAB ids, so that any text has ids."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=chat_template)


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def random_ids(n_tokens: int, *, seed: int = 1) -> list[int]:
    """Return token ids that no end-of-sequence is among."""
    return random.Random(seed).choices(range(VOCAB - 20), k=n_tokens)
