"""Generating from the bank: what is reported, what processors see, what is stored."""

from __future__ import annotations

import warnings
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate
from mlx_lm.models.cache import ConcatenateKVCache, KVCache

from prefixbank import (
    BankWarning,
    ConfigError,
    Example,
    FewShotPrompt,
    PrefixBank,
    PromptError,
    UnsupportedCacheError,
    register_cache_kind,
)
from prefixbank.kvcache.kinds import KVCacheKind
from tests.model.tiny import FROM_DISK, build_model, random_ids

SHOTS = FewShotPrompt(
    instructions="Say whether the review is positive.",
    examples=(Example("the lamp is lovely", "positive"), Example("the zip broke", "negative")),
    input_label="review: ",
    output_label="sentiment: ",
)


def cold(llm: Any, prompt: list[int], **options: Any) -> str:
    return generate(llm.model, llm.tokenizer, prompt, **options)


@pytest.mark.parametrize("n_tokens", [1, 2, 15, 16, 17, 31, 32, 33, 64])
def test_exact_repeat_leaves_one_token_to_compute(n_tokens: int, llm: Any) -> None:
    prompt = random_ids(n_tokens)
    llm.warm(prompt)
    for _ in range(2):
        again = llm.generate(prompt, max_tokens=5)
        assert (again.cached_tokens, again.computed_tokens) == (n_tokens - 1, 1)
        assert again.text == cold(llm, prompt, max_tokens=5)


def test_plain_prompts_store_full_chunks_only(llm: Any, small_bank: PrefixBank) -> None:
    prompt = random_ids(50)
    first = llm.generate(prompt, max_tokens=3)
    assert (first.cached_tokens, first.computed_tokens) == (0, 50)
    assert sorted(c.n_tokens for c in small_bank.chunks()) == [16, 16, 16]
    assert llm.generate(prompt, max_tokens=3).cached_tokens == 48


def test_rendered_prompts_store_up_to_the_end_of_the_shots(llm: Any, small_bank: PrefixBank) -> None:
    shared = llm.shared_token_ids(SHOTS)
    first = llm.generate(SHOTS.render("great soup"), max_tokens=3)
    second = llm.generate(SHOTS.render("a dull film"), max_tokens=3)
    assert (first.cached_tokens, second.cached_tokens) == (0, len(shared))
    assert sum(c.n_tokens for c in small_bank.chunks()) == len(shared)


def test_repeat_writes_nothing(llm: Any, small_bank: PrefixBank) -> None:
    llm.warm(SHOTS, name="shots")
    llm.generate(SHOTS.render("great soup"), max_tokens=3)
    before = small_bank.stats().session["written_bytes"]
    files = sorted(small_bank.root.rglob("*.safetensors"))
    for _ in range(3):
        llm.warm(SHOTS, name="shots")
        llm.generate(SHOTS.render("great soup"), max_tokens=3)
    assert small_bank.stats().session["written_bytes"] == before
    assert sorted(small_bank.root.rglob("*.safetensors")) == files


def test_keep_lets_a_conversation_go_on_from_the_bank(llm: Any) -> None:
    prompt = random_ids(30)
    first = llm.generate(prompt, max_tokens=10, keep=True)
    follow_up = prompt + first.token_ids + random_ids(5, seed=8)
    second = llm.generate(follow_up, max_tokens=5)
    assert second.cached_tokens >= len(prompt) + len(first.token_ids) - 1
    assert second.text == cold(llm, follow_up, max_tokens=5)


def test_hold_back_computes_the_last_tokens(llm: Any) -> None:
    prompt = random_ids(60)
    llm.warm(prompt)
    result = llm.generate(prompt, max_tokens=4, hold_back=25)
    assert (result.cached_tokens, result.computed_tokens) == (35, 25)
    assert result.text == cold(llm, prompt, max_tokens=4)
    assert llm.resolve(prompt, hold_back=100).rest == prompt
    assert llm.prefill(prompt, hold_back=10).rest == prompt[-10:]
    with pytest.raises(ConfigError, match="hold_back"):
        llm.resolve(prompt, hold_back=-1)


def test_hold_back_also_holds_for_what_is_stored(llm: Any, small_bank: PrefixBank) -> None:
    llm.generate(random_ids(64), max_tokens=2, hold_back=20)
    assert sum(c.n_tokens for c in small_bank.chunks()) == 32


