"""Scores of choices equal those of plain forward passes, whatever the bank has, and leave nothing of choices in it."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import KVCache, make_prompt_cache

from prefixbank import BankWarning, ConfigError, PrefixBank, PromptError, ScoreResult
from prefixbank.chunking import unpack_token_ids
from tests.model.test_kinds import ALL, RECURRENT
from tests.model.test_prompts import CHAT, SHOTS
from tests.model.tiny import FROM_DISK, build_model, build_tokenizer, random_ids

PROMPT = random_ids(70)
CHOICES = [
    [5],
    [5, 9, 11],  # one choice is a prefix of this one
    [5, 9, 12, 40, 41],
    [5, 9, 12, 40, 42, 43],
    [7, 8],
    [30, 31, 32, 33, 34, 35, 36],
    [44, 45, 46],
]
N_RUNS = 2 + 2 + 1 + 1 + 6 + 2
"""[5, 9], behind it [12, 40] and [42], and the others without their last tokens; the tokens that end a choice aren't
run."""


def score(llm: Any, prompt: Any, choices: Any, **options: Any) -> ScoreResult:
    return llm.score(prompt, choices, **options)


def score_many(llm: Any, prompts: Any, choices: Any, **options: Any) -> list[ScoreResult]:
    return llm.score_many(prompts, choices, **options)


def plain(model: Any, prompt: Sequence[int], choice: Sequence[int]) -> tuple[float, bool]:
    """Return the log-probability of token ids behind others by one forward pass over all, and whether it is greedy."""
    token_ids = mx.array([*prompt, *choice])[None]
    logits = model(token_ids, cache=make_prompt_cache(model))[0, len(prompt) - 1 : -1]
    log_probs = nn.log_softmax(logits.astype(mx.float32), axis=-1)
    targets = mx.array(choice)
    chosen = mx.take_along_axis(log_probs, targets[:, None], axis=-1)
    return chosen.sum().item(), bool((mx.argmax(logits, axis=-1) == targets).all().item())


def is_plain(model: Any, result: ScoreResult, prompt: Sequence[int], choices: Sequence[Sequence[int]]) -> bool:
    expected = [plain(model, prompt, choice) for choice in choices]
    np.testing.assert_allclose(result.log_probs, [log_prob for log_prob, _ in expected], atol=1e-4, rtol=0)
    assert result.is_greedy == [greedy for _, greedy in expected]
    assert result.best == int(np.argmax([log_prob for log_prob, _ in expected]))
    return True


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: build_model(name) for name in ALL}


@pytest.fixture
def open_bank(bank_root: Path) -> Iterator[Callable[..., PrefixBank]]:
    banks: list[PrefixBank] = []

    def open_it(**options: Any) -> PrefixBank:
        banks.append(PrefixBank.open(bank_root, chunk_tokens=16, load="always", durability="fast", **options))
        return banks[-1]

    yield open_it
    for bank in banks:
        bank.close()
    with PrefixBank.open(bank_root) as bank:
        assert bank.check(read_data=True).ok


@pytest.mark.parametrize("n_tokens", [1, 16, 24, 25, 70])
@pytest.mark.parametrize("name", ALL)
def test_log_probs_equal_a_plain_forward_pass_cold_from_disk_and_from_memory(
    name: str, n_tokens: int, models: dict[str, Any], tokenizer: Any, open_bank: Callable[..., PrefixBank]
) -> None:
    model, prompt = models[name], random_ids(n_tokens)
    bank = open_bank()
    llm = bank.attach(model, tokenizer)
    cold = score(llm, prompt, CHOICES)
    assert (cold.cached_tokens, cold.computed_tokens) == (0, n_tokens + N_RUNS)
    for source in ("memory", "disk", "memory again", "warmed"):
        if source == "disk":
            bank.flush()
            bank._session.memory.clear()
        if source == "warmed":
            llm.warm(prompt)
            if name in RECURRENT:
                llm.warm(prompt[:-1] or prompt)
        result = score(llm, prompt, CHOICES)
        assert is_plain(model, result, prompt, CHOICES)
        assert result.cached_tokens + result.computed_tokens == n_tokens + N_RUNS
        if n_tokens > 16 and not (name in RECURRENT and source == "disk"):  # no states were declared there
            assert result.cached_tokens >= (n_tokens - 1) // 16 * 16, source
    assert result.cached_tokens == n_tokens - 1
    assert is_plain(model, cold, prompt, CHOICES)


@pytest.mark.parametrize("name", ALL)
def test_choices_leave_nothing_in_the_bank_and_do_not_touch_the_kept_prefix(
    name: str, models: dict[str, Any], tokenizer: Any, open_bank: Callable[..., PrefixBank]
) -> None:
    bank = open_bank()
    llm = bank.attach(models[name], tokenizer)
    other = [[5, 9, 13, 14], [5, 9, 13, 15, 16], [100, 101]]
    # A single choice, and choices that all begin alike, are run behind the prompt in its own cache.
    for choices in (CHOICES, other, [[5, 9, 13, 14]], [[5, 9, 1], [5, 9, 2]], CHOICES):
        assert is_plain(models[name], score(llm, PROMPT, choices), PROMPT, choices)
    bank.flush()
    stored = [unpack_token_ids(chunk.token_ids) for chunk in bank.chunks()]
    assert sorted(map(tuple, stored)) == sorted(tuple(PROMPT[low : low + 16]) for low in range(0, 64, 16))
    assert all(
        PROMPT[: kept.n_tokens] == unpack_token_ids(kept.token_ids) for kept in bank._session.memory._kept.values()
    )
    longer = [*PROMPT, 5, 9, 1, 2]
    assert llm.match(longer).n_tokens <= len(PROMPT)
    cold = [r.token for r in stream_generate(models[name], tokenizer, longer, max_tokens=8)]
    assert [r.token for r in llm.stream_generate(longer, max_tokens=8)] == cold


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "llama4", "gemma3_text"])
def test_few_forward_passes_are_needed(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models[name]
    llm = small_bank.attach(model, tokenizer)
    llm.warm(PROMPT[:-1])
    shapes: list[tuple[int, ...]] = []
    call = type(model).__call__

    def counted(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        shapes.append(inputs.shape)
        return call(self, inputs, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", counted)
    singles = score(llm, PROMPT, [[n] for n in range(50)])
    assert shapes == [(1, 1)]
    assert (singles.cached_tokens, singles.computed_tokens) == (69, 1)
    shapes.clear()
    fifty = [[3, 4, n, n + 1, n + 2] for n in range(50)]
    result = score(llm, PROMPT, fifty)
    assert shapes == [(1, 1), (1, 2), (50, 2)]
    assert result.computed_tokens == 1 + 2 + 100
    shapes.clear()
    score(llm, PROMPT, CHOICES)
    assert sorted(shapes) == sorted([(1, 1), (3, 6), (1, 2), (1, 2), (1, 1)])
    monkeypatch.undo()
    assert is_plain(model, singles, PROMPT, [[n] for n in range(50)])
    assert is_plain(model, result, PROMPT, fifty)


def test_lent_cache_is_run_on_without_a_copy_and_nobody_else_has_it_meanwhile(
    llama: Any, tokenizer: Any, open_bank: Callable[..., PrefixBank], monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefixbank import weighing

    bank = open_bank()
    llm = bank.attach(llama, tokenizer)
    llm.warm(PROMPT[:-1])
    descend, n_kept = weighing.ChoiceWeights._descend, []

    def watched(self: Any, *args: Any) -> None:
        n_kept.append(len(bank._session.memory._kept))
        descend(self, *args)

    monkeypatch.setattr(weighing.ChoiceWeights, "_descend", watched)
    monkeypatch.setattr(weighing, "copy", None)
    for choices in ([[1, 2, 3]], [[1, 2, 3], [1, 2, 4]], [[1, 2, 3], [2, 3]]):
        score(llm, PROMPT, choices)
        assert len(bank._session.memory._kept) == 1
    assert set(n_kept) == {0}


def test_batches_stay_within_their_bytes_and_long_choices_are_run_in_steps(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = [random_ids(n, seed=n) for n in (40, 41, 42, 43, 44, 45)]
    choices += [choices[0][:25], choices[3][:3]]
    llm.warm(PROMPT)
    for n_bytes in (1, 1 << 18, 1 << 30):
        monkeypatch.setattr("prefixbank.weighing.BATCH_BYTES", n_bytes)
        for step in (1, 7, 40, None):
            assert is_plain(llm.model, score(llm, PROMPT, choices, prefill_step_size=step), PROMPT, choices)


def test_caches_that_can_not_be_widened_are_run_one_by_one(tokenizer: Any, small_bank: PrefixBank) -> None:
    class StrangeCache(KVCache):
        pass

    model = build_model()
    object.__setattr__(model, "make_cache", lambda: [StrangeCache() for _ in model.layers])
    with pytest.warns(BankWarning, match="StrangeCache"):
        llm = small_bank.attach(model, tokenizer)
        for _ in range(2):
            result = score(llm, PROMPT, CHOICES)
            assert is_plain(model, result, PROMPT, CHOICES)
            assert (result.cached_tokens, result.computed_tokens) == (0, 70 + N_RUNS)
    assert small_bank.chunks() == []


@pytest.mark.parametrize("start", [0, 40, 71, 72, 200])
def test_quantised_caches_score_as_they_do_without_a_bank(start: int, tokenizer: Any, small_bank: PrefixBank) -> None:
    from mlx_lm.models import llama

    mx.random.seed(0)
    args = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 320, "head_dim": 32}
    model = llama.Model(
        llama.ModelArgs(model_type="llama", num_attention_heads=2, num_key_value_heads=2, rms_norm_eps=1e-5, **args)
    )
    mx.eval(model.parameters())
    settings = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    llm = small_bank.attach(model, tokenizer, **settings)
    singles = [score(llm, PROMPT, [choice]) for choice in CHOICES]
    for _ in range(2):
        together = score(llm, PROMPT, CHOICES)
        np.testing.assert_allclose(together.log_probs, [one.log_probs[0] for one in singles], atol=0.02)
        np.testing.assert_allclose(together.log_probs, [plain(model, PROMPT, c)[0] for c in CHOICES], atol=0.05)


@pytest.mark.parametrize("max_kv_size", [20, 32, 200])
def test_window_given_by_the_user_keeps_its_first_rows(
    max_kv_size: int, llama: Any, tokenizer: Any, small_bank: PrefixBank
) -> None:
    llm = small_bank.attach(llama, tokenizer, max_kv_size=max_kv_size, prefill_step_size=16)
    singles = [score(llm, PROMPT, [choice]).log_probs[0] for choice in CHOICES]
    np.testing.assert_allclose(score(llm, PROMPT, CHOICES).log_probs, singles, atol=1e-4)


def test_greedy_choice_is_what_generate_writes(llm: Any) -> None:
    for seed in range(6):
        prompt = random_ids(30, seed=seed)
        answer = [r.token for r in stream_generate(llm.model, llm.tokenizer, prompt, max_tokens=6)]
        wrong = [*answer[:4], (answer[4] + 1) % 300, answer[5]]
        first = (answer[0] + 1) % 300
        right = next(stream_generate(llm.model, llm.tokenizer, [*prompt, first], max_tokens=1)).token
        result = score(llm, prompt, [answer, wrong, answer[:3], [first], [first, right]])
        assert result.is_greedy == [True, False, True, False, False]


def test_full_chunks_of_plain_prompts_are_stored_to_the_end(llm: Any, small_bank: PrefixBank) -> None:
    score(llm, random_ids(64), CHOICES)
    small_bank.flush()
    assert sum(chunk.n_tokens for chunk in small_bank.chunks()) == 64


# --- texts


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


# --- normalisation and calibration


def test_scores_are_normalised_by_length(llm: Any) -> None:
    choices = [" positive", " negative and long", " é"]
    prompt = "review: the lamp\nsentiment:"
    raw = score(llm, prompt, choices)
    assert raw.scores == raw.log_probs
    for unit, lengths in (
        ("tokens", raw.n_tokens),
        ("characters", [9, 18, 2]),
        ("bytes", [9, 18, 3]),
    ):
        result = score(llm, prompt, choices, normalise=unit)
        np.testing.assert_allclose(result.log_probs, raw.log_probs, atol=1e-4)
        np.testing.assert_allclose(result.scores, np.array(raw.log_probs) / lengths, atol=1e-4)
        shares = np.exp(np.array(result.scores))
        np.testing.assert_allclose(result.probabilities, shares / shares.sum(), atol=1e-6)
        assert result.best == int(np.argmax(result.scores))
    with pytest.raises(ConfigError, match="normalise='words'"):
        score(llm, prompt, choices, normalise="words")
    with pytest.raises(ConfigError, match="normalise='words'"):
        score_many(llm, [prompt], choices, normalise="words")


@pytest.mark.parametrize("unit", ["none", "tokens"])
def test_calibration_divides_by_the_mean_of_content_free_probabilities(unit: Any, llm: Any) -> None:
    choices = [" positive", " negative", " neither"]
    blanks = [SHOTS.render(blank) for blank in ("N/A", "", "[MASK]")]

    def shares(prompt: Any) -> Any:
        values = np.exp(np.array(score(llm, prompt, choices, normalise=unit).scores))
        return values / values.sum()

    prompt = SHOTS.render("a dull film")
    for given in (blanks[0], blanks[:1], blanks, tuple(blanks)):
        used = given if isinstance(given, list | tuple) else [given]
        free = np.mean([shares(blank) for blank in used], axis=0)
        expected = shares(prompt) / free
        expected /= expected.sum()
        result = score(llm, prompt, choices, normalise=unit, calibrate=given)
        np.testing.assert_allclose(result.probabilities, expected, atol=1e-5)
        np.testing.assert_allclose(result.scores, np.log(expected), atol=1e-4)
        assert result.best == int(np.argmax(expected))
    itself = score(llm, prompt, choices, calibrate=prompt)
    np.testing.assert_allclose(itself.probabilities, [1 / 3] * 3, atol=1e-5)


def test_content_free_prompts_may_be_of_any_form(llm: Any) -> None:
    ids = llm.encode("N/A")
    chat = [{"role": "user", "content": "N/A"}]
    expected = score(llm, PROMPT, CHOICES, calibrate=ids).scores
    for given in ("N/A", [ids], ["N/A"], mx.array(ids), np.array(ids), [ids, ids]):
        np.testing.assert_allclose(score(llm, PROMPT, CHOICES, calibrate=given).scores, expected, atol=1e-4)
    one, several = (score(llm, PROMPT, CHOICES, calibrate=given).scores for given in (chat, [chat, chat]))
    np.testing.assert_allclose(one, several, atol=1e-4)
    for bad in ([], SHOTS, 7):
        with pytest.raises(PromptError, match="calibrate must be"):
            score(llm, PROMPT, CHOICES, calibrate=bad)
    with pytest.raises(PromptError, match="calibrate 1: the prompt is empty"):
        score(llm, PROMPT, CHOICES, calibrate=["N/A", ""])
    with pytest.raises(PromptError, match="calibrate 0: the prompt is empty"):
        score_many(llm, [PROMPT], CHOICES, calibrate="")


def test_improbable_long_choices_do_not_break_calibration(llm: Any) -> None:
    choices = [[1], random_ids(300), random_ids(200, seed=2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = score(llm, PROMPT, choices, calibrate=[random_ids(10, seed=5), random_ids(12, seed=6)])
    assert np.isfinite(result.scores).all()
    assert np.isclose(sum(result.probabilities), 1)


# --- many prompts


@pytest.mark.parametrize("name", ALL)
def test_many_prompts_equal_one_by_one_and_compute_shared_runs_once(
    name: str, models: dict[str, Any], tokenizer: Any, open_bank: Callable[..., PrefixBank]
) -> None:
    model = models[name]
    shared, other = random_ids(60), random_ids(50, seed=9)
    prompts = [(other if n % 2 else shared) + random_ids(6 + n, seed=20 + n) for n in range(8)] + [
        random_ids(40, seed=40)
    ]
    bank = open_bank()
    llm = bank.attach(model, tokenizer)
    seen: list[tuple[int, int]] = []
    results = score_many(llm, prompts, CHOICES, progress=lambda *done: seen.append(done))
    assert seen == [(n, 9) for n in range(1, 10)]
    for prompt, result in zip(prompts, results, strict=True):
        assert is_plain(model, result, prompt, CHOICES)
    tails = sum(6 + n for n in range(8)) + 40
    assert sum(r.computed_tokens for r in results) == 60 + 50 + tails + 9 * N_RUNS
    bank.flush()
    stored = {tuple(unpack_token_ids(chunk.token_ids)) for chunk in bank.chunks()}
    known = {tuple(run[low : low + 16]) for run in (shared, other) for low in range(0, 64, 16)}
    assert stored == known - {()}, "what only one prompt has is not stored"


def test_many_prompts_without_memory_work_from_disk(llm: Any) -> None:
    prompts = [SHOTS.render(query) for query in ("a great soup", "the film", "my bike", "the film")]
    choices = [" positive", " negative"]
    n_shared = len(llm.shared_token_ids(SHOTS))
    results = score_many(llm, prompts, choices)
    n_whole = len(llm.encode(prompts[1]))  # the same prompt again leaves its last token to compute
    assert sorted(r.cached_tokens for r in results) == [0, n_shared, n_shared, n_whole - 1]
    for prompt, result in zip(prompts, results, strict=True):
        np.testing.assert_allclose(result.log_probs, score(llm, prompt, choices).log_probs, atol=1e-4)


def test_choices_may_be_given_for_each_prompt(llm: Any) -> None:
    prompts = [random_ids(20, seed=seed) for seed in range(3)]
    for choices in (
        [[" a", " b"], [" the lamp"], [" positive", " zip", " 7"]],
        [[[1], [2, 3]], [[4]], [[5, 6], [7], [8]]],
    ):
        results = score_many(llm, prompts, choices)
        for prompt, own, result in zip(prompts, choices, results, strict=True):
            assert result.log_probs == pytest.approx(score(llm, prompt, own).log_probs, abs=1e-4)
    for shared in ([[1], [2, 3]], [" a", " b"], [np.array([1]), [2]]):
        results = score_many(llm, iter(prompts), shared)
        assert [len(r.choices) for r in results] == [2, 2, 2]
    assert score_many(llm, [], [" a"]) == []


def test_content_free_prompts_are_scored_once_for_the_same_choices(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixbank.weighing import ChoiceWeights

    prompts = [SHOTS.render(query) for query in ("a great soup", "the film", "my bike")]
    blanks = [SHOTS.render("N/A"), SHOTS.render("")]
    own = [[" positive", " negative"], [" good", " bad"], [" positive", " negative"]]
    expected = [score(llm, prompt, c, calibrate=blanks).scores for prompt, c in zip(prompts, own, strict=True)]
    make, n_made = ChoiceWeights.__init__, 0

    def counted(self: Any, *given: Any) -> None:
        nonlocal n_made
        n_made += 1
        make(self, *given)

    monkeypatch.setattr(ChoiceWeights, "__init__", counted)
    for result, scores in zip(score_many(llm, prompts, own, calibrate=blanks), expected, strict=True):
        np.testing.assert_allclose(result.scores, scores, atol=1e-4)
    assert n_made == 3 + 2 * 2


# --- bad input, broken banks, threads


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


def test_broken_bank_costs_only_the_hit(bank_root: Path, llama: Any, tokenizer: Any) -> None:
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16) as bank:
        llm = bank.attach(llama, tokenizer)
        llm.warm(PROMPT)
        victim = next(chunk for chunk in bank.chunks() if chunk.start == 32)
        assert victim.file_name is not None
        (bank.root / "shards" / victim.file_name[:2] / victim.file_name).unlink()
        with pytest.warns(BankWarning, match="gone"):
            result = score(llm, PROMPT, CHOICES)
        assert result.cached_tokens == 32
        assert is_plain(llama, result, PROMPT, CHOICES)
        bank.flush()
        assert score(llm, PROMPT, CHOICES).cached_tokens == 69
        shutil.rmtree(bank.root)
        with pytest.warns(BankWarning):
            results = score_many(llm, [PROMPT, random_ids(50, seed=3)], CHOICES)
        assert is_plain(llama, results[0], PROMPT, CHOICES)
        assert is_plain(llama, results[1], random_ids(50, seed=3), CHOICES)
        with pytest.warns(BankWarning, match="gone"):
            bank.close()


def test_read_only_bank_serves_and_is_not_written_to(bank_root: Path, llama: Any, tokenizer: Any) -> None:
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16) as bank:
        bank.attach(llama, tokenizer).warm(PROMPT[:40])
    with PrefixBank.open(bank_root, **FROM_DISK, read_only=True) as bank:
        result = score(bank.attach(llama, tokenizer), PROMPT, CHOICES)
        assert result.cached_tokens == 40
        assert is_plain(llama, result, PROMPT, CHOICES)
        assert len(bank.chunks()) == 3


def test_scores_are_counted_among_the_banks_tokens(llm: Any, small_bank: PrefixBank) -> None:
    score(llm, PROMPT, CHOICES)
    score(llm, PROMPT, CHOICES)
    counts = small_bank.stats().session
    assert (counts["cached_tokens"], counts["computed_tokens"]) == (64, 70 + 6 + 2 * N_RUNS)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_threads_score_behind_one_prefix_at_once(
    name: str,
    models: dict[str, Any],
    tokenizer: Any,
    open_bank: Callable[..., PrefixBank],
) -> None:
    model = models[name]
    llm = open_bank().attach(model, tokenizer)
    llm.warm(PROMPT)
    prompts = [PROMPT + random_ids(n, seed=n) for n in (0, 3, 5)]
    expected = {n: [plain(model, prompt, choice)[0] for choice in CHOICES] for n, prompt in enumerate(prompts)}
    wrong: list[Any] = []

    def work(first: int) -> None:
        try:
            for n in range(first, first + 9):
                found = score(llm, prompts[n % 3], CHOICES).log_probs
                if not np.allclose(found, expected[n % 3], atol=1e-4, rtol=0):
                    wrong.append((n, found))
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
