"""The tree of choices' token ids: each shared run once, and every choice whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from prefixbank.choices import Branch, branches, checked_choices
from prefixbank.errors import PromptError


def told(found: Sequence[Branch], before: tuple[int, ...] = ()) -> dict[int, tuple[int, ...]]:
    """Return the token ids that the tree holds of each choice."""
    texts: dict[int, tuple[int, ...]] = {}
    for branch in found:
        for index, n_tokens in branch.n_of_choices.items():
            texts[index] = before + branch.token_ids[:n_tokens]
        texts.update(told(branch.children, before + branch.token_ids))
    return texts


def n_tokens(found: Sequence[Branch]) -> int:
    return sum(len(branch.token_ids) + n_tokens(branch.children) for branch in found)


def test_shared_run_is_one_branch_and_single_tokens_are_leaves() -> None:
    found = branches({0: (1, 2, 3), 1: (1, 2, 4), 2: (9,)})
    assert found == (
        Branch((1, 2), {0: 2, 1: 2}, (Branch((3,), {0: 1}, ()), Branch((4,), {1: 1}, ()))),
        Branch((9,), {2: 1}, ()),
    )


def test_choice_that_another_begins_with_does_not_end_a_run() -> None:
    assert branches({0: (1,), 1: (1, 2, 3), 2: (1, 2)}) == (Branch((1, 2, 3), {0: 1, 1: 3, 2: 2}, ()),)
    assert branches({0: (1,), 1: (1, 2), 2: (1, 3)}) == (
        Branch((1,), {0: 1, 1: 1, 2: 1}, (Branch((2,), {1: 1}, ()), Branch((3,), {2: 1}, ()))),
    )


def test_thousands_of_choices_inside_each_other_are_one_branch() -> None:
    found = branches({n: range(n + 1) for n in range(3000)})
    assert len(found) == 1
    assert not found[0].children


def test_tree_holds_each_distinct_prefix_once() -> None:
    source = random.Random(5)
    for _ in range(300):
        choices = list({tuple(source.choices(range(3), k=source.randint(1, 6))) for _ in range(source.randint(1, 12))})
        found = branches(dict(enumerate(choices)))
        assert told(found) == dict(enumerate(choices))
        assert n_tokens(found) == len({choice[:n] for choice in choices for n in range(1, len(choice) + 1)})


def test_choices_are_checked_and_may_come_from_any_iterable() -> None:
    assert checked_choices(iter([" a", [1, 2], (3,), range(2)])) == (" a", (1, 2), (3,), (0, 1))
    with pytest.raises(PromptError, match="choice 1 is empty"):
        checked_choices([[1], []])