def test_warm_can_hold_tokens_back(llm: Any, small_bank: PrefixBank) -> None:
    prompt = random_ids(60)
    warmed = llm.warm(prompt, name="but ten", hold_back=10, reserve=100)
    assert (warmed.n_tokens, warmed.stored_tokens) == (50, 50)
    assert small_bank.prefixes("but ten")[0].n_tokens == 50
    assert llm.match(prompt).n_tokens == 50
    with pytest.raises(PromptError, match="held back"):
        llm.warm(prompt, hold_back=60)
    with pytest.raises(ConfigError, match="hold_back"):
        llm.warm(prompt, hold_back=-1)


def test_logits_processors_see_all_token_ids(llm: Any) -> None:
    prompt = random_ids(50)
    seen: list[list[int]] = []

    def processor(token_ids: mx.array, logits: mx.array) -> mx.array:
        seen.append(token_ids.tolist())
        return logits

    llm.warm(prompt[:40])
    result = llm.generate(prompt, max_tokens=4, logits_processors=[processor])
    assert result.cached_tokens == 40
    assert seen[0] == prompt
    assert seen[2] == prompt + result.token_ids[:2]


def test_progress_counts_the_whole_prompt(llm: Any) -> None:
    prompt = random_ids(50)
    llm.warm(prompt[:40])
    seen: list[tuple[int, int]] = []
    llm.generate(prompt, max_tokens=2, progress=lambda *done: seen.append(done))
    assert seen[0] == (40, 50)
    assert seen[-1] == (50, 50)


def test_prompt_cache_is_given_on_request(llm: Any) -> None:
    prompt = random_ids(20)
    assert llm.generate(prompt, max_tokens=3).prompt_cache is None
    result = llm.generate(prompt, max_tokens=3, return_prompt_cache=True)
    assert result.prompt_cache is not None
    assert result.prompt_cache[0].offset >= 22


def test_time_to_first_token_is_reported_with_every_response(llm: Any) -> None:
    responses = list(llm.stream_generate(random_ids(20), max_tokens=4))
    assert len({r.ttft_s for r in responses}) == 1
    assert responses[0].ttft_s > 0
    assert [r.generation_tokens for r in responses] == [1, 2, 3, 4]
    assert responses[-1].finish_reason == "length"


def test_stream_that_is_left_early_still_stores_the_prompt(llm: Any, small_bank: PrefixBank) -> None:
    stream = llm.stream_generate(random_ids(40), max_tokens=50)
    next(stream)
    stream.close()
    assert sum(c.n_tokens for c in small_bank.chunks()) == 32


def test_failed_generation_stores_nothing(llm: Any, small_bank: PrefixBank) -> None:
    def broken(token_ids: mx.array, logits: mx.array) -> mx.array:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(random_ids(40), max_tokens=5, logits_processors=[broken])
    assert small_bank.chunks() == []


def test_end_of_sequence_is_not_part_of_the_answer(llm: Any) -> None:
    eos = llm.tokenizer.eos_token_id

    def stop_at_once(token_ids: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) == eos, 1e9, logits)

    result = llm.generate(random_ids(10), max_tokens=5, logits_processors=[stop_at_once])
    assert (result.token_ids, result.text, result.finish_reason) == ([], "", "stop")


def test_bad_options_are_refused_before_anything_runs(llm: Any, small_bank: PrefixBank) -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        llm.generate([1, 2], max_tokens=0)
    with pytest.raises(ConfigError, match="temperature"):
        llm.stream_generate([1, 2], temperature=1)
    with pytest.raises(ConfigError, match="quantized_kv_start"):
        small_bank.attach(llm.model, llm.tokenizer, kv_bits=4, quantized_kv_start=-1)
    with pytest.raises(ConfigError, match="kv_bit"):
        small_bank.attach(llm.model, llm.tokenizer, kv_bit=4)


@pytest.mark.parametrize("prompt", ["", [], [-1], [1.5], [2**32], None, 7], ids=repr)
def test_unusable_prompts_are_refused(prompt: Any, llm: Any) -> None:
    with pytest.raises(PromptError):
        llm.generate(prompt, max_tokens=3)


class StrangeCache(KVCache):
    """A cache class that nobody registered: even what inherits from a known one may hold other state."""


