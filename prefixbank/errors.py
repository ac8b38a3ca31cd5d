"""Own the whole error tree of prefixbank and its exit codes.

No error of sqlite3, SQLAlchemy, safetensors, MLX or the operating system leaves a public call: each becomes one of
these, with a message that says what to do next. On the way to a generation they become a miss and one `BankWarning`.

::

    PrefixBankError                  exit code 3
    ├── ConfigError                  2   an option, size, path or name that makes no sense (also a ValueError)
    │   └── PromptError              2   a prompt that can't be used: empty, no chat template, broken few-shot file
    ├── UnknownPrefixError           2   no prefix, chunk or namespace of that name (also a LookupError)
    ├── BankNotFoundError           10   no bank at that path
    ├── BankBusyError               11   another process held the index for longer than the time limit
    ├── SchemaError                 12   an index or shard format that this version does not know
    ├── IndexCorruptError           13   the index file is damaged or is no prefixbank index
    ├── ShardError                  13
    │   ├── ShardMissingError       13   the shard's file is gone
    │   └── ShardCorruptError       13   the file is there and its bytes are not the ones that were stored
    ├── ArchiveError                13   an archive that is not what `prefixbank export` writes: damaged or hostile
    ├── StorageError                 3   the file system refused (full, read-only, no permission, input/output error)
    ├── BankReadOnlyError            3   a write was asked of a bank that is opened read-only
    ├── UnsupportedCacheError        3   a cache class that prefixbank can't store exactly
    ├── FingerprintMismatchError     3   KV that belongs to another model, adapter or cache layout
    ├── DemoModelError               3   the demo's model could not be fetched or converted
    └── EvaluationError              3   an evaluation that can't be run: lm-eval or a task is missing or broken

    BankWarning (a UserWarning)          said once for each cause; generation goes on without the bank
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ArchiveError",
    "BankBusyError",
    "BankNotFoundError",
    "BankReadOnlyError",
    "BankWarning",
    "ConfigError",
    "DemoModelError",
    "EvaluationError",
    "FingerprintMismatchError",
    "IndexCorruptError",
    "PrefixBankError",
    "PromptError",
    "SchemaError",
    "ShardCorruptError",
    "ShardError",
    "ShardMissingError",
    "StorageError",
    "UnknownPrefixError",
    "UnsupportedCacheError",
]


class PrefixBankError(Exception):
    """Be the root of all errors that prefixbank raises."""

    exit_code: ClassVar[int] = 3


class ConfigError(PrefixBankError, ValueError):
    """Refuse an option, size, path or name that makes no sense."""

    exit_code = 2


class PromptError(ConfigError):
    """Refuse a prompt that can't be used: empty, no chat template, a broken few-shot file."""


class UnknownPrefixError(PrefixBankError, LookupError):
    """Say that the bank has no prefix, chunk or namespace of that name."""

    exit_code = 2


class BankNotFoundError(PrefixBankError):
    """Say that there is no bank at a path, or that it was deleted while it was open."""

    exit_code = 10


class BankBusyError(PrefixBankError):
    """Say that another process held the index for longer than the time limit."""

    exit_code = 11


class SchemaError(PrefixBankError):
    """Refuse an index or a shard whose format this version does not know; nothing was changed."""

    exit_code = 12


class IndexCorruptError(PrefixBankError):
    """Say that the index file is damaged, or is no prefixbank index."""

    exit_code = 13


class ShardError(PrefixBankError):
    """Be the root of what can be wrong with one shard file."""

    exit_code = 13


class ShardMissingError(ShardError):
    """Say that a shard's file is gone."""


class ShardCorruptError(ShardError):
    """Say that a shard's bytes are not the ones that were stored."""


class ArchiveError(PrefixBankError):
    """Refuse an archive that is not what `prefixbank export` writes: damaged, or made to harm. Nothing was stored."""

    exit_code = 13


class StorageError(PrefixBankError):
    """Say that the file system refused: full, read-only, no permission, input/output error.

    `index_is_full` tells that there was no room for a change of the index: not even for one that deletes.
    """

    index_is_full = False


class BankReadOnlyError(PrefixBankError):
    """Refuse a write to a bank that is opened read-only."""


class UnsupportedCacheError(PrefixBankError):
    """Name a cache class that prefixbank can't store exactly."""


class FingerprintMismatchError(PrefixBankError):
    """Refuse KV that belongs to another model, adapter or cache layout."""


class DemoModelError(PrefixBankError):
    """Say that the demo's model could not be fetched or converted."""


class EvaluationError(PrefixBankError):
    """Say that an evaluation can't be run: lm-evaluation-harness or a task is missing or broken."""


class BankWarning(UserWarning):
    """Say once that the bank could not be used; generation goes on without it."""
