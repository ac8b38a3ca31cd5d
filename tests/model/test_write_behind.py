"""Storing behind a generation: bounded, never waited for without need, and whole whatever ends or fails meanwhile."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import generate
from mlx_lm.models.cache import make_prompt_cache

from prefixbank import BankWarning, PrefixBank, StorageError, session, storing
from prefixbank.cli import main
from prefixbank.kvcache.capture import held_arrays, leaf_caches
from prefixbank.layout import CacheLayout, LayerLayout, RowArray
from prefixbank.shards import ShardWriter
from prefixbank.values import ChunkKey, ChunkRecord, Namespace
from prefixbank.writes import WriteQueue
from tests.model.test_kinds import ALL, ROWS_ONLY
from tests.model.tiny import CONFIGS, FROM_DISK, build_model, random_ids

PROMPT = random_ids(64)
OTHER = random_ids(64, seed=2)
ROOT = Path(__file__).parents[2]


@dataclass
class Gate:
    """Stand in front of each store of the writing thread until it is opened."""

    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    n_stores: int = 0

    def pass_through(self) -> None:
        if threading.current_thread().name.startswith("prefixbank-write"):
            self.entered.set()
            assert self.opened.wait(20)
            self.n_stores += 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    real = storing.store

    def store(*given: Any, **options: Any) -> Any:
        made.pass_through()
        return real(*given, **options)

    monkeypatch.setattr(storing, "store", store)
    yield made
    made.opened.set()


@pytest.fixture
def bank(bank_root: Path, gate: Gate) -> Iterator[PrefixBank]:
    """Give a bank that reads what it gives out from its files."""
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16) as opened:
        yield opened
        gate.opened.set()
        report = opened.check(read_data=True)
        assert report.ok, report.findings


@pytest.fixture
def llm(bank: PrefixBank, llama: Any, tokenizer: Any) -> Any:
    return bank.attach(llama, tokenizer)


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: WriteQueue) -> None:
        raise AssertionError("the writing thread is waited for")

    monkeypatch.setattr(WriteQueue, "wait", fail)


def cold_text(llm: Any, prompt: list[int], n_tokens: int = 4) -> str:
    text: str = generate(llm.model, llm.tokenizer, prompt, max_tokens=n_tokens)
    return text


def n_stored(root: Path, prompt: list[int], llama: Any, tokenizer: Any) -> int:
    """Return how much of a prompt another process would find."""
    with PrefixBank.open(root, read_only=True, **FROM_DISK) as bank:
        n_tokens: int = bank.attach(llama, tokenizer).match([*prompt, 1]).n_tokens
        return n_tokens


def writing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefixbank-write")]


# --- waiting, and not


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


# --- the bound


def test_full_queue_skips_the_store_and_counts_it(bank_root: Path, gate: Gate, llama: Any, tokenizer: Any) -> None:
    with PrefixBank.open(bank_root, chunk_tokens=16, write_queue_bytes=1, **FROM_DISK) as bank:
        llm = bank.attach(llama, tokenizer)
        counts = bank._session.counts
        llm.generate(PROMPT, max_tokens=4)  # one store of any size
        assert gate.entered.wait(60)
        n_queued = bank._session._writes.n_bytes
        assert n_queued >= llm.layout.data_bytes(64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is no failure
            for number in range(1, 3):
                assert llm.generate(OTHER, max_tokens=4).text == cold_text(llm, OTHER)
                assert counts["skipped_stores"] == number
        llm.prefill(OTHER)
        assert counts["skipped_stores"] == 3
        assert bank._session._writes.n_bytes == n_queued
        gate.opened.set()
        bank.flush()
        assert (llm.match([*PROMPT, 1]).n_tokens, llm.match([*OTHER, 1]).n_tokens) == (64, 0)
        llm.generate(OTHER, max_tokens=4)
        bank.flush()
        assert llm.match([*OTHER, 1]).n_tokens == 64
        stats = bank.stats().session
        assert (stats["skipped_stores"], stats.get("failed_stores", 0)) == (3, 0)
        assert bank.check(read_data=True).ok


def test_queue_holds_as_many_stores_as_its_bytes(bank_root: Path, gate: Gate, llama: Any, tokenizer: Any) -> None:
    n_bytes = 0
    for queue_bytes in (10**9, None):
        given = 2 * n_bytes if queue_bytes is None else queue_bytes
        with PrefixBank.open(bank_root, chunk_tokens=16, write_queue_bytes=given, **FROM_DISK) as bank:
            llm = bank.attach(llama, tokenizer)
            queue = bank._session._writes
            for number in range(1, 2 if queue_bytes else 5):
                llm.generate(random_ids(64, seed=number + given), max_tokens=2)
                n_bytes = n_bytes or queue.n_bytes
                assert queue.n_bytes == min(number, 2) * n_bytes
            assert bank._session.counts["skipped_stores"] == (0 if queue_bytes else 2)
            gate.opened.set()
            bank.flush()
            assert queue.n_bytes == 0
            assert bank.stats().session["stored_chunks"] == (4 if queue_bytes else 8)
            gate.opened.clear()


def test_only_new_rows_are_copied_and_only_once(llm: Any, bank: PrefixBank, monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[tuple[Any, int]] = []
    monkeypatch.setattr(bank._session, "store_behind", lambda _n, _t, source, n_bytes: queued.append((source, n_bytes)))
    llm.warm(PROMPT[:40])
    llm.generate([*PROMPT, 1], max_tokens=20)
    ((recorder, n_bytes),) = queued
    # Two full chunks are there; the tail of 8 goes into a full one, of which all rows are needed.
    assert n_bytes == llm.layout.data_bytes(32)
    pieces = [piece for pieces in recorder._pieces for piece in pieces]
    assert sum(piece.n_bytes for piece in pieces) == n_bytes
    assert {(piece.start, piece.stop) for piece in pieces} == {(32, 64)}
    assert (recorder.has_rows(32, 32), recorder.has_rows(16, 16)) == (True, False)
    for run in recorder.runs(32, 16):
        assert any(np.shares_memory(run, piece.rows) for piece in pieces)


def test_repeat_copies_and_writes_nothing(
    llm: Any, bank: PrefixBank, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.opened.set()
    prompt = [*PROMPT, 1]
    llm.generate(prompt, max_tokens=4)
    bank.flush()
    written = bank.stats().session["written_bytes"]
    before = {path: path.stat().st_mtime_ns for path in bank.root.rglob("*.safetensors")}
    assert written == sum(path.stat().st_size for path in before)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("something is written or queued")

    monkeypatch.setattr(os, "writev", fail)
    monkeypatch.setattr(bank._session, "store_behind", fail)
    for _ in range(2):
        assert llm.generate(prompt, max_tokens=4).text == cold_text(llm, prompt)
        assert llm.generate(PROMPT[:50], max_tokens=4).cached_tokens == 49
        llm.prefill(prompt)
        with llm.checkout(prompt):
            pass
        assert llm.warm(PROMPT).written_bytes == 0
    assert bank.stats().session["written_bytes"] == written
    assert {path: path.stat().st_mtime_ns for path in bank.root.rglob("*.safetensors")} == before


def test_hardly_more_is_written_than_the_new_rows(
    bank_root: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1.02 times their bytes, with chunks of 256 and heads of 64."""
    monkeypatch.setitem(CONFIGS, "wide heads", {**CONFIGS["llama"], "hidden_size": 256})
    with PrefixBank.open(bank_root, **FROM_DISK) as bank:
        llm = bank.attach(build_model("wide heads"), tokenizer)
        shared = random_ids(512)
        n_new = 0
        for prompt, n_new_tokens in (
            (shared + random_ids(30, seed=1), 512),
            (shared + random_ids(40, seed=2), 0),
            (shared + random_ids(280, seed=3), 256),
            (random_ids(300, seed=4), 256),
        ):
            llm.generate(prompt, max_tokens=2)
            bank.flush()
            n_new += n_new_tokens
            on_disk = sum(path.stat().st_size for path in bank.root.rglob("*.safetensors"))
            assert on_disk == bank.stats().session["written_bytes"]
            assert 1.0 < on_disk / llm.layout.data_bytes(n_new) <= 1.02


