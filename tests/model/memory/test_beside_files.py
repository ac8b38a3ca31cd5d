"""Memory and files: either serves where the other can not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from prefixbank import BankWarning, PrefixBank, StorageError, storing
from tests.model.memory.users import (
    PROMPTS,
    SHARED,
    Open,
    answers_as_cold,
    cold_text,
    goes_on_right,
    kept,
)
from tests.model.test_kinds import ALL, RECURRENT
from tests.model.tiny import build_model, random_ids


@pytest.mark.parametrize("name", ALL)
def test_prefix_that_was_evicted_from_disk_is_right_from_memory_and_is_stored_again(
    name: str, models: dict[str, Any], tokenizer: Any, open_bank: Open
) -> None:
    bank, other = open_bank(), open_bank(memory_bytes=0)
    llm = bank.attach(models[name], tokenizer)
    files = other.attach(models[name], tokenizer)
    prompt = random_ids(64)
    llm.generate(prompt, max_tokens=3)
    bank.flush()
    assert kept(bank) != []
    other.prune(max_bytes=0)  # this one's memory is not that one's
    assert files.match([*prompt, 1]).n_tokens == 0
    for _ in range(2):
        assert llm.match([*prompt, 1]).in_memory
        assert answers_as_cold(llm, [*prompt, 1]) >= 63
    bank.flush()
    if name in RECURRENT:  # their states can be had again only where they were taken
        return
    resolved = files.resolve([*prompt, 1])
    assert resolved.cached_tokens == 64
    goes_on_right(llm, [*prompt, 1], resolved)


def test_prefix_in_memory_whose_place_on_disk_another_one_took_is_stored_again(
    open_bank: Open, llama: Any, tokenizer: Any
) -> None:
    bank, other = open_bank(), open_bank(memory_bytes=0)
    llm, files = bank.attach(llama, tokenizer), other.attach(llama, tokenizer)
    prompt = random_ids(64)
    llm.generate(prompt, max_tokens=3)
    bank.flush()
    other.prune(max_bytes=0)
    files.warm(prompt[:20] + random_ids(44, seed=2))
    for _ in range(2):
        assert llm.generate([*prompt, 1], max_tokens=8).text == cold_text(llm, [*prompt, 1])
    bank.flush()
    resolved = files.resolve([*prompt, 1])
    goes_on_right(llm, [*prompt, 1], resolved)
    assert resolved.cached_tokens == 64


def test_prefix_whose_store_failed_is_kept_in_memory_and_stored_later(
    llm: Any, bank: PrefixBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("no space left")

    prompt = random_ids(64)
    with monkeypatch.context() as patch:
        patch.setattr(storing, "store", fail)
        with pytest.warns(BankWarning, match="no space left"):
            llm.generate(prompt, max_tokens=3)
            bank._session.settle()
    assert bank.chunks() == []
    result = llm.generate([*prompt, 1], max_tokens=8)
    assert (result.match.in_memory, result.text) == (True, cold_text(llm, [*prompt, 1]))
    assert len(bank.chunks()) == 4
    with pytest.raises(StorageError):
        bank.flush()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
def test_read_only_bank_has_a_memory(
    name: str, models: dict[str, Any], tokenizer: Any, open_bank: Open, no_shard_is_read: Any, unchanged: Any
) -> None:
    with PrefixBank.open(open_bank().root) as writing:
        writing.attach(models[name], tokenizer).warm(SHARED)
    bank = open_bank(read_only=True)
    with unchanged(bank.root):
        llm = bank.attach(models[name], tokenizer)
        assert not llm.resolve(PROMPTS[0]).match.in_memory
        with no_shard_is_read():
            for prompt in PROMPTS:
                goes_on_right(llm, prompt, llm.resolve(prompt))
                answers_as_cold(llm, prompt)
                with llm.checkout(prompt) as lease:
                    goes_on_right(llm, prompt, lease)
        bank.flush()


def test_models_that_a_read_only_bank_does_not_know_share_nothing(open_bank: Open, tokenizer: Any) -> None:
    """They all have the number 0 there."""
    open_bank()
    bank = open_bank(read_only=True)
    llms = [bank.attach(build_model(seed=seed), tokenizer) for seed in range(2)]
    for _ in range(2):
        for llm in llms:
            answers_as_cold(llm, PROMPTS[0])
            goes_on_right(llm, PROMPTS[1], llm.resolve(PROMPTS[1]))
    assert llms[0].match(PROMPTS[0]).in_memory


@pytest.fixture
def doomed(bank_root: Path) -> Iterator[PrefixBank]:
    """Give a bank whose damage is the test's own business."""
    with PrefixBank.open(bank_root, chunk_tokens=16, load="always", busy_timeout_s=0.05) as bank:
        yield bank


def generates_right_from_memory(llm: Any) -> None:
    for prompt in PROMPTS:
        result = llm.generate(prompt, max_tokens=8)
        assert (result.text, result.cached_tokens) == (cold_text(llm, prompt), 50)
        assert result.match.in_memory
        resolved = llm.resolve(prompt)
        assert resolved.match.in_memory
        goes_on_right(llm, prompt, resolved)
        with llm.checkout(prompt) as lease:
            goes_on_right(llm, prompt, lease)


@pytest.mark.parametrize("damage", ["deleted", "garbage", "locked"])
def test_memory_serves_while_the_index_can_not(
    damage: str, doomed: PrefixBank, llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    llm = doomed.attach(llama, tokenizer)
    llm.warm(SHARED)
    index = doomed.root / "index.sqlite3"
    if damage == "locked":
        with closing(sqlite3.connect(index)) as other, pytest.warns(BankWarning):
            other.execute("BEGIN EXCLUSIVE")
            generates_right_from_memory(llm)
        assert llm.generate(PROMPTS[0], max_tokens=8).match.in_memory
        return
    if damage == "deleted":
        index.unlink()
    else:
        index.write_bytes(b"\xff" * index.stat().st_size)
    with pytest.warns(BankWarning):
        generates_right_from_memory(llm)
        doomed.close()
