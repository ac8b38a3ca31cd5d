"""Loading where it pays, computing where that is faster: as measured, visible, and with the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache

from prefixbank import PrefixBank
from prefixbank.cli import main
from prefixbank.kvcache.probe import device_name
from prefixbank.rates import RateBook
from prefixbank.shards import ShardStore
from prefixbank.values import Rates
from tests.model.tiny import build_model, random_ids

SHARED = random_ids(50)
PROMPT = SHARED + random_ids(5, seed=2)

Open = Callable[..., Any]


@pytest.fixture
def open_bank(bank_root: Path) -> Iterator[Open]:
    """Give a function that opens the bank, without memory if not told otherwise."""
    opened: list[PrefixBank] = []

    def open_it(**options: Any) -> PrefixBank:
        given = {"chunk_tokens": 16, "memory_bytes": 0, "durability": "fast", **options}
        opened.append(PrefixBank.open(bank_root, **given))
        return opened[-1]

    yield open_it
    for bank in opened:
        if not bank._session._closed:
            report = bank.check(read_data=True)
            assert report.ok, report.findings
        bank.close()


def teach(llm: Any, *, compute_s_per_token: float, load_s: float = 0.0, load_s_per_byte: float = 0.0) -> None:
    """Let the bank know these rates of the model, and learn no others."""
    namespace = llm.namespace
    book = RateBook()
    book.recall(namespace, Rates(namespace.id, "test", 0.0, compute_s_per_token, load_s, load_s_per_byte, 1))
    book.computed = book.loaded = lambda *_: None
    llm._session.rates = book


def let_computing_be_faster(llm: Any) -> None:
    teach(llm, compute_s_per_token=1e-6, load_s_per_byte=1.0)


def let_loading_be_faster(llm: Any) -> None:
    teach(llm, compute_s_per_token=1.0, load_s_per_byte=1e-9)


def let_the_smallest_load_be_slower(llm: Any) -> None:
    teach(llm, compute_s_per_token=1e-6, load_s=1e3)


def answers_as_cold(llm: Any, prompt: list[int]) -> int:
    """Compare tokens and log-probabilities with a cold generation's; returns the cached tokens."""
    wanted = list(stream_generate(llm.model, llm.tokenizer, prompt, max_tokens=5))
    answer = list(llm.stream_generate(prompt, max_tokens=5))
    for one, other in zip(answer, wanted, strict=True):
        assert one.token == other.token
        assert mx.abs(one.logprobs - other.logprobs).max().item() < 1e-4
    return int(answer[0].cached_tokens)


def goes_on_right(llm: Any, prompt: list[int], resolved: Any) -> None:
    cold = llm.model(mx.array(prompt)[None], cache=make_prompt_cache(llm.model))[:, -1]
    given = llm.model(mx.array(resolved.rest)[None], cache=resolved.prompt_cache)[:, -1]
    assert mx.abs(given - cold).max().item() < 1e-4


# --- the choice


def test_what_is_faster_to_compute_is_computed(open_bank: Open, llama: Any, tokenizer: Any) -> None:
    bank = open_bank()
    llm = bank.attach(llama, tokenizer)
    llm.warm(SHARED)
    before = bank.chunks()
    let_computing_be_faster(llm)
    found = llm.match(PROMPT)
    assert (found.n_tokens, found.loading_pays) == (50, False)
    assert found.load_s == pytest.approx(sum(c.n_bytes for c in before))
    assert found.compute_s == pytest.approx(50e-6)
    resolved = llm.resolve(PROMPT)
    assert (resolved.cached_tokens, resolved.rest) == (0, PROMPT)
    assert (resolved.match.reason, resolved.match.loading_pays) == ("computing-is-faster", False)
    goes_on_right(llm, PROMPT, resolved)
    assert answers_as_cold(llm, PROMPT) == 0
    with llm.checkout(PROMPT) as lease:
        assert lease.cached_tokens == 0
        goes_on_right(llm, PROMPT, lease)
    assert [c.file_name for c in bank.chunks()] == [c.file_name for c in before]
    prefilled = llm.prefill(PROMPT)
    assert (prefilled.cached_tokens, prefilled.computed_tokens) == (0, 54)
    goes_on_right(llm, PROMPT, prefilled)
    stats = bank.stats().session
    assert stats["computed_by_choice"] == 4
    assert stats.get("hits", 0) == 0


