"""A server in a process of its own, with a bank or as mlx-lm's, and what a client gets from it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

# Both serve with the same BLAS, and say at which port.
PLAIN = """
import sys
from prefixbank.blas import load_blas
load_blas()
from mlx_lm import server
class Server(server.ThreadingHTTPServer):
    def server_activate(self):
        super().server_activate()
        print("serving at http://127.0.0.1:%d/v1" % self.server_address[1], file=sys.stderr, flush=True)
http = server._run_http_server
server._run_http_server = lambda host, port, generator: http(host, port, generator, server_class=Server)
server.main()
"""


@dataclass
class ServerProcess:
    """Face a running server."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    _reader: threading.Thread | None = None

    def client(self) -> openai.OpenAI:
        """Return a client, to be closed."""
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=120)

    def wait_until_ready(self) -> None:
        """Read stderr up to the address, and go on reading it behind."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"serving at (http://\S+)", line):
                self.url = found[1]
                break
        assert self.url, "".join(self.lines)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Ask the server to end; returns its exit code."""
        self.process.send_signal(sig)
        code = self.process.wait(60)
        if self._reader is not None:
            self._reader.join(10)
        return code

    def close(self) -> None:
        """Close what is read from."""
        if self._reader is not None:
            self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def said(self, text: str) -> int:
        """Return in how many lines of stderr a text is."""
        return sum(text in line for line in self.lines)


@contextmanager
def running(*command: str) -> Iterator[ServerProcess]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    )
    server = ServerProcess(process)
    try:
        server.wait_until_ready()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        server.close()


@contextmanager
def banked(root: Path, *options: str, busy_timeout_s: float = 15) -> Iterator[ServerProcess]:
    """Serve with the bank at `root`; the address is taken from what the verb says."""
    bank = ["--bank", str(root), "--busy-timeout", str(busy_timeout_s)]
    with running("-m", "prefixbank", *bank, "serve", "--port", "0", *options) as server:
        yield server
        if server.process.poll() is None:
            assert server.stop() == 0, "".join(server.lines)


@contextmanager
def plain(*options: str) -> Iterator[ServerProcess]:
    """Serve as `mlx_lm.server` does."""
    with running("-c", PLAIN, "--port", "0", *options) as server:
        yield server


@dataclass(frozen=True)
class Answer:
    """Hold what a client got: the text, and what the server says of its prompt."""

    text: str
    prompt_tokens: int
    cached_tokens: int


def ask(server: ServerProcess, messages: Sequence[dict[str, str]], *, stream: bool = False, **options: Any) -> Answer:
    """Ask for a greedy chat completion."""
    given: Any = {"model": "default_model", "max_tokens": 12, "temperature": 0, "messages": messages, **options}
    with server.client() as client:
        if not stream:
            done = client.chat.completions.create(**given)
            return _answer(done.choices[0].message.content or "", done.usage)
        chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **given))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return _answer(text, chunks[-1].usage)


def _answer(text: str, usage: Any) -> Answer:
    return Answer(text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)
