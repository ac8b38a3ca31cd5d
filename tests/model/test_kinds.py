"""Every cache kind of mlx-lm: a restored cache goes on exactly as the live one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import batch_generate, generate, stream_generate
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from prefixbank import PrefixBank
from prefixbank.kvcache.capture import describe, leaf_caches
from prefixbank.kvcache.kinds import StateKind, kind_of
from tests.model.tiny import FROM_DISK, build_model, random_ids

CHUNK = 16
WINDOW = 24
ROWS_ONLY = ["llama", "deepseek_v3", "deepseek_v32"]
WINDOWED = ["llama_sliding", "gemma3_text", "gpt_oss", "llama4"]
RECURRENT = ["mamba2", "qwen3_next", "falcon_h1"]
ALL = [*ROWS_ONLY, *WINDOWED, *RECURRENT]
# A full chunk, inside a chunk, around the window and twice the window, and llama4's chunk of attention.
BOUNDARIES = [16, 21, 23, 24, 25, 32, 33, 47, 48, 49, 64, 70]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: build_model(name) for name in ALL}


def go_on(model: Any, prompt_cache: list[Any], token_ids: list[int], n_steps: int = 40) -> list[mx.array]:
    """Return the logits of the given tokens' last one and of greedy steps behind it."""
    logits = [model(mx.array(token_ids)[None], cache=prompt_cache)[:, -1]]
    for _ in range(n_steps):
        logits.append(model(mx.argmax(logits[-1], axis=-1)[None], cache=prompt_cache)[:, -1])
        mx.eval(logits[-1])
    return logits


