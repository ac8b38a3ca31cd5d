"""Own loading models with mlx-lm, at a precision that the device can work with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load, load_adapters

from prefixbank.blas import blas_came_too_late
from prefixbank.errors import ConfigError

__all__ = [
    "BLAS_TOO_LATE",
    "CONVERTED",
    "computes_without_blas",
    "convert",
    "load_model_and_tokenizer",
    "load_tokenizer",
    "local_folder",
    "require_precision",
]

CONVERTED = "float32"
"""What the fingerprint says of a model that was turned into float32 at load."""

BLAS_TOO_LATE = (
    "mlx was imported before prefixbank and runs on its reference BLAS, some 25 times slower: import prefixbank first"
)

_HALF = (mx.float16, mx.bfloat16)


def local_folder(path_or_hub_id: str) -> Path:
    """Return the folder of a model, downloading it from the hub where it is no folder. Raises `ConfigError`."""
    folder = Path(path_or_hub_id)
    if folder.exists():
        return folder
    from mlx_lm.utils import _download  # what mlx_lm.load calls: the same files, in the same place

    try:
        return Path(_download(path_or_hub_id))
    except Exception as exc:
        raise ConfigError(
            f"the model {path_or_hub_id!r} is no folder and could not be downloaded: {str(exc).splitlines()[0]}"
        ) from exc


def load_tokenizer(path_or_hub_id: str) -> Any:
    """Return a model's tokenizer wrapper without its weights: they are neither downloaded nor read.

    Raises `ConfigError` where mlx-lm can't load it.
    """
    from mlx_lm import utils

    try:
        return utils.load_tokenizer(path_or_hub_id)
    except Exception as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise ConfigError(f"the tokenizer of {path_or_hub_id!r} can't be loaded: {reason}") from exc


def load_model_and_tokenizer(
    folder: Path,
    adapter_folder: Path | None,
    precision: str,
    tokenizer_config: Mapping[str, Any] | None,
    trust_remote_code: bool,
) -> tuple[nn.Module, Any, str]:
    """Return the model, its tokenizer wrapper, and "float32" where it was converted or "model" where it was not.

    Raises `ConfigError` where mlx-lm can't load it.
    """
    try:
        model, tokenizer = load(
            str(folder),
            tokenizer_config=dict(tokenizer_config or {}),
            trust_remote_code=trust_remote_code,
        )
        loaded_as = convert(model, precision)
        if adapter_folder is not None:
            model = load_adapters(model, str(adapter_folder))
            if loaded_as == CONVERTED:
                model.set_dtype(mx.float32)
            model.eval()
            mx.eval(model.parameters())
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise ConfigError(f"the model {folder} can't be loaded: {reason}") from exc
    return model, tokenizer, loaded_as


def require_precision(precision: str) -> None:
    """Raise `ConfigError` for what is no precision to load a model at."""
    if precision not in ("auto", "model", "float32"):
        raise ConfigError(f"precision={precision!r} is unknown: use auto, model or float32")


def convert(model: nn.Module, precision: str) -> str:
    """Give a loaded model the precision that is asked for, in place; returns "float32" where that took converting it.

    Where it did not, "model" is returned: its weights are as they were.
    """
    if precision != "float32" and not (precision == "auto" and _too_slow_as_it_is(model)):
        return "model"
    model.set_dtype(mx.float32)  # scales first: half-precision arithmetic is what is slow
    dequantize_model(model)
    mx.eval(model.parameters())
    return CONVERTED


def computes_without_blas() -> bool:
    """Tell whether mlx runs on the CPU without the real BLAS that is installed."""
    return bool(mx.default_device().type == mx.DeviceType.cpu) and blas_came_too_late()


def _too_slow_as_it_is(model: nn.Module) -> bool:
    """Tell whether mlx runs on the CPU and the model has half-precision weights (0.3 tokens/s measured)."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return False
    return any(isinstance(leaf, mx.array) and leaf.dtype in _HALF for _, leaf in tree_flatten(model.parameters()))
