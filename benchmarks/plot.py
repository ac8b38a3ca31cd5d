"""Own the plots: time to the first token against prefix length, and times of a step against the size of a batch.

One panel a model, one line a contender (for batches: a contender and prefix length).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.first_token import CONTENDERS

__all__ = ["MATPLOTLIB_MISSING", "SUFFIXES", "can_plot", "save", "save_batches"]

SUFFIXES = (".svg", ".png")

MATPLOTLIB_MISSING = "no plot: matplotlib is not installed (pip install 'prefixbank[bench]')"

# Colours by Okabe and Ito, which people with any colour vision tell apart; markers and dashes say the same again.
STYLES = dict(
    zip(
        CONTENDERS,
        (
            ("#000000", "o", "-"),
            ("#E69F00", "s", "--"),
            ("#D55E00", "D", "--"),
            ("#0072B2", "^", "-"),
            ("#56B4E9", "v", ":"),
            ("#009E73", "P", "-"),
            ("#CC79A7", "X", "-"),
        ),
        strict=True,
    )
)


def can_plot() -> bool:
    """Tell whether matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def save(result: Mapping[str, Any], path: Path) -> None:
    """Plot the rows of `first_token.run` into an SVG or PNG file, as its suffix says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    figure = Figure(figsize=(1.5 + 4.5 * len(models), 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(models), squeeze=False)[0]
    for panel, model in zip(axes, models, strict=True):
        for name in CONTENDERS:
            rows = [row for row in result["rows"] if (row["model"], row["contender"]) == (model, name)]
            colour, marker, dashes = STYLES[name]
            panel.plot(
                [row["n_tokens"] for row in rows],
                [row["median_s"] for row in rows],
                color=colour,
                marker=marker,
                linestyle=dashes,
                linewidth=1.6,
                markersize=6,
                label=name,
            )
        ticks = {row["n_tokens"] for row in result["rows"] if row["model"] == model}
        _lay_out(panel, model, "tokens in the prefix", ticks)
    axes[0].set_ylabel("time to the first token (median)")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2 + len(models), frameon=False
    )
    figure.savefig(path, dpi=150)


def save_batches(result: Mapping[str, Any], path: Path) -> None:
    """Plot the steps of `batches.run` into an SVG or PNG file, as its suffix says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    figure = Figure(figsize=(1.5 + 4.5 * len(models), 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(models), squeeze=False)[0]
    looks = {"merged": ("#D55E00", "--"), "shared": ("#0072B2", "-")}
    for panel, model in zip(axes, models, strict=True):
        of_model = [row for row in result["rows"] if row["model"] == model]
        lengths = sorted({row["n_tokens"] for row in of_model})
        for name, (colour, dashes) in looks.items():
            for n_tokens, marker in zip(lengths, "osD^vPX", strict=False):
                rows = [row for row in of_model if (row["contender"], row["n_tokens"]) == (name, n_tokens)]
                panel.plot(
                    [row["n_queries"] for row in rows],
                    [row["step_s"] for row in rows],
                    color=colour,
                    linestyle=dashes,
                    marker=marker,
                    label=f"{name}, {n_tokens:,} tokens",
                )
        _lay_out(panel, model, "queries in the batch", {row["n_queries"] for row in of_model})
    axes[0].set_ylabel("time of a step (median)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def _lay_out(panel: Any, title: str, label: str, ticks: Iterable[int]) -> None:
    """Give a panel both logarithmic axes, with times upwards and `ticks` along the other."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    panel.set(xscale="log", yscale="log", xlabel=label)
    panel.set_title(title, fontsize=10)
    panel.set_xticks(sorted(ticks), [f"{n:,}" for n in sorted(ticks)])
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(FuncFormatter(_seconds))
    panel.grid(alpha=0.3)


def _seconds(seconds: float, _position: int) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"
