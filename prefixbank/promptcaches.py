"""Own one model's prompt caches: found, loaded, computed, stored and taken back.

On the way to a generation nothing that is wrong with the bank raises: it becomes a miss and one `BankWarning`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from prefixbank.chunking import TOKEN_BYTES, pack_token_ids, unpack_token_ids
from prefixbank.errors import ConfigError, PrefixBankError, UnsupportedCacheError
from prefixbank.identity import ModelIdentity
from prefixbank.kvcache.assemble import cut_to
from prefixbank.kvcache.capture import CapturedCache, n_cached_tokens
from prefixbank.kvcache.probe import KVQuantization, new_prompt_cache, quantize
from prefixbank.layout import CacheLayout
from prefixbank.prompts import EncodedPrompt
from prefixbank.session import BankSession
from prefixbank.storing import Stored
from prefixbank.values import Match, Namespace

__all__ = ["Lease", "PromptCaches", "Resolved"]

REASON_UNSUPPORTED = "unsupported"
REASON_UNAVAILABLE = "unavailable"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Resolved:
    """Hold a prompt cache with the token ids that it lacks.

    Pass `rest` (never empty) as the prompt and `prompt_cache` to `mlx_lm.generate`, `stream_generate` or
    `batch_generate`; the cache is changed by that. `computed_tokens` were computed on the way here.
    """

    prompt_cache: list[Any]
    rest: list[int]
    match: Match
    computed_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Return how many tokens came from the bank."""
        return self.match.n_tokens


Lease = Resolved
"""A `Resolved` that goes back when the block of `checkout` ends."""


