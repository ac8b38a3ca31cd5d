"""Own the finding that a chat template puts a date into prompts by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefixbank.advice.documents import Document
from prefixbank.advice.partings import n_shared_behind
from prefixbank.advice.recognise import spans_of
from prefixbank.advice.results import Place, PromptFinding
from prefixbank.chunking import unpack_token_ids
from prefixbank.tokentrie import shared_runs

__all__ = ["find"]

_LOOKED_AT = 3
_PRECISE = {"a date", "a date and time", "a time", "an epoch time"}


def find(
    documents: Sequence[Document],
    packed: Sequence[bytes],
    template: str | None,
    decode: Callable[[Sequence[int]], str],
    offset_of: Callable[[bytes, str], int | None],
) -> PromptFinding | None:
    """Return the finding that chats hold a date which neither their messages nor the template's own text has."""
    chats = [number for number, document in enumerate(documents) if document.is_chat]
    for number in chats[:_LOOKED_AT]:
        text = decode(unpack_token_ids(packed[number]))
        said = documents[number].text
        for span in spans_of(text):
            date = text[span.start : span.end]
            if span.kind not in _PRECISE or date in said or date in (template or ""):
                continue
            at = offset_of(packed[number], date)
            n_tokens = n_shared_behind(shared_runs([packed[chat] for chat in chats]), at or 0)
            return PromptFinding(
                "template-date",
                f"The chat template puts {span.kind} into each prompt by itself ({date!r}): when it changes, the "
                f"{n_tokens:,} shared tokens behind it are computed again.",
                "Give the template a fixed date, take it out of the template, or put a date behind the shots yourself.",
                n_tokens,
                n_tokens,
                (Place(documents[number].index, at, date),),
            )
    return None
