"""Be processes that are killed in the middle of their work.

`python -m tests.fault.dying` reads lines of JSON, `[root, deed, point, n]`. For each it forks a process that does the
deed and kills itself, by SIGKILL, when it comes to the point for the n-th time; then it prints the exit code.
`python -m tests.fault.dying ROOT FIRST` stores prefixes and says so until it is killed from outside; with `--mixed` in
place of FIRST, it does so for each line of stdin in a process of its own, which also removes and prunes.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from prefixbank import opening, shards, storing
from prefixbank.bank import PrefixBank
from prefixbank.index import Index, chunk_rows, namespace_rows, prefix_rows
from prefixbank.shards import ShardStore, ShardWriter
from tests.fakekv import FakeModel
from tests.fault.deeds import BASE, LONGER

POINTS: dict[str, tuple[Any, str, str]] = {
    "a temporary file is half written": (os, "writev", "within"),
    "a temporary file is written": (shards, "sync", "before"),
    "a temporary file is synced": (ShardWriter, "write", "after"),
    "a shard is renamed": (Path, "rename", "after"),
    "a folder is synced": (shards, "sync_folder", "after"),
    "all are published": (ShardWriter, "publish", "after"),
    "a tick is taken": (chunk_rows, "next_tick", "after"),
    "a row is added": (chunk_rows, "add", "after"),
    "a name is moved": (prefix_rows, "move", "after"),
    "a row is deleted": (chunk_rows, "delete", "after"),
    "a group of rows is deleted": (chunk_rows, "delete_many", "after"),
    "the rows are committed": (ShardWriter, "discard", "before"),
    "a file is to be deleted": (ShardStore, "unlink", "before"),
    "a file is deleted": (ShardStore, "unlink", "after"),
    "a file is to be set aside": (ShardStore, "quarantine", "before"),
    "a namespace is added": (namespace_rows, "ensure", "after"),
    "the folders are made": (opening, "create_root", "after"),
    "the index file is made": (Index, "create_file", "after"),
    "the index is migrated, not committed": (sys.modules["prefixbank.index"], "upgrade", "after"),
    "the index is migrated": (opening, "finish_root", "before"),
    "bank.json is written": (opening, "finish_root", "after"),
    "bank.json is written, not yet named": (os, "link", "before"),
    "uses are noted, not committed": (chunk_rows, "_note", "after"),
}
"""Where to die: the owner of a function, its name, and on which side of its n-th call."""


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def lay_trap(point: str, nth: int) -> None:
    """Let this process die at the n-th call of what the point names."""
    owner, name, side = POINTS[point]
    real = getattr(owner, name)
    calls = itertools.count(1)

    def trapped(*given: Any, **named: Any) -> Any:
        number = next(calls)
        if number != nth:
            return real(*given, **named)
        if side == "within":
            descriptor, views = given
            os.write(descriptor, b"".join(views)[:-7])
            die()
        if side == "before":
            die()
        real(*given, **named)
        die()

    setattr(owner, name, staticmethod(trapped) if name == "create_file" else trapped)


def do(deed: str, root: Path, point: str, nth: int) -> None:
    if deed == "create":
        lay_trap(point, nth)
        PrefixBank.open(root, chunk_tokens=4).close()
        return
    with PrefixBank.open(root) as bank:
        model = FakeModel(bank)
        if deed == "store in groups":
            storing._GROUP_BYTES = 1
        if deed == "store and spill":
            # A cache of one page: dirty pages reach the file inside the transaction, and the journal must undo them.
            with model.session.index.reading() as tx:
                tx.exec_driver_sql("PRAGMA cache_size=1")
                tx.exec_driver_sql("PRAGMA cache_spill=1")
        lay_trap(point, nth)
        if deed == "prune":
            bank.prune(max_bytes=0)
        elif deed == "read":
            model.resolve(BASE)
        elif deed == "use":
            model.use(BASE)
        elif deed == "first store of a model":
            FakeModel(bank, "another").store(BASE)
        elif deed == "store and spill":
            model.store(list(range(400)))
        else:
            model.store(LONGER)


def number_prompt(number: int) -> list[int]:
    return [*range(8), number, number, number, number, number, number]


def acknowledge(root: Path, first: int) -> NoReturn:
    """Store one prefix after the other and say so each time, until killed."""
    with PrefixBank.open(root) as bank:
        model = FakeModel(bank)
        for number in itertools.count(first):
            model.store(number_prompt(number))
            print(number, flush=True)
    raise AssertionError("numbers ended")


def mix(root: Path, first: int) -> NoReturn:
    """Store and name prefixes, remove some of them, and prune what nothing refers to, until killed.

    What is stored is said after it is done, what is removed before.
    """
    with PrefixBank.open(root) as bank:
        model = FakeModel(bank)
        for number in itertools.count(first):
            model.name(f"n{number}", [1, 2, 3, 4, number, number, number, number, number, 5])
            os.write(1, f"stored {number}\n".encode())
            if number % 3 == 1:
                os.write(1, f"removing {number - 1}\n".encode())
                if bank._session.prefixes(f"n{number - 1}"):
                    bank.remove(f"n{number - 1}")
            if number % 5 == 0:
                bank.prune()
            if number % 40 == 0:  # the bank must not grow with the test
                for old in bank.prefixes():
                    if old.name != "other":
                        os.write(1, f"removing {old.name[1:]}\n".encode())
                        bank.remove(old.name)
    raise AssertionError("numbers ended")


def serve_mixed(root: Path) -> None:
    """Fork a process for each line of stdin, say its id, and `end` when it was killed."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                mix(root, int(line))
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("end", flush=True)


def serve() -> None:
    """Fork a process for each line of stdin: that spares each of them half a second of imports."""
    for line in sys.stdin:
        root, deed, point, nth = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                do(deed, Path(root), point, nth)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    if "--mixed" in sys.argv:
        serve_mixed(Path(sys.argv[1]))
        sys.exit()
    if sys.argv[1:]:
        acknowledge(Path(sys.argv[1]), int(sys.argv[2]))
    serve()
