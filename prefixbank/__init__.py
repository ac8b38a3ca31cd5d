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
    from prefixbank.advice import Analysis, PartingPoint, PromptFinding
    from prefixbank.archives import ArchivedPrefix, Exported, Imported
    from prefixbank.bank import PrefixBank
    from prefixbank.bankstats import BankStats
    from prefixbank.check import CheckReport, Finding
    from prefixbank.errors import (
        ArchiveError,
        BankBusyError,
        BankNotFoundError,
        BankReadOnlyError,
        BankWarning,
        ConfigError,
        DemoModelError,
        EvaluationError,
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
    from prefixbank.fewshot import ChatRoles, Example, FewShotPrompt, RenderedPrompt
    from prefixbank.generation import BankedResponse, GenerationResult
    from prefixbank.kvcache.kinds import CacheKind, register_cache_kind
    from prefixbank.many import ManyResult
    from prefixbank.model import BankedModel
    from prefixbank.prefixfiles import FileState, PrefixFile, StoredVersion
    from prefixbank.promptcaches import Lease, Resolved
    from prefixbank.scoring import ScoreResult
    from prefixbank.storing import Stored
    from prefixbank.values import Match, PrefixRecord
    from prefixbank.warming import Replaced, Warmed, WarmPlan

__version__: str  # looked up when it is asked for

_HOMES = {
    "advice": ("Analysis", "PartingPoint", "PromptFinding"),
    "archives": ("ArchivedPrefix", "Exported", "Imported"),
    "bank": ("PrefixBank",),
    "bankstats": ("BankStats",),
    "check": ("CheckReport", "Finding"),
    "errors": tuple(errors.__all__),
    "eviction": ("PrunePlan",),
    "explain": ("Explanation",),
    "fewshot": ("ChatRoles", "Example", "FewShotPrompt", "RenderedPrompt"),
    "generation": ("BankedResponse", "GenerationResult"),
    "kvcache.kinds": ("CacheKind", "register_cache_kind"),
    "many": ("ManyResult",),
    "model": ("BankedModel",),
    "prefixfiles": ("FileState", "PrefixFile", "StoredVersion"),
    "promptcaches": ("Lease", "Resolved"),
    "scoring": ("ScoreResult",),
    "storing": ("Stored",),
    "values": ("Match", "PrefixRecord"),
    "warming": ("Replaced", "WarmPlan", "Warmed"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Analysis",
    "ArchiveError",
    "ArchivedPrefix",
    "BankBusyError",
    "BankNotFoundError",
    "BankReadOnlyError",
    "BankStats",
    "BankWarning",
    "BankedModel",
    "BankedResponse",
    "CacheKind",
    "ChatRoles",
    "CheckReport",
    "ConfigError",
    "DemoModelError",
    "EvaluationError",
    "Example",
    "Explanation",
    "Exported",
    "FewShotPrompt",
    "FileState",
    "Finding",
    "FingerprintMismatchError",
    "GenerationResult",
    "Imported",
    "IndexCorruptError",
    "Lease",
    "ManyResult",
    "Match",
    "PartingPoint",
    "PrefixBank",
    "PrefixBankError",
    "PrefixFile",
    "PrefixRecord",
    "PromptError",
    "PromptFinding",
    "PrunePlan",
    "RenderedPrompt",
    "Replaced",
    "Resolved",
    "SchemaError",
    "ScoreResult",
    "ShardCorruptError",
    "ShardError",
    "ShardMissingError",
    "StorageError",
    "Stored",
    "StoredVersion",
    "UnknownPrefixError",
    "UnsupportedCacheError",
    "WarmPlan",
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
