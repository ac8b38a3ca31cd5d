"""Many prompts when something comes between: bad input, runs that are killed, results files, banks that fail."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixbank import BankWarning, ConfigError, PrefixBank, PromptError, StorageError, resultsfile
from prefixbank.many import ManyOptions, progress_bar
from tests.model.manyprompts import (
    HEAD,
    SHOTS,
    ablations,
    answers,
    as_completed,
    cold,
    mixed,
    n_unique,
    oddities,
    query,
    seen,
)
from tests.model.tiny import FROM_DISK, VOCAB, build_model, build_tokenizer, random_ids

# --- bad input


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1: the prompt is empty"),
        ([[1], ""], "prompt 1: the prompt is empty"),
        ([[1], [2], 7], "prompt 2: a int is no prompt"),
        ([[-1]], "prompt 0: token ids must be integers"),
        ([[1], [2, VOCAB]], "prompt 1: the prompt has the token id 320: the model knows 320 ids"),
        ([[{"role": "user"}, 5]], "prompt 0"),
        ("a single text", "several prompts"),
        (7, "several prompts"),
    ],
)
def test_a_prompt_that_can_not_be_used_is_named_before_anything_is_computed(
    prompts: Any, message: str, llm: Any, small_bank: PrefixBank
) -> None:
    with pytest.raises(PromptError, match=message):
        as_completed(llm, prompts)
    assert small_bank.stats().session.get("computed_tokens", 0) == 0


def test_a_prompt_longer_than_the_context_is_named(llm: Any, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.args, "max_position_embeddings", 50)
    assert len(answers(llm, [random_ids(50)], max_tokens=1)) == 1
    with pytest.raises(PromptError, match="prompt 1 has 51 tokens, but the model's context holds 50"):
        answers(llm, [[1], random_ids(51)])


@pytest.mark.parametrize(
    "options", [{"max_tokens": 0}, {"max_tokens": -2}, {"batch_size": 0}, {"hold_back": -1}, {"prefill_step_size": 0}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ManyOptions(**options)


# --- progress


def test_progress_counts_prompts_and_saved_tokens(llm: Any) -> None:
    steps: list[tuple[int, int, int]] = []
    prompts = ablations()
    results = answers(llm, prompts, max_tokens=2, progress=lambda *step: steps.append(step))
    assert [done for done, _, _ in steps] == list(range(len(prompts) + 1))
    assert {total for _, total, _ in steps} == {len(prompts)}
    assert steps[-1][2] == sum(result.cached_tokens for result in results) > 500


def test_the_bar_is_drawn_on_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")


def test_the_bar_says_how_many_tokens_were_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("sentiment") as progress:
        assert progress is not None
        progress(3, 10, 12345)
    assert "sentiment" in terminal.getvalue()
    assert "3/10" in terminal.getvalue()
    assert "12,345 tokens saved" in terminal.getvalue()


# --- the results file


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_results_are_streamed_to_a_file_and_picked_up(llm: Any, tmp_path: Path, small_bank: PrefixBank) -> None:
    path = tmp_path / "results.jsonl"
    prompts = [*mixed(), *oddities()]
    first = answers(llm, prompts, max_tokens=4, results_file=path)
    held = {line["index"]: line for line in lines_of(path)}
    for result in first:
        line = held[result.index]
        assert (line["token_ids"], line["text"], line["finish_reason"]) == seen([result])[0]
        assert (line["cached_tokens"], line["computed_tokens"]) == (result.cached_tokens, result.computed_tokens)
    n_computed = small_bank.stats().session.get("computed_tokens", 0)
    content = path.read_bytes()
    again = answers(llm, prompts, max_tokens=4, results_file=str(path))
    assert seen(again) == seen(first)
    assert all(result.picked_up for result in again)
    assert path.read_bytes() == content
    assert small_bank.stats().session.get("computed_tokens", 0) == n_computed
    # In another order, with prompts that are new: only those are computed.
    more = [random_ids(9, seed=77), *reversed(prompts)]
    moved = answers(llm, more, max_tokens=4, results_file=path)
    assert [result.picked_up for result in moved] == [False] + [True] * len(prompts)
    assert seen(moved)[1:] == seen(first)[::-1]


def test_each_result_is_in_the_file_before_it_is_given(llm: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for n, (index, result) in enumerate(as_completed(llm, ablations(), max_tokens=3, results_file=path), 1):
        lines = lines_of(path)
        assert len(lines) >= n
        assert result.token_ids in [line["token_ids"] for line in lines if line["index"] == index]


@pytest.mark.parametrize("change", ["max_tokens", "sampler", "model", "eos"])
def test_results_of_other_settings_are_left_alone(
    change: str, llm: Any, llama: Any, tokenizer: Any, tmp_path: Path, small_bank: PrefixBank
) -> None:
    path = tmp_path / "results.jsonl"
    prompts = mixed()
    answers(llm, prompts, max_tokens=4, results_file=path)
    options: dict[str, Any] = {"max_tokens": 4, "results_file": path}
    if change == "max_tokens":
        options["max_tokens"] = 5
    elif change == "sampler":
        options["sampler"] = lambda logprobs: mx.argmin(logprobs, axis=-1)
    elif change == "model":
        llm = small_bank.attach(build_model(seed=5), tokenizer)
    else:
        llm = small_bank.attach(llama, TokenizerWrapper(build_tokenizer(), eos_token_ids=[7]))
    other = answers(llm, prompts, **options)
    assert not any(result.picked_up for result in other)
    assert len(lines_of(path)) == 2 * len(prompts)
    assert all(result.picked_up for result in answers(llm, prompts, **options))


def test_sampled_answers_of_equal_prompts_are_picked_up_one_each(llm: Any, tmp_path: Path) -> None:
    def sampler(logprobs: mx.array) -> mx.array:
        return mx.random.categorical(logprobs)

    options: dict[str, Any] = {"max_tokens": 4, "results_file": tmp_path / "results.jsonl", "sampler": sampler}
    first = answers(llm, [HEAD] * 6, **options)
    again = answers(llm, [HEAD] * 8, **options)
    assert seen(again)[:6] == seen(first)
    assert [result.picked_up for result in again] == [True] * 6 + [False] * 2


def test_a_run_that_is_stopped_goes_on_where_it_was(llm: Any, tmp_path: Path, small_bank: PrefixBank) -> None:
    path = tmp_path / "results.jsonl"
    prompts = [HEAD + SHOTS[0] + query(seed) for seed in range(12)]
    wanted = [cold(llm, prompt, max_tokens=4) for prompt in prompts]

    def stop(done: int, _total: int, _saved: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answers(llm, prompts, max_tokens=4, batch_size=2, results_file=path, progress=stop)
    n_there = len(lines_of(path))
    assert n_there >= 5
    n_computed = small_bank.stats().session.get("computed_tokens", 0)
    results = answers(llm, prompts, max_tokens=4, batch_size=2, results_file=path)
    assert seen(results) == wanted
    assert sum(result.picked_up for result in results) == n_there
    # The shared run comes from the bank.
    left = [prompts[result.index] for result in results if not result.picked_up]
    n_new = small_bank.stats().session.get("computed_tokens", 0) - n_computed
    assert n_new <= sum(len(prompt) - 63 for prompt in left)


KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_lm.tokenizer_utils import TokenizerWrapper
from prefixbank import PrefixBank
from tests.model.manyprompts import HEAD, SHOTS, answers, query
from tests.model.tiny import CHAT_TEMPLATE, FROM_DISK, build_model, build_tokenizer

with PrefixBank.open(sys.argv[1], chunk_tokens=16, **FROM_DISK) as bank:
    llm = bank.attach(build_model(), TokenizerWrapper(build_tokenizer(chat_template=CHAT_TEMPLATE)))
    prompts = [HEAD + SHOTS[0] + query(seed) for seed in range(40)]
    def die(done, _total, _saved):
        if done == 8:
            bank.flush()  # what is stored behind has its time
            os.kill(os.getpid(), signal.SIGKILL)
    answers(llm, prompts, max_tokens=4, batch_size=2, results_file=sys.argv[2], progress=die)
"""


