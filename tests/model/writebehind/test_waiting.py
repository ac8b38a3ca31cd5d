"""A generation waits only for a store that gives it something, and only where waiting is faster."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from prefixbank import PrefixBank, session
from prefixbank.writes import WriteQueue
from tests.model.tiny import FROM_DISK, random_ids
from tests.model.writebehind.gate import OTHER, PROMPT, Gate, cold_text, n_stored


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: WriteQueue) -> None:
        raise AssertionError("the writing thread is waited for")

    monkeypatch.setattr(WriteQueue, "wait", fail)


def test_generation_returns_while_its_store_is_still_to_be_written(llm: Any, bank: PrefixBank, gate: Gate) -> None:
    result = llm.generate(PROMPT, max_tokens=4)
    assert result.text == cold_text(llm, PROMPT)
    assert gate.entered.wait(60)
    assert list(bank.root.rglob("*.safetensors")) == []
    gate.opened.set()
    bank.flush()
    assert [c.end for c in bank.chunks()] == [16, 32, 48, 64]


@pytest.mark.parametrize("load", ["always", "auto"])
def test_same_prompt_again_waits_for_what_is_about_to_be_stored(
    bank_root: Path, gate: Gate, llama: Any, tokenizer: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it is not known that computing it again is faster."""
    waiting = threading.Event()
    real = WriteQueue.wait

    def wait(queue: WriteQueue) -> None:
        waiting.set()
        real(queue)

    monkeypatch.setattr(WriteQueue, "wait", wait)
    with PrefixBank.open(bank_root, chunk_tokens=16, memory_bytes=0, load=load) as bank:
        llm = bank.attach(llama, tokenizer)
        monkeypatch.setattr(bank._session.rates, "computed", lambda *_: None)  # nothing is known of the speed
        cold = cold_text(llm, [*PROMPT, 1])
        llm.generate(PROMPT, max_tokens=4)
        results: list[Any] = []
        again = threading.Thread(target=lambda: results.append(llm.generate([*PROMPT, 1], max_tokens=4)))
        again.start()
        assert waiting.wait(60)
        assert results == []
        gate.opened.set()
        again.join(60)
        (result,) = results
        assert (result.cached_tokens, result.text) == (64, cold)


def test_what_is_faster_to_compute_than_to_write_is_not_waited_for(
    bank_root: Path, gate: Gate, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_WRITTEN_BYTES_PER_S", 1e-9)
    with PrefixBank.open(bank_root, chunk_tokens=16, memory_bytes=0) as bank:
        llm = bank.attach(llama, tokenizer)
        llm.generate(PROMPT, max_tokens=4)
        with monkeypatch.context() as patch:
            patch.setattr(WriteQueue, "wait", lambda _: pytest.fail("the writing thread is waited for"))
            again = llm.generate(PROMPT, max_tokens=4)
        assert (again.cached_tokens, again.text) == (0, cold_text(llm, PROMPT))
        gate.opened.set()
        bank.flush()
        # The second store was on its way: it is neither copied nor queued again, nor does it count as skipped.
        assert gate.n_stores == 1
        assert "skipped_stores" not in bank.stats().session


@pytest.mark.usefixtures("gate", "nothing_waits")
def test_other_prompts_wait_for_nothing(bank_root: Path, llama: Any, tokenizer: Any, gate: Gate) -> None:
    bank = PrefixBank.open(bank_root, chunk_tokens=16, **FROM_DISK)
    llm = bank.attach(llama, tokenizer)
    for prompt in (PROMPT, OTHER, random_ids(64, seed=3)):
        assert llm.generate(prompt, max_tokens=4).text == cold_text(llm, prompt)
    gate.opened.set()
    bank.close()
    assert n_stored(bank_root, OTHER, llama, tokenizer) == 64


def test_what_is_in_memory_is_not_waited_for(
    bank_root: Path, gate: Gate, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PrefixBank.open(bank_root, chunk_tokens=16, load="always") as bank:
        llm = bank.attach(llama, tokenizer)
        llm.generate(PROMPT, max_tokens=4)

        def fail(_: WriteQueue) -> None:
            gate.opened.set()
            raise AssertionError("the writing thread is waited for")

        with monkeypatch.context() as patch:
            patch.setattr(WriteQueue, "wait", fail)
            again = llm.generate([*PROMPT, 1], max_tokens=4)
        gate.opened.set()
        assert (again.match.in_memory, again.text) == (True, cold_text(llm, [*PROMPT, 1]))