def test_what_is_faster_to_load_is_loaded(open_bank: Open, llama: Any, tokenizer: Any) -> None:
    bank = open_bank()
    llm = bank.attach(llama, tokenizer)
    llm.warm(SHARED)
    let_loading_be_faster(llm)
    found = llm.match(PROMPT)
    assert (found.n_tokens, found.loading_pays, found.compute_s) == (50, True, 50.0)
    resolved = llm.resolve(PROMPT)
    assert resolved.cached_tokens == 50
    goes_on_right(llm, PROMPT, resolved)
    assert answers_as_cold(llm, PROMPT) == 50
    assert "computed_by_choice" not in bank.stats().session


def test_what_nothing_is_known_of_is_loaded(open_bank: Open, llama: Any, tokenizer: Any) -> None:
    open_bank(load="always").attach(llama, tokenizer).warm(SHARED)
    bank = open_bank()
    llm = bank.attach(llama, tokenizer)
    bank._session.rates = RateBook()
    found = llm.match(PROMPT)
    assert (found.load_s, found.compute_s, found.loading_pays) == (None, None, True)
    assert llm.resolve(PROMPT).cached_tokens == 50


@pytest.mark.parametrize("rates", [let_computing_be_faster, let_the_smallest_load_be_slower])
def test_always_loads_all_the_same(rates: Callable[[Any], None], open_bank: Open, llama: Any, tokenizer: Any) -> None:
    bank = open_bank(load="always")
    llm = bank.attach(llama, tokenizer)
    llm.warm(SHARED)
    rates(llm)
    found = llm.match(PROMPT)
    assert (found.n_tokens, found.loading_pays) == (50, True)
    assert found.load_s is not None
    assert found.compute_s is not None
    assert found.load_s > found.compute_s
    goes_on_right(llm, PROMPT, llm.resolve(PROMPT))
    assert answers_as_cold(llm, PROMPT) == 50
    assert "computed_by_choice" not in bank.stats().session


