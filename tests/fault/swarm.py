"""Let many processes use one bank until they are killed: `python -m tests.fault.swarm ROOT LOGS`.

Each tells what it did in a log of its own, outside the bank: a line is written once what it says is done. So whoever
reads the logs knows what was acknowledged, whenever a process died.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from prefixbank.bank import PrefixBank
from prefixbank.errors import BankWarning, UnknownPrefixError
from tests.fakekv import FakeModel
from tests.fault.together import BLOCK, FLAVOURS

N_PINNED = 2
"""How many pinned prefixes a process keeps at most: these must never be lost."""
N_PROMPTS = 60
BUDGET = 160 * BLOCK


def prompt(number: int) -> list[int]:
    """Return one of the prompts that all processes share; many begin alike."""
    begin = 1000 * (number % 12)
    return list(range(begin, begin + 5 + 2 * (number // 12)))


def own_prompt(who: int, number: int) -> list[int]:
    return [100_000 + who, 1, 2, 3, number, number, 7]


def read_log(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what a process said; its last line may be cut."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        word, _, rest = line.decode().partition(" ")
        yield word, rest


def pinned_in(path: Path) -> tuple[set[int], int]:
    """Return which own prompts a process has acknowledged as pinned, and not begun to remove; and its operations."""
    pinned: set[int] = set()
    n_operations = 0
    for word, rest in read_log(path) if path.exists() else ():
        if word == "pinned":
            pinned.add(int(rest))
        elif word == "removing":
            pinned.discard(int(rest))
        n_operations += word == "did"
    return pinned, n_operations


def work(root: Path, log: Path, who: int, seed: int, n_operations: int) -> None:
    """Do so many operations; assert what each returns."""
    warnings.simplefilter("ignore", BankWarning)  # a store whose parents were evicted meanwhile is refused
    chance = random.Random(seed)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(text: str) -> None:
        os.write(file, f"{text}\n".encode())

    pinned, _ = pinned_in(log)
    with PrefixBank.open(root, durability="fast", verify="always", busy_timeout_s=60.0) as bank:
        model = FakeModel(bank)
        for _ in range(n_operations):
            deed = chance.choices(("read", "store", "use", "pin", "prune", "check"), (50, 28, 14, 6, 1.5, 0.5))[0]
            started_at = time.monotonic()
            if deed == "read":
                model.resolve(prompt(chance.randrange(N_PROMPTS)), FLAVOURS)
            elif deed == "store":
                model.store(prompt(chance.randrange(N_PROMPTS)), chance.choice(FLAVOURS))
            elif deed == "use":
                model.session.note_use(model.match(prompt(chance.randrange(N_PROMPTS))))
            elif deed == "prune":
                bank.prune(max_bytes=BLOCK * chance.randrange(60, 160))
            elif deed == "check":
                report = bank.check(read_data=True)
                assert report.ok, report.findings
            elif len(pinned) < N_PINNED:
                number = chance.randrange(10**6)
                stored = model.name(f"{who}/{number}", own_prompt(who, number), pin=True)
                (named,) = bank.prefixes(f"{who}/{number}")
                if stored.n_tokens == 7 and named.chunk_key is not None:  # else it was evicted before it was pinned
                    say(f"pinned {number}")
                    pinned.add(number)
                else:
                    bank.remove(named.name)
            else:
                number = pinned.pop()
                assert model.resolve(own_prompt(who, number)).n_tokens == 7, f"{who}/{number} is lost"
                say(f"removing {number}")
                try:
                    bank.remove(f"{who}/{number}")
                except UnknownPrefixError as error:
                    raise AssertionError(f"the name {who}/{number} is lost") from error
            took = time.monotonic() - started_at
            say(f"did {deed}" if took < 30 else f"hung {deed}")
    os.close(file)


def serve(root: Path, folder: Path) -> None:
    """Fork a process for each line of stdin, `WHO SEED N`; print each's exit code, as `WHO CODE`, when it ends."""
    children: dict[int, int] = {}
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "start":
            who, seed, n = map(int, numbers)
            pid = os.fork()
            if pid == 0:
                try:
                    work(root, folder / f"{who}.log", who, seed, n)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children[pid] = who
            print(pid, flush=True)
        else:
            pid, status = os.waitpid(-1, 0)
            print(children.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
