"""Own what people and programs read: JSON documents and tables on stdout, one-line messages and bars on stderr."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TextIO

from prefixbank.errors import BankWarning, StorageError

__all__ = [
    "EXIT_PROBLEMS",
    "print_document",
    "print_text",
    "progress_bar",
    "say",
    "silence_stdout",
    "table",
    "utc",
    "warnings_as_lines",
    "yes_no",
]

JSON_SCHEMA = 1
EXIT_PROBLEMS = 1
"""The exit code of a verb that did its work and has something to say about it."""

Progress = Callable[[int, int], None]


def print_document(**fields: object) -> None:
    """Print the one JSON document of a verb on stdout."""
    print_text(json.dumps({"schema": JSON_SCHEMA, **fields}, indent=2))


def print_text(text: str) -> None:
    """Print text on stdout. A reader that has gone ends the output, not the work. Raises `StorageError`."""
    if not text:
        return
    try:
        _write(sys.stdout, text)
    except OSError as exc:
        silence_stdout()  # or the interpreter tries again at its end
        if not isinstance(exc, BrokenPipeError):
            raise StorageError(f"stdout can't be written: {exc.strerror or exc}") from exc


def silence_stdout() -> None:
    """Send nowhere what is still to be written to stdout: its reader has gone."""
    with suppress(OSError, ValueError):  # a test's stdout has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def say(message: str, kind: str = "") -> None:
    """Say something in one line on stderr."""
    with suppress(OSError):  # nobody listens
        _write(sys.stderr, f"prefixbank: {kind}{_printable(_one_line(message))}")


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show each `BankWarning` as one line on stderr while the block runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", BankWarning)
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, BankWarning):
                say(str(message), "warning: ")
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """Return rows as columns under their headers, the columns named in `right` to the right; "" without rows.

    On a terminal it is a rich table that folds long cells. Into a pipe go plain aligned columns of which no cell is
    cut, and rich is not imported (60 ms).
    """
    if not rows:
        return ""
    if sys.stdout.isatty():
        return _rich_table(headers, rows, right)
    lines = [[header.upper() for header in headers], *([_printable(cell) for cell in row] for row in rows)]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(headers))]
    texts = []
    for line in lines:
        cells = []
        for header, cell, width in zip(headers, line, widths, strict=True):
            blanks = " " * (width - _width(cell))
            cells.append(blanks + cell if header in right else cell + blanks)
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def _rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        columns.add_column(header, justify="right" if header in right else "left", overflow="fold")
    for row in rows:
        columns.add_row(*(Text(_printable(cell)) for cell in row))
    console = Console()
    with console.capture() as captured:
        console.print(columns)
    return captured.get().rstrip("\n")


def utc(seconds: int) -> str | None:
    """Return seconds since the epoch as UTC in ISO 8601; None for 0, which is never."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if seconds else None


def yes_no(value: bool) -> str:
    """Return a truth value as people read it."""
    return "yes" if value else "no"


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """Show a bar on stderr while the block runs, fed with (done, in all); yields None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(_printable(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _write(stream: TextIO, text: str) -> None:
    """Write a line at once, in whatever encoding the stream has."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _printable(text: str) -> str:
    """Return text in one line that can't drive a terminal: names and labels are whatever users made them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _width(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
