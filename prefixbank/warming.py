"""Own storing a prefix ahead of its use, under a name: planning it, doing it, and what becomes of an old version."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from prefixbank import computing
from prefixbank.chunking import TOKEN_BYTES, common_run, unpack_token_ids
from prefixbank.errors import BankReadOnlyError, ConfigError, PromptError
from prefixbank.fewshot import Boundaries, FewShotPrompt
from prefixbank.layout import CacheLayout
from prefixbank.promptcaches import Progress, PromptCaches
from prefixbank.prompts import Prompt, PromptEncoder
from prefixbank.session import require_prefix_name
from prefixbank.storing import Stored
from prefixbank.values import ChunkKey, Match, Namespace, PrefixRecord
from prefixbank.variables import old_version_name

__all__ = ["OldVersion", "Replaced", "WarmPlan", "Warmed", "plan", "warm"]

OldVersion = Literal["leave", "keep", "drop"]
"""What becomes of the version of a few-shot prompt that had the name: its chunks stay, without a name, until they are
evicted; it is kept under a name of its own; or what nothing else needs of it is deleted."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Say what became of the version that had the name, or is to become of it.

    `kept_as` is its name now, `freed_bytes` is what dropping it freed on disk.
    """

    source_digest: str
    kept_as: str | None = None
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Warmed:
    """Say what `warm` did: `stored_tokens` of the prefix's `n_tokens` are in the bank now.

    They are fewer only where the budget refused the store (a `BankWarning` said so); then a version that had the name
    keeps it. `seconds` is how long it took, `replaced` what became of an old version (None: there was none).
    """

    name: str | None
    n_tokens: int
    stored_tokens: int
    cached_tokens: int
    computed_tokens: int
    written_bytes: int
    seconds: float = 0.0
    replaced: Replaced | None = None


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """Say what `warm` would do. Nothing was computed or changed.

    `written_bytes` are the bytes of the shards to write. `compute_s` and `load_s` are how long computing and loading
    would take, as measured earlier; None where too little was measured. `replaces` is what would become of an old
    version (None: there is none). (The last three are for plans that come after this one: the packed token ids, the
    token offsets at which states are taken, and the chunks that these plans write.)
    """

    name: str | None
    n_tokens: int
    cached_tokens: int
    computed_tokens: int
    written_bytes: int
    compute_s: float | None
    load_s: float | None
    replaces: Replaced | None = None
    token_ids: bytes = field(default=b"", repr=False)
    ends: tuple[int, ...] = field(default=(), repr=False)
    chunk_keys: frozenset[ChunkKey] = field(default=frozenset(), repr=False)

    @property
    def seconds(self) -> float | None:
        """Return how long it would take, as far as that is known; None where the speed of computing is not."""
        return None if self.compute_s is None else self.compute_s + (self.load_s or 0.0)


@dataclass(frozen=True, slots=True)
class _Todo:
    """Hold what is to be warmed and what is there of it.

    `whole` is the match of the prefix; `found` is what is gone on from, less where states are missing. States are
    wanted at the token offsets `where`. `old` is another version that has the name now, `keep_as` its next name.
    """

    name: str | None
    source_digest: str
    packed: bytes
    namespace: Namespace
    layout: CacheLayout
    whole: Match
    found: Match
    where: frozenset[int]
    old: PrefixRecord | None
    keep_as: str | None

    @property
    def n_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class _ToBeHeld:
    """Tell what a prompt cache will hold once it is computed on from what was loaded; for a plan.

    Rows that windows have dropped by then are those of chunks that are stored.
    """

    ends: tuple[int, ...]

    def has_rows(self, start: int, n_tokens: int) -> bool:
        return True

    def state_ends(self) -> list[int]:
        return list(self.ends)


def plan(
    caches: PromptCaches,
    encoder: PromptEncoder,
    prompt: Prompt | FewShotPrompt,
    *,
    name: str | None,
    hold_back: int,
    boundaries: Boundaries | None,
    old: OldVersion,
    after: Sequence[WarmPlan],
) -> WarmPlan:
    """Say what `warm` would do; see `BankedModel.plan_warm`."""
    session = caches.session
    todo = _prepare(caches, encoder, prompt, name, hold_back, boundaries, old)
    n_tokens = todo.n_tokens
    found = _found_after(todo, after)
    n_cached = found.n_tokens if found.loading_pays or found.n_tokens == n_tokens else 0
    n_computed = n_tokens - n_cached
    ends: tuple[int, ...] = (n_tokens,)
    shards: dict[ChunkKey, int] = {}
    if n_computed:
        every = caches.state_every_chunks * session.chunk_tokens
        wanted = todo.where | caches.parting(found) | set(range(every, n_tokens + 1, every) if every else ())
        ends = tuple(sorted(end for end in wanted if n_cached < end <= n_tokens))
        shards = session.plan_shards(todo.namespace, todo.packed, _ToBeHeld(ends))
    earlier = frozenset(key for planned in after for key in planned.chunk_keys)
    estimate = session.rates.whole_time(
        caches.identify()[0], n_computed, found.n_bytes if n_computed and n_cached else 0
    )
    replaces = None
    if todo.old is not None:
        still_needed = {record.key for record in found.chunks if record.end <= found.n_tokens}
        if todo.whole.n_tokens == n_tokens:
            still_needed |= {record.key for record in todo.whole.chunks}
        freed = session.plan_replaced(todo.old, still_needed).freed_bytes if old == "drop" else 0
        replaces = Replaced(todo.old.source_digest, todo.keep_as, freed)
    return WarmPlan(
        name=todo.name,
        n_tokens=n_tokens,
        cached_tokens=n_cached,
        computed_tokens=n_computed,
        written_bytes=sum(n_bytes for key, n_bytes in shards.items() if key not in earlier),
        compute_s=estimate.compute_s,
        load_s=estimate.load_s,
        replaces=replaces,
        token_ids=todo.packed,
        ends=ends,
        chunk_keys=earlier | shards.keys(),
    )


def _found_after(todo: _Todo, after: Sequence[WarmPlan]) -> Match:
    """Return what would be found of the prefix once other plans were carried out."""
    found = todo.found
    for planned in after:
        n_common = min(common_run(planned.token_ids, todo.packed), todo.n_tokens)
        reach = n_common
        if todo.layout.has_state:
            reach = max((end for end in planned.ends if end <= n_common), default=0)
        found = replace(found, n_known_tokens=max(found.n_known_tokens, n_common))
        if reach > found.n_tokens:
            found = replace(found, n_tokens=reach, n_bytes=todo.layout.data_bytes(reach), loading_pays=True)
    return found


def warm(
    caches: PromptCaches,
    encoder: PromptEncoder,
    prompt: Prompt | FewShotPrompt,
    *,
    name: str | None,
    pin: bool,
    progress: Progress | None,
    prefill_step_size: int | None,
    reserve: int,
    hold_back: int,
    boundaries: Boundaries | None,
    old: OldVersion,
) -> Warmed:
    """Store what all queries of some shots share, or a whole prompt; see `BankedModel.warm`."""
    started_at = time.perf_counter()
    todo = _prepare(caches, encoder, prompt, name, hold_back, boundaries, old)
    if pin and todo.name is None:
        raise ConfigError("a pin needs a name: give name=")
    found, n_tokens = todo.found, todo.n_tokens
    n_cached = found.n_tokens
    stored = Stored(todo.whole.n_tokens, todo.whole.chunks[-1].key if todo.whole.chunks else None)
    if caches.session.read_only and (n_cached < n_tokens or todo.name is not None):
        raise BankReadOnlyError(f"{caches.session.root} is opened read-only: nothing can be warmed")
    if n_cached < n_tokens:
        resolved = caches.load(todo.packed, found, max(reserve, 0), lend=True)
        found = resolved.match
        n_cached = found.n_tokens
        recorder = computing.recorder_for(caches, resolved)
        computing.compute(
            caches,
            resolved.prompt_cache,
            unpack_token_ids(todo.packed),
            n_cached,
            n_tokens,
            prefill_step_size,
            progress,
            recorder,
            todo.where | caches.parting(found),
        )
        stored = computing.store(caches, todo.packed, resolved.prompt_cache, n_tokens, recorder, resolved)
        caches.take_back(resolved, todo.packed)
    elif progress is not None:
        progress(n_tokens, n_tokens)
    caches.session.count(cached_tokens=n_cached, computed_tokens=n_tokens - n_cached)
    replaced = _give_name(caches, todo, stored, pin=pin, old=old)
    return Warmed(
        name=todo.name,
        n_tokens=n_tokens,
        stored_tokens=stored.n_tokens,
        cached_tokens=n_cached,
        computed_tokens=n_tokens - n_cached,
        written_bytes=stored.n_written_bytes,
        seconds=time.perf_counter() - started_at,
        replaced=replaced,
    )


def _prepare(
    caches: PromptCaches,
    encoder: PromptEncoder,
    prompt: Prompt | FewShotPrompt,
    name: str | None,
    hold_back: int,
    boundaries: Boundaries | None,
    old: OldVersion,
) -> _Todo:
    """Find out what is to be done. Raises `PromptError`, `ConfigError` before anything is computed."""
    if old not in get_args(OldVersion):
        raise ConfigError(f"old={old!r}: use {', '.join(get_args(OldVersion))}")
    if boundaries not in (None, *get_args(Boundaries)):
        raise ConfigError(f"boundaries={boundaries!r}: use {' or '.join(get_args(Boundaries))}")
    if isinstance(prompt, FewShotPrompt):
        packed = encoder.shared_token_ids(prompt)
        name, source_digest = name or prompt.name or None, prompt.source_digest
    else:
        packed, source_digest = encoder.encode(prompt).token_ids, ""
    if hold_back < 0:
        raise ConfigError(f"hold_back={hold_back} must not be negative")
    packed = packed[: max(len(packed) // TOKEN_BYTES - hold_back, 0) * TOKEN_BYTES]
    if not packed:
        raise PromptError("the prompts share no token, or all are held back: there is nothing to warm")
    n_tokens = len(packed) // TOKEN_BYTES
    namespace, layout = caches.for_length(n_tokens).identify()
    keep_as = None
    replaced = None
    if name is not None:
        require_prefix_name(name)
        replaced = _other_version(caches, namespace, name, source_digest)
        if replaced is not None and old == "keep" and replaced.chunk_key is not None:
            keep_as = old_version_name(name, replaced.source_digest)
            require_prefix_name(keep_as)
    found = whole = caches.find(packed, n_tokens)
    where = {n_tokens}
    if (
        isinstance(prompt, FewShotPrompt)
        and (boundaries or prompt.boundaries) == "examples"
        and caches.identify()[1].has_state
    ):
        where |= {end for end in encoder.example_ends(prompt) if end < n_tokens}
        missing = [end for end in where if caches.find(packed, end).n_tokens < end]
        if missing:  # also where the whole prefix is stored: go on from in front of the first one
            found = caches.find(packed, min(missing))
    return _Todo(name, source_digest, packed, namespace, layout, whole, found, frozenset(where), replaced, keep_as)


def _other_version(caches: PromptCaches, namespace: Namespace, name: str, source_digest: str) -> PrefixRecord | None:
    """Return what has the name now, if it was made of another few-shot prompt."""
    named = [prefix for prefix in caches.session.prefixes(name) if prefix.namespace_id == namespace.id]
    return next((prefix for prefix in named if prefix.source_digest not in ("", source_digest)), None)


def _give_name(caches: PromptCaches, todo: _Todo, stored: Stored, *, pin: bool, old: OldVersion) -> Replaced | None:
    """Name what was stored, and do with the old version what is wanted."""
    is_whole = stored.n_tokens == todo.n_tokens
    if todo.name is None or (todo.old is not None and todo.old.chunk_key is not None and not is_whole):
        return None  # an old version is better than none
    session = caches.session
    prefix = PrefixRecord(
        name=todo.name,
        namespace_id=todo.namespace.id,
        chunk_key=stored.last_key if is_whole else None,
        n_tokens=todo.n_tokens,
        pinned=pin,
        source_digest=todo.source_digest,
        created_at=int(time.time()),
    )
    kept = session.name_prefix(prefix, todo.old, todo.keep_as)
    if todo.old is None:
        return None
    freed_bytes = session.drop_replaced(todo.old).freed_bytes if old == "drop" else 0
    return Replaced(todo.old.source_digest, todo.keep_as if kept else None, freed_bytes)
