"""Own reading prompts for `warm` and `explain`: from text, few-shot TOML and JSON lines, files or stdin alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixbank.cli.output import say
from prefixbank.errors import ConfigError, PromptError

__all__ = ["JsonLinesOption", "SourceArgument", "SourcePrompt", "read_prompts"]

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="[SOURCE]",
        help="A few-shot prompt (.toml), one JSON prompt a line (.jsonl), or a text file; - is stdin.",
        show_default=False,
    ),
]
JsonLinesOption = Annotated[
    bool, typer.Option("--jsonl", help="Take SOURCE for JSON lines, whatever its name; for stdin.")
]

_LINE_KINDS = ("text", "messages", "token_ids")
_LINE_TYPES = {"text": str, "messages": list, "token_ids": list, "name": str}


@dataclass(frozen=True, slots=True)
class SourcePrompt:
    """Hold one prompt of a source with its name and pin; `where` is what errors call it."""

    where: str
    prompt: Any
    name: str | None = None
    pin: bool = False

    def require_name_for_pin(self) -> SourcePrompt:
        """Return itself. Raises `ConfigError` for a pin without a name."""
        if self.pin and self.name is None:
            raise ConfigError(f"{self.where}: a pin needs a name: give --name, or name in the source")
        return self


def read_prompts(source: str, *, as_lines: bool, name: str | None = None, pin: bool = False) -> Iterator[SourcePrompt]:
    """Return the prompts of a file or of stdin (`-`); `name` and `pin` add to what the source says.

    Lines are parsed one at a time, as they are asked for. Raises `PromptError` that names the file, and the line.
    """
    where = "stdin" if source == "-" else source
    suffix = Path(source).suffix.lower()
    if as_lines or suffix == ".jsonl":
        if name is not None:
            raise ConfigError("--name is for one prompt: with JSON lines, give each line a name of its own")
        return _read_lines(_read_bytes(source), where, pin)
    if suffix == ".toml":
        from prefixbank.fewshot import FewShotPrompt  # late, here and below: 12 ms

        shots = FewShotPrompt.from_toml(source)
        found = SourcePrompt(where, shots, name or shots.name or None, pin)
    else:
        found = SourcePrompt(where, _decode(_read_bytes(source), where), name, pin)
    return iter([found.require_name_for_pin()])


def _read_bytes(source: str) -> bytes:
    if source == "-":
        if sys.stdin.isatty():
            say("reading the prompt from the terminal; Ctrl-D ends it")
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as exc:
        raise PromptError(f"{source} can't be read: {exc.strerror or exc}") from exc


def _decode(text: bytes, where: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise PromptError(f"{where} is no UTF-8 text: {exc.reason} at byte {exc.start}") from exc


def _read_lines(text: bytes, where: str, pin: bool) -> Iterator[SourcePrompt]:
    n_prompts = 0
    for number, line in enumerate(text.split(b"\n"), 1):
        if line.strip():
            found = _parse_line(line, f"{where}, line {number}")
            yield replace(found, pin=found.pin or pin).require_name_for_pin()
            n_prompts += 1
    if not n_prompts:
        raise PromptError(f"{where} holds no prompt")


def _parse_line(line: bytes, where: str) -> SourcePrompt:
    try:
        table = json.loads(_decode(line, where))
    except ValueError as exc:
        raise PromptError(f"{where} is no JSON: {exc}") from exc
    if not isinstance(table, dict):
        raise PromptError(f"{where} is no JSON object")
    pin = table.pop("pin", False)
    if not isinstance(pin, bool):
        raise PromptError(f"{where}: pin must be true or false")
    kinds = [kind for kind in _LINE_KINDS if kind in table]
    if not kinds and table.keys() & {"instructions", "examples"}:
        from prefixbank.fewshot import FewShotPrompt

        shots = FewShotPrompt.from_mapping(table, where)
        return SourcePrompt(where, shots, shots.name or None, pin)
    if len(kinds) != 1 or table.keys() - {*kinds, "name"}:
        raise PromptError(
            f"{where} needs one of {', '.join(_LINE_KINDS)}, or instructions and examples; name and pin may be there"
        )
    for key, value in table.items():
        if not isinstance(value, _LINE_TYPES[key]):
            raise PromptError(f"{where}: {key} has the wrong type {type(value).__name__}")
    return SourcePrompt(where, table[kinds[0]], table.get("name") or None, pin)
