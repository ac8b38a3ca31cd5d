"""Fixtures of an index in which the kept sum of bytes must be that of the rows when the test is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import chunk_key, pack_token_ids
from prefixbank.index import Index, chunk_rows
from prefixbank.values import ChunkRecord
from tests.fakekv import FakeModel
from tests.unit.rows.records import Record


@pytest.fixture
def index(model: FakeModel) -> Index:
    found: Index = model.session.index
    return found


@pytest.fixture
def record(model: FakeModel) -> Record:
    """Give a function that makes records of chunks; their files are made up."""

    def make(token_ids: Sequence[int], parent: ChunkRecord | None = None, **changes: Any) -> ChunkRecord:
        packed = pack_token_ids(token_ids)
        key = chunk_key(parent.key if parent else model.namespace.root_key, packed)
        values: dict[str, Any] = {
            "key": key,
            "parent_key": parent.key if parent else None,
            "namespace_id": model.namespace.id,
            "start": parent.end if parent else 0,
            "n_tokens": len(token_ids),
            "token_ids": packed,
            "file_name": f"{key.hex()}-00000000.safetensors",
            "data_offset": 8,
            "n_bytes": 5000,
            "disk_bytes": 8192,
            "digest": b"d" * 16,
        }
        return ChunkRecord(**{**values, **changes})

    return make


@pytest.fixture(autouse=True)
def in_step(model: FakeModel, bank: PrefixBank) -> Any:
    """Assert after each test that the kept sum of bytes is that of the rows; then drop the rows without files."""
    yield
    with model.session.index.writing() as tx:
        assert chunk_rows.disk_bytes(tx) == chunk_rows.totals(tx).disk_bytes
        for row in reversed(chunk_rows.list_all(tx)):
            assert chunk_rows.delete(tx, row)
        assert chunk_rows.disk_bytes(tx) == 0
