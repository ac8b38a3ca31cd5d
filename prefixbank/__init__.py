"""The few-shot prefix bank for MLX language models.

    from prefixbank import PrefixBank, FewShotPrompt, Example

`PrefixBank.open` gives a bank, `load_model` or `attach` a model that works from it. All public names are here; each is
imported when it is first used, so that looking at a bank needs no MLX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prefixbank import errors

if TYPE_CHECKING:
    from prefixbank.bank import BankStats, PrefixBank
    from prefixbank.check import CheckReport, Finding
    from prefixbank.errors import (
        BankBusyError,
        BankNotFoundError,
        BankReadOnlyError,
        BankWarning,
        ConfigError,
        DemoModelError,
        FingerprintMismatchError,
        IndexCorruptError,
        PrefixBankError,
        PromptError,
        SchemaError,
        ShardCorruptError,
        ShardError,
        ShardMissingError,
        StorageError,
        UnknownPrefixError,
        UnsupportedCacheError,
    )
    from prefixbank.eviction import PrunePlan
    from prefixbank.explain import Explanation
    from prefixbank.fewshot import Example, FewShotPrompt, RenderedPrompt
    from prefixbank.generation import BankedResponse, GenerationResult
    from prefixbank.kvcache.kinds import CacheKind, register_cache_kind
    from prefixbank.many import ManyResult
    from prefixbank.model import BankedModel
    from prefixbank.promptcaches import Lease, Resolved
    from prefixbank.scoring import ScoreResult
    from prefixbank.storing import Stored
    from prefixbank.values import Match, PrefixRecord
    from prefixbank.warming import Warmed

__version__: str  # looked up when it is asked for

_HOMES = {
    "bank": ("BankStats", "PrefixBank"),
    "check": ("CheckReport", "Finding"),
    "errors": tuple(errors.__all__),
    "eviction": ("PrunePlan",),
    "explain": ("Explanation",),
    "fewshot": ("Example", "FewShotPrompt", "RenderedPrompt"),
    "generation": ("BankedResponse", "GenerationResult"),
    "kvcache.kinds": ("CacheKind", "register_cache_kind"),
    "many": ("ManyResult",),
    "model": ("BankedModel",),
    "promptcaches": ("Lease", "Resolved"),
    "scoring": ("ScoreResult",),
    "storing": ("Stored",),
    "values": ("Match", "PrefixRecord"),
    "warming": ("Warmed",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BankBusyError",
    "BankNotFoundError",
    "BankReadOnlyError",
    "BankStats",
    "BankWarning",
    "BankedModel",
    "BankedResponse",
    "CacheKind",
    "CheckReport",
    "ConfigError",
    "DemoModelError",
    "Example",
    "Explanation",
    "FewShotPrompt",
    "Finding",
    "FingerprintMismatchError",
    "GenerationResult",
    "IndexCorruptError",
    "Lease",
    "ManyResult",
    "Match",
    "PrefixBank",
    "PrefixBankError",
    "PrefixRecord",
    "PromptError",
    "PrunePlan",
    "RenderedPrompt",
    "Resolved",
    "SchemaError",
    "ScoreResult",
    "ShardCorruptError",
    "ShardError",
    "ShardMissingError",
    "StorageError",
    "Stored",
    "UnknownPrefixError",
    "UnsupportedCacheError",
    "Warmed",
    "register_cache_kind",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("prefixbank")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Whoever works with models may import mlx next: a real BLAS must be loaded before that.
    from prefixbank.blas import load_blas

    load_blas()
    return getattr(import_module(f"prefixbank.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
