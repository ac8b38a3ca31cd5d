"""Hold the index's tables, settings and upgrade to the design, and its errors to ours."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from prefixbank import schema
from prefixbank.bank import PrefixBank
from prefixbank.errors import (
    BankBusyError,
    BankReadOnlyError,
    IndexCorruptError,
    PrefixBankError,
    SchemaError,
    StorageError,
)
from prefixbank.index import Index
from tests.fakekv import FakeModel

Unchanged = Callable[[Path], Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Give the root of a closed bank that holds a prefix."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as bank:
        FakeModel(bank).store(range(10))
    return tmp_path / "bank"


def connect(root: Path) -> closing[sqlite3.Connection]:
    """Open the index as any other program would."""
    return closing(sqlite3.connect(root / "index.sqlite3", isolation_level=None))


def open_index(path: Path, *, read_only: bool = False, timeout_s: float = 0.05, **options: Any) -> Index:
    return Index(path, read_only=read_only, durability=options.get("durability", "full"), busy_timeout_s=timeout_s)


def test_the_migrations_make_the_tables_that_the_code_uses(bank: PrefixBank) -> None:
    with bank._session.index.reading() as tx:
        context = MigrationContext.configure(tx, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, schema.metadata) == []


def test_the_migrations_make_the_very_constraints_that_the_code_declares(bank: PrefixBank) -> None:
    """What alembic does not compare: checks, key orders, ON DELETE, autoincrement."""
    with bank._session.index.reading() as tx:
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'alembic%'"
        migrated = dict(tx.exec_driver_sql(query).all())
    declared_in = sa.create_engine("sqlite://")
    schema.metadata.create_all(declared_in)
    with declared_in.connect() as connection:
        declared = dict(connection.exec_driver_sql(query).all())
    declared_in.dispose()

    def lines(sql: str) -> list[str]:
        # A column that a later migration added stands on the line of the last one.
        return sorted(part for line in re.split(r"[,\n]", sql) if (part := line.strip(" \t")))

    assert {name: lines(sql) for name, sql in migrated.items()} == {name: lines(sql) for name, sql in declared.items()}


def test_the_known_revisions_are_the_migrations(tmp_path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", str(schema.migrations_folder()))
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_heads() == [schema.HEAD_REVISION]
    assert {script.revision for script in scripts.walk_revisions()} == set(schema.KNOWN_REVISIONS)


def test_an_index_is_marked_as_ours(root: Path) -> None:
    with connect(root) as index:
        assert index.execute("PRAGMA application_id").fetchone() == (0x70666278,)


@pytest.mark.parametrize("journal_mode", ["DELETE", "WAL"])
@pytest.mark.parametrize("how", [{}, {"read_only": True}, {"max_bytes": 0}], ids=str)
def test_a_newer_index_is_refused_and_not_changed(
    root: Path, journal_mode: str, how: dict[str, Any], unchanged: Unchanged
) -> None:
    with connect(root) as index:
        index.execute("UPDATE alembic_version SET version_num = '9999'")
        index.execute(f"PRAGMA journal_mode={journal_mode}")
    with unchanged(root), pytest.raises(SchemaError, match=r"newer prefixbank .*9999"):
        PrefixBank.open(root, **how)


@pytest.mark.parametrize("journal_mode", ["DELETE", "WAL"])
@pytest.mark.parametrize("how", [{}, {"read_only": True}], ids=str)
def test_another_programs_database_is_refused_and_not_changed(
    root: Path, journal_mode: str, how: dict[str, Any], unchanged: Unchanged
) -> None:
    (root / "index.sqlite3").unlink()
    with connect(root) as index:
        index.execute("CREATE TABLE chunks (key BLOB)")
        index.execute(f"PRAGMA journal_mode={journal_mode}")
    with unchanged(root), pytest.raises(SchemaError, match="another program"):
        PrefixBank.open(root, **how)


def test_another_programs_database_is_not_taken_over_by_a_new_bank(tmp_path: Path) -> None:
    with connect(tmp_path) as index:
        index.execute("CREATE TABLE mine (a)")
    before = (tmp_path / "index.sqlite3").read_bytes()
    with pytest.raises(SchemaError, match="another program"):
        PrefixBank.open(tmp_path)
    assert (tmp_path / "index.sqlite3").read_bytes() == before
    assert not (tmp_path / "bank.json").exists()


@pytest.mark.parametrize("lost", ["chunks", "bank_state", "prefixes", "namespaces"])
def test_an_index_that_lacks_a_table_is_an_error_of_ours(root: Path, lost: str) -> None:
    with connect(root) as index:
        index.execute(f"DROP TABLE {lost}")
    with pytest.raises(SchemaError, match=lost), PrefixBank.open(root) as bank:
        bank.stats()
        FakeModel(bank).store(range(70, 75))


@pytest.mark.parametrize("how", [{}, {"read_only": True}], ids=str)
def test_garbage_in_place_of_the_index_is_an_error_of_ours(
    root: Path, how: dict[str, Any], unchanged: Unchanged
) -> None:
    (root / "index.sqlite3").write_bytes(b"garbage" * 1000)
    with unchanged(root), pytest.raises(IndexCorruptError, match="damaged"):
        PrefixBank.open(root, **how)


def test_a_damaged_page_is_an_error_of_ours(root: Path) -> None:
    path = root / "index.sqlite3"
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)  # all but the schema's page
    path.write_bytes(content)
    with pytest.raises(IndexCorruptError), PrefixBank.open(root) as bank:
        bank.stats()


@pytest.mark.parametrize("kept", [50, 4096, 10000])
def test_a_truncated_index_is_an_error_of_ours(root: Path, kept: int) -> None:
    path = root / "index.sqlite3"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(IndexCorruptError), PrefixBank.open(root) as bank:
        bank.stats()


def test_an_empty_revision_table_is_an_error_of_ours(root: Path) -> None:
    with connect(root) as index:
        index.execute("DELETE FROM alembic_version")
    with pytest.raises(PrefixBankError):
        PrefixBank.open(root)


def test_a_migration_that_fails_leaves_the_index_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.sqlite3"
    Index.create_file(path)
    real_upgrade = schema.upgrade

    def fail_at_the_end(tx: sa.Connection) -> None:
        real_upgrade(tx)
        raise StorageError("power cut")

    index = open_index(path)
    with monkeypatch.context() as patch:
        patch.setattr("prefixbank.index.upgrade", fail_at_the_end)
        with pytest.raises(StorageError, match="power cut"):
            index.migrate()
    assert index.revision is None
    index.migrate()
    index.migrate()  # a second time changes nothing
    assert index.revision == schema.HEAD_REVISION
    index.close()


def test_an_empty_index_has_an_older_format(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite3"
    assert Index.create_file(path)
    assert not Index.create_file(path)
    with closing(open_index(path)) as index, pytest.raises(SchemaError, match="prefixbank migrate"):
        index.require_current()


def pragmas_of(index: Index) -> dict[str, object]:
    with index.reading() as tx:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return {name: tx.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in names}


EXTRA, NORMAL = 3, 1  # https://www.sqlite.org/pragma.html#pragma_synchronous


@pytest.mark.parametrize(("durability", "synchronous"), [("full", EXTRA), ("fast", NORMAL)])
def test_pragmas_follow_the_durability(root: Path, durability: str, synchronous: int) -> None:
    with closing(open_index(root / "index.sqlite3", durability=durability)) as index:
        assert pragmas_of(index) == {"journal_mode": "delete", "synchronous": synchronous, "foreign_keys": 1}


def test_an_index_in_wal_mode_is_turned_back(root: Path) -> None:
    with connect(root) as index:
        index.execute("PRAGMA journal_mode=WAL")
    with PrefixBank.open(root) as bank:
        assert pragmas_of(bank._session.index)["journal_mode"] == "delete"
        assert FakeModel(bank).resolve(range(10)).n_tokens == 10
        assert bank.check(read_data=True).ok


@pytest.mark.parametrize("lock", ["IMMEDIATE", "EXCLUSIVE"])
def test_an_index_that_another_process_holds_is_busy_after_the_time_limit(root: Path, lock: str) -> None:
    with PrefixBank.open(root, busy_timeout_s=0.05) as bank, connect(root) as other:
        model = FakeModel(bank)
        other.execute(f"BEGIN {lock}")
        with pytest.raises(BankBusyError, match="another process"):
            model.store(range(50, 60))
        if lock == "IMMEDIATE":  # a writer that does not commit yet holds up no reader
            assert model.resolve(range(10)).n_tokens == 10
        else:
            with pytest.raises(BankBusyError, match="another process"):
                model.match(range(10))
            with pytest.raises(BankBusyError, match="another process"):
                PrefixBank.open(root, busy_timeout_s=0.05)
        other.execute("ROLLBACK")
        assert model.store(range(50, 60)).n_tokens == 10
        assert bank.check(read_data=True).findings == ()


def test_more_threads_than_connections_wait_or_are_told_that_the_bank_is_busy(root: Path) -> None:
    with closing(open_index(root / "index.sqlite3", timeout_s=0.1)) as index:
        held = []
        with pytest.raises(BankBusyError, match="too many threads"):
            while len(held) < 100:
                reading = index.reading()
                reading.__enter__()
                held.append(reading)
        for reading in held:
            reading.__exit__(None, None, None)
        assert index.revision == schema.HEAD_REVISION


def test_a_writer_holds_the_lock_from_its_first_statement(root: Path) -> None:
    """A deferred BEGIN would let both read the same state, and fail the second one's write at once."""
    path = root / "index.sqlite3"
    with closing(open_index(path)) as first, closing(open_index(path)) as second:
        with first.writing(), pytest.raises(BankBusyError), second.writing():
            pass
        with second.writing():
            pass


