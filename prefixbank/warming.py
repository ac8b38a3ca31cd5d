"""Own storing a prefix ahead of its use, under a name."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from prefixbank import computing
from prefixbank.chunking import TOKEN_BYTES, unpack_token_ids
from prefixbank.errors import BankReadOnlyError, ConfigError, PromptError
from prefixbank.fewshot import FewShotPrompt
from prefixbank.promptcaches import Progress, PromptCaches
from prefixbank.prompts import Prompt, PromptEncoder
from prefixbank.storing import Stored
from prefixbank.values import PrefixRecord

__all__ = ["Warmed", "warm"]


@dataclass(frozen=True, slots=True)
class Warmed:
    """Say what `warm` did: `stored_tokens` of the prefix's `n_tokens` are in the bank now.

    They are fewer only where the budget refused the store (a `BankWarning` said so).
    """

    name: str | None
    n_tokens: int
    stored_tokens: int
    cached_tokens: int
    computed_tokens: int
    written_bytes: int


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
    boundaries: Literal["end", "examples"],
) -> Warmed:
    """Store what all queries of some shots share, or a whole prompt; see `BankedModel.warm`."""
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
    if pin and name is None:
        raise ConfigError("a pin needs a name: give name=")
    n_tokens = len(packed) // TOKEN_BYTES
    namespace, _ = caches.for_length(n_tokens).identify()
    found = caches.find(packed, n_tokens)
    stored = Stored(found.n_tokens, found.chunks[-1].key if found.chunks else None)
    where = {n_tokens}
    if isinstance(prompt, FewShotPrompt) and boundaries == "examples" and caches.identify()[1].has_state:
        where |= {end for end in encoder.example_ends(prompt) if end < n_tokens}
        missing = [end for end in where if caches.find(packed, end).n_tokens < end]
        if missing:  # also where the whole prefix is stored: go on from in front of the first one
            found = caches.find(packed, min(missing))
    n_cached = found.n_tokens
    if caches.session.read_only and (n_cached < n_tokens or name is not None):
        raise BankReadOnlyError(f"{caches.session.root} is opened read-only: nothing can be warmed")
    if found.n_tokens < n_tokens:
        resolved = caches.load(packed, found, max(reserve, 0), lend=True)
        found = resolved.match
        n_cached = found.n_tokens
        token_ids = unpack_token_ids(packed)
        recorder = computing.recorder_for(caches, resolved)
        where |= caches.parting(found)
        computing.compute(
            caches,
            resolved.prompt_cache,
            token_ids,
            n_cached,
            n_tokens,
            prefill_step_size,
            progress,
            recorder,
            where,
        )
        stored = computing.store(caches, packed, resolved.prompt_cache, n_tokens, recorder, resolved)
        caches.take_back(resolved, packed)
    elif progress is not None:
        progress(n_tokens, n_tokens)
    caches.session.count(cached_tokens=n_cached, computed_tokens=n_tokens - n_cached)
    if name is not None:
        whole = stored.n_tokens == n_tokens
        caches.session.name_prefix(
            PrefixRecord(
                name=name,
                namespace_id=namespace.id,
                chunk_key=stored.last_key if whole else None,
                n_tokens=n_tokens,
                pinned=pin,
                source_digest=source_digest,
                created_at=int(time.time()),
            )
        )
    return Warmed(name, n_tokens, stored.n_tokens, n_cached, n_tokens - n_cached, stored.n_written_bytes)
