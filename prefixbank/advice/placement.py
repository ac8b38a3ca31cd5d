"""Own the finding that a text of each prompt's own, a query above all, stands before what prompts share."""

from __future__ import annotations

from prefixbank.advice.documents import Document, move_behind
from prefixbank.advice.edits import Documents, Edit, documents_with, places, shorten

__all__ = ["find"]

_SHARED = 0.5  # of the prompts have it
_OWN = 0.2
_LEAST_SAVED_A_PROMPT = 16  # a short "Answer:" or "Think first." belongs behind the query


def find(documents: Documents) -> Edit | None:
    """Return the edit that moves what is a prompt's own behind what most prompts share, None where it is there."""
    n_with = documents_with(documents)
    shared = {texts for texts, n in n_with.items() if n >= max(2, _SHARED * len(documents))}
    own = {texts for texts, n in n_with.items() if n <= max(1, _OWN * len(documents))} - shared
    early = [(document, _early(document, shared, own)) for document in documents]
    movers = [(document, places) for document, places in early if places]
    if len(movers) < max(2, len(documents) / 2):
        return None

    def rewrite(others: Documents) -> list[Document]:
        return [move_behind(other, _early(other, shared, own)) for other in others]

    document, (at, *_) = movers[0]
    n_behind = sum(unit.texts in shared for unit in document.units[at:])
    return Edit(
        "early-query",
        f"A text of each prompt's own ({shorten(document.units[at].text)!r}) stands before {n_behind} blocks that the "
        f"prompts share ({len(movers)} of {len(documents)} prompts).",
        "Put what all prompts share first, instructions and shots, and the query or other text of each prompt's own "
        "behind.",
        places((document, document.units[found[0]].text) for document, found in movers),
        rewrite,
        _LEAST_SAVED_A_PROMPT,
    )


def _early(document: Document, shared: set[tuple[str, ...]], own: set[tuple[str, ...]]) -> list[int]:
    """Return where the document has texts of its own before its last shared unit."""
    last = max((at for at, unit in enumerate(document.units) if unit.texts in shared), default=0)
    return [
        at
        for at, unit in enumerate(document.units[:last])
        if unit.texts in own and not unit.is_example and unit.message is None
    ]
