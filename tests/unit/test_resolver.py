"""Hold matching to the token: the longest stored prefix, proven from the root on, and never a token too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixbank import resolver, restoring
from prefixbank.bank import PrefixBank
from prefixbank.chunking import full_chunks, pack_token_ids
from prefixbank.index import chunk_rows
from prefixbank.values import ChunkRecord, Match
from tests.fakekv import FakeModel

SHOTS = list(range(1, 11))  # two chunks of 4 and a tail of 2


def starts(found: Match) -> list[tuple[int, int]]:
    return [(record.start, record.n_tokens) for record in found.chunks]


def test_an_empty_bank_matches_nothing(model: FakeModel) -> None:
    found = model.match(SHOTS)
    assert (found.n_tokens, found.n_bytes, found.reason, found.chunks) == (0, 0, resolver.REASON_NONE, ())
    assert found.n_rest_tokens == found.n_prompt_tokens == 10


@pytest.mark.parametrize("n_common", range(11))
def test_a_match_ends_where_the_prompts_part(model: FakeModel, n_common: int) -> None:
    model.store(SHOTS)
    found = model.resolve([*SHOTS[:n_common], 99, 98, 97, 96, 95])
    assert found.n_tokens == n_common
    assert found.n_rest_tokens == 5
    assert found.reason == (resolver.REASON_PARTIAL if n_common else resolver.REASON_NONE)


@pytest.mark.parametrize("n_prompt", range(1, 11))
def test_a_prompt_that_ends_inside_what_is_stored_is_matched_to_its_end(model: FakeModel, n_prompt: int) -> None:
    model.store(SHOTS)
    found = model.resolve(SHOTS[:n_prompt])
    assert (found.n_tokens, found.reason) == (n_prompt, resolver.REASON_ALL)


@pytest.mark.parametrize("n_stored", [1, 3, 4, 5, 8, 10, 12])
def test_an_exact_repeat_leaves_one_token_to_compute(model: FakeModel, n_stored: int) -> None:
    """Also where the prompt is exactly k chunks long: the last chunk is then used in part."""
    token_ids = list(range(50, 50 + n_stored))
    model.store(token_ids)
    found = model.match(token_ids, limit=n_stored - 1)
    assert found.n_tokens == n_stored - 1
    assert found.n_rest_tokens == 1
    assert found.reason == (resolver.REASON_ALL if n_stored > 1 else resolver.REASON_NONE)


@pytest.mark.parametrize("limit", range(11))
def test_the_limit_is_never_exceeded(model: FakeModel, limit: int) -> None:
    model.store(SHOTS)
    found = model.match(SHOTS, limit=limit)
    assert found.n_tokens == limit
    assert sum(record.start < limit for record in found.chunks) == len(found.chunks)  # no chunk is read for nothing


def test_the_bytes_of_a_match_are_those_of_its_files(model: FakeModel) -> None:
    model.store(SHOTS)
    found = model.match([*SHOTS[:6], 99])
    assert starts(found) == [(0, 4), (4, 4)]
    assert found.n_bytes == sum(model.path_of(record).stat().st_size for record in found.chunks)


def test_the_longest_of_several_tails_is_taken(model: FakeModel) -> None:
    for tail in ([5, 1], [5, 6, 1], [5, 6, 7], [6]):
        model.store([1, 2, 3, 4, *tail])
    assert model.resolve([1, 2, 3, 4, 5, 6, 7, 8]).n_tokens == 7
    assert model.resolve([1, 2, 3, 4, 5, 6, 1]).n_tokens == 7
    assert model.resolve([1, 2, 3, 4, 5, 2]).n_tokens == 5
    assert model.resolve([1, 2, 3, 4, 7]).n_tokens == 4


def test_a_full_chunk_that_parts_later_is_better_than_a_tail(model: FakeModel) -> None:
    model.store([1, 2])
    model.store([1, 2, 3, 4, 5, 6, 7, 8])
    model.store([1, 2, 3, 9])
    found = model.resolve([1, 2, 3, 4, 5, 6, 7, 9])
    assert (found.n_tokens, starts(found)) == (7, [(0, 4), (4, 4)])


def test_of_equally_long_runs_the_smallest_file_is_read(model: FakeModel) -> None:
    model.store([1, 2, 3, 4])
    model.store([1, 2, 5])
    found = model.match([1, 2, 9])
    assert [record.n_tokens for record in found.chunks] == [3]


def test_a_tail_that_is_exhausted_ends_the_match(model: FakeModel) -> None:
    """What was stored behind a shorter prompt's tail stands on other chunks: a tail is never gone on from."""
    model.store([1, 2, 3, 4, 5, 6])
    assert model.resolve([1, 2, 3, 4, 5, 6, 7, 8, 9]).n_tokens == 6


def test_another_namespace_never_matches(bank: PrefixBank, model: FakeModel) -> None:
    others = [FakeModel(bank, "other weights"), FakeModel(bank, salt=b"tenant")]
    for number, other in enumerate(others):
        assert other.match(SHOTS).n_tokens == 0
        other.store(SHOTS[: 3 + number], b"B")
    assert model.match(SHOTS).n_tokens == 0
    model.store(SHOTS[:2])
    assert [m.match(SHOTS).n_tokens for m in (model, *others)] == [2, 3, 4]
    assert model.resolve(SHOTS, [b"A"]).n_tokens == 2
    assert others[0].resolve(SHOTS, [b"B"]).n_tokens == 3


