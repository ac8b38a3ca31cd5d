"""Hold the rows of namespaces, and of what is known of models: digests and rates, to their rules."""

from __future__ import annotations

from dataclasses import replace

import sqlalchemy as sa

from prefixbank.bank import PrefixBank
from prefixbank.index import Index, namespace_rows, rates_rows, weights_rows
from prefixbank.values import Rates, WeightsFile
from tests.fakekv import FakeModel
from tests.unit.rows.records import NOW_S


def test_namespaces_are_told_apart_by_fingerprint_and_salt(bank: PrefixBank, index: Index, model: FakeModel) -> None:
    again, salted, other = FakeModel(bank), FakeModel(bank, salt=b"s"), FakeModel(bank, "other")
    assert again.namespace == model.namespace
    assert len({m.namespace.id for m in (model, salted, other)}) == 3
    assert len({m.namespace.root_key for m in (model, salted, other)}) == 3
    with index.reading() as tx:
        assert [usage.n_chunks for usage in namespace_rows.list_usage(tx)] == [0, 0, 0]
        assert namespace_rows.find(tx, "00" * 32, "") is None


def test_a_digest_is_recalled_for_exactly_the_state_it_was_made_of(index: Index) -> None:
    state = WeightsFile("/m/model.safetensors", 1, 2**63 - 1, 100, 5, 6)
    with index.writing() as tx:
        weights_rows.remember(tx, {state: "0f" * 32})
        weights_rows.remember(tx, {state: "ab" * 32})
        assert weights_rows.recall(tx, state) == "ab" * 32
        for name in ("path", "device", "inode", "n_bytes", "mtime_ns", "ctime_ns"):
            value = "/other" if name == "path" else 77
            assert weights_rows.recall(tx, replace(state, **{name: value})) is None
        newer = replace(state, ctime_ns=7)
        weights_rows.remember(tx, {newer: "de" * 32})
        assert weights_rows.recall(tx, state) is None  # one state of a path is kept
        assert tx.execute(sa.text("SELECT count(*) FROM weights_digests")).scalar_one() == 1


def test_rates_come_back_as_they_were_measured_last(bank: PrefixBank, index: Index, model: FakeModel) -> None:
    other = FakeModel(bank, "other").namespace
    measured = Rates(model.namespace.id, "cpu", 0.25, 1e-3, None, None, NOW_S)
    on_gpu = replace(measured, device="Apple M3 Max gpu", compute_s=None, compute_s_per_token=None)
    of_other = Rates(other.id, "cpu", 1.5, 2e-3, 1e-4, 3e-10, NOW_S)
    with index.writing() as tx:
        for each in (measured, on_gpu, of_other):
            rates_rows.remember(tx, each)
        assert rates_rows.find(tx, model.namespace.id, "cpu") == measured
        assert rates_rows.find(tx, model.namespace.id, "cuda") is None
        later = replace(measured, load_s=1e-4, load_s_per_byte=2e-10, compute_s=0.125, updated_at=NOW_S + 1)
        rates_rows.remember(tx, later)
        assert rates_rows.list_all(tx) == [on_gpu, later, of_other]


def test_rates_go_with_their_namespace_and_are_not_kept_without_it(index: Index, model: FakeModel) -> None:
    measured = Rates(model.namespace.id, "cpu", 0.25, 1e-3, 1e-4, 2e-10, NOW_S)
    with index.writing() as tx:
        rates_rows.remember(tx, measured)
        tx.exec_driver_sql("DELETE FROM namespaces")
        assert rates_rows.list_all(tx) == []
        rates_rows.remember(tx, measured)
        assert rates_rows.list_all(tx) == []
