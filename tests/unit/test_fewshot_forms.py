"""Hold templates, roles, variables and the first k examples of few-shot prompts to how they read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from prefixbank.errors import PromptError
from prefixbank.fewshot import ChatRoles, Example, FewShotPrompt

SHOTS = FewShotPrompt(
    "Name the mood.", (Example("great", "positive"), Example("awful", "negative")), name="mood/v1", queries=("x",)
)
CHAT = dataclasses.replace(SHOTS, chat=True)
TEMPLATE = dataclasses.replace(SHOTS, template="Q: {input}\nA: {output}\n###\n")
EXAMPLE_FILE = Path(__file__).parent.parent / "prefixes" / "translate" / "v1.toml"


def turns(shots: FewShotPrompt) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in shots.render("so so").messages or ()]


# --- templates


def test_a_template_says_how_examples_and_the_query_read() -> None:
    assert TEMPLATE.render("so so").text == (
        "Name the mood.\n\nQ: great\nA: positive\n###\nQ: awful\nA: negative\n###\nQ: so so\nA:"
    )


def test_a_templates_line_break_in_front_of_the_output_stays() -> None:
    shots = FewShotPrompt(examples=[Example("a", "b")], template="{input}:\t\n{output}\n")
    assert shots.render("c").text == "a:\t\nb\nc:\t\n"


def test_braces_in_templates_inputs_and_outputs_are_left_alone() -> None:
    shots = FewShotPrompt(examples=[Example("{output}", "{input}")], template='{"q": "{input}", "a": "{output}"}\n')
    assert shots.render("{x}").text == '{"q": "{output}", "a": "{input}"}\n{"q": "{x}", "a": "'


@pytest.mark.parametrize("template", ["", "{input}", "{output}", "{output} {input}", "{input} {input} {output}"])
def test_a_template_needs_input_and_output_once_in_this_order(template: str) -> None:
    with pytest.raises(PromptError, match=r"the template needs \{input\} once"):
        FewShotPrompt("x", template=template)


@pytest.mark.parametrize("other", [{"chat": True}, {"input_label": ""}, {"output_label": "A"}], ids=str)
def test_a_template_goes_with_no_chat_and_no_labels(other: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="takes the place of chat and labels"):
        FewShotPrompt("x", template="{input}{output}", **other)


# --- roles


def test_roles_can_be_named() -> None:
    shots = dataclasses.replace(CHAT, roles=ChatRoles("developer", "human", "ai"))
    assert [role for role, _ in turns(shots)] == ["developer", "human", "ai", "human", "ai", "human"]


def test_instructions_in_the_role_of_inputs_are_one_message_with_the_first() -> None:
    shots = dataclasses.replace(CHAT, roles=ChatRoles(instructions="user"))
    assert turns(shots) == [
        ("user", "Name the mood.\n\ngreat"),
        ("assistant", "positive"),
        ("user", "awful"),
        ("assistant", "negative"),
        ("user", "so so"),
    ]
    assert turns(shots.first(0)) == [("user", "Name the mood.\n\nso so")]


def test_roles_are_for_chats_and_have_names() -> None:
    with pytest.raises(PromptError, match="set chat = true"):
        FewShotPrompt("x", roles=ChatRoles(instructions="user"))
    with pytest.raises(PromptError, match="roles is a dict"):
        FewShotPrompt("x", chat=True, roles={"input": "user"})  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="the role of output is no name"):
        ChatRoles(output=" ")


# --- the first k examples


def test_the_first_k_examples_make_a_prompt_that_the_whole_one_begins_with() -> None:
    for shots in (SHOTS, TEMPLATE):
        shared = str(shots.render("Z", k=1)).partition("Z")[0]
        assert str(shots.render("Z")).startswith(shared)
        assert shots.first(1).examples == SHOTS.examples[:1]
        assert shots.render("Z", k=1) == shots.first(1).render("Z")
    assert SHOTS.first(0).render("so so").text == "Name the mood.\n\nInput: so so\nOutput:"


def test_the_first_k_examples_have_a_name_and_digest_of_their_own() -> None:
    assert SHOTS.first(2) is SHOTS
    assert SHOTS.first(1).name == "mood/v1@k=1"
    assert dataclasses.replace(SHOTS, name="").first(1).name == ""
    assert len({shots.source_digest for shots in (SHOTS, SHOTS.first(1), SHOTS.first(0))}) == 3


@pytest.mark.parametrize("k", [-1, 3, True, "1", 1.0])
def test_more_examples_than_there_are_are_refused(k: Any) -> None:
    with pytest.raises(PromptError, match="out of range: mood/v1 has 2 examples"):
        SHOTS.first(k)
    with pytest.raises(PromptError, match="out of range"):
        SHOTS.render("x", k=k)


def test_no_examples_need_instructions() -> None:
    with pytest.raises(PromptError, match="instructions, examples, or both"):
        dataclasses.replace(SHOTS, instructions="").first(0)


# --- digests


def test_the_digests_of_prompts_without_the_newer_forms_are_what_they_always_were() -> None:
    assert SHOTS.source_digest == "9c9cb03538a62982ef0c89618c71c8477d6e378a5bd1f03bbd3e50a73d517762"
    assert CHAT.source_digest == "268d8b69d2421595c38389735a97d8b37b8d22d666149b7c953b9c26e14ffa6f"


def test_the_digest_changes_with_template_and_roles_and_not_with_boundaries() -> None:
    others = [
        TEMPLATE,
        dataclasses.replace(TEMPLATE, template="Q: {input}\nA: {output}\n"),
        dataclasses.replace(CHAT, roles=ChatRoles(instructions="user")),
        dataclasses.replace(CHAT, roles=ChatRoles(input="human")),
    ]
    assert len({SHOTS.source_digest, CHAT.source_digest, *(shots.source_digest for shots in others)}) == 6
    assert dataclasses.replace(SHOTS, boundaries="examples").source_digest == SHOTS.source_digest


# --- files


def test_the_example_file_reads_as_it_says() -> None:
    shots = FewShotPrompt.from_toml(EXAMPLE_FILE)
    text = shots.render("Where is the station?").text or ""
    assert text.startswith(
        'Translate from English to German, in a friendly tone. Answer with JSON: {"text": "..."}.\n\n'
        'English: Good morning.\nGerman: {"text": "Guten Morgen."}\n\n'
    )
    assert text.endswith('{"text": "Bis morgen."}\n\nEnglish: Where is the station?\nGerman:')
    assert shots.boundaries == "examples"
    french = FewShotPrompt.from_toml(EXAMPLE_FILE, variables={"language": "French"})
    assert (french.render("x").text or "").endswith("English: x\nFrench:")
    assert french.source_digest != shots.source_digest
    assert FewShotPrompt.from_toml(EXAMPLE_FILE, variables={"language": "German"}) == shots


def test_variables_stand_in_all_shared_texts_and_in_no_query(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(
        "name = 'n'\ninstructions = '{{v}}1'\ninput_label = '{{v}}2'\noutput_label = '{{v}}3'\nqueries = ['{{v}}']\n"
        "[variables]\nv = 'V'\n[[examples]]\ninput = '{{v}}4'\noutput = '{{v}}5'\n"
    )
    shots = FewShotPrompt.from_toml(path)
    assert shots.render("{{v}}").text == "V1\n\nV2V4\nV3V5\n\nV2{{v}}\nV3"
    assert (shots.name, shots.queries) == ("n", ("{{v}}",))
    assert FewShotPrompt.from_toml(path, variables={"v": "W"}).name == "n@v=W"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("instructions = 'x'\ntemplate = 'x'", "the template needs {input}"),
        ("instructions = 'x'\ntemplate = 1", "template has the wrong type int"),
        ("instructions = 'x'\nchat = true\nroles = 'x'", "roles has the wrong type str"),
        ("instructions = 'x'\nchat = true\n[roles]\nsystem = 'x'", "unknown key 'system' in roles"),
        ("instructions = 'x'\nchat = true\n[roles]\ninput = 1", "the role of input is no name: 1"),
        ("instructions = 'x'\n[roles]\ninput = 'x'", "set chat = true"),
        ("instructions = 'x'\nboundaries = 'all'", "boundaries is 'all'"),
        ("instructions = 'x'\nvariables = 'x'", "variables has the wrong type str"),
        ("instructions = 'x {{y}}'\n[variables]\nx = 'x'", "the variable 'y' has no value"),
        ("instructions = 'x'\n[variables]\nx = []", "the variable 'x' is a list"),
        ("instructions = 'x'\n[[examples]]\ninput = '{{y}}'\noutput = ''\n[variables]", "the variable 'y'"),
        ("instructions = 'x'\n\n\nname = ", "line 4"),
        ("x = " + "[" * 100_000, "no valid TOML"),
    ],
    ids=range(13),
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "mood.toml"
    path.write_text(content)
    with pytest.raises(PromptError) as caught:
        FewShotPrompt.from_toml(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


def test_a_path_that_can_not_be_one_is_a_prompt_error() -> None:
    with pytest.raises(PromptError, match="null"):
        FewShotPrompt.from_toml("a\0b.toml")
