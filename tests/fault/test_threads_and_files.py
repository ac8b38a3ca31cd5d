"""Use one bank from many threads, and with few file descriptors."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids
from prefixbank.restoring import Readers
from tests.fakekv import LAYOUT, FakeModel, RowsOnly, disk_usage, empty_runs
from tests.fault.together import BLOCK, FLAVOURS, files_there, growing_prompt, named_files


@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")  # of stores whose parents were evicted meanwhile
def test_threads_that_store_read_prune_and_check_one_bank_stay_right_and_within_the_budget(tmp_path: Path) -> None:
    budget = 12 * BLOCK
    with PrefixBank.open(tmp_path, chunk_tokens=4, max_bytes=budget, durability="fast", verify="always") as bank:
        model = FakeModel(bank)

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(30):
                token_ids = growing_prompt(chance.randrange(12))
                deed = chance.choice(("store", "store", "read", "read", "read", "use", "prune", "check"))
                if deed == "store":
                    model.store(token_ids, chance.choice(FLAVOURS))
                elif deed == "read":
                    model.resolve(token_ids, FLAVOURS)
                elif deed == "use":
                    model.session.note_use(model.match(token_ids))
                elif deed == "prune":
                    bank.prune(max_bytes=BLOCK * chance.randrange(2, 10))
                else:
                    report = bank.check(read_data=True)
                    assert report.ok, report.findings

        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(work, seed) for seed in range(8)]:
                done.result(timeout=120)
        assert disk_usage(bank) <= budget
        assert files_there(tmp_path, notes=True) == named_files(bank)
        assert bank.check(read_data=True).ok


class PlainRows(RowsOnly):
    """Give out rows of one byte each, fast: the last byte of the token's offset."""

    def runs(self, start: int, n_tokens: int) -> Iterator[np.ndarray]:
        for _, row_array in LAYOUT.row_arrays():
            for _ in range(row_array.n_heads):
                rows = np.empty((n_tokens, row_array.row_bytes), np.uint8)
                rows[:] = (np.arange(start, start + n_tokens) % 256)[:, None]
                yield rows


@pytest.fixture
def few_files() -> Iterator[None]:
    """Let this process have 256 files open at most, as `ulimit -n 256` does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize("n_shards", [600, pytest.param(5000, marks=pytest.mark.long)])
def test_a_prefix_of_more_shards_than_files_may_be_open_is_stored_and_read(tmp_path: Path, n_shards: int) -> None:
    with PrefixBank.open(tmp_path, chunk_tokens=1, durability="fast", verify="always") as bank:
        model = FakeModel(bank)
        token_ids = list(range(n_shards))
        stored = model.session.store(model.namespace, pack_token_ids(token_ids), PlainRows())
        assert stored.n_tokens == n_shards
        found = model.match(token_ids)
        buffers = [empty_runs(LAYOUT, 1) for _ in found.chunks]
        with closing(Readers(16)) as readers:
            futures = [
                future
                for record, runs in zip(found.chunks, buffers, strict=True)
                for future in readers.submit(
                    bank._session.shards,
                    record,
                    LAYOUT.data_bytes(1),
                    [memoryview(run).cast("B") for run in runs],
                    n_shards=n_shards,
                )
            ]
            for future in futures:
                future.result()
        assert all((run == at % 256).all() for at, runs in enumerate(buffers) for run in runs)
        assert bank.check().ok
