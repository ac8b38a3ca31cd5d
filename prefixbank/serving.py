"""Own putting a bank behind `mlx_lm.server`: its HTTP server and generation loop, with prompt caches from the bank."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm import server

from prefixbank import attaching
from prefixbank import fingerprint as fingerprints
from prefixbank.bank import PrefixBank
from prefixbank.errors import ConfigError, PrefixBankError
from prefixbank.kvcache import loading
from prefixbank.promptcaches import PromptCaches
from prefixbank.servercache import BankedPromptCache, ModelKey
from prefixbank.session import BankSession

__all__ = ["BankedModelProvider", "parse_arguments", "serve"]

_THREAD_ENDS_S = 1.0
"""How long to wait for the end of a thread that has left Python, where it can't be seen (but on Linux)."""


def parse_arguments(argv: Sequence[str], prog: str = "mlx_lm.server") -> argparse.Namespace:
    """Return what `mlx_lm.server` makes of its command line; like it, set up logging and MLX's wired limit.

    Raises `SystemExit` as argparse does, after `--help` too.
    """
    parsed: list[argparse.Namespace] = []

    def run(host: str, port: int, model_provider: Any) -> None:
        parsed.append(model_provider.cli_args)

    # Its parser is made and used inside `main`, which ends by calling `run`.
    with mock.patch.object(server, "run", run), mock.patch.object(sys, "argv", [prog, *argv]):
        server.main()
    return parsed[0]


def serve(
    bank: PrefixBank,
    arguments: argparse.Namespace,
    on_ready: Callable[[str, int], None],
    *,
    precision: str = "auto",
    salt: str | bytes = b"",
) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` is told host and port. The bank stays open.

    `precision` and `salt` are those of `PrefixBank.load_model`, for every model. Raises `ConfigError` where the
    address can't be had.
    """
    loading.require_precision(precision)
    if mx.distributed.init().size() > 1:
        raise ConfigError("a model that is spread over several processes has no bank: use mlx_lm.server")

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def server_activate(self) -> None:
            super().server_activate()
            on_ready(str(self.server_address[0]), int(self.server_address[1]))

    session = bank._session
    provider = BankedModelProvider(arguments, session, precision=precision, salt=salt)
    with _sigterm_as_interrupt():
        generator = _Generator(provider, BankedPromptCache(session, provider.caches_of, arguments.prompt_cache_size))
        try:
            with suppress(KeyboardInterrupt):  # one that came before requests were waited for
                server._run_http_server(arguments.host, arguments.port, generator, server_class=Server)
        except OSError as exc:
            raise ConfigError(f"can't listen at {arguments.host}:{arguments.port}: {exc}") from exc
        finally:
            generator.stop_and_join()
            _wait_for_end(generator._generation_thread)


def _wait_for_end(thread: threading.Thread) -> None:
    """Wait until a thread that was joined is gone.

    `join` returns before: MLX then still frees what the thread has compiled, for which it needs the interpreter, and
    where that is ending meanwhile the process is aborted.
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    give_up_at = time.monotonic() + _THREAD_ENDS_S
    while time.monotonic() < give_up_at and (task.exists() or not task.parent.exists()):
        time.sleep(0.01)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM do what SIGINT does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class BankedModelProvider(server.ModelProvider):  # type: ignore[misc]
    """Load models as mlx-lm does, and attach each to the bank."""

    def __init__(
        self, arguments: argparse.Namespace, session: BankSession, *, precision: str = "auto", salt: str | bytes = b""
    ) -> None:
        """Take `mlx_lm.server`'s arguments."""
        super().__init__(arguments)
        self._precision = precision
        self._salt = salt
        self._session = session
        self._caches: PromptCaches | None = None

    def caches_of(self, key: ModelKey) -> PromptCaches | None:
        """Return the loaded model's prompt caches; None if it is another one by now, or can't use the bank."""
        return self._caches if key == self.model_key else None

    def reset(self) -> None:
        """Let go of the loaded model."""
        super().reset()
        self._caches = None

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        before = None if draft_model_path else self._digests(model_path, adapter_path)
        super()._load(model_path, adapter_path, draft_model_path)
        loaded_as = loading.convert(self.model, self._precision)
        if self.draft_model is not None:
            loading.convert(self.draft_model, self._precision)
        if before is None:
            return
        if self._digests(model_path, adapter_path) != before:
            self._session.warn("changed", f"{model_path} changed while it was loaded: it is served without the bank")
            return
        try:
            self._caches = self._attach(str(model_path), adapter_path, {**before, "loaded_as": loaded_as})
        except Exception as exc:  # the model is loaded, and serves without a bank too
            self._session.warn("attach", f"{model_path} is served without the bank: {exc}")

    def _digests(self, model_path: str, adapter_path: str | None) -> dict[str, object] | None:
        """Return the digests of a model's files; None where there are none: loading will say what is wrong."""
        try:
            files = fingerprints.list_model_files(loading.local_folder(str(model_path)))
            adapter_files = fingerprints.list_adapter_files(Path(adapter_path)) if adapter_path else []
            return {"model": self._session.digest_files(files), "adapter": self._session.digest_files(adapter_files)}
        except (PrefixBankError, OSError):
            return None

    def _attach(self, model_path: str, adapter_path: str | None, file_parts: dict[str, object]) -> PromptCaches | None:
        given = self.cli_args
        options: dict[str, Any] = {"prefill_step_size": given.prefill_step_size}
        if given.kv_bits is not None:
            options |= {
                "kv_bits": given.kv_bits,
                "kv_group_size": given.kv_group_size,
                "quantized_kv_start": given.quantized_kv_start,
            }
        llm = attaching.attach(
            self._session,
            self.model,
            self.tokenizer,
            label=model_path + (f" + {adapter_path}" if adapter_path else ""),
            file_parts=file_parts,
            salt=self._salt,
            **options,
        )
        caches = llm._caches
        try:
            _ = caches.identity.layout
        except PrefixBankError:  # an unsupported cache, which was said
            return None
        return caches


class _Generator(server.ResponseGenerator):  # type: ignore[misc]
    """Answer requests as mlx-lm does."""

    def _serve_single(self, request: Any, stream: Any) -> None:
        # Unlike a batch, mlx-lm's single request shows logits processors only the tokens that it computes.
        self.prompt_cache.hold_back = _n_seen_by_processors(request[2].logits)
        try:
            super()._serve_single(request, stream)
        finally:
            self.prompt_cache.hold_back = 0


def _n_seen_by_processors(given: Any) -> int:
    """Return how many of a prompt's last tokens the penalties of a request look at."""
    penalties = (
        (given.repetition_penalty, given.repetition_context_size),
        (given.presence_penalty, given.presence_context_size),
        (given.frequency_penalty, given.frequency_context_size),
    )
    return max((size for penalty, size in penalties if penalty), default=0)