@pytest.mark.parametrize(
    ("n_layers", "arrays"),
    [
        (30, [RowArray(role, "BF16", 3, 64) for role in ("keys", "values")]),  # SmolLM2-135M
        (18, [RowArray(role, "BF16", 1, 256) for role in ("keys", "values")]),  # gemma3-270m
        (16, [RowArray(role, "F16", 8, 64) for role in ("keys", "values")]),  # Llama-3.2-1B
        (61, [RowArray("keys", "BF16", 1, 512), RowArray("values", "BF16", 1, 64)]),  # DeepSeek-V3
    ],
)
def test_header_of_a_full_chunk_is_at_most_a_fiftieth_of_real_models_rows(
    n_layers: int, arrays: list[RowArray]
) -> None:
    layout = CacheLayout((LayerLayout("kv", (), tuple(arrays)),) * n_layers)
    token_ids = b"\xff\xff\x01\x00" * 256  # six digits each
    namespace = Namespace(
        1, ChunkKey(b"r" * 16), "f" * 64, "e" * 64, "a/model/with/a/long/name" * 4, layout.to_json(), 1
    )
    record = ChunkRecord(ChunkKey(b"k" * 16), ChunkKey(b"p" * 16), 1, 10**6, 256, token_ids, None, 0, 0, 0, b"", False)
    draft = storing._draft(record, None, layout, namespace)
    assert len(draft.header) <= 0.02 * layout.data_bytes(256)


