"""Hold matching behind chunks that an earlier match proved to the same result as a match of the whole prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixbank import chunking, resolver
from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids
from prefixbank.errors import ShardMissingError
from prefixbank.index import chunk_rows
from prefixbank.values import ChunkKey, ChunkRecord, Match
from tests.fakekv import HYBRID, FakeModel
from tests.unit.test_collisions import preimage

PROMPT = list(range(1, 23))  # five chunks of 4 and a tail of 2


def match(
    model: FakeModel, token_ids: Sequence[int], known: Sequence[ChunkRecord] = (), *, limit: int | None = None
) -> Match:
    return resolver.match(
        model.session.index,
        model.namespace,
        pack_token_ids(token_ids),
        4,
        len(token_ids) if limit is None else limit,
        known,
    )


def said(found: Match) -> tuple[Any, ...]:
    """Return what must not depend on what was known; notes of uses may be older."""
    files = [(record.key, record.file_name, record.n_bytes) for record in found.chunks]
    return found.n_prompt_tokens, found.n_tokens, found.n_bytes, found.reason, found.n_known_tokens, files


class Asked:
    """Record which keys are looked up, and how many chunks are hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[ChunkKey] = []
        self.n_hashed = 0
        self.n_queries = 0
        real_find, real_hash = chunk_rows.find_chain, chunking._hash128

        def find_chain(tx: Any, keys: Sequence[ChunkKey]) -> dict[ChunkKey, ChunkRecord]:
            self.keys += keys
            self.n_queries += 1
            return real_find(tx, keys)

        def hash128(data: bytes) -> bytes:
            self.n_hashed += 1
            return real_hash(data)

        monkeypatch.setattr(chunk_rows, "find_chain", find_chain)
        monkeypatch.setattr(chunking, "_hash128", hash128)


