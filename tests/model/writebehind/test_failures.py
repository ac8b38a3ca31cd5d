"""A store that fails costs nothing but itself: warned of once, counted, raised by flush, and nothing half done."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from prefixbank import BankWarning, PrefixBank, StorageError, session, storing
from prefixbank.shards import ShardWriter
from tests.model.tiny import FROM_DISK, random_ids
from tests.model.writebehind.gate import OTHER, PROMPT, Gate, cold_text, n_stored


@pytest.mark.parametrize("error", [StorageError("no space left"), RuntimeError("not one of ours")])
def test_store_that_fails_is_warned_of_once_counted_and_raised_by_flush_once(
    error: Exception, llm: Any, bank: PrefixBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.warns(BankWarning, match=str(error)) as told:

        def fail(*_: Any, **__: Any) -> None:
            raise error

        patch.setattr(storing, "store", fail)
        for prompt in (PROMPT, OTHER):
            assert llm.generate(prompt, max_tokens=4).text == cold_text(llm, prompt)
            bank._session._writes.wait()
    assert len(told) == 1
    assert bank.stats().session["failed_stores"] == 2
    monkeypatch.undo()
    assert llm.generate(PROMPT, max_tokens=4).text == cold_text(llm, PROMPT)
    with pytest.raises(type(error), match=str(error)):
        bank.flush()
    bank.flush()
    assert llm.match([*PROMPT, 1]).n_tokens == 64
    assert bank.stats().session["failed_stores"] == 2


def test_shard_that_can_not_be_written_leaves_nothing_behind(
    llm: Any, bank: PrefixBank, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.opened.set()
    n_written = 0
    real = ShardWriter.write

    def write(*given: Any) -> Any:
        nonlocal n_written
        n_written += 1
        if n_written == 3:
            raise StorageError("no space left")
        return real(*given)

    monkeypatch.setattr(ShardWriter, "write", write)
    with pytest.warns(BankWarning, match="no space left"):
        llm.generate(PROMPT, max_tokens=4)
        bank._session._writes.wait()
    assert bank.chunks() == []
    assert list(bank.root.rglob("*.safetensors")) == []
    llm.generate(PROMPT, max_tokens=4)  # the fourth and later ones can be
    assert len(bank.chunks()) == 4
    with pytest.raises(StorageError):
        bank.flush()


def test_store_that_meets_a_locked_index_is_a_pity_only(
    bank_root: Path, gate: Gate, llama: Any, tokenizer: Any
) -> None:
    with PrefixBank.open(bank_root, chunk_tokens=16, busy_timeout_s=0.05, **FROM_DISK) as bank:
        llm = bank.attach(llama, tokenizer)
        llm.generate(PROMPT, max_tokens=4)
        assert gate.entered.wait(60)
        with closing(sqlite3.connect(bank_root / "index.sqlite3")) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.warns(BankWarning, match="could not be stored"):
                gate.opened.set()
                bank._session._writes.wait()
            other.rollback()
        assert bank.stats().session["failed_stores"] == 1
        llm.generate(PROMPT, max_tokens=4)
        assert len(bank.chunks()) == 4


def test_put_and_warm_store_at_once_and_raise(
    llm: Any, bank: PrefixBank, gate: Gate, bank_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(OTHER, max_tokens=4)
    assert gate.entered.wait(60)
    assert llm.warm(PROMPT).stored_tokens == 64  # it does not stand behind what waits to be written
    assert n_stored(bank_root, PROMPT, llm.model, llm.tokenizer) == 64
    live = make_prompt_cache(llm.model)
    third = random_ids(40, seed=3)
    llm.model(mx.array(third)[None], cache=live)
    assert llm.put(third, live).n_tokens == 40
    assert n_stored(bank_root, third, llm.model, llm.tokenizer) == 40
    gate.opened.set()
    bank.flush()

    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(ShardWriter, "write", fail)
    with pytest.raises(StorageError, match="no space left"):
        llm.warm(random_ids(40, seed=4))
    live = make_prompt_cache(llm.model)
    llm.model(mx.array(random_ids(40, seed=5))[None], cache=live)
    with pytest.raises(StorageError, match="no space left"):
        llm.put(random_ids(40, seed=5), live)
    bank.flush()
    assert "failed_stores" not in bank.stats().session


def test_prefix_that_the_budget_refused_is_not_copied_again_at_once(
    bank_root: Path, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PrefixBank.open(bank_root, chunk_tokens=16, max_bytes=8192, **FROM_DISK) as bank:
        llm = bank.attach(llama, tokenizer)
        with pytest.warns(BankWarning, match="budget"):
            llm.generate(PROMPT, max_tokens=4)
            bank.flush()
        assert bank.stats().session["refused_stores"] == 1
        with monkeypatch.context() as patch:
            patch.setattr(bank._session, "store_behind", lambda *_: pytest.fail("the rows are copied again"))
            llm.generate(PROMPT, max_tokens=4)
        with pytest.warns(BankWarning, match="budget"):  # asked for by name, it is tried again
            bank._session._warned.clear()
            assert llm.warm(PROMPT).stored_tokens == 0


def test_uses_that_can_not_be_noted_are_no_failed_store(
    llm: Any, bank: PrefixBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.warm(PROMPT)
    monkeypatch.setattr(session, "_USES_BETWEEN_WRITES", 1)
    with monkeypatch.context() as patch, pytest.warns(BankWarning) as told:

        def fail(*_: Any, **__: Any) -> None:
            raise StorageError("no space left")

        patch.setattr(session.chunk_rows, "touch_many", fail)
        llm.resolve(PROMPT)
        bank._session._writes.wait()
    assert "could not be stored" not in str(told[0].message)
    assert "failed_stores" not in bank._session.counts
