"""A tokenizer without a model, prompts for advice, and a count of unique tokens that owes nothing to the trie."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from prefixbank.advice import Analysis, PromptFinding, analyze
from prefixbank.chunking import pack_token_ids, unpack_token_ids
from prefixbank.errors import PromptError
from prefixbank.fewshot import RenderedPrompt

# A blank belongs to the word behind it, as in byte-level BPE: texts that end in one have a seam.
_TOKENS = re.compile(r" ?[^\W\d_]+|\d| ?[^\w\s]+|\s|_")

INSTRUCTIONS = (
    "Say whether the review is positive or negative. Answer in one word, and think of the customer who wrote it."
)
POOL = [
    (f"The {thing} {did} after {n} days in the house", mood)
    for n, (thing, (did, mood)) in enumerate(
        (thing, did)
        for thing in ("lamp", "kettle", "sofa", "phone", "coat", "train", "soup", "garden")
        for did in (("broke", "negative"), ("was lovely", "positive"), ("fell apart", "negative"))
    )
]
FIXED = POOL[:5]
QUERIES = [
    f"{who} bought {what} and {end}"
    for who in ("My aunt", "A friend", "Nobody", "The neighbour")
    for what, end in (("two chairs", "likes them"), ("a brush", "lost it"), ("some paint", "painted the door"))
]

Shots = Sequence[tuple[str, str]]


class Tokenizer:
    """Give each piece of text an id when it is first seen. Chats become `<role>content</role>` lines."""

    def __init__(self, template: Callable[[Sequence[Any]], str] | None = None) -> None:
        self._ids: dict[str, int] = {}
        self._template = template or self._chat

    @staticmethod
    def _chat(messages: Sequence[Any]) -> str:
        return "".join(f"<{m['role']}>{m['content']}</{m['role']}>\n" for m in messages) + "<assistant>"

    def ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, RenderedPrompt):
            prompt = prompt.text if prompt.text is not None else prompt.messages
        if not isinstance(prompt, str):
            if not prompt or isinstance(prompt[0], int):
                return list(prompt)
            prompt = self._template(prompt)
        return [self._ids.setdefault(piece, len(self._ids)) for piece in _TOKENS.findall(prompt)]

    def encode(self, prompt: Any) -> bytes:
        token_ids = self.ids(prompt)
        if not token_ids:
            raise PromptError("the prompt is empty: at least one token is needed")
        return pack_token_ids(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = list(self._ids)
        return "".join(pieces[token_id] for token_id in token_ids)

    def analyze(self, prompts: Sequence[Any], template: str | None = None) -> Analysis:
        return analyze(prompts, self.encode, self.decode, template)

    def n_unique(self, prompts: Sequence[Any]) -> int:
        """Return the nodes of a naive trie."""
        return len({tuple(ids[:n]) for ids in map(self.ids, prompts) for n in range(1, len(ids) + 1)})

    def unpack(self, prompt: Any) -> list[int]:
        return unpack_token_ids(self.encode(prompt))


def text(shots: Shots, query: str, head: str = INSTRUCTIONS) -> str:
    examples = "".join(f"Review: {review}\nSentiment: {mood}\n\n" for review, mood in shots)
    return f"{head}\n\n{examples}Review: {query}\nSentiment:"


def unlabelled(shots: Shots, query: str, head: str = INSTRUCTIONS) -> str:
    return "\n\n".join([head, *(f"{review}, {mood}" for review, mood in shots), query])


def chat(shots: Shots, query: str, head: str = INSTRUCTIONS) -> list[dict[str, str]]:
    turns = [
        {"role": role, "content": content}
        for shot in shots
        for role, content in zip(("user", "assistant"), shot, strict=True)
    ]
    return [{"role": "system", "content": head}, *turns, {"role": "user", "content": query}]


def the_finding(analysis: Analysis, kind: str) -> PromptFinding:
    """Return the only finding, which must be of this kind."""
    assert [finding.kind for finding in analysis.findings] == [kind], analysis
    return analysis.findings[0]