def same_bits(left: list[mx.array], right: list[mx.array]) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("name", ALL)
def test_restored_cache_goes_on_bit_for_bit_as_the_live_one(
    name: str, boundary: int, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    model = models[name]
    llm = small_bank.attach(model, tokenizer, prefill_step_size=CHUNK)
    token_ids = random_ids(boundary)
    suffix = random_ids(5, seed=2)
    live = llm.prefill([*token_ids, 1])
    assert (live.cached_tokens, live.computed_tokens) == (0, boundary)
    hit = llm.resolve(token_ids + suffix)
    assert (hit.cached_tokens, hit.rest) == (boundary, suffix)
    assert describe(hit.prompt_cache) == llm.layout

    restored = go_on(model, hit.prompt_cache, suffix)
    assert same_bits(restored, go_on(model, live.prompt_cache, suffix))
    cold = model(mx.array(token_ids + suffix)[None], cache=llm.resolve([1]).prompt_cache)[:, -1]
    assert mx.abs(restored[0] - cold).max().item() < 1e-4
    assert mx.argmax(restored[0]).item() == mx.argmax(cold).item()


@pytest.mark.parametrize("name", [*ROWS_ONLY, *WINDOWED])
@pytest.mark.parametrize("n_shared", [5, 17, 24, 25, 40, 63])
def test_rows_resume_where_prompts_part_inside_a_chunk(
    n_shared: int, name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    """And the prompt that parts there is stored and resumed in turn, in its own words from inside the chunk on."""
    model = models[name]
    llm = small_bank.attach(model, tokenizer, prefill_step_size=CHUNK)
    llm.prefill(random_ids(80))
    prompt = random_ids(80)[:n_shared] + random_ids(40, seed=3)
    cold = generate(model, tokenizer, prompt, max_tokens=8)
    assert llm.match(prompt).n_tokens == n_shared
    live = llm.prefill(prompt)
    assert live.cached_tokens == n_shared
    assert generate(model, tokenizer, live.rest, prompt_cache=live.prompt_cache, max_tokens=8) == cold
    again = llm.resolve(prompt)
    assert again.cached_tokens == len(prompt) - 1
    assert generate(model, tokenizer, again.rest, prompt_cache=again.prompt_cache, max_tokens=8) == cold


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_hit_from_the_third_prompt_on(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    model = models[name]
    llm = small_bank.attach(model, tokenizer)
    prompts = [random_ids(150) + random_ids(70, seed=seed) for seed in range(2, 6)]
    results = [llm.generate(prompt, max_tokens=6) for prompt in prompts]
    assert [result.cached_tokens for result in results] == [0, 0, 150, 150]
    assert results[1].match.n_known_tokens == 150
    assert "recurrent" not in llm.explain(prompts[3]).reason or llm.explain(prompts[3]).n_matched_tokens == 150
    for prompt, result in zip(prompts, results, strict=True):
        assert result.text == generate(model, tokenizer, prompt, max_tokens=6)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_hit_from_the_second_prompt_on_where_the_shots_were_declared(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    from tests.model.test_prompts import SHOTS

    llm = small_bank.attach(models[name], tokenizer)
    n_shared = len(llm.shared_token_ids(SHOTS))
    results = [llm.generate(SHOTS.render(query), max_tokens=4) for query in ("a great soup", "the film", "my bike")]
    assert [result.cached_tokens for result in results] == [0, n_shared, n_shared]
    for query, result in zip(("a great soup", "the film", "my bike"), results, strict=True):
        assert result.text == generate(llm.model, tokenizer, llm.encode(SHOTS.render(query)), max_tokens=4)


def test_shots_of_1500_tokens_hit_from_the_third_prompt_on(
    models: dict[str, Any], tokenizer: Any, bank_root: Path
) -> None:
    """With chunks of 256 the place where the prompts part lies inside one, and so do 700 tokens of their own."""
    with PrefixBank.open(bank_root, **FROM_DISK) as bank:
        llm = bank.attach(models["mamba2"], tokenizer)
        prompts = [random_ids(1500) + random_ids(700, seed=seed) for seed in range(2, 6)]
        results = [llm.generate(prompt, max_tokens=2) for prompt in prompts]
        assert [result.cached_tokens for result in results] == [0, 0, 1500, 1500]
        assert [result.computed_tokens for result in results] == [2200, 2200, 700, 700]
        assert bank.check(read_data=True).ok


def test_states_can_be_kept_each_few_chunks(models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank) -> None:
    llm = small_bank.attach(models["falcon_h1"], tokenizer, state_every_chunks=2)
    llm.generate(random_ids(150), max_tokens=2)
    assert sorted(c.end for c in small_bank.chunks() if c.has_state) == [32, 64, 96, 128]
    prompt = random_ids(150)[:77] + random_ids(20, seed=3)
    cold = generate(llm.model, tokenizer, prompt, max_tokens=6)
    hit = llm.generate(prompt, max_tokens=6)
    assert (hit.cached_tokens, hit.text) == (64, cold)


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_keep_no_states(name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank) -> None:
    llm = small_bank.attach(models[name], tokenizer, state_every_chunks=1)
    llm.warm(random_ids(40))
    llm.warm(random_ids(45))
    assert [(c.end, c.has_state) for c in small_bank.chunks()] == [(16, False), (32, False), (45, False)]


def test_layers_without_cache_and_empty_members_are_taken_as_they_are(
    models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    """A model that wraps each layer's cache into nested lists, beside an empty member and a layer without any."""
    inner = models["llama"]

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.layers = inner.layers

        def make_cache(self) -> list[Any]:
            return [CacheList(CacheList(KVCache()), ArraysCache(3)), CacheList(KVCache(), KVCache()), None]

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return inner(inputs, cache=None if cache is None else [cache[0][0][0], cache[1][0]])

    model = Wrapped()
    llm = small_bank.attach(model, tokenizer)
    assert [path for path, _ in llm.layout.leaves()] == ["0.0.0", "0.1", "1.0", "1.1", "2"]
    prompt = random_ids(40)
    live = llm.prefill(prompt)
    hit = llm.resolve(prompt)
    assert hit.cached_tokens == 39
    assert hit.prompt_cache[2] is None
    assert hit.prompt_cache[1][1].empty()
    assert same_bits(go_on(model, hit.prompt_cache, [7]), go_on(model, live.prompt_cache, [7]))


def test_recurrent_caches_keep_their_empty_slots_empty() -> None:
    kind = kind_of(ArraysCache(4))
    assert isinstance(kind, StateKind)
    live = ArraysCache(4)
    live[0], live[2] = mx.ones((1, 3, 8)), mx.full((1, 2, 4, 4), 0.5)
    layout = describe([live]).layers[0]
    assert [(a.role, a.shape) for a in layout.states] == [("0", (1, 3, 8)), ("2", (1, 2, 4, 4))]
    restored = kind.restore(layout, kind.states(live))
    assert [restored[slot] is None for slot in range(4)] == [False, True, False, True]
    assert mx.array_equal(restored[2], live[2])


def test_states_behind_each_example_serve_ablations(
    models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    from dataclasses import replace

    from tests.model.test_prompts import SHOTS

    llm = small_bank.attach(models["falcon_h1"], tokenizer)
    llm.warm(SHOTS, boundaries="examples")
    one_shot = replace(SHOTS, examples=SHOTS.examples[:1])
    zero_shot = replace(SHOTS, examples=())
    for shots in (one_shot, zero_shot, SHOTS):
        result = llm.generate(shots.render("a dull film"), max_tokens=4)
        assert result.cached_tokens == len(llm.shared_token_ids(shots))


@pytest.mark.parametrize("name", ALL)
def test_generate_is_the_same_cold_stored_and_from_the_bank(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    model = models[name]
    llm = small_bank.attach(model, tokenizer)
    prompt = random_ids(90)
    cold = generate(model, tokenizer, prompt, max_tokens=40)
    assert [llm.generate(prompt, max_tokens=40).text for _ in range(4)] == [cold] * 4
    assert llm.generate(prompt, max_tokens=40).cached_tokens >= 80


@pytest.mark.parametrize("name", ALL)
def test_conversation_goes_on_from_the_bank(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    model = models[name]
    llm = small_bank.attach(model, tokenizer)
    prompt = random_ids(50)
    first = llm.generate(prompt, max_tokens=12, keep=True)
    follow_up = prompt + first.token_ids + random_ids(6, seed=4)
    second = llm.generate(follow_up, max_tokens=8)
    assert second.cached_tokens >= len(prompt) + len(first.token_ids) - 1
    assert second.text == generate(model, tokenizer, follow_up, max_tokens=8)


@pytest.mark.parametrize("name", WINDOWED)
def test_live_cache_that_has_lost_rows_is_stored_as_far_as_it_is_known(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model = models[name]
    llm = small_bank.attach(model, tokenizer)
    token_ids = random_ids(120)
    live = make_prompt_cache(model)
    for low in range(0, 120, 20):
        model(mx.array(token_ids[low : low + 20])[None], cache=live)
        mx.eval([layer_cache.state for layer_cache in live])
    assert llm.put(token_ids, live).n_tokens == 0  # the first rows of the windows are gone
    assert llm.match(token_ids).n_tokens == 0
    short = make_prompt_cache(model)
    model(mx.array(token_ids[:20])[None], cache=short)
    assert llm.put(token_ids[:20], short).n_tokens == 20
    hit = llm.generate(token_ids, max_tokens=8)
    assert (hit.cached_tokens, hit.text) == (20, generate(model, tokenizer, token_ids, max_tokens=8))


@pytest.mark.parametrize("max_kv_size", [20, 32, 200])
def test_window_given_by_the_user_keeps_its_first_rows(
    max_kv_size: int, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    model = models["llama"]
    llm = small_bank.attach(model, tokenizer, max_kv_size=max_kv_size, prefill_step_size=CHUNK)
    for boundary in BOUNDARIES:
        token_ids = random_ids(boundary, seed=boundary)
        suffix = random_ids(5, seed=2)
        live = llm.prefill([*token_ids, 1])
        hit = llm.resolve(token_ids + suffix)
        assert hit.cached_tokens == boundary
        restored = go_on(model, hit.prompt_cache, suffix)
        assert same_bits(restored, go_on(model, live.prompt_cache, suffix))
    assert small_bank.attach(model, tokenizer).match(random_ids(16, seed=16)).n_tokens == 0


@pytest.mark.parametrize("name", [name for name in ALL if name != "llama4"])
def test_resolved_caches_of_uneven_lengths_work_in_batches(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    model = models[name]
    llm = small_bank.attach(model, tokenizer)
    shared = [random_ids(n, seed=n) for n in (20, 50, 37)]
    prompts = [prefix + random_ids(n, seed=n) for prefix, n in zip(shared, (3, 9, 5), strict=True)]
    for prefix in shared:
        llm.warm(prefix)
    resolved = [llm.resolve(prompt) for prompt in prompts]
    assert [r.cached_tokens for r in resolved] == [20, 50, 37]
    batch = batch_generate(
        model, tokenizer, [r.rest for r in resolved], prompt_caches=[r.prompt_cache for r in resolved], max_tokens=6
    )
    assert batch.texts == [generate(model, tokenizer, prompt, max_tokens=6) for prompt in prompts]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_resolved_caches_join_a_running_batch_generator(
    name: str, models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    model = models[name]
    llm = small_bank.attach(model, tokenizer)
    llm.warm(random_ids(37))
    prompts = [random_ids(37) + random_ids(n, seed=n) for n in (4, 7)]
    cold = [[r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=6)] for prompt in prompts]
    generator = BatchGenerator(model, stop_tokens=[[t] for t in tokenizer.eos_token_ids])
    answers: dict[int, list[int]] = {}
    uids = []
    for prompt in prompts:  # the second joins while the first is decoded
        resolved = llm.resolve(prompt)
        assert resolved.cached_tokens == 37
        uids += generator.insert([resolved.rest], [6], caches=[resolved.prompt_cache])
        for response in generator.next_generated():
            answers.setdefault(response.uid, []).append(response.token)
    while responses := generator.next_generated():
        for response in responses:
            answers.setdefault(response.uid, []).append(response.token)
    generator.close()
    assert [answers[uid] for uid in uids] == cold


def test_batches_of_a_kind_that_mlx_lm_can_not_merge_are_refused_clearly(
    models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank
) -> None:
    llm = small_bank.attach(models["llama4"], tokenizer)
    llm.warm(random_ids(20))
    resolved = [llm.resolve([*random_ids(20), 1, 2]) for _ in range(2)]
    with pytest.raises(ValueError, match="does not yet support batching with history"):
        batch_generate(
            llm.model, tokenizer, [r.rest for r in resolved], prompt_caches=[r.prompt_cache for r in resolved]
        )


@pytest.mark.parametrize("name", ALL)
def test_second_bank_object_and_lost_middle_chunk(
    name: str, models: dict[str, Any], tokenizer: Any, bank_root: Path
) -> None:
    model = models[name]
    prompt = random_ids(80)
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=CHUNK) as bank:
        bank.attach(model, tokenizer).warm(prompt)
    with PrefixBank.open(bank_root, **FROM_DISK) as bank:
        llm = bank.attach(model, tokenizer)
        cold = generate(model, tokenizer, [*prompt, 1], max_tokens=8)
        assert llm.generate([*prompt, 1], max_tokens=8).cached_tokens == 80
        middle = next(c for c in bank.chunks() if c.start == 32)
        assert middle.file_name is not None
        (bank.root / "shards" / middle.file_name[:2] / middle.file_name).unlink()
        if name == "mamba2":  # its chunks hold no rows: only the states at the end are read
            assert llm.generate([*prompt, 1], max_tokens=8).text == cold
        else:
            with pytest.warns(UserWarning, match="gone"):
                first = llm.generate([*prompt, 1], max_tokens=8)
            assert (first.text, first.cached_tokens) == (cold, 0 if name in RECURRENT else 32)
            llm.warm(prompt)
        assert llm.generate([*prompt, 1], max_tokens=8).cached_tokens == 80
        problems = [finding.kind for finding in bank.check(read_data=True).problems]
        assert problems == (["missing"] if name == "mamba2" else [])


def test_two_models_in_turn_keep_their_hits(models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank) -> None:
    prompt = random_ids(60)
    llms = [small_bank.attach(models[name], tokenizer) for name in ("gemma3_text", "qwen3_next")]
    texts = [generate(llm.model, tokenizer, prompt, max_tokens=5) for llm in llms]
    for llm in llms:
        llm.warm(prompt)
    for _ in range(20):
        for llm, text in zip(llms, texts, strict=True):
            result = llm.generate([*prompt], max_tokens=5)
            assert result.text == text
    assert all(llm.match([*prompt, 1]).n_tokens == 60 for llm in llms)


def test_members_of_a_list_are_stored_by_member(models: dict[str, Any], tokenizer: Any, small_bank: PrefixBank) -> None:
    layout = small_bank.attach(models["falcon_h1"], tokenizer).layout
    assert [path for path, _ in layout.leaves()] == ["0.0", "0.1", "1.0", "1.1"]
    assert layout.has_state
    assert len(list(leaf_caches(models["falcon_h1"].make_cache()))) == 4
