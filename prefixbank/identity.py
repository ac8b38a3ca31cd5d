"""Own the answer to whose KV it is: a model's fingerprint and namespace, made anew when its weights are swapped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import mlx.nn as nn

from prefixbank import fingerprint as fingerprints
from prefixbank.chunking import root_key
from prefixbank.errors import UnsupportedCacheError
from prefixbank.kvcache.parameters import LiveArrays, digest_parameters
from prefixbank.kvcache.probe import CacheOptions, device_name, probe_layout
from prefixbank.layout import CacheLayout
from prefixbank.values import Namespace

if TYPE_CHECKING:
    from prefixbank.session import BankSession

__all__ = ["ModelIdentity"]


class ModelIdentity:
    """Know under which namespace a live model's KV is stored."""

    def __init__(
        self,
        model: nn.Module,
        *,
        label: str,
        options: CacheOptions,
        salt: str | bytes,
        file_parts: Mapping[str, object] | None,
    ) -> None:
        """Take what the model's files say of it; None where it has none, then its parameters are digested."""
        self._model = model
        self._label = label
        self._options = options
        self._salt = salt.encode() if isinstance(salt, str) else bytes(salt)
        self._parts = file_parts
        self._arrays = LiveArrays(model)
        self.generation = 0
        """How often the model was found to be another one than before."""
        self._layout: CacheLayout | None = None
        self._last: tuple[Namespace, CacheLayout] | None = None
        self._refused: UnsupportedCacheError | None = None
        self._known: tuple[Namespace, CacheLayout] | None = None

    @property
    def layout(self) -> CacheLayout:
        """Return the cache layout as it was when the model was last identified."""
        if self._layout is None:
            raise UnsupportedCacheError("the model's cache has not been looked at yet")
        return self._layout

    @property
    def known(self) -> tuple[Namespace, CacheLayout]:
        """Return what `identify` returned last, without looking at the model."""
        if self._last is None:
            raise UnsupportedCacheError("the model has not been identified yet")
        return self._last

    def identify(self, session: BankSession) -> tuple[Namespace, CacheLayout]:
        """Return the namespace and cache layout of the model as it is now.

        A model whose arrays were swapped since is another one, whatever its files say: then its parameters are
        digested. Raises `UnsupportedCacheError` for a cache that can't be stored, and the bank's errors.
        """
        if not self._arrays.are_unchanged():
            self._arrays = LiveArrays(self._model)
            self.generation += 1
            self._parts = self._known = self._last = self._refused = self._layout = None
        if self._refused is not None:
            raise self._refused
        if self._known is not None:
            return self._known
        try:
            self._layout = layout = probe_layout(self._model, self._options)
        except UnsupportedCacheError as exc:
            self._refused = exc
            raise
        if self._parts is None:
            self._parts = {"parameters": digest_parameters(self._model)}
        fingerprint = fingerprints.fingerprint({**self._parts, "kv": asdict(self._options), "layout": layout.to_json()})
        namespace = session.namespace(
            Namespace(
                id=0,
                root_key=root_key(fingerprint, self._salt),
                fingerprint=fingerprint,
                salt_digest=fingerprints.salt_digest(self._salt),
                label=self._label,
                layout=layout.to_json(),
                created_at=int(time.time()),
            )
        )
        self._last = namespace, layout
        session.recall_rates(namespace, device_name())
        if namespace.id:  # a read-only bank may learn of this model later
            self._known = namespace, layout
        return namespace, layout
