"""Fork a process that has a bank open: the child is told to open it again, and harms nothing by what it inherited."""

from __future__ import annotations

import gc
import os
import threading
import traceback
import warnings
from collections.abc import Callable

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.errors import BankNotFoundError
from tests.fakekv import FakeModel
from tests.fault import tally

PROMPT = list(range(10))


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked process; fails unless it ends well, and soon."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where threads are
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    ended: list[int] = []
    waiting = threading.Thread(target=lambda: ended.append(os.waitpid(pid, 0)[1]))
    waiting.start()
    waiting.join(30)
    if not ended:
        os.kill(pid, 9)
        waiting.join()
        tally.must_not("hangs over 30 s", "a forked process")
    assert os.waitstatus_to_exitcode(ended[0]) == 0


def test_a_forked_process_is_told_to_open_the_bank_again_and_can(bank: PrefixBank, model: FakeModel) -> None:
    model.store(PROMPT)

    def work() -> None:
        for use in (lambda: model.store(PROMPT[:3]), lambda: model.match(PROMPT), bank.prune, bank.check, bank.stats):
            with pytest.raises(BankNotFoundError, match="forked"):
                use()
        bank.flush()
        bank.close()
        with PrefixBank.open(bank.root) as own:
            assert FakeModel(own).held(PROMPT) == [10]
            FakeModel(own).store([5, 5, 5])

    in_child(work)
    assert model.held(PROMPT, [5, 5, 5]) == [10, 3]
    model.store([6, 6, 6])


def test_a_fork_in_mid_transaction_does_not_undo_it(bank: PrefixBank, model: FakeModel) -> None:
    """The child would roll back what it inherited, were a connection closed or collected there."""
    with model.session.index.writing() as tx:
        tx.exec_driver_sql("PRAGMA cache_size=1")
        tx.exec_driver_sql("UPDATE bank_state SET tick = tick + 1000")
        tx.exec_driver_sql(
            "CREATE TABLE pages AS SELECT randomblob(4000) FROM (VALUES (1), (2), (3), (4), (5), (6), (7))"
        )

        def work() -> None:
            bank.close()
            engine = model.session.index._engine
            engine.dispose()
            del engine
            gc.collect()

        in_child(work)
        tx.exec_driver_sql("DROP TABLE pages")
    with model.session.index.reading() as tx:
        assert tx.exec_driver_sql("SELECT tick FROM bank_state").scalar_one() >= 1000


def test_a_fork_while_others_hold_the_banks_locks_does_not_hang_the_child(bank: PrefixBank, model: FakeModel) -> None:
    locks = [bank._session._lock, bank._session._writes._lock, bank._session.memory._lock, bank._session.rates._lock]
    gate = threading.Event()
    model.session._writes.submit(0, b"", 0, lambda: gate.wait(30))
    for lock in locks:
        lock.acquire()

    def work() -> None:
        with pytest.raises(BankNotFoundError):
            model.match(PROMPT)
        bank.flush()
        bank.close()

    try:
        in_child(work)
    finally:
        for lock in locks:
            lock.release()
        gate.set()
