"""Hold the table of docs/cache-kinds.md to the installed mlx-lm: a release with new models shows here."""

from __future__ import annotations

import re

from benchmarks import cache_kinds


def test_table_is_that_of_the_installed_mlx_lm() -> None:
    document = cache_kinds.DOCUMENT.read_text("utf-8")
    written = document.partition(cache_kinds.BEGIN)[2].partition(cache_kinds.END)[0].strip()
    assert written == cache_kinds.table(), "run: python -m benchmarks.cache_kinds --write"


def test_every_cache_class_of_the_installed_mlx_lm_but_one_has_an_adapter() -> None:
    """deepseek_v41 brings a class of its own, whose states grow with the tokens."""
    left_out = [name.strip() for name in re.findall(r"not stored: ([\w, ]+)", cache_kinds.table())]
    assert left_out == ["LayerCache"]
