"""Own what a kind of finding hands over: what it saw, what it advises, and the edit itself, to be tried and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prefixbank.advice.documents import Document

__all__ = ["SHOWN_PLACES", "Documents", "Edit", "Seen", "documents_with", "places", "shorten"]

Documents = Sequence[Document]
_SHOWN_CHARACTERS = 60
SHOWN_PLACES = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """Name a text in one of the documents, and its token offset where that is known already."""

    prompt: int
    text: str
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Edit:
    """Hold a finding before it is counted.

    `rewrite` returns the documents with the advice followed. It finds what it changes by its text, so that it works on
    documents that other edits have changed, and leaves alone what it does not find. What saves fewer tokens a prompt
    than `least_saved_a_prompt` is not worth saying.
    """

    kind: str
    message: str
    advice: str
    seen: tuple[Seen, ...]
    rewrite: Callable[[Documents], list[Document]]
    least_saved_a_prompt: int = 4


def shorten(text: str) -> str:
    """Return a text that fits into a sentence."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def documents_with(documents: Documents) -> Counter[tuple[str, ...]]:
    """Return in how many documents each unit is."""
    return Counter(texts for document in documents for texts in {unit.texts for unit in document.units})


def places(pairs: Iterable[tuple[Document, str]]) -> tuple[Seen, ...]:
    """Return a few places, those with different texts first."""
    found: dict[str, Seen] = {}
    for document, text in pairs:
        found.setdefault(text, Seen(document.index, shorten(text)))
        if len(found) == SHOWN_PLACES:
            break
    return tuple(found.values())