def test_a_run_that_is_killed_is_picked_up_by_another_process(
    llama: Any, tokenizer: Any, bank_root: Path, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    arguments = [sys.executable, "-c", KILLED, str(bank_root), str(path)]
    assert subprocess.run(arguments, cwd=Path(__file__).parents[2], check=False).returncode == -signal.SIGKILL
    n_there = path.read_bytes().count(b"\n")
    with path.open("ab") as file:
        file.write(b'{"index": 39, "prompt_di')  # what a torn write leaves
    prompts = [HEAD + SHOTS[0] + query(seed) for seed in range(40)]
    with PrefixBank.open(bank_root, **FROM_DISK) as bank:
        llm = bank.attach(llama, tokenizer)
        results = answers(llm, prompts, max_tokens=4, results_file=path)
        assert bank.check(read_data=True).ok
    assert seen(results) == [cold(llm, prompt, max_tokens=4) for prompt in prompts]
    assert sum(result.picked_up for result in results) == n_there >= 8
    computed = [result for result in results if not result.picked_up]
    assert all(result.match.n_tokens >= 63 and result.computed_tokens <= 25 for result in computed)
    assert len(lines_of(path)) == 40


def test_a_stream_that_is_left_early_closes_the_file_and_keeps_what_is_there(llm: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    stream = as_completed(llm, mixed(), max_tokens=3, batch_size=1, results_file=path)
    next(stream)
    with pytest.raises(ConfigError, match="another run writes to"):
        as_completed(llm, mixed(), results_file=path)
    stream.close()
    assert len(lines_of(path)) == 1
    assert sum(r.picked_up for r in answers(llm, mixed(), max_tokens=3, batch_size=1, results_file=path)) == 1


def test_a_failing_sampler_loses_nothing_that_was_computed(llm: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    calls = 0

    def sampler(logprobs: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise ZeroDivisionError
        return mx.argmax(logprobs, axis=-1)

    with pytest.raises(ZeroDivisionError):
        answers(llm, ablations(), max_tokens=4, batch_size=2, results_file=path, sampler=sampler)
    n_there = len(lines_of(path))
    assert n_there > 4
    results = answers(llm, ablations(), max_tokens=4, batch_size=2, results_file=path, sampler=sampler)
    assert sum(result.picked_up for result in results) == n_there
    assert seen(results) == [cold(llm, prompt, max_tokens=4) for prompt in ablations()]


def test_a_full_disk_is_said_and_the_file_goes_on_from_there(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    write = resultsfile._write
    calls = 0

    def full(descriptor: int, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            write(descriptor, data[:20])
            raise OSError(28, "No space left on device")
        write(descriptor, data)

    monkeypatch.setattr(resultsfile, "_write", full)
    with pytest.raises(StorageError, match="No space left"):
        answers(llm, mixed(), max_tokens=3, batch_size=1, results_file=path)
    results = answers(llm, mixed(), max_tokens=3, batch_size=1, results_file=path)
    assert sum(result.picked_up for result in results) == 3
    assert len(lines_of(path)) == len(mixed())


# --- a bank that fails


@pytest.fixture
def broken(bank_root: Path) -> Iterator[PrefixBank]:
    """A bank whose damage is the test's own business."""
    bank = PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16, busy_timeout_s=0.1)
    yield bank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BankWarning)
        bank.close()


def lock(bank: PrefixBank) -> Callable[[], None]:
    connection = sqlite3.connect(bank.root / "index.sqlite3", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    return connection.close


def delete(bank: PrefixBank) -> Callable[[], None]:
    shutil.rmtree(bank.root)
    return lambda: None


def damage(bank: PrefixBank) -> Callable[[], None]:
    for path in bank.root.rglob("*.safetensors"):
        path.write_bytes(b"nothing")
    return lambda: None


@pytest.mark.parametrize("how", [lock, delete, damage])
@pytest.mark.parametrize("warmed", [False, True])
@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_a_broken_bank_fails_no_answer(
    name: str,
    warmed: bool,
    how: Callable[[PrefixBank], Callable[[], None]],
    tokenizer: Any,
    broken: PrefixBank,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BankWarning)
        llm = broken.attach(build_model(name), tokenizer)
        prompts = [*ablations(), *oddities()]
        if warmed:
            answers(llm, prompts, max_tokens=1)
            broken.flush()
        mend = how(broken)
        n_failures = broken._session.counts["failures"]
        results = answers(llm, prompts, max_tokens=4)
        if how is not damage:  # not asked again for each prompt: that would wait for a lock each time
            assert broken._session.counts["failures"] == n_failures + 1
        mend()
    assert seen(results) == [cold(llm, prompt, max_tokens=4) for prompt in prompts]
    assert sum(result.computed_tokens for result in results) <= 1.01 * n_unique(llm, prompts) + len(prompts)


def test_a_bank_that_is_read_only_is_read(llama: Any, tokenizer: Any, bank_root: Path) -> None:
    prompts = ablations()
    with PrefixBank.open(bank_root, chunk_tokens=16, **FROM_DISK) as bank:
        answers(bank.attach(llama, tokenizer), prompts, max_tokens=1)
    with PrefixBank.open(bank_root, read_only=True, **FROM_DISK) as bank:
        llm = bank.attach(llama, tokenizer)
        results = answers(llm, prompts, max_tokens=3)
        assert seen(results) == [cold(llm, prompt, max_tokens=3) for prompt in prompts]
        assert sum(result.cached_tokens for result in results) > 800
