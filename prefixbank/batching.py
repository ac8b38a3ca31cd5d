"""Own whether a model's prompt caches go into one batch, and whether its sequences share the rows of their prefix."""

from __future__ import annotations

from typing import Any, Literal, get_args

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from prefixbank.errors import ConfigError, PrefixBankError
from prefixbank.kvcache.capture import leaf_caches
from prefixbank.kvcache.probe import new_prompt_cache, probe_layout
from prefixbank.kvcache.sharing import Sharing
from prefixbank.layout import LayerLayout
from prefixbank.promptcaches import PromptCaches

__all__ = ["SharedAttention", "can_batch", "check_shared_attention", "sharing_for"]

SharedAttention = Literal["auto", "always", "off"]
"""Share rows where it was measured to pay, wherever two sequences have rows in common, or nowhere."""


def check_shared_attention(choice: str) -> None:
    """Raise `ConfigError` for an unknown choice."""
    if choice not in get_args(SharedAttention):
        raise ConfigError(f"shared_attention={choice!r} is unknown: use auto, always or off")


def sharing_for(caches: PromptCaches, choice: SharedAttention) -> Sharing | None:
    """Return what shares rows for a model whose caches can be batched; None where no layer can, or none should."""
    if choice == "off" or not can_batch(caches):
        return None
    sharing = caches.sharing(always=choice == "always")
    return sharing if sharing.leaves else None


def can_batch(caches: PromptCaches) -> bool:
    """Tell whether mlx-lm decodes prompt caches of the model together, and each as it would alone.

    It refuses quantised and chunked ones, forgets the first rows that a window was told to keep, and fails on layers
    whose states have empty slots. Classes that are not mlx-lm's own may do anything.
    """
    if caches.options.kv_bits is not None:
        return False
    prompt_cache = new_prompt_cache(caches.model, caches.options)
    if not all(type(layer_cache) in (KVCache, RotatingKVCache, ArraysCache, CacheList) for layer_cache in prompt_cache):
        return False
    try:
        layout = probe_layout(caches.model, caches.options)
        leaves = zip(layout.leaves(), leaf_caches(prompt_cache), strict=True)
        return all(_can_merge(leaf, described) for (_, described), leaf in leaves)
    except PrefixBankError:
        return False


def _can_merge(leaf: Any, described: LayerLayout) -> bool:
    if type(leaf) is ArraysCache:
        return len(leaf.cache) == len(described.states)
    return bool(described.arrays) and (type(leaf) is KVCache or (type(leaf) is RotatingKVCache and leaf.keep == 0))
