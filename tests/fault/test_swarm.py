"""Let sixteen processes use one bank while some are killed: no wrong byte, nothing pinned lost, the budget held."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from tests.fakekv import FakeModel, disk_usage
from tests.fault import tally
from tests.fault.swarm import BUDGET, own_prompt, pinned_in, read_log
from tests.fault.together import BLOCK, PATIENCE_S, files_there
from tests.fault.trap import CHECKOUT

N_PROCESSES = 16


def must_be_in_order(root: Path, logs: Path) -> int:
    """Assert that all that was acknowledged is there, with the right bytes; returns how many operations were done."""
    n_operations = 0
    with PrefixBank.open(root, max_bytes="1GB") as bank:  # so that opening it evicts nothing
        report = bank.check(read_data=True)
        assert report.ok, report.findings
        in_tmp = sum(BLOCK for path in files_there(root, notes=True) if path.startswith("tmp/"))
        assert disk_usage(bank) + in_tmp <= BUDGET
        assert bank.stats().disk_bytes <= BUDGET
        model = FakeModel(bank)
        for log in sorted(logs.glob("*.log")):
            pinned, n = pinned_in(log)
            n_operations += n
            held = model.held(*(own_prompt(int(log.stem), number) for number in pinned))
            tally.must_not("acknowledged chunks lost", [(log.stem, pinned)] if held != [7] * len(pinned) else [])
            tally.must_not("hangs over 30 s", [rest for word, rest in read_log(log) if word == "hung"])
    return n_operations


def swarm(folder: Path, n_operations: int, n_kills: int, seed: int) -> None:
    """Run the processes in rounds; each round a few of them are killed at a random moment, and replaced in the next."""
    root, logs = folder / "bank", folder / "logs"
    logs.mkdir()
    PrefixBank.open(root, chunk_tokens=4, max_bytes=BUDGET).close()
    chance = random.Random(seed)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.fault.swarm", root, logs],
        cwd=CHECKOUT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    n_done, n_per_process = 0, max(min(n_operations // N_PROCESSES, 400), 10)
    n_rounds = -(-n_operations // (N_PROCESSES * n_per_process))
    kills_left = n_kills
    for at in range(10 * n_rounds):
        pids = {}
        for who in range(N_PROCESSES):
            print("start", who, chance.randrange(10**9), n_per_process, file=server.stdin, flush=True)
            pids[who] = int(server.stdout.readline())
        victims = chance.sample(range(N_PROCESSES), min(kills_left, -(-n_kills // n_rounds), N_PROCESSES // 2))
        waiting = set(victims)
        while waiting:  # kill each once it has come a random part of its way
            for who in sorted(waiting):
                path = logs / f"{who}.log"
                if path.exists() and path.stat().st_size > at * 40 + chance.randrange(10, 3000):
                    os.kill(pids[who], signal.SIGKILL)
                    waiting.discard(who)
                    kills_left -= 1
                    tally.count("kills")
            if chance.random() < 0.01:
                break
        for _ in range(N_PROCESSES):
            print("wait", file=server.stdin, flush=True)
            who, code = map(int, server.stdout.readline().split())
            tally.must_not("signals", code < 0 and who not in victims and (who, code))
            assert code == 0 or who in victims, f"process {who} failed: its error is in what was written to stderr"
        n_done = must_be_in_order(root, logs)
        if n_done >= n_operations:
            break
    server.stdin.close()
    assert server.wait(PATIENCE_S) == 0
    server.stdout.close()
    tally.count("operations", n_done)
    assert n_done >= n_operations


def test_sixteen_processes_some_of_which_are_killed_lose_nothing_and_hold_the_budget(tmp_path: Path) -> None:
    swarm(tmp_path, 480, 8, 1)


@pytest.mark.long
def test_a_hundred_thousand_operations_of_sixteen_processes_lose_nothing_and_hold_the_budget(tmp_path: Path) -> None:
    swarm(tmp_path, 100_000, 200, 2)
