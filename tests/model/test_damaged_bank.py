"""Damage the shards and index of a tiny model: the tokens stay those without a bank, and a repair brings hits back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixbank import PrefixBank
from prefixbank.errors import BankWarning
from prefixbank.repair import repair
from tests.model.tiny import FROM_DISK, random_ids

PREFIX = random_ids(70, seed=3)
PROMPT = [*PREFIX, *random_ids(9, seed=4)]


def shards_of(root: Path) -> list[Path]:
    return sorted((root / "shards").rglob("*.safetensors"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


def swap(root: Path) -> None:
    one, two = shards_of(root)[:2]
    aside = one.with_suffix(".aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def fifo(root: Path) -> None:
    path = shards_of(root)[0]
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a flipped bit in each shard": lambda root: [flip(path, -5) for path in shards_of(root)],
    "a flipped bit in a header": lambda root: flip(shards_of(root)[0], 60),
    "swapped": swap,
    "fifo": fifo,
    "index lost": lambda root: (root / "index.sqlite3").unlink(),
    "index garbage": lambda root: (root / "index.sqlite3").write_bytes(b"garbage" * 500),
    "index lost and a shard damaged": lambda root: ((root / "index.sqlite3").unlink(), flip(shards_of(root)[0], -1)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_tokens_stay_right_and_a_repair_brings_hits_back(
    bank_root: Path, llama: Any, tokenizer: Any, damage: str
) -> None:
    def tokens(*, after_repair: bool = False) -> tuple[list[int], int]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BankWarning)
            with PrefixBank.open(bank_root, chunk_tokens=16, **FROM_DISK) as bank:
                result = bank.attach(llama, tokenizer).generate(PROMPT, max_tokens=8)
                assert not after_repair or bank.check(read_data=True).ok
                return result.token_ids, result.cached_tokens

    with PrefixBank.open(bank_root, chunk_tokens=16, **FROM_DISK) as bank:
        llm = bank.attach(llama, tokenizer)
        cold = llm.generate(PROMPT, max_tokens=8).token_ids
        llm.warm(PREFIX, name="shots", pin=True)
    assert tokens() == (cold, 70)
    DAMAGES[damage](bank_root)
    if not damage.startswith("index"):
        assert tokens()[0] == cold
    repair(bank_root, read_data=True)
    right, n_cached = tokens(after_repair=True)
    assert right == cold
    if damage in ("index lost", "index garbage"):
        assert n_cached == 70
    with PrefixBank.open(bank_root) as bank:
        assert [(p.name, p.pinned) for p in bank.prefixes()] == [("shots", True)]
