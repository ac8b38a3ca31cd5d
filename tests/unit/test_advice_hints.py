"""Hold the cause that `explain` names to what differs between a prompt and what is stored."""

from __future__ import annotations

import pytest

from prefixbank.advice.hints import hint
from prefixbank.advice.recognise import mask, spans_of, spelling_difference


@pytest.mark.parametrize(
    ("before", "here", "stored", "kind"),
    [
        ("Today is ", "2024-05-02. Judge", "2024-05-01. Judge", "a date"),
        ("Today is 2024-05-0", "2. Judge", "1. Judge", "a date"),
        ("Today is", " Tuesday. Judge", " Monday. Judge", "a weekday"),
        ("Now it is 10:1", "2 pm. Judge", "3 pm. Judge", "a time"),
        ("key 12345678-1234-1234-1234-12345678901", "2 x", "3 x", "a UUID"),
        ("request #1", "2 comes", "3 comes", "a request or session id"),
        ("Take ", "12 of them", "15 of them", "a number"),
    ],
)
def test_a_hint_names_what_differs(before: str, here: str, stored: str, kind: str) -> None:
    found = hint(before, here, stored, stored_ends=False, later_at=None)
    assert found is not None
    assert found.startswith(f"{kind} that differs")


def test_texts_without_a_known_cause_get_no_hint() -> None:
    assert hint("Judge ", "the lamp please", "a kettle please", stored_ends=False, later_at=None) is None
    assert hint("Take ", "2024-05-02 go", "12 lamps", stored_ends=False, later_at=None) is None
    assert hint("On ", "2024-05-02 go", "whenever you go", stored_ends=False, later_at=None) is None


@pytest.mark.parametrize(
    ("here", "stored", "what"),
    [
        ("Judge the  review", "Judge the review", "white space"),
        ("JUDGE the review", "Judge the review", "upper and lower case"),
        ("Judge the ﬁlm", "Judge the film", "the Unicode form of characters"),
    ],
)
def test_a_hint_names_a_difference_in_spelling(here: str, stored: str, what: str) -> None:
    assert hint("", here, stored, stored_ends=False, later_at=None) == f"{what} only: write it as what is stored"
    assert spelling_difference(here, stored) == what
    assert spelling_difference(here, here) is None


def test_a_hint_tells_a_seam_and_another_order() -> None:
    assert "a seam" in str(hint("Review:", " The lamp", " ", stored_ends=True, later_at=None))
    assert hint("Review:", " The lamp", " ", stored_ends=False, later_at=None) is None
    order = hint("Judge.\n", "The lamp broke", "The zip is fine", stored_ends=False, later_at=40)
    assert "another order" in str(order)
    assert "token 40" in str(order)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("on Monday, May 6, 2024 at 10:30 am", ["a date and time"]),
        ("on 6 May 2024, or 06/05/2024, or 6.5.24", ["a date"] * 3),
        ("on the 3rd of May", ["a date"]),
        ("2024-05-06T10:30:00+02:00", ["a date and time"]),
        ("2024年5月6日", ["a date"]),
        ("in March 2024, on Friday", ["a month", "a weekday"]),
        ("1714990000 and 1714990000123", ["an epoch time"] * 2),
        ("9f86d081884c7d65", ["a hexadecimal id"]),
        ("session_id: ab-12", ["a request or session id"]),
        ("seed=42", ["a random seed"]),
        ("3 lamps", ["a number"]),
        ("she may march on; the sun and I sat", []),
        ("a decade, a facade, deadbeef", []),
    ],
)
def test_texts_are_recognised_whole(text: str, kinds: list[str]) -> None:
    assert [span.kind for span in spans_of(text)] == kinds


def test_masks_are_equal_where_nothing_but_recognised_texts_differs() -> None:
    assert mask("It is 2024-05-06.") == mask("It is May 7, 2025.") != mask("It was 2024-05-06.")
    assert mask("It is 10:30.") != mask("It is 2024-05-06.")
