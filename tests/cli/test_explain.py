"""Hold `explain` to its rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.banks import TEXT, FilledBank, Outcome, digest_of

Run = Callable[..., Outcome]


def test_explain_says_how_far_prompts_match(
    warm: Run, explain: Run, text: str, tmp_path: Path, empty: FilledBank
) -> None:
    warm(text, "--name", "text")
    before = digest_of(empty.root)
    (whole,) = explain(text, "--json").document["explanations"]
    assert whole["n_matched_tokens"] == whole["n_prompt_tokens"] - 1
    assert (whole["source"], whole["prefix_names"]) == (text, ["text"])
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("zip", "wick"))
    (parted,) = explain(str(other), "--json").document["explanations"]
    assert 0 < parted["n_matched_tokens"] == parted["differs_at"] < whole["n_matched_tokens"]
    out = explain(str(other)).out
    assert out.startswith(f"{other}: {parted['n_matched_tokens']} of {parted['n_prompt_tokens']} tokens are stored: ")
    assert digest_of(empty.root) == before


def test_explain_renders_few_shot_prompts_with_a_query(warm: Run, explain: Run, shots: str) -> None:
    n_shared = warm(shots, "--json").document["prefixes"][0]["n_tokens"]
    sample = explain(shots, "--json").document["explanations"][0]
    asked = explain(shots, "--query", "7 lamps broke", "--json").document["explanations"][0]
    assert sample["n_matched_tokens"] == asked["n_matched_tokens"] == n_shared
    assert sample["n_prompt_tokens"] != asked["n_prompt_tokens"]


def test_explain_needs_a_query_for_shots_without_samples_and_none_for_texts(
    explain: Run, empty: FilledBank, text: str, lines: Callable[..., str]
) -> None:
    source = lines({"instructions": "Judge."})
    outcome = explain(source)
    assert (outcome.code, outcome.out) == (2, "")
    assert "give --query TEXT" in outcome.err
    assert "--query is for these" in explain(text, "--query", "x").err


def test_explain_without_a_bank_ends_with_10_before_a_model_is_loaded(run: Run, text: str) -> None:
    outcome = run("explain", text, "--model", "no/such-model")
    assert (outcome.code, outcome.out) == (10, "")
