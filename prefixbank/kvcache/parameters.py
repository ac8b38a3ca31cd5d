"""Own telling models apart by what is in memory: parameters, and the settings of modules that parameters don't show."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from prefixbank.kvcache.capture import UNSIGNED

__all__ = ["digest_parameters", "live_arrays"]

_NOT_SETTINGS = {"_training", "_no_grad"}  # neither changes what inference computes


def _leaves(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every array and plain setting of every module by path, hidden ones too (LoRA scales, rope bases)."""
    for path, module in sorted(model.named_modules()):
        yield f"{path}:class", f"{type(module).__module__}.{type(module).__qualname__}"
        for name, value in sorted({**vars(module), **module}.items()):
            if name in _NOT_SETTINGS or callable(value):
                continue
            for inner, leaf in tree_flatten({name: value}, is_leaf=lambda x: isinstance(x, nn.Module)):
                if not isinstance(leaf, nn.Module):
                    yield f"{path}:{inner}", leaf


def digest_parameters(model: nn.Module) -> str:
    """Return the SHA-256, in hex, of all arrays and settings of a model. Reads all its weights."""
    digest = hashlib.sha256()
    for name, leaf in _leaves(model):
        if isinstance(leaf, mx.array):
            digest.update(f"{name}={leaf.dtype}{leaf.shape}\n".encode())
            if leaf.size:
                if leaf.dtype == mx.bool_ or leaf.dtype.size not in UNSIGNED:
                    bits = np.array(leaf)
                else:
                    bits = np.array(mx.contiguous(leaf).view(UNSIGNED[leaf.dtype.size]), copy=False)
                digest.update(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
        else:
            digest.update(f"{name}={leaf!r}\n".encode())
    return digest.hexdigest()


def live_arrays(model: nn.Module) -> list[mx.array]:
    """Return the arrays that the model computes with, in a fixed order, without reading them.

    Comparing two such lists by identity shows that weights were swapped, converted, fused or trained (`update`,
    `load_weights`, `set_dtype`, LoRA layers, compiled training steps). It does not show what is assigned to a part of
    an array (`weight[0] = ...`).
    """
    arrays: list[mx.array] = []
    pending: list[Any] = [model]
    while pending:
        node = pending.pop()
        if isinstance(node, mx.array):
            arrays.append(node)
        elif isinstance(node, dict):  # modules are dicts; hidden entries may be filled in at the first step
            pending.extend(value for name, value in node.items() if not str(name).startswith("_"))
        elif isinstance(node, list | tuple):
            pending.extend(node)
    return arrays
