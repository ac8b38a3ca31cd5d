"""Choices that are texts are tokenised as they follow on their prompts, whatever joins at the seam."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from prefixbank import PrefixBank
from tests.model.scoring.plainscores import PROMPT, is_plain, score
from tests.model.test_prompts import CHAT, SHOTS
from tests.model.tiny import build_tokenizer


def test_text_choices_behind_shots(llm: Any, small_bank: PrefixBank) -> None:
    choices = [" positive", " negative", " neither of them"]
    n_shared = len(llm.shared_token_ids(SHOTS))
    for n_query, query in enumerate(("a great soup", "the film", "the film")):
        prompt = SHOTS.render(query)
        assert prompt.text is not None
        ids = llm.encode(prompt)
        wholes = [llm.encode(prompt.text + choice) for choice in choices]
        assert all(whole[: len(ids)] == ids for whole in wholes), "there is a seam: the test needs other choices"
        result = score(llm, prompt, choices)
        assert is_plain(llm.model, result, ids, [whole[len(ids) :] for whole in wholes])
        assert result.choices == choices
        assert result.cached_tokens == (n_shared if n_query else 0)
        assert result.best_choice == choices[result.best] == result.ranked()[0][0]
        assert [value for _, value in result.ranked()] == sorted(result.scores, reverse=True)
        assert llm.best(prompt, choices) == result.best_choice
        assert [text for text, _ in llm.rank(prompt, choices)] == [text for text, _ in result.ranked()]
    small_bank.flush()
    assert sum(chunk.n_tokens for chunk in small_bank.chunks()) == n_shared


def test_choice_that_joins_the_prompts_last_token_is_scored_with_it(llm: Any) -> None:
    prompt = "review: the lamp is lovely\nsentiment: "
    choices = ["positive", "negative", "7"]
    ids, wholes = llm.encode(prompt), [llm.encode(prompt + choice) for choice in choices]
    assert any(whole[: len(ids)] != ids for whole in wholes), "no seam here: the test needs another text"
    shared = ids[:-1]
    assert all(whole[: len(shared)] == shared for whole in wholes)
    behind = [whole[len(shared) :] for whole in wholes]
    for _ in range(2):
        result = score(llm, prompt, choices)
        assert is_plain(llm.model, result, shared, behind)
        assert result.n_tokens == [len(suffix) for suffix in behind]
    # Behind token ids nothing is joined.
    alone = [llm.tokenizer.encode(choice, add_special_tokens=False) for choice in choices]
    assert is_plain(llm.model, score(llm, ids, choices), ids, alone)


def test_choice_behind_a_chat_follows_on_the_generation_prompt(llm: Any) -> None:
    prompt, choices = CHAT.render("a dull film"), ["positive", "negative"]
    ids = llm.encode(prompt)
    text = llm.tokenizer.apply_chat_template(list(prompt.messages or ()), add_generation_prompt=True, tokenize=False)
    assert text.endswith("<assistant>")
    wholes = [llm.tokenizer.encode(text + choice, add_special_tokens=False) for choice in choices]
    n_shared = min(
        next(n for n, (a, b) in enumerate(zip([*ids, -1], whole, strict=False)) if a != b) for whole in wholes
    )
    for given in (prompt, list(prompt.messages or ())):
        result = score(llm, given, choices)
        assert is_plain(llm.model, result, ids[:n_shared], [whole[n_shared:] for whole in wholes])


def test_choice_joins_the_last_blank_of_a_chat_too(small_bank: PrefixBank, llama: Any) -> None:
    tokenizer = build_tokenizer(chat_template="{{ messages[0].content }}\nsentiment: ")
    llm = small_bank.attach(llama, tokenizer)
    messages = [{"role": "user", "content": "review: the lamp is lovely"}]
    text = "review: the lamp is lovely\nsentiment: "
    result = score(llm, messages, ["positive", "negative"])
    assert result.log_probs == pytest.approx(score(llm, text, ["positive", "negative"]).log_probs, abs=1e-4)
    ids, whole = llm.encode(text), llm.encode(text + "positive")
    assert whole[: len(ids)] != ids
    assert is_plain(llama, result, ids[:-1], [whole[len(ids) - 1 :], llm.encode(text + "negative")[len(ids) - 1 :]])


def test_choice_behind_a_chat_whose_text_has_other_ids_is_tokenised_alone(
    small_bank: PrefixBank, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer(chat_template="{{ messages[0].content }}:")
    llm = small_bank.attach(llama, tokenizer)
    messages = [{"role": "user", "content": "the lamp"}]
    ids = llm.encode(messages)
    real = llm.tokenizer.apply_chat_template

    def strange(*args: Any, tokenize: bool = True, **kwargs: Any) -> Any:
        return real(*args, tokenize=True, **kwargs) if tokenize else "something else"

    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", strange)
    result = score(llm, messages, [" positive", " zip"])
    behind = [tokenizer.encode(choice, add_special_tokens=False) for choice in (" positive", " zip")]
    assert is_plain(llama, result, ids, behind)


def test_arrays_are_choices_and_texts_follow_on_token_ids(llm: Any) -> None:
    result = score(llm, PROMPT, [mx.array([5, 6]), np.array([7]), " positive", (8, 9, 10)])
    text = llm.tokenizer.encode(" positive", add_special_tokens=False)
    assert is_plain(llm.model, result, PROMPT, [[5, 6], [7], text, [8, 9, 10]])
    assert result.choices == [
        llm._encoder.decode([5, 6]),
        llm._encoder.decode([7]),
        " positive",
        llm._encoder.decode([8, 9, 10]),
    ]
