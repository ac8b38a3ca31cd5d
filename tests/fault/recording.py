"""Live a bank's life while each change of its files is recorded.

`python -m tests.fault.recording ROOT FILE DURABILITY` prints what it acknowledges, in order; the n-th line is mark n in
the recording.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from prefixbank.bank import PrefixBank
from tests.fakekv import FakeModel
from tests.fault.deeds import BASE, LONGER, OTHER, STATED, hybrid
from tests.fault.trap import Shim


def live(root: Path, file: Path, durability: Any) -> None:
    """Make a bank; store, name, use, remove and prune. Each line says which prompts are there from now on."""
    shim = Shim()
    shim.watch(root.parent)
    shim.record(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    said = 0
    there: dict[str, int] = {}

    def say(**changes: int) -> None:
        nonlocal said
        there.update(changes)
        shim.mark(said)
        said += 1
        print(json.dumps(there), flush=True)

    with PrefixBank.open(root, chunk_tokens=4, durability=durability) as bank:
        say()
        model = FakeModel(bank)
        model.name("base", BASE)
        say(base=10)
        model.store(OTHER)
        say(other=5)
        hybrid(bank).store(STATED, ends=[4, 6, 10])
        say(stated=10)
        model.store(LONGER)
        say(longer=22)
        model.use(OTHER)
        say(stated=0, longer=0, base=0)
        bank.remove("base")
        say()
        say(other=0)
        bank.prune(max_bytes=0)
        model.store(BASE)
        say(base=10)


if __name__ == "__main__":
    live(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
