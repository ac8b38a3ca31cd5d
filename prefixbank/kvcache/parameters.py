"""Own telling models apart by what is in memory: parameters, and the settings of modules that parameters don't show."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from operator import is_
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from prefixbank.kvcache.capture import UNSIGNED

__all__ = ["LiveArrays", "digest_parameters"]

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


class LiveArrays:
    """Know the arrays that a model computes with, by identity and without reading them.

    A second look shows that weights were swapped, converted, fused or trained (`update`, `load_weights`, `set_dtype`,
    LoRA layers, compiled training steps). It does not show what is assigned to a part of an array (`weight[0] = ...`).
    """

    def __init__(self, model: nn.Module) -> None:
        """Look at the model; what it holds stays alive, so that no other object can take its identity."""
        self._held: list[tuple[dict[str, Any] | list[Any], list[Any], list[Any]]] = []
        pending: list[Any] = [model]
        while pending:
            node = pending.pop()
            if isinstance(node, tuple):  # it can't change
                pending += node
            elif isinstance(node, dict | list):
                names, held = _held_by(node)
                self._held.append((node, names, held))
                pending += held

    def are_unchanged(self) -> bool:
        """Tell whether every module still holds the very arrays and modules that it held, under the same names."""
        for node, names_before, before in self._held:
            names, held = _held_by(node)
            if names != names_before or not all(map(is_, held, before)):
                return False
        return True


_HOLDERS = (mx.array, dict, list, tuple)


def _held_by(node: dict[str, Any] | list[Any]) -> tuple[list[Any], list[Any]]:
    """Return names and values of the arrays and modules, but not the settings, of a module (a dict) or a list.

    Hidden entries don't count: they may be filled in at the first step.
    """
    if isinstance(node, list):
        held = [value for value in node if isinstance(value, _HOLDERS)]
        return [len(held)], held
    names = [n for n, value in node.items() if isinstance(value, _HOLDERS) and not str(n).startswith("_")]
    return names, [node[name] for name in names]
