"""Let the n-th file operation of each deed fail, SQLite's included: an error of ours or a miss, and nothing is lost."""

from __future__ import annotations

import errno
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.repair import repair
from tests.fakekv import FakeModel
from tests.fault import tally
from tests.fault.deeds import BASE, DEEDS, LONGER, View, between, look, make
from tests.fault.faults import FAULTS, Fault
from tests.fault.stepping import Ending, Stepper
from tests.fault.trap import Trap


def forget_lost_files(root: Path) -> None:
    """Assert that nothing is wrong but rows whose files are gone, and let a repair forget them, as a use would."""
    with PrefixBank.open(root) as bank:
        problems = {finding.kind for finding in bank.check(read_data=True).problems}
    assert problems <= {"missing"}
    if problems:
        repair(root)


@dataclass
class Trial:
    """Hold the bank of a deed, before and after it."""

    stepper: Stepper
    deed: str
    template: Path
    before: View
    after: View

    def fail(self, fault: Fault, nth: int) -> Ending:
        """Let the n-th operation fail and assert what must hold then."""
        root = self.template.with_name("failing")
        shutil.rmtree(root, ignore_errors=True)
        if self.template.exists():
            shutil.copytree(self.template, root)
        ending = self.stepper.do(root, self.deed, Trap(fault.mode, nth, fault.kinds, fault.errno, fault.stays))
        at = (self.deed, nth, ending.kinds[nth - 1 : nth], ending.hit, ending.error, ending.message)
        tally.must_not("hangs over 30 s", ending.hangs and at)
        tally.must_not("signals", ending.code < 0 and at)
        assert ending.code == 0, at
        tally.must_not("wrong tokens", ending.error == "AssertionError" and "wrong rows" in ending.message and at)
        assert ending.is_ours, at
        assert not ending.retried, ("synced again after that had failed", at)
        if ending.hit:
            tally.count("failed operations")
        elif not fault.stays:
            assert not ending.error, at
        if DEEDS[self.deed].frees and fault.stays and fault.errno == errno.ENOSPC:
            forget_lost_files(root)
        seen = look(root, DEEDS[self.deed])
        lost = list(between(self.before, self.after, seen, evicts=DEEDS[self.deed].evicts))
        tally.must_not("acknowledged chunks lost", lost and (at, lost))
        if not ending.error and not ending.hit:
            assert seen == self.after
        with PrefixBank.open(root) as bank:
            assert FakeModel(bank).store(LONGER).n_tokens == len(LONGER)
            assert FakeModel(bank).held(BASE, LONGER) == [len(BASE), len(LONGER)]
        return ending


def trial(stepper: Stepper, deed: str, folder: Path) -> Trial:
    template, whole, earlier = folder / "template", folder / "whole", folder / "earlier"
    make(DEEDS[deed], template)
    for copy in (whole, earlier):
        if template.exists():
            shutil.copytree(template, copy)
    ending = stepper.do(whole, deed)
    assert (ending.code, ending.error) == (0, ""), ending
    after = look(whole)
    before = after if DEEDS[deed].is_new else look(earlier, DEEDS[deed])
    return Trial(stepper, deed, template, before, after)


def n_operations(tried: Trial, fault: Fault) -> int:
    return tried.fail(fault, 1_000_000).n_seen


@pytest.mark.parametrize("deed", DEEDS)
def test_a_deed_of_which_some_operation_fails_ends_in_an_error_of_ours_or_well(
    stepper: Stepper, tmp_path: Path, deed: str
) -> None:
    tried = trial(stepper, deed, tmp_path)
    chance = random.Random(f"failing {deed}")
    for fault in chance.sample(list(FAULTS.values()), 2):
        n = n_operations(tried, fault)
        if n:
            tried.fail(fault, chance.randrange(1, n + 1))


@pytest.mark.parametrize(("deed", "name"), [("store", "EIO"), ("read", "EIO"), ("read", "EACCES")])
def test_a_deed_of_which_any_file_operation_of_ours_fails_ends_in_an_error_of_ours_or_well(
    stepper: Stepper, tmp_path: Path, deed: str, name: str
) -> None:
    """The shards' and folders' operations are our own business: each of them, in the two deeds that matter most."""
    tried = trial(stepper, deed, tmp_path)
    kinds = tried.stepper.do(shutil.copytree(tried.template, tmp_path / "seen"), deed).kinds
    nth = 0
    for number in range(1, len(kinds) + 1):
        if kinds[number - 1] in FAULTS[name].kinds:
            nth += 1
            if kinds[number - 1] in {"rename", "mkdir", "chmod", "list", "close"} or nth % 25 == 0:
                tried.fail(FAULTS[name], nth)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_deed_of_which_any_operation_fails_ends_in_an_error_of_ours_or_well(
    stepper: Stepper, tmp_path: Path, deed: str, fault: str
) -> None:
    tried = trial(stepper, deed, tmp_path)
    n = n_operations(tried, FAULTS[fault])
    for nth in range(1, n + 1, max(n // 250, 1)):  # a transaction that spills page by page has thousands
        tried.fail(FAULTS[fault], nth)
