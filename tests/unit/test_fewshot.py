"""Hold few-shot prompts to their rendering, and their files to errors that name what is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from prefixbank.errors import PromptError
from prefixbank.fewshot import Example, FewShotPrompt

SHOTS = FewShotPrompt("Name the mood.", (Example("great", "positive"), Example("awful", "negative")))
CHAT = dataclasses.replace(SHOTS, chat=True)


def test_a_plain_prompt_reads_as_documented() -> None:
    prompt = SHOTS.render("so so")
    assert prompt.messages is None
    assert prompt.text == (
        "Name the mood.\n\nInput: great\nOutput: positive\n\nInput: awful\nOutput: negative\n\nInput: so so\nOutput:"
    )
    assert str(prompt) == prompt.text


def test_a_chat_prompt_has_a_turn_for_each_text() -> None:
    prompt = CHAT.render("so so")
    assert prompt.text is None
    assert [(turn["role"], turn["content"]) for turn in prompt.messages or ()] == [
        ("system", "Name the mood."),
        ("user", "great"),
        ("assistant", "positive"),
        ("user", "awful"),
        ("assistant", "negative"),
        ("user", "so so"),
    ]
    assert "so so" in str(prompt)


def test_labels_can_be_chosen_and_left_out() -> None:
    labelled = dataclasses.replace(SHOTS, input_label="Q: ", output_label="A: ", examples=SHOTS.examples[:1])
    assert labelled.render("x").text == "Name the mood.\n\nQ: great\nA: positive\n\nQ: x\nA:"
    bare = dataclasses.replace(labelled, input_label="", output_label="")
    assert bare.render("x").text == "Name the mood.\n\ngreat\npositive\n\nx\n"
    chat = dataclasses.replace(labelled, chat=True)
    assert [turn["content"] for turn in chat.render("x").messages or ()][1:] == ["Q: great", "A: positive", "Q: x"]


@pytest.mark.parametrize("chat", [False, True])
def test_instructions_or_examples_can_be_left_out(chat: bool) -> None:
    only_examples = FewShotPrompt(examples=(Example("a", "b"),), chat=chat).render("c")
    only_instructions = FewShotPrompt("Do.", chat=chat).render("c")
    if chat:
        assert [turn["role"] for turn in only_examples.messages or ()] == ["user", "assistant", "user"]
        assert [turn["role"] for turn in only_instructions.messages or ()] == ["system", "user"]
    else:
        assert only_examples.text == "Input: a\nOutput: b\n\nInput: c\nOutput:"
        assert only_instructions.text == "Do.\n\nInput: c\nOutput:"


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_of_the_same_shots_part_at_the_query_only(chat: bool) -> None:
    first, second = (str(dataclasses.replace(SHOTS, chat=chat).render(query)) for query in ("ABC", "XYZ"))
    assert first.replace("ABC", "XYZ") == second
    assert first.index("ABC") > first.index("negative")


@pytest.mark.parametrize("given", [{}, {"instructions": " \n"}, {"name": "x", "queries": ["q"]}], ids=str)
def test_a_prompt_without_anything_to_share_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="instructions, examples, or both"):
        FewShotPrompt(**given)


def test_an_example_of_another_type_is_named() -> None:
    with pytest.raises(PromptError, match="example 2 is a tuple"):
        FewShotPrompt(examples=[Example("a", "b"), ("c", "d")])  # type: ignore[list-item]


def test_a_prompt_is_frozen_and_equal_prompts_are_one_key() -> None:
    same = FewShotPrompt("Name the mood.", [Example("great", "positive"), Example("awful", "negative")])
    assert same == SHOTS
    assert {SHOTS: 1}[same] == 1
    assert isinstance(same.examples, tuple)
    for thing, name in ((SHOTS, "instructions"), (SHOTS.examples[0], "input"), (SHOTS.render("x"), "query")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, "other")


def test_the_list_that_examples_came_in_can_be_changed_afterwards() -> None:
    examples = [Example("a", "b")]
    shots = FewShotPrompt(examples=examples)
    examples.append(Example("c", "d"))
    assert len(shots.examples) == 1


def test_the_source_digest_changes_with_what_is_shared_and_with_nothing_else() -> None:
    for other in (
        dataclasses.replace(SHOTS, name="other"),
        dataclasses.replace(SHOTS, queries=("x",)),
    ):
        assert other.source_digest == SHOTS.source_digest
    different = [
        dataclasses.replace(SHOTS, instructions="Name it."),
        dataclasses.replace(SHOTS, examples=SHOTS.examples[::-1]),
        dataclasses.replace(SHOTS, input_label=""),
        CHAT,
    ]
    assert len({SHOTS.source_digest, *(shots.source_digest for shots in different)}) == 5


FILE = """
name = "mood/v1"
instructions = '''
Name the mood.
'''
queries = ["so so"]

[[examples]]
input = "great"
output = "positive"

[[examples]]
input = "awful"
output = "negative"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mood.toml"
    path.write_text(FILE)
    return path


def test_a_file_holds_the_fields_as_keys(file: Path) -> None:
    found = FewShotPrompt.from_toml(file)
    assert found == dataclasses.replace(SHOTS, name="mood/v1", queries=("so so",))
    assert FewShotPrompt.from_toml(str(file)) == found


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("colour = 'blue'", "colour"),
        ("instructions = 5", "instructions"),
        ("instructions = 'x'\nchat = 'yes'", "chat"),
        ("instructions = 'x'\nchat = 1", "chat"),
        ("instructions = 'x'\nqueries = 'x'", "queries"),
        ("instructions = 'x'\nqueries = [1]", "queries"),
        ("examples = 'x'", "examples"),
        ("examples = ['x']", "example 1"),
        ("[[examples]]\ninput = 'a'\noutput = 'b'\n[[examples]]\ninput = 'a'", "example 2"),
        ("[[examples]]\ninput = 'a'\noutput = 1", "example 1"),
        ("[[examples]]\ninput = 'a'\noutput = 'b'\nweight = 'c'", "example 1"),
        ("instructions = 'x'\ninput_label = 1", "input_label"),
        ("name = 'nothing to share'", "instructions, examples, or both"),
        ("instructions = x", "line 1"),
        ("", "instructions, examples, or both"),
    ],
)
def test_a_wrong_file_is_named_with_its_wrong_key(file: Path, content: str, named: str) -> None:
    file.write_text(content)
    with pytest.raises(PromptError) as caught:
        FewShotPrompt.from_toml(file)
    assert str(file) in str(caught.value)
    assert named in str(caught.value)


def test_a_file_that_can_not_be_read_is_named(file: Path, tmp_path: Path) -> None:
    file.write_bytes(b"instructions = '\xff'")
    for path in (file, tmp_path / "gone.toml", tmp_path):
        with pytest.raises(PromptError) as caught:
            FewShotPrompt.from_toml(path)
        assert str(path) in str(caught.value)
