"""Own the findings on examples: drawn anew for every document, or the same ones in another order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from prefixbank.advice.documents import Document, Unit
from prefixbank.advice.edits import Documents, Edit, places
from prefixbank.advice.recognise import mask
from prefixbank.advice.splitting import first_label

__all__ = ["find"]

_Order = tuple[tuple[str, ...], ...]
_LEAST_DISTINCT = 0.2
"""How many selections there must be for a prompt: fewer are a few fixed sets of shots. Choices of one document, four or
five prompts, have the same ones."""
_LEAST_OVERLAP = 0.2
_LEAST_REPEATED_ANSWERS = 0.5
_LEAST_OVERLAP_OF_BLOCKS = 0.6
_MANY_DISTINCT = 0.5
_NEARLY_ALL = 0.9


def find(documents: Documents) -> list[Edit]:
    """Return the edits that give all prompts the same examples, or the same order of them."""
    marked = _mark_blocks(documents)
    groups: dict[tuple[str, ...], list[Document]] = defaultdict(list)
    for document in marked:
        if document.examples:
            groups[_header(document)].append(document)
    chosen: dict[int, tuple[Unit, ...]] = {}
    orders: dict[int, _Order] = {}
    redrawn: list[Document] = []
    shuffled: list[Document] = []
    n_selections = n_orders = 0
    for members in groups.values():
        selections = {frozenset(Counter(_order(document)).items()) for document in members}
        if _are_redrawn(members):
            typical = sorted(members, key=lambda document: sum(len(unit.text) for unit in document.examples))
            shots = typical[len(typical) // 2].examples
            chosen |= {document.index: shots for document in members}
            redrawn += members
            n_selections += len(selections)
        else:
            found = _canonical_orders(members)
            orders |= found
            shuffled += [document for document in members if document.index in found]
            n_orders += len({_order(document) for document in members if document.index in found})
    return [
        *([_redrawn(redrawn, chosen, n_selections, len(documents))] if redrawn else []),
        *([_other_order(shuffled, orders, n_orders, len(documents))] if shuffled else []),
    ]


def _redrawn(members: list[Document], chosen: dict[int, tuple[Unit, ...]], n_selections: int, n_all: int) -> Edit:
    own = {document.index: set(_order(document)) for document in members}

    def rewrite(others: Documents) -> list[Document]:
        return [
            _with_examples(_mark(other, own[other.index]), chosen[other.index]) if other.index in own else other
            for other in others
        ]

    advice = (
        "Take the same shots for all prompts: in lm-eval `fewshot_config: {sampler: first_n}`, elsewhere draw them "
        "once, before the loop over the documents."
    )
    if any(document.shots in ("blocks", "turns") for document in members):
        advice += " Where they must differ, put those that come most often first."
    return Edit(
        "redrawn-shots",
        f"The examples are drawn anew: {len(members)} of {n_all} prompts have {n_selections} selections of them.",
        advice,
        places((document, document.examples[0].text) for document in members),
        rewrite,
    )


def _other_order(members: list[Document], orders: dict[int, _Order], n_orders: int, n_all: int) -> Edit:
    def rewrite(others: Documents) -> list[Document]:
        return [
            _in_order(_mark(other, set(orders[other.index])), orders[other.index]) if other.index in orders else other
            for other in others
        ]

    first = orders[members[0].index]
    differing = [document for document in members if _order(document) != orders[document.index]]
    order = ", ".join(repr("\n".join(texts)[:30]) for texts in first[:3])
    return Edit(
        "other-order",
        f"The same examples come in {n_orders} orders in {len(members)} of {n_all} prompts.",
        f"Keep one order in all prompts, as {order}{', ...' if len(first) > 3 else ''}: sort or shuffle them once.",
        places((document, document.examples[0].text) for document in differing),
        rewrite,
    )


def _order(document: Document) -> _Order:
    return tuple(unit.texts for unit in document.examples)


def _mark(document: Document, examples: set[tuple[str, ...]]) -> Document:
    """Return the document with these units, and no others, taken for examples; the last is the query."""
    units = [replace(unit, is_example=unit.texts in examples) for unit in document.units[:-1]]
    return replace(document, units=(*units, *document.units[-1:]))


def _header(document: Document) -> tuple[str, ...]:
    """Return what stands before the examples, with dates and the like masked: prompts of one task have one."""
    first = next(at for at, unit in enumerate(document.units) if unit.is_example)
    return tuple(mask(unit.text) for unit in document.units[:first])


def _mark_blocks(documents: Documents) -> list[Document]:
    """Take for examples, where no labels tell, the blocks between what prompts of one task begin with and the last."""
    marked = list(documents)
    later = {unit.texts for document in documents for unit in document.units[1:]}
    tasks: dict[str, list[int]] = defaultdict(list)
    for number, document in enumerate(documents):
        if document.shots == "blocks" and len(document.units) > 1:
            first = document.units[0]
            tasks["" if first.texts in later else mask(first.text)].append(number)
    for members in tasks.values():
        n_lead = _n_lead([tuple(unit.texts for unit in documents[number].units[:-1]) for number in members])
        for number in members:
            units = documents[number].units
            examples = [replace(unit, is_example=unit.message is None) for unit in units[n_lead:-1]]
            marked[number] = replace(documents[number], units=(*units[:n_lead], *examples, units[-1]))
    return marked


def _n_lead(orders: Sequence[_Order]) -> int:
    """Return how many blocks nearly all prompts begin with."""
    n_lead = 0
    while True:
        there = Counter(order[n_lead] for order in orders if len(order) > n_lead)
        if not there or there.most_common(1)[0][1] < _NEARLY_ALL * len(orders):
            return n_lead
        n_lead += 1


def _are_redrawn(members: Sequence[Document]) -> bool:
    """Tell whether prompts of one task have examples of one pool, but other ones nearly every time."""
    ordered = sorted({_order(document) for document in members} - {()})
    # A conversation that goes on, or shots of which some prompts have fewer, share all that they can.
    longest = [one for one, other in pairwise([*ordered, ()]) if other[: len(one)] != one]
    kind = members[0].shots
    if kind in ("blocks", "turns"):  # fixed shots may stand before a conversation or a context
        n_lead = _n_lead(longest)
        longest = [order[n_lead:] for order in longest if len(order) > n_lead]
    selections = {frozenset(Counter(order).items()) for order in longest}
    n_prompts = len({document.text for document in members})
    if len(selections) < max(2, _LEAST_DISTINCT * n_prompts):
        return False
    are_many = len(selections) > _MANY_DISTINCT * n_prompts
    if _overlap(selections) >= (_LEAST_OVERLAP_OF_BLOCKS if kind == "blocks" else _LEAST_OVERLAP):
        return are_many or kind != "blocks"
    if not are_many:
        return False
    if kind == "turns":
        return _have_the_querys_label(members) or _repeat_answers(longest)
    return kind in ("known", "labelled")


def _overlap(selections: set[frozenset[tuple[tuple[str, ...], int]]]) -> float:
    """Return how much of all selections' text is in another selection too: answers alone, as "yes", say little."""
    n_with = Counter(texts for selection in selections for texts, _ in selection)
    n_characters = {texts: n * sum(map(len, texts)) for texts, n in n_with.items()}
    return sum(n_characters[texts] for texts, n in n_with.items() if n > 1) / max(sum(n_characters.values()), 1)


