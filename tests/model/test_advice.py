"""`analyze` and the hints of `explain` with a real tokenizer and chat template."""

from __future__ import annotations

from typing import Any

import pytest

from prefixbank import Analysis, Example, FewShotPrompt, PrefixBank, PromptError
from prefixbank.chunking import pack_token_ids
from prefixbank.explain import _find_behind
from tests.model.tiny import CHAT_TEMPLATE, build_tokenizer, random_ids

REVIEWS = ["the lamp is lovely", "the zip broke", "soup was cold", "we liked the film", "the train came late"]
SHOTS = FewShotPrompt("Judge the review.", [Example(REVIEWS[0], "positive"), Example(REVIEWS[1], "negative")])


def test_prompts_of_all_kinds_are_analysed_together(llm: Any) -> None:
    prompts = [SHOTS.render(review) for review in REVIEWS]
    mixed = [prompts[0], prompts[1].text, llm.encode(prompts[2]), [{"role": "user", "content": "hello"}]]
    analysis = llm.analyze(iter(mixed))
    assert isinstance(analysis, Analysis)
    assert analysis.n_prompts == 4
    assert analysis.n_tokens == sum(len(llm.encode(prompt)) for prompt in mixed)
    n_shared = len(llm.shared_token_ids(SHOTS))
    assert (analysis.partings[0].offset, analysis.partings[0].n_prompts) == (n_shared, 3) or n_shared in {
        parting.offset for parting in analysis.partings
    }
    assert llm.analyze(prompts).findings == ()


def test_analysing_stores_and_asks_nothing(llm: Any, small_bank: PrefixBank) -> None:
    llm.analyze([SHOTS.render(review) for review in REVIEWS])
    assert small_bank.chunks() == []


def test_tokens_saved_are_those_of_the_rewritten_prompts(llm: Any) -> None:
    dates = [f"Today is 2024-05-{n + 10}." for n in range(5)]
    prompts = [
        [{"role": "system", "content": f"{date} Judge the review, please."}, {"role": "user", "content": review}]
        for date, review in zip(dates, REVIEWS, strict=True)
    ]
    moved = [
        [
            {"role": "system", "content": "Judge the review, please."},
            {"role": "user", "content": f"{date}\n\n{review}"},
        ]
        for date, review in zip(dates, REVIEWS, strict=True)
    ]
    (finding,) = llm.analyze(prompts).findings
    assert finding.kind == "volatile-text"
    assert finding.tokens_saved == llm.analyze(prompts).n_unique_tokens - llm.analyze(moved).n_unique_tokens
    place = finding.places[0]
    assert llm.tokenizer.decode(llm.encode(prompts[0])[place.offset :]).startswith(("2024-05-10", " 2024-05-10"))


def test_a_bad_prompt_is_named_by_its_index(llm: Any) -> None:
    with pytest.raises(PromptError, match=r"^prompt 1: "):
        llm.analyze(["fine", ""])
    with pytest.raises(PromptError, match="prompt 0: token ids must be integers"):
        llm.analyze([[1, -5]])


def test_a_date_of_the_chat_template_is_found(small_bank: PrefixBank, llama: Any) -> None:
    template = "Today Date: {{ strftime_now('%d %b %Y') }}\n" + CHAT_TEMPLATE
    llm = small_bank.attach(llama, build_tokenizer(chat_template=template))
    prompts = [[{"role": "system", "content": "Judge."}, {"role": "user", "content": r}] for r in REVIEWS]
    found = [finding for finding in llm.analyze(prompts).findings if finding.kind == "template-date"]
    assert [finding.places[0].offset is not None for finding in found] == [True]
    fixed = small_bank.attach(llama, build_tokenizer(chat_template="Today Date: 26 Jul 2024\n" + CHAT_TEMPLATE))
    assert all(finding.kind != "template-date" for finding in fixed.analyze(prompts).findings)


def test_explain_hints_at_a_date(llm: Any) -> None:
    llm.warm("Today is Monday. review: the lamp")
    explanation = llm.explain("Today is Tuesday. review: the lamp")
    assert explanation.hint is not None
    assert explanation.hint.startswith("a weekday that differs")
    assert explanation.hint in str(explanation)
    llm.warm("Judge the lamp, please")
    assert llm.explain("Judge a zip, please").hint is None


def test_explain_hints_at_a_seam(llm: Any) -> None:
    llm.warm("review: the lamp is lovely\nsentiment: positive\n\nreview: ")
    hint = llm.explain("review: the lamp is lovely\nsentiment: positive\n\nreview: the zip broke").hint
    assert hint is not None
    assert hint.startswith("a seam")


def test_explain_hints_at_another_order(llm: Any) -> None:
    one, other = random_ids(20, seed=5), random_ids(20, seed=6)
    llm.warm([7, *one, *other])
    hint = llm.explain([7, *other, *one, 9]).hint
    assert hint is not None
    assert "another order" in hint
    assert "token 21 " in hint


def test_explain_hints_at_white_space(llm: Any) -> None:
    llm.warm("Judge this review:\n\nthe lamp is lovely\n")
    assert "white space" in str(llm.explain("Judge this review:\n \nthe lamp is lovely\n").hint)


def test_token_ids_are_looked_for_as_ids_and_not_as_bytes() -> None:
    prompt, moved = pack_token_ids([9, *[1] * 9, *range(20, 26)]), pack_token_ids(range(20, 26))
    assert _find_behind(prompt, 0, moved) == 10
    assert _find_behind(prompt, 0, pack_token_ids([0x01000000] * 6)) is None
    assert _find_behind(prompt, 10, moved) is None
    assert _find_behind(prompt, 0, moved[:12]) is None
