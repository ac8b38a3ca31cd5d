"""Which cache kinds the installed mlx-lm's model types use, and where each resumes; the table of docs/cache-kinds.md.

    python -m benchmarks.cache_kinds          print the table
    python -m benchmarks.cache_kinds --write  put it into docs/cache-kinds.md

Reads mlx-lm's sources without running them: what each `make_cache` names, and those of the model files that it builds
on. A model without `make_cache` gets `KVCache` for each layer (`RotatingKVCache` with `max_kv_size`).
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "cache-kinds.md"
BEGIN, END = "<!-- table: python -m benchmarks.cache_kinds --write -->", "<!-- end of table -->"
NOT_MODELS = {"__init__", "base", "cache", "activations", "bitlinear_layers", "gated_delta", "mla", "pipeline",
              "rope_utils", "ssm", "switch_layers"}  # fmt: skip
RESUMED_AT = {
    "KVCache": "any token",
    "ConcatenateKVCache": "any token",
    "QuantizedKVCache": "any token",
    "RotatingKVCache": "any token",
    "ChunkedKVCache": "any token",
    "CacheList": "",  # where its members can
    "ArraysCache": "kept states",
}


def models_folder() -> Path:
    """Return the folder of mlx-lm's model files, without importing it."""
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "models"


@cache
def kinds_of(model_type: str) -> frozenset[str]:
    """Return the cache classes that a model file's models make."""
    path = models_folder() / f"{model_type}.py"
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text("utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "make_cache"]
    if not functions:
        return _delegated(tree, model_type) or frozenset({"KVCache"})
    named = frozenset(
        node.id if isinstance(node, ast.Name) else node.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Cache")}
    found = named & (_cache_classes() | own)
    return found or _delegated(tree, model_type) or frozenset({"KVCache"})


@cache
def _cache_classes() -> frozenset[str]:
    tree = ast.parse((models_folder() / "cache.py").read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.ClassDef))


def _delegated(tree: ast.Module, model_type: str) -> frozenset[str]:
    """Return the cache classes of the model files whose `Model` this one is made of."""
    kinds: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            names = {alias.name for alias in node.names}
            for module in modules:
                whole = node.module is None or names & {"Model", "LanguageModel", "TextModel"}
                if module and whole and module not in NOT_MODELS and module != model_type:
                    kinds |= kinds_of(module)
    return frozenset(kinds)


def table() -> str:
    """Return the table as Markdown: the combinations of cache classes, the most common first."""
    by_kinds: dict[frozenset[str], list[str]] = {}
    for path in sorted(models_folder().glob("*.py")):
        if path.stem not in NOT_MODELS and "class Model(" in path.read_text("utf-8"):
            by_kinds.setdefault(kinds_of(path.stem), []).append(path.stem)
    lines = [f"mlx-lm {version('mlx-lm')}, {sum(map(len, by_kinds.values()))} model types:", ""]
    lines += ["| cache classes | resumed at | model types |", "|---|---|---|"]
    for kinds, types in sorted(by_kinds.items(), key=lambda entry: (-len(entry[1]), sorted(entry[0]))):
        unknown = [kind for kind in kinds if kind not in RESUMED_AT]
        resumed = "kept states" if "ArraysCache" in kinds else "any token"
        if unknown:
            resumed = f"not stored: {', '.join(sorted(unknown))}"
        lines.append(f"| {', '.join(sorted(kinds))} | {resumed} | {', '.join(types)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it into the document."""
    if "--write" not in sys.argv[1:]:
        print(table())
        return
    head, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    DOCUMENT.write_text(f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()
