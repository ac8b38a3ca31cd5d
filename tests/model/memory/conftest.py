"""Fixtures of a bank that keeps prefixes in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixbank import PrefixBank
from prefixbank.shards import ShardStore
from tests.model.memory.users import (
    Open,
    Walk,
)
from tests.model.test_kinds import ALL
from tests.model.tiny import build_model


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: build_model(name) for name in ALL}


@pytest.fixture
def open_bank(bank_root: Path) -> Iterator[Open]:
    """Give a function that opens the bank; it must be in order when the test is over."""
    with ExitStack() as stack:

        def open_it(**options: Any) -> PrefixBank:
            given = {"chunk_tokens": 16, "load": "always", "durability": "fast", **options}
            return stack.enter_context(PrefixBank.open(bank_root, **given))

        yield open_it
    with PrefixBank.open(bank_root) as bank:
        report = bank.check(read_data=True)
        assert report.ok, report.findings


@pytest.fixture
def bank(open_bank: Open) -> PrefixBank:
    opened: PrefixBank = open_bank()
    return opened


@pytest.fixture
def llm(bank: PrefixBank, llama: Any, tokenizer: Any) -> Any:
    return bank.attach(llama, tokenizer)


@pytest.fixture
def no_shard_is_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Give a context in which opening a shard for reading is an error that nobody catches."""

    def fail(_: ShardStore, record: Any) -> None:
        raise AssertionError(f"shard {record.file_name} is read")

    @contextmanager
    def forbidden() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(ShardStore, "open_shard", fail)
            yield

    return forbidden


@pytest.fixture(autouse=True)
def _forget_cold() -> Iterator[None]:
    yield
    Walk.forget()
