"""Do deeds in processes that are killed, stopped, interrupted or failed at one file operation.

`python -m tests.fault.stepping`, started under `shim.c`, reads lines of JSON `[root, deed, mode, nth, kinds, errno,
stays]`. For each it forks a process that does the deed; that spares each of them half a second of imports. What became
of it is printed as JSON. `Stepper` is the other end of that pipe.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prefixbank.errors import BankWarning, PrefixBankError
from tests.fault.deeds import DEEDS
from tests.fault.trap import CHECKOUT, Shim, Trap, environment

HANGS_AFTER_S = 30.0


@dataclass
class Ending:
    """Say how a process ended: `code` is negative for a signal, `error` the class of what was raised.

    `kinds` are those of the operations since it was armed, `hit` is the path at which the trap sprang, and `is_ours`
    tells whether the error is one of prefixbank's.
    """

    code: int = 0
    error: str = ""
    message: str = ""
    is_ours: bool = True
    kinds: list[str] = field(default_factory=list)
    n_seen: int = 0
    hit: str = ""
    retried: bool = False
    hangs: bool = False


def suffer(root: Path, deed: str, trap: Trap) -> Ending:
    """Do a deed in this process, with the trap laid."""
    shim = Shim()
    shim.watch(root)
    ending = Ending()
    warnings.simplefilter("ignore", BankWarning)
    if trap.mode == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        DEEDS[deed].act(root, lambda: shim.arm(trap))
    except (Exception, KeyboardInterrupt) as error:
        ending.error, ending.message = type(error).__name__, str(error)
        ending.is_ours = isinstance(error, PrefixBankError | KeyboardInterrupt)
        if not ending.is_ours:
            ending.message += "\n" + traceback.format_exc()
    ending.kinds, ending.n_seen, ending.hit, ending.retried = shim.seen, shim.n_seen, shim.hit, shim.retried
    return ending


def serve() -> None:
    for line in sys.stdin:
        root, deed, *trap = json.loads(line)
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reads)
            try:
                ending = suffer(Path(root), deed, Trap(*trap))
                os.write(writes, json.dumps(asdict(ending)).encode())
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(writes)
        print(json.dumps({"pid": pid}), flush=True)
        said = b""
        hangs = False
        while True:
            ready, _, _ = select.select([reads], [], [], HANGS_AFTER_S)
            if not ready:
                hangs = True
                os.kill(pid, signal.SIGKILL)
            block = os.read(reads, 65536)
            if not block:
                break
            said += block
        os.close(reads)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps((json.loads(said) if said else {}) | {"code": code, "hangs": hangs}), flush=True)


class Stepper:
    """Let processes do deeds with a trap laid."""

    def __init__(self, library: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.stepping"],
            cwd=CHECKOUT,
            env=environment(library),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(
        self, root: Path, deed: str, trap: Trap | None = None, meanwhile: Callable[[int], None] | None = None
    ) -> Ending:
        """Do a deed; `meanwhile` gets the process's id and runs beside it."""
        trap = trap or Trap("count")
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = [str(root), deed, trap.mode, trap.nth, sorted(trap.kinds), trap.errno, trap.stays]
        print(json.dumps(line), file=process.stdin, flush=True)
        pid = json.loads(process.stdout.readline())["pid"]
        beside = threading.Thread(target=meanwhile, args=(pid,)) if meanwhile is not None else None
        if beside is not None:
            beside.start()
        ending = Ending(**json.loads(process.stdout.readline()))
        if beside is not None:
            beside.join()
        return ending

    def close(self) -> None:
        process = self._process
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait(HANGS_AFTER_S)
        assert process.stdout is not None
        process.stdout.close()


if __name__ == "__main__":
    serve()
