"""Run several processes on one bank, in step where they ask for it, and look at what they left on the disk."""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from prefixbank.bank import PrefixBank
from prefixbank.errors import BankWarning
from tests.fakekv import FakeModel, disk_usage

FLAVOURS = (b"A", b"B")
BLOCK = 4096
PATIENCE_S = 300.0
"""When a process that hangs is given up; nothing waits for so long in good order."""


class Pace(Protocol):
    """Name what a barrier offers: wait for the others."""

    def wait(self) -> int: ...


def run_together(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Run `target(pace, *arguments[i])` in a process each; fails unless all of them end well."""
    context = multiprocessing.get_context("spawn")
    pace = context.Barrier(len(arguments), timeout=PATIENCE_S)
    processes = [context.Process(target=_run, args=(target, pace, *given), daemon=True) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
        process.close()
    assert exit_codes == [0] * len(processes), "a process failed: its error is in what was written to stderr"


def _run(target: Callable[..., None], pace: Any, *arguments: Any) -> None:
    warnings.simplefilter("error", BankWarning)
    try:
        target(pace, *arguments)
    except BaseException:
        pace.abort()  # the others need not wait
        raise


def named_files(bank: PrefixBank) -> set[str]:
    """Return the paths, relative to the root, of the shards that rows name."""
    return {f"shards/{r.file_name[:2]}/{r.file_name}" for r in bank.chunks() if r.file_name is not None}


def files_there(root: Path, *, notes: bool = False) -> set[str]:
    """Return the paths, relative to the root, of all files in `shards` and `tmp`; notes are no shards."""
    return {
        path.relative_to(root).as_posix()
        for folder in ("shards", "tmp")
        for path in (root / folder).rglob("*")
        if not path.is_dir() and (notes or path.suffix != ".note")
    }


def growing_prompt(number: int) -> list[int]:
    """Return one of a series of prompts; four in a row grow out of each other, so that each covers the last's tail."""
    begin = 100 * (number // 4)
    return list(range(begin, begin + 5 + 2 * (number % 4)))


def store_the_same(pace: Pace, root: Path, flavour: bytes, n_rounds: int) -> None:
    """Store, in each round, what the others store at the same moment, and read it back."""
    with PrefixBank.open(root, verify="always", busy_timeout_s=PATIENCE_S) as bank:
        model = FakeModel(bank)
        for number in range(n_rounds):
            token_ids = growing_prompt(number)
            pace.wait()
            stored = model.store(token_ids, flavour)
            assert (stored.n_tokens, stored.refused) == (len(token_ids), "")
            assert model.resolve(token_ids, FLAVOURS).n_tokens == len(token_ids)
        assert bank.check(read_data=True).ok


def do_anything(pace: Pace, root: Path, seed: int, n_deeds: int) -> None:
    """Store, read, prune and check at random in a bank with a small budget."""
    warnings.simplefilter("ignore", BankWarning)  # a store whose parents were evicted meanwhile is refused
    chance = random.Random(seed)
    with PrefixBank.open(root, verify="always", busy_timeout_s=PATIENCE_S) as bank:
        model = FakeModel(bank)
        pace.wait()
        for _ in range(n_deeds):
            token_ids = growing_prompt(chance.randrange(12))
            deed = chance.choice(("store", "store", "store", "read", "read", "read", "prune", "check"))
            if deed == "store":
                model.store(token_ids, chance.choice(FLAVOURS))
            elif deed == "read":
                model.session.note_use(model.resolve(token_ids, FLAVOURS))
            elif deed == "prune":
                bank.prune(max_bytes=BLOCK * chance.randrange(2, 10))
            else:
                report = bank.check(read_data=True)
                assert report.ok, report.findings


def overfill(pace: Pace, root: Path, number: int, n_rounds: int) -> None:
    """Store, in each round, a prefix that fits into the budget alone, but not with what the others store."""
    warnings.simplefilter("ignore", BankWarning)  # as above
    with PrefixBank.open(root, busy_timeout_s=PATIENCE_S) as bank:
        model = FakeModel(bank)
        limit = bank.stats().max_bytes
        assert limit is not None
        for at in range(n_rounds):
            pace.wait()
            model.store([100 * at + number] * 30)
            pace.wait()
            assert disk_usage(bank) <= limit


def make_banks(pace: Pace, folder: Path, number: int, n_rounds: int) -> None:
    """Make, in each round, the bank that the others make at the same moment, and use it."""
    for at in range(n_rounds):
        pace.wait()
        with PrefixBank.open(folder / f"bank{at}", chunk_tokens=4, busy_timeout_s=PATIENCE_S) as bank:
            model = FakeModel(bank)
            assert model.store(growing_prompt(4 * number + 3)).n_tokens == 11
            assert model.held(growing_prompt(4 * number + 3)) == [11]
