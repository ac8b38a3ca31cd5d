"""Hold an opened bank to its life: lost indexes, read-only banks, banks that vanish, warnings, uses and closing."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixbank import session as sessions
from prefixbank.bank import PrefixBank
from prefixbank.errors import BankNotFoundError, BankWarning, PrefixBankError, StorageError
from tests.fakekv import FakeModel

TOKENS = list(range(10))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Give the root of a closed bank that holds a prefix."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as bank:
        FakeModel(bank).name("shots", TOKENS)
    return tmp_path / "bank"


def lose(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("how", [lose, empty])
def test_a_lost_index_is_made_anew_with_a_warning(root: Path, how: Callable[[Path], None]) -> None:
    how(root / "index.sqlite3")
    with pytest.warns(BankWarning, match="made anew") as told:
        bank = PrefixBank.open(root)
    assert len(told) == 1
    with bank:
        model = FakeModel(bank)
        assert model.resolve(TOKENS).n_tokens == 0
        assert model.store(TOKENS).n_new_chunks == 3
        assert model.resolve(TOKENS).n_tokens == 10
        assert bank.check(read_data=True).ok
        assert bank.stats().n_chunks == 3
    assert stat.S_IMODE((root / "index.sqlite3").stat().st_mode) == 0o600
    PrefixBank.open(root).close()  # warned of once only


@pytest.mark.parametrize("how", [lose, empty])
def test_a_read_only_bank_does_not_make_an_index_anew(
    root: Path, how: Callable[[Path], None], unchanged: Callable[[Path], Any]
) -> None:
    how(root / "index.sqlite3")
    with unchanged(root), pytest.raises(PrefixBankError):
        PrefixBank.open(root, read_only=True)


def test_a_stale_journal_does_not_come_into_a_new_index(root: Path) -> None:
    (root / "index.sqlite3-journal").write_bytes((root / "index.sqlite3").read_bytes())
    (root / "index.sqlite3").unlink()
    with pytest.warns(BankWarning, match="made anew"):
        bank = PrefixBank.open(root)
    with bank:
        assert bank.stats().n_chunks == 0
        assert bank.check().ok


def test_lost_folders_are_made_again_and_private(root: Path) -> None:
    for name in ("shards", "tmp", "quarantine"):
        shutil.rmtree(root / name)
    with PrefixBank.open(root) as bank:
        model = FakeModel(bank)
        for token_ids in (TOKENS, [*TOKENS, 1], [7, 7]):
            model.resolve(token_ids)  # finds the shards missing, and heals
            assert model.store(token_ids).n_tokens == len(token_ids)
            assert model.resolve(token_ids).n_tokens == len(token_ids)
        assert bank.check(read_data=True).ok, bank.check().findings


def test_a_read_only_bank_writes_nothing(root: Path, unchanged: Callable[[Path], Any]) -> None:
    with unchanged(root), PrefixBank.open(root, read_only=True) as bank:
        model = FakeModel(bank)
        assert model.use(TOKENS).n_tokens == 10
        assert model.resolve(TOKENS).n_tokens == 10
        assert FakeModel(bank, "unknown").match(TOKENS).n_tokens == 0
        assert bank.check(read_data=True).ok
        assert (bank.stats().n_chunks, len(bank.prefixes()), len(bank.namespaces())) == (3, 1, 1)
        bank.flush()
        assert bank.read_only
        assert "read_only" in repr(bank)


def test_a_bank_that_can_not_be_written_is_opened_read_only_with_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch, unchanged: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    with unchanged(root):
        with pytest.warns(BankWarning, match="read-only"):
            bank = PrefixBank.open(root, max_bytes=0)
        with bank:
            assert bank.read_only
            assert FakeModel(bank).use(TOKENS).n_tokens == 10


def remake(root: Path) -> None:
    """Put another bank in the place of this one."""
    shutil.rmtree(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BankWarning)
        PrefixBank.open(root, chunk_tokens=4).close()


@pytest.mark.parametrize("vanish", [shutil.rmtree, lambda root: lose(root / "index.sqlite3"), remake])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_bank_that_vanishes_while_it_is_open_is_not_found(
    root: Path, vanish: Callable[[Path], None], read_only: bool
) -> None:
    """A connection to a deleted index goes on "succeeding"; what it says is no longer true."""
    bank = PrefixBank.open(root, read_only=read_only)
    model = FakeModel(bank)
    assert model.resolve(TOKENS).n_tokens == 10
    vanish(root)
    actions: list[Callable[[], Any]] = [lambda: model.match(TOKENS), bank.stats, bank.check, bank.prefixes]
    if not read_only:
        actions += [lambda: model.store([*TOKENS, 99]), lambda: bank.pin("shots"), bank.prune]
    for action in actions:
        with pytest.raises(BankNotFoundError, match="open the bank again"):
            action()
    bank.close()


def test_uses_that_can_not_be_noted_when_a_bank_vanished_are_a_warning(root: Path) -> None:
    bank = PrefixBank.open(root)
    model = FakeModel(bank)
    model.session.note_use(model.match(TOKENS))
    shutil.rmtree(root)
    with pytest.warns(BankWarning, match="could not be noted"):
        bank.close()
    bank.close()


def test_a_bank_that_could_not_be_noted_down_is_closed_all_the_same(root: Path) -> None:
    """Also where warnings are errors."""
    bank = PrefixBank.open(root)
    model = FakeModel(bank)
    model.session.note_use(model.match(TOKENS))
    shutil.rmtree(root)
    with pytest.raises(BankWarning, match="could not be noted"):
        bank.close()
    assert model.session.index._engine.pool.checkedin() == 0  # type: ignore[attr-defined]


def test_a_closed_bank_says_so(root: Path) -> None:
    bank = PrefixBank.open(root)
    model = FakeModel(bank)
    bank.close()
    bank.close()
    for action in (bank.stats, bank.check, lambda: model.match(TOKENS), lambda: model.store([1])):
        with pytest.raises(BankNotFoundError, match="closed"):
            action()


def test_a_bank_closes_itself_behind_an_exception(root: Path) -> None:
    with pytest.raises(ZeroDivisionError), PrefixBank.open(root) as bank:
        raise ZeroDivisionError
    with pytest.raises(BankNotFoundError, match="closed"):
        bank.stats()


def test_each_cause_is_warned_of_once_and_counted_each_time(model: FakeModel) -> None:
    with pytest.warns(BankWarning) as told:
        for number in range(3):
            model.session.warn("busy", f"busy {number}")
            model.session.warn("full", "full")
    assert [str(warning.message) for warning in told] == ["busy 0", "full"]
    assert model.bank.stats().session["failures"] == 6


def test_another_bank_warns_of_its_own(root: Path, tmp_path: Path) -> None:
    with PrefixBank.open(root) as one, PrefixBank.open(tmp_path / "two") as two, pytest.warns(BankWarning) as told:
        one._session.warn("busy", "one")
        two._session.warn("busy", "two")
    assert len(told) == 2


def test_uses_are_written_in_groups_and_at_the_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_USES_BETWEEN_WRITES", 3)

    def hits() -> set[int]:
        with PrefixBank.open(root, read_only=True) as reader:
            return {record.hits for record in reader.chunks()}

    with PrefixBank.open(root) as bank:
        model = FakeModel(bank)
        found = model.match(TOKENS)
        for n_uses, n_written in ((1, 0), (2, 0), (3, 3), (4, 3)):
            model.session.note_use(found)
            model.session._writes.wait()
            assert hits() == {n_written}, n_uses
    assert hits() == {4}


def test_a_use_makes_a_chain_younger_than_all_others(root: Path) -> None:
    with PrefixBank.open(root) as bank:
        model = FakeModel(bank)
        model.store([9, 9])
        model.use(TOKENS)
        ticks = {record.last_used for record in model.match(TOKENS).chunks}
        (other,) = model.match([9, 9]).chunks
        assert len(ticks) == 1
        assert min(ticks) > other.last_used


def test_a_use_of_what_was_evicted_meanwhile_is_no_error(bank: PrefixBank, model: FakeModel) -> None:
    model.store(TOKENS)
    found = model.match(TOKENS)
    bank.prune(max_bytes=0)
    model.session.note_use(found)
    bank.flush()
    assert bank.chunks() == []


def test_the_digest_memo_is_only_a_memo(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank that can't be asked costs the reading of the weights, not the model."""

    def fail(*_: object) -> None:
        raise StorageError("the index is broken")

    monkeypatch.setattr(sessions.weights_rows, "recall", fail)
    monkeypatch.setattr(sessions.weights_rows, "remember", fail)
    with PrefixBank.open(root) as bank:
        os.utime(root / "bank.json", (1e9, 1e9))
        with pytest.warns(BankWarning, match="weights"):
            assert len(bank._session.digest_files([root / "bank.json"])["bank.json"]) == 64


