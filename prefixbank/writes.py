"""Own writing behind: a queue of stores, bounded by their bytes, and the thread that does them in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from prefixbank.chunking import common_run

__all__ = ["WriteQueue"]


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """Describe a store that is queued or under way."""

    namespace_id: int
    token_ids: bytes
    n_bytes: int


class WriteQueue:
    """Do stores on a thread of their own, one after another. Safe to use from several threads.

    The queue holds up to `max_bytes` of copied rows, or one store of any size. A store that fails is handed to
    `on_error`, and kept for `raise_failure`; the next one goes on. When the interpreter exits, what is queued is still
    written (as `concurrent.futures` does).
    """

    def __init__(self, max_bytes: int, on_error: Callable[[Exception], None]) -> None:
        self.max_bytes = max_bytes
        self._on_error = on_error
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[_Pending] = []
        self._last: Future[None] | None = None
        self._n_bytes = 0
        self._failure: Exception | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Return the bytes of copied rows that wait to be written."""
        return self._n_bytes

    def has_room(self, n_bytes: int) -> bool:
        """Tell whether a store of so many bytes would be taken now."""
        return self._n_bytes == 0 or self._n_bytes + n_bytes <= self.max_bytes

    def submit(self, namespace_id: int, token_ids: bytes, n_bytes: int, job: Callable[[], object]) -> bool:
        """Queue a store of packed token ids; returns False, at once, where the queue or the system has no room."""
        pending = _Pending(namespace_id, token_ids, n_bytes)
        with self._lock:
            if self._closed or not self.has_room(n_bytes):
                return False
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "prefixbank-write")
            self._n_bytes += n_bytes
            self._pending.append(pending)
            try:
                self._last = self._executor.submit(self._run, pending, job)
            except RuntimeError:  # the system has no thread left, or the interpreter is about to exit
                self._pending.remove(pending)
                self._n_bytes -= n_bytes
                return False
        return True

    def _run(self, pending: _Pending, job: Callable[[], object]) -> None:
        if pending not in self._pending:  # given up when no thread could be started
            return
        try:
            job()
        except Exception as exc:
            with self._lock:
                self._failure = self._failure or exc
            self._on_error(exc)
        finally:
            with self._lock:
                self._pending.remove(pending)
                self._n_bytes -= pending.n_bytes

    def n_covered(self, namespace_id: int, token_ids: bytes) -> int:
        """Return how many leading tokens of packed token ids are about to be stored."""
        with self._lock:
            runs = [
                common_run(pending.token_ids, token_ids)
                for pending in self._pending
                if pending.namespace_id == namespace_id
            ]
        return max(runs, default=0)

    def wait(self) -> None:
        """Wait for everything that is queued by now."""
        with self._lock:
            last = self._last
        if last is not None:
            last.result()

    def raise_failure(self) -> None:
        """Raise the first failure since the last call, if there was one."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Write everything that is queued and end the thread. Nothing is taken any more."""
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
