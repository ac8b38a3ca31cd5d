"""Own the findings on seams: the same text in other token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from prefixbank.advice.documents import Document, Unit
from prefixbank.advice.edits import SHOWN_PLACES, Documents, Edit, Seen
from prefixbank.chunking import TOKEN_BYTES, common_run, unpack_token_ids

__all__ = ["find_other_ids", "find_prefixes"]

Encode = Callable[[str], bytes]
Decode = Callable[[Sequence[int]], str]
_SHOWN_TOKENS = 3


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Hold a prompt that is the beginning of another one's text, but not of its token ids."""

    document: Document
    text: str
    alone: bytes
    inside: bytes


def find_prefixes(documents: Documents, packed: Sequence[bytes], encode: Encode, decode: Decode) -> Edit | None:
    """Return the edit that ends prefixes, given as prompts of their own, where their tokens end in longer prompts too.

    `packed` are the documents' token ids.
    """
    found = _prefixes(documents, packed)
    if not found:
        return None
    cuts = {prefix.document.index: _cut(prefix, encode) for prefix in found}

    def rewrite(others: Documents) -> list[Document]:
        cut = []
        for other in others:
            text = cuts.get(other.index)
            cut.append(other if text is None else replace(other, units=(Unit((text,)),)))
        return cut

    first = found[0]
    n_common, alone, inside = _parting(first.alone, first.inside)
    return Edit(
        "seam",
        f"A prefix ends in other tokens alone ({_tokens(alone, decode)}) than inside a prompt "
        f"({_tokens(inside, decode)}), so that it is shared up to token {n_common} only.",
        _advice(first.text),
        tuple(_seen(prefix.document, prefix.alone, prefix.inside, decode) for prefix in found[:SHOWN_PLACES]),
        rewrite,
    )


def _parting(one: bytes, other: bytes) -> tuple[int, list[int], list[int]]:
    """Return where two runs of packed ids part, and the next few ids of both."""
    n_common = common_run(one, other)
    shown = slice(n_common * TOKEN_BYTES, (n_common + _SHOWN_TOKENS) * TOKEN_BYTES)
    return n_common, unpack_token_ids(one[shown]), unpack_token_ids(other[shown])


def _seen(document: Document, one: bytes, other: bytes, decode: Decode) -> Seen:
    n_common, token_ids, _ = _parting(one, other)
    return Seen(document.index, decode(token_ids) if token_ids else "", n_common)


def _prefixes(documents: Documents, packed: Sequence[bytes]) -> list[_Prefix]:
    texts = sorted((document.text, number) for number, document in enumerate(documents) if not document.is_chat)
    found = []
    for (text, number), (longer, other) in pairwise(texts):
        if text == longer or not longer.startswith(text):
            continue
        if not packed[other].startswith(packed[number]):
            found.append(_Prefix(documents[number], text, packed[number], packed[other]))
    return found


def _cut(prefix: _Prefix, encode: Encode) -> str | None:
    """Return the longest text whose tokens begin the longer prompt, of those that end before a blank, line or word."""
    text = prefix.text
    words = text.rstrip().rsplit(None, 1)[0] if len(text.split()) > 1 else ""
    for candidate in (text.rstrip(" \t"), text.rstrip(), text[: text.rfind("\n") + 1], words):
        if candidate and prefix.inside.startswith(encode(candidate)):
            return candidate
    return None


def _advice(text: str) -> str:
    if text.endswith((" ", "\t")):
        return "End the prefix before the blank, and let what follows begin with it."
    if text.endswith("\n"):
        return "End the prefix before the line break, and let what follows begin with it."
    return "The prefix ends inside what becomes one token: end it with a line break, or at the end of a word."


def _tokens(token_ids: Sequence[int], decode: Decode) -> str:
    if not token_ids:
        return "the end"
    return ", ".join(f"{token_id} {decode([token_id])!r}" for token_id in token_ids)


def find_other_ids(
    documents: Documents, given: Sequence[bytes], encoded: Sequence[bytes], decode: Decode
) -> Edit | None:
    """Return the edit that tokenises each text as a whole, where prompts given as token ids have others.

    `given` are the documents' token ids, `encoded` those of their texts. As nothing is rewritten but ids, the edit's
    documents are as they were.
    """
    differing = [number for number, ids in enumerate(given) if ids != encoded[number]]
    if not differing:
        return None
    first = differing[0]
    n_common, one, other = _parting(given[first], encoded[first])
    return Edit(
        "seam",
        f"The token ids of {len(differing)} prompts are not those of their text as a whole: at token {n_common} they "
        f"have {_tokens(one, decode)}, and the text has {_tokens(other, decode)}.",
        "Tokenise each prompt as one text, special tokens included, instead of joining pieces.",
        tuple(_seen(documents[number], given[number], encoded[number], decode) for number in differing[:SHOWN_PLACES]),
        list,
    )
