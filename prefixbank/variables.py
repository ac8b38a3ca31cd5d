"""Own the variables of few-shot prompts in files, and what a variation of a prompt is called. No files here.

`{{name}}` in a text stands for a variable's value, where the file has a table `variables`; elsewhere braces are braces.
A variation (other values, or only the first examples) is called `<name>@<what differs>`: `mood/v1@language=French,k=4`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from prefixbank.errors import PromptError

__all__ = ["SHOTS_KEY", "VARIATION_MARK", "Value", "Variables", "old_version_name", "split_variation", "variation_name"]

Value = str | int | float

VARIATION_MARK = "@"
SHOTS_KEY = "k"
"""What a variation's name calls the number of its examples; no variable can be called so."""

_USE = re.compile(r"\{\{ *([A-Za-z_]\w*) *\}\}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SHOWN_VALUE = re.compile(r"[\w.+-]{1,24}")
_DIGEST_START = re.compile(r"[0-9a-f]{8}")


class Variables:
    """Fill in the variables of one few-shot prompt."""

    def __init__(self, declared: Mapping[str, object] | None, given: Mapping[str, object], where: str) -> None:
        """Take a file's table of default values (None: it has none) and the values given in their place.

        Raises `PromptError` that names `where` and the variable, for a name or value that can't be one.
        """
        self._where = where
        self._is_used = declared is not None
        self._defaults = {name: self._checked(name, value) for name, value in (declared or {}).items()}
        self._given = {name: self._checked(name, value) for name, value in given.items()}
        self._values = self._defaults | self._given
        self._found: set[str] = set()

    def fill(self, text: str) -> str:
        """Return a text with the values in place of `{{name}}`; values are not looked into again.

        Raises `PromptError` for a variable that has no value.
        """
        return _USE.sub(self._value_of, text) if self._is_used else text

    def require_known(self) -> None:
        """Raise `PromptError` for a given variable that is neither declared nor was found in a text."""
        known = self._defaults.keys() | self._found
        for name in sorted(self._given.keys() - known):
            if not self._is_used:
                raise PromptError(f"{self._where} has no table [variables]: {name!r} can't be given")
            raise PromptError(f"{self._where}: unknown variable {name!r} (known: {', '.join(sorted(known)) or 'none'})")

    @property
    def changed(self) -> dict[str, str]:
        """Return the given values that are not the defaults, by name."""
        return {name: value for name, value in self._given.items() if self._defaults.get(name) != value}

    def _value_of(self, use: re.Match[str]) -> str:
        name = use[1]
        self._found.add(name)
        if name not in self._values:
            raise PromptError(
                f"{self._where}: the variable {name!r} has no value: give it one in [variables], or with "
                f"variables= (--var {name}=...)"
            )
        return self._values[name]

    def _checked(self, name: str, value: object) -> str:
        if not _VARIABLE.fullmatch(name) or name == SHOTS_KEY:
            raise PromptError(
                f"{self._where}: {name!r} can't be a variable: use letters, digits and _, and not {SHOTS_KEY!r} alone"
            )
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise PromptError(f"{self._where}: the variable {name!r} is a {type(value).__name__}, not a text or number")
        return str(value)


def variation_name(name: str, changed: Mapping[str, Value]) -> str:
    """Return what a variation of a prompt is called: in `changed` are its values, and under `k` its examples.

    Values that are long or hold other characters than letters, digits, `.`, `+`, `-` and `_` are told by a digest. A
    prompt without a name stays without one.
    """
    if not name or not changed:
        return name
    parts = [f"{key}={_shown(str(value))}" for key, value in sorted(changed.items())]
    return f"{name}{',' if VARIATION_MARK in name else VARIATION_MARK}{','.join(parts)}"


def old_version_name(name: str, source_digest: str) -> str:
    """Return what an old version is called that is kept beside the one that now has its name."""
    return f"{name}{VARIATION_MARK}{source_digest[:8]}"


def split_variation(name: str) -> tuple[str, dict[str, str] | None]:
    """Return the name before the mark and what differs; None where that can't be told from the name.

    An old version's name, as `old_version_name` makes it, differs in `{"": "<8 hex>"}`.
    """
    base, mark, rest = name.rpartition(VARIATION_MARK)
    if not mark:
        return name, {}
    if _DIGEST_START.fullmatch(rest):
        return base, {"": rest}
    changed = dict(part.partition("=")[::2] for part in rest.split(","))
    shown = all(_VARIABLE.fullmatch(key) and _SHOWN_VALUE.fullmatch(value) for key, value in changed.items())
    return base, changed if shown else None


def _shown(value: str) -> str:
    if _SHOWN_VALUE.fullmatch(value):
        return value
    return f"~{hashlib.sha256(value.encode(errors='backslashreplace')).hexdigest()[:8]}"
