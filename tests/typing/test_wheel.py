"""Hold the wheel to its contents: types, migrations and the demo's prompt ship with the code."""

from __future__ import annotations

import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

CHECKOUT = Path(__file__).parents[2]


def test_the_wheel_ships_types_migrations_and_the_demos_prompt(tmp_path: Path) -> None:
    [built] = WheelBuilder(str(CHECKOUT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(built).namelist())
    assert {
        "prefixbank/py.typed",
        "prefixbank/_migrations/env.py",
        "prefixbank/_migrations/versions/0001_first_index.py",
        "prefixbank/demo/sentiment.toml",
    } <= names
    modules = {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "prefixbank").rglob("*.py")}
    assert modules <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"prefixbank"}
    assert not [name for name in names if "__pycache__" in name]
