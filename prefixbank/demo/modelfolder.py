"""Own making a model folder in the user's cache once, however often it is asked for; knows no particular model."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

__all__ = ["MARKER_NAME", "make_once", "write_json"]

MARKER_NAME = "source.json"


def make_once(
    name: str, source: Mapping[str, Any], build: Callable[[Path, Path], None], cache_root: Path | None = None
) -> Path:
    """Return the folder `models/NAME` of the cache, building it if it is not there whole and from this source.

    The cache root is `cache_root`, else the environment's PREFIXBANK_CACHE, else the user's cache folder. One process
    builds while others wait for it; if it dies, only a temporary folder is left, and the next call clears it away.
    `build` gets a folder to work in and the new model folder. Raises what it raises, and `OSError`.
    """
    if cache_root is None:
        from_environment = os.environ.get("PREFIXBANK_CACHE")
        user_cache = platformdirs.user_cache_path("prefixbank")
        cache_root = Path(from_environment).expanduser() if from_environment else user_cache
    folder = cache_root / "models" / name
    if _is_finished(folder, source):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder.with_name(f".{name}.lock")):
        if not _is_finished(folder, source):
            _make(folder, source, build)
    return folder


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON file as people read it."""
    path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


@contextmanager
def exclusive_lock(lock_path: Path) -> Iterator[None]:
    """Hold a lock file that the system frees when its holder dies; the empty file stays."""
    with lock_path.open("a") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def _is_finished(folder: Path, source: Mapping[str, Any]) -> bool:
    """Tell whether the marker names this source, and the files have the sizes that it says."""
    try:
        marker = json.loads((folder / MARKER_NAME).read_text("utf-8"))
        n_bytes = marker.pop("n_bytes")
        return bool(marker == source and n_bytes == {name: (folder / name).stat().st_size for name in n_bytes})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _make(folder: Path, source: Mapping[str, Any], build: Callable[[Path, Path], None]) -> None:
    """Make the folder beside its final place and rename it there; needs the lock."""
    prefix = f".{folder.name}.tmp-"
    for left_behind in folder.parent.glob(f"{prefix}*"):  # its maker is dead: we hold the lock
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as temporary:
        work = Path(temporary)
        new = work / "model"
        new.mkdir()
        build(work, new)
        n_bytes = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
        write_json(new / MARKER_NAME, {**source, "n_bytes": n_bytes})
        if folder.exists():  # half made, or by another converter
            folder.rename(work / "outdated")
        new.rename(folder)
