"""`prefixbank serve` gives the answers of `mlx_lm.server`, and keeps its prompt caches in a bank."""

from __future__ import annotations

import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import save_config, save_model

from prefixbank import BankWarning, PrefixBank
from prefixbank.promptcaches import PromptCaches
from prefixbank.servercache import BankedPromptCache
from tests.model.tiny import CHAT_TEMPLATE, CONFIGS, build_model, build_tokenizer

pytest.importorskip("openai")

from tests.model.serverprocess import Answer, ask, banked, plain

CHUNK = 16
SYSTEM = {"role": "system", "content": "Say positive or negative of each review, and nothing else."}
SHOTS = [
    {"role": "user", "content": "the lamp is lovely"},
    {"role": "assistant", "content": "positive"},
    {"role": "user", "content": "the zip broke"},
    {"role": "assistant", "content": "negative"},
]
QUERIES = ["the wick is short", "it glows", "no", "what a lovely zip that is", "a", "it broke at once", "lamp", "why"]

Messages = list[dict[str, str]]


def few_shot(query: str) -> Messages:
    return [SYSTEM, *SHOTS, {"role": "user", "content": query}]


@pytest.fixture(scope="module")
def save_sharp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give a function that saves a tiny model whose answers depend on every word of the prompt."""

    def save(name: str = "llama", seed: int = 0, dtype: mx.Dtype = mx.float32) -> Path:
        path = tmp_path_factory.mktemp("models") / f"{name}-{seed}"
        path.mkdir()
        model = build_model(name, seed=seed)
        model.set_dtype(dtype)
        model.update(tree_map(lambda array: array * 4 if array.ndim > 1 else array, model.parameters()))
        save_model(path, model)
        save_config(dict(CONFIGS[name]), path / "config.json")
        build_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(path)
        return path

    return save


@pytest.fixture(scope="module")
def model(save_sharp: Callable[..., Path]) -> str:
    return str(save_sharp())


@pytest.fixture(scope="module")
def cold(model: str) -> Iterator[dict[str, str]]:
    """The answers of `mlx_lm.server`, by query."""
    with plain("--model", model) as server:
        answers = {query: ask(server, few_shot(query)).text for query in QUERIES}
    assert len(set(answers.values())) == len(QUERIES)
    return answers


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "bank"
    PrefixBank.open(root, chunk_tokens=CHUNK).close()
    return root


def full_chunks(n_tokens: int) -> int:
    return n_tokens - n_tokens % CHUNK


def require_sound(root: Path, *, n_chunks: int = 1) -> None:
    with PrefixBank.open(root, read_only=True) as bank:
        report = bank.check(read_data=True)
        assert report.ok, report.findings
        assert report.n_chunks >= n_chunks


def test_hits_are_counted_rightly_and_survive_a_restart(model: str, root: Path, cold: dict[str, str]) -> None:
    first, second = QUERIES[:2]
    with banked(root, "--model", model) as server:
        answers = [ask(server, few_shot(query)) for query in (first, first, second)]
        assert [answer.text for answer in answers] == [cold[first], cold[first], cold[second]]
        n_prompt, n_other = answers[0].prompt_tokens, answers[2].prompt_tokens
        assert answers[0].cached_tokens == 0
        assert answers[1].cached_tokens == n_prompt - 1  # an exact repeat
        n_shared = answers[2].cached_tokens
        assert 100 < n_shared < min(n_prompt, n_other)
        streamed = ask(server, few_shot(first), stream=True)
        assert streamed == Answer(cold[first], n_prompt, n_prompt - 1)
    require_sound(root)
    n_files = len(list(root.rglob("*.safetensors")))
    with banked(root, "--model", model) as server:
        again = ask(server, few_shot(second))
        assert again == Answer(cold[second], n_other, full_chunks(n_other))
        assert ask(server, few_shot(first), stream=True).cached_tokens >= full_chunks(n_prompt)
        new = ask(server, few_shot(QUERIES[2]))
        assert (new.text, new.cached_tokens >= n_shared) == (cold[QUERIES[2]], True)
        assert server.said("the bank could not be used") == 0
    assert len(list(root.rglob("*.safetensors"))) - n_files <= 1  # the third query's
    require_sound(root)


def test_what_was_warmed_with_a_salt_and_a_precision_is_found_with_the_same(
    save_sharp: Callable[..., Path], root: Path
) -> None:
    """On the CPU half-precision weights are turned into float32, by `warm` and by the server, unless told otherwise."""
    half = str(save_sharp(seed=3, dtype=mx.float16))
    with PrefixBank.open(root) as bank:
        warmed = bank.load_model(half, salt="tenant").warm(few_shot(QUERIES[0]))
        assert warmed.n_tokens > 2 * CHUNK
    with banked(root, "--model", half, "--salt", "tenant") as server:
        assert ask(server, few_shot(QUERIES[1])).cached_tokens >= 2 * CHUNK
    with banked(root, "--model", half) as server:
        assert ask(server, few_shot(QUERIES[1])).cached_tokens == 0
    if mx.default_device().type == mx.DeviceType.cpu:
        with banked(root, "--model", half, "--salt", "tenant", "--precision", "model") as server:
            assert ask(server, few_shot(QUERIES[1]), max_tokens=1).cached_tokens == 0
    with banked(root, "--model", half, "--salt", "tenant", "--precision", "float32") as server:
        assert ask(server, few_shot(QUERIES[1])).cached_tokens >= 2 * CHUNK


def test_prompts_below_a_chunk_are_stored_up_to_where_they_part(model: str, tmp_path: Path) -> None:
    root = tmp_path / "bank"  # chunks of 256 tokens
    with banked(root, "--model", model) as server:
        shots = [{"role": "user", "content": few_shot("")[0]["content"]}, *SHOTS]  # without a system prompt
        n_shared = [
            ask(server, [*shots, {"role": "user", "content": query}]).cached_tokens for query in ("why", "it glows")
        ][1]
        assert n_shared > 100
    with banked(root, "--model", model) as server:
        assert ask(server, [*shots, {"role": "user", "content": "lamp"}]).cached_tokens == n_shared
    with PrefixBank.open(root, read_only=True) as bank:
        assert [chunk.n_tokens for chunk in bank.chunks()] == [n_shared]


def test_a_system_prompt_is_stored_to_its_end(model: str, tmp_path: Path) -> None:
    root = tmp_path / "bank"
    with banked(root, "--model", model) as server:
        n_system = len("<system></system>\n<user>") + 20
        assert ask(server, few_shot("why")).cached_tokens == 0
    with banked(root, "--model", model) as server:
        other: Messages = [SYSTEM, {"role": "user", "content": "lamp"}]
        assert n_system < ask(server, other).cached_tokens < ask(server, other).prompt_tokens - 1


def test_eight_clients_at_once_get_the_answers_of_one_after_another(
    model: str, root: Path, cold: dict[str, str]
) -> None:
    for _ in range(2):  # cold, and from disk
        with banked(root, "--model", model) as server, ThreadPoolExecutor(8) as clients:
            for stream in (False, True):
                answers = list(clients.map(lambda query: ask(server, few_shot(query), stream=stream), QUERIES))  # noqa: B023
                assert [answer.text for answer in answers] == [cold[query] for query in QUERIES]
        require_sound(root)
    assert all(answer.cached_tokens == answer.prompt_tokens - 1 for answer in answers)


def test_two_models_switched_to_and_fro_keep_their_hits(
    model: str, root: Path, cold: dict[str, str], save_sharp: Callable[..., Path]
) -> None:
    other = str(save_sharp(seed=1))
    query = QUERIES[0]
    for is_first_run in (True, False):
        with banked(root, "--model", model) as server:
            texts: dict[str, set[str]] = {model: set(), other: set()}
            for turn in range(2):
                for name in (model, other):
                    answer = ask(server, few_shot(query), model=name)
                    texts[name].add(answer.text)
                    n_expected = answer.prompt_tokens - 1 if turn else full_chunks(answer.prompt_tokens)
                    assert answer.cached_tokens == (0 if is_first_run and not turn else n_expected)
            assert texts[model] == {cold[query]}
            assert len(texts[other]) == 1
            assert texts[other] != texts[model]
    with PrefixBank.open(root, read_only=True) as bank:
        assert sorted(usage.namespace.label for usage in bank.namespaces()) == sorted([model, other])


def delete(root: Path) -> Any:
    gone = root.rename(root.with_name("gone"))  # at once: the server may be writing
    shutil.rmtree(gone, ignore_errors=True)


def lock(root: Path) -> Any:
    connection = sqlite3.connect(root / "index.sqlite3", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    return connection


def replace_index(root: Path) -> Any:
    (root / "index.sqlite3").write_bytes(b"no index" * 1000)


def cut_shards(root: Path) -> Any:
    for path in root.rglob("*.safetensors"):
        with path.open("r+b") as file:
            file.truncate(100)


def block_shards(root: Path) -> Any:
    """Make storing fail, for root too, as a full or read-only file system does."""
    shutil.rmtree(root / "tmp")
    (root / "tmp").write_text("")


@pytest.mark.parametrize("harm", [delete, lock, replace_index, cut_shards, block_shards])
def test_a_bank_that_breaks_fails_no_request(
    harm: Callable[[Path], Any], model: str, root: Path, cold: dict[str, str], save_sharp: Callable[..., Path]
) -> None:
    with banked(root, "--model", model) as server:
        ask(server, few_shot(QUERIES[0]))
    with banked(root, "--model", model, busy_timeout_s=0.2) as server:
        assert ask(server, few_shot(QUERIES[1])).cached_tokens > 100
        held = harm(root)
        for query in QUERIES[:4]:
            assert ask(server, few_shot(query)).text == cold[query]
        assert ask(server, few_shot(QUERIES[0]), model=str(save_sharp(seed=2))).text  # attached to the broken bank
        assert ask(server, few_shot(QUERIES[4]), stream=True).text == cold[QUERIES[4]]
        assert server.stop() == 0
        del held
    assert server.said("Traceback") == 0
    said = [line for line in server.lines if "the bank could not be used" in line]
    assert len(said) == len(set(said))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_server_leaves_a_sound_bank(sig: int, model: str, root: Path) -> None:
    with banked(root, "--model", model) as server:
        ask(server, few_shot("why"))
        assert server.stop(sig) == 0
    require_sound(root, n_chunks=9)
    with banked(root, "--model", model) as server, ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(ask, server, few_shot(query), max_tokens=4000) for query in QUERIES[:4]]
        while server.said("progress") == 0:
            pass
        assert server.stop(sig) == 0
        for future in asked:  # answered, or told that it will not be
            assert future.exception(60) is not None or future.result().text
    require_sound(root)


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1", "llama4"])
def test_other_cache_kinds_give_their_cold_answers(name: str, root: Path, save_sharp: Callable[..., Path]) -> None:
    model = str(save_sharp(name))
    dialogue = [*few_shot("why"), {"role": "assistant", "content": "no"}, {"role": "user", "content": "lamp"}]
    asked = [few_shot("why"), few_shot("it glows"), few_shot("why"), dialogue]
    with plain("--model", model, "--prompt-cache-size", "0") as server:
        cold = [ask(server, messages).text for messages in asked]
    for is_first_run in (True, False):
        with banked(root, "--model", model) as server:
            answers = [ask(server, messages) for messages in asked]
            assert [answer.text for answer in answers] == cold
            if name != "llama4":  # whose requests have no checkpoints, and its finished caches lack the first rows
                assert (answers[0].cached_tokens == 0) == is_first_run
                assert answers[1].cached_tokens > 0
            assert server.said("could not be used") == 0
        require_sound(root, n_chunks=name != "llama4")


def test_penalties_see_the_tokens_that_they_see_without_a_bank(model: str, root: Path) -> None:
    options: dict[str, Any] = {"seed": 1, "frequency_penalty": 1.5, "extra_body": {"repetition_penalty": 1.9}}
    with plain("--model", model) as server:
        cold = ask(server, few_shot("why"), **options)
    with banked(root, "--model", model) as server:
        answers = [ask(server, few_shot("why"), **options) for _ in range(2)]
        assert [answer.text for answer in answers] == [cold.text] * 2
        assert answers[1].cached_tokens == cold.prompt_tokens - 20


def test_draft_models_are_served_beside_the_bank(
    model: str, root: Path, cold: dict[str, str], save_sharp: Callable[..., Path]
) -> None:
    with banked(root, "--model", model, "--draft-model", str(save_sharp(seed=3))) as server:
        for query in [*QUERIES[:3], *QUERIES[:3]]:
            answer = ask(server, few_shot(query))
            assert answer.text == cold[query]
        assert 0 < answer.cached_tokens < answer.prompt_tokens
        dialogue = [*few_shot(QUERIES[0]), {"role": "assistant", "content": cold[QUERIES[0]]}]
        dialogue.append({"role": "user", "content": "lamp"})
        continued = ask(server, dialogue)
    with plain("--model", model) as server:
        assert ask(server, dialogue).text == continued.text
    assert not list(root.rglob("*.safetensors"))


def test_little_memory_costs_hits_in_memory_only(model: str, root: Path, cold: dict[str, str]) -> None:
    with banked(root, "--model", model, "--memory-bytes", "0", "--max-bytes", "1MB") as server:
        for query in [*QUERIES[:3], *QUERIES[:3]]:
            answer = ask(server, few_shot(query))
            assert answer.text == cold[query]
        assert answer.cached_tokens == full_chunks(answer.prompt_tokens)
    with banked(root, "--model", model, "--prompt-cache-bytes", "100000") as server:
        assert [ask(server, few_shot(query)).text for query in QUERIES] == [cold[query] for query in QUERIES]


KEY = ("model", None, None)


def test_what_the_bank_can_not_take_stays_in_memory_and_leaves_tokens_to_compute(root: Path) -> None:
    with PrefixBank.open(root) as bank:
        llm = bank.attach(build_model(), build_tokenizer())
        served = BankedPromptCache(bank._session, lambda _: llm._caches, 4)
        tokens = [5, -7, -7, 9]  # with an image
        prompt_cache = make_prompt_cache(llm.model)
        llm.model(mx.array([[5, 6, 6, 9]]), cache=prompt_cache)
        assert served.fetch_nearest_cache(KEY, tokens) == (None, tokens)
        served.insert_cache(KEY, tokens, prompt_cache)
        for n_seen, n_left in ((0, 1), (1, 1), (3, 3)):
            served.hold_back = n_seen
            found, rest = served.fetch_nearest_cache(KEY, tokens)
            assert rest == tokens[-n_left:]
            assert found is not None
            assert {layer.offset for layer in found} == {4 - n_left}
        served.hold_back = 4
        assert served.fetch_nearest_cache(KEY, tokens) == (None, tokens)
        assert (len(served), served.nbytes > 0) == (1, True)
        served.trim_to(n_bytes=0)
        assert (len(served), served.nbytes) == (0, 0)
        assert bank.stats().n_chunks == 0


def test_memory_is_trimmed_from_what_was_used_least_recently(root: Path) -> None:
    with PrefixBank.open(root) as bank:
        llm = bank.attach(build_model(), build_tokenizer())
        served = BankedPromptCache(bank._session, lambda _: llm._caches, 4)
        for first in (1, 2):
            tokens = [first, *range(10, 30)]
            served.fetch_nearest_cache(KEY, tokens)
            prompt_cache = make_prompt_cache(llm.model)
            llm.model(mx.array([tokens]), cache=prompt_cache)
            served.insert_cache(KEY, tokens, prompt_cache)
        assert len(served) == 2
        served.trim_to(n_bytes=served.nbytes - 1)
        assert len(served) == 1
        assert served.fetch_nearest_cache(KEY, [2, *range(10, 40)])[1] == list(range(30, 40))
        assert sum(stats["n_bytes"] for stats in served.stats_by_type().values()) == served.nbytes


def test_whatever_fails_is_a_miss_and_one_warning(root: Path) -> None:
    def caches_of(key: object) -> PromptCaches:
        raise ZeroDivisionError("a mistake of ours")

    with PrefixBank.open(root) as bank:
        served = BankedPromptCache(bank._session, caches_of, 4)
        with pytest.warns(BankWarning, match="a mistake of ours") as said:
            for _ in range(2):
                assert served.fetch_nearest_cache(KEY, [1, 2]) == (None, [1, 2])
                served.insert_cache(KEY, [1, 2], [])
        assert len(said) == 2  # one for each action


def test_caches_of_a_model_with_its_draft_are_kept_for_what_both_have_seen(root: Path) -> None:
    with PrefixBank.open(root) as bank:
        served = BankedPromptCache(bank._session, lambda _: None, 4)
        model, tokens = build_model(), list(range(10, 18))
        both = [*make_prompt_cache(model), *make_prompt_cache(model)]
        model(mx.array([tokens[:5]]), cache=both[:2])
        model(mx.array([tokens[:4]]), cache=both[2:])
        served.insert_cache(KEY, tokens[:6], both)
        found, rest = served.fetch_nearest_cache(KEY, tokens)
        assert rest == tokens[4:]
        assert found is not None
        assert {layer.offset for layer in found} == {4}
