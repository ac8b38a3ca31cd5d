"""Choices and prompts that can't be scored are refused, and the error says which one it is."""

from __future__ import annotations

from typing import Any

import pytest

from prefixbank import ConfigError, PrefixBank, PromptError
from tests.model.scoring.plainscores import PROMPT, is_plain, score, score_many
from tests.model.tiny import build_model, random_ids


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "no choices"),
        (" positive", "must be a list"),
        (None, "must be a list"),
        ([" a", ""], "choice 1 is empty"),
        ([[1], []], "choice 1 is empty"),
        ([" a", " b", " a"], "choice 2 is the same as choice 0"),
        ([[1], [2], (1,)], "choice 2 is the same as choice 0"),
        ([" a", None], "choice 1 is a NoneType"),
        ([" a", 7], "choice 1 is a int"),
        ([[1], [2, -1]], "choice 1: token ids must be"),
        ([[1], ["a"]], "choice 1: token ids must be"),
        ([[1], b"abc"], "choice 1: token ids must be"),
        ([[1], [2, 320]], "choice 1 has the token id 320"),
        ([[1], [2**31 + 1]], "choice 1 has the token id"),
    ],
)
def test_unusable_choices_are_refused_by_their_index(choices: Any, message: str, llm: Any) -> None:
    with pytest.raises(PromptError, match=message):
        score(llm, PROMPT, choices)
    assert is_plain(llm.model, score(llm, PROMPT, [[1], [2]]), PROMPT, [[1], [2]])


def test_prompts_beyond_the_models_context_are_refused(
    tokenizer: Any, small_bank: PrefixBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_bank.attach(build_model("qwen3_next"), tokenizer)
    monkeypatch.setattr(llm.model.args, "max_position_embeddings", 30)
    prompt = random_ids(29)
    assert llm.generate(random_ids(30), max_tokens=1).computed_tokens == 30
    score(llm, prompt, [[1]])
    for call in (
        lambda: llm.generate(random_ids(31), max_tokens=1),
        lambda: score(llm, prompt, [[1], [2, 3]]),
        lambda: score_many(llm, [prompt, prompt], [[[1]], [[2, 3]]]),
        lambda: llm.generate_many([prompt, random_ids(31)], max_tokens=1),
    ):
        with pytest.raises(PromptError, match=r"has 31 tokens, but the model's context holds 30"):
            call()
    with pytest.raises(PromptError, match="prompt 1: the prompt with choice 0 has 31"):
        score_many(llm, [prompt, prompt], [[[1]], [[2, 3]]])


def test_choices_with_the_same_token_ids_are_refused(llm: Any) -> None:
    ids = llm.tokenizer.encode(" positive", add_special_tokens=False)
    with pytest.raises(PromptError, match="choice 1 has the same token ids as choice 0"):
        score(llm, PROMPT, [" positive", ids])


@pytest.mark.parametrize("prompt", ["", [], [-1], None, 7, [2**32]], ids=repr)
def test_unusable_prompts_are_refused(prompt: Any, llm: Any) -> None:
    with pytest.raises(PromptError):
        score(llm, prompt, [" a"])
    with pytest.raises(PromptError, match="prompt 1: "):
        score_many(llm, [[1, 2], prompt], [" a"])


def test_prompt_whose_first_token_a_choice_joins_is_refused(llm: Any) -> None:
    assert llm.encode(" positive")[0] != llm.encode(" ")[0]
    with pytest.raises(PromptError, match="choice 1 joins the prompt's first token"):
        score(llm, " ", [" zip", "positive"])


def test_choices_of_many_are_refused_by_the_prompts_index(llm: Any, small_bank: PrefixBank) -> None:
    with pytest.raises(PromptError, match="prompt 1: choice 1 is empty"):
        score_many(llm, [[1], [2]], [[" a"], [" a", ""]])
    with pytest.raises(PromptError, match="prompt 1: there are no choices"):
        score_many(llm, [[1], [2]], [[" a"], []])
    with pytest.raises(ConfigError, match="prefill_step_size"):
        score_many(llm, [[1], [2]], [" a"], prefill_step_size=-1)
    with pytest.raises(PromptError, match="3 prompts were given and choices for 2"):
        score_many(llm, [[1], [2], [3]], [[" a"], [" b"]])
    with pytest.raises(PromptError, match="no choices"):
        score_many(llm, [[1], [2]], [])
    with pytest.raises(PromptError, match="must be a list"):
        score_many(llm, [[1], [2]], " a")
    with pytest.raises(ConfigError, match="prefill_step_size"):
        score(llm, [1, 2], [" a"], prefill_step_size=-1)
    assert "computed_tokens" not in small_bank.stats().session
    with pytest.raises(PromptError, match="prompt 1: choice 0 has the token id 400"):
        score_many(llm, [[1], [2]], [[[1]], [[400]]])
