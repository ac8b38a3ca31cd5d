"""Lose or damage the index: nothing wrong comes out of the bank, and a repair brings all back, names and pins too."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from prefixbank import indexfile, namesfile, schema
from prefixbank.bank import PrefixBank
from prefixbank.errors import (
    BankBusyError,
    BankNotFoundError,
    PrefixBankError,
    SchemaError,
    StorageError,
)
from prefixbank.index import Index
from prefixbank.repair import RepairPlan, _alone, repair
from tests.fakekv import HYBRID, FakeModel
from tests.fault import tally
from tests.fault.together import PATIENCE_S, Pace, run_together

SHOTS = list(range(10))
LONGER = list(range(22))
OTHER = [7, 7, 7, 7, 7]
STATES = [5, 6, 7, 8, 9, 10]

Unchanged = Callable[[Path], Any]


def fill(bank: PrefixBank) -> None:
    """Store three models' prefixes, two of them named, one pinned; a tail is superseded after it was named."""
    model = FakeModel(bank)
    model.name("shots", SHOTS, pin=True)
    model.store(LONGER)
    FakeModel(bank, "salted", salt=b"salt").name("other", OTHER)
    FakeModel(bank, "hybrid", layout=HYBRID).store(STATES, ends=(4, 6))


def must_hold_all(bank: PrefixBank) -> None:
    """Assert that every prefix, name and pin of `fill` is there."""
    assert FakeModel(bank).held(SHOTS, LONGER) == [10, 22]
    assert FakeModel(bank, "salted", salt=b"salt").held(OTHER) == [5]
    assert FakeModel(bank, "hybrid", layout=HYBRID).held(STATES) == [6]
    assert {(p.name, p.n_tokens, p.pinned) for p in bank.prefixes()} == {("shots", 10, True), ("other", 5, False)}
    for prefix in bank.prefixes():
        assert prefix.n_stored_tokens(bank.chain(prefix)) == prefix.n_tokens
    report = bank.check(read_data=True)
    assert report.ok, report.findings
    bank.prune(max_bytes=0)
    assert FakeModel(bank).held(SHOTS) == [10], "it is not pinned any more"


def make_old(root: Path) -> None:
    """Let all files be two hours old, so that none of them can be of a store in progress."""
    then = time.time() - 7200
    for path in (*(root / "shards").rglob("*"), *(root / "tmp").rglob("*")):
        os.utime(path, (then, then), follow_symlinks=False)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        fill(bank)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(template, tmp_path / "bank")
    return tmp_path / "bank"


def actions(plan: RepairPlan) -> set[str]:
    return {step.action for step in plan.steps}


def remove(path: Path) -> None:
    path.unlink()


