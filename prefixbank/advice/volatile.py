"""Own the finding that a date, an id or the like stands before what prompts share."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from prefixbank.advice.documents import Document, Unit, put_at_end, without
from prefixbank.advice.edits import Documents, Edit, documents_with, places
from prefixbank.advice.recognise import NUMBER, mask, name_kinds, spans_of

__all__ = ["find"]

UNKNOWN = "a text"
_LEAST_SHARE = 0.05  # of the prompts must have it
_DISTINCT_SHARE = 0.2  # of them must have their own, where it is not known to be volatile
_LEAST_COMMON_CHARACTERS = 12
_KEY_CHARACTERS = 12
_SHORT_CHARACTERS = 80
_N_LEADING_UNITS = 4
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")


@dataclass(frozen=True, slots=True)
class _Differing:
    """Hold the ranges of a unit that differ from the same unit in other prompts, and what they are."""

    at: int
    ranges: tuple[tuple[int, int], ...]
    kinds: tuple[str, ...]


def find(documents: Documents) -> Edit | None:
    """Return the edit that moves what differs, with its sentence, behind what is shared; None without such a text."""
    found: dict[int, _Differing] = {}  # one a document, the first; others follow in the next round
    for candidates in (_by_mask(documents), _by_affixes(documents)):
        for number, differing in candidates.items():
            found.setdefault(number, differing)
    if not found:
        return None
    moved: dict[int, list[tuple[tuple[str, ...], str, str]]] = {}
    shown = []
    kinds: list[str] = []
    for number, differing in sorted(found.items()):
        document = documents[number]
        unit = document.units[differing.at]
        rest, sentences = _cut_out(unit.texts[0], differing.ranges)
        moved.setdefault(document.index, []).append((unit.texts, rest, sentences))
        kinds += differing.kinds
        start, end = differing.ranges[0]
        shown.append((document, unit.texts[0][start:end]))
    n_with = documents_with(documents)
    ending = {texts for texts, n_documents in n_with.items() if n_documents > max(1, len(documents) / 2)}

    def rewrite(others: Documents) -> list[Document]:
        return [_move(other, moved.get(other.index, []), other.units[-1].texts in ending) for other in others]

    first = documents[min(found)].units[found[min(found)].at]
    where = "in the system prompt" if first.role == "system" else "before what the prompts share"
    what = name_kinds(kinds)
    if what == UNKNOWN:
        message = f"A text {where} is another one in each prompt ({len(found)} of {len(documents)} prompts)."
    else:
        message = f"{what[:1].upper()}{what[1:]} {where} differs from prompt to prompt ({len(found)} of "
        message += f"{len(documents)} prompts)."
    return Edit(
        "volatile-text",
        message,
        "Move it behind the shots, to the end of the prompt, or leave it out: what stands behind it is shared then.",
        places(shown),
        rewrite,
    )


def _by_mask(documents: Documents) -> dict[int, _Differing]:
    """Return units that are the same but for recognised texts, by document number."""
    alike: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    masks: dict[str, str] = {}
    twice = set()
    for number, document in enumerate(documents):
        seen = set()
        for at, unit in enumerate(document.units[:-1]):
            if not _is_block(unit):
                continue
            text = unit.texts[0]
            key = (unit.role, masks.setdefault(text, mask(text)))
            if key in seen:
                twice.add(key)  # examples about dates, and the like
            seen.add(key)
            alike[key].append((number, at))
    found: dict[int, _Differing] = {}
    for key, owners in alike.items():
        texts = {documents[number].units[at].texts[0] for number, at in owners}
        if key in twice or len(texts) < 2 or len(owners) < max(2, _LEAST_SHARE * len(documents)):
            continue
        spans = {text: spans_of(text) for text in texts}
        columns = list(zip(*([text[s.start : s.end] for s in found] for text, found in spans.items()), strict=True))
        some = next(iter(spans.values()))
        differing = [n for n, column in enumerate(columns) if len(set(column)) > 1]
        kinds = tuple(some[n].kind for n in differing)
        if not differing:
            continue
        if set(kinds) == {NUMBER}:
            if len(texts) < max(2, _DISTINCT_SHARE * len(owners)):
                continue  # a few kinds of prompts that differ by a number
            if all(len(text) < _SHORT_CHARACTERS and "\n" not in text for text in texts):
                continue  # a query with numbers in it
        for number, at in owners:
            own = spans[documents[number].units[at].texts[0]]
            ranges = tuple((own[n].start, own[n].end) for n in differing)
            if number not in found or at < found[number].at:
                found[number] = _Differing(at, ranges, kinds)
    return found


def _is_block(unit: Unit) -> bool:
    """Tell whether a unit may be taken apart."""
    return len(unit.texts) == 1 and not unit.is_example and unit.message is None


def _by_affixes(documents: Documents) -> dict[int, _Differing]:
    """Return leading units that begin and end alike in most prompts and differ in between, by document number."""
    found: dict[int, _Differing] = {}
    indexes: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for document in documents:
        for at, unit in enumerate(document.units):
            indexes[unit.texts].add(at)
    for at in range(_N_LEADING_UNITS):
        owners = [
            number
            for number, document in enumerate(documents)
            if at < len(document.units) - 1
            and _is_block(document.units[at])
            and len(indexes[document.units[at].texts]) == 1  # what comes at several places is an example
        ]
        for cut in (slice(None, _KEY_CHARACTERS), slice(-_KEY_CHARACTERS, None)):
            buckets: dict[str, list[int]] = defaultdict(list)
            for number in owners:
                if number not in found:
                    buckets[documents[number].units[at].texts[0][cut]].append(number)
            for members in buckets.values():
                if len(members) >= max(2, len(documents) / 2):
                    found |= _between_affixes(documents, members, at)
    return found


def _between_affixes(documents: Documents, members: Sequence[int], at: int) -> dict[int, _Differing]:
    texts = [documents[number].units[at].texts[0] for number in members]
    if len(set(texts)) < max(2, _DISTINCT_SHARE * len(texts)):
        return {}
    n_before = _n_common(texts)
    n_behind = _n_common([text[n_before:][::-1] for text in texts])
    lengths = sorted(map(len, texts))
    if n_before + n_behind < max(_LEAST_COMMON_CHARACTERS, lengths[len(lengths) // 2] / 2):
        return {}  # a unit of its own, not a text with something in it
    is_labelled = texts[0][:n_before].rstrip().endswith(":")
    if is_labelled and not any(c.isalnum() for c in texts[0][len(texts[0]) - n_behind :]):
        return {}  # all of it is the prompt's own, behind a label
    found = {}
    for number, text in zip(members, texts, strict=True):
        start, end = _whole_words(text, n_before, len(text) - n_behind)
        kinds = tuple(
            span.kind for span in spans_of(text) if span.start < end and span.end > start and span.kind != NUMBER
        )
        found[number] = _Differing(at, ((start, end),), kinds or (UNKNOWN,))
    return found


def _n_common(texts: Sequence[str]) -> int:
    """Return how many characters all texts begin with."""
    one, other = min(texts), max(texts)  # what these share, all between them share
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _whole_words(text: str, start: int, end: int) -> tuple[int, int]:
    while start > 0 and not text[start - 1].isspace():
        start -= 1
    while end < len(text) and not text[end].isspace():
        end += 1
    return start, end


def _cut_out(text: str, ranges: Sequence[tuple[int, int]]) -> tuple[str, str]:
    """Return a text without the sentences or lines that hold the ranges, and these."""
    cuts: list[tuple[int, int]] = []
    for start, end in ranges:
        begin = max((m.end() for m in _SENTENCE_END.finditer(text, 0, start)), default=0)
        close = _SENTENCE_END.search(text, end)
        finish = len(text) if close is None else close.end()
        if cuts and begin < cuts[-1][1]:
            cuts[-1] = (cuts[-1][0], finish)
        else:
            cuts.append((begin, finish))
    sentences = " ".join(text[begin:finish].strip() for begin, finish in cuts)
    rest, at = "", 0
    for begin, finish in cuts:
        rest += text[at:begin]
        at = finish
    rest += text[at:]
    return rest.strip(), sentences


def _move(document: Document, moved: Sequence[tuple[tuple[str, ...], str, str]], behind: bool) -> Document:
    for texts, rest, sentences in moved:
        at = next((n for n, unit in enumerate(document.units) if unit.texts == texts), None)
        if at is None:
            continue
        units = list(document.units)
        if rest:
            units[at] = replace(units[at], texts=(rest,))
        else:
            units = without(units, at)
        # Where prompts end alike, the end is shared: what differs belongs behind it.
        document = put_at_end(replace(document, units=tuple(units)), sentences, behind=behind)
    return document
