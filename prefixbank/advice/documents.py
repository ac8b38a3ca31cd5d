"""Own the structure of prompts: the units of a text or chat that can be moved or replaced, and putting them together.

A unit is a block of a text or message, or a user's turn with the assistant's answer to it. Putting the units of an
untouched document together gives the prompt that it was made of, to the character.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefixbank.advice.splitting import Block, split_blocks
from prefixbank.fewshot import RenderedPrompt

__all__ = ["Document", "Unit", "document_of", "move_behind", "put_at_end", "without"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Hold a block: its text and the `gap` of white space behind it; or both texts of a turn and its answer.

    `role` is the message's ("" in a text), and in a turn `answer_role` the answer's. `message` is one that is kept as
    it is, whatever it has.
    """

    texts: tuple[str, ...]
    gap: str = ""
    role: str = ""
    answer_role: str = ""
    ends_message: bool = False
    is_example: bool = False
    message: Any = None

    @property
    def text(self) -> str:
        """Return all of its text."""
        return "\n".join(self.texts)


@dataclass(frozen=True, slots=True)
class Document:
    """Hold a prompt's units. `index` is the prompt's; `shots` says why examples are taken for such.

    `known`: a rendered few-shot prompt; `labelled`: blocks with the query's labels; `turns`: a chat's turns, which may
    be a conversation; `blocks`: nothing was found that looks like an example.
    """

    index: int
    units: tuple[Unit, ...]
    is_chat: bool = False
    shots: str = "blocks"

    @property
    def prompt(self) -> str | list[Any]:
        """Return the prompt that the units make: a text or chat messages."""
        if not self.is_chat:
            return "".join(unit.texts[0] + unit.gap for unit in self.units)
        messages: list[Any] = []
        text = ""
        for unit in self.units:
            if unit.message is not None:
                messages.append(unit.message)
            elif len(unit.texts) == 2:
                messages.append({"role": unit.role, "content": text + unit.texts[0]})
                messages.append({"role": unit.answer_role, "content": unit.texts[1]})
                text = ""
            else:
                text += unit.texts[0] + unit.gap
                if unit.ends_message:
                    messages.append({"role": unit.role, "content": text})
                    text = ""
        return messages

    @property
    def text(self) -> str:
        """Return all text of the prompt, without roles."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        return "\n".join(str(m.get("content", "")) if isinstance(m, Mapping) else str(m) for m in prompt)

    @property
    def examples(self) -> tuple[Unit, ...]:
        """Return the units that are worked examples."""
        return tuple(unit for unit in self.units if unit.is_example)


def document_of(index: int, prompt: str | Sequence[Any] | RenderedPrompt) -> Document:
    """Return the units of a text, of chat messages or of a rendered few-shot prompt."""
    if isinstance(prompt, RenderedPrompt):
        known = _document_of_rendered(index, prompt)
        if known is not None:
            return known
        prompt = prompt.text if prompt.text is not None else list(prompt.messages or ())
    if isinstance(prompt, str):
        blocks = split_blocks(prompt, has_query=True)
        return Document(index, _units(blocks), shots="labelled" if _has_examples(blocks) else "blocks")
    return _document_of_chat(index, prompt)


def _document_of_rendered(index: int, prompt: RenderedPrompt) -> Document | None:
    """Return the units that the shots say; None where the prompt reads otherwise."""
    shots = prompt.shots
    if prompt.messages is not None:
        document = _document_of_chat(index, prompt.messages, (shots.roles.input, shots.roles.output))
        return replace(document, shots="known") if document.shots == "turns" else document
    text = prompt.text or ""
    head = f"{shots.instructions}\n\n" if shots.instructions else ""
    at = len(head)
    blocks = [replace(block, is_example=False) for block in split_blocks(head, has_query=False)] if head else []
    for example in shots.examples:
        asked = text.find(example.input, at)
        answered = text.find(example.output, asked + len(example.input)) if asked >= 0 else -1
        if answered < 0:
            return None
        end = answered + len(example.output)
        gap = text[end : len(text) - len(text[end:].lstrip())]
        blocks.append(Block(text[at:end], gap, is_example=True))
        at = end + len(gap)
    rest = text[at:]
    if rest or not blocks:
        blocks += [Block(*_core_and_gap(rest))] if blocks else split_blocks(rest, has_query=True)
    if "".join(block.text + block.gap for block in blocks) != text:
        return None
    return Document(index, _units(blocks), shots="known")


def _document_of_chat(index: int, messages: Sequence[Any], roles: tuple[str, str] = ("user", "assistant")) -> Document:
    units: list[Unit] = []
    at = 0
    while at < len(messages):
        message: Any = messages[at]
        following: Any = messages[at + 1] if at + 1 < len(messages) else None
        if not _is_plain(message):
            units.append(Unit((json.dumps(message, default=str),), ends_message=True, message=message))
        elif message["role"] == roles[0] and _is_plain(following) and following["role"] == roles[1]:
            asked = message["content"]
            if not at and "\n\n" in asked:  # the instructions, where there is no system message
                head, _, asked = asked.partition("\n\n")
                units.append(Unit((head,), "\n\n", roles[0]))
            texts = (asked, following["content"])
            units.append(Unit(texts, "", *roles, ends_message=True, is_example=True))
            at += 1
        else:
            blocks = split_blocks(message["content"], has_query=following is None)
            units += _units(blocks, message["role"])
        at += 1
    turns = any(len(unit.texts) == 2 for unit in units)
    shots = "turns" if turns else "labelled" if any(unit.is_example for unit in units) else "blocks"
    return Document(index, tuple(units), is_chat=True, shots=shots)


def _is_plain(message: Any) -> bool:
    if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
        return False
    return isinstance(message["content"], str)


def _has_examples(blocks: Iterable[Block]) -> bool:
    return any(block.is_example for block in blocks)


def _core_and_gap(text: str) -> tuple[str, str]:
    core = text.rstrip()
    return core, text[len(core) :]


def _units(blocks: Sequence[Block], role: str = "") -> tuple[Unit, ...]:
    last = len(blocks) - 1
    return tuple(
        Unit((b.text,), b.gap, role, ends_message=bool(role) and n == last, is_example=b.is_example)
        for n, b in enumerate(blocks)
    )


def without(units: Sequence[Unit], at: int) -> list[Unit]:
    """Return the units but one; its message ends with the unit before it, or goes if there is none."""
    kept = list(units)
    gone = kept.pop(at)
    before = kept[at - 1] if at else None
    if gone.ends_message and before is not None and not before.ends_message:
        kept[at - 1] = replace(before, ends_message=True, gap=gone.gap)
    elif not gone.role and at and at == len(kept):
        kept[at - 1] = replace(kept[at - 1], gap=gone.gap)
    return kept


def put_at_end(document: Document, text: str, *, behind: bool) -> Document:
    """Return the document with a text put before its last unit (its query), or `behind` all."""
    units = list(document.units)
    if not units or units[-1].message is not None or len(units[-1].texts) == 2:
        return replace(document, units=(*units, Unit((text,), role="user", ends_message=document.is_chat)))
    last = units[-1]
    if behind:
        units[-1:] = [replace(last, gap="\n\n", ends_message=False), replace(last, texts=(text,), is_example=False)]
    else:
        units[-1:] = [Unit((text,), "\n\n", last.role), last]
    return replace(document, units=tuple(units))


def move_behind(document: Document, movers: Sequence[int]) -> Document:
    """Return the document with the units at these places put behind all others."""
    units = list(document.units)
    for at in reversed(movers):
        units = without(units, at)
    moved = replace(document, units=tuple(units))
    for at in movers:
        moved = put_at_end(moved, document.units[at].text, behind=True)
    return moved
