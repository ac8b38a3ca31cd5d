"""Hold advice to silence where prompts are as well shared as they can be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.advising import FIXED, INSTRUCTIONS, POOL, QUERIES, Tokenizer, chat, text, unlabelled

TASKS = [("Name the mood.", POOL[:4]), ("Name the thing that it is about.", POOL[4:8]), ("Translate.", POOL[8:12])]


def conversation(i: int) -> list[dict[str, str]]:
    """Return a conversation of `i % 3 + 1` turns that goes on from the one before."""
    turns = [(f"Question {n} of talk {i // 3}, what else is there", f"Answer {n}, nothing") for n in range(i % 3)]
    return chat(turns, f"Question {i % 3} of talk {i // 3}, what else is there")


def transcript(i: int) -> str:
    lines = [f"User: what is {word} {i}\nAssistant: it is {word}\n" for word in ("zinc", "tin", "lead")[: i % 3 + 1]]
    return f"{INSTRUCTIONS}\n\n{''.join(lines)}User: and {i}?\nAssistant:"


WELL_SHAPED: dict[str, list[Any]] = {
    "text": [text(FIXED, query) for query in QUERIES],
    "chat": [chat(FIXED, query) for query in QUERIES],
    "without labels": [unlabelled(FIXED, query) for query in QUERIES],
    "one line": [f"{INSTRUCTIONS} {INSTRUCTIONS} {query}." for query in QUERIES],
    "examples in one message": [
        [{"role": "system", "content": text(FIXED, "").rsplit("Review", 1)[0]}, {"role": "user", "content": query}]
        for query in QUERIES
    ],
    "no blank lines": [text(FIXED, query).replace("\n\n", "\n") for query in QUERIES],
    "fixed text behind the query": [text(FIXED, f"{query}\nNow say it") + "\n\nIn one word." for query in QUERIES],
    "dates in the queries": [text(FIXED, f"On 2024-05-{i + 10} {query}") for i, query in enumerate(QUERIES)],
    "the same date in all": [text(FIXED, query, f"Today is 2024-05-01. {INSTRUCTIONS}") for query in QUERIES],
    "dates in the examples": [
        text([(f"2024-05-{n:02d}", f"May {n}") for n in range(1, 7)], f"2023-01-{i + 10}") for i in range(len(QUERIES))
    ],
    "date behind the shots": [text(FIXED, f"Today is 2024-05-{i + 10}. {q}") for i, q in enumerate(QUERIES)],
    "several tasks": [text(TASKS[i % 3][1], query, TASKS[i % 3][0]) for i, query in enumerate(QUERIES)],
    "several tasks as chats": [chat(TASKS[i % 3][1], query) for i, query in enumerate(QUERIES)],
    "several questions on a passage": [
        f"{INSTRUCTIONS}\n\n{POOL[i // 3][0]}. {POOL[i // 3 + 5][0]}.\n\n{query}" for i, query in enumerate(QUERIES)
    ],
    "fixed shots, then a passage": [
        unlabelled(FIXED, f"{POOL[i][0]} and more.\n\n{query}") for i, query in enumerate(QUERIES)
    ],
    "conversations": [conversation(i) for i in range(24)],
    "transcripts": [transcript(i) for i in range(24)],
    "more and more shots": [text(FIXED[: i % 5 + 1], query) for i, query in enumerate(QUERIES)],
    "mixed": [form(FIXED, query) for form in (text, chat) for query in QUERIES],
    "a few sets of shots": [
        text(POOL[i % 3 * 2 : i % 3 * 2 + 4], f"{query} number {i}") for i, query in enumerate(QUERIES * 3)
    ],
    "a few sets without labels": [unlabelled(POOL[i % 3 * 2 :][:4], query) for i, query in enumerate(QUERIES)],
    "retrieved documents with sources": [
        f"{INSTRUCTIONS}\n\nDoc: {POOL[i][0]}\nSource: web\n\nDoc: {POOL[-i][0]}\nQuestion: {query}\nAnswer:"
        for i, query in enumerate(QUERIES)
    ],
    "retrieved passages": [
        f"{INSTRUCTIONS}\n\nPassage 1: {POOL[i][0]}\n\nPassage 2: {POOL[-i][0]}\n\nQuestion: {query}\nAnswer:"
        for i, query in enumerate(QUERIES)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WELL_SHAPED)
def test_well_shaped_prompts_get_no_findings(name: str) -> None:
    analysis = Tokenizer().analyze(WELL_SHAPED[name])
    assert analysis.findings == ()
    assert analysis.n_saved_by_all_edits == 0
    assert "well shared" in analysis.summary


@pytest.mark.parametrize("name", WELL_SHAPED)
def test_well_shaped_prompts_get_no_findings_as_token_ids(name: str) -> None:
    tokenizer = Tokenizer()
    assert tokenizer.analyze([tokenizer.ids(prompt) for prompt in WELL_SHAPED[name]]).findings == ()


@pytest.mark.parametrize("name", WELL_SHAPED)
def test_two_well_shaped_prompts_get_no_findings(name: str) -> None:
    """Two prompts say little: only what is certain may be found."""
    if name in ("several tasks", "several tasks as chats", "mixed") or name.startswith(("retrieved", "a few")):
        pytest.skip("two of these share next to nothing")
    kinds = {finding.kind for finding in Tokenizer().analyze(WELL_SHAPED[name][:2]).findings}
    assert kinds == set()