def test_prompt_that_computes_faster_than_the_smallest_load_is_computed(
    open_bank: Open, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = open_bank()
    llm = bank.attach(llama, tokenizer)
    llm.warm(SHARED)
    let_the_smallest_load_be_slower(llm)

    def fail(_: ShardStore, record: Any) -> None:
        raise AssertionError(f"shard {record.file_name} is read")

    with monkeypatch.context() as patch:
        patch.setattr(ShardStore, "open_shard", fail)
        resolved = llm.resolve(PROMPT)
        assert (resolved.cached_tokens, resolved.match.reason) == (0, "computing-is-faster")
        goes_on_right(llm, PROMPT, resolved)
        assert answers_as_cold(llm, PROMPT) == 0
    assert bank.stats().session["computed_by_choice"] == 2


def test_choice_is_made_for_each_match(open_bank: Open, llama: Any, tokenizer: Any) -> None:
    """A load has a fixed time: what is short is computed, what is long is loaded."""
    llm = open_bank().attach(llama, tokenizer)
    long = random_ids(160, seed=3)
    llm.warm(long)
    teach(llm, compute_s_per_token=1.0, load_s=60.0)
    short = [*long[:10], 1]
    assert [llm.match(prompt).loading_pays for prompt in (short, [*long, 1])] == [False, True]
    assert llm.resolve([*long, 1]).cached_tokens == 160
    teach(llm, compute_s_per_token=1.0, load_s=600.0)
    assert not llm.match([*long, 1]).loading_pays
    assert llm.resolve([*long, 1]).cached_tokens == 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_answers_are_the_same_whatever_is_chosen(name: str, open_bank: Open, tokenizer: Any) -> None:
    bank = open_bank()
    llm = bank.attach(build_model(name), tokenizer)
    llm.warm(SHARED)
    prompts = [PROMPT, SHARED[:30] + random_ids(10, seed=4), [*random_ids(70, seed=5)]]
    cached = []
    for rates in (let_computing_be_faster, let_loading_be_faster, let_the_smallest_load_be_slower):
        rates(llm)
        for prompt in prompts * 2:
            cached.append(answers_as_cold(llm, prompt))
            bank.flush()
    assert max(cached[:6]) == max(cached[12:]) == 0
    assert max(cached[6:12]) >= 50


def test_what_was_computed_by_choice_is_not_stored_again(
    open_bank: Open, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor copied to be stored: the bank has it."""
    bank = open_bank()
    llm = bank.attach(llama, tokenizer)
    llm.generate([*random_ids(64), 1], max_tokens=2)
    bank.flush()
    written = bank.stats().session["written_bytes"]
    let_computing_be_faster(llm)
    monkeypatch.setattr(bank._session, "store_behind", lambda *_: pytest.fail("it is copied to be stored"))
    assert llm.generate([*random_ids(64), 1], max_tokens=2).cached_tokens == 0
    assert bank.stats().session["written_bytes"] == written


def test_what_goes_on_behind_what_was_computed_by_choice_is_stored(open_bank: Open, llama: Any, tokenizer: Any) -> None:
    bank = open_bank()
    llm = bank.attach(llama, tokenizer)
    llm.generate(random_ids(64), max_tokens=2)
    let_computing_be_faster(llm)
    longer = random_ids(64) + random_ids(40, seed=2)
    assert answers_as_cold(llm, longer) == 0
    bank.flush()
    assert [c.end for c in bank.chunks()] == [16, 32, 48, 64, 80, 96]
    let_loading_be_faster(llm)
    assert llm.match([*longer]).n_tokens == 96
    goes_on_right(llm, longer, llm.resolve(longer))


def test_warming_longer_shots_is_right_whatever_is_chosen(open_bank: Open, llama: Any, tokenizer: Any) -> None:
    bank = open_bank()
    llm = bank.attach(llama, tokenizer)
    llm.warm(SHARED)
    let_computing_be_faster(llm)
    warmed = llm.warm([*SHARED, *random_ids(30, seed=6)])
    assert (warmed.stored_tokens, warmed.cached_tokens, warmed.computed_tokens) == (80, 0, 80)
    let_loading_be_faster(llm)
    prompt = [*SHARED, *random_ids(30, seed=6), 1]
    resolved = llm.resolve(prompt)
    assert resolved.cached_tokens == 80
    goes_on_right(llm, prompt, resolved)
    assert llm.warm(prompt[:80]).computed_tokens == 0


@pytest.mark.parametrize("rates", [let_computing_be_faster, let_loading_be_faster, let_the_smallest_load_be_slower])
def test_draft_models_go_along(rates: Callable[[Any], None], open_bank: Open, llama: Any, tokenizer: Any) -> None:
    """Both models need the same rest, whatever each of them would choose."""
    bank = open_bank()
    llm, draft = bank.attach(llama, tokenizer), bank.attach(build_model(seed=3), tokenizer)
    llm.warm(SHARED)
    draft.warm(SHARED)
    rates(llm)  # and nothing is known of the draft model
    cold = "".join(r.text for r in stream_generate(llama, tokenizer, PROMPT, max_tokens=6))
    for _ in range(2):
        assert llm.generate(PROMPT, draft_model=draft, max_tokens=6).text == cold


# --- memory


def test_hits_in_memory_ignore_the_rule(open_bank: Open, llama: Any, tokenizer: Any) -> None:
    bank = open_bank(memory_bytes="1GB")
    llm = bank.attach(llama, tokenizer)
    llm.warm(SHARED)
    let_computing_be_faster(llm)
    found = llm.match(PROMPT)
    assert (found.in_memory, found.n_tokens, found.loading_pays) == (True, 50, True)
    resolved = llm.resolve(PROMPT)
    assert (resolved.cached_tokens, resolved.match.in_memory) == (50, True)
    goes_on_right(llm, PROMPT, resolved)
    assert answers_as_cold(llm, PROMPT) == 50
    with llm.checkout(PROMPT) as lease:
        assert lease.cached_tokens == 50
    assert "computed_by_choice" not in bank.stats().session


def test_files_that_hold_more_than_memory_do_not_hide_it_where_computing_is_faster(
    open_bank: Open, llama: Any, tokenizer: Any
) -> None:
    """The memory's 50 tokens cost nothing, the files' 80 are not loaded: taking neither would be the worst."""
    bank = open_bank(memory_bytes="1GB")
    llm = bank.attach(llama, tokenizer)
    llm.warm(SHARED)
    longer = [*SHARED, *random_ids(30, seed=6)]
    open_bank(load="always").attach(llama, tokenizer).warm(longer)
    let_computing_be_faster(llm)
    resolved = llm.resolve([*longer, 1])
    goes_on_right(llm, [*longer, 1], resolved)
    assert resolved.cached_tokens == 50


def test_memory_that_takes_the_files_place_leaves_what_is_held_back(open_bank: Open, tokenizer: Any) -> None:
    """Memory holds 58 tokens, which a window's cache gives only whole, files any; 10 of 60 are to be computed."""
    bank = open_bank(memory_bytes="1GB")
    llm = bank.attach(build_model("gemma3_text"), tokenizer)
    prompt = random_ids(60)
    llm.warm(prompt[:58])
    bank._session.rates = RateBook()
    assert llm.resolve([*prompt[:58], 1]).cached_tokens == 58
    let_computing_be_faster(llm)
    resolved = llm.resolve(prompt, hold_back=10)
    goes_on_right(llm, prompt, resolved)
    assert resolved.cached_tokens <= 50


# --- what is said of it


def test_explanation_says_what_is_chosen_and_why(open_bank: Open, llama: Any, tokenizer: Any) -> None:
    bank = open_bank()
    llm = bank.attach(llama, tokenizer)
    llm.warm(SHARED)
    let_computing_be_faster(llm)
    said = llm.explain(PROMPT)
    assert (said.n_matched_tokens, said.loading_pays) == (50, False)
    assert "they are computed, which is faster" in str(said)
    let_loading_be_faster(llm)
    said = llm.explain(PROMPT)
    assert (said.loading_pays, said.compute_s) == (True, 50.0)
    assert "computing 50 s (estimated): they are loaded" in str(said)
    teach(llm, compute_s_per_token=1e-6, load_s_per_byte=1.0)
    whole = llm.explain([*SHARED, 1])  # all that may be taken is stored
    assert not whole.loading_pays
    assert "they are computed, which is faster" in str(whole)
    bank._session.rates = RateBook()
    assert "estimated" not in str(llm.explain(PROMPT))
    assert "estimated" not in str(llm.explain([7, 7, 7]))
    always = open_bank(load="always").attach(llama, tokenizer)
    let_computing_be_faster(always)
    assert "they are loaded" in str(always.explain(PROMPT))


def test_generating_and_loading_are_measured_kept_and_shown(
    open_bank: Open, bank_root: Path, llama: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bank = open_bank(load="always")
    llm = bank.attach(llama, tokenizer)
    for n_tokens in (20, 60, 200):
        prompt = random_ids(n_tokens, seed=n_tokens)
        llm.generate(prompt, max_tokens=2)
        llm.warm(prompt)
        for _ in range(3):
            llm.resolve([*prompt, 1])
    found = llm.match([*random_ids(200, seed=200), 1])
    assert found.load_s is not None
    assert found.compute_s is not None
    assert found.load_s > 0
    (rates,) = bank.stats().rates
    assert (rates.namespace_id, rates.device) == (llm.namespace.id, device_name())
    assert rates.compute_s_per_token is not None
    assert rates.load_s_per_byte is not None
    fingerprint = llm.namespace.fingerprint
    bank.close()

    again = open_bank(load="always").attach(llama, tokenizer)  # as the next process does
    asked = again.match([*random_ids(200, seed=200), 1])
    assert (asked.load_s, asked.compute_s) == pytest.approx((found.load_s, found.compute_s))
    capsys.readouterr()
    assert main(["--bank", str(bank_root), "stats", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["rates"]
    assert (shown["fingerprint"], shown["device"]) == (fingerprint, device_name())
    assert shown["compute_s_per_token"] == rates.compute_s_per_token
    assert main(["--bank", str(bank_root), "stats"]) == 0
    text = capsys.readouterr().out
    assert "speed" in text
    assert "tokens/s" in text


def test_rates_of_other_weights_are_others(open_bank: Open, tokenizer: Any) -> None:
    llm = open_bank().attach(build_model(), tokenizer)
    llm.warm(SHARED)
    let_computing_be_faster(llm)
    assert llm.resolve(PROMPT).match.reason == "computing-is-faster"
    llm.model.update(build_model(seed=5).parameters())
    found = llm.match(PROMPT)
    assert (found.n_tokens, found.loading_pays) == (0, True)
    llm.warm(SHARED)
    assert llm.resolve(PROMPT).cached_tokens == 50
    goes_on_right(llm, PROMPT, llm.resolve(PROMPT))
