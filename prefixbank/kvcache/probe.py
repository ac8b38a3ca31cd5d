"""Own finding out which prompt cache a model makes, and quantising it as mlx-lm does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from prefixbank.errors import ConfigError, PrefixBankError, UnsupportedCacheError
from prefixbank.kvcache.capture import describe
from prefixbank.kvcache.kinds import kind_of
from prefixbank.layout import CacheLayout

__all__ = ["KVQuantization", "new_prompt_cache", "probe_layout", "quantize"]


KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)
"""What `mx.quantize` knows in its affine mode."""


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """Say how the KV cache is quantised, with mlx-lm's names; `kv_bits=None` leaves it as the model makes it."""

    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0

    def __post_init__(self) -> None:
        if self.kv_bits is not None and self.kv_bits not in KV_BITS:
            raise ConfigError(f"kv_bits={self.kv_bits} is unknown: use one of {', '.join(map(str, KV_BITS))}")
        if self.kv_group_size not in KV_GROUP_SIZES:
            known = ", ".join(map(str, KV_GROUP_SIZES))
            raise ConfigError(f"kv_group_size={self.kv_group_size} is unknown: use one of {known}")
        if self.kv_bits is not None and self.quantized_kv_start != 0:
            raise ConfigError(
                "quantized_kv_start must be 0 with a bank: later starts mix two cache classes in one prefix"
            )

    def generate_options(self) -> dict[str, int]:
        """Return the options as keyword arguments for `mlx_lm.stream_generate`; {} without quantisation."""
        if self.kv_bits is None:
            return {}
        return {name: value for name, value in asdict(self).items() if value is not None}


def new_prompt_cache(model: nn.Module) -> list[Any]:
    """Return an empty prompt cache of the model."""
    return list(make_prompt_cache(model))


def quantize(prompt_cache: list[Any], quantization: KVQuantization) -> None:
    """Quantise the layers in place that mlx-lm would quantise after a step."""
    maybe_quantize_kv_cache(
        prompt_cache,
        quantized_kv_start=quantization.quantized_kv_start,
        kv_group_size=quantization.kv_group_size,
        kv_bits=quantization.kv_bits,
    )


def probe_layout(model: nn.Module, quantization: KVQuantization) -> CacheLayout:
    """Return the layout of the model's prompt cache.

    Builds the graph of one token and computes none of it: shapes and dtypes are known without. Raises
    `UnsupportedCacheError` for a cache class without adapter, and for a model that can't be called like mlx-lm's;
    `ConfigError` for a quantisation that does not fit the heads.
    """
    try:
        prompt_cache = new_prompt_cache(model)
        for layer_cache in prompt_cache:
            kind_of(layer_cache)
        model(mx.array([[0]]), cache=prompt_cache)
        _quantize_probe(prompt_cache, quantization)
        return describe(prompt_cache)
    except PrefixBankError:
        raise
    except Exception as exc:  # models may raise anything; a doubt is a miss, not a failed generation
        raise UnsupportedCacheError(
            f"{type(model).__name__} can't be asked for its prompt cache ({type(exc).__name__}: {exc}): generation "
            "goes on without the bank"
        ) from exc


def _quantize_probe(prompt_cache: list[Any], quantization: KVQuantization) -> None:
    try:
        quantize(prompt_cache, quantization)
    except ValueError as exc:
        raise ConfigError(f"this model's KV can't be quantised so: {exc}") from exc
