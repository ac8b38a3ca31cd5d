"""Own the finding that shared texts differ in white space, case or Unicode form only."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from prefixbank.advice.documents import Document, Unit
from prefixbank.advice.edits import Documents, Edit, places
from prefixbank.advice.recognise import name_kinds, normal_form, spelling_difference

__all__ = ["find"]

_Place = tuple[tuple[str, ...], str, bool]
_Written = tuple[tuple[str, ...], str]
_LEAST_SHARE = 0.2


def _place(unit: Unit) -> _Place:
    return tuple(normal_form(text) for text in unit.texts), unit.role, unit.ends_message


def find(documents: Documents) -> Edit | None:
    """Return the edit that writes what is the same alike, None where it is. A document's last unit is its own."""
    written: dict[_Place, Counter[_Written]] = defaultdict(Counter)
    for document in documents:
        for unit in document.units[:-1]:
            written[_place(unit)][unit.texts, unit.gap] += 1
    for document in documents:  # where one prompt has both, they are meant to differ
        both = Counter(place for place, _ in {(_place(unit), unit.texts) for unit in document.units[:-1]})
        for place, n_written in both.items():
            if n_written > 1:
                written.pop(place, None)
    least = max(2, _LEAST_SHARE * len(documents))
    canonical = {
        place: ways.most_common(1)[0][0]
        for place, ways in written.items()
        if len(ways) > 1 and ways.total() >= least and any(place[0])
    }
    if not canonical:
        return None

    def rewrite(others: Documents) -> list[Document]:
        return [_rewritten(document, canonical) for document in others]

    differing = [
        (document, unit)
        for document in documents
        for unit in document.units[:-1]
        if _place(unit) in canonical and (unit.texts, unit.gap) != canonical[_place(unit)]
    ]
    differences = [
        spelling_difference(unit.text, "\n".join(canonical[_place(unit)][0])) or "white space" for _, unit in differing
    ]
    in_what = name_kinds(name for name, _ in Counter(differences).most_common())
    n_prompts = len({document.index for document, _ in differing})
    return Edit(
        "spelling",
        f"A text that prompts share differs in {in_what} only in {n_prompts} of {len(documents)} prompts.",
        "Write it alike in all prompts, to the last blank and line break.",
        places((document, unit.text + unit.gap) for document, unit in differing),
        rewrite,
    )


def _rewritten(document: Document, canonical: dict[_Place, _Written]) -> Document:
    units = []
    for unit in document.units[:-1]:
        texts, gap = canonical.get(_place(unit), (unit.texts, unit.gap))
        units.append(replace(unit, texts=texts, gap=gap))
    return replace(document, units=(*units, *document.units[-1:]))
