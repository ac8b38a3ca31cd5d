"""Hold the queue of stores to its bound, its order and its end: whatever fails, the next store goes on."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from prefixbank.chunking import pack_token_ids
from prefixbank.errors import StorageError
from prefixbank.writes import WriteQueue

A, B = 1, 2  # namespaces
IDS = pack_token_ids([1, 2, 3, 4])


class Gate:
    """Be a job that waits until it is let through."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(30)


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def queue(errors: list[Exception]) -> Iterator[WriteQueue]:
    """Give a queue of 100 bytes."""
    made = WriteQueue(100, errors.append)
    yield made
    made.close()
    assert (made.n_bytes, made._pending) == (0, [])


@pytest.fixture
def gate(queue: WriteQueue) -> Iterator[Gate]:
    """Give a gate that a store of 10 bytes of `IDS` stands in."""
    made = Gate()
    assert queue.submit(A, IDS, 10, made)
    assert made.entered.wait(30)
    yield made
    made.opened.set()


def nothing() -> None:
    pass


def fail_with(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_stores_are_done_in_order_on_a_thread_of_their_own(queue: WriteQueue) -> None:
    done: list[tuple[int, int]] = []
    for number in range(20):
        assert queue.submit(A, IDS, 1, lambda number=number: done.append((number, threading.get_ident())))
        if number == 10:
            queue.wait()
    queue.wait()
    assert [number for number, _ in done] == list(range(20))
    assert len({ident for _, ident in done} - {threading.get_ident()}) == 1


def test_a_full_queue_takes_nothing_and_does_not_wait(queue: WriteQueue, gate: Gate) -> None:
    done: list[str] = []
    assert queue.submit(A, IDS, 90, lambda: done.append("fits"))
    assert queue.n_bytes == 100
    assert not queue.has_room(1)
    assert not queue.submit(A, IDS, 1, lambda: done.append("too much"))
    assert queue.submit(A, IDS, 0, lambda: done.append("no bytes"))
    assert queue.n_bytes == 100
    gate.opened.set()
    queue.wait()
    assert done == ["fits", "no bytes"]
    assert queue.n_bytes == 0
    assert queue.submit(A, IDS, 91, lambda: done.append("later"))
    queue.wait()
    assert done[-1] == "later"


def test_one_byte_too_many_is_too_many(queue: WriteQueue, gate: Gate) -> None:
    assert queue.has_room(90)
    assert not queue.has_room(91)
    assert not queue.submit(A, IDS, 91, nothing)
    assert queue.n_bytes == 10


def test_an_empty_queue_takes_one_store_of_any_size(queue: WriteQueue) -> None:
    gate = Gate()
    assert queue.has_room(10**9)
    assert queue.submit(A, IDS, 10**9, gate)
    assert queue.n_bytes == 10**9
    assert not queue.has_room(1)
    assert not queue.submit(A, IDS, 1, nothing)
    gate.opened.set()
    queue.wait()
    assert queue.n_bytes == 0


def test_a_store_that_fails_is_said_and_the_next_one_goes_on(queue: WriteQueue, errors: list[Exception]) -> None:
    first, second = StorageError("full"), ValueError("not one of ours")
    done: list[bool] = []
    queue.submit(A, IDS, 10, fail_with(first))
    queue.submit(A, IDS, 10, fail_with(second))
    queue.submit(A, IDS, 10, lambda: done.append(True))
    queue.wait()
    assert errors == [first, second]
    assert done == [True]
    assert (queue.n_bytes, queue.n_covered(A, IDS)) == (0, 0)


def test_the_first_failure_is_raised_once(queue: WriteQueue) -> None:
    queue.raise_failure()
    for error in (StorageError("first"), StorageError("second")):
        queue.submit(A, IDS, 10, fail_with(error))
    queue.wait()
    with pytest.raises(StorageError, match="first"):
        queue.raise_failure()
    queue.raise_failure()
    queue.submit(A, IDS, 10, fail_with(StorageError("third")))
    queue.wait()
    with pytest.raises(StorageError, match="third"):
        queue.raise_failure()


def test_who_fails_to_say_so_does_not_stop_the_queue() -> None:
    """Where warnings are errors, saying that a store failed raises."""

    def say(error: Exception) -> None:
        raise RuntimeWarning(str(error))

    queue = WriteQueue(100, say)
    done: list[bool] = []
    queue.submit(A, IDS, 60, fail_with(StorageError("full")))
    queue.submit(A, IDS, 30, lambda: done.append(True))
    queue.wait()
    assert (done, queue.n_bytes, queue.n_covered(A, IDS)) == ([True], 0, 0)
    with pytest.raises(StorageError, match="full"):
        queue.raise_failure()
    queue.close()


def test_what_is_about_to_be_stored_is_known_until_it_is(queue: WriteQueue, gate: Gate) -> None:
    queue.submit(A, pack_token_ids([1, 2, 9]), 10, nothing)
    queue.submit(B, pack_token_ids([1, 2, 3, 4, 5, 6]), 10, nothing)
    assert queue.n_covered(A, pack_token_ids([1, 2, 3, 4, 5, 6])) == 4
    assert queue.n_covered(A, pack_token_ids([1, 2, 3])) == 3
    assert queue.n_covered(A, pack_token_ids([1, 2, 9, 9])) == 3
    assert queue.n_covered(A, pack_token_ids([7])) == 0
    assert queue.n_covered(A, b"") == 0
    assert queue.n_covered(B, pack_token_ids([1, 2, 3, 4, 5, 6, 7])) == 6
    assert queue.n_covered(3, IDS) == 0
    gate.opened.set()
    queue.wait()
    assert queue.n_covered(A, IDS) == queue.n_covered(B, IDS) == 0


def test_waiting_for_an_empty_queue_ends_at_once(queue: WriteQueue) -> None:
    queue.wait()


def test_waiting_ends_when_all_that_was_queued_is_done(queue: WriteQueue, gate: Gate) -> None:
    done: list[bool] = []
    queue.submit(A, IDS, 10, lambda: done.append(True))
    waited = threading.Event()
    waiting = threading.Thread(target=lambda: (queue.wait(), waited.set()))
    waiting.start()
    assert not waited.is_set()
    gate.opened.set()
    waiting.join(30)
    assert waited.is_set()
    assert done == [True]


def test_closing_does_what_is_queued_and_ends_the_thread(errors: list[Exception]) -> None:
    queue = WriteQueue(100, errors.append)
    gate, done = Gate(), []
    queue.submit(A, IDS, 10, gate)
    for number in range(5):
        queue.submit(A, IDS, 10, lambda number=number: done.append(number))
    queue.submit(A, IDS, 10, fail_with(StorageError("full")))
    assert gate.entered.wait(30)
    (thread,) = [one for one in threading.enumerate() if one.name.startswith("prefixbank-write")]
    closing = threading.Thread(target=queue.close)
    closing.start()
    assert done == []
    gate.opened.set()
    closing.join(30)
    assert done == list(range(5))
    assert [str(error) for error in errors] == ["full"]
    assert not thread.is_alive()
    assert queue.n_bytes == 0
    queue.close()


def test_a_queue_that_was_never_used_has_no_thread() -> None:
    before = threading.active_count()
    queue = WriteQueue(100, print)
    assert threading.active_count() == before
    queue.close()


def test_a_store_that_no_thread_can_be_started_for_is_not_pending(
    queue: WriteQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    given_up: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert not queue.submit(A, IDS, 60, lambda: given_up.append(1))
    assert (queue.n_bytes, queue.n_covered(A, IDS)) == (0, 0)
    done: list[int] = []
    assert queue.submit(A, IDS, 60, lambda: done.append(1))
    queue.wait()
    assert (done, given_up) == ([1], [])


def test_the_bound_holds_from_many_threads(queue: WriteQueue) -> None:
    n_threads = 6
    start = threading.Barrier(n_threads)
    most: list[int] = []
    taken: list[int] = []
    done: list[int] = []

    def work(number: int) -> None:
        start.wait()
        for _ in range(100):
            if queue.submit(A, IDS, 30 + number, lambda: done.append(number)):
                taken.append(number)
            most.append(queue.n_bytes)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.wait()
    assert max(most) <= 100
    assert sorted(done) == sorted(taken)
    assert queue.n_bytes == 0


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ZeroDivisionError"])
def test_what_is_queued_is_still_done_when_the_interpreter_exits(end: str) -> None:
    script = (
        "import sys, threading\n"
        "from prefixbank.writes import WriteQueue\n"
        "ending = threading.Event()\n"
        "threading._register_atexit(ending.set)\n"  # called when the main thread has come to its end
        "queue = WriteQueue(100, print)\n"
        "queue.submit(1, b'', 10, lambda: ending.wait(30))\n"
        "for number in range(2):\n"
        "    queue.submit(1, b'', 10, lambda: print('done', ending.is_set()))\n"
        f"{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done True\ndone True\n", done.stderr
    assert done.returncode == {"": 0, "sys.exit(3)": 3}.get(end, 1)
