"""Whatever is wrong with the bank, a generation goes on, right and with one warning."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import generate

from prefixbank import BankReadOnlyError, BankWarning, PrefixBank, StorageError
from tests.model.tiny import FROM_DISK, random_ids

PROMPT = random_ids(100)


@pytest.fixture
def bank(bank_root: Path) -> Iterator[PrefixBank]:
    """A bank whose damage is the test's own business."""
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16, busy_timeout_s=0.1) as bank:
        yield bank


def shard_files(bank: PrefixBank) -> list[Path]:
    """Return the shards in the order of their chunks."""
    return [bank.root / "shards" / c.file_name[:2] / c.file_name for c in bank.chunks() if c.file_name]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["flipped", "missing", "truncated", "emptied", "folder", "fifo", "link"])
def test_failed_shard_is_a_miss_that_heals(what: str, bank: PrefixBank, llama: Any, tokenizer: Any) -> None:
    llm = bank.attach(llama, tokenizer)
    llm.warm(PROMPT)
    cold = generate(llama, tokenizer, PROMPT, max_tokens=8)
    victim = shard_files(bank)[2]
    if what == "flipped":
        damage(victim)
    elif what == "truncated":
        os.truncate(victim, victim.stat().st_size - 1)
    elif what == "emptied":
        os.truncate(victim, 0)
    else:
        victim.unlink()
        if what == "folder":
            victim.mkdir()
        elif what == "fifo":
            os.mkfifo(victim)
        elif what == "link":
            victim.symlink_to(shard_files(bank)[1])
    with pytest.warns(BankWarning, match="computed again"):
        first = llm.generate(PROMPT, max_tokens=8)
    assert (first.text, first.cached_tokens, first.computed_tokens) == (cold, 32, 68)
    assert first.match.reason == "lost"
    # The generation stored the chunk again: the ones behind it, which never went, are reached again.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = llm.generate(PROMPT, max_tokens=8)
    assert (again.text, again.cached_tokens) == (cold, 99)
    assert bank.check(read_data=True).ok
    quarantined = list((bank.root / "quarantine").iterdir()) if (bank.root / "quarantine").exists() else []
    assert len(quarantined) == (0 if what == "missing" else 1)


def test_block_17_of_85_deleted_gives_16_blocks_back_and_then_heals(
    bank_root: Path, llama: Any, tokenizer: Any
) -> None:
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=4) as bank:
        llm = bank.attach(llama, tokenizer)
        prompt = random_ids(85 * 4 + 1)
        llm.warm(prompt)
        shard_files(bank)[16].unlink()
        written = bank.stats().session["written_bytes"]
        with pytest.warns(BankWarning, match="gone"):
            first = llm.prefill(prompt)
        assert first.cached_tokens == 16 * 4
        assert llm.prefill(prompt).cached_tokens == 85 * 4
        one_block = written // 85
        assert bank.stats().session["written_bytes"] - written < 2 * one_block
        assert bank.check(read_data=True).ok


def test_lost_shard_of_a_prefix_that_memory_has_in_part_heals(bank_root: Path, llama: Any, tokenizer: Any) -> None:
    prompt = random_ids(81)
    with (
        PrefixBank.open(bank_root, load="always", chunk_tokens=16) as bank,
        PrefixBank.open(bank_root, **FROM_DISK) as other,
    ):
        llm, reader = bank.attach(llama, tokenizer), other.attach(llama, tokenizer)
        cold = generate(llama, tokenizer, prompt, max_tokens=8)
        llm.warm(prompt[:48])
        reader.warm(prompt[:80])  # the files have more than the first bank's memory by now
        assert llm.resolve(prompt).cached_tokens == 80
        bank._session.memory.clear()
        llm.warm(prompt[:32])
        assert llm.resolve(prompt[:33]).match.n_tokens == 32
        shard_files(bank)[1].unlink()
        with pytest.warns(BankWarning, match="gone"):
            resolved = llm.resolve(prompt)
        assert (resolved.cached_tokens, resolved.match.in_memory) == (32, True)
        assert generate(llama, tokenizer, resolved.rest, prompt_cache=resolved.prompt_cache, max_tokens=8) == cold
        assert llm.generate(prompt, max_tokens=8).text == cold
        bank.flush()
        assert reader.resolve(prompt).cached_tokens == 80
        assert bank.check(read_data=True).ok


def test_full_disk_in_mid_store_costs_only_the_store(
    bank: PrefixBank, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = bank.attach(llama, tokenizer)
    cold = generate(llama, tokenizer, PROMPT, max_tokens=8)
    real, calls = os.writev, [0]

    def full(descriptor: int, buffers: Any) -> int:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "writev", full)
    with pytest.warns(BankWarning, match="No space left"):
        assert llm.generate(PROMPT, max_tokens=8).text == cold
        with pytest.raises(StorageError, match="No space left"):
            bank.flush()
    bank.flush()
    assert bank.stats().session["failed_stores"] == 1
    assert bank.chunks() == []
    assert list(bank.root.rglob("*.safetensors")) == []
    calls[0] = 2
    with pytest.raises(StorageError, match="No space left"):
        llm.warm(PROMPT)
    monkeypatch.undo()
    assert llm.warm(PROMPT).stored_tokens == 100
    assert bank.check(read_data=True).ok


