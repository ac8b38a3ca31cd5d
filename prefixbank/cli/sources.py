"""Own reading prompts for verbs: from text, few-shot TOML and JSON lines, files, few-shot files by name, or stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixbank.cli.output import say
from prefixbank.config import PREFIXES_FOLDER
from prefixbank.errors import ConfigError, PromptError, UnknownPrefixError

if TYPE_CHECKING:
    from prefixbank.fewshot import FewShotPrompt

__all__ = [
    "JsonLinesOption",
    "SourceArgument",
    "SourcePrompt",
    "parse_variables",
    "read_prefix_files",
    "read_prompts",
]

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


def read_prompts(
    source: str,
    *,
    as_lines: bool,
    name: str | None = None,
    pin: bool = False,
    root: Path | None = None,
    k: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[SourcePrompt]:
    """Return the prompts of a file or of stdin (`-`); `name` and `pin` add to what the source says.

    With the bank root, a source that is no path may be the name of one of its few-shot files. `k` and `variables` are
    for few-shot files. Lines are parsed one at a time, as they are asked for. Raises `PromptError` that names the file,
    and the line or key.
    """
    where = "stdin" if source == "-" else source
    suffix = Path(source).suffix.lower()
    is_file = as_lines or source == "-" or suffix == ".jsonl" or (Path(source).exists() and not Path(source).is_dir())
    if suffix == ".toml" and not as_lines:
        shots = _read_shots(source, root, k, variables)
    elif not is_file and root is not None:
        shots, where = _named_shots(source, root, k, variables)
    elif k is not None or variables:
        raise ConfigError(f"{where} is no few-shot file: -k and --var are for these")
    elif as_lines or suffix == ".jsonl":
        if name is not None:
            raise ConfigError("--name is for one prompt: with JSON lines, give each line a name of its own")
        return _read_lines(_read_bytes(source), where, pin)
    else:
        return iter([SourcePrompt(where, _decode(_read_bytes(source), where), name, pin).require_name_for_pin()])
    return iter([SourcePrompt(where, shots, name or shots.name or None, pin).require_name_for_pin()])


def read_prefix_files(root: Path, *, pin: bool = False) -> tuple[list[SourcePrompt], list[dict[str, str]]]:
    """Return the prompts of all few-shot files of a bank, and name, path and error of those that are broken.

    Raises `PromptError` where there are none.
    """
    from prefixbank.prefixfiles import PrefixFiles

    files = PrefixFiles(root)
    if not files.files:
        raise PromptError(f"{files.folder} holds no few-shot files: write one, such as {files.folder / 'mood/v1.toml'}")
    prompts = [SourcePrompt(str(f.path), f.shots, f.name, pin) for f in files.files if f.shots is not None]
    return prompts, [{"source": str(f.path), "name": f.name, "error": f.error} for f in files.files if f.error]


def parse_variables(given: Sequence[str]) -> dict[str, str]:
    """Return the values of `name=value` options. Raises `ConfigError` that names the option."""
    values: dict[str, str] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals or not name or name in values:
            raise ConfigError(f"--var {option}: give each variable once, as name=value")
        values[name] = value
    return values


def _read_shots(source: str, root: Path | None, k: int | None, variables: Mapping[str, str] | None) -> FewShotPrompt:
    from prefixbank.fewshot import FewShotPrompt  # late, here and below: 12 ms

    if root is not None and (root / PREFIXES_FOLDER).exists():
        from prefixbank.prefixfiles import PrefixFiles

        file = PrefixFiles(root).at(Path(source))  # it has a name then, even if it says none
        if file is not None:
            return file.read(k=k, variables=variables)
    shots = FewShotPrompt.from_toml(source, variables=variables)
    try:
        return shots if k is None else shots.first(k)
    except PromptError as exc:
        raise PromptError(f"{source}: {exc}") from exc


def _named_shots(
    source: str, root: Path, k: int | None, variables: Mapping[str, str] | None
) -> tuple[FewShotPrompt, str]:
    """Return the few-shot prompt of a name, and the path of its file."""
    from prefixbank.prefixfiles import PrefixFiles

    try:
        file = PrefixFiles(root).find(source)
    except UnknownPrefixError as exc:
        problem = "Is a directory" if Path(source).is_dir() else "No such file or directory"
        raise PromptError(f"{source} can't be read: {problem}; and {exc}") from exc
    return file.read(k=k, variables=variables), str(file.path)


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
