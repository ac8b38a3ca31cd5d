"""Store and read prefixes without a model: KV rows that follow from the token ids, so that a wrong row is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixbank import restoring
from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids, root_key, unpack_token_ids
from prefixbank.errors import ShardError, StorageError
from prefixbank.fingerprint import salt_digest
from prefixbank.layout import CacheLayout, LayerLayout, RowArray, StateArray
from prefixbank.storing import Stored
from prefixbank.values import ChunkRecord, Match, Namespace, PrefixRecord

Rows = npt.NDArray[np.uint8]

LAYOUT = CacheLayout(
    (
        LayerLayout("kv", (), (RowArray("keys", "F32", 2, 6), RowArray("values", "F16", 2, 4))),
        LayerLayout("kv", (("max_size", 16),), (RowArray("keys", "BF16", 1, 8), RowArray("values", "BF16", 3, 2))),
        LayerLayout("quantized", (), (RowArray("keys", "U32", 1, 2), RowArray("scales", "U8", 1, 3))),
    )
)
"""Three unlike layers: each dtype, different widths and head counts for keys and values."""

HYBRID = CacheLayout(
    (
        LayerLayout("arrays", (), (), (StateArray("0", "F32", (1, 64, 20)), StateArray("1", "BF16", (1, 2, 2, 3)))),
        LayerLayout("kv", (), (RowArray("keys", "F32", 2, 6), RowArray("values", "F16", 2, 4))),
        LayerLayout(
            "list",
            members=(
                LayerLayout("arrays", (), (), (StateArray("0", "U8", (1, 5)),)),
                LayerLayout("kv", (), (RowArray("keys", "BF16", 1, 8), RowArray("values", "BF16", 3, 2))),
                LayerLayout(
                    "list", members=(LayerLayout("none"), LayerLayout("kv", (), (RowArray("k", "U32", 1, 1),)))
                ),
            ),
        ),
        LayerLayout("none"),
    )
)
"""Recurrent layers beside rows, and caches made of others; one set of states takes more than a block on disk."""

STATES_ONLY = CacheLayout((LayerLayout("arrays", (), (), (StateArray("0", "F32", (1, 2, 3)),)),) * 2)
"""Recurrent layers alone."""


def prefix_states(token_ids: Sequence[int], flavour: bytes) -> list[bytes]:
    """Return, for each token, a hash of all token ids up to and with it; `flavour` makes another model's rows."""
    states: list[bytes] = []
    state = b""
    for token_id in token_ids:
        state = hashlib.blake2b(state + token_id.to_bytes(4, "little"), digest_size=16, key=flavour).digest()
        states.append(state)
    return states


class RowsOnly:
    """Be a source that knows all rows, and no states of recurrent layers."""

    def has_rows(self, start: int, n_tokens: int) -> bool:
        return True

    def state_ends(self) -> list[int]:
        return []

    def state_runs(self, end: int) -> Iterator[Rows]:
        raise AssertionError("states were asked for where there are none")


@dataclass
class FakeSource(RowsOnly):
    """Give out made-up rows as `kvcache.capture.CacheRecorder` gives real ones; count how often it is asked."""

    token_ids: Sequence[int]
    flavour: bytes = b"A"
    layout: CacheLayout = LAYOUT
    n_asked: int = 0
    ends: Sequence[int] = ()
    """Where states are known."""
    n_known: int | None = None
    """How many leading tokens' rows are known, if not all."""

    def has_rows(self, start: int, n_tokens: int) -> bool:
        return self.n_known is None or start + n_tokens <= self.n_known

    def state_ends(self) -> list[int]:
        return sorted(self.ends)

    def state_runs(self, end: int) -> Iterator[Rows]:
        assert end in self.ends, "states are asked for where there are none"
        yield np.frombuffer(self.states(end), np.uint8)

    def states(self, end: int) -> bytes:
        """Return the states after `end` tokens as they follow each other in a shard, known or not."""
        state = prefix_states(self.token_ids[:end], self.flavour)[-1]
        return b"".join(
            hashlib.shake_128(state + f"{path} {a.role} state".encode()).digest(a.n_bytes)
            for path, a in self.layout.state_arrays()
        )

    def runs(self, start: int, n_tokens: int) -> Iterator[Rows]:
        self.n_asked += 1
        states = prefix_states(self.token_ids, self.flavour)[start : start + n_tokens]
        assert len(states) == n_tokens, "more tokens are asked for than there are"
        for layer, row_array in self.layout.row_arrays():
            for head in range(row_array.n_heads):
                of_row = f"{layer} {row_array.role} {head}".encode()
                rows = [hashlib.shake_128(state + of_row).digest(row_array.row_bytes) for state in states]
                yield np.frombuffer(b"".join(rows), np.uint8).reshape(n_tokens, row_array.row_bytes)

    def joined(self, start: int, n_tokens: int, *, with_state: bool = False) -> bytes:
        """Return the rows, and the states behind them, as they follow each other in a shard."""
        rows = b"".join(run.tobytes() for run in self.runs(start, n_tokens))
        return rows + self.states(start + n_tokens) if with_state else rows