def test_index_deleted_under_a_live_bank_is_a_miss(bank: PrefixBank, llama: Any, tokenizer: Any) -> None:
    llm = bank.attach(llama, tokenizer)
    llm.warm(PROMPT)
    cold = generate(llama, tokenizer, PROMPT, max_tokens=8)
    (bank.root / "index.sqlite3").unlink()
    with pytest.warns(BankWarning, match="open the bank again"):
        result = llm.generate(PROMPT, max_tokens=8)
    assert (result.text, result.cached_tokens, result.match.reason) == (cold, 0, "unavailable")


def test_whole_bank_deleted_under_a_live_one_is_a_miss(bank: PrefixBank, llama: Any, tokenizer: Any) -> None:
    llm = bank.attach(llama, tokenizer)
    llm.warm(PROMPT)
    cold = generate(llama, tokenizer, PROMPT, max_tokens=8)
    shutil.rmtree(bank.root)
    with pytest.warns(BankWarning):
        assert llm.generate(PROMPT, max_tokens=8).text == cold
    assert not bank.root.exists()


def test_locked_index_delays_no_generation_for_longer_than_the_limit(
    bank: PrefixBank, llama: Any, tokenizer: Any
) -> None:
    llm = bank.attach(llama, tokenizer)
    llm.warm(PROMPT)
    cold = generate(llama, tokenizer, PROMPT, max_tokens=8)
    with sqlite3.connect(bank.root / "index.sqlite3") as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.warns(BankWarning, match="another process"):
            result = llm.generate(PROMPT, max_tokens=8)
        other.rollback()
    other.close()
    assert (result.text, result.cached_tokens) == (cold, 0)
    assert llm.generate(PROMPT, max_tokens=8).cached_tokens == 99


def test_garbage_in_the_index_is_a_miss(bank: PrefixBank, llama: Any, tokenizer: Any) -> None:
    llm = bank.attach(llama, tokenizer)
    llm.warm(PROMPT)
    cold = generate(llama, tokenizer, PROMPT, max_tokens=8)
    with (bank.root / "index.sqlite3").open("r+b") as file:
        file.write(os.urandom(os.fstat(file.fileno()).st_size))
    with pytest.warns(BankWarning):
        assert llm.generate(PROMPT, max_tokens=8).text == cold


def test_read_only_bank_hits_and_is_not_changed_by_a_byte(bank_root: Path, llama: Any, tokenizer: Any) -> None:
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16) as bank:
        bank.attach(llama, tokenizer).warm(PROMPT[:50])
    before = {path: path.read_bytes() for path in bank_root.rglob("*") if path.is_file()}
    cold = generate(llama, tokenizer, PROMPT, max_tokens=8)
    with PrefixBank.open(bank_root, **FROM_DISK, read_only=True) as bank, warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = bank.attach(llama, tokenizer)
        result = llm.generate(PROMPT, max_tokens=8, keep=True)
        assert (result.text, result.cached_tokens) == (cold, 50)
        assert llm.prefill(PROMPT).cached_tokens == 50
        with pytest.raises(BankReadOnlyError):
            llm.warm(PROMPT)
        with pytest.raises(BankReadOnlyError):
            bank.prune()
    assert {path: path.read_bytes() for path in bank_root.rglob("*") if path.is_file()} == before


def test_memory_that_can_not_be_had_is_a_miss(
    bank: PrefixBank, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = bank.attach(llama, tokenizer)
    llm.warm(PROMPT)
    cold = generate(llama, tokenizer, PROMPT, max_tokens=8)

    def no_memory(*_: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 17 bytes.")

    monkeypatch.setattr("prefixbank.kvcache.assemble.PromptCacheBuffers.__init__", no_memory)
    with pytest.warns(BankWarning, match="Unable to allocate"):
        assert llm.generate(PROMPT, max_tokens=8).text == cold


def test_pinned_prefix_keeps_name_and_pin_when_its_last_shard_is_lost(
    bank: PrefixBank, llama: Any, tokenizer: Any
) -> None:
    llm = bank.attach(llama, tokenizer)
    llm.warm(PROMPT[:20], name="kept", pin=True)
    shard_files(bank)[1].unlink()
    with pytest.warns(BankWarning, match="gone"):
        assert llm.prefill(PROMPT[:21]).cached_tokens == 16
    assert llm.match(PROMPT).n_tokens == 20
    bank.prune(max_bytes=0)
    assert llm.match(PROMPT).n_tokens == 20
    assert [c.end for c in bank.chain(bank.prefixes("kept")[0])] == [16, 20]


def test_closed_bank_is_a_miss(bank: PrefixBank, llama: Any, tokenizer: Any) -> None:
    llm = bank.attach(llama, tokenizer)
    llm.warm(PROMPT)
    cold = generate(llama, tokenizer, PROMPT, max_tokens=8)
    bank.close()
    with pytest.warns(BankWarning, match="open the bank again"):
        assert llm.generate(PROMPT, max_tokens=8).text == cold


def test_budget_holds_when_another_process_stores_in_between(
    bank_root: Path, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that make room at the same moment both fit; together they may not."""
    with (
        PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16, max_bytes=70_000) as one,
        PrefixBank.open(bank_root, **FROM_DISK, max_bytes=70_000) as other,
    ):
        first, second = one.attach(llama, tokenizer), other.attach(llama, tokenizer)
        real = os.writev
        stored = []

        def store_another_first(descriptor: int, buffers: Any) -> int:
            if not stored:
                stored.append(True)
                second.warm(random_ids(80, seed=2))
            return real(descriptor, buffers)

        monkeypatch.setattr(os, "writev", store_another_first)
        first.warm(random_ids(80, seed=1))
        assert one.stats().disk_bytes <= 70_000
        assert one.check(read_data=True).ok
