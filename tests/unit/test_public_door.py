"""Hold the public names to a list, and the first import to being light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import prefixbank

NAMES = {
    "open and use": {"PrefixBank", "BankedModel", "FewShotPrompt", "Example", "RenderedPrompt", "ChatRoles"},
    "results": {
        "Analysis", "ArchivedPrefix", "BankStats", "BankedResponse", "CheckReport", "Explanation", "Exported",
        "FileState", "Finding", "GenerationResult", "Imported", "Lease", "ManyResult", "Match", "PartingPoint",
        "PrefixFile", "PrefixRecord", "PromptFinding", "PrunePlan", "Replaced", "Resolved", "ScoreResult", "Stored",
        "StoredVersion", "WarmPlan", "Warmed",
    },
    "cache kinds": {"CacheKind", "register_cache_kind"},
    "errors": {
        "ArchiveError", "BankBusyError", "BankNotFoundError", "BankReadOnlyError", "BankWarning", "ConfigError",
        "DemoModelError", "EvaluationError", "FingerprintMismatchError", "IndexCorruptError", "PrefixBankError",
        "PromptError", "SchemaError", "ShardCorruptError", "ShardError", "ShardMissingError", "StorageError",
        "UnknownPrefixError", "UnsupportedCacheError",
    },
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    """A name that is added or taken away is a change for users: say so here and in the changelog."""
    assert set(prefixbank.__all__) == set().union(*NAMES.values())
    assert len(prefixbank.__all__) == len(set(prefixbank.__all__))


@pytest.mark.parametrize("name", sorted(prefixbank.__all__))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(prefixbank, name).__doc__
    assert name in dir(prefixbank)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(prefixbank.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {alias.name for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(prefixbank.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Bank'"):
        _ = prefixbank.Bank


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh Python has loaded after `code`."""
    printing = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", printing], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_prefixbank_loads_nothing_heavy() -> None:
    loaded = modules_after("import prefixbank; prefixbank.__version__; dir(prefixbank)")
    assert not loaded & {"mlx", "mlx_lm", "numpy", "sqlalchemy", "alembic", "transformers", "typer", "rich", "xxhash"}


def test_working_with_a_bank_loads_no_mlx(tmp_path: Path) -> None:
    loaded = modules_after(
        "from prefixbank import PrefixBank, FewShotPrompt, Example\n"
        f"bank = PrefixBank.open({str(tmp_path / 'bank')!r})\n"
        "FewShotPrompt('x', [Example('a', 'b')]).render('q')\n"
        "bank.stats(); bank.check(read_data=True); bank.prune(dry_run=True); bank.prefixes(); bank.close()"
    )
    assert not loaded & {"mlx", "mlx_lm", "numpy", "transformers"}


def test_opening_a_bank_that_is_there_loads_no_alembic(tmp_path: Path) -> None:
    prefixbank.PrefixBank.open(tmp_path / "bank").close()
    loaded = modules_after(f"from prefixbank import PrefixBank\nPrefixBank.open({str(tmp_path / 'bank')!r}).close()")
    assert "sqlalchemy" in loaded
    assert not loaded & {"alembic", "mako", "mlx"}