def forge(model: FakeModel, record: ChunkRecord) -> None:
    """Put a row into the index, whatever it says."""
    with model.session.index.writing() as tx:
        assert chunk_rows.add(tx, record, 1, 1)


@pytest.mark.parametrize("change", ["token_ids", "start", "namespace"])
def test_a_row_of_the_right_key_and_other_contents_is_no_match(bank: PrefixBank, model: FakeModel, change: str) -> None:
    """A key locates; a second preimage of it can be built in a moment."""
    ((_, key),) = full_chunks(model.namespace.root_key, pack_token_ids([1, 2, 3, 4]), 4)
    model.store([7, 7, 7, 7])
    (honest,) = bank.chunks()
    forged = replace(
        honest,
        key=key,
        token_ids=pack_token_ids([1, 2, 3, 5] if change == "token_ids" else [1, 2, 3, 4]),
        start=4 if change == "start" else 0,
        namespace_id=FakeModel(bank, "other").namespace.id if change == "namespace" else honest.namespace_id,
    )
    forge(model, forged)
    found = model.match([1, 2, 3, 4, 5])
    assert found.n_tokens == 0
    with model.session.index.writing() as tx:
        assert chunk_rows.delete(tx, forged)


def test_a_row_of_the_right_key_behind_another_parent_is_no_match(bank: PrefixBank, model: FakeModel) -> None:
    (_, (_, key)) = full_chunks(model.namespace.root_key, pack_token_ids([1, 2, 3, 4, 5, 6, 7, 8]), 4)
    model.store([1, 2, 3, 4])
    model.store([7, 7, 7, 7])
    (other,) = model.match([7, 7, 7, 7]).chunks
    forged = replace(other, key=key, parent_key=other.key, start=4, token_ids=pack_token_ids([5, 6, 7, 8]))
    forge(model, forged)
    assert model.match([1, 2, 3, 4, 5, 6, 7, 8]).n_tokens == 4
    with model.session.index.writing() as tx:
        assert chunk_rows.delete(tx, forged)


def test_chunks_behind_another_parent_are_no_match(model: FakeModel) -> None:
    model.store([1, 2, 3, 4, 5, 6, 7, 8])
    model.store([4, 3, 2, 1, 5, 6, 7, 8, 9])
    found = model.resolve([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert found.n_tokens == 8


def test_a_lost_shard_in_the_middle_keeps_what_is_before_it_and_heals(bank: PrefixBank, model: FakeModel) -> None:
    """Block 17 of 85."""
    long = [n % 7 for n in range(85 * 4)]
    model.store(long)
    lost = sorted(bank.chunks(), key=lambda record: record.start)[16]
    model.path_of(lost).unlink()
    assert model.resolve(long).n_tokens == 16 * 4
    found = model.match(long)
    assert (found.n_tokens, found.reason) == (64, resolver.REASON_LOST)
    assert bank.stats().n_holes == 1
    stored = model.store(long)
    assert (stored.n_tokens, stored.n_new_chunks) == (340, 1)
    assert model.resolve(long).n_tokens == 340
    assert bank.stats().n_holes == 0


def test_beside_a_hole_the_longest_sibling_is_still_found(model: FakeModel) -> None:
    model.store([1, 2, 3, 4, 5, 6])
    model.store([1, 2, 3, 9])
    first = model.match([1, 2, 3, 4]).chunks[0]
    model.path_of(first).unlink()
    model.resolve([1, 2, 3, 4])
    found = model.resolve([1, 2, 3, 4, 5, 6])
    assert (found.n_tokens, found.reason) == (3, resolver.REASON_LOST)


def test_healing_on_a_system_error_leaves_the_shard_alone(bank: PrefixBank, model: FakeModel) -> None:
    from prefixbank.errors import StorageError

    model.store(SHOTS)
    for record in bank.chunks():
        failure = StorageError("too many open files")
        assert not restoring.heal(model.session.index, model.session.shards, record, failure)
    assert model.resolve(SHOTS).n_tokens == 10


def test_the_most_recently_used_candidates_are_compared(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "MAX_CANDIDATES", 3)
    for last in range(10, 15):
        model.store([1, 2, last])
    assert model.match([1, 2, 10]).n_tokens == 2
    assert model.match([1, 2, 14]).n_tokens == 3
    model.use([1, 2, 12])
    model.store([1, 2, 20])
    assert model.match([1, 2, 12]).n_tokens == 3


SMALL = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SMALL, min_size=1, max_size=5), SMALL)
def test_a_match_is_the_longest_common_beginning_with_anything_stored(
    tmp_path_factory: pytest.TempPathFactory, stored: list[list[int]], prompt: list[int]
) -> None:
    def common(left: Sequence[int], right: Sequence[int]) -> int:
        n = 0
        while n < min(len(left), len(right)) and left[n] == right[n]:
            n += 1
        return n

    root = tmp_path_factory.mktemp("bank")
    with PrefixBank.open(root, chunk_tokens=4, durability="fast") as bank:
        model = FakeModel(bank)
        for token_ids in stored:
            assert model.store(token_ids).n_tokens == len(token_ids)
        assert model.resolve(prompt).n_tokens == max(common(token_ids, prompt) for token_ids in stored)
        assert bank.check(read_data=True).findings == ()
