"""Stop a reader between each two of its steps, prune and store meanwhile: it finds the right rows, or none."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.errors import BankBusyError
from tests.fakekv import FakeModel
from tests.fault import tally
from tests.fault.deeds import BASE, DEEDS, OTHER, make
from tests.fault.stepping import Stepper
from tests.fault.trap import Trap


def state_of(pid: int) -> str:
    """Return the letter of a process's state; "X" where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def overtake(stepper: Stepper, root: Path, nth: int, n_steps: list[int]) -> bool:
    """Stop a reader in front of its n-th operation, prune all and store it anew, and let it go on."""
    make(DEEDS["read"], root)
    with PrefixBank.open(root) as bank:
        bank.unpin("other")
    pruned = []

    def meanwhile(pid: int) -> None:
        while (state := state_of(pid)) not in "TZX":
            os.sched_yield()
        if state != "T":
            return
        try:
            with PrefixBank.open(root, busy_timeout_s=0.05) as bank:
                with suppress(BankBusyError):  # it was stopped in the middle of a transaction
                    pruned.append(bank.prune(max_bytes=0))
                with suppress(BankBusyError):
                    FakeModel(bank).store(OTHER)
        except BankBusyError:
            pass
        finally:
            os.kill(pid, signal.SIGCONT)

    ending = stepper.do(root, "read", Trap("stop", nth), meanwhile)
    n_steps.append(ending.n_seen)
    tally.must_not("hangs over 30 s", ending.hangs and nth)
    tally.must_not("signals", ending.code < 0 and (nth, ending))
    tally.must_not("wrong tokens", "wrong rows" in ending.message and (nth, ending))
    assert (ending.code, ending.error) == (0, ""), (nth, ending)
    with PrefixBank.open(root) as bank:
        assert bank.check(read_data=True).ok
        assert FakeModel(bank).store(BASE).n_tokens == len(BASE)
        assert FakeModel(bank).held(BASE) == [len(BASE)]
    return bool(pruned)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long, id="each"), pytest.param(6, id="some")])
def test_a_prune_while_a_reader_is_stopped_gives_it_the_right_rows_or_a_miss(
    stepper: Stepper, tmp_path: Path, step: int
) -> None:
    n_pruned = nth = 0
    n_steps = [step]
    while nth + step <= max(n_steps):
        nth += step
        n_pruned += overtake(stepper, tmp_path / str(nth), nth, n_steps)
    assert n_pruned >= 3
