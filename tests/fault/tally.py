"""Count what the fault tests did and what they found, for the line at the end of a long run."""

from __future__ import annotations

from collections import Counter

COUNTS: Counter[str] = Counter()

PROMISED_NONE = ("wrong tokens", "acknowledged chunks lost", "signals", "hangs over 30 s")
DONE = ("kills", "kill points", "cuts", "damaged inputs", "failed operations", "interrupts", "operations")


def count(what: str, n: int = 1) -> None:
    """Count something that was done or found."""
    assert what in PROMISED_NONE + DONE, what
    COUNTS[what] += n


def must_not(what: str, happened: object) -> None:
    """Count one of the things that must never happen, and fail."""
    if happened:
        count(what)
        raise AssertionError(f"{what}: {happened}")


def line() -> str:
    """Return the line that says it all."""
    promised = ", ".join(f"{what} {COUNTS[what]}" for what in PROMISED_NONE)
    return f"{promised} ({', '.join(f'{what} {COUNTS[what]:,}' for what in DONE)})"