class PromptCaches:
    """Find, load, compute and store the prompt caches of one model in one bank."""

    def __init__(
        self,
        session: BankSession,
        model: nn.Module,
        identity: ModelIdentity,
        quantization: KVQuantization,
        prefill_step_size: int,
    ) -> None:
        if prefill_step_size < 1:
            raise ConfigError(f"prefill_step_size={prefill_step_size} must be at least 1")
        self.session = session
        self.model = model
        self.identity = identity
        self.quantization = quantization
        self.prefill_step_size = prefill_step_size

    def introduce(self) -> None:
        """Identify the model now, so that what keeps it out of the bank is said when it is loaded.

        Raises `ConfigError` for options that do not fit the model.
        """
        try:
            self.identify()
        except ConfigError:
            raise
        except PrefixBankError as exc:
            self.warn_of(exc, "attach")

    def identify(self) -> tuple[Namespace, CacheLayout]:
        """Return whose KV the model's is now. Raises `UnsupportedCacheError` and the bank's errors."""
        return self.identity.identify(self.session)

    def match(self, encoded: EncodedPrompt, hold_back: int) -> Match:
        """Return how much of a prompt is stored, but for the last token and the last `hold_back` ones."""
        if hold_back < 0:
            raise ConfigError(f"hold_back={hold_back} must not be negative")
        n_tokens = len(encoded.token_ids) // TOKEN_BYTES
        limit = max(n_tokens - max(hold_back, 1), 0)
        self.session.count(matches=1)
        try:
            return self.session.match(self.identify()[0], encoded.token_ids, limit)
        except PrefixBankError as exc:
            self.warn_of(exc, "match")
            reason = REASON_UNSUPPORTED if isinstance(exc, UnsupportedCacheError) else REASON_UNAVAILABLE
            return Match(n_tokens, 0, 0, reason)

    def resolve(self, encoded: EncodedPrompt, *, reserve: int, hold_back: int = 0) -> Resolved:
        """Return the longest stored prefix of a prompt as a prompt cache, and the rest; see `BankedModel.resolve`."""
        found = self.match(encoded, hold_back)
        found, prompt_cache = self.load(found, max(reserve, 0))
        rest = unpack_token_ids(encoded.token_ids[found.n_tokens * TOKEN_BYTES :])
        return Resolved(prompt_cache, rest, found)

    def load(self, found: Match, reserve: int) -> tuple[Match, list[Any]]:
        """Return the prompt cache of a match, and the match as far as its shards were whole."""
        if found.n_tokens:
            try:
                loaded = self.session.load(found, self.identity.layout, reserve)
            except (PrefixBankError, RuntimeError) as exc:  # RuntimeError: MLX has no memory left
                self.warn_of(exc, "load")
                found = replace(found, n_tokens=0, n_bytes=0, reason=REASON_UNAVAILABLE, chunks=())
            else:
                found = loaded.match
                if found.n_tokens:
                    self.note_use(found)
                    return found, loaded.prompt_cache
        return found, new_prompt_cache(self.model)

    def compute(
        self,
        prompt_cache: list[Any],
        token_ids: list[int],
        start: int,
        end: int,
        prefill_step_size: int | None,
        progress: Progress | None,
    ) -> None:
        """Run the tokens `[start, end)` through the model in steps that end at chunk boundaries."""
        step = prefill_step_size or self.prefill_step_size
        if step < 1:
            raise ConfigError(f"prefill_step_size={step} must be at least 1")
        if progress is not None:
            progress(start, end)
        with wired_limit(self.model, [generation_stream]), mx.stream(generation_stream):
            while start < end:
                stop = min(start + step, end)
                aligned = stop - stop % self.session.chunk_tokens
                if stop < end and aligned > start:
                    stop = aligned
                self.model(mx.array(token_ids[start:stop])[None], cache=prompt_cache)
                quantize(prompt_cache, self.quantization)
                mx.eval([layer_cache.state for layer_cache in prompt_cache])
                mx.clear_cache()
                start = stop
                if progress is not None:
                    progress(start, end)

    def store(self, token_ids: bytes, prompt_cache: Sequence[Any]) -> Stored:
        """Store the KV of packed token ids from a live cache, of as many as it holds. Raises the bank's errors."""
        namespace, layout = self.identify()
        n_held = n_cached_tokens(prompt_cache)
        if n_held == 0:
            return Stored(0, None)
        token_ids = token_ids[: n_held * TOKEN_BYTES]
        return self.session.store(namespace, token_ids, CapturedCache(prompt_cache, layout))

    def try_store(self, token_ids: bytes, prompt_cache: Sequence[Any]) -> None:
        """Store on the way to a generation, where it is merely a pity if that fails."""
        if self.session.read_only or not token_ids:
            return
        try:
            self.store(token_ids, prompt_cache)
        except (PrefixBankError, RuntimeError) as exc:
            self.warn_of(exc, "store")

    def store_after_generation(
        self,
        encoded: EncodedPrompt,
        resolved: Resolved,
        answer: Sequence[int],
        *,
        keep: bool,
        hold_back: int,
    ) -> None:
        """Store what a generation should leave: the declared shots, else full chunks; with `keep`, everything."""
        n_prompt = len(encoded.token_ids) // TOKEN_BYTES
        token_ids = encoded.token_ids
        if keep:
            token_ids += pack_token_ids(answer)
        elif encoded.n_shared_tokens is not None:
            n_tokens = min(encoded.n_shared_tokens, n_prompt - hold_back)
            token_ids = token_ids[: max(n_tokens, 0) * TOKEN_BYTES]
        else:
            n_tokens = max(n_prompt - hold_back, 0)
            n_tokens -= n_tokens % self.session.chunk_tokens
            token_ids = token_ids[: n_tokens * TOKEN_BYTES]
        if len(token_ids) // TOKEN_BYTES > resolved.match.n_tokens:
            self.try_store(token_ids, resolved.prompt_cache)

    def what(self, encoded: EncodedPrompt, found: Match) -> tuple[str, str, bytes] | None:
        """Return what a prompt cache of the match is kept in memory under: whose it is, and its very token ids."""
        if not found.n_tokens:
            return None
        namespace, _ = self.identify()
        token_ids = encoded.token_ids[: found.n_tokens * TOKEN_BYTES]
        return namespace.fingerprint, namespace.salt_digest, token_ids

    def take_back(self, what: tuple[str, str, bytes], prompt_cache: list[Any], n_tokens: int) -> None:
        """Keep a lent cache, unless what was done to it leaves any doubt."""
        try:
            kept = cut_to(prompt_cache, self.identify()[1], n_tokens)
        except PrefixBankError:
            return
        self.session.memory.give(what, kept, sum(layer_cache.nbytes for layer_cache in kept))

    def note_use(self, found: Match) -> None:
        """Note for LRU that a match was used."""
        try:
            self.session.note_use(found)
        except PrefixBankError as exc:
            self.warn_of(exc, "note")

    def warn_of(self, error: Exception, action: str) -> None:
        """Say once what kept the bank from being used; count it each time."""
        if isinstance(error, UnsupportedCacheError):
            cause = str(error).split(" ", 1)[0]
            if action == "match":
                self.session.count_unsupported(cause)
            self.session.warn(f"unsupported {cause}", str(error))
            return
        self.session.warn(
            f"{action} {type(error).__name__}",
            f"the bank could not be used ({action}): {error}; generation goes on without it",
        )
