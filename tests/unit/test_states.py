"""Hold chunks with states of recurrent layers to their promises: found exactly where they were stored, never lost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from prefixbank import chunking, eviction, storing
from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids, unpack_token_ids
from prefixbank.files import disk_bytes
from prefixbank.index import chunk_rows
from prefixbank.layout import CacheLayout
from prefixbank.shards import ShardWriter
from prefixbank.storing import Stored
from prefixbank.values import ChunkRecord, PrefixRecord
from tests.fakekv import HYBRID, STATES_ONLY, FakeModel, disk_usage

SHOTS = list(range(1, 13))  # three chunks of 4
BLOCK = 4096
"""What a chunk of the hybrid model takes on disk without states; with them it is more."""


@pytest.fixture
def hybrid(bank: PrefixBank) -> FakeModel:
    """Give a model with recurrent layers beside rows."""
    return FakeModel(bank, "hybrid", layout=HYBRID)


@pytest.fixture
def quiet_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefixBank]:
    """Give a bank; the check must find it in order although keys collide."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4, durability="fast") as bank:
        yield bank
        assert_in_order(bank)


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


# --- where a match ends


def test_a_match_ends_at_states_and_never_where_only_rows_are(hybrid: FakeModel) -> None:
    stored = hybrid.store(SHOTS, ends=[2, 6, 8])
    assert (stored.n_tokens, stored.refused) == (12, "")
    assert said(hybrid, [99, *SHOTS]) == (0, 0, "none")
    assert said(hybrid, SHOTS[:1]) == (0, 1, "no-state")
    assert said(hybrid, SHOTS[:2]) == (2, 2, "all")
    assert said(hybrid, SHOTS[:5]) == (2, 5, "no-state")
    assert said(hybrid, SHOTS[:6]) == (6, 6, "all")
    assert said(hybrid, SHOTS[:7]) == (6, 7, "no-state")
    assert said(hybrid, [*SHOTS[:6], 99]) == (6, 6, "partial")
    assert said(hybrid, [*SHOTS[:7], 99]) == (6, 7, "no-state")
    assert said(hybrid, [*SHOTS[:2], 99]) == (2, 2, "partial")
    assert said(hybrid, SHOTS) == (8, 12, "no-state")
    assert said(hybrid, [*SHOTS, 99]) == (8, 12, "no-state")


@pytest.mark.parametrize("n_same", range(1, 8))
def test_states_behind_a_chunk_that_the_prompt_parts_in_are_not_its_own(hybrid: FakeModel, n_same: int) -> None:
    """The last chunk of a match may be used in part; what stands on it belongs to other token ids, equal or not."""
    hybrid.store(SHOTS, ends=[10, 12])
    prompt = [*SHOTS[:n_same], 99, *SHOTS[n_same + 1 :]]
    assert said(hybrid, prompt) == (0, n_same, "no-state")
    hybrid.store(SHOTS[:3], ends=[3])
    assert said(hybrid, prompt)[0] == (3 if n_same >= 3 else 0)


def test_the_limit_holds_for_states(hybrid: FakeModel) -> None:
    """The last token is always left to compute: states behind it are of no use."""
    hybrid.store(SHOTS[:8], ends=[6, 8])
    assert said(hybrid, SHOTS[:8], 7) == (6, 7, "no-state")
    assert said(hybrid, SHOTS[:6], 5) == (0, 5, "no-state")
    assert said(hybrid, SHOTS[:7], 6) == (6, 6, "all")
    assert said(hybrid, SHOTS[:7], 0) == (0, 0, "none")


def test_without_any_states_nothing_is_resumed(bank: PrefixBank, hybrid: FakeModel) -> None:
    assert hybrid.store(SHOTS[:8]).n_tokens == 8
    assert said(hybrid, SHOTS) == (0, 8, "no-state")
    assert kept(bank) == {(0, 4): False, (4, 8): False}


