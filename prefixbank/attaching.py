"""Own bringing a model to a bank: loading it, telling it from others, and making a `BankedModel` of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefixbank import fingerprint as fingerprints
from prefixbank.errors import ConfigError
from prefixbank.identity import ModelIdentity
from prefixbank.kvcache import loading
from prefixbank.kvcache.probe import CacheOptions
from prefixbank.model import BankedModel
from prefixbank.promptcaches import PromptCaches
from prefixbank.session import BankSession

__all__ = ["attach", "load"]

DEFAULT_PREFILL_STEP_SIZE = 2048


def load(
    session: BankSession,
    path_or_hub_id: str | os.PathLike[str],
    *,
    adapter_path: str | os.PathLike[str] | None = None,
    precision: str = "auto",
    tokenizer_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> BankedModel:
    """Load a model and attach it; see `PrefixBank.load_model`."""
    loading.require_precision(precision)
    folder = loading.local_folder(str(path_or_hub_id))
    adapter_folder = None if adapter_path is None else Path(adapter_path)
    files = fingerprints.list_model_files(folder)
    adapter_files = fingerprints.list_adapter_files(adapter_folder) if adapter_folder else []

    def digests() -> dict[str, object]:
        return {"model": session.digest_files(files), "adapter": session.digest_files(adapter_files)}

    parts = digests()
    model, tokenizer, loaded_as = loading.load_model_and_tokenizer(
        folder, adapter_folder, precision, tokenizer_config, trust_remote_code
    )
    # Weights that were overwritten while mlx-lm read them would get the fingerprint of the old ones.
    if digests() != parts:
        raise ConfigError(f"{folder} changed while it was loaded: load it again")
    return attach(
        session,
        model,
        tokenizer,
        label=str(path_or_hub_id) + (f" + {adapter_path}" if adapter_path else ""),
        file_parts={**parts, "loaded_as": loaded_as},
        **options,
    )


def attach(
    session: BankSession,
    model: Any,
    tokenizer: Any,
    *,
    label: str | None = None,
    file_parts: Mapping[str, object] | None = None,
    salt: str | bytes = b"",
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE,
    state_every_chunks: int = 0,
    **cache_options: Any,
) -> BankedModel:
    """Attach a loaded model; see `PrefixBank.attach`. `file_parts` is what its files say of it, if it has some."""
    try:
        options = CacheOptions(**cache_options)
    except TypeError as exc:
        known = "kv_bits, kv_group_size, quantized_kv_start, max_kv_size"
        raise ConfigError(f"unknown option ({str(exc).split('()')[-1].strip()}); of the cache: {known}") from exc
    name = label or f"{getattr(model, 'model_type', type(model).__name__)} (attached)"

    def caches(options: CacheOptions, below: PromptCaches | None) -> PromptCaches:
        identity = ModelIdentity(model, label=name, options=options, salt=salt, file_parts=file_parts)
        return PromptCaches(session, model, identity, options, prefill_step_size, state_every_chunks, below)

    quantised_later = options.kv_bits is not None and options.quantized_kv_start > 0
    below = caches(CacheOptions(max_kv_size=options.max_kv_size), None) if quantised_later else None
    made = caches(options, below)
    made.introduce()
    if loading.computes_without_blas():
        session.warn("blas", loading.BLAS_TOO_LATE)
    return BankedModel(session, model, tokenizer, name, made)
