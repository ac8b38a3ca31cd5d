"""Kill a process at each step of its work: what was acknowledged stays, the rest is there whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixbank.bank import PrefixBank
from prefixbank.errors import BankReadOnlyError
from tests.fakekv import FakeModel
from tests.fault.deeds import BASE, LONGER, OTHER, age
from tests.fault.dying import number_prompt
from tests.fault.together import PATIENCE_S, files_there, named_files

CHECKOUT = Path(__file__).parents[2]
N_BASE_FILES = 5  # of BASE three, of OTHER two

Kill = Callable[..., None]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Give the root of a bank that holds BASE, named `base`, and OTHER; in the end it must be in order and tidy."""
    root = tmp_path / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        model = FakeModel(bank)
        model.name("base", BASE)
        model.store(OTHER)
    yield root
    with PrefixBank.open(root) as bank:
        must_recover(bank)


@pytest.fixture(scope="module")
def kill() -> Iterator[Kill]:
    """Give a function that runs a process, which is killed when it comes to a point for the n-th time."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fault.dying"],
        cwd=CHECKOUT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads and forks do not go together
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        requests, answers = server.stdin, server.stdout

        def do(root: Path, deed: str, point: str, nth: int = 1) -> None:
            print(json.dumps([str(root), deed, point, nth]), file=requests, flush=True)
            assert answers.readline().strip() == str(-signal.SIGKILL), "it ended otherwise: see stderr"

        yield do


def must_be_whole(bank: PrefixBank) -> None:
    """Assert that a check finds nothing wrong, and that files without rows are all that was left behind."""
    report = bank.check(read_data=True)
    assert report.ok, report.findings
    assert named_files(bank) <= files_there(bank.root)


def must_recover(bank: PrefixBank) -> None:
    """Assert that storing works again, and that a prune deletes the files that no row names, and nothing else."""
    must_be_whole(bank)
    model = FakeModel(bank)
    for token_ids in (BASE, LONGER, OTHER):
        model.store(token_ids)
    assert model.held(BASE, LONGER, OTHER) == [len(BASE), len(LONGER), len(OTHER)]
    age(bank.root)
    left_over = files_there(bank.root, notes=True) - named_files(bank)
    pruned = bank.prune()
    assert {file.path for file in pruned.files} == left_over
    assert not pruned.chunks
    assert files_there(bank.root, notes=True) == named_files(bank)
    must_be_whole(bank)


@pytest.mark.parametrize(
    ("point", "nth", "n_left_over"),
    [
        ("a temporary file is half written", 1, 1),
        ("a temporary file is written", 2, 2),
        ("a temporary file is synced", 1, 1),
        ("a temporary file is synced", 4, 4),
        ("a shard is renamed", 1, 4),
        ("a shard is renamed", 3, 4),
        ("a folder is synced", 1, 4),
        ("all are published", 1, 4),
        ("a tick is taken", 1, 4),
        ("a row is added", 1, 4),
        ("a name is moved", 1, 4),
        ("a row is deleted", 1, 4),
        ("a row is added", 4, 4),
    ],
)
def test_a_store_killed_before_its_commit_leaves_only_files(
    kill: Kill, root: Path, point: str, nth: int, n_left_over: int
) -> None:
    kill(root, "store", point, nth)
    with PrefixBank.open(root) as bank:
        must_be_whole(bank)
        assert len(named_files(bank)) == N_BASE_FILES
        assert len(files_there(root) - named_files(bank)) == n_left_over
        assert FakeModel(bank).held(BASE, OTHER, LONGER) == [10, 5, 10]
        assert [prefix.n_tokens for prefix in bank.prefixes("base") if prefix.chunk_key is not None] == [10]


@pytest.mark.parametrize(
    ("point", "n_left_over"),
    [("the rows are committed", 0), ("a file is to be deleted", 1), ("a file is deleted", 0)],
)
def test_a_store_killed_after_its_commit_is_there_whole(kill: Kill, root: Path, point: str, n_left_over: int) -> None:
    kill(root, "store", point)
    with PrefixBank.open(root) as bank:
        must_be_whole(bank)
        assert len(files_there(root) - named_files(bank)) == n_left_over, "more than the tail that was superseded"
        assert FakeModel(bank).held(BASE, OTHER, LONGER) == [10, 5, 22]
        [base] = bank.prefixes("base")
        assert sum(record.n_tokens for record in bank.chain(base)) == 12


@pytest.mark.parametrize(("nth", "n_held"), [(1, 10), (2, 12), (4, 20)])
def test_a_long_store_that_is_killed_keeps_the_groups_it_committed(
    kill: Kill, root: Path, nth: int, n_held: int
) -> None:
    kill(root, "store in groups", "all are published", nth)
    with PrefixBank.open(root) as bank:
        must_be_whole(bank)
        assert FakeModel(bank).held(BASE, OTHER, LONGER) == [10, 5, n_held]


def test_pages_written_by_a_transaction_that_was_killed_are_undone(kill: Kill, root: Path) -> None:
    kill(root, "store and spill", "a row is added", 95)
    with PrefixBank.open(root) as bank:
        must_be_whole(bank)
        assert len(named_files(bank)) == N_BASE_FILES
        assert FakeModel(bank).held(BASE, OTHER, list(range(400))) == [10, 5, 10]


def test_a_read_only_bank_says_who_can_mend_a_transaction_that_was_killed(kill: Kill, root: Path) -> None:
    kill(root, "store and spill", "a row is added", 95)
    with pytest.raises(BankReadOnlyError, match="open the bank once without read_only"):
        PrefixBank.open(root, read_only=True)
    PrefixBank.open(root).close()
    with PrefixBank.open(root, read_only=True) as bank:
        assert FakeModel(bank).held(BASE) == [10]


@pytest.mark.parametrize("nth", [1, 3])
def test_a_prune_killed_after_its_commit_leaves_only_files(kill: Kill, root: Path, nth: int) -> None:
    kill(root, "prune", "a file is to be deleted", nth)
    with PrefixBank.open(root) as bank:
        must_be_whole(bank)
        assert not bank.chunks()
        assert len(files_there(root)) == N_BASE_FILES - (nth - 1)
        assert FakeModel(bank).held(BASE, OTHER) == [0, 0]


def test_a_prune_killed_before_its_commit_removes_nothing(kill: Kill, root: Path) -> None:
    kill(root, "prune", "a group of rows is deleted")
    with PrefixBank.open(root) as bank:
        must_be_whole(bank)
        assert len(files_there(root)) == N_BASE_FILES
        assert FakeModel(bank).held(BASE, OTHER) == [10, 5]


def test_a_reader_killed_before_it_sets_a_corrupt_shard_aside_has_healed_its_row(kill: Kill, root: Path) -> None:
    with PrefixBank.open(root) as bank:
        model = FakeModel(bank)
        corrupt = model.path_of(model.match(BASE).chunks[1])
    corrupt.write_bytes(bytes(corrupt.stat().st_size))
    kill(root, "read", "a file is to be set aside")
    with PrefixBank.open(root) as bank:
        must_be_whole(bank)
        assert corrupt.exists()
        assert corrupt.relative_to(root).as_posix() not in named_files(bank)
        assert FakeModel(bank).held(BASE, OTHER) == [4, 5]


@pytest.mark.parametrize(
    ("deed", "point"),
    [
        ("use", "uses are noted, not committed"),
        ("first store of a model", "a namespace is added"),
        ("first store of a model", "the rows are committed"),
    ],
)
def test_small_writes_that_are_killed_harm_nothing(kill: Kill, root: Path, deed: str, point: str) -> None:
    kill(root, deed, point)
    with PrefixBank.open(root) as bank:
        must_be_whole(bank)
        assert FakeModel(bank).held(BASE, OTHER) == [10, 5]


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("the folders are made", 1),
        ("the index file is made", 1),
        ("the index is migrated, not committed", 1),
        ("the index is migrated", 1),
        ("bank.json is written, not yet named", 2),  # the first is CACHEDIR.TAG
        ("bank.json is written", 1),
    ],
)
def test_a_bank_whose_making_was_killed_is_made_by_the_next_who_opens_it(
    kill: Kill, tmp_path: Path, point: str, nth: int
) -> None:
    kill(tmp_path / "bank", "create", point, nth)
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as bank:
        assert FakeModel(bank).store(BASE).n_tokens == 10
        must_recover(bank)


def test_whatever_was_acknowledged_before_a_kill_at_any_moment_is_there(root: Path) -> None:
    acknowledged: list[int] = []
    for n_awaited in (1, 2, 3, 5, 8):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.dying", str(root), str(1000 + len(acknowledged))],
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(n_awaited)]
        process.kill()
        rest, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGKILL, errors.decode()
        acknowledged += [int(line) for line in b"".join([*lines, rest]).split()]
        with PrefixBank.open(root) as bank:
            must_be_whole(bank)
            model = FakeModel(bank)
            assert model.held(*map(number_prompt, acknowledged)) == [14] * len(acknowledged)
