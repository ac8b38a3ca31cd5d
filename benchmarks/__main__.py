"""Run the benchmarks, and print tables; write JSON and a plot.

    python -m benchmarks                        all of them (about half an hour on two CPU cores)
    python -m benchmarks loading --repeats 9    one of them
    python -m benchmarks first-token --model tiny llama-8b --tokens 256 2048 --json figures.json --plot figures.svg

Contenders run in turn in one process, and ratios are medians over rounds: machines are noisy, trust the ratios.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks import (
    batches,
    disk,
    evaluation,
    first_token,
    index_growth,
    loading,
    measuring,
    models,
    plot,
    precision,
    report,
    storing,
)
from prefixbank.config import parse_size
from prefixbank.errors import PrefixBankError

SECTIONS = ("first-token", "loading", "storing", "disk", "index", "evaluation", "batches", "precision")
DEFAULT_MODELS = {
    "first-token": ("tiny", "smollm2", "large"),
    "storing": ("smollm2", "large"),
    "disk": ("smollm2",),
    "evaluation": ("smollm2",),
    "batches": ("small", "smollm2"),
    "precision": ("smollm2",),
}
INDEX_CHUNKS = (1_000, 10_000, 100_000)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="section", help=f"{', '.join(SECTIONS)}, or all (the default)")
    known = ", ".join(models.BUILT_IN)
    parser.add_argument("--model", nargs="+", help=f"{known}, or any mlx-lm model's folder or hub id")
    parser.add_argument("--tokens", type=int, nargs="+", help="prefix lengths, in place of each section's own")
    parser.add_argument("--queries", type=int, nargs="+", default=list(batches.DEFAULT_QUERIES), help="of a batch")
    parser.add_argument("--chunks", type=int, nargs="+", default=list(INDEX_CHUNKS), help="sizes of the index")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each measurement (5)")
    parser.add_argument("--folder", type=Path, help="where banks and files are made (the system's temporary folder)")
    parser.add_argument("--mlx-cache", metavar="SIZE", help="how much freed memory MLX keeps (mx.set_cache_limit)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw first-token, or batches, there (.svg or .png)")
    options = parser.parse_args(arguments)
    unknown = set(options.sections) - {*SECTIONS, "all"}
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}: choose from {', '.join(SECTIONS)}, all")
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.plot and options.plot.suffix not in plot.SUFFIXES:
        parser.error(f"--plot {options.plot}: give a name that ends in {' or '.join(plot.SUFFIXES)}")
    if not options.sections or "all" in options.sections:
        options.sections = list(SECTIONS)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections asked for, each table printed when it is ready."""
    options = parse(arguments)
    if options.plot and not plot.can_plot():
        measuring.say(plot.MATPLOTLIB_MISSING)
        options.plot = None
    if options.mlx_cache:
        mx.set_cache_limit(parse_size(options.mlx_cache))
    machine = report.describe_machine() | {"repeats": options.repeats, "mlx_cache": options.mlx_cache or "default"}
    for name, value in machine.items():
        print(f"{name}: {value}")
    print()
    loaded = _Models(options.model)
    results: dict[str, Any] = {}
    for section in options.sections:
        results[section], text = _run(section, options, loaded)
        print(text, flush=True)
        if options.json:  # after each: what was measured is kept, whatever comes next
            report.write_json(options.json, machine, results)
    if options.plot:
        _plot(results, options.plot)


def _run(section: str, options: argparse.Namespace, loaded: _Models) -> tuple[dict[str, Any], str]:
    """Return a section's result, and its tables as text."""
    repeats, folder = options.repeats, options.folder
    if section == "index":
        rows = index_growth.run(options.chunks)
        return {"rows": rows}, f"Index growth\n\n{index_growth.table(rows)}\n"
    if section == "loading":
        result = loading.run(options.tokens or loading.DEFAULT_TOKENS, repeats, folder)
        found = loading.tables(result)
    elif section == "first-token":
        result = first_token.run(loaded.of(section), options.tokens or first_token.DEFAULT_TOKENS, repeats, folder)
        found = first_token.tables(result)
    elif section == "storing":
        result = storing.run(loaded.of(section), options.tokens or storing.DEFAULT_TOKENS, repeats, folder)
        found = storing.tables(result)
    elif section == "batches":
        lengths = options.tokens or batches.DEFAULT_TOKENS
        result = batches.run(loaded.of(section), options.queries, lengths, repeats, folder)
        found = batches.tables(result)
    elif section == "precision":
        result = precision.run(loaded.of(section))
        found = precision.tables(result)
    elif section == "evaluation":
        if not evaluation.can_evaluate():
            measuring.say(evaluation.LM_EVAL_MISSING)
            return {"rows": []}, ""
        result = evaluation.run(loaded.of(section), repeats, folder)
        found = evaluation.tables(result)
    else:
        result = disk.run(loaded.of(section), folder)
        found = disk.tables(result)
    return result, "\n".join(map(str, found))


def _plot(results: dict[str, Any], path: Path) -> None:
    if results.get("first-token", {}).get("rows"):
        plot.save(results["first-token"], path)
    elif results.get("batches", {}).get("rows"):
        plot.save_batches(results["batches"], path)
    else:
        measuring.say("no plot: it shows first-token or batches, which were not measured")
        return
    measuring.say(f"plot: {path}")


class _Models:
    """Load models when a section first needs them, once."""

    def __init__(self, names: list[str] | None) -> None:
        """Take the names asked for; None leaves it to each section."""
        self._asked_for = names
        self._loaded: dict[str, models.BenchModel] = {}

    def of(self, section: str) -> list[models.BenchModel]:
        """Return the models that a section measures; of its own choice, those that can be loaded here."""
        found = []
        for name in self._asked_for or DEFAULT_MODELS[section]:
            try:
                if name not in self._loaded:
                    measuring.say(f"loading the model {name}")
                    self._loaded[name] = models.load(name)
            except PrefixBankError as exc:
                if self._asked_for:
                    raise SystemExit(f"{name}: {exc}") from exc
                measuring.say(f"{name} is left out: {exc}")
            else:
                found.append(self._loaded[name])
        return found


if __name__ == "__main__":
    main()
