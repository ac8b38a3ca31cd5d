"""A hit is what a cold run would be: restored KV bit for bit, texts and log-probabilities alike."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import batch_generate, generate, stream_generate
from mlx_lm.models.cache import ConcatenateKVCache, make_prompt_cache

from prefixbank import PrefixBank
from prefixbank.kvcache.kinds import kind_of
from tests.model.tiny import FROM_DISK, build_model, random_ids

MODELS = ["llama", "deepseek_v3"]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def rows(prompt_cache: list[Any], n_tokens: int) -> list[mx.array]:
    """Return the first rows of every array of a prompt cache, as bits."""
    return [
        array[..., :n_tokens, :].view(mx.uint8)
        for layer_cache in prompt_cache
        for array in kind_of(layer_cache).rows(layer_cache).values()
    ]


def same_bits(left: list[Any], right: list[Any], n_tokens: int) -> bool:
    pairs = zip(rows(left, n_tokens), rows(right, n_tokens), strict=True)
    return all(mx.array_equal(a, b).item() for a, b in pairs)


def live_cache(model: Any, token_ids: list[int], cache_class: type | None = None) -> list[Any]:
    prompt_cache = make_prompt_cache(model) if cache_class is None else [cache_class() for _ in model.layers]
    model(mx.array(token_ids)[None], cache=prompt_cache)
    mx.eval([layer_cache.state for layer_cache in prompt_cache])
    return prompt_cache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_restored_kv_is_bit_identical_to_what_was_stored(
    name: str, dtype: mx.Dtype, small_bank: PrefixBank, tokenizer: Any
) -> None:
    model = build_model(name, dtype=dtype)
    llm = small_bank.attach(model, tokenizer)
    token_ids = random_ids(45)
    stored = live_cache(model, token_ids)
    assert llm.put(token_ids, stored).n_tokens == 45
    for n_asked in (1, 15, 16, 17, 32, 44, 45):
        resolved = llm.resolve([*token_ids[:n_asked], 7])
        assert resolved.match.n_tokens == n_asked
        assert all(layer_cache.offset == n_asked for layer_cache in resolved.prompt_cache)
        assert same_bits(stored, resolved.prompt_cache, n_asked)


@pytest.mark.parametrize("kv_bits", [4, 8])
def test_restored_quantised_kv_is_bit_identical(kv_bits: int, small_bank: PrefixBank, tokenizer: Any) -> None:
    # Groups of 32 need heads at least that wide.
    from mlx_lm.models import llama

    args = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 320}
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama", num_attention_heads=2, num_key_value_heads=2, rms_norm_eps=1e-5, head_dim=32, **args
        )
    )
    mx.eval(model.parameters())
    llm = small_bank.attach(model, tokenizer, kv_bits=kv_bits, kv_group_size=32)
    token_ids = random_ids(40)
    first = llm.prefill(token_ids)
    again = llm.prefill(token_ids)
    assert type(first.prompt_cache[0]).__name__ == "QuantizedKVCache"
    assert (first.cached_tokens, again.cached_tokens) == (0, 39)
    assert same_bits(first.prompt_cache, again.prompt_cache, 39)
    cold = generate(model, llm.tokenizer, token_ids, max_tokens=12, kv_bits=kv_bits, kv_group_size=32,
                    quantized_kv_start=0, prefill_step_size=2048)  # fmt: skip
    assert llm.generate(token_ids, max_tokens=12).text == cold


def test_concatenate_cache_is_restored_without_rows_behind_the_prefix(
    llama: Any, tokenizer: Any, tmp_path: Any
) -> None:
    llama_with_own_cache = build_model()
    object.__setattr__(
        llama_with_own_cache, "make_cache", lambda: [ConcatenateKVCache() for _ in llama_with_own_cache.layers]
    )
    with PrefixBank.open(tmp_path / "bank", **FROM_DISK, chunk_tokens=16) as bank:
        llm = bank.attach(llama_with_own_cache, tokenizer)
        token_ids = random_ids(40)
        stored = live_cache(llama_with_own_cache, token_ids, ConcatenateKVCache)
        llm.put(token_ids, stored)
        resolved = llm.resolve(token_ids[:21])
        assert type(resolved.prompt_cache[0]) is ConcatenateKVCache
        assert resolved.prompt_cache[0].keys.shape[2] == 20
        assert same_bits(stored, resolved.prompt_cache, 20)
        assert llm.generate(token_ids, max_tokens=8).text == generate(llama, llm.tokenizer, token_ids, max_tokens=8)


def test_ten_tokens_are_stored_as_ten_rows(llm: Any, small_bank: PrefixBank) -> None:
    token_ids = random_ids(10)
    llm.put(token_ids, live_cache(llm.model, token_ids))
    (chunk,) = small_bank.chunks()
    assert chunk.n_tokens == 10
    assert chunk.n_bytes - chunk.data_offset == 10 * llm.layout.token_bytes


def test_put_stores_no_more_tokens_than_the_cache_holds(llm: Any) -> None:
    token_ids = random_ids(60)
    prompt_cache = live_cache(llm.model, token_ids[:40])
    assert llm.put(token_ids, prompt_cache).n_tokens == 40
    assert llm.match(token_ids).n_tokens == 40
    assert llm.put(token_ids[:30], prompt_cache).n_tokens == 30
    assert llm.put(token_ids, make_prompt_cache(llm.model)).n_tokens == 0


@pytest.mark.parametrize("name", MODELS)
def test_text_and_log_probabilities_of_hit_and_cold_agree_on_200_pairs(
    name: str, small_bank: PrefixBank, tokenizer: Any
) -> None:
    model = build_model(name)
    llm = small_bank.attach(model, tokenizer)
    pick = random.Random(5)
    n_hits = 0
    for n_pair in range(200 if name == "llama" else 40):
        shared = random_ids(pick.randint(1, 90), seed=n_pair % 20)
        prompt = shared + random_ids(pick.randint(1, 30), seed=1000 + n_pair)
        llm.put(shared, live_cache(model, shared))
        cold = list(stream_generate(model, llm.tokenizer, prompt, max_tokens=8))
        hit = list(llm.stream_generate(prompt, max_tokens=8))
        assert [r.token for r in hit] == [r.token for r in cold]
        assert "".join(r.text for r in hit) == "".join(r.text for r in cold)
        for ours, theirs in zip(hit, cold, strict=True):
            assert mx.abs(ours.logprobs - theirs.logprobs).max().item() < 1e-4
        assert hit[0].cached_tokens >= len(shared)
        assert hit[0].cached_tokens + hit[0].computed_tokens == len(prompt) == hit[0].prompt_tokens
        n_hits += 1
    assert n_hits >= 40


def test_first_200_of_300_stored_tokens_serve_another_suffix(llm: Any) -> None:
    token_ids = random_ids(300)
    llm.put(token_ids, live_cache(llm.model, token_ids))
    prompt = token_ids[:200] + random_ids(20, seed=9)
    hit = llm.generate(prompt, max_tokens=8)
    assert hit.cached_tokens == 200
    assert hit.text == generate(llm.model, llm.tokenizer, prompt, max_tokens=8)


def test_mid_chunk_resume_ignores_the_rows_behind_it(llm: Any) -> None:
    """The last chunk is read whole; what lies behind the match must not be seen by later steps."""
    token_ids = random_ids(64)
    llm.put(token_ids, live_cache(llm.model, token_ids))
    for n_shared in (49, 50, 55, 62):
        prompt = token_ids[:n_shared] + random_ids(3, seed=n_shared)
        hit = llm.generate(prompt, max_tokens=40)
        assert hit.cached_tokens == n_shared
        assert hit.text == generate(llm.model, llm.tokenizer, prompt, max_tokens=40)


def test_resolved_caches_work_in_mlx_lm_generate_stream_and_batch(llm: Any) -> None:
    shared = random_ids(50)
    prompts = [shared + random_ids(n, seed=n) for n in (3, 9, 5)]
    llm.put(shared, live_cache(llm.model, shared))
    cold = [generate(llm.model, llm.tokenizer, prompt, max_tokens=6) for prompt in prompts]

    resolved = [llm.resolve(prompt) for prompt in prompts]
    direct = [generate(llm.model, llm.tokenizer, r.rest, prompt_cache=r.prompt_cache, max_tokens=6) for r in resolved]
    assert direct == cold

    one = llm.resolve(prompts[0])
    pieces = stream_generate(llm.model, llm.tokenizer, one.rest, prompt_cache=one.prompt_cache, max_tokens=6)
    assert "".join(piece.text for piece in pieces) == cold[0]

    resolved = [llm.resolve(prompt) for prompt in prompts]
    batch = batch_generate(
        llm.model,
        llm.tokenizer,
        [r.rest for r in resolved],
        prompt_caches=[r.prompt_cache for r in resolved],
        max_tokens=6,
        return_token_ids=True,
    )
    alone = [[r.token for r in stream_generate(llm.model, llm.tokenizer, p, max_tokens=6)] for p in prompts]
    assert batch.token_ids == alone


def test_using_one_resolved_cache_leaves_the_next_one_as_it_was(llm: Any) -> None:
    token_ids = random_ids(40)
    llm.put(token_ids, live_cache(llm.model, token_ids))
    prompt = [*token_ids, 5]
    first = llm.resolve(prompt)
    second = llm.resolve(prompt)
    generate(llm.model, llm.tokenizer, [5, 6, 7], prompt_cache=first.prompt_cache, max_tokens=20)
    assert same_bits(second.prompt_cache, llm.resolve(prompt).prompt_cache, 40)
    texts = [llm.generate(prompt, max_tokens=10).text for _ in range(3)]
    assert len(set(texts)) == 1


def test_buffers_have_room_for_prompt_and_reserve(llm: Any) -> None:
    token_ids = random_ids(40)
    llm.put(token_ids, live_cache(llm.model, token_ids))
    resolved = llm.resolve(token_ids + random_ids(30, seed=4), reserve=600)
    assert resolved.prompt_cache[0].keys.shape[2] >= 70 + 600
    before = resolved.prompt_cache[0].keys.shape
    generate(llm.model, llm.tokenizer, resolved.rest, prompt_cache=resolved.prompt_cache, max_tokens=100)
    assert resolved.prompt_cache[0].keys.shape == before


def test_prefill_leaves_one_token_and_stores_all_but_that_one(llm: Any) -> None:
    token_ids = random_ids(70)
    seen: list[tuple[int, int]] = []
    resolved = llm.prefill(token_ids, progress=lambda *done: seen.append(done), prefill_step_size=32)
    assert (resolved.rest, resolved.computed_tokens) == (token_ids[-1:], 69)
    assert seen == [(0, 69), (32, 69), (64, 69), (69, 69)]
    again = llm.prefill(token_ids)
    assert (again.cached_tokens, again.computed_tokens) == (69, 0)
    assert same_bits(resolved.prompt_cache, again.prompt_cache, 69)


def test_prefill_steps_end_at_chunk_boundaries(llm: Any) -> None:
    llm.put(random_ids(20), live_cache(llm.model, random_ids(20)))
    seen: list[int] = []
    llm.prefill(random_ids(100), progress=lambda done, _: seen.append(done), prefill_step_size=40)
    assert seen == [20, 48, 80, 99]