def test_threads_share_a_bank(bank: PrefixBank, model: FakeModel) -> None:
    n_threads = 6
    start = threading.Barrier(n_threads)
    prompts = [[number % 3, number % 2, 1, 2, 3, number, 5] for number in range(12)]

    def work(seed: int) -> int:
        start.wait()
        found = 0
        for step in range(20):
            token_ids = prompts[(seed * 5 + step * 7) % len(prompts)]
            if (seed + step) % 3:
                found += model.resolve(token_ids).n_tokens
                model.session.note_use(model.match(token_ids))
            else:
                assert model.store(token_ids).n_tokens == len(token_ids)
        return found

    with ThreadPoolExecutor(n_threads) as threads:
        assert sum(threads.map(work, range(n_threads))) > 0
    for token_ids in prompts:
        model.store(token_ids)
        assert model.resolve(token_ids).n_tokens == 7
    assert bank.check(read_data=True).findings == ()


def test_a_name_moves_on_and_its_old_version_keeps_chunk_and_pin_under_another(
    bank: PrefixBank, model: FakeModel
) -> None:
    model.name("mood", TOKENS, pin=True)
    (old,) = bank.prefixes("mood")
    stored = model.store([*TOKENS[:6], 77])
    new = replace(old, chunk_key=stored.last_key, n_tokens=7, pinned=False, source_digest="1" * 64)
    model.name("mood@00000000", [5, 5])  # what has the next name gives way
    assert bank._session.name_prefix(new, old, "mood@00000000")
    assert bank.prefixes() == [replace(new, pinned=True), replace(old, name="mood@00000000")]


def test_an_old_version_that_has_gone_is_not_kept(bank: PrefixBank, model: FakeModel) -> None:
    model.name("mood", TOKENS, pin=True)
    (old,) = bank.prefixes("mood")
    newer = replace(old, source_digest="1" * 64, pinned=False)
    bank.unpin("mood")
    bank._session.name_prefix(newer)  # by another process, say
    newest = replace(old, source_digest="2" * 64, pinned=False)
    assert not bank._session.name_prefix(newest, old, "mood@00000000")
    assert bank.prefixes() == [newest]


def test_a_covered_tail_is_kept_where_its_name_went(bank: PrefixBank, model: FakeModel) -> None:
    model.name("mood", TOKENS)
    (old,) = bank.prefixes("mood")
    longer = model.store([*TOKENS, 10, 11, 12])  # supersedes the tail that the record still names
    new = replace(old, chunk_key=longer.last_key, n_tokens=13, source_digest="1" * 64)
    assert bank._session.name_prefix(new, old, "mood@00000000")
    kept = bank.prefixes("mood@00000000")[0]
    assert kept.n_stored_tokens(bank.chain(kept)) == len(TOKENS)
