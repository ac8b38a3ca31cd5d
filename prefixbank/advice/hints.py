"""Own naming a known cause where one prompt parts from what is stored."""

from __future__ import annotations

from prefixbank.advice.recognise import covering_span, normal_form, spelling_difference

__all__ = ["hint"]

_LEAST_ALIKE_CHARACTERS = 8


def hint(before: str, here: str, stored: str, *, stored_ends: bool, later_at: int | None) -> str | None:
    """Return one sentence on why a prompt parts from what is stored, None where no cause is recognised.

    Args:
        before: the text right before, which both have.
        here: the text that the prompt goes on with.
        stored: the text that is stored there instead.
        stored_ends: nothing is stored behind `stored`.
        later_at: the token offset at which the prompt has what is stored here, if it has it later.
    """
    if stored and (here.startswith(stored) if stored_ends else _is_same_text(here, stored)):
        what = "the stored prefix ends" if stored_ends else "they are stored"
        return f"a seam: the prompt has the same text, but {what} in other tokens; tokenise the prompt as a whole"
    if later_at is not None:
        return f"another order: what is stored here comes at token {later_at} of the prompt; keep one order of examples"
    spelling = _spelling(here, stored)
    if spelling is not None:
        return f"{spelling} only: write it as what is stored"
    at = len(before) + _n_alike(here, stored)
    spans = [covering_span(before + text, at) or covering_span(before + text, at - 1) for text in (here, stored)]
    if spans[0] is None or spans[1] is None:
        return None
    if spans[0].kind == spans[1].kind or (spans[0].is_of_time and spans[1].is_of_time):
        return f"{spans[0].kind} that differs: put it behind what prompts share, at the end"
    return None


def _is_same_text(here: str, stored: str) -> bool:
    n = min(len(here), len(stored))
    return n >= _LEAST_ALIKE_CHARACTERS and here[:n] == stored[:n]


def _spelling(here: str, stored: str) -> str | None:
    """Return in what two texts differ if it is no more than that, as far as the shorter one goes."""
    forms = normal_form(here), normal_form(stored)
    n = min(map(len, forms))
    if n < _LEAST_ALIKE_CHARACTERS or forms[0][:n] != forms[1][:n]:
        return None
    cut = [_with_form(text, forms[0][:n].rstrip()) for text in (here, stored)]
    return spelling_difference(cut[0], cut[1]) or "white space, case or Unicode form"


def _with_form(text: str, form: str) -> str:
    """Return the shortest beginning of a text that has a normal form."""
    return next((text[:n] for n in range(len(text) + 1) if normal_form(text[:n]) == form), text)


def _n_alike(one: str, other: str) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n