@pytest.mark.parametrize("layout", [HYBRID, STATES_ONLY], ids=["hybrid", "states only"])
def test_states_at_several_ends_of_one_chunk_and_at_chunk_ends(bank: PrefixBank, layout: CacheLayout) -> None:
    model = FakeModel(bank, layout=layout)
    stored = model.store(SHOTS[:11], ends=range(1, 12))
    assert (stored.n_tokens, stored.n_new_chunks, stored.refused) == (11, 11, "")
    assert stored.last_key == row_of(bank, 8, 11).key
    assert set(kept(bank).values()) == {True}
    for n_tokens in range(1, 12):
        assert said(model, SHOTS[:n_tokens]) == (n_tokens, n_tokens, "all")
    again = model.source(SHOTS[:11])
    again.ends = range(1, 12)
    assert model.session.store(model.namespace, pack_token_ids(SHOTS[:11]), again).n_new_chunks == 0
    assert again.n_asked == 0
    assert_in_order(bank)


def test_states_beyond_what_is_stored_are_left_out(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS[:6], ends=[0, 6])
    source = hybrid.source(SHOTS)
    source.ends = [0, 3, 9]
    assert hybrid.session.store(hybrid.namespace, pack_token_ids(SHOTS[:5]), source).refused == ""
    assert kept(bank) == {(0, 3): True, (0, 4): False, (4, 6): True}


def test_a_tail_without_states_is_of_no_use_and_not_stored(bank: PrefixBank, hybrid: FakeModel) -> None:
    """Nothing is refused: it was not wanted."""
    stored = hybrid.store(SHOTS[:7], ends=[4])
    assert (stored.n_tokens, stored.refused) == (4, "")
    stored = hybrid.store(SHOTS[:7], ends=[6])
    assert (stored.n_tokens, stored.refused, stored.last_key) == (6, "", row_of(bank, 4, 6).key)
    assert hybrid.store(SHOTS[:3]).n_tokens == 0
    assert kept(bank) == {(0, 4): True, (4, 6): True}


def test_states_of_another_namespace_never_match(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS, ends=[2, 6, 12])
    for other in (
        FakeModel(bank, "hybrid", salt=b"tenant", layout=HYBRID),
        FakeModel(bank, "other", layout=HYBRID),
    ):
        assert said(other, SHOTS) == (0, 0, "none")
        other.store(SHOTS, b"B", ends=[3])
        assert other.resolve(SHOTS, [b"B"]).n_tokens == 3
        assert other.resolve(SHOTS[:2], [b"B"]).n_tokens == 0
    assert said(hybrid, SHOTS) == (12, 12, "all")
    assert said(hybrid, SHOTS[:3]) == (2, 3, "no-state")


# --- tails


