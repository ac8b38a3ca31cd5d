"""Own the file that the results of many prompts are streamed to, and picked up from by a run that was killed.

JSON Lines, one result a line, each written whole as soon as it is there; must not know of models. A result is picked up
for a prompt of the same token ids and a run of the same settings, wherever the prompt stands by then.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from prefixbank.errors import ConfigError, StorageError

__all__ = ["ResultLine", "ResultsFile", "prompt_digest"]

_TYPES: dict[str, tuple[type, ...]] = {
    "index": (int,),
    "prompt_digest": (str,),
    "settings_digest": (str,),
    "text": (str,),
    "token_ids": (list,),
    "cached_tokens": (int,),
    "computed_tokens": (int,),
    "finish_reason": (str, type(None)),
}


@dataclass(frozen=True, slots=True)
class ResultLine:
    """Hold one result as the file has it."""

    index: int
    prompt_digest: str
    settings_digest: str
    text: str
    token_ids: list[int]
    cached_tokens: int
    computed_tokens: int
    finish_reason: str | None


def prompt_digest(token_ids: bytes) -> str:
    """Return the SHA-256 of packed token ids."""
    return hashlib.sha256(token_ids).hexdigest()


class ResultsFile:
    """Read the results that are there, and append others; one run at a time.

    A last line without its end is what a killed run leaves: it is dropped, unless it is whole all the same.
    """

    def __init__(self, path: Path, settings_digest: str) -> None:
        """Open the file, or make it, and read it. Raises `ConfigError`, naming the line if one is broken."""
        self._path = path
        self._settings_digest = settings_digest
        self._found: dict[str, list[ResultLine]] = defaultdict(list)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as exc:
            raise ConfigError(f"{path} can't be written as a results file: {exc.strerror}") from exc
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise ConfigError(f"{path} is no file: give another results_file")
            self._lock()
            self._read()
        except OSError as exc:
            self.close()
            raise ConfigError(f"{path} can't be used as a results file: {exc.strerror}") from exc
        except ConfigError:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run writes to {self._path}: wait for it, or give another results_file"
            ) from None
        except OSError:
            return  # a file system without locks

    def _read(self) -> None:
        content = self._path.read_bytes()
        *lines, torn = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    self._take(line)
                except ValueError as exc:
                    raise ConfigError(
                        f"{self._path}, line {number}: {exc}; mend or delete that line, or give another results_file"
                    ) from None
        if not torn:
            return
        try:
            self._take(torn)
        except ValueError:
            os.ftruncate(self._descriptor, len(content) - len(torn))
        else:
            _write(self._descriptor, b"\n")

    def _take(self, line: bytes) -> None:
        """Note a line's result. Raises `ValueError` saying what is wrong with the line."""
        try:
            held = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError("this is no JSON") from None
        if not isinstance(held, dict):
            raise ValueError("this is no JSON object")
        for name, types in _TYPES.items():
            if name not in held:
                raise ValueError(f"there is no {name!r}")
            if not isinstance(held[name], types) or isinstance(held[name], bool):
                raise ValueError(f"{name!r} is of type {type(held[name]).__name__}")
        if not all(type(token) is int for token in held["token_ids"]):
            raise ValueError("'token_ids' are no list of integers")
        if held["settings_digest"] == self._settings_digest:
            self._found[held["prompt_digest"]].append(ResultLine(**{f.name: held[f.name] for f in fields(ResultLine)}))

    def take(self, digest: str, index: int, *, once: bool) -> ResultLine | None:
        """Return a result for a prompt, that of the same index if there is one; with `once` no other prompt gets it."""
        found = self._found.get(digest)
        if not found:
            return None
        line = next((line for line in found if line.index == index), found[0])
        if once:
            found.remove(line)
        return line

    def append(self, line: ResultLine) -> None:
        """Write one result behind the others. Raises `StorageError`; the lines before stay."""
        data = json.dumps(asdict(line), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        try:
            _write(self._descriptor, data + b"\n")
        except OSError as exc:
            raise StorageError(
                f"{self._path} can't be written: {exc.strerror}; call again with the same file to go on from there"
            ) from exc

    def close(self) -> None:
        """Close the file; closing again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
