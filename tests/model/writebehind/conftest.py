"""Fixtures of a bank whose writing thread stands in front of a gate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixbank import PrefixBank, storing
from tests.model.tiny import FROM_DISK
from tests.model.writebehind.gate import Gate


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
