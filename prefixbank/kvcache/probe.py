"""Own finding out which prompt cache a model makes, and quantising it as mlx-lm does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from prefixbank.errors import ConfigError, PrefixBankError, UnsupportedCacheError
from prefixbank.kvcache.capture import describe, leaf_caches
from prefixbank.layout import CacheLayout

__all__ = ["CacheOptions", "device_name", "is_on_gpu", "new_prompt_cache", "probe_layout", "quantize"]


KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)
"""What `mx.quantize` knows in its affine mode."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Say how the prompt cache is made, with mlx-lm's names.

    `kv_bits=None` leaves it as the model makes it; else it is quantised once it holds `quantized_kv_start` tokens.
    `max_kv_size` gives models that bring no cache of their own a window of that many tokens, of which the first four
    are kept.
    """

    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0
    max_kv_size: int | None = None

    def __post_init__(self) -> None:
        if self.kv_bits is not None and self.kv_bits not in KV_BITS:
            raise ConfigError(f"kv_bits={self.kv_bits} is unknown: use one of {', '.join(map(str, KV_BITS))}")
        if self.kv_group_size not in KV_GROUP_SIZES:
            known = ", ".join(map(str, KV_GROUP_SIZES))
            raise ConfigError(f"kv_group_size={self.kv_group_size} is unknown: use one of {known}")
        if self.kv_bits is None:  # the others mean nothing then, and must not tell models apart
            object.__setattr__(self, "kv_group_size", 64)
            object.__setattr__(self, "quantized_kv_start", 0)
        if self.quantized_kv_start < 0:
            raise ConfigError(f"quantized_kv_start={self.quantized_kv_start} must not be negative")

    def generate_options(self) -> dict[str, int]:
        """Return the options as keyword arguments for `mlx_lm.stream_generate`; {} without quantisation."""
        if self.kv_bits is None:
            return {}
        return {
            "kv_bits": self.kv_bits,
            "kv_group_size": self.kv_group_size,
            "quantized_kv_start": self.quantized_kv_start,
        }


def new_prompt_cache(model: nn.Module, options: CacheOptions) -> list[Any]:
    """Return an empty prompt cache of the model."""
    return list(make_prompt_cache(model, max_kv_size=options.max_kv_size))


def device_name() -> str:
    """Return what MLX computes on, for example "gpu Apple M3 Max"."""
    kind = "gpu" if is_on_gpu() else "cpu"
    return f"{kind} {mx.device_info().get('device_name', '')}".strip()


def is_on_gpu() -> bool:
    """Tell whether MLX computes on a GPU."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def quantize(prompt_cache: list[Any], options: CacheOptions) -> None:
    """Quantise the layers in place that mlx-lm would quantise after a step."""
    maybe_quantize_kv_cache(
        prompt_cache,
        quantized_kv_start=options.quantized_kv_start,
        kv_group_size=options.kv_group_size,
        kv_bits=options.kv_bits,
    )


def probe_layout(model: nn.Module, options: CacheOptions) -> CacheLayout:
    """Return the layout of the model's prompt cache.

    Builds the graph of one token and computes none of it: shapes and dtypes are known without. Raises
    `UnsupportedCacheError` for a cache class without adapter, and for a model that can't be called like mlx-lm's;
    `ConfigError` for a quantisation that does not fit the heads.
    """
    try:
        prompt_cache = new_prompt_cache(model, options)
        for _ in leaf_caches(prompt_cache):  # raises for a class without adapter
            pass
        model(mx.array([[0]]), cache=prompt_cache)
        _quantize_probe(prompt_cache, options)
        return describe(prompt_cache)
    except PrefixBankError:
        raise
    except Exception as exc:  # models may raise anything; a doubt is a miss, not a failed generation
        raise UnsupportedCacheError(
            f"{type(model).__name__} can't be asked for its prompt cache ({type(exc).__name__}: {exc}): generation "
            "goes on without the bank"
        ) from exc


def _quantize_probe(prompt_cache: list[Any], options: CacheOptions) -> None:
    """Quantise a cache of one token as one of `quantized_kv_start` tokens will be."""
    try:
        quantize(prompt_cache, replace(options, quantized_kv_start=0))
    except (NotImplementedError, ValueError) as exc:
        raise ConfigError(f"this model's KV can't be quantised so: {exc}") from exc