def test_a_longer_sibling_does_not_supersede_a_tail_with_states(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.name("short", SHOTS[:2], ends=[2])
    hybrid.store(SHOTS[:3], ends=[3])
    hybrid.store(SHOTS[:8], ends=[8])
    assert kept(bank) == {(0, 2): True, (0, 3): True, (0, 4): False, (4, 8): True}
    assert hybrid.held(SHOTS[:2], SHOTS[:3], SHOTS[:4], SHOTS) == [2, 3, 3, 8]
    (short,) = bank.prefixes("short")
    assert short.chunk_key == row_of(bank, 0, 2).key
    assert_in_order(bank)


def test_a_longer_sibling_does_not_cover_a_tail_with_states(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS[:8], ends=[8])
    stored = hybrid.store(SHOTS[:6], ends=[6])
    assert (stored.n_tokens, stored.n_new_chunks, stored.last_key) == (6, 1, row_of(bank, 4, 6).key)
    assert hybrid.store(SHOTS[:5], ends=[5]).n_new_chunks == 1  # nor does another tail
    assert hybrid.held(SHOTS[:5], SHOTS[:6], SHOTS[:7], SHOTS) == [5, 6, 6, 8]


def test_rows_alone_still_supersede_and_cover(bank: PrefixBank, model: FakeModel, hybrid: FakeModel) -> None:
    """States of one model change nothing for another in the same bank."""
    hybrid.store(SHOTS[:3], ends=[3])
    model.store(SHOTS[:3])
    model.store(SHOTS[:4])
    assert model.store(SHOTS[:2]).n_new_chunks == 0
    own = [r for r in bank.chunks() if r.namespace_id == model.namespace.id]
    assert [(r.start, r.end) for r in own] == [(0, 4)]
    assert model.match(SHOTS).n_known_tokens == model.match(SHOTS).n_tokens == 4


def test_states_are_found_among_more_siblings_than_are_compared(
    hybrid: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixbank.resolver.MAX_CANDIDATES", 2)
    hybrid.store([1, 2, 3], ends=[3])
    for last in range(5):
        hybrid.store([1, 50 + last], ends=[2])
    n_tokens, n_known, _ = said(hybrid, [1, 2, 3, 4])
    assert n_tokens == 3
    assert n_known >= n_tokens


# --- states that come later


def test_a_chunk_gets_its_states_later(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.name("shots", SHOTS, pin=True)
    hybrid.name("first", SHOTS[:4])
    before = row_of(bank, 0, 4)
    with bank._session.index.reading() as tx:
        bytes_before = chunk_rows.disk_bytes(tx)
    stored = hybrid.store(SHOTS[:4], ends=[4])
    after = row_of(bank, 0, 4)
    assert (stored.n_tokens, stored.n_new_chunks, stored.last_key) == (4, 1, before.key)
    assert (after.key, after.parent_key, after.has_state) == (before.key, before.parent_key, True)
    assert after.file_name != before.file_name
    assert not hybrid.path_of(before).exists()
    with bank._session.index.reading() as tx:
        assert chunk_rows.disk_bytes(tx) - bytes_before == after.disk_bytes - before.disk_bytes > 0
    assert kept(bank) == {(0, 4): True, (4, 8): False, (8, 12): False}  # the children stay
    assert said(hybrid, SHOTS) == (4, 12, "no-state")
    assert bank.prefixes("first")[0].chunk_key == before.key
    (shots,) = bank.prefixes("shots")
    assert (shots.pinned, len(bank.chain(shots))) == (True, 3)
    assert_in_order(bank)
    bank.prune(max_bytes=0)
    assert said(hybrid, SHOTS) == (4, 12, "no-state")


def test_a_middle_and_a_last_chunk_get_their_states_later(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS)
    stored = hybrid.store(SHOTS, ends=[8, 10, 12])
    assert (stored.n_tokens, stored.n_new_chunks, stored.refused) == (12, 3, "")
    assert kept(bank) == {(0, 4): False, (4, 8): True, (8, 10): True, (8, 12): True}
    assert hybrid.held(SHOTS[:4], SHOTS[:9], SHOTS[:11], SHOTS) == [0, 8, 10, 12]
    assert_in_order(bank)


def test_a_second_writer_without_states_does_not_take_them_away(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS, ends=[2, 4, 12])
    files = {record.file_name for record in bank.chunks()}
    stored = hybrid.store(SHOTS)
    assert (stored.n_tokens, stored.n_new_chunks) == (12, 0)
    assert {record.file_name for record in bank.chunks()} == files
    assert hybrid.held(SHOTS[:3], SHOTS[:4], SHOTS) == [2, 4, 12]


@pytest.mark.parametrize("first_with", [True, False], ids=["without comes second", "with comes second"])
def test_of_two_writers_at_once_the_one_with_states_wins(
    bank: PrefixBank, hybrid: FakeModel, monkeypatch: pytest.MonkeyPatch, first_with: bool
) -> None:
    """Both planned before either wrote."""
    real_publish = ShardWriter.publish
    raced: list[Stored] = []

    def publish(self: ShardWriter) -> None:
        real_publish(self)
        if not raced:
            raced.append(Stored(0, None))
            raced[0] = hybrid.store(SHOTS[:8], ends=[4, 8] if first_with else [])

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "publish", publish)
        stored = hybrid.store(SHOTS[:8], ends=[] if first_with else [4, 8])
    assert (raced[0].n_new_chunks, raced[0].n_tokens) == (2, 8)
    assert (stored.n_new_chunks, stored.n_tokens, stored.refused) == (0 if first_with else 2, 8, "")
    assert kept(bank) == {(0, 4): True, (4, 8): True}
    assert_in_order(bank)


def test_in_groups_states_come_later_too(bank: PrefixBank, hybrid: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "_GROUP_BYTES", 1)
    hybrid.store(SHOTS)
    stored = hybrid.store([*SHOTS, 13, 14], ends=[1, 4, 7, 8, 12, 14])
    assert (stored.n_tokens, stored.n_new_chunks, stored.refused) == (14, 6, "")
    assert hybrid.held(SHOTS[:3], SHOTS[:7], [*SHOTS, 13, 14]) == [1, 7, 14]
    assert_in_order(bank)


def test_rows_that_are_there_count_where_the_budget_refuses_their_states(tmp_path: Path) -> None:
    """A refused replacement takes nothing away: not the rows, nor what the store says of them."""
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4, max_bytes=4 * BLOCK) as bank:
        hybrid = FakeModel(bank, "hybrid", layout=HYBRID)
        hybrid.name("shots", SHOTS, pin=True)
        with pytest.warns(match="not stored whole"):
            stored = hybrid.store(SHOTS, ends=[4])
        assert "do not fit" in stored.refused
        assert (stored.n_tokens, stored.last_key) == (12, row_of(bank, 8, 12).key)
        assert kept(bank) == {(0, 4): False, (4, 8): False, (8, 12): False}
        assert_in_order(bank)


def test_rows_that_are_there_count_where_a_child_is_lost_meanwhile(
    bank: PrefixBank, hybrid: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid.store(SHOTS)
    real_publish = ShardWriter.publish
    raced: list[bool] = []

    def publish(self: ShardWriter) -> None:
        real_publish(self)
        if not raced:
            raced.append(True)
            session = bank._session
            in_progress = eviction.find_unnamed(session.index, session.shards, time.time()).n_young_bytes
            bank.prune(max_bytes=BLOCK + in_progress)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "publish", publish)
        with pytest.warns(match="removed meanwhile"):
            stored = hybrid.store([*SHOTS, 13], ends=[4, 13])
    assert (stored.n_tokens, kept(bank)) == (4, {(0, 4): False})
    assert_in_order(bank)


# --- colliding keys


def constant(_data: bytes) -> bytes:
    return b"K" * 16


def eight_bits(data: bytes) -> bytes:
    return (xxhash.xxh3_64_intdigest(data) & 0xFF).to_bytes(16, "big")


def test_a_colliding_tail_never_gives_its_states_away(quiet_bank: PrefixBank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "_hash128", constant)
    hybrid = FakeModel(quiet_bank, "hybrid", layout=HYBRID)
    hybrid.store([1, 2], ends=[2])
    with pytest.warns(match="another prefix's"):
        stored = hybrid.store([1, 3], b"B", ends=[2])
    assert (stored.n_tokens, stored.last_key) == (0, None)
    assert hybrid.store([1, 2], b"B", ends=[2]).n_new_chunks == 0
    assert hybrid.store([7, 8, 9], b"B", ends=[3]).refused
    assert said(hybrid, [1, 2, 3]) == (2, 2, "partial")
    assert said(hybrid, [1, 3]) == (0, 1, "no-state")
    assert said(hybrid, [7, 8, 9]) == (0, 0, "none")
    with quiet_bank._session.index.reading() as tx:
        assert len(chunk_rows.list_all(tx)) == 1


@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")
@pytest.mark.parametrize("poor", [constant, eight_bits], ids=["0", "8"])
@pytest.mark.parametrize("layout", [HYBRID, STATES_ONLY], ids=["hybrid", "states only"])
def test_colliding_keys_give_a_miss_or_the_right_states(
    quiet_bank: PrefixBank, monkeypatch: pytest.MonkeyPatch, poor: Any, layout: CacheLayout
) -> None:
    monkeypatch.setattr(chunking, "_hash128", poor)
    model, other = (FakeModel(quiet_bank, label, layout=layout) for label in ("model", "other"))
    n_found = 0
    for number in range(80):
        token_ids = [int(digit) % 2 for digit in f"{number * 7919:017b}"][-(number % 13 + 1) :]
        user, flavour = (model, b"A") if number % 3 else (other, b"B")
        ends = sorted({number % len(token_ids), len(token_ids)})
        stored = user.store(token_ids, flavour, ends=ends)
        if stored.n_tokens == len(token_ids):
            assert user.resolve(token_ids, [flavour]).n_tokens == len(token_ids)
        n_found += model.resolve([*token_ids, 0, 1], [b"A"]).n_tokens > 0  # reads, and compares the states
        n_found += other.resolve([*token_ids, 1, 0], [b"B"]).n_tokens > 0
    assert n_found


# --- what goes


def test_eviction_takes_states_by_their_use(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS[:8], ends=[2, 6, 8])
    hybrid.use(SHOTS[:6])
    with bank._session.index.reading() as tx:
        all_bytes = chunk_rows.disk_bytes(tx)
    gone = bank.prune(max_bytes=all_bytes - BLOCK)
    assert [(p.record.start, p.record.end) for p in gone.chunks] == [(4, 8)]
    assert hybrid.held(SHOTS, SHOTS[:5]) == [6, 2]
    assert_in_order(bank)
    bank.prune(max_bytes=0)
    assert bank.chunks() == []
    assert_in_order(bank)


def test_a_chunk_with_tails_behind_it_outlives_them(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS[:6], ends=[6])
    hybrid.store(SHOTS[:8], ends=[8])
    planned = bank.prune(max_bytes=0, dry_run=True)
    assert [(p.record.start, p.record.end) for p in planned.chunks][-1] == (0, 4)
    first = row_of(bank, 0, 4)
    with bank._session.index.writing() as tx:
        assert not chunk_rows.delete(tx, first)


def test_pinned_states_outlive_a_prune_and_their_siblings_do_not(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS, ends=[4, 7, 12])
    hybrid.name("six", SHOTS[:6], ends=[6], pin=True)
    bank.prune(max_bytes=0)
    assert kept(bank) == {(0, 4): True, (4, 6): True}
    assert said(hybrid, SHOTS) == (6, 6, "partial")
    assert_in_order(bank)


def test_a_removed_name_takes_its_states_along(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.name("six", SHOTS[:6], ends=[6])
    hybrid.name("eight", SHOTS[:8], ends=[8])
    bank.remove("six")
    assert hybrid.held(SHOTS[:6], SHOTS) == [0, 8]
    bank.remove("eight")
    assert bank.chunks() == []


def test_a_pruned_middle_chunk(bank: PrefixBank, hybrid: FakeModel) -> None:
    """Its file is lost: what stands on it can't be reached, what lies before can; stored again, all is there."""
    hybrid.store([*SHOTS, 13], ends=[2, 6, 8, 13])
    hybrid.path_of(row_of(bank, 4, 8)).unlink()
    assert "missing" in {finding.kind for finding in bank.check().findings}
    assert hybrid.resolve([*SHOTS, 13]).n_tokens == 0  # as long as nobody has noticed, a match promised more
    hole = row_of(bank, 4, 8)
    assert (hole.file_name, hole.has_state, hole.disk_bytes) == (None, False, 0)
    assert said(hybrid, [*SHOTS, 13]) == (6, 6, "lost")
    assert said(hybrid, [*SHOTS[:7]]) == (6, 6, "partial")
    assert_in_order(bank)
    stored = hybrid.store([*SHOTS, 13], ends=[8, 13])
    assert (stored.n_tokens, stored.n_new_chunks) == (13, 1)
    assert said(hybrid, [*SHOTS, 13]) == (13, 13, "all")
    assert said(hybrid, SHOTS) == (8, 12, "no-state")
    assert_in_order(bank)


def test_a_hole_with_states_that_is_filled_without(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS, ends=[4, 8])
    path = hybrid.path_of(row_of(bank, 4, 8))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # in the states
    path.write_bytes(content)
    assert [f.kind for f in bank.check(read_data=True).problems] == ["corrupt"]
    assert hybrid.resolve(SHOTS).n_tokens == 4
    assert said(hybrid, SHOTS) == (4, 4, "lost")
    assert hybrid.store(SHOTS).n_new_chunks == 1
    assert kept(bank) == {(0, 4): True, (4, 8): False, (8, 12): False}
    assert said(hybrid, SHOTS) == (4, 12, "no-state")
    assert_in_order(bank)
    assert hybrid.store(SHOTS, ends=[8]).n_new_chunks == 1
    assert said(hybrid, SHOTS) == (8, 12, "no-state")
    assert_in_order(bank)


def test_a_named_tail_with_states_that_was_lost_is_stored_again(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.name("six", SHOTS[:6], ends=[6], pin=True)
    hybrid.path_of(row_of(bank, 4, 6)).unlink()
    hybrid.resolve(SHOTS[:6])
    assert [finding.kind for finding in bank.check().findings] == ["hole"]
    assert hybrid.store(SHOTS[:6], ends=[6]).n_new_chunks == 1
    assert said(hybrid, SHOTS) == (6, 6, "partial")
    bank.prune(max_bytes=0)
    assert said(hybrid, SHOTS) == (6, 6, "partial")


# --- rows that a source lacks


def store_known(model: FakeModel, token_ids: list[int], n_known: int, ends: Sequence[int] = ()) -> Stored:
    source = replace(model.source(token_ids), n_known=n_known, ends=ends)
    stored: Stored = model.session.store(model.namespace, pack_token_ids(token_ids), source)
    return stored


@pytest.mark.parametrize(("n_known", "n_stored"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (10, 8), (11, 11)])
def test_a_source_that_lacks_rows_stores_up_to_there(
    bank: PrefixBank, model: FakeModel, n_known: int, n_stored: int
) -> None:
    stored = store_known(model, SHOTS[:11], n_known)
    assert (stored.n_tokens, stored.refused) == (n_stored, "")
    assert model.resolve(SHOTS).n_tokens == n_stored
    assert bank.stats().session.get("refused_stores", 0) == 0


def test_a_source_that_lacks_rows_goes_on_from_what_is_there(bank: PrefixBank, model: FakeModel) -> None:
    model.store(SHOTS[:8])
    stored = store_known(model, SHOTS, 0)
    assert (stored.n_tokens, stored.n_new_chunks, stored.refused) == (8, 0, "")


def test_states_without_their_rows_are_not_stored(bank: PrefixBank, hybrid: FakeModel) -> None:
    stored = store_known(hybrid, SHOTS, 6, ends=[5, 6, 7, 8, 12])
    assert (stored.n_tokens, stored.refused, stored.last_key) == (6, "", row_of(bank, 4, 6).key)
    assert kept(bank) == {(0, 4): False, (4, 5): True, (4, 6): True}
    assert said(hybrid, SHOTS) == (6, 6, "partial")


def test_a_chunk_keeps_its_rows_where_the_states_come_without_any(bank: PrefixBank, hybrid: FakeModel) -> None:
    hybrid.store(SHOTS)
    stored = store_known(hybrid, SHOTS, 0, ends=[4])
    assert (stored.n_tokens, stored.refused) == (12, "")
    assert said(hybrid, SHOTS) == (0, 12, "no-state")
    assert {tuple(unpack_token_ids(r.token_ids)) for r in bank.chunks()} == {
        (1, 2, 3, 4),
        (5, 6, 7, 8),
        (9, 10, 11, 12),
    }


def test_removing_a_name_takes_the_states_inside_its_prefix_along(bank: PrefixBank) -> None:
    model = FakeModel(bank, layout=HYBRID)
    stored = model.store(range(1, 13), ends=[2, 6, 12])
    model.session.name_prefix(PrefixRecord("one", model.namespace.id, stored.last_key, 12, False, "0" * 64, 1))
    plan = bank.remove("one", dry_run=True)
    assert bank.remove("one") == plan
    assert bank.chunks() == []
