"""Look at what a bank has of chunks with states, and at what it says of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from prefixbank.bank import PrefixBank
from prefixbank.files import disk_bytes
from prefixbank.index import chunk_rows
from prefixbank.values import ChunkRecord
from tests.fakekv import FakeModel, disk_usage

SHOTS = list(range(1, 13))  # three chunks of 4
BLOCK = 4096
"""What a chunk of the hybrid model takes on disk without states; with them it is more."""


def kept(bank: PrefixBank) -> dict[tuple[int, int], bool]:
    """Return by (start, end) whether the chunks hold states; of a bank with one prefix."""
    records = [record for record in bank.chunks() if record.file_name is not None]
    assert len({(r.start, r.end) for r in records}) == len(records)
    return {(r.start, r.end): r.has_state for r in records}


def row_of(bank: PrefixBank, start: int, end: int) -> ChunkRecord:
    (record,) = (r for r in bank.chunks() if (r.start, r.end) == (start, end))
    return record


def assert_in_order(bank: PrefixBank) -> None:
    """Assert that rows and files are the same set, and the budget counts what the disk holds."""
    named = {record.file_name for record in bank.chunks() if record.file_name is not None}
    assert {path.name for path in (bank.root / "shards").rglob("*") if path.is_file()} == named
    assert list((bank.root / "tmp").iterdir()) == []
    report = bank.check(read_data=True)
    assert report.ok, report.findings
    with bank._session.index.reading() as tx:
        quarantined = sum(disk_bytes(p.stat().st_size) for p in (bank.root / "quarantine").rglob("*") if p.is_file())
        assert chunk_rows.disk_bytes(tx) + quarantined == disk_usage(bank)


def said(model: FakeModel, token_ids: Sequence[int], limit: int | None = None) -> tuple[int, int, str]:
    """Return where a prompt can be resumed, how much of it is stored, and the reason; read it, too."""
    found = model.match(token_ids, limit)
    if limit is None:
        assert model.resolve(token_ids) == found
    assert found.n_tokens == (found.chunks[-1].end if found.chunks else 0)
    assert not found.chunks or found.chunks[-1].has_state
    starts = [record.start for record in found.chunks]
    assert starts == [0, *(record.end for record in found.chunks)][: len(starts)]
    return found.n_tokens, found.n_known_tokens, found.reason