def test_only_the_last_known_chunk_and_those_behind_it_are_looked_up(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.store(PROMPT)
    whole = match(model, PROMPT)
    known = whole.chunks[:3]
    asked = Asked(monkeypatch)
    found = match(model, PROMPT, known)
    assert said(found) == said(whole)
    assert asked.keys == [record.key for record in whole.chunks[2:5]]
    # The fourth proves the row of the tail, which was not found by its key.
    assert (asked.n_hashed, asked.n_queries) == (4, 1)


def test_the_chunks_of_a_match_serve_the_next_prompt_as_they_are(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last chunk is a tail, or one that was used in part: that one is looked for again."""
    model.store(PROMPT)
    for known in (match(model, PROMPT).chunks, match(model, [*PROMPT[:19], 99]).chunks):
        with monkeypatch.context() as patch:
            asked = Asked(patch)
            found = match(model, [*PROMPT, 77], known)
        assert said(found) == said(match(model, [*PROMPT, 77]))
        assert found.n_tokens == 22
        assert len(asked.keys) <= 2


def test_a_prompt_that_parts_from_what_is_known_is_matched_as_ever(model: FakeModel) -> None:
    model.store(PROMPT)
    model.store([*PROMPT[:6], 50, 51, 52])
    whole = match(model, PROMPT).chunks
    for n_common in range(23):
        for more in ([], [60], [50, 51, 52, 53, 54, 55]):
            prompt = [*PROMPT[:n_common], *more]
            expected = said(match(model, prompt))
            assert [said(match(model, prompt, whole[:n_known])) for n_known in (1, 3, 5, 6)] == [expected] * 4


def test_the_limit_is_held_inside_what_is_known(model: FakeModel) -> None:
    model.store(PROMPT)
    known = match(model, PROMPT).chunks
    for limit in range(23):
        found = match(model, PROMPT, known, limit=limit)
        assert found.n_tokens == limit
        assert said(found) == said(match(model, PROMPT, limit=limit))


def test_what_is_stored_behind_the_known_chunks_since_is_found(model: FakeModel) -> None:
    model.store(PROMPT[:12])
    known = match(model, PROMPT).chunks
    assert len(known) == 3
    model.store(PROMPT)
    found = match(model, PROMPT, known)
    assert (found.n_tokens, len(found.chunks)) == (22, 6)


def test_chunks_that_were_evicted_are_no_match(bank: PrefixBank, model: FakeModel) -> None:
    model.store(PROMPT)
    known = match(model, PROMPT).chunks
    bank.prune(max_bytes=2 * 4096)
    assert said(match(model, PROMPT, known)) == said(match(model, PROMPT))
    assert match(model, PROMPT, known).n_tokens == 8
    bank.prune(max_bytes=0)
    assert match(model, PROMPT, known).n_tokens == 0


def test_a_chain_that_was_evicted_and_stored_again_is_read_from_its_new_files(
    bank: PrefixBank, model: FakeModel
) -> None:
    model.store(PROMPT)
    known = match(model, PROMPT).chunks
    bank.prune(max_bytes=0)
    model.store(PROMPT)
    found = match(model, PROMPT, known)
    assert said(found) == said(match(model, PROMPT))
    assert not {record.file_name for record in found.chunks} & {record.file_name for record in known}


def test_the_last_known_chunk_as_a_hole_ends_the_match(model: FakeModel) -> None:
    model.store(PROMPT)
    known = match(model, PROMPT).chunks
    with model.session.index.writing() as tx:
        assert chunk_rows.heal(tx, known[4])
    found = match(model, PROMPT, known)
    assert (found.n_tokens, found.reason) == (16, resolver.REASON_LOST)
    assert said(found) == said(match(model, PROMPT))
    model.store(PROMPT)
    assert said(match(model, PROMPT, known)) == said(match(model, PROMPT))


def test_a_hole_among_the_known_chunks_is_a_miss_that_loading_notices(bank: PrefixBank, model: FakeModel) -> None:
    model.store(PROMPT)
    known = match(model, PROMPT).chunks
    lost = known[1]
    with model.session.index.writing() as tx:
        assert chunk_rows.heal(tx, lost)
    model.path_of(lost).unlink()
    found = match(model, PROMPT, known)
    assert found.chunks[1] == lost
    with pytest.raises(ShardMissingError):
        model.read(found.chunks[1])
    assert match(model, PROMPT).n_tokens == 4


def test_another_namespaces_chunks_are_not_known(bank: PrefixBank, model: FakeModel) -> None:
    other = FakeModel(bank, "other")
    other.store(PROMPT, b"B")
    known = match(other, PROMPT).chunks
    assert match(model, PROMPT, known).n_tokens == 0
    model.store(PROMPT[:9])
    found = match(model, PROMPT, known)
    assert said(found) == said(match(model, PROMPT))
    assert {record.namespace_id for record in found.chunks} == {model.namespace.id}


def test_chunks_that_do_not_begin_at_the_root_are_not_known(model: FakeModel) -> None:
    model.store(PROMPT)
    model.store([*PROMPT[:4], *PROMPT[:4], 9])
    whole = match(model, PROMPT)
    behind = match(model, [*PROMPT[:4], *PROMPT[:4]]).chunks[1]  # holds the first token ids, behind others
    for known in (whole.chunks[1:], (behind,), (behind, *whole.chunks[1:]), whole.chunks[::-1]):
        assert said(match(model, PROMPT, known)) == said(whole)


def test_a_hole_is_not_known(model: FakeModel) -> None:
    model.store(PROMPT)
    whole = match(model, PROMPT)
    holes = [replace(record, file_name=None) for record in whole.chunks]
    assert said(match(model, PROMPT, holes)) == said(whole)
    assert said(match(model, PROMPT, [*whole.chunks[:2], *holes[2:]])) == said(whole)
    assert said(match(model, PROMPT, [*whole.chunks[:2], holes[2], *whole.chunks[3:]])) == said(whole)


def test_models_with_states_are_matched_from_the_root_on(bank: PrefixBank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that gets states gives way to another file; and the last place with states may lie anywhere."""
    hybrid = FakeModel(bank, "hybrid", layout=HYBRID)
    hybrid.store(PROMPT, ends=[8, 20])
    known = match(hybrid, PROMPT).chunks
    assert known[-1].end == 20
    hybrid.store(PROMPT, ends=[4, 8, 12, 18, 20])
    for prompt in (PROMPT, PROMPT[:19], PROMPT[:7], [*PROMPT[:13], 99]):
        assert said(match(hybrid, prompt, known)) == said(match(hybrid, prompt))
    asked = Asked(monkeypatch)
    match(hybrid, PROMPT, known)
    assert len(asked.keys) == 5


@pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")
@pytest.mark.parametrize("n_shared", [0, 4, 8])
def test_a_chain_of_the_same_keys_and_other_token_ids_is_no_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_shared: int
) -> None:
    """The chain was evicted and one with colliding keys stored: its last chunks hold the very token ids and keys.

    Only the names of their files tell that they stand on others now.
    """
    monkeypatch.setattr(chunking, "_hash128", preimage)
    with PrefixBank.open(tmp_path / "bank", chunk_tokens=4) as bank:
        model = FakeModel(bank)
        between = [2] * n_shared
        mine = [1, 2, 3, 4, *between]
        theirs = [9, 10, 11, 12, *between]
        model.store(mine)
        known = match(model, mine).chunks
        assert len(known) == 1 + n_shared // 4
        bank.prune(max_bytes=0)
        model.store(theirs)
        rows = match(model, theirs).chunks
        assert [record.key for record in rows] == [record.key for record in known]
        assert match(model, [*mine, 5], known).n_tokens == 0
        assert match(model, [*theirs, 5], known).n_tokens == len(theirs)


def test_what_is_known_changes_no_match(bank: PrefixBank, model: FakeModel) -> None:
    """Stores, evictions, lost last chunks: after each, all that was ever matched may serve as known."""
    choose = random.Random(1)
    remembered: list[Sequence[ChunkRecord]] = [()]
    n_taken_over = 0
    for _ in range(300):
        prompt = [int(choose.random() < 0.1) for _ in range(choose.randrange(1, 26))]
        deed = choose.randrange(6)
        chunks = match(model, prompt).chunks
        if deed < 3:
            model.store(prompt)
        elif deed == 3:
            bank.prune(max_bytes=choose.randrange(40) * 4096)
        elif deed == 4 and chunks:
            lose(model, chunks[-1])
        limit = choose.randrange(len(prompt) + 1)
        whole = match(model, prompt, limit=limit)
        for known in remembered[-8:]:
            found = match(model, prompt, known, limit=limit)
            assert said(found) == said(whole)
            n_taken_over += sum(record is before for record, before in zip(found.chunks, known, strict=False))
        remembered.append(match(model, prompt, choose.choice(remembered)).chunks)
    assert n_taken_over > 100


def lose(model: FakeModel, record: ChunkRecord) -> None:
    """Lose the shard of a chunk that no other stands on, and heal its row."""
    with model.session.index.writing() as tx:
        if chunk_rows.delete(tx, record):
            model.path_of(record).unlink()