def test_unsupported_cache_is_said_once_and_generation_goes_on(small_bank: PrefixBank, tokenizer: Any) -> None:
    model = build_model()
    object.__setattr__(model, "make_cache", lambda: [StrangeCache() for _ in model.layers])
    prompt = random_ids(60)
    text = generate(model, tokenizer, prompt, max_tokens=6)
    with pytest.warns(BankWarning, match="StrangeCache") as caught:
        llm = small_bank.attach(model, tokenizer)
        assert llm.generate(prompt, max_tokens=6).text == text
        result = llm.generate(prompt, max_tokens=6)
        with llm.checkout(prompt) as lease:
            assert lease.rest == prompt
        assert llm.prefill(prompt).computed_tokens == 59
    assert len(caught) == 1
    assert (result.text, result.cached_tokens, result.match.reason) == (text, 0, "unsupported")
    assert small_bank.stats().unsupported["StrangeCache"] >= 2
    with pytest.raises(UnsupportedCacheError, match="StrangeCache"):
        llm.warm(prompt)
    assert small_bank.chunks() == []


def test_registered_cache_class_of_a_third_party_is_stored(small_bank: PrefixBank, tokenizer: Any) -> None:
    class OwnCache(KVCache):
        pass

    class OwnCacheKind(KVCacheKind):
        name = "own-kv"
        cache_class = OwnCache

    model = build_model()
    object.__setattr__(model, "make_cache", lambda: [OwnCache() for _ in model.layers])
    register_cache_kind(OwnCacheKind())
    llm = small_bank.attach(model, tokenizer)
    prompt = random_ids(40)
    cold = generate(model, tokenizer, prompt, max_tokens=6)
    llm.warm(prompt)
    assert type(llm.resolve(prompt).prompt_cache[0]) is OwnCache
    assert llm.generate(prompt, max_tokens=6).text == cold
    with pytest.raises(UnsupportedCacheError, match="no RowKind"):
        register_cache_kind(object())  # type: ignore[arg-type]


def test_larger_than_the_budget_is_refused_with_a_warning(bank_root: Any, llama: Any, tokenizer: Any) -> None:
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16, max_bytes="30kB") as bank:
        llm = bank.attach(llama, tokenizer)
        with pytest.warns(BankWarning, match="budget"):
            warmed = llm.warm(random_ids(200), name="large")
        assert warmed.stored_tokens < 200
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prompt = random_ids(16, seed=3)
            llm.warm(prompt, name="small")
        assert llm.match([*prompt, 1]).n_tokens == 16
        assert bank.stats().disk_bytes <= 30_000


def test_draft_model_works_from_the_bank_in_its_own_namespace(llm: Any, small_bank: PrefixBank) -> None:
    draft = small_bank.attach(build_model(seed=7), llm.tokenizer)
    shared = random_ids(40)
    prompts = [shared + random_ids(8, seed=seed) for seed in range(3)]
    for n_prompt, prompt in enumerate(prompts):
        cold = generate(llm.model, llm.tokenizer, prompt, max_tokens=12)
        result = llm.generate(prompt, max_tokens=12, draft_model=draft, num_draft_tokens=3)
        assert result.text == cold
        assert result.cached_tokens == (40 if n_prompt else 0)
    assert draft.match(prompts[0]).n_tokens == 47
    assert {usage.n_chunks for usage in small_bank.namespaces()} == {3 * 1 + 2}
    # Where the two know different lengths, both go on from the shorter one.
    llm.warm(prompts[0])
    result = llm.generate(prompts[0], max_tokens=12, draft_model=draft, logits_processors=[lambda ids, logits: logits])
    assert result.text == generate(llm.model, llm.tokenizer, prompts[0], max_tokens=12)


def test_draft_model_sees_to_it_that_processors_get_all_tokens(llm: Any, small_bank: PrefixBank) -> None:
    draft = small_bank.attach(build_model(seed=7), llm.tokenizer)
    prompt = random_ids(40)
    seen: list[list[int]] = []

    def processor(token_ids: mx.array, logits: mx.array) -> mx.array:
        seen.append(token_ids.tolist())
        return logits

    llm.warm(prompt[:30])
    llm.generate(prompt, max_tokens=3, draft_model=draft, logits_processors=[processor])
    assert all(token_ids[:40] == prompt for token_ids in seen)


def test_draft_model_without_bank_and_caches_that_can_not_be_trimmed_are_refused(
    llm: Any, small_bank: PrefixBank
) -> None:
    with pytest.raises(ConfigError, match="BankedModel"):
        llm.generate([1, 2, 3], draft_model=llm.model)
    concatenating = build_model()
    object.__setattr__(concatenating, "make_cache", lambda: [ConcatenateKVCache() for _ in concatenating.layers])
    for model in (build_model("llama_sliding"), build_model("llama4"), concatenating):
        draft = small_bank.attach(model, llm.tokenizer)
        with pytest.raises(ConfigError, match="trimmed"):
            llm.generate([1, 2, 3], draft_model=draft)
