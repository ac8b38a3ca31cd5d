"""Own whether a model's prompt caches go into one batch, and whether its sequences share the rows of their prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from prefixbank.errors import ConfigError, PrefixBankError
from prefixbank.kvcache.capture import leaf_caches
from prefixbank.kvcache.probe import new_prompt_cache, probe_layout
from prefixbank.kvcache.sharing import Sharing
from prefixbank.layout import LayerLayout
from prefixbank.promptcaches import PromptCaches

__all__ = [
    "SharedAttention",
    "SharedFrom",
    "can_batch",
    "check_shared_attention",
    "decoded_from",
    "scored_from",
    "sharing_for",
]

SharedAttention = Literal["auto", "always", "off"]
"""Share rows where it was measured to pay, wherever two sequences have rows in common, or nowhere."""


SharedFrom = Callable[[int], int | None]
"""Gives for a number of sequences how long a run must be for them to share its rows; None for never."""

_LEAST_SCORED = 64


def check_shared_attention(choice: str) -> None:
    """Raise `ConfigError` for an unknown choice."""
    if choice not in get_args(SharedAttention):
        raise ConfigError(f"shared_attention={choice!r} is unknown: use auto, always or off")


def sharing_for(caches: PromptCaches, choice: SharedAttention) -> Sharing | None:
    """Return what shares rows for a model whose caches can be batched; None where no layer can, or none should."""
    return caches.sharing if choice != "off" and caches.sharing.leaves else None


def decoded_from(sharing: Sharing | None, choice: SharedAttention, n_steps: int) -> SharedFrom:
    """Return from how many tokens on rows are shared by sequences that are decoded for so many steps."""
    if sharing is None or choice == "always":
        return _always_or_never(sharing)
    return lambda n_sequences: sharing.least_tokens(n_sequences, n_steps)


def scored_from(sharing: Sharing | None, choice: SharedAttention) -> SharedFrom:
    """Return from how many tokens on rows are shared by sequences that are scored.

    Scores take two steps or so, so that merging the caches and picking sequences out of them is most of the work of
    merged ones. Shared rows were faster or as fast from 64 tokens on (docs/performance.md).
    """
    if sharing is None or choice == "always":
        return _always_or_never(sharing)
    return lambda n_sequences: _LEAST_SCORED if n_sequences > 1 else None


def _always_or_never(sharing: Sharing | None) -> SharedFrom:
    return lambda n_sequences: 1 if sharing is not None and n_sequences > 1 else None


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
