"""`prefixbank serve` takes mlx_lm.server's options beside its own, and ends where it can't serve."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path


def serve(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefixbank", "--bank", str(root), "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_help_shows_both_kinds_of_options(root: Path) -> None:
    for flag in ("--help", "-h"):
        done = serve(root, flag)
        assert (done.returncode, done.stderr) == (0, "")
        for option in ("--max-bytes", "--memory-bytes", "--draft-model", "--prompt-cache-bytes", "--kv-bits"):
            assert option in done.stdout
        assert "usage: prefixbank serve" in done.stdout
    assert not root.exists()


def test_wrong_options_are_refused_before_a_bank_is_made(root: Path) -> None:
    for options in (["--portt", "1"], ["--port", "x"], ["--max-bytes", "much"], ["--memory-bytes", "-1"], ["word"]):
        done = serve(root, *options)
        assert done.returncode == 2, options
        assert "Traceback" not in done.stderr
    assert not root.exists()


def test_a_port_that_is_taken_ends_the_server(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = serve(root, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "can't listen at 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bank_that_can_not_be_opened_is_an_error(root: Path) -> None:
    root.mkdir()
    (root / "bank.json").write_text("{}")
    done = serve(root, "--port", "0")
    assert done.returncode == 12 or done.returncode == 2
    assert "serving" not in done.stderr
