"""Kill a process at each file operation of each deed, SQLite's included: what was there stays, nothing is half done."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from tests.fakekv import FakeModel
from tests.fault import tally
from tests.fault.deeds import BASE, DEEDS, OTHER, View, age, between, look, make
from tests.fault.stepping import Stepper
from tests.fault.together import PATIENCE_S, files_there, named_files
from tests.fault.trap import CHANGING, CHECKOUT, Trap

WAYS = ("kill before", "kill within", "kill before")
"""Twice in front of an operation, once in the middle of it: a write is half done, others are just done."""


def must_be_swept(root: Path) -> None:
    """Assert that what a killed process left is deleted once it is old, and nothing else; and that storing works."""
    with PrefixBank.open(root) as bank:
        FakeModel(bank).store(BASE)
        assert named_files(bank) <= files_there(root)
        age(root)
        bank.prune()
        assert files_there(root, notes=True) == named_files(bank)
        assert FakeModel(bank).held(BASE) == [len(BASE)]


def die_at(stepper: Stepper, deed: str, template: Path, nth: int, way: str, before: View, after: View) -> str:
    """Let a process die at its n-th changing operation; assert that the bank is as it was, or as it should become."""
    root = template.with_name("dying")
    shutil.rmtree(root, ignore_errors=True)
    if template.exists():
        shutil.copytree(template, root)
    ending = stepper.do(root, deed, Trap(way, nth, CHANGING))
    tally.must_not("hangs over 30 s", ending.hangs and deed)
    assert ending.code == -signal.SIGKILL, (deed, nth, ending)
    tally.count("kills")
    seen = look(root, DEEDS[deed])
    sure = {"other"} if DEEDS[deed].evicts else {"base", "other", "stated"}
    lost = [
        name for name, there in before.items() if after.get(name) == there and seen.get(name) != there and name in sure
    ]
    tally.must_not("acknowledged chunks lost", lost and (deed, nth, way, lost))
    wrong = list(between(before, after, seen, evicts=DEEDS[deed].evicts))
    assert not wrong, (deed, nth, way, wrong)
    if DEEDS[deed].at_once:
        assert seen in (before, after), (deed, nth, way, seen)
    must_be_swept(root)
    return f"{deed} {nth}"


def views_and_steps(stepper: Stepper, deed: str, folder: Path) -> tuple[Path, View, View, int]:
    """Return a template of the deed's bank, how it looks before and after, and how many operations change it."""
    template = folder / "template"
    make(DEEDS[deed], template)
    whole = folder / "whole"
    if template.exists():
        shutil.copytree(template, whole)
    ending = stepper.do(whole, deed, Trap("count", 0, CHANGING))
    assert (ending.code, ending.error) == (0, ""), ending.message
    after = look(whole)
    if DEEDS[deed].is_new:
        return template, after, after, ending.n_seen
    earlier = folder / "earlier"
    shutil.copytree(template, earlier)
    return template, look(earlier, DEEDS[deed]), after, ending.n_seen


@pytest.mark.parametrize("deed", DEEDS)
def test_a_deed_killed_at_some_of_its_operations_is_done_or_not_done(
    stepper: Stepper, tmp_path: Path, deed: str
) -> None:
    template, before, after, n_steps = views_and_steps(stepper, deed, tmp_path)
    chance = random.Random(deed)
    for nth in {1, n_steps, *(chance.randrange(1, n_steps + 1) for _ in range(2))}:
        die_at(stepper, deed, template, nth, chance.choice(WAYS), before, after)


@pytest.mark.long
@pytest.mark.parametrize("deed", DEEDS)
def test_a_deed_killed_at_any_of_its_operations_is_done_or_not_done(
    stepper: Stepper, tmp_path: Path, deed: str
) -> None:
    template, before, after, n_steps = views_and_steps(stepper, deed, tmp_path)
    stride = max(n_steps // 250, 1)  # a transaction that spills page by page has thousands
    points = set()
    for way in WAYS:
        for nth in range(1, n_steps + 1, stride):
            points.add(die_at(stepper, deed, template, nth, way, before, after))
    tally.count("kill points", len(points))


def test_the_table_of_deeds_has_hundreds_of_places_to_die_at(stepper: Stepper, tmp_path: Path) -> None:
    n_steps: Counter[str] = Counter()
    for name in ("store", "prune", "rm", "migrate"):
        make(DEEDS[name], tmp_path / name)
        n_steps[name] = stepper.do(tmp_path / name, name, Trap("count", 0, CHANGING)).n_seen
    assert min(n_steps.values()) > 20, n_steps
    assert n_steps.total() > 200, n_steps


def kill_at_random_moments(root: Path, n_kills: int, seed: int) -> None:
    """Kill a process that stores, names, prunes and removes at random moments; look at what it acknowledged."""
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        FakeModel(bank).name("other", OTHER, pin=True)
    chance = random.Random(seed)
    kept: dict[int, bool] = {}
    first = 0
    while n_kills:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.dying", str(root), "--mixed"],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        for _ in range(min(n_kills, 100)):
            n_kills -= 1
            print(first, file=process.stdin, flush=True)
            pid = int(process.stdout.readline())
            time.sleep(chance.uniform(0.0, 0.08))  # not to wait for something: the moment is what is tested
            os.kill(pid, signal.SIGKILL)
            tally.count("kills")
            for line in iter(process.stdout.readline, "end\n"):
                word, number = line.split()
                first = max(first, int(number) + 1)
                if word == "stored":
                    kept[int(number)] = True
                else:
                    kept.pop(int(number), None)  # its removal has begun
            with PrefixBank.open(root) as bank:
                report = bank.check(read_data=True)
                assert report.ok, report.findings
                model = FakeModel(bank)
                lost = [n for n in kept if model.resolve(mixed_prompt(n)).n_tokens != len(mixed_prompt(n))]
                tally.must_not("acknowledged chunks lost", lost)
                assert model.held(OTHER) == [len(OTHER)]
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()
    must_be_swept(root)


def mixed_prompt(number: int) -> list[int]:
    return [1, 2, 3, 4, number, number, number, number, number, 5]


def test_whatever_was_acknowledged_before_a_kill_at_some_moments_is_there(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path / "bank", 12, 1)


@pytest.mark.long
def test_whatever_was_acknowledged_before_a_kill_at_any_moment_is_there(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path / "bank", 500, 2)
