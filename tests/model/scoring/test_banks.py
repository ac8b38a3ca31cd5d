"""Scores are right whatever the bank is: broken, read-only, or used by threads at once; and are counted in it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixbank import BankWarning, PrefixBank
from tests.model.scoring.plainscores import CHOICES, N_RUNS, PROMPT, is_plain, plain, score, score_many
from tests.model.tiny import FROM_DISK, random_ids


def test_broken_bank_costs_only_the_hit(bank_root: Path, llama: Any, tokenizer: Any) -> None:
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16) as bank:
        llm = bank.attach(llama, tokenizer)
        llm.warm(PROMPT)
        victim = next(chunk for chunk in bank.chunks() if chunk.start == 32)
        assert victim.file_name is not None
        (bank.root / "shards" / victim.file_name[:2] / victim.file_name).unlink()
        with pytest.warns(BankWarning, match="gone"):
            result = score(llm, PROMPT, CHOICES)
        assert result.cached_tokens == 32
        assert is_plain(llama, result, PROMPT, CHOICES)
        bank.flush()
        assert score(llm, PROMPT, CHOICES).cached_tokens == 69
        shutil.rmtree(bank.root)
        with pytest.warns(BankWarning):
            results = score_many(llm, [PROMPT, random_ids(50, seed=3)], CHOICES)
        assert is_plain(llama, results[0], PROMPT, CHOICES)
        assert is_plain(llama, results[1], random_ids(50, seed=3), CHOICES)
        with pytest.warns(BankWarning, match="gone"):
            bank.close()


def test_read_only_bank_serves_and_is_not_written_to(bank_root: Path, llama: Any, tokenizer: Any) -> None:
    with PrefixBank.open(bank_root, **FROM_DISK, chunk_tokens=16) as bank:
        bank.attach(llama, tokenizer).warm(PROMPT[:40])
    with PrefixBank.open(bank_root, **FROM_DISK, read_only=True) as bank:
        result = score(bank.attach(llama, tokenizer), PROMPT, CHOICES)
        assert result.cached_tokens == 40
        assert is_plain(llama, result, PROMPT, CHOICES)
        assert len(bank.chunks()) == 3


def test_scores_are_counted_among_the_banks_tokens(llm: Any, small_bank: PrefixBank) -> None:
    score(llm, PROMPT, CHOICES)
    score(llm, PROMPT, CHOICES)
    counts = small_bank.stats().session
    assert (counts["cached_tokens"], counts["computed_tokens"]) == (64, 70 + 6 + 2 * N_RUNS)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_threads_score_behind_one_prefix_at_once(
    name: str,
    models: dict[str, Any],
    tokenizer: Any,
    open_bank: Callable[..., PrefixBank],
) -> None:
    model = models[name]
    llm = open_bank().attach(model, tokenizer)
    llm.warm(PROMPT)
    prompts = [PROMPT + random_ids(n, seed=n) for n in (0, 3, 5)]
    expected = {n: [plain(model, prompt, choice)[0] for choice in CHOICES] for n, prompt in enumerate(prompts)}
    wrong: list[Any] = []

    def work(first: int) -> None:
        try:
            for n in range(first, first + 9):
                found = score(llm, prompts[n % 3], CHOICES).log_probs
                if not np.allclose(found, expected[n % 3], atol=1e-4, rtol=0):
                    wrong.append((n, found))
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