def other_program(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as index:
        index.execute("CREATE TABLE mine (a)")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def execute(statement: str) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as index:
            index.execute(statement)

    return do


def stale_journal(path: Path) -> None:
    path.unlink()
    path.with_name(path.name + "-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(1000))


LOSSES: dict[str, Callable[[Path], Any]] = {
    "deleted": remove,
    "emptied": lambda path: os.truncate(path, 0),
    "deleted beside its journal": stale_journal,
    "garbage": lambda path: path.write_bytes(b"garbage" * 1000),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut short": lambda path: os.truncate(path, 10_000),
    "a folder": folder,
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "another program's": other_program,
    "a table dropped": execute("DROP TABLE prefixes"),
    "no revision": execute("DELETE FROM alembic_version"),
    "no state row": execute("DELETE FROM bank_state"),
    "token ids changed": execute("UPDATE chunks SET token_ids = zeroblob(16) WHERE start = 4"),
    "a parent deleted": execute("DELETE FROM chunks WHERE start = 0"),
    "a namespace's layout changed": execute("UPDATE namespaces SET root_key = zeroblob(16) WHERE salt_digest = ''"),
    "application id changed": execute("PRAGMA application_id = 7"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_repair_makes_a_lost_index_anew_with_names_and_pins(root: Path, loss: str, unchanged: Unchanged) -> None:
    index = root / "index.sqlite3"
    LOSSES[loss](index)
    was_there = index.is_file() and index.stat().st_size > 0
    with unchanged(root):
        planned = repair(root, dry_run=True)
    assert repair(root).steps == planned.steps
    assert "new-index" in actions(planned)
    if was_there:
        assert any(path.name.startswith("index.sqlite3-") for path in (root / "quarantine").iterdir()), "it is deleted"
    assert repair(root).steps == ()
    with PrefixBank.open(root) as bank:
        must_hold_all(bank)


def test_an_index_that_an_opener_made_anew_is_filled_by_a_repair(root: Path) -> None:
    (root / "index.sqlite3").unlink()
    with pytest.warns(match="prefixbank repair"), PrefixBank.open(root) as bank:
        assert bank.chunks() == []
        FakeModel(bank).name("new", [9, 9, 9, 9])  # it must not take the other names out of the file
    make_old(root)
    assert "new-index" not in actions(repair(root))
    with PrefixBank.open(root) as bank:
        assert bank.prefixes("new")[0].n_tokens == 4
        bank.remove("new")
        must_hold_all(bank)


def test_an_older_copy_put_back_is_brought_up_to_date(tmp_path: Path) -> None:
    """Rows of files that are gone go, files that it did not know are taken up, newer names and pins are put right."""
    root = tmp_path / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        FakeModel(bank).name("shots", SHOTS)
        FakeModel(bank).store([3, 3, 3, 3, 3])
    shutil.copy(root / "index.sqlite3", tmp_path / "older")
    with PrefixBank.open(root) as bank:
        bank.prune(max_bytes=0)
        fill(bank)
    shutil.copy(tmp_path / "older", root / "index.sqlite3")
    with PrefixBank.open(root) as bank:
        kinds = {finding.kind for finding in bank.check().findings}
        assert {"missing", "names"} <= kinds
        assert FakeModel(bank).held([3, 3, 3, 3, 3]) == [0]
    make_old(root)
    plan = repair(root)
    assert {"forget", "take-up", "name"} <= actions(plan)
    with PrefixBank.open(root) as bank:
        must_hold_all(bank)


def test_a_name_follows_from_a_tail_that_is_gone_to_the_chunk_that_covers_it(tmp_path: Path) -> None:
    """As a store would have moved it: else the lost tail would stay as a hole under the name."""
    root = tmp_path / "bank"
    with PrefixBank.open(root, chunk_tokens=4) as bank:
        FakeModel(bank).name("shots", SHOTS, pin=True)
    shutil.copy(root / "index.sqlite3", tmp_path / "older")
    with PrefixBank.open(root) as bank:
        FakeModel(bank).store(LONGER)
    shutil.copy(tmp_path / "older", root / "index.sqlite3")
    make_old(root)
    repair(root)
    with PrefixBank.open(root) as bank:
        [prefix] = bank.prefixes()
        assert prefix.n_stored_tokens(bank.chain(prefix)) == 10
        assert bank.stats().n_holes == 0


@pytest.mark.parametrize("table", ["chunks", "prefixes"])
def test_a_name_that_only_an_old_bank_s_index_has_is_written_to_the_file(root: Path, table: str) -> None:
    """Banks of earlier versions have no names file; a broken index still tells the names that can be read from it."""
    (root / "prefixes.json").unlink()
    if table == "chunks":  # the names can still be read
        execute("UPDATE chunks SET token_ids = zeroblob(4) WHERE start = 16")(root / "index.sqlite3")
    repair(root)
    names = namesfile.read(root)
    assert names is not None
    assert sorted(name.name for name in names.names.values()) == ["other", "shots"]
    with PrefixBank.open(root) as bank:
        must_hold_all(bank)


def test_a_newer_index_is_refused_and_the_file_unchanged(root: Path, unchanged: Unchanged) -> None:
    execute("UPDATE alembic_version SET version_num = '9999'")(root / "index.sqlite3")
    for dry_run in (True, False):
        with unchanged(root), pytest.raises(SchemaError, match="newer prefixbank"):
            repair(root, dry_run=dry_run)


def test_an_older_index_is_to_be_migrated_first(root: Path) -> None:
    execute("DROP TABLE rates")(root / "index.sqlite3")
    execute("UPDATE alembic_version SET version_num = '0002'")(root / "index.sqlite3")
    with pytest.raises(SchemaError, match="prefixbank migrate"):
        repair(root)


def test_an_index_deleted_under_a_live_process_is_noticed_before_and_after_the_repair(root: Path) -> None:
    with PrefixBank.open(root) as live:
        model = FakeModel(live)
        assert model.held(SHOTS) == [10]
        (root / "index.sqlite3").unlink()
        for _ in range(2):
            with pytest.raises(BankNotFoundError, match="open the bank again"):
                model.match(SHOTS)
            with pytest.raises(BankNotFoundError, match="open the bank again"):
                model.store([8, 8, 8, 8])
            repair(root)
    with PrefixBank.open(root) as bank:
        must_hold_all(bank)


def test_a_broken_index_is_never_gone_while_it_is_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens the bank meanwhile must find the old one or the new one, and make none of his own."""
    (root / "index.sqlite3").write_bytes(b"garbage" * 100)
    real = Path.replace
    seen: list[bool] = []

    def watch(self: Path, target: Path) -> Path:
        seen.append(target.exists())
        return real(self, target)

    monkeypatch.setattr(indexfile.Path, "replace", watch)
    repair(root)
    assert seen[0]


class Killed(BaseException):
    """Be a kill: nothing catches it to clean up."""


@pytest.mark.parametrize("loss", ["deleted", "garbage"])
def test_a_repair_killed_at_any_step_is_finished_by_the_next(
    template: Path, tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that changes a file or commits is a step; die before the n-th, for every n."""
    for nth in range(1, 100):
        root = tmp_path / str(nth)
        shutil.copytree(template, root)
        make_old(root)
        LOSSES[loss](root / "index.sqlite3")
        steps = 0

        def count(real: Callable[..., Any], last: int = nth) -> Callable[..., Any]:
            def do(*given: Any, **named: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps == last:
                    raise Killed
                return real(*given, **named)

            return do

        with monkeypatch.context() as patch, suppress(Killed):
            for owner, name in ((Path, "rename"), (Path, "replace"), (os, "link"), (indexfile, "sync_folder")):
                patch.setattr(owner, name, count(getattr(owner, name)))
            patch.setattr(Index, "create_file", staticmethod(count(Index.create_file)))
            patch.setattr(Index, "migrate", count(Index.migrate))
            patch.setattr(Index, "writing", count(Index.writing))
            patch.setattr("prefixbank.index.chunk_rows.add", count(__import__("prefixbank").index.chunk_rows.add))
            patch.setattr(namesfile, "_write", count(namesfile._write))
            repair(root)
        repair(root)
        with PrefixBank.open(root) as bank:
            must_hold_all(bank)
        if steps < nth:
            break
    assert nth > 8, "few steps were looked at"


def test_two_repairs_do_not_run_at_once(root: Path) -> None:
    with _alone(root), pytest.raises(BankBusyError, match="another repair"):
        repair(root)
    assert repair(root).ok


def migrate_together(pace: Pace, root: Path, n_rounds: int) -> None:
    for number in range(n_rounds):
        index = Index(root / str(number), read_only=False, durability="full", busy_timeout_s=PATIENCE_S)
        with closing(index):
            pace.wait()
            index.migrate()
            assert index.revision == schema.HEAD_REVISION


def test_two_that_migrate_at_once_both_end_with_the_newest_schema(tmp_path: Path) -> None:
    n_rounds = 4
    for number in range(n_rounds):
        path = tmp_path / str(number)
        Index.create_file(path)
        if number % 2:
            with closing(Index(path, read_only=False, durability="full", busy_timeout_s=1)) as index:
                index.migrate()
            execute("DROP TABLE rates")(path)
            execute("UPDATE alembic_version SET version_num = '0002'")(path)
    run_together(migrate_together, [(tmp_path, n_rounds)] * 2)
    for number in range(n_rounds):
        with closing(sqlite3.connect(tmp_path / str(number))) as index:
            assert index.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert index.execute("SELECT count(*) FROM bank_state").fetchone() == (1,)


def test_an_interrupted_migration_leaves_the_old_schema_which_can_be_migrated(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "index.sqlite3"
    execute("DROP TABLE rates")(path)
    execute("UPDATE alembic_version SET version_num = '0002'")(path)
    real = schema.upgrade

    def fail(tx: Any) -> None:
        real(tx)
        raise StorageError("power cut")

    index = Index(path, read_only=False, durability="full", busy_timeout_s=1)
    with closing(index):
        with monkeypatch.context() as patch:
            patch.setattr("prefixbank.index.upgrade", fail)
            with pytest.raises(StorageError, match="power cut"):
                index.migrate()
        assert index.revision == "0002"
        index.migrate()
    with PrefixBank.open(root) as bank:
        must_hold_all(bank)


def use_and_repair(root: Path) -> None:
    """Assert that a bank with a damaged index gives right rows or an error of ours, and that a repair puts it right."""
    with suppress(PrefixBankError), PrefixBank.open(root) as bank:
        for model, prompt in (
            (FakeModel(bank), SHOTS),
            (FakeModel(bank), LONGER),
            (FakeModel(bank, "salted", salt=b"salt"), OTHER),
            (FakeModel(bank, "hybrid", layout=HYBRID), STATES),
        ):
            with suppress(PrefixBankError):
                model.resolve(prompt)  # asserts that the rows are those of the prompt
        with suppress(PrefixBankError):
            bank.check(read_data=True)
        with suppress(PrefixBankError):
            bank.prefixes()
    try:
        repair(root, read_data=True)
    except SchemaError:
        return  # a flipped version is another version: refused, for the user to move aside
    make_old(root)
    repair(root, read_data=True)
    with PrefixBank.open(root) as bank:
        report = bank.check(read_data=True)
        assert report.ok, report.findings


def flip_and_use(template: Path, folder: Path, n_flips: int, seed: int) -> None:
    chance = random.Random(seed)
    size = (template / "index.sqlite3").stat().st_size
    pages = size // 4096
    for number in range(n_flips):
        root = folder / str(number)
        shutil.copytree(template, root)
        content = bytearray((root / "index.sqlite3").read_bytes())
        at = chance.randrange(pages) * 4096 + chance.choice((chance.randrange(4096), 4095 - chance.randrange(600)))
        content[at] ^= 1 << chance.randrange(8)
        (root / "index.sqlite3").write_bytes(content)
        tally.count("damaged inputs")
        try:
            use_and_repair(root)
        except Exception as error:
            error.add_note(f"byte {at} of the index was flipped, seed {seed}, number {number}")
            raise
        shutil.rmtree(root)


@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")
def test_no_flipped_bit_of_the_index_gives_wrong_rows_or_an_error_of_others(template: Path, tmp_path: Path) -> None:
    flip_and_use(template, tmp_path, 15, seed=1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")
def test_no_flipped_bit_of_many_of_the_index_gives_wrong_rows(template: Path, tmp_path: Path) -> None:
    flip_and_use(template, tmp_path, 3000, seed=2)


def test_a_row_with_flipped_token_ids_is_not_taken_for_the_prefix_that_they_now_spell(root: Path) -> None:
    """A tail is found by its token ids alone; its key, which follows from them, must still be its own."""
    with PrefixBank.open(root) as bank:
        FakeModel(bank).store([50, 51])
    execute("UPDATE chunks SET token_ids = x'3200000034000000' WHERE token_ids = x'3200000033000000'")(
        root / "index.sqlite3"
    )
    with PrefixBank.open(root) as bank:
        assert FakeModel(bank).held([50, 52]) == [0]


def test_a_namespace_with_another_layout_than_its_model_is_not_used(root: Path) -> None:
    execute("UPDATE namespaces SET layout = replace(layout, '16', '17')")(root / "index.sqlite3")
    with PrefixBank.open(root) as bank, pytest.raises(PrefixBankError):
        FakeModel(bank)
