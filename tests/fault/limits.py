"""Hold what damage may cost whoever meets it, and say in an error which kind it was."""

from __future__ import annotations

import resource
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 1.0
MEGABYTES = 200


@contextmanager
def within_limits(*, traced: bool = False) -> Iterator[None]:
    """Assert that what the block does takes less than a second of this process, and 200 MB.

    `traced`: also count what Python allocates; a process that was large before need not grow. It takes some time.
    """
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if traced:
        tracemalloc.start()
    before_s = time.process_time()
    try:
        yield
        took_s = time.process_time() - before_s
        peak = tracemalloc.get_traced_memory()[1] if traced else 0
    finally:
        tracemalloc.stop()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss
    assert took_s < SECONDS * (5 if traced else 1), f"{took_s:.1f} s"
    assert peak < MEGABYTES << 20, f"{peak >> 20} MB"
    assert grown < MEGABYTES << 10, f"{grown >> 10} MB"


@contextmanager
def blaming(name: str) -> Iterator[None]:
    """Say in an error which structure it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the structure is {name!r}")
        raise
