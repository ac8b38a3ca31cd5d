"""Fixtures of a model for each cache kind, and of a bank that must be in order when the test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixbank import PrefixBank
from tests.model.test_kinds import ALL
from tests.model.tiny import build_model


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: build_model(name) for name in ALL}


@pytest.fixture
def open_bank(bank_root: Path) -> Iterator[Callable[..., PrefixBank]]:
    banks: list[PrefixBank] = []

    def open_it(**options: Any) -> PrefixBank:
        banks.append(PrefixBank.open(bank_root, chunk_tokens=16, load="always", durability="fast", **options))
        return banks[-1]

    yield open_it
    for bank in banks:
        bank.close()
    with PrefixBank.open(bank_root) as bank:
        assert bank.check(read_data=True).ok
