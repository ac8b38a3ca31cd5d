"""The real small model: hits and cold runs agree on real text, and the demo says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import stream_generate

from prefixbank import BankedModel, PrefixBank
from prefixbank.cli import main
from prefixbank.demo.run import answer, load_shots, warm
from prefixbank.demo.smollm2 import fetch_smollm2
from tests.model.tiny import FROM_DISK

pytestmark = pytest.mark.real_model

# A short prompt of its own: the demo's would take two cores too long for ten cold runs.
SHOTS = replace(load_shots(), name="", examples=load_shots().examples[:4])
QUERIES = [
    *load_shots().queries,
    "Not bad at all for the price, though the manual is hopeless.",
    "12 months later it still works; I can't say that of the other three.",
]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixBank]:
    with PrefixBank.open(tmp_path_factory.mktemp("real") / "bank", **FROM_DISK, chunk_tokens=64) as bank:
        yield bank
        assert bank.check(read_data=True).ok


@pytest.fixture(scope="module")
def smollm2(bank: PrefixBank) -> BankedModel:
    return bank.load_model(fetch_smollm2())


def test_text_and_log_probabilities_of_hit_and_cold_agree_on_ten_pairs(smollm2: BankedModel) -> None:
    n_shared = smollm2.warm(SHOTS).n_tokens
    assert n_shared > 150
    for query in QUERIES:
        prompt = SHOTS.render(query)
        token_ids = smollm2.encode(prompt)
        cold = list(stream_generate(smollm2.model, smollm2.tokenizer, token_ids, max_tokens=6))
        hit = list(smollm2.stream_generate(prompt, max_tokens=6))
        assert hit[0].cached_tokens == n_shared
        assert hit[0].computed_tokens == len(token_ids) - n_shared
        assert "".join(r.text for r in hit) == "".join(r.text for r in cold)
        for ours, theirs in zip(hit, cold, strict=True):
            assert mx.abs(ours.logprobs - theirs.logprobs).max().item() < 1e-3


def test_chat_of_a_real_template_goes_on_from_the_bank(smollm2: BankedModel) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    first = smollm2.generate(messages, max_tokens=12, keep=True)
    assert "Paris" in first.text
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And of Italy?"}]
    second = smollm2.generate(messages, max_tokens=8)
    # All of the first turn but the end-of-turn token that follows the answer.
    assert second.cached_tokens >= first.cached_tokens + first.computed_tokens + len(first.token_ids) - 1


def test_demo_answers_alike_and_starts_from_the_bank_the_second_time(smollm2: BankedModel, bank: PrefixBank) -> None:
    shots = replace(SHOTS, name="sentiment/v1", queries=QUERIES[:2])
    first, _ = warm(smollm2, shots)
    answers = answer(smollm2, shots)
    assert all(one.equal for one in answers)
    assert {one.text.split()[0] for one in answers} <= {"positive", "negative"}
    assert {one.cached_tokens for one in answers} == {first.n_tokens}
    again, _ = warm(smollm2, shots)
    assert (again.computed_tokens, again.written_bytes) == (0, 0)
    assert bank.prefixes("sentiment/v1")[0].pinned


def test_demo_verb_compares_cold_with_bank_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shots = replace(SHOTS, name="sentiment/v1", queries=QUERIES[:1])
    monkeypatch.setattr("prefixbank.demo.run.load_shots", lambda: shots)
    monkeypatch.setenv("PREFIXBANK_HOME", str(tmp_path / "bank"))
    assert main(["demo", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["schema"], first["all_equal"], first["root"]) == (1, True, str(tmp_path / "bank"))
    assert first["warmed"]["computed_tokens"] == first["answers"][0]["cached_tokens"] > 150
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "from an earlier run" in out
    assert "All texts are equal" in out
    # A text that differs must not pass.
    monkeypatch.setattr("prefixbank.demo.run._answer_cold", lambda *_: ("something else", 1.0))
    assert main(["demo"]) == 1


def test_demo_prompt_is_a_real_few_shot_prompt(smollm2: BankedModel) -> None:
    assert 800 <= len(smollm2.shared_token_ids(load_shots())) <= 1000
    assert len(load_shots().queries) == 8
