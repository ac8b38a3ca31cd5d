"""Hold `explain` to its rules for many prompts: counts, advice, and bad lines that lose nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.banks import FilledBank, Outcome

Run = Callable[..., Outcome]
Lines = Callable[..., str]


def dated(n: int) -> list[dict[str, str]]:
    body = "Judge the review, and say whether the customer liked the lamp or not. Be brief."
    return [{"text": f"Today is 2024-05-{i + 10}. {body}\n\nthe zip number {i} broke"} for i in range(n)]


def test_each_prompt_of_a_few_is_explained_and_the_analysis_is_behind(
    explain: Run, empty: FilledBank, lines: Lines
) -> None:
    source = lines(*dated(3))
    out = explain(source).out
    assert [f"{source}, line {n}: 0 of" in out for n in (1, 2, 3)] == [True] * 3
    assert out.index("line 3: 0 of") < out.index("3 prompts of")
    assert "A date before what the prompts share differs" in out
    assert f"{source}, line 1, token" in out
    document = explain(source, "--json").document
    assert len(document["explanations"]) == 3
    (finding,) = document["analysis"]["findings"]
    assert (finding["kind"], finding["places"][0]["source"]) == ("volatile-text", f"{source}, line 1")
    assert document["analysis"]["partings"][0]["ways"][0]["source"].startswith(source)


def test_one_prompt_has_no_analysis(explain: Run, empty: FilledBank, text: str) -> None:
    assert explain(text, "--json").document["analysis"] is None
    assert "prompts of" not in explain(text).out


def test_many_prompts_are_counted_and_each_is_explained_on_request(
    warm: Run, explain: Run, empty: FilledBank, lines: Lines, text: str
) -> None:
    warm(text)
    source = lines(*({"text": f"the lamp is lovely and number {n} is too"} for n in range(12)))
    outcome = explain(source)
    assert outcome.out.startswith("12 of 12 prompts match, ")
    assert "  12 with " in outcome.out
    assert "line 7: " not in outcome.out.split("12 prompts of")[0]
    assert f"{source}, line 7: " in explain(source, "--each").out.split("12 prompts of")[0]
    assert len(explain(source, "--json").document["explanations"]) == 12


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{not json", "line 3 is no JSON"),
        ({"text": ""}, "line 3: the prompt is empty"),
        ({"text": 5}, "line 3: text has the wrong type int"),
        ({"messages": ["no message"]}, "line 3: token ids must be integers"),
        ({"instructions": "Judge."}, "line 3 is a few-shot prompt without sample queries"),
    ],
)
@pytest.mark.parametrize("option", [(), ("--analyze",)])
def test_a_bad_line_is_named_at_the_end_and_what_came_before_is_printed(
    bad: Any, message: str, option: tuple[str, ...], explain: Run, empty: FilledBank, lines: Lines
) -> None:
    source = lines(*dated(2), bad, *dated(1))
    outcome = explain(source, *option)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert f"{source}, {message}" in outcome.err
    assert "2 prompts of" in outcome.out
    as_json = explain(source, "--json", *option)
    assert as_json.code == 2
    assert as_json.document["analysis"]["n_prompts"] == 2
    assert len(as_json.document["explanations"]) == (0 if option else 2)


def test_few_shot_lines_are_analysed_with_their_queries(explain: Run, empty: FilledBank, lines: Lines) -> None:
    def line(n: int) -> dict[str, Any]:
        examples = [{"input": f"the {word} {n} is here", "output": "yes"} for word in ("cat", "dog", "cow")]
        return {"instructions": "Judge the review.", "examples": examples, "queries": [f"the zip {n}"]}

    findings = explain(lines(*map(line, range(5))), "--json").document["analysis"]["findings"]
    assert [finding["kind"] for finding in findings] == ["redrawn-shots"]


def test_analyze_needs_no_bank_and_no_weights(
    run: Run, root: Path, tiny_model: Path, lines: Lines, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer only"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    source = lines(*dated(3))
    outcome = run("explain", source, "--analyze", "--model", str(folder))
    assert outcome.code == 0, outcome.err
    assert "line 1: 0 of" not in outcome.out
    assert "A date before what the prompts share differs" in outcome.out
    assert not root.exists()
    assert run("explain", source, "--analyze", "--model", str(tmp_path)).code == 2


def test_without_a_bank_several_prompts_are_told_of_analyze(run: Run, lines: Lines) -> None:
    outcome = run("explain", lines(*dated(2)), "--model", "no/such-model")
    assert (outcome.code, outcome.out) == (10, "")
    assert "--analyze" in outcome.err
