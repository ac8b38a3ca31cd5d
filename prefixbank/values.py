"""Own the words that the modules exchange: small frozen values without behaviour of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NewType

__all__ = [
    "NO_SHARD",
    "ChunkKey",
    "ChunkRecord",
    "Match",
    "MatchReason",
    "Namespace",
    "PrefixRecord",
    "Rates",
    "WeightsFile",
]

ChunkKey = NewType("ChunkKey", bytes)
"""A 16-byte address of a prefix: it locates a chunk, it never proves one."""

MatchReason = str
"""Why a match is as long as it is: one of the REASON_* values of `resolver`."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Say whose KV it is: one model, adapter, cache layout and salt.

    `root_key` is the parent key of the first chunk. `layout` is the JSON of a `CacheLayout`.
    """

    id: int
    root_key: ChunkKey
    fingerprint: str
    salt_digest: str
    label: str
    layout: str
    created_at: int


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Describe one chunk: which token ids it holds, where its KV lies and what proves the file.

    The chunk covers the token offsets `[start, start + n_tokens)`; `token_ids` are those ids as little-endian uint32.
    `parent_key` is None for the first chunk of a prefix. `file_name` is None for a *hole*: the shard was lost, the row
    stays because other chunks stand on it. `n_bytes` is the file's length, `disk_bytes` what it takes on disk,
    `data_offset` where the tensors begin, `digest` the xxh3_128 of the whole file, `has_state` whether it also holds
    the states of recurrent layers at the chunk's end. `last_used` is a tick of the bank's
    counter, `last_used_at` and `created_at` are seconds since the epoch.
    """

    key: ChunkKey
    parent_key: ChunkKey | None
    namespace_id: int
    start: int
    n_tokens: int
    token_ids: bytes
    file_name: str | None
    data_offset: int
    n_bytes: int
    disk_bytes: int
    digest: bytes
    has_state: bool = False
    last_used: int = 0
    last_used_at: int = 0
    hits: int = 0
    created_at: int = 0

    @property
    def end(self) -> int:
        """Return the token offset just behind the chunk."""
        return self.start + self.n_tokens


NO_SHARD: dict[str, Any] = {
    "file_name": None,
    "data_offset": 0,
    "n_bytes": 0,
    "disk_bytes": 0,
    "digest": b"",
    "has_state": False,
}
"""What the record of a hole says of its shard, by field."""


@dataclass(frozen=True, slots=True)
class PrefixRecord:
    """Describe a named prefix: `n_tokens` token ids that end in (or inside) the chunk `chunk_key`.

    `chunk_key` is None once the prefix was evicted: the name stays, its KV must be warmed again.
    """

    name: str
    namespace_id: int
    chunk_key: ChunkKey | None
    n_tokens: int
    pinned: bool
    source_digest: str
    created_at: int

    def n_stored_tokens(self, chain: Sequence[ChunkRecord]) -> int:
        """Return how many of its tokens can be resumed; `chain` are its chunks from the root on, [] if evicted."""
        if not chain:
            return 0
        return next((record.start for record in chain if record.file_name is None), self.n_tokens)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """Identify one state of a weights file without reading it; the memo key of its content digest."""

    path: str
    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Say how fast a device computes and loads the prefixes of a namespace, as measured.

    A prefill of `n` tokens takes `compute_s + n * compute_s_per_token` seconds, a load of `n` bytes of shards
    `load_s + n * load_s_per_byte`; a pair that was not measured yet is None. `device` names the hardware, as in
    "cpu"; `updated_at` is in seconds since the epoch.
    """

    namespace_id: int
    device: str
    compute_s: float | None
    compute_s_per_token: float | None
    load_s: float | None
    load_s_per_byte: float | None
    updated_at: int


@dataclass(frozen=True, slots=True)
class Match:
    """Say how much of a prompt is stored. Holds no arrays and reads no shard.

    `n_tokens` leading token ids can be resumed; the last chunk of `chunks` may be used in part. `n_bytes` is the length
    of the shard files to read. At least one token of the prompt is always left to compute. `n_known_tokens` leading
    tokens are stored in all: more than `n_tokens` where recurrent layers can't be resumed that far. With `in_memory`
    the prefix is kept in memory, and the files of `chunks` hold `n_file_tokens` of it. `parted`: what is at hand goes
    on otherwise than the prompt, so it is at this place that prompts part.

    `load_s` and `compute_s` are how many seconds loading these tokens is estimated to take, and computing them; None
    where too little was measured. `loading_pays` says whether they will be loaded.
    """

    n_prompt_tokens: int
    n_tokens: int
    n_bytes: int
    reason: MatchReason
    chunks: tuple[ChunkRecord, ...] = field(default=(), repr=False)
    n_known_tokens: int = 0
    in_memory: bool = False
    n_file_tokens: int = 0
    parted: bool = False
    load_s: float | None = None
    compute_s: float | None = None
    loading_pays: bool = True

    @property
    def n_rest_tokens(self) -> int:
        """Return how many token ids are left to compute."""
        return self.n_prompt_tokens - self.n_tokens

    @property
    def n_stored_tokens(self) -> int:
        """Return how many of the matched tokens the bank's files hold."""
        return self.n_file_tokens if self.in_memory else self.n_tokens
