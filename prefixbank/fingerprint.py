"""Own the fingerprint: the hash that says whose KV it is; must not know MLX or the index.

A fingerprint is the SHA-256 of everything that decides what bits a token's KV has: weights, configuration, adapter,
conversion at load, KV quantisation, cache layout, shard format and mlx-lm's minor version.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from prefixbank.errors import ConfigError
from prefixbank.layout import SHARD_FORMAT_VERSION
from prefixbank.values import WeightsFile

__all__ = ["digest_files", "fingerprint", "list_adapter_files", "list_model_files", "salt_digest"]

_TIMESTAMP_GRAIN_S = 0.1
"""Two changes of a file within this time may leave one timestamp: a digest taken so soon is not memoised."""

Recall = Callable[[WeightsFile], str | None]
Remember = Callable[[dict[WeightsFile, str]], None]


def fingerprint(parts: Mapping[str, object]) -> str:
    """Return the SHA-256, in hex, of the parts and of the versions that decide how KV is made and kept."""
    mlx_lm_minor = ".".join(version("mlx-lm").split(".")[:2])
    whole = {**parts, "shard_format": SHARD_FORMAT_VERSION, "mlx_lm": mlx_lm_minor}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def salt_digest(salt: bytes) -> str:
    """Return what the index keeps of a salt: "" without one, else a digest that does not reveal it."""
    return hashlib.blake2b(salt, digest_size=32, person=b"prefixbank-salt").hexdigest() if salt else ""


def list_model_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that decide its KV: weights as mlx-lm loads them, configuration, own code."""
    patterns = ("model*.safetensors", "config.json", "hf_quant_config.json", "*.py")
    return _existing(folder, patterns, "model")


def list_adapter_files(folder: Path) -> list[Path]:
    """Return the files of a LoRA adapter folder that decide the KV."""
    return _existing(folder, ("adapters*.safetensors", "adapter_config.json"), "adapter")


def _existing(folder: Path, patterns: tuple[str, ...], what: str) -> list[Path]:
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    if not any(path.suffix == ".safetensors" for path in files):
        raise ConfigError(f"{folder} holds no {what} weights (*.safetensors)")
    return files


def digest_files(files: list[Path], recall: Recall, remember: Remember) -> dict[str, str]:
    """Return the SHA-256 of each file by name, reading only those whose state is not in the memo.

    A file is taken as unchanged while path, device, inode, size, mtime and ctime are: ctime can't be set back by
    whoever overwrites a file in place. Raises `ConfigError` for a file that can't be read.
    """
    digests: dict[str, str] = {}
    fresh: dict[WeightsFile, str] = {}
    for path in files:
        try:
            state = _stat(path)
            digest = recall(state)
            if digest is None:
                started_at = time.time()
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if _stat(path) != state:
                    raise ConfigError(f"{path} changed while it was read: load the model again")
                if started_at - max(state.mtime_ns, state.ctime_ns) / 1e9 > _TIMESTAMP_GRAIN_S:
                    fresh[state] = digest
        except OSError as exc:
            raise ConfigError(f"{path} can't be read: {exc.strerror or exc}") from exc
        digests[path.name] = digest
    if fresh:
        remember(fresh)
    return digests


def _stat(path: Path) -> WeightsFile:
    status = path.stat()
    signed = (1 << 63) - 1  # what the index can hold
    return WeightsFile(
        path=str(path.absolute()),
        device=status.st_dev & signed,
        inode=status.st_ino & signed,
        n_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
    )
