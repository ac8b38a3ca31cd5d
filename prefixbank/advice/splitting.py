"""Own cutting a text into blocks: at the labels that its examples repeat, else at blank lines, lines or sentences."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

__all__ = ["Block", "first_label", "labels_in", "split_blocks"]

_LABEL = re.compile(
    r"[ \t>*#\-]*([^\W\d_][\w '/().#\-]{0,30}?)\s?\**:(?!//)"  # Question:
    r"|[ \t]*(?:\#{1,6}|\[\[[ ]\#\#)[ ]([^\W\d_][\w -]{0,30})"  # ### Question, [[ ## question ## ]]
    r"|[ \t]*<([^\W\d_][\w-]{0,30})>"  # <question>
)
_ARROW = re.compile(r"=>|->|→")
_BLANK_LINES = re.compile(r"\n[ \t\r]*\n\s*")
_LINES = re.compile(r"\s*\n\s*")
_SENTENCES = re.compile(r"(?<=[.!?])\s+")
_CUE = re.compile(r".{0,30}[:>\])=]")
_DIGITS = re.compile(r"\d+")
_LONGEST_ANSWER_CUE = 60
# Labels of people who talk: what they say is a conversation, not a set of examples.
_SPEAKERS = {"user", "assistant", "human", "ai", "bot", "system", "customer", "agent", "me", "you", "speaker 0"}


@dataclass(frozen=True, slots=True)
class Block:
    """Hold a block of a text and the white space behind it."""

    text: str
    gap: str
    is_example: bool = False


def split_blocks(text: str, *, has_query: bool) -> list[Block]:
    """Return the blocks of a text; joined with their gaps they are the text. `has_query`: its last block is a query."""
    labelled = _split_at_labels(text, has_query)
    if labelled:
        return labelled
    blocks = _cut(text, _BLANK_LINES)
    for finer in (_LINES, _SENTENCES):
        if len(blocks) == 1 and has_query:
            blocks = _cut(text, finer)
    if has_query and len(blocks) > 1 and _CUE.fullmatch(blocks[-1].text):
        cue = blocks.pop()  # "Answer:" belongs to the query
        blocks[-1] = Block(blocks[-1].text + blocks[-1].gap + cue.text, cue.gap)
    return blocks


def labels_in(text: str) -> list[str]:
    """Return the labels that lines of a text begin with, as "question"; numbers in them are 0."""
    return [label for _, label, _ in _labelled_lines(text)]


def first_label(text: str) -> str:
    """Return the label that a text begins with, "" where it has none."""
    first = text.lstrip().split("\n", 1)[0]
    return next(iter(labels_in(first)), "")


def _cut(text: str, separator: re.Pattern[str]) -> list[Block]:
    blocks = []
    at = 0
    for match in separator.finditer(text):
        if match.start() > at:
            blocks.append(Block(text[at : match.start()], match.group()))
            at = match.end()
    if at < len(text) or not blocks:
        core = text[at:].rstrip()
        blocks.append(Block(core, text[at + len(core) :]) if core else Block(text[at:], ""))
    return blocks


def _labelled_lines(text: str) -> list[tuple[int, str, str]]:
    """Return `(offset, label, rest of the line)` of each line with a label."""
    found = []
    at = 0
    for line in text.split("\n"):
        label, arrow = _LABEL.match(line), None
        if label is None:
            arrow = _ARROW.search(line)
        if label is not None:
            name = _DIGITS.sub("0", label.group(label.lastindex or 0)).casefold().strip()
            found.append((at, name, line[label.end() :]))
        elif arrow is not None:
            found.append((at, arrow.group(), line[arrow.end() :]))
        at += len(line) + 1
    return found


def _split_at_labels(text: str, has_query: bool) -> list[Block]:
    """Return the blocks of a text whose examples repeat labels; [] for any other text."""
    lines = _labelled_lines(text)
    counts = Counter(label for _, label, _ in lines)
    answer = next((label for _, label, _ in reversed(lines) if counts[label] > 1), None)
    if answer is None or answer in _SPEAKERS:
        return []
    starts = _starts(text, lines, answer)
    sections = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    *examples, last = sections
    if has_query and not _is_query(last, examples[-1], answer):
        return []
    blocks = _cut(text[: starts[0]], _BLANK_LINES) if starts[0] else []
    for number, section in enumerate(sections):
        core = section.rstrip()
        is_last = number == len(examples)
        blocks.append(Block(core, section[len(core) :], is_example=not (has_query and is_last)))
    return blocks if "".join(block.text + block.gap for block in blocks) == text else []


def _starts(text: str, lines: list[tuple[int, str, str]], answer: str) -> list[int]:
    """Return where the examples begin: at the first label that takes turns with the answer's, or with its block."""
    answers = [at for at, label, _ in lines if label == answer]
    for first in dict.fromkeys(label for _, label, _ in lines):
        places = [at for at, label, _ in lines if label == first]
        if first != answer and _take_turns(places, answers):
            return places
    blocks = [0, *(match.end() for match in _BLANK_LINES.finditer(text))]
    starts = [max(start for start in blocks if start <= at) for at in answers]
    return starts if len(set(starts)) == len(starts) else answers


def _take_turns(places: list[int], answers: list[int]) -> bool:
    """Tell whether the places alternate with the answers, each before its answer."""
    return (
        len(places) == len(answers)
        and all(place < answer for place, answer in zip(places, answers, strict=True))
        and all(answer < place for answer, place in zip(answers, places[1:], strict=False))
    )


def _is_query(last: str, example: str, answer: str) -> bool:
    """Tell whether the last section is an example without its answer."""
    labels, wanted = labels_in(last), labels_in(example)
    if not set(labels) <= set(wanted):
        return False
    rest = next((last[at:].split("\n", 1) for at, label, _ in _labelled_lines(last) if label == answer), [""])
    if len(set(wanted)) > 1 and answer != wanted[-1]:
        return True  # it stops before the answer's label
    behind = rest[1].strip() if len(rest) > 1 else ""
    cue = _labelled_lines(rest[0])[0][2].strip() if rest[0] else ""
    return not behind and len(cue) <= (_LONGEST_ANSWER_CUE if len(set(wanted)) > 1 else 0)
