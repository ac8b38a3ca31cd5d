"""Drive a bank through random lives and compare it with a plain model of what it must and may hold."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, initialize, invariant, multiple, rule

from prefixbank.bank import PrefixBank
from prefixbank.chunking import unpack_token_ids
from prefixbank.errors import UnknownPrefixError
from prefixbank.values import ChunkRecord
from tests.fakekv import FakeModel, disk_usage

Tokens = tuple[int, ...]

LONG = st.lists(st.integers(0, 1), min_size=9, max_size=16).map(tuple)
FRESH = st.lists(st.integers(0, 1), min_size=1, max_size=13).map(tuple)
STORED: Bundle[Tokens] = Bundle("stored")
ALIKE = st.builds(lambda known, n_kept, more: known[:n_kept] + more, STORED, st.integers(1, 13), FRESH)
TOKENS = FRESH | STORED | ALIKE
"""Token ids that nobody has seen, that were stored before, or that begin like those."""

NAMES = st.sampled_from(["one", "two", "three"])
LABELS = st.sampled_from(["left", "right"])
BLOCK = 4096

pytestmark = pytest.mark.filterwarnings("ignore::prefixbank.errors.BankWarning")  # of stores that the budget refuses


def common(left: Sequence[int], right: Sequence[int]) -> int:
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    return n


class BankMachine(RuleBasedStateMachine):
    """Two models share a bank with chunks of 4 tokens.

    `ever` holds all that was stored: no match may be longer than what it shares with that. `sure` holds what was
    acknowledged and nothing has taken away since: it must be found. `damaged` are shards that were spoilt and not
    read since, by file name, with the token ids up to their end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="prefixbank-machine-"))
        self.bank: PrefixBank | None = None
        self.budget: int | None = None
        self.ever: dict[str, set[Tokens]] = {"left": set(), "right": set()}
        self.sure: dict[str, set[Tokens]] = {"left": set(), "right": set()}
        self.named: dict[str, dict[str, Tokens]] = {}
        self.pinned: set[str] = set()
        self.damaged: dict[str, tuple[str, Tokens]] = {}

    @initialize(
        target=STORED,
        n_blocks=st.sampled_from([None, None, 6, 12]),
        first=st.lists(st.tuples(LABELS, LONG), min_size=2, max_size=6),
    )
    def open(self, n_blocks: int | None, first: list[tuple[str, Tokens]]) -> MultipleResults[Tokens]:
        self.budget = None if n_blocks is None else n_blocks * BLOCK
        self._open()
        for label, token_ids in first:
            self._put(label, token_ids)
        return multiple(*(token_ids for _, token_ids in first))

    def _open(self) -> None:
        self.bank = PrefixBank.open(
            self.folder, chunk_tokens=4, durability="fast", verify="always", max_bytes=self.budget
        )
        self.models = {label: FakeModel(self.bank, label) for label in ("left", "right")}

    # --- the plain model

    def _held_by(self, names: Iterable[str], label: str) -> set[Tokens]:
        """Return the prefixes that names hold; one whose KV was evicted once holds nothing until it is warmed again."""
        assert self.bank is not None
        namespace_id = self.models[label].namespace.id
        holding = {p.name for p in self.bank.prefixes() if p.namespace_id == namespace_id and p.chunk_key is not None}
        return {self.named[name][label] for name in holding.intersection(names)}

    def _only_pins_are_sure(self) -> None:
        """Whatever is not pinned may have been evicted."""
        for label, token_ids in self.sure.items():
            token_ids &= self._held_by(self.pinned, label)

    def _spoilt(self, label: str, token_ids: Tokens) -> bool:
        """Tell whether a chunk that holds some of these token ids is damaged; the bank can't know that yet."""
        return any(
            of_label == label and common(token_ids, path) > (len(path) - 1) // 4 * 4
            for of_label, path in self.damaged.values()
        )

    def _records(self) -> dict[bytes, ChunkRecord]:
        assert self.bank is not None
        return {record.key: record for record in self.bank.chunks()}

    def _forget_damage_that_was_found(self) -> None:
        names = {record.file_name for record in self._records().values()}
        self.damaged = {name: path for name, path in self.damaged.items() if name in names}

    # --- what users do

    @rule(target=STORED, label=LABELS, token_ids=TOKENS)
    def put(self, label: str, token_ids: Tokens) -> Tokens:
        self._put(label, token_ids)
        return token_ids

    def _put(self, label: str, token_ids: Tokens) -> bool:
        model = self.models[label]
        n_written = model.session.counts["stored_chunks"]
        stored = model.store(token_ids)
        if self.budget is not None and model.session.counts["stored_chunks"] > n_written:
            self._only_pins_are_sure()
        self._forget_damage_that_was_found()  # evicted, or superseded
        if stored.refused:
            assert self.budget is not None
            return False
        assert stored.n_tokens == len(token_ids)
        self.ever[label].add(token_ids)
        if not self._spoilt(label, token_ids):
            self.sure[label].add(token_ids)
            assert model.match(token_ids).n_tokens == len(token_ids)
        return True

    @rule(target=STORED, label=LABELS, token_ids=TOKENS, name=NAMES, pin=st.booleans())
    def warm(self, label: str, token_ids: Tokens, name: str, pin: bool) -> Tokens:
        if self._put(label, token_ids):
            self._name(label, token_ids, name, pin)
        return token_ids

    def _name(self, label: str, token_ids: Tokens, name: str, pin: bool) -> None:
        self.models[label].name(name, token_ids, pin=pin)
        self.named.setdefault(name, {})[label] = token_ids
        # A pin belongs to a name in a namespace; the machine pins names in all of them.
        if pin or name in self.pinned:
            assert self.bank is not None
            self.bank.pin(name)
            self.pinned.add(name)

    @rule(label=LABELS, token_ids=TOKENS)
    def resolve(self, label: str, token_ids: Tokens) -> None:
        self._resolve(label, token_ids)

    def _resolve(self, label: str, token_ids: Tokens) -> None:
        """Match and read; inside, the rows are compared: only those of exactly these token ids will do."""
        n_sure = max((common(known, token_ids) for known in self.sure[label]), default=0)
        n_ever = max((common(known, token_ids) for known in self.ever[label]), default=0)
        found = self.models[label].resolve(token_ids)
        assert n_sure <= found.n_tokens <= n_ever
        self._forget_damage_that_was_found()

    @rule(label=LABELS, token_ids=TOKENS)
    def use(self, label: str, token_ids: Tokens) -> None:
        self.models[label].use(token_ids)

    @rule(name=NAMES, pinned=st.booleans())
    def pin_or_unpin(self, name: str, pinned: bool) -> None:
        assert self.bank is not None
        try:
            (self.bank.pin if pinned else self.bank.unpin)(name)
        except UnknownPrefixError:
            assert name not in self.named
            return
        assert name in self.named
        (self.pinned.add if pinned else self.pinned.discard)(name)

    @rule(n_blocks=st.sampled_from([12, 9, 7, 5, 4, 3, 2, 1, 0]))
    def prune(self, n_blocks: int) -> None:
        assert self.bank is not None
        planned = self.bank.prune(max_bytes=n_blocks * BLOCK, dry_run=True)
        assert self.bank.prune(max_bytes=n_blocks * BLOCK) == planned
        if planned.chunks:
            self._only_pins_are_sure()
        assert disk_usage(self.bank) <= n_blocks * BLOCK or self.pinned
        self._forget_damage_that_was_found()

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        assert self.bank is not None
        try:
            self.bank.remove(name)
        except UnknownPrefixError:
            assert name not in self.named
            return
        named = self.named.pop(name)
        self.pinned.discard(name)
        for label, removed in named.items():
            still_named = self._held_by(self.named, label)
            # What begins like the removed prefix, or the other way round, may have ended in its chunks.
            self.sure[label] = {
                known
                for known in self.sure[label]
                if known in still_named or common(known, removed) < min(len(known), len(removed))
            }
        self._forget_damage_that_was_found()

    # --- what happens to it

    @rule(
        data=st.data(),
        how=st.sampled_from(["delete", "flip", "truncate"]),
        more=FRESH,
        then=st.sampled_from(["nothing", "resolve", "store again"]),
    )
    def damage(self, data: st.DataObject, how: str, more: Tokens, then: str) -> None:
        records = self._records()
        whole = {
            r.file_name: r for r in records.values() if r.file_name is not None and r.file_name not in self.damaged
        }
        if not whole:
            return
        record = data.draw(
            st.sampled_from(sorted(whole.values(), key=lambda record: (record.namespace_id, record.key)))
        )
        path: Tokens = ()
        step: ChunkRecord | None = record
        while step is not None:
            path = (*unpack_token_ids(step.token_ids), *path)
            step = records.get(step.parent_key) if step.parent_key else None
        (label,) = [label for label, model in self.models.items() if model.namespace.id == record.namespace_id]
        file = self.models[label].path_of(record)
        if how == "delete":
            file.unlink()
        elif how == "truncate":
            os.truncate(file, record.n_bytes // 2)
        else:
            content = bytearray(file.read_bytes())
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1
            file.write_bytes(content)
        assert record.file_name is not None
        self.damaged[record.file_name] = (label, path)
        self.sure[label] = {known for known in self.sure[label] if not self._spoilt(label, known)}
        if then != "nothing":
            self._resolve(label, path + more)
        if then == "store again":
            self._put(label, path + more)
            self._resolve(label, path + more)

    @rule()
    def reopen(self) -> None:
        assert self.bank is not None
        self.bank.close()
        self._open()
        if self.budget is not None:
            self._only_pins_are_sure()
        self._forget_damage_that_was_found()

    # --- what always holds

    @invariant()
    def a_check_finds_the_damage_and_nothing_else(self) -> None:
        if self.bank is not None:
            found = {finding.subject for finding in self.bank.check().problems}
            assert found <= self.damaged.keys()

    @invariant()
    def the_budget_is_held(self) -> None:
        if self.bank is not None and self.budget is not None:
            assert disk_usage(self.bank) <= self.budget

    @invariant()
    def no_file_is_left_behind(self) -> None:
        if self.bank is None:
            return
        named = {record.file_name for record in self._records().values()} - {None}
        there = {path.name for path in (self.folder / "shards").rglob("*.safetensors")}
        assert there <= named
        assert named - there <= self.damaged.keys()
        assert list((self.folder / "tmp").iterdir()) == []

    def teardown(self) -> None:
        if self.bank is not None:
            problems = self.bank.check(read_data=True).problems
            assert sorted(finding.subject for finding in problems) == sorted(self.damaged)
            for label, model in self.models.items():
                for token_ids in self.sure[label]:
                    assert model.resolve(token_ids).n_tokens == len(token_ids)
            self.bank.close()
        shutil.rmtree(self.folder)


TestBankMachine = BankMachine.TestCase
TestBankMachine.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
