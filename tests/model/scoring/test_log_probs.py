"""Log-probabilities of choices equal those of plain forward passes, in few passes, and leave nothing in the bank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import KVCache

from prefixbank import BankWarning, PrefixBank
from prefixbank.chunking import unpack_token_ids
from tests.model.scoring.plainscores import CHOICES, N_RUNS, PROMPT, is_plain, plain, score
from tests.model.test_kinds import ALL, RECURRENT
from tests.model.tiny import build_model, random_ids


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
