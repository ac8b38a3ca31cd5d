"""What is queued stays within its bytes, and hardly more than the new rows is copied or written."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixbank import PrefixBank, storing
from prefixbank.layout import CacheLayout, LayerLayout, RowArray
from prefixbank.values import ChunkKey, ChunkRecord, Namespace
from tests.model.tiny import CONFIGS, FROM_DISK, build_model, random_ids
from tests.model.writebehind.gate import OTHER, PROMPT, Gate, cold_text


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
