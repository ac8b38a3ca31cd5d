"""Own the few-shot prompts in a bank's folder `prefixes/`: finding and reading them, and their state in the bank.

The file `prefixes/sentiment/v3.toml` is the prefix `sentiment/v3`, unless it says another `name`. Files are found by
walking the folder, never by making a path of a name, and links that lead out of the folder are refused. No index here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from prefixbank.config import PREFIXES_FOLDER
from prefixbank.errors import PromptError, UnknownPrefixError
from prefixbank.fewshot import FewShotPrompt, read_toml
from prefixbank.values import PrefixRecord
from prefixbank.variables import SHOTS_KEY, VARIATION_MARK, Value, split_variation

__all__ = ["FileState", "PrefixFile", "PrefixFiles", "StoredVersion"]

SUFFIX = ".toml"

_LONGEST_NAME = 150
"""Characters of a file's prefix name: those of its variations and old versions are longer."""


class FileState(StrEnum):
    """Say how a stored prefix and its file compare."""

    NOT_WARMED = "not warmed"
    WARM = "warm"
    CHANGED = "changed"
    """The file says something else than what is stored."""
    EVICTED = "evicted"
    PARTLY_LOST = "partly lost"
    OLD_VERSION = "old version"
    """An earlier state of the file, kept under a name of its own."""
    BROKEN = "broken"
    """The file can't be read, so nothing can be compared."""
    NO_FILE = "no file"
    """A few-shot prompt whose file is gone, or that came from elsewhere."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """Hold a stored prefix that was made of a file, how much of it is there, and its state (None: can't be told)."""

    prefix: PrefixRecord
    n_stored_tokens: int
    state: FileState | None


@dataclass(frozen=True, slots=True)
class PrefixFile:
    """Hold a few-shot prompt in a file of the bank: its prefix name, its path, and what it says with its own variables.

    `shots` is None where the file is broken, and `error` says why. `stored` are the prefixes made of it, one or more
    for each model. `path` is None for a stored few-shot prompt that no file is of that name.
    """

    name: str
    path: Path | None
    shots: FewShotPrompt | None = None
    error: str = ""
    stored: tuple[StoredVersion, ...] = ()

    def read(self, *, k: int | None = None, variables: Mapping[str, Value] | None = None) -> FewShotPrompt:
        """Return the file's prompt as it is now, with these values of variables, or its first `k` examples only.

        Raises `PromptError` that names the file, and the line, key or variable that is wrong.
        """
        if self.path is None:
            raise PromptError(f"{self.name} has no file")
        if self.error:
            raise PromptError(self.error)
        shots = FewShotPrompt.from_mapping(read_toml(self.path), str(self.path), variables=variables, name=self.name)
        try:
            return shots if k is None else shots.first(k)
        except PromptError as exc:
            raise PromptError(f"{self.path}: {exc}") from exc


class PrefixFiles:
    """Know the few-shot files of a bank root as they were when this was made."""

    def __init__(self, root: Path) -> None:
        """Read all files. Those that are broken are known too, with their error."""
        self.folder = root / PREFIXES_FOLDER
        found = [_read(self.folder, path, error) for path, error in _paths(self.folder)]
        self.files = _without_doubles(sorted(found, key=lambda file: file.name))
        self._by_name = {file.name: file for file in sorted(self.files, key=lambda file: not file.error)}

    def find(self, name: str) -> PrefixFile:
        """Return the file of a prefix name. Raises `UnknownPrefixError`, `PromptError` for a broken one."""
        file = self._by_name.get(name)
        if file is None:
            known = f": there are {', '.join(sorted(self._by_name)[:10])}" if self._by_name else ""
            raise UnknownPrefixError(f"no prefix file in {self.folder} is called {name!r}{known}")
        if file.error:
            raise PromptError(file.error)
        return file

    def at(self, path: Path) -> PrefixFile | None:
        """Return the file at a path; None where it is none of the bank's."""
        wanted = path.absolute()
        return next((file for file in self.files if file.path is not None and file.path.absolute() == wanted), None)

    def file_of(self, prefix_name: str) -> PrefixFile | None:
        """Return the file that a stored prefix of that name was made of, variations and old versions included."""
        return self._by_name.get(prefix_name.partition(VARIATION_MARK)[0])

    def state_of(self, prefix: PrefixRecord, n_stored_tokens: int) -> FileState | None:
        """Return how a stored prefix and its file compare; None for what is no few-shot prompt, or can't be told."""
        if not prefix.source_digest:
            return None
        file = self.file_of(prefix.name)
        if file is None:
            return FileState.NO_FILE
        base, differs = split_variation(prefix.name)
        if differs is not None and "" in differs and prefix.source_digest.startswith(differs[""]):
            return FileState.OLD_VERSION
        if file.shots is None:
            return FileState.BROKEN
        if base != file.name or differs is None:
            return None
        shots = file.shots
        if differs:
            k = differs.pop(SHOTS_KEY, None)
            try:
                shots = file.read(k=None if k is None else int(k), variables=differs)
            except (PromptError, ValueError):  # it has fewer examples now, or other variables
                return FileState.CHANGED
        if shots.source_digest != prefix.source_digest:
            return FileState.CHANGED
        if n_stored_tokens < prefix.n_tokens:
            return FileState.PARTLY_LOST if n_stored_tokens else FileState.EVICTED
        return FileState.WARM

    def with_stored(
        self, prefixes: Iterable[PrefixRecord], stored_tokens_of: Callable[[PrefixRecord], int]
    ) -> list[PrefixFile]:
        """Return the files with what is stored of each; stored few-shot prompts without a file follow them."""
        stored: dict[str, list[StoredVersion]] = {}
        without: dict[str, list[StoredVersion]] = {}
        for prefix in prefixes:
            n_stored = stored_tokens_of(prefix)
            state = self.state_of(prefix, n_stored)
            file = self.file_of(prefix.name)
            if file is not None and prefix.source_digest:
                stored.setdefault(file.name, []).append(StoredVersion(prefix, n_stored, state))
            elif prefix.source_digest:
                without.setdefault(prefix.name, []).append(StoredVersion(prefix, n_stored, state))
        files = [replace(file, stored=tuple(stored.get(file.name, ()))) for file in self.files]
        return files + [PrefixFile(name, None, stored=tuple(versions)) for name, versions in without.items()]


def _paths(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the TOML files below a folder, and folders that can't be read, with what is wrong with them.

    Hidden files and folders are passed over, and linked folders not followed.
    """
    errors: list[OSError] = []
    for where, folders, names in os.walk(folder, onerror=errors.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(SUFFIX) and not name.startswith("."):
                yield Path(where, name), ""
    for error in errors:
        if not isinstance(error, FileNotFoundError):
            yield Path(error.filename), f"{error.filename} can't be read: {error.strerror or error}"


def _read(folder: Path, path: Path, error: str) -> PrefixFile:
    name = path.relative_to(folder).as_posix().removesuffix(SUFFIX)
    if error:
        return PrefixFile(name, path, error=error)
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise PromptError(f"{path} is a link that leads out of {folder}: put the file itself there")
        if path.exists() and not path.is_file():
            raise PromptError(f"{path} is no file")
        table = read_toml(path)
        given = table.get("name")
        name = given if isinstance(given, str) and given else name
        _require_safe_name(name, path)
        return PrefixFile(name, path, FewShotPrompt.from_mapping(table, str(path), name=name))
    except PromptError as exc:
        return PrefixFile(name, path, error=str(exc))
    except (OSError, RuntimeError) as exc:  # links in a circle
        return PrefixFile(name, path, error=f"{path} can't be read: {exc}")


def _require_safe_name(name: str, path: Path) -> None:
    parts = name.split("/")
    is_safe = name.isprintable() and len(name) <= _LONGEST_NAME and not name.startswith("-")
    is_safe = is_safe and not set(name) & {VARIATION_MARK, "\\"}
    if not is_safe or any(part in ("", ".", "..") or part != part.strip() for part in parts):
        raise PromptError(
            f"{path}: {name!r} can't be a prefix file's name: use up to {_LONGEST_NAME} printable characters without "
            f"{VARIATION_MARK} and \\, no - in front, and no empty parts, . or .. between slashes"
        )


def _without_doubles(files: list[PrefixFile]) -> list[PrefixFile]:
    """Return files of one name as broken, since none can be told to be the one that is meant."""
    counts = Counter(file.name for file in files if not file.error)

    def checked(file: PrefixFile) -> PrefixFile:
        if file.error or counts[file.name] == 1:
            return file
        others = [str(other.path) for other in files if other.name == file.name and other is not file]
        error = f"{file.path} has the name {file.name!r} of {', '.join(others)}: give one of them another"
        return replace(file, shots=None, error=error)

    return [checked(file) for file in files]