def test_a_reader_sees_one_state(root: Path) -> None:
    """Without BEGIN each SELECT would be a transaction of its own, and a writer could commit between two."""
    path = root / "index.sqlite3"
    tick = sa.select(schema.bank_state.c.tick)
    with closing(open_index(path)) as index:
        with index.reading() as reader:
            before = reader.execute(tick).scalar_one()
            with pytest.raises(BankBusyError), index.writing() as writer:
                writer.execute(sa.update(schema.bank_state).values(tick=before + 1))
            assert reader.execute(tick).scalar_one() == before
        with index.writing() as writer:
            writer.execute(sa.update(schema.bank_state).values(tick=before + 1))
        with index.reading() as reader:
            assert reader.execute(tick).scalar_one() == before + 1


def test_a_transaction_that_raises_changes_nothing(root: Path) -> None:
    tick = sa.select(schema.bank_state.c.tick)
    with closing(open_index(root / "index.sqlite3")) as index:
        with index.reading() as tx:
            before = tx.execute(tick).scalar_one()
        with suppress(ZeroDivisionError), index.writing() as tx:
            tx.execute(sa.update(schema.bank_state).values(tick=99))
            raise ZeroDivisionError
        with index.reading() as tx:
            assert tx.execute(tick).scalar_one() == before


def test_a_read_only_index_refuses_writes_twice(root: Path) -> None:
    """Ours refuses the transaction, and SQLite would refuse the statement."""
    with closing(open_index(root / "index.sqlite3", read_only=True)) as index:
        with pytest.raises(BankReadOnlyError), index.writing():
            pass
        with pytest.raises(BankReadOnlyError), index.reading() as tx:
            tx.execute(sa.update(schema.bank_state).values(tick=99))


def test_an_odd_path_is_opened_as_it_is_written(tmp_path: Path) -> None:
    root = tmp_path / "a b?mode=memory#%41&c"
    with PrefixBank.open(root) as bank:
        FakeModel(bank).store(range(5))
    with PrefixBank.open(root, read_only=True) as bank:
        assert FakeModel(bank).match(range(5)).n_tokens == 5
    assert (root / "index.sqlite3").stat().st_size > 0
