"""Own the prompt caches of a server: what mlx-lm's `LRUPromptCache` does, with a bank behind it.

mlx-lm's generation thread alone calls what is here, and an error there ends the server; so nothing raises on the way to
an answer: what is wrong with the bank becomes a miss and one `BankWarning`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from prefixbank import computing
from prefixbank.chunking import TOKEN_BYTES, pack_token_ids
from prefixbank.errors import PromptError
from prefixbank.kvcache.capture import held_arrays, n_cached_tokens
from prefixbank.promptcaches import REASON_COMPUTED, PromptCaches, Resolved, owner_of
from prefixbank.prompts import EncodedPrompt
from prefixbank.session import BankSession
from prefixbank.values import Match

__all__ = ["BankedPromptCache", "ModelKey"]

ModelKey = tuple[str, str | None, str | None]
"""What mlx-lm knows a loaded model by: model, adapter and draft model, as paths or hub ids."""

_UNDER_WAY_KEPT = 256


class _PlainPromptCache(LRUPromptCache):  # type: ignore[misc]
    """Keep in memory what the bank can't take: caches of a model with its draft, of prompts with images, of unknown
    classes.

    Unlike mlx-lm's own it always leaves tokens to compute, and knows a cache by the tokens that it has seen: behind
    speculative decoding these are fewer than were given out.
    """

    def fetch(self, key: ModelKey, tokens: list[int], n_left: int) -> tuple[list[Any] | None, list[int]]:
        """Return the nearest cache and the tokens that it lacks, at least `n_left`; None and all of them without."""
        prompt_cache, rest = self.fetch_nearest_cache(key, tokens)
        n_surplus = n_left - len(rest)
        if prompt_cache is None or n_surplus <= 0:
            return prompt_cache, rest
        if n_left >= len(tokens) or not can_trim_prompt_cache(prompt_cache):
            return None, tokens
        trim_prompt_cache(prompt_cache, n_surplus)
        return prompt_cache, tokens[-n_left:]

    def keep(self, key: ModelKey, tokens: list[int], prompt_cache: list[Any], cache_type: str) -> None:
        """Keep a cache for as many tokens as all its layers have seen, unless that is in doubt."""
        offsets = [layer.offset for layer in prompt_cache if isinstance(getattr(layer, "offset", None), int)]
        n_tokens = min([len(tokens), *offsets])
        if not n_tokens:
            return
        if any(offset != n_tokens for offset in offsets):
            if len(offsets) < len(prompt_cache) or not can_trim_prompt_cache(prompt_cache):
                return
            for layer in prompt_cache:
                layer.trim(layer.offset - n_tokens)
        self.insert_cache(key, tokens[:n_tokens], prompt_cache, cache_type=cache_type)


class BankedPromptCache:
    """Stand in for mlx-lm's `LRUPromptCache`, with a bank's files and memory tier behind it."""

    def __init__(
        self, session: BankSession, caches_of: Callable[[ModelKey], PromptCaches | None], max_sequences: int
    ) -> None:
        """Work for the models of `caches_of`; `max_sequences` bounds what the bank can't take."""
        self.hold_back = 0
        """How many of a prompt's last tokens are to be left uncached."""
        self._session = session
        self._caches_of = caches_of
        self._plain = _PlainPromptCache(max_sequences)
        self._served: weakref.ref[PromptCaches] | None = None
        self._under_way: OrderedDict[bytes, Resolved] = OrderedDict()
        """What the prompts that are being answered were resumed from, without the caches, by packed token ids."""

    # --- what mlx-lm calls

    def fetch_nearest_cache(self, model: ModelKey, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Return the longest stored prefix as a prompt cache, and the rest, never empty; None and `tokens` without."""
        try:
            found = self._in_bank(model, tokens)
            if found is None:
                return self._plain.fetch(model, tokens, max(self.hold_back, 1))
            return self._resume(*found, tokens)
        except Exception as exc:
            self._warn("fetch", exc)
            return None, tokens

    def insert_cache(
        self, model: ModelKey, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep a prompt cache of these tokens in memory, and store what later prompts may share.

        `cache_type` is `"system"` or `"user"` for a prompt that is computed up to there, `"assistant"` for a whole
        prompt with its answer.
        """
        try:
            found = self._in_bank(model, tokens)
            if found is None:
                self._plain.keep(model, tokens, prompt_cache, cache_type)
            else:
                self._keep(*found, prompt_cache, cache_type)
        except Exception as exc:
            self._warn("insert", exc)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Drop from memory what is above so many sequences (of those that the bank can't take) or bytes."""
        self._plain.trim_to(n_sequences=n_sequences, n_bytes=n_bytes)
        if n_bytes is not None:
            self._session.memory.trim_to(max(n_bytes - self._plain.nbytes, 0))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all that is kept in memory."""
        return self._session.memory.n_bytes + int(self._plain.nbytes)

    def __len__(self) -> int:
        return len(self._session.memory) + len(self._plain)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return what is kept in memory, by who keeps it."""
        memory = self._session.memory
        return {
            "bank": {"n_sequences": len(memory), "n_bytes": memory.n_bytes},
            "beside the bank": {"n_sequences": len(self._plain), "n_bytes": int(self._plain.nbytes)},
        }

    # --- how

    def _in_bank(self, key: ModelKey, tokens: list[int]) -> tuple[PromptCaches, bytes] | None:
        """Return whose tokens these are, and the tokens packed; None for what the bank can't take."""
        caches = self._caches_of(key)
        if caches is None:
            return None
        if self._served is None or self._served() is not caches:  # mlx-lm ends all answers before it loads a model
            self._under_way.clear()
            self._served = weakref.ref(caches)
        try:
            return caches, pack_token_ids(tokens)
        except PromptError:  # an image's tokens are negative
            return None

    def _resume(self, caches: PromptCaches, token_ids: bytes, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        resolved = caches.resolve(EncodedPrompt(token_ids), reserve=0, hold_back=self.hold_back)
        self._under_way[token_ids] = replace(resolved, prompt_cache=[], rest=[])
        self._under_way.move_to_end(token_ids)
        if len(self._under_way) > _UNDER_WAY_KEPT:  # of requests that were given up nothing more is heard
            self._under_way.popitem(last=False)
        self._session.count(cached_tokens=resolved.cached_tokens, computed_tokens=len(resolved.rest))
        return (resolved.prompt_cache, resolved.rest) if resolved.cached_tokens else (None, tokens)

    def _keep(self, caches: PromptCaches, token_ids: bytes, prompt_cache: list[Any], cache_type: str) -> None:
        n_tokens = len(token_ids) // TOKEN_BYTES
        n_held = n_cached_tokens(prompt_cache)
        if n_held is not None and n_held != n_tokens:
            raise PromptError(f"mlx-lm gave a cache of {n_held} tokens for {n_tokens}")
        mx.eval(held_arrays(prompt_cache))  # other threads read them
        begun = self._take_begun(token_ids) if cache_type == "assistant" else self._find_begun(token_ids)
        if begun is None:
            return
        resolved = replace(begun, prompt_cache=prompt_cache)
        found = resolved.match
        n_wanted = n_tokens if cache_type == "system" else self._n_shareable(found, n_tokens)
        n_there = found.n_stored_tokens
        if found.reason == REASON_COMPUTED:  # what is not worth a look is not worth a shard
            n_there = found.n_known_tokens or found.n_prompt_tokens
        if n_there < n_wanted:
            recorder = computing.recorder_for(caches, resolved)
            wanted = token_ids[: n_wanted * TOKEN_BYTES]
            computing.store_behind(caches, wanted, resolved, n_tokens, recorder)
        if not caches.is_of_these_weights(resolved):
            return
        self._forget_beginning(caches, token_ids)
        chunks = tuple(chunk for chunk in found.chunks if chunk.end <= min(found.n_tokens, n_tokens))
        caches.keep_copy(token_ids, prompt_cache, chunks)

    def _find_begun(self, token_ids: bytes) -> Resolved | None:
        """Return what a prompt that begins with these token ids was resumed from."""
        return next((begun for ids, begun in self._under_way.items() if ids.startswith(token_ids)), None)

    def _take_begun(self, token_ids: bytes) -> Resolved | None:
        """Return what the prompt was resumed from whose answer ends these token ids; it is no longer under way."""
        prompts = [ids for ids in self._under_way if token_ids.startswith(ids)]
        return self._under_way.pop(max(prompts, key=len)) if prompts else None

    def _n_shareable(self, found: Match, n_held: int) -> int:
        """Return how many of a prompt's tokens to store: full chunks, or up to where it was seen to part from another.

        What is left out is what this prompt alone has, or less than a quarter of a chunk. `n_held` are computed.
        """
        chunk_tokens = self._session.chunk_tokens
        n_prompt = min(found.n_prompt_tokens, n_held)
        n_full = n_prompt - n_prompt % chunk_tokens
        if found.parted and found.n_tokens - max(n_full, found.n_stored_tokens) >= chunk_tokens // 4:
            return found.n_tokens
        return n_full

    def _forget_beginning(self, caches: PromptCaches, token_ids: bytes) -> None:
        """Drop the kept prefix that is the beginning of what will be kept, if that can stand in for it."""
        memory = self._session.memory
        n_tokens = len(token_ids) // TOKEN_BYTES
        found = memory.find(owner_of(caches.identity.known[0]), token_ids, n_tokens - 1)
        if found is not None and found[0].can_be_cut and found[0].n_tokens == found[1]:
            memory.take(found[0])

    def _warn(self, action: str, error: Exception) -> None:
        self._session.warn(
            f"{action} {type(error).__name__}",
            f"the bank could not be used ({action}): {type(error).__name__}: {error}; the request goes on without it",
        )
