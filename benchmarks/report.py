"""Own what is printed and written: the machine, tables with aligned columns, and JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

__all__ = ["Table", "describe_machine", "milliseconds", "write_json"]

SCHEMA = 2
"""The version of the JSON document; raised when a field changes its meaning or goes."""


@dataclass(frozen=True, slots=True)
class Table:
    """Hold a table as it is printed; `notes` stand below it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]

        def line(cells: Sequence[str]) -> str:
            first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            return "  ".join([first.strip().ljust(widths[0]), *others]).rstrip()

        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, "", line(self.header), rule, *map(line, self.rows), *self.notes, ""])


def milliseconds(seconds: float) -> str:
    """Return a time as tables show it."""
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.3f} ms"


def describe_machine() -> dict[str, Any]:
    """Return what figures depend on: machine, mlx's device, versions, and how busy the machine is just now."""
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": mx.device_info().get("device_name", platform.processor()),
        "n_cpus": os.cpu_count(),
        "device": str(mx.default_device()),
        "load_average": round(os.getloadavg()[0], 2),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "python": platform.python_version(),
            **_versions(("prefixbank", "mlx", "mlx-lm", "numpy")),
        },
    }


def _versions(names: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout
            found[name] = None
    return found


def write_json(path: Path, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Write all results as one JSON document; each section's module says what its fields mean."""
    path.write_text(json.dumps({"schema": SCHEMA, **machine, "results": results}, indent=2) + "\n", "utf-8")