# --- what is copied is what is stored


def digests(root: Path) -> set[tuple[int, int, bool, bytes]]:
    """Return place and digest of each shard."""
    with PrefixBank.open(root, read_only=True) as bank:
        return {(c.start, c.end, c.has_state, c.digest) for c in bank.chunks()}


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("deepseek_v3", "gpt_oss", "mamba2")])
def test_store_is_right_though_the_live_cache_was_written_in_meanwhile(
    name: str, bank_root: Path, tmp_path: Path, tokenizer: Any, gate: Gate
) -> None:
    model = build_model(name)
    prompt = random_ids(70)
    with PrefixBank.open(bank_root, chunk_tokens=16, load="always") as bank:
        live = bank.attach(model, tokenizer, prefill_step_size=16).prefill(prompt)
        assert gate.entered.wait(60)
        for token_id in random_ids(30, seed=3):  # in place, over the ends of windows
            mx.eval(model(mx.array([[token_id]]), cache=live.prompt_cache))
        for leaf in leaf_caches(live.prompt_cache):
            for owner, name_of_array in ((leaf, "keys"), (leaf, "values")):
                rows = getattr(owner, name_of_array, None)
                if isinstance(rows, mx.array):
                    rows[..., :, :] = mx.zeros_like(rows) + 7
            if hasattr(leaf, "cache"):
                for slot, state in enumerate(leaf.cache):
                    if state is not None:
                        state[...] = mx.zeros_like(state) + 7
                        leaf.cache[slot] = state
        mx.eval(held_arrays(live.prompt_cache))
        gate.opened.set()
        bank.flush()
        assert bank.check(read_data=True).ok
    with PrefixBank.open(tmp_path / "undisturbed", chunk_tokens=16, load="always") as bank:
        bank.attach(model, tokenizer, prefill_step_size=16).prefill(prompt)
    assert len(stored := digests(bank_root)) >= 5
    assert stored == digests(tmp_path / "undisturbed")
    with PrefixBank.open(bank_root, **FROM_DISK) as bank:
        resolved = bank.attach(model, tokenizer).resolve(prompt)
        cold = make_prompt_cache(model)
        wanted = model(mx.array(prompt)[None], cache=cold)[:, -1]
        assert resolved.cached_tokens == 69
        given = model(mx.array(resolved.rest)[None], cache=resolved.prompt_cache)[:, -1]
        assert mx.abs(given - wanted).max().item() < 1e-4