def empty_runs(layout: CacheLayout, n_tokens: int, *, with_state: bool = False) -> list[Rows]:
    """Return the buffers that a shard of `n_tokens` is read into."""
    shapes = [(n_tokens, a.row_bytes) for _, a in layout.row_arrays() for _ in range(a.n_heads)]
    if with_state:
        shapes += [(1, a.n_bytes) for _, a in layout.state_arrays()]
    return [np.full(shape, 0xAA, np.uint8) for shape in shapes]


def disk_usage(bank: PrefixBank) -> int:
    """Return what shards and quarantined files take on disk, in whole blocks of 4096 bytes, as `du` says."""
    files = [path for name in ("shards", "quarantine") for path in (bank.root / name).rglob("*") if path.is_file()]
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


class FakeModel:
    """Do to a bank what a model's `PromptCaches` does, with made-up rows and without MLX."""

    def __init__(
        self, bank: PrefixBank, label: str = "fake", *, salt: bytes = b"", layout: CacheLayout = LAYOUT
    ) -> None:
        self.bank = bank
        self.session: Any = bank._session
        self.layout = layout
        fingerprint = hashlib.sha256(label.encode()).hexdigest()
        self.namespace: Namespace = self.session.namespace(
            Namespace(
                id=0,
                root_key=root_key(fingerprint, salt),
                fingerprint=fingerprint,
                salt_digest=salt_digest(salt),
                label=label,
                layout=layout.to_json(),
                created_at=1,
            )
        )

    def source(self, token_ids: Sequence[int], flavour: bytes = b"A") -> FakeSource:
        return FakeSource(token_ids, flavour, self.layout)

    def store(self, token_ids: Sequence[int], flavour: bytes = b"A", *, ends: Sequence[int] = ()) -> Stored:
        """Store a prefix whole, with the states after each of `ends` tokens."""
        source = replace(self.source(token_ids, flavour), ends=ends)
        stored: Stored = self.session.store(self.namespace, pack_token_ids(token_ids), source)
        return stored

    def name(self, name: str, token_ids: Sequence[int], *, pin: bool = False, ends: Sequence[int] = ()) -> Stored:
        """Store a prefix and give it a name."""
        stored = self.store(token_ids, ends=ends)
        self.session.name_prefix(
            PrefixRecord(name, self.namespace.id, stored.last_key, stored.n_tokens, pin, "0" * 64, 1)
        )
        return stored

    def match(self, token_ids: Sequence[int], limit: int | None = None) -> Match:
        """Match a prompt; without a limit all its tokens may be taken."""
        found: Match = self.session.match(
            self.namespace, pack_token_ids(token_ids), len(token_ids) if limit is None else limit
        )
        return found

    def use(self, token_ids: Sequence[int]) -> Match:
        """Match a prompt and note the use, as a generation does."""
        found = self.match(token_ids)
        self.session.note_use(found)
        self.session.flush()
        return found

    def read(self, record: ChunkRecord) -> bytes:
        """Read a shard as the resolver does: straight into buffers."""
        runs = empty_runs(self.layout, record.n_tokens, with_state=record.has_state)
        self.session.shards.read_into(record, runs)
        return b"".join(run.tobytes() for run in runs)

    def resolve(self, token_ids: Sequence[int], flavours: Sequence[bytes] = (b"A",)) -> Match:
        """Match and read a prompt; heal what fails, as the session does.

        Asserts that each chunk read holds the rows (and states) of exactly these token ids, of one of the flavours.
        """
        found = self.match(token_ids)
        kept: list[ChunkRecord] = []
        whole = True
        for record in found.chunks:
            try:
                rows = self.read(record)
            except (ShardError, StorageError) as error:
                restoring.heal(self.session.index, self.session.shards, record, error)
                whole = False
                continue
            if whole:
                kept.append(record)
            stored_ids = [*token_ids[: record.start], *unpack_token_ids(record.token_ids)]
            allowed = {
                self.source(stored_ids, f).joined(record.start, record.n_tokens, with_state=record.has_state)
                for f in flavours
            }
            assert rows in allowed, f"wrong rows for tokens {record.start} to {record.end} of {list(token_ids)}"
        if whole:
            return found
        while self.layout.has_state and kept and not kept[-1].has_state:
            kept.pop()
        return replace(found, n_tokens=kept[-1].end if kept else 0, chunks=tuple(kept), reason="lost")

    def held(self, *prompts: Sequence[int]) -> list[int]:
        """Return how many tokens of each prompt are stored, and read them."""
        return [self.resolve(token_ids).n_tokens for token_ids in prompts]

    def path_of(self, record: ChunkRecord) -> Any:
        """Return where a chunk's shard lies."""
        return self.session.shards.path_of(record.file_name)