def _have_the_querys_label(members: Sequence[Document]) -> bool:
    """Tell whether the turns begin with a label as the query does."""
    labels = {first_label(unit.texts[0]) for document in members for unit in (*document.examples, document.units[-1])}
    return len(labels) == 1 and labels != {""}


def _repeat_answers(orders: Sequence[_Order]) -> bool:
    """Tell whether the assistant's turns are a few labels that come again and again."""
    answers: dict[str, set[str]] = defaultdict(set)
    for order in orders:
        for texts in order:
            if len(texts) == 2:
                answers[texts[1]].add(texts[0])
    n_turns = sum(map(len, answers.values()))
    return sum(len(asked) for asked in answers.values() if len(asked) > 1) > _LEAST_REPEATED_ANSWERS * n_turns


def _canonical_orders(members: Sequence[Document]) -> dict[int, _Order]:
    """Return the order that most prompts have, for each prompt whose examples come in several orders."""
    by_selection: dict[frozenset[tuple[tuple[str, ...], int]], list[Document]] = defaultdict(list)
    for document in members:
        by_selection[frozenset(Counter(_order(document)).items())].append(document)
    found: dict[int, _Order] = {}
    for alike in by_selection.values():
        orders = Counter(_order(document) for document in alike)
        if len(orders) > 1:
            canonical = orders.most_common(1)[0][0]
            found |= {document.index: canonical for document in alike}
    return found


def _with_examples(document: Document, shots: Sequence[Unit]) -> Document:
    """Return the document with other examples where its own began."""
    at = next((n for n, unit in enumerate(document.units) if unit.is_example), None)
    if at is None:
        return document
    units = list(document.units)
    kept = [unit for unit in units[at:] if not unit.is_example]
    return replace(document, units=(*units[:at], *shots, *kept))


def _in_order(document: Document, order: _Order) -> Document:
    """Return the document with its examples in this order; gaps and message ends stay where they are."""
    if Counter(_order(document)) != Counter(order):
        return document
    texts = iter(order)
    units = tuple(replace(unit, texts=next(texts)) if unit.is_example else unit for unit in document.units)
    return replace(document, units=units)