@pytest.mark.parametrize("name", ROWS_ONLY)
def test_next_generation_writes_into_the_cache_that_is_being_stored(
    name: str, bank_root: Path, tmp_path: Path, tokenizer: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the very cache from memory whose rows wait to be written."""
    monkeypatch.setattr(session, "_WRITTEN_BYTES_PER_S", 1e-9)  # nothing is worth waiting for
    model = build_model(name)
    with PrefixBank.open(bank_root, chunk_tokens=16) as bank:
        llm = bank.attach(model, tokenizer, prefill_step_size=16)
        llm.generate(PROMPT, max_tokens=2)
        assert gate.entered.wait(60)
        for prompt in ([*PROMPT, 1, 2], PROMPT[:30] + random_ids(20, seed=3), [*PROMPT, 7]):
            assert llm.generate(prompt, max_tokens=6).text == cold_text(llm, prompt, 6)
        gate.opened.set()
    with PrefixBank.open(tmp_path / "undisturbed", chunk_tokens=16, load="always") as bank:
        bank.attach(model, tokenizer, prefill_step_size=16).generate(PROMPT, max_tokens=2)
    undisturbed = digests(tmp_path / "undisturbed")
    assert len(undisturbed) == 4
    assert undisturbed <= digests(bank_root)


# --- failures


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


# --- the end


def test_closing_writes_what_is_queued(bank_root: Path, gate: Gate, llama: Any, tokenizer: Any) -> None:
    before = set(writing_threads())
    bank = PrefixBank.open(bank_root, chunk_tokens=16, **FROM_DISK)
    llm = bank.attach(llama, tokenizer)
    for prompt in (PROMPT, OTHER):
        llm.generate(prompt, max_tokens=4)
    assert gate.entered.wait(60)
    (thread,) = set(writing_threads()) - before
    closing_it = threading.Thread(target=bank.close)
    closing_it.start()
    assert closing_it.is_alive()
    gate.opened.set()
    closing_it.join(60)
    assert not thread.is_alive()
    bank.close()
    assert [n_stored(bank_root, prompt, llama, tokenizer) for prompt in (PROMPT, OTHER)] == [64, 64]


def test_block_that_ends_with_an_error_writes_what_is_queued(
    bank_root: Path, gate: Gate, llama: Any, tokenizer: Any
) -> None:
    gate.opened.set()
    with pytest.raises(ZeroDivisionError), PrefixBank.open(bank_root, chunk_tokens=16, **FROM_DISK) as bank:
        bank.attach(llama, tokenizer).generate(PROMPT, max_tokens=4)
        raise ZeroDivisionError
    assert n_stored(bank_root, PROMPT, llama, tokenizer) == 64


def test_closing_warns_of_what_can_not_be_written(
    bank_root: Path, llama: Any, tokenizer: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = PrefixBank.open(bank_root, chunk_tokens=16, **FROM_DISK)
    bank.attach(llama, tokenizer).generate(PROMPT, max_tokens=4)
    assert gate.entered.wait(60)

    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(ShardWriter, "write", fail)
    with pytest.warns(BankWarning, match="no space left"):
        gate.opened.set()
        bank.close()
    assert bank._session.counts["failed_stores"] == 1
    assert n_stored(bank_root, PROMPT, llama, tokenizer) == 0


def test_closed_bank_starts_no_thread_and_keeps_nothing(
    bank_root: Path, llama: Any, tokenizer: Any, gate: Gate
) -> None:
    gate.opened.set()
    before = set(writing_threads())
    bank = PrefixBank.open(bank_root, chunk_tokens=16, load="always")
    llm = bank.attach(llama, tokenizer)
    bank.close()
    with pytest.warns(BankWarning):
        assert llm.generate(PROMPT, max_tokens=4).text == cold_text(llm, PROMPT)
        left = set(writing_threads()) - before
        bank._session._writes.close()
    assert left == set()
    assert bank._session.memory.n_bytes == 0


def test_read_only_bank_queues_nothing(bank_root: Path, llama: Any, tokenizer: Any, unchanged: Any) -> None:
    PrefixBank.open(bank_root, chunk_tokens=16).close()
    before = set(writing_threads())
    with unchanged(bank_root), PrefixBank.open(bank_root, read_only=True, **FROM_DISK) as bank:
        llm = bank.attach(llama, tokenizer)
        for _ in range(2):
            assert llm.generate(PROMPT, max_tokens=4, keep=True).cached_tokens == 0
        bank.flush()
        assert set(writing_threads()) == before


def test_interrupted_generation_stores_nothing_and_spoils_nothing(llm: Any, bank: PrefixBank, gate: Gate) -> None:
    llm.generate(PROMPT, max_tokens=4)
    n_asked = 0

    def sampler(logits: mx.array) -> mx.array:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 3:
            signal.raise_signal(signal.SIGINT)
        return mx.argmax(logits, axis=-1)

    with pytest.raises(KeyboardInterrupt):
        llm.generate([*OTHER, 1], sampler=sampler, max_tokens=8)
    gate.opened.set()
    bank.flush()
    assert (llm.match([*PROMPT, 1]).n_tokens, llm.match([*OTHER, 1]).n_tokens) == (64, 0)
    assert llm.generate([*OTHER, 1], max_tokens=4).text == cold_text(llm, [*OTHER, 1])


EXITS = {
    "end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise ZeroDivisionError", 1),
    "interrupt": ("llm.generate(random_ids(64, seed=3), sampler=interrupt, max_tokens=4)", -signal.SIGINT),
    "thread": ("threading.Thread(target=go_on).start()", 0),
}
"""How an interpreter ends, and its exit code."""


@pytest.fixture(scope="module")
def exits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, int, str]]]:
    """Let processes generate with a writing thread that is held up, and end without closing their banks, all at once.

    Gives a function that waits for the end, and returns the bank root, the exit code and what was said.
    """
    script = (
        "from prefixbank.blas import load_blas; load_blas()\n"
        "import signal, sys, threading\n"
        "from prefixbank import PrefixBank, storing\n"
        "import mlx.core as mx\n"
        "from tests.model.tiny import FROM_DISK, build_model, build_tokenizer, random_ids\n"
        "ending, real = threading.Event(), storing.store\n"
        "def slow(*given, **options):\n"
        "    assert ending.wait(60); return real(*given, **options)\n"
        "def interrupt(logits):\n"
        "    signal.raise_signal(signal.SIGINT); return mx.argmax(logits, axis=-1)\n"
        "def go_on():\n"
        "    threading.main_thread().join()\n"
        "    for _ in range(2): print(llm.generate(random_ids(64, seed=3), max_tokens=2).cached_tokens)\n"
        "storing.store = slow\n"
        "bank = PrefixBank.open(sys.argv[1], chunk_tokens=16, **FROM_DISK)\n"
        "llm = bank.attach(build_model(), build_tokenizer())\n"
        "for seed in (1, 2): llm.generate(random_ids(64, seed=seed), max_tokens=2)\n"
        "threading._register_atexit(ending.set)\n"  # called when the main thread has come to its end
    )
    root = tmp_path_factory.mktemp("exits")
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", script + end, str(root / name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for name, (end, _) in EXITS.items()
    }

    def wait(name: str) -> tuple[Path, int, str]:
        out, err = running[name].communicate(timeout=120)
        return root / name, running[name].returncode, out + err

    yield wait
    for process in running.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", EXITS)
def test_interpreter_that_exits_writes_what_is_queued(end: str, exits: Any, llama: Any, tokenizer: Any) -> None:
    root, code, said = exits(end)
    if end == "thread":  # one that goes on behind the main thread's end: what can't be stored any more is left
        assert said.splitlines()[:2] == ["0", "0"], said
        # MLX (0.32.4) aborts at times when a process ends soon after a thread that generated, also without a bank.
        assert code in (0, -signal.SIGABRT), said
    else:
        assert code == EXITS[end][1], said
    assert main(["--bank", str(root), "check", "--read-data"]) == 0
    with PrefixBank.open(root, **FROM_DISK) as bank:
        llm = bank.attach(llama, tokenizer)
        assert llm.match([*random_ids(64, seed=3), 1]).n_tokens == 0
        for seed in (1, 2):
            prompt = [*random_ids(64, seed=seed), 1]
            assert [c.end for c in llm.match(prompt).chunks] == [16, 32, 48, 64]
            assert llm.generate(prompt, max_tokens=4).text == cold_text(llm, prompt)
        assert bank.check(read_data=True).findings == ()
