"""Own telling what a text that differs is: a date, a time, an id; or the same text written otherwise."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["NUMBER", "Span", "covering_span", "mask", "name_kinds", "normal_form", "spans_of", "spelling_difference"]

NUMBER = "a number"

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_WEEKDAY = (
    r"\b(?:mon(?:day)?|tue(?:s(?:day)?)?|wed(?:nesday)?|thu(?:rs(?:day)?)?|fri(?:day)?|sat(?:urday)?|sun(?:day)?)\b\.?"
)
# On their own, names count with a capital only: people march on, and the sun sat.
_FULL_WEEKDAY = r"\b(?-i:Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)\b"
_FULL_MONTH = (
    r"\b(?-i:January|February|March|April|June|July|August|September|October|November|December)\b(?:,?[ ]\d{4}\b)?"
)
_CLOCK = r"\b\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:[ ]?[ap]\.?m\b\.?)?(?:[ ]?(?:utc|gmt|cet|cest|[ecmp][ds]t)\b)?"
_ISO = r"\b\d{4}-\d{2}-\d{2}[t ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:[ ]?z\b|[ ]?[+-]\d{2}:?\d{2}\b|[ ]utc\b)?"
_DAY = r"\b\d{1,2}(?:st|nd|rd|th)?\b\.?"
_DATES = (
    r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}\b",
    r"\b\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})\b",
    rf"(?:{_WEEKDAY},?[ ](?:the[ ])?)?{_DAY}[ -](?:of[ ])?{_MONTH}(?:,?[ -]\d{{4}}\b)?",
    rf"(?:{_WEEKDAY},?[ ])?\b{_MONTH}[ ]{_DAY}(?:,?[ ]\d{{4}}\b)?",
    r"\d{4}[年][ ]?\d{1,2}[月][ ]?\d{1,2}[日]",
)
# The first that matches at a place wins, so whole things stand before their parts.
_KINDS: dict[str, str] = {
    "a date and time": rf"{_ISO}|(?:{'|'.join(_DATES)})(?:,?[ ](?:at[ ])?){_CLOCK}",
    "a date": "|".join(_DATES),
    "a time": _CLOCK,
    "a UUID": r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    "a random seed": r"\b(?:seed|nonce)\b[ _:#=-]*(?:is[ ])?[0-9a-z_-]*\d[\w-]*",
    "a request or session id": (
        r"\b(?:(?:request|req|session|trace|run|job|user|customer|ticket|order|conversation|chat|message|call|document|doc)"
        r"[ _-]?(?:id|no\.?|number|nr\.?|\#)?|id)\b[ ]*[:#=]?[ ]*(?:is[ ])?[\#]?(?=[\w-]*\d)[\w-]{2,}"
    ),
    "an epoch time": r"\b1\d{9}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?\b",
    "a hexadecimal id": r"\b(?:0x)?(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b",
    "a weekday": _FULL_WEEKDAY,
    "a month": _FULL_MONTH,
    NUMBER: r"\b\d+(?:[.,]\d+)*\b",
}
_NAMES = dict(enumerate(_KINDS))
_ANY = re.compile("|".join(f"(?P<k{number}>{_KINDS[name]})" for number, name in _NAMES.items()), re.IGNORECASE)
_SINGLE = {"a date", "a date and time", "a time", "a weekday", "a month", "an epoch time"}


@dataclass(frozen=True, slots=True)
class Span:
    """Hold a recognised text: `text[start:end]` is `kind`, as "a date"."""

    kind: str
    start: int
    end: int

    @property
    def is_of_time(self) -> bool:
        """Tell whether it says a point in time."""
        return self.kind in _SINGLE


def spans_of(text: str) -> list[Span]:
    """Return what is recognised in a text, in order and without overlaps; numbers too."""
    found = []
    for match in _ANY.finditer(text):
        kind = _NAMES[int(str(match.lastgroup)[1:])]
        found.append(Span(kind, match.start(), match.end()))
    return found


def mask(text: str) -> str:
    """Return a text with what is recognised replaced by its kind: texts that differ in nothing else are equal then."""
    return _ANY.sub(lambda match: f"\x00{str(match.lastgroup)[1:]}\x00", text)


def covering_span(text: str, at: int) -> Span | None:
    """Return what is recognised at a character of a text, None where nothing is."""
    return next((span for span in spans_of(text) if span.start <= at < span.end), None)


def name_kinds(kinds: Iterable[str]) -> str:
    """Return kinds as one phrase, each once, in order."""
    names = list(dict.fromkeys(kinds))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def normal_form(text: str) -> str:
    """Return what is the same for texts that differ in white space, case and Unicode form only."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def spelling_difference(one: str, other: str) -> str | None:
    """Say how two texts of one normal form differ, None where they have two forms or are equal."""
    if one == other or normal_form(one) != normal_form(other):
        return None
    if one.split() == other.split():
        return "white space"
    forms = [unicodedata.normalize("NFKC", text) for text in (one, other)]
    if forms[0].split() == forms[1].split():
        return "the Unicode form of characters"
    if one.casefold() == other.casefold() or one.casefold().split() == other.casefold().split():
        return "upper and lower case"
    return "white space, case or Unicode form"
