"""Hold advice on many prompts to what is wrong with them, and its numbers to prompts that are rewritten by hand."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

import pytest

from prefixbank.errors import PromptError
from prefixbank.fewshot import ChatRoles, Example, FewShotPrompt
from tests.unit.advising import (
    FIXED,
    INSTRUCTIONS,
    POOL,
    QUERIES,
    Tokenizer,
    chat,
    text,
    the_finding,
    unlabelled,
)

FORMS = pytest.mark.parametrize("form", [text, chat], ids=["text", "chat"])
ALL_FORMS = pytest.mark.parametrize("form", [text, chat, unlabelled], ids=["text", "chat", "unlabelled"])


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer()


def draws(seed: int = 3, n: int = 5, pool: Any = POOL) -> list[Any]:
    return [random.Random(seed + i).sample(pool, n) for i in range(len(QUERIES))]


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("date", lambda i: f"2024-05-{i + 10}"),
        ("date", lambda i: f"May {i + 1}, 2024"),
        ("date", lambda i: f"{i + 1}.5.2024"),
        ("date and time", lambda i: f"2024-05-01T10:{i + 10}:00Z"),
        ("time", lambda i: f"10:{i + 10} pm"),
        ("UUID", lambda i: f"12345678-1234-1234-1234-1234567890{i + 10}"),
        ("epoch time", lambda i: f"17145600{i + 10}"),
        ("hexadecimal id", lambda i: f"deadbeef{i + 10}"),
        ("request or session id", lambda i: f"request #{i + 10}"),
        ("random seed", lambda i: f"seed={i}"),
    ],
)
def test_what_differs_in_the_system_prompt_is_recognised(kind: str, written: Any, tokenizer: Tokenizer) -> None:
    prompts = [chat(FIXED, query, f"Note {written(i)}. {INSTRUCTIONS}") for i, query in enumerate(QUERIES)]
    finding = the_finding(tokenizer.analyze(prompts), "volatile-text")
    assert finding.message.casefold().startswith(f"a {kind.casefold()} in the system prompt".replace("a e", "an e"))
    assert written(0) in finding.places[0].text or finding.places[0].text in written(0)


@FORMS
def test_moving_a_date_behind_the_shots_saves_what_moving_it_saves(form: Any, tokenizer: Tokenizer) -> None:
    dates = [f"Today is May {i + 1}, 2024." for i in range(len(QUERIES))]
    prompts = [form(FIXED, query, f"{date} {INSTRUCTIONS}") for date, query in zip(dates, QUERIES, strict=True)]
    if form is chat:
        moved = [form(FIXED, f"{date}\n\n{query}") for date, query in zip(dates, QUERIES, strict=True)]
    else:
        moved = [
            form(FIXED, query).replace(f"Review: {query}", f"{date}\n\nReview: {query}")
            for date, query in zip(dates, QUERIES, strict=True)
        ]
    finding = the_finding(tokenizer.analyze(prompts), "volatile-text")
    assert finding.tokens_saved == tokenizer.n_unique(prompts) - tokenizer.n_unique(moved) > 0
    place = finding.places[1]
    assert (place.prompt, place.text) == (1, "May 2, 2024")
    assert tokenizer.decode(tokenizer.unpack(prompts[1])[place.offset :]).startswith(" May 2, 2024")
    assert "behind the shots" in finding.advice


def test_a_name_in_the_system_prompt_is_a_text_that_differs(tokenizer: Tokenizer) -> None:
    names = [f"{first}{last}" for first in ("Anna", "Bert", "Carl") for last in ("ova", "son", "mann", "ini")]
    prompts = [
        text(FIXED, q, f"You talk with {name} now. {INSTRUCTIONS}") for name, q in zip(names, QUERIES, strict=True)
    ]
    finding = the_finding(tokenizer.analyze(prompts), "volatile-text")
    assert finding.message.startswith("A text before what the prompts share is another one in each prompt")
    assert finding.places[0].text == "Annaova"


@ALL_FORMS
def test_shots_that_are_drawn_anew_are_found_where_their_pool_shows(form: Any, tokenizer: Tokenizer) -> None:
    selections = draws()
    prompts = [form(shots, query) for shots, query in zip(selections, QUERIES, strict=True)]
    finding = the_finding(tokenizer.analyze(prompts), "redrawn-shots")
    median = sorted(selections, key=lambda shots: sum(len(text) for shot in shots for text in shot))[len(QUERIES) // 2]
    same = [form(median, query) for query in QUERIES]
    assert finding.tokens_saved == tokenizer.n_unique(prompts) - tokenizer.n_unique(same)
    assert "sampler: first_n" in finding.advice
    assert f"{len(QUERIES)} of {len(QUERIES)} prompts" in finding.message


@FORMS
def test_shots_that_no_two_prompts_share_are_known_by_their_labels(form: Any, tokenizer: Tokenizer) -> None:
    def shots(i: int) -> list[tuple[str, str]]:
        return [(f"The {word} number {i} is here", mood) for word, mood in (("cat", "positive"), ("dog", "negative"))]

    prompts = [form(shots(i), query) for i, query in enumerate(QUERIES)]
    assert the_finding(tokenizer.analyze(prompts), "redrawn-shots").tokens_saved > 0


@ALL_FORMS
def test_the_same_examples_in_other_order_are_told_from_other_examples(form: Any, tokenizer: Tokenizer) -> None:
    shuffled = draws(pool=FIXED)
    prompts = [form(shots, query) for shots, query in zip(shuffled, QUERIES, strict=True)]
    finding = the_finding(tokenizer.analyze(prompts), "other-order")
    in_order = [form(FIXED, query) for query in QUERIES]
    assert finding.tokens_saved == tokenizer.n_unique(prompts) - tokenizer.n_unique(in_order)
    assert "Keep one order" in finding.advice


def test_a_query_before_the_shots_belongs_behind_them(tokenizer: Tokenizer) -> None:
    shots = text(FIXED, "the one above")
    prompts = [f"{query}\n\n{shots}" for query in QUERIES]
    finding = the_finding(tokenizer.analyze(prompts), "early-query")
    moved = [f"{shots}\n\n{query}" for query in QUERIES]
    assert finding.tokens_saved == tokenizer.n_unique(prompts) - tokenizer.n_unique(moved) > 0
    assert finding.places[0].offset == 0
    assert QUERIES[0][:20] in finding.message


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (INSTRUCTIONS.replace("review is", "review  is"), "white space"),
        (INSTRUCTIONS.replace("review is", "Review is"), "upper and lower case"),
        (INSTRUCTIONS.replace("wrote it.", "wrote it.\n"), "white space"),
        (INSTRUCTIONS.replace("wrote it", "ﬁled it").replace("ﬁ", "ﬁ"), None),
    ],
)
@FORMS
def test_a_shared_text_that_is_written_otherwise_is_found(
    form: Any, other: str, what: str | None, tokenizer: Tokenizer
) -> None:
    usual = INSTRUCTIONS if what else INSTRUCTIONS.replace("wrote it", "filed it")
    prompts = [form(FIXED, query, other if i % 3 == 1 else usual) for i, query in enumerate(QUERIES)]
    finding = the_finding(tokenizer.analyze(prompts), "spelling")
    assert (what or "the Unicode form of characters") in finding.message
    in_one_way = [form(FIXED, query, usual) for query in QUERIES]
    assert finding.tokens_saved == tokenizer.n_unique(prompts) - tokenizer.n_unique(in_one_way) > 0
    assert {place.prompt for place in finding.places} <= set(range(1, len(QUERIES), 3))


def test_texts_that_one_prompt_has_in_both_ways_are_meant_to_differ(tokenizer: Tokenizer) -> None:
    shots = [("hello there", "small"), ("HELLO there", "small"), ("bye", "small"), ("so long", "small")]
    assert tokenizer.analyze([text([*shots, *FIXED], query) for query in QUERIES]).findings == ()
    swapped = [text([*shots[i % 2 :], *shots[: i % 2], *FIXED], query) for i, query in enumerate(QUERIES)]
    the_finding(tokenizer.analyze(swapped), "other-order")


def test_a_prefix_with_a_seam_is_named_with_its_tokens(tokenizer: Tokenizer) -> None:
    prefix = text(FIXED, "").removesuffix("\nSentiment:")
    assert prefix.endswith("Review: ")
    prompts = [prefix, *(text(FIXED, query) for query in QUERIES)]
    finding = the_finding(tokenizer.analyze(prompts), "seam")
    cut = [prefix.rstrip(), *prompts[1:]]
    assert finding.tokens_saved == tokenizer.n_unique(prompts) - tokenizer.n_unique(cut) == 1
    (place,) = finding.places
    assert (place.prompt, place.offset, place.text) == (0, len(tokenizer.ids(prefix)) - 1, " ")
    assert "before the blank" in finding.advice
    ends_in_a_word = the_finding(tokenizer.analyze([prefix + "My au", *prompts[1:]]), "seam")
    assert "end of a word" in ends_in_a_word.advice


def test_a_prefix_whose_tokens_begin_the_prompts_has_no_seam(tokenizer: Tokenizer) -> None:
    prefix = text(FIXED, "").removesuffix(" \nSentiment:")
    assert tokenizer.analyze([prefix, *(text(FIXED, query) for query in QUERIES)]).findings == ()


def test_token_ids_that_are_not_those_of_their_text_are_a_seam(tokenizer: Tokenizer) -> None:
    def joined(query: str) -> list[int]:
        return [id_ for piece in text(FIXED, query).split(" ") for id_ in tokenizer.ids(piece + " ")][:-1]

    prompts = [joined(query) if i % 2 else text(FIXED, query) for i, query in enumerate(QUERIES)]
    finding = the_finding(tokenizer.analyze(prompts), "seam")
    whole = [text(FIXED, query) for query in QUERIES]
    assert finding.tokens_saved == tokenizer.n_unique(prompts) - tokenizer.n_unique(whole)
    assert finding.places[0].prompt == 1


def dated(messages: Any) -> str:
    return "Today Date: 30 Nov 2026\n\n" + Tokenizer._chat(messages)


def test_a_date_that_the_chat_template_puts_in_is_found_unless_it_is_the_templates_own_text() -> None:
    tokenizer = Tokenizer(dated)
    prompts = [chat(FIXED, query) for query in QUERIES]
    finding = the_finding(tokenizer.analyze(prompts, "Today Date: {{ strftime_now('%d %b %Y') }}"), "template-date")
    assert (finding.places[0].text, finding.places[0].offset) == ("30 Nov 2026", 4)
    n_shared = len(tokenizer.ids(dated(chat(FIXED, "")[:-1])))
    assert 0 <= finding.tokens_saved - (n_shared - finding.places[0].offset) < 30  # and what some queries share
    assert tokenizer.analyze(prompts, "Today Date: 30 Nov 2026\n\n{{ messages }}").findings == ()
    said = [chat(FIXED, f"{query}\nIt is 30 Nov 2026.") for query in QUERIES]
    assert all(finding.kind != "template-date" for finding in tokenizer.analyze(said).findings)


def test_prompts_that_share_nothing_are_told_that_a_bank_wont_help(tokenizer: Tokenizer) -> None:
    finding = the_finding(tokenizer.analyze(QUERIES), "little-shared")
    assert "won't help" in finding.message
    assert finding.tokens_saved == 0
    assert the_finding(tokenizer.analyze([text(FIXED, QUERIES[0])]), "one-prompt").places == ()


def test_two_faults_that_hide_each_other_are_both_found(tokenizer: Tokenizer) -> None:
    prompts = [f"{query}\n\n{text(shots, 'the one above')}" for query, shots in zip(QUERIES, draws(), strict=True)]
    analysis = tokenizer.analyze(prompts)
    kinds = {finding.kind: finding for finding in analysis.findings}
    assert set(kinds) == {"early-query", "redrawn-shots"}
    hidden = kinds["redrawn-shots"]
    assert hidden.tokens_saved < hidden.tokens_saved_with_others <= analysis.n_saved_by_all_edits
    assert "together with the other edits" in str(analysis)


def test_findings_that_save_most_come_first(tokenizer: Tokenizer) -> None:
    heads = [f"Today is 2024-05-{i + 10}. {INSTRUCTIONS}" for i in range(len(QUERIES))]
    prompts = [text(shots, q, head) for shots, q, head in zip(draws(), QUERIES, heads, strict=True)]
    saved = [finding.tokens_saved for finding in tokenizer.analyze(prompts).findings]
    assert len(saved) == 2
    assert saved == sorted(saved, reverse=True)


@FORMS
def test_rendered_few_shot_prompts_are_known_by_their_shots(form: Any, tokenizer: Tokenizer) -> None:
    def rendered(shots: Any, query: str) -> Any:
        examples = [Example(*shot) for shot in shots]
        return FewShotPrompt(INSTRUCTIONS, examples, chat=form is chat).render(query)

    prompts = [rendered(shots, query) for shots, query in zip(draws(), QUERIES, strict=True)]
    the_finding(tokenizer.analyze(prompts), "redrawn-shots")
    assert tokenizer.analyze([rendered(FIXED, query) for query in QUERIES]).findings == ()


def test_token_ids_are_analysed_by_their_text(tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.ids(text(shots, query)) for shots, query in zip(draws(), QUERIES, strict=True)]
    the_finding(tokenizer.analyze(prompts), "redrawn-shots")


def test_counts_are_those_of_the_naive_trie(tokenizer: Tokenizer) -> None:
    prompts = [*(text(FIXED, query) for query in QUERIES), text(FIXED, QUERIES[0])]
    analysis = tokenizer.analyze(prompts)
    n_tokens = sum(len(tokenizer.ids(prompt)) for prompt in prompts)
    assert (analysis.n_prompts, analysis.n_tokens) == (len(prompts), n_tokens)
    assert analysis.n_unique_tokens == tokenizer.n_unique(prompts)
    assert analysis.n_shared_tokens == n_tokens - analysis.n_unique_tokens
    assert analysis.n_saved_tokens == analysis.n_shared_tokens - 1  # the equal prompt computes its last token
    assert analysis.share_percent == round(100 * analysis.n_shared_tokens / n_tokens, 1)


def test_parting_points_say_where_how_many_and_what(tokenizer: Tokenizer) -> None:
    shared = "one two three"
    prompts = [f"{shared} four five", f"{shared} four six seven", f"{shared} nine", shared]
    first, second = tokenizer.analyze(prompts).partings
    assert (first.offset, first.n_prompts, first.n_ways, first.n_tokens) == (3, 4, 3, 1)
    assert first.text_before == shared
    assert [(way.n_prompts, way.prompt, way.text) for way in first.ways] == [
        (2, 0, " four five"),
        (1, 2, " nine"),
        (1, 3, ""),
    ]
    assert first.ways[0].token_ids == tuple(tokenizer.ids(" four five"))
    assert (second.offset, second.n_prompts, second.n_ways) == (4, 2, 2)


def test_an_analysis_is_json(tokenizer: Tokenizer) -> None:
    analysis = tokenizer.analyze([text(shots, query) for shots, query in zip(draws(), QUERIES, strict=True)])
    document = json.loads(json.dumps(asdict(analysis)))
    assert document["findings"][0]["kind"] == "redrawn-shots"
    assert document["partings"][0]["ways"][0]["token_ids"]


def test_bad_input_is_refused_with_its_index(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match=r"^prompt 1: the prompt is empty"):
        tokenizer.analyze(["a b", ""])
    with pytest.raises(PromptError, match="no prompt"):
        tokenizer.analyze([])
    with pytest.raises(PromptError, match="several prompts"):
        tokenizer.analyze("a text")
    with pytest.raises(PromptError, match=r"^prompt 0: it can't be encoded"):
        tokenizer.analyze([[{"role": "user"}]])


def test_many_prompts_are_sampled_and_the_counts_are_of_all(tokenizer: Tokenizer) -> None:
    prompts = (
        text(FIXED, f"number {i} came", f"Today is 2024-05-{i % 28 + 1:02d}. {INSTRUCTIONS}") for i in range(600)
    )
    analysis = tokenizer.analyze(prompts)  # type: ignore[arg-type]
    assert (analysis.n_prompts, analysis.n_sampled) == (600, 256)
    finding = the_finding(analysis, "volatile-text")
    assert finding.tokens_saved < analysis.n_sampled_tokens < analysis.n_tokens
    assert "256" in str(analysis)
    assert finding.places[0].prompt < 600


def test_instructions_in_the_first_turn_of_a_chat_are_no_part_of_its_example(tokenizer: Tokenizer) -> None:
    """Chats for models without a system role."""

    def headed(shots: Any, query: str) -> Any:
        head, first, *rest = chat(shots, query)
        return [{"role": "user", "content": f"{head['content']}\n\n{first['content']}"}, *rest]

    shuffled = [headed(shots, query) for shots, query in zip(draws(pool=FIXED), QUERIES, strict=True)]
    finding = the_finding(tokenizer.analyze(shuffled), "other-order")
    in_order = [headed(FIXED, query) for query in QUERIES]
    assert finding.tokens_saved == tokenizer.n_unique(shuffled) - tokenizer.n_unique(in_order)


def test_rendered_prompts_may_have_templates_and_roles(tokenizer: Tokenizer) -> None:
    for options in (
        {"template": "<{input}>\n[{output}]\n"},
        {"chat": True, "roles": ChatRoles("user", "user", "model")},
    ):
        prompts = [
            FewShotPrompt(INSTRUCTIONS, [Example(*shot) for shot in shots], **options).render(query)
            for shots, query in zip(draws(), QUERIES, strict=True)
        ]
        the_finding(tokenizer.analyze(prompts), "redrawn-shots")


@pytest.mark.parametrize("seed", range(4))
def test_examples_without_labels_are_no_texts_that_differ(seed: int, tokenizer: Tokenizer) -> None:
    shuffled = draws(seed=seed * 100, pool=[(f"2024-05-{n:02d}", f"May {n}") for n in range(1, 6)])
    prompts = [unlabelled(shots, query) for shots, query in zip(shuffled, QUERIES, strict=True)]
    the_finding(tokenizer.analyze(prompts), "other-order")
    prompts = [unlabelled(shots, query) for shots, query in zip(draws(seed * 100, pool=FIXED), QUERIES, strict=True)]
    the_finding(tokenizer.analyze(prompts), "other-order")


def test_the_order_that_most_prompts_have_is_the_one_to_keep(tokenizer: Tokenizer) -> None:
    prompts = [text(FIXED[::-1] if i % 3 == 0 else FIXED, query) for i, query in enumerate(QUERIES)]
    finding = the_finding(tokenizer.analyze(prompts), "other-order")
    assert f"as {'Review: ' + FIXED[0][0]!r}"[:30] in finding.advice
    assert {place.prompt % 3 for place in finding.places} == {0}


def test_a_query_with_a_label_before_the_shots_is_one_text(tokenizer: Tokenizer) -> None:
    prompts = [
        f"Here comes the review that you are going to judge now: {query}\n\n{text(FIXED, 'the one above')}"
        for query in QUERIES
    ]
    the_finding(tokenizer.analyze(prompts), "early-query")
