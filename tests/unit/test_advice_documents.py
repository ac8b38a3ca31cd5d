"""Hold the units of prompts to the prompts that they are made of."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prefixbank.advice.documents import document_of, move_behind, put_at_end, without
from prefixbank.advice.splitting import split_blocks
from prefixbank.fewshot import Example, FewShotPrompt
from tests.unit.advising import FIXED, INSTRUCTIONS, chat, text

PIECES = st.sampled_from(["Q: ", "A: ", "\n", "\n\n", " ", "a", "b. ", "=> ", "## x", "\r\n", "é", "<q>", ":"])
TEXTS = st.lists(PIECES, max_size=20).map("".join)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": ROLES, "content": TEXTS}),
        st.fixed_dictionaries({"role": ROLES, "content": st.just([{"type": "text", "text": "x"}])}),
        st.fixed_dictionaries({"role": ROLES, "content": TEXTS, "name": st.just("n")}),
    ),
    min_size=1,
    max_size=6,
)
EXAMPLES = st.lists(st.builds(Example, TEXTS, TEXTS), max_size=4)


@given(TEXTS, st.booleans())
def test_blocks_are_the_text(given_text: str, has_query: bool) -> None:
    assert "".join(block.text + block.gap for block in split_blocks(given_text, has_query=has_query)) == given_text


@given(TEXTS)
def test_units_of_a_text_are_the_text(given_text: str) -> None:
    assert document_of(0, given_text).prompt == given_text


@given(MESSAGES)
def test_units_of_a_chat_are_its_messages(messages: Any) -> None:
    assert document_of(0, messages).prompt == messages


@given(st.one_of(st.just(INSTRUCTIONS), TEXTS), EXAMPLES, TEXTS, st.booleans())
def test_units_of_a_rendered_prompt_are_the_prompt(
    instructions: str, examples: list[Example], query: str, is_chat: bool
) -> None:
    if not instructions.strip() and not examples:
        instructions = "x"
    rendered = FewShotPrompt(instructions, examples, chat=is_chat).render(query)
    document = document_of(0, rendered)
    assert document.prompt == (rendered.text if rendered.messages is None else list(rendered.messages))


def test_examples_are_told_from_instructions_and_query() -> None:
    for prompt in (text(FIXED, "it broke"), text(FIXED, "it broke").replace("\n\n", "\n"), chat(FIXED, "it broke")):
        document = document_of(0, prompt)
        assert len(document.examples) == len(FIXED)
        assert all(shot[0] in unit.text for shot, unit in zip(FIXED, document.examples, strict=True))
        assert not document.units[0].is_example
        assert "it broke" in document.units[-1].text


def test_examples_of_several_paragraphs_and_without_a_question_label_stay_whole() -> None:
    paragraphs = "Judge.\n\nPassage: one\n\ntwo\n\nQuestion: q\nAnswer: a\n\nPassage: three\n\nQuestion: r\nAnswer:"
    assert [unit.text for unit in document_of(0, paragraphs).units] == [
        "Judge.", "Passage: one\n\ntwo\n\nQuestion: q\nAnswer: a", "Passage: three\n\nQuestion: r\nAnswer:",
    ]  # fmt: skip
    choices = "Which?\n\nThe sky is\nA. red\nB. blue\nAnswer: B\n\nGrass is\nA. green\nB. pink\nAnswer:"
    assert [unit.is_example for unit in document_of(0, choices).units] == [False, True, False]
    arrows = "Translate.\n\ncat => chat\n\ndog => chien\n\nbird =>"
    assert [unit.is_example for unit in document_of(0, arrows).units] == [False, True, True, False]


def test_taking_out_and_putting_behind_keeps_messages_apart() -> None:
    document = document_of(0, [{"role": "system", "content": "one\n\ntwo\n"}, {"role": "user", "content": "three"}])
    assert [unit.text for unit in without(document.units, 1)] == ["one", "three"]
    moved = move_behind(document, [1]).prompt
    assert moved == [{"role": "system", "content": "one\n"}, {"role": "user", "content": "three\n\ntwo"}]
    gone = move_behind(document, [0, 1]).prompt
    assert gone == [{"role": "user", "content": "three\n\none\n\ntwo"}]
    before = put_at_end(document, "now", behind=False).prompt
    assert before[-1] == {"role": "user", "content": "now\n\nthree"}
    assert move_behind(document_of(0, "a\n\nb\n\nc"), [0]).prompt == "b\n\nc\n\na"
    assert put_at_end(document_of(0, "b\n\nc"), "a", behind=False).prompt == "b\n\na\n\nc"
