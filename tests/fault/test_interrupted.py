"""Interrupt a process (SIGINT, as Ctrl-C does) at each file operation: it ends, and nothing is lost or half done."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from prefixbank.bank import PrefixBank
from tests.fakekv import FakeModel
from tests.fault import tally
from tests.fault.deeds import BASE, DEEDS, LONGER, between, look, make
from tests.fault.stepping import Stepper
from tests.fault.test_failing_disk import FILE_OPERATIONS
from tests.fault.together import files_there, named_files
from tests.fault.trap import CHANGING, Trap


def interrupt(stepper: Stepper, deed: str, folder: Path, nth: int | None, seed: int = 0) -> None:
    """Interrupt a deed at its n-th changing operation, or at a random one of them."""
    template, whole, root = folder / "template", folder / "whole", folder / "interrupted"
    if not template.exists():
        make(DEEDS[deed], template)
    for copy in (whole, root, folder / "earlier"):
        shutil.rmtree(copy, ignore_errors=True)
        if template.exists():
            shutil.copytree(template, copy)
    n = stepper.do(whole, deed, Trap("count", 0, CHANGING)).n_seen
    after = look(whole)
    before = after if DEEDS[deed].is_new else look(folder / "earlier", DEEDS[deed])
    for at in [nth] if nth else random.Random(seed).sample(range(1, n + 1), min(3, n)):
        shutil.rmtree(root, ignore_errors=True)
        if template.exists():
            shutil.copytree(template, root)
        ending = stepper.do(root, deed, Trap("interrupt", at, CHANGING))
        tally.must_not("hangs over 30 s", ending.hangs and (deed, at))
        tally.must_not("signals", ending.code < 0 and (deed, at, ending))
        assert ending.code == 0, (deed, at, ending)
        assert ending.is_ours, (deed, at, ending)
        tally.count("interrupts")
        lost = list(between(before, after, look(root, DEEDS[deed]), evicts=DEEDS[deed].evicts))
        tally.must_not("acknowledged chunks lost", lost and (deed, at, lost))


@pytest.mark.parametrize("deed", ["store", "prune", "migrate", "create", "note a use"])
def test_a_deed_interrupted_at_some_of_its_operations_ends_and_loses_nothing(
    stepper: Stepper, tmp_path: Path, deed: str
) -> None:
    interrupt(stepper, deed, tmp_path, None)


@pytest.mark.long
@pytest.mark.parametrize("deed", sorted(set(DEEDS) - {"store and spill"}))
def test_a_deed_interrupted_at_any_of_its_operations_ends_and_loses_nothing(
    stepper: Stepper, tmp_path: Path, deed: str
) -> None:
    for seed in range(15):
        interrupt(stepper, deed, tmp_path, None, seed)


def raise_at(nth: int, error: type[BaseException], patch: pytest.MonkeyPatch) -> None:
    """Let the n-th file operation that Python is asked for raise an error."""
    calls = itertools.count(1)

    def instead_of(real: Any) -> Any:
        def operation(*given: Any, **named: Any) -> Any:
            if next(calls) == nth:
                raise error
            return real(*given, **named)

        return operation

    for owner, name in FILE_OPERATIONS:
        patch.setattr(owner, name, instead_of(getattr(owner, name)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_store_that_is_interrupted_at_any_step_of_ours_leaves_a_bank_that_goes_on(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """In the same process: no lock is left behind, no transaction open, no file lost."""
    model.store(BASE)
    n_interrupted = 0
    for nth in itertools.count(1):
        with monkeypatch.context() as patch:
            raise_at(nth, error, patch)
            try:
                model.store([nth, *LONGER])
            except error:
                n_interrupted += 1
            else:
                break
        assert model.held(BASE) == [len(BASE)]
        assert model.store([nth, 1]).n_tokens == 2
        assert files_there(bank.root) == named_files(bank)
    assert n_interrupted > 20
    assert model.store(LONGER).n_tokens == len(LONGER)
