"""Take shards away from readers: a missing file is a miss that heals, an open one stays readable to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixbank import restoring, runs
from prefixbank.bank import PrefixBank
from prefixbank.errors import ShardCorruptError, ShardMissingError
from tests.fakekv import FakeModel, empty_runs

PROMPT = list(range(10))


def test_a_shard_unlinked_between_match_and_read_is_a_miss_that_heals(bank: PrefixBank, model: FakeModel) -> None:
    model.store(PROMPT)
    lost = model.match(PROMPT).chunks[1]
    model.path_of(lost).unlink()
    with pytest.raises(ShardMissingError) as raised:
        model.read(lost)
    assert restoring.heal(model.session.index, model.session.shards, lost, raised.value)
    assert model.held(PROMPT) == [4]
    assert not restoring.heal(model.session.index, model.session.shards, lost, raised.value), "it was healed twice"
    model.store(PROMPT)
    assert model.held(PROMPT) == [10]


def test_a_reader_that_lost_a_race_with_prune_does_not_harm_what_was_stored_since(
    bank: PrefixBank, model: FakeModel
) -> None:
    model.store(PROMPT)
    found = model.match(PROMPT)
    bank.prune(max_bytes=0)
    model.store(PROMPT, b"B")
    for record in found.chunks:
        with pytest.raises(ShardMissingError) as raised:
            model.read(record)
        assert not restoring.heal(model.session.index, model.session.shards, record, raised.value)
    assert model.resolve(PROMPT, [b"B"]).n_tokens == 10


@pytest.mark.parametrize("after_n_reads", [0, 1])
def test_a_reader_that_has_the_file_open_while_it_is_unlinked_reads_the_right_bytes(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch, after_n_reads: int
) -> None:
    model.store(PROMPT)
    record = model.match(PROMPT).chunks[0]
    path = model.path_of(record)
    pread: Callable[..., int] = runs._pread
    n_reads = 0

    def in_small_steps(descriptor: int, views: Any, offset: int) -> int:
        nonlocal n_reads
        if n_reads == after_n_reads:
            bank.prune(max_bytes=0)
            assert not path.exists()
            model.store([9, 9, 9, 9, 9])  # which may get the blocks of the file, were they free
        n_reads += 1
        return pread(descriptor, [views[0][:64]], offset)

    monkeypatch.setattr(runs, "_pread", in_small_steps)
    assert model.read(record) == model.source(PROMPT).joined(0, 4)
    assert n_reads > after_n_reads + 1


def test_a_shard_cut_short_while_it_is_read_is_corrupt_and_not_a_hit(
    bank: PrefixBank, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.store(PROMPT)
    record = model.match(PROMPT).chunks[0]
    path: Path = model.path_of(record)
    pread: Callable[..., int] = runs._pread

    def cutting(descriptor: int, views: Any, offset: int) -> int:
        with path.open("r+b") as file:
            file.truncate(record.n_bytes - 1)
        return pread(descriptor, views, offset)

    monkeypatch.setattr(runs, "_pread", cutting)
    with pytest.raises(ShardCorruptError) as raised:
        bank._session.shards.read_into(record, empty_runs(model.layout, record.n_tokens))
    monkeypatch.undo()
    assert restoring.heal(model.session.index, model.session.shards, record, raised.value)
    assert not path.exists()
    assert model.held(PROMPT) == [0]


def test_a_check_that_a_prune_overtakes_finds_nothing_wrong(bank: PrefixBank, model: FakeModel) -> None:
    model.store(PROMPT)
    seen: list[int] = []

    def prune_once(done: int, _total: int) -> None:
        seen.append(done)
        if len(seen) == 1:
            bank.prune(max_bytes=0)

    assert not bank.check(read_data=True, progress=prune_once).findings
    assert len(seen) == 3
