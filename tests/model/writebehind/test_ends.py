"""What is queued is written when a bank is closed and when an interpreter exits, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from prefixbank import BankWarning, PrefixBank, StorageError
from prefixbank.cli import main
from prefixbank.shards import ShardWriter
from tests.model.tiny import FROM_DISK, random_ids
from tests.model.writebehind.gate import OTHER, PROMPT, Gate, cold_text, n_stored, writing_threads

ROOT = Path(__file__).parents[3]


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
