"""Own one model's prompt caches: found, loaded from disk or memory, lent and taken back.

On the way to a generation nothing that is wrong with the bank raises: it becomes a miss and one `BankWarning`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, ConcatenateKVCache, RotatingKVCache

from prefixbank.chunking import TOKEN_BYTES, unpack_token_ids
from prefixbank.errors import ConfigError, PrefixBankError, UnsupportedCacheError
from prefixbank.identity import ModelIdentity
from prefixbank.kvcache.assemble import cut_to
from prefixbank.kvcache.capture import held_arrays, held_bytes, n_cached_tokens
from prefixbank.kvcache.kinds import keeps_all_rows
from prefixbank.kvcache.probe import CacheOptions, new_prompt_cache
from prefixbank.kvcache.sharing import Sharing
from prefixbank.layout import CacheLayout
from prefixbank.memory import KeptPrefix, Owner
from prefixbank.prompts import EncodedPrompt
from prefixbank.rates import Estimate
from prefixbank.resolver import REASON_ALL, REASON_PARTIAL
from prefixbank.session import BankSession
from prefixbank.values import ChunkRecord, Match, Namespace

__all__ = ["Lease", "PromptCaches", "Resolved"]

REASON_COMPUTED = "computing-is-faster"
REASON_UNSUPPORTED = "unsupported"
REASON_UNAVAILABLE = "unavailable"

_NOT_TRIMMABLE = (ArraysCache, CacheList, ChunkedKVCache, ConcatenateKVCache, RotatingKVCache)
"""Caches that mlx-lm can't trim, or not rightly: windows have dropped rows that a trimmed cache needs again, and
`ConcatenateKVCache` keeps the rows that were trimmed. A list may hold such."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Resolved:
    """Hold a prompt cache with the token ids that it lacks.

    Pass `rest` (never empty) as the prompt and `prompt_cache` to `mlx_lm.generate`, `stream_generate` or
    `batch_generate`; the cache is changed by that. `computed_tokens` were computed on the way here. (The others are the
    bank's own: what a recorder must know of the cache, whose it is while it is lent, and which weights it is of.)
    """

    prompt_cache: list[Any]
    rest: list[int]
    match: Match
    computed_tokens: int = 0
    seed: Sequence[Any] = field(default=(), repr=False)
    lent_by: tuple[Namespace, CacheLayout] | None = field(default=None, repr=False)
    generation: int = field(default=0, repr=False)

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
        options: CacheOptions,
        prefill_step_size: int,
        state_every_chunks: int = 0,
        below: PromptCaches | None = None,
    ) -> None:
        """Work for one model; `below` for its prefixes that are too short to be quantised yet, if there are such."""
        if prefill_step_size < 1:
            raise ConfigError(f"prefill_step_size={prefill_step_size} must be at least 1")
        if state_every_chunks < 0:
            raise ConfigError(f"state_every_chunks={state_every_chunks} must not be negative")
        self._below = below
        self.session = session
        self.model = model
        self.identity = identity
        self.options = options
        self.state_every_chunks = state_every_chunks
        self.prefill_step_size = prefill_step_size

    @property
    def quantises_later(self) -> bool:
        """Tell whether caches are quantised once they are long enough."""
        return self._below is not None

    def can_run_ahead(self) -> bool:
        """Tell whether mlx-lm can trim the model's caches, so that a draft model may run ahead."""
        if self.options.kv_bits is not None:
            return False  # mlx-lm quantises copies of the list there: what it made could not be stored
        return not any(
            isinstance(layer_cache, _NOT_TRIMMABLE) for layer_cache in new_prompt_cache(self.model, self.options)
        )

    @cached_property
    def sharing(self) -> Sharing:
        """Return what makes caches of the model that share rows; the first time it tries that out."""
        return Sharing(self.model, self.options)

    def introduce(self) -> None:
        """Identify the model now, so that what keeps it out of the bank is said when it is loaded.

        Raises `ConfigError` for options that do not fit the model.
        """
        try:
            _, layout = self.identify()
            if self._below is not None:
                if not keeps_all_rows(layout):
                    raise ConfigError("this model's caches can't be quantised later: leave quantized_kv_start at 0")
                self._below.introduce()
        except ConfigError:
            raise
        except PrefixBankError as exc:
            self.warn_of(exc, "attach")

    def identify(self) -> tuple[Namespace, CacheLayout]:
        """Return whose KV the model's is now. Raises `UnsupportedCacheError` and the bank's errors."""
        return self.identity.identify(self.session)

    def for_length(self, n_tokens: int) -> PromptCaches:
        """Return who keeps prefixes of that many tokens: quantised caches have other namespaces than those before."""
        if self._below is not None and n_tokens < self.options.quantized_kv_start:
            return self._below
        return self

    def find(self, token_ids: bytes, limit: int, known: Sequence[ChunkRecord] = (), n_at_hand: int = 0) -> Match:
        """Return how much of packed token ids the bank's files hold, `limit` tokens at most.

        `known` may be the chunks of an earlier match, and `n_at_hand` tokens are had without files. Raises the bank's
        errors.
        """
        found = self.session.match(self.identify()[0], token_ids, limit, known, n_at_hand)
        if self._below is None or self.for_length(found.n_tokens) is self:
            return found
        limit = min(limit, self.options.quantized_kv_start - 1)
        return self.session.match(self._below.identify()[0], token_ids, limit)

    def match(self, encoded: EncodedPrompt, hold_back: int) -> Match:
        """Return how much of a prompt is at hand, but for the last token and the last `hold_back` ones.

        What is kept in memory is preferred to files that hold no more.
        """
        if hold_back < 0:
            raise ConfigError(f"hold_back={hold_back} must not be negative")
        n_tokens = len(encoded.token_ids) // TOKEN_BYTES
        limit = max(n_tokens - max(hold_back, 1), 0)
        self.session.count(matches=1)
        in_memory = None
        try:
            in_memory = self._find_in_memory(encoded.token_ids, limit)
            kept_chunks, n_kept = (in_memory[0].chunks, in_memory[1]) if in_memory else ((), 0)
            found = self.find(encoded.token_ids, limit, kept_chunks, n_kept)
        except PrefixBankError as exc:
            self.warn_of(exc, "match")
            reason = REASON_UNSUPPORTED if isinstance(exc, UnsupportedCacheError) else REASON_UNAVAILABLE
            found = Match(n_tokens, 0, 0, reason)
        if in_memory is None or in_memory[1] < found.n_tokens:
            parted = bool(found.chunks) and found.n_tokens < min(found.chunks[-1].end, limit)
            return replace(found, parted=parted)
        kept, n_tokens = in_memory
        return replace(
            found,
            n_tokens=n_tokens,
            n_bytes=0,
            reason=REASON_ALL if n_tokens == limit else REASON_PARTIAL,
            n_known_tokens=max(found.n_known_tokens, n_tokens),
            in_memory=True,
            n_file_tokens=found.n_tokens,
            parted=n_tokens < min(kept.n_tokens, limit),
            loading_pays=True,
        )

    def _find_in_memory(self, token_ids: bytes, limit: int) -> tuple[KeptPrefix, int] | None:
        if self.quantises_later:
            return None  # what is quantised in time can't be cut back to what it was before
        return self.session.memory.find(owner_of(self.identify()[0]), token_ids, limit)

    def resolve(self, encoded: EncodedPrompt, *, reserve: int, hold_back: int = 0, lend: bool = False) -> Resolved:
        """Return the longest stored prefix of a prompt as a prompt cache, and the rest; see `BankedModel.resolve`.

        With `lend`, a cache that is kept in memory is not copied; `take_back` keeps it again.
        """
        if self._is_too_short(encoded, hold_back):
            n_tokens = len(encoded.token_ids) // TOKEN_BYTES
            self.session.count(computed_by_choice=1)
            found = Match(n_tokens, 0, 0, REASON_COMPUTED, loading_pays=False)
            return self._resolved(new_prompt_cache(self.model, self.options), encoded.token_ids, found)
        found = self.match(encoded, hold_back)
        return self.load(encoded.token_ids, found, max(reserve, 0), lend=lend, hold_back=hold_back)

    def _is_too_short(self, encoded: EncodedPrompt, hold_back: int) -> bool:
        """Tell whether computing the whole prompt is faster than the smallest load: then it is not looked for."""
        if self.session.options.load == "always" or hold_back < 0 or self.quantises_later:
            return False
        try:
            namespace, _ = self.identity.known
        except PrefixBankError:
            return False
        rates = self.session.rates
        estimate = rates.estimate(namespace, len(encoded.token_ids) // TOKEN_BYTES, 0)
        return not estimate.loading_pays and not rates.should_load(namespace, estimate)

    def _should_load(self, found: Match) -> bool:
        """Tell whether to load a match from disk, by what its estimate says."""
        if self.session.options.load == "always":
            return True
        estimate = Estimate(found.load_s, found.compute_s)
        return self.session.rates.should_load(self.identity.known[0], estimate)

    def load(self, token_ids: bytes, found: Match, reserve: int, *, lend: bool = False, hold_back: int = 0) -> Resolved:
        """Return the prompt cache of a match of packed token ids, as far as its shards are whole."""
        limit = found.n_prompt_tokens - max(hold_back, 1)
        if found.in_memory:
            resolved = self._from_memory(token_ids, found, lend=lend)
            if resolved is not None:
                return resolved
            found = self._find_again(token_ids, found)
        if found.n_tokens and not self._should_load(found):
            kept = self._from_memory_instead(token_ids, replace(found, n_tokens=0), limit, lend=lend)
            if kept is not None:
                return kept
            self.session.count(computed_by_choice=1)
            found = replace(found, n_tokens=0, n_bytes=0, reason=REASON_COMPUTED, chunks=())
        prompt_cache: list[Any] = []
        seed: Sequence[Any] = ()
        if found.n_tokens:
            try:
                namespace, layout = self.for_length(found.n_tokens).identity.known
                loaded = self.session.load(namespace, found, layout, reserve)
            except (PrefixBankError, RuntimeError) as exc:  # RuntimeError: MLX has no memory left
                self.warn_of(exc, "load")
                found = replace(found, n_tokens=0, n_bytes=0, reason=REASON_UNAVAILABLE, chunks=())
            else:
                found, prompt_cache, seed = loaded.match, loaded.prompt_cache, loaded.seed
                if loaded.failures:
                    kept = self._from_memory_instead(token_ids, found, limit, lend=lend)
                    if kept is not None:
                        return kept
        if found.n_tokens:
            self.note_use(found)
        else:
            prompt_cache = new_prompt_cache(self.model, self.options)
        lent_by = self._lender() if lend else None
        if found.n_tokens and lent_by is None:
            self.keep_copy(token_ids[: found.n_tokens * TOKEN_BYTES], prompt_cache, found.chunks, seed)
        return self._resolved(prompt_cache, token_ids, found, seed, lent_by)

    def _resolved(
        self,
        prompt_cache: list[Any],
        token_ids: bytes,
        found: Match,
        seed: Sequence[Any] = (),
        lent_by: tuple[Namespace, CacheLayout] | None = None,
    ) -> Resolved:
        rest = unpack_token_ids(token_ids[found.n_tokens * TOKEN_BYTES :])
        return Resolved(prompt_cache, rest, found, seed=seed, lent_by=lent_by, generation=self.identity.generation)

    def _from_memory(self, token_ids: bytes, found: Match, *, lend: bool) -> Resolved | None:
        """Return the prompt cache of a match from memory; None where it is not there any more."""
        namespace, layout = self.identity.known
        memory = self.session.memory
        in_memory = memory.find(owner_of(namespace), token_ids, found.n_tokens)
        if in_memory is None or in_memory[1] < found.n_tokens:
            return None
        kept, n_tokens = in_memory
        prompt_cache: list[Any] | None
        lent_by = self._lender() if lend else None
        if lent_by is not None and n_tokens == kept.n_tokens:
            prompt_cache = kept.prompt_cache if memory.take(kept) else None
        else:
            prompt_cache = memory.copied(kept)
        if prompt_cache is None:
            return None
        if n_tokens < kept.n_tokens:
            prompt_cache = cut_to(prompt_cache, layout, n_tokens)
        self.session.count(memory_hits=1)
        self.note_use(found)
        return self._resolved(prompt_cache, token_ids, found, kept.seed, lent_by)

    def _from_memory_instead(self, token_ids: bytes, found: Match, limit: int, *, lend: bool) -> Resolved | None:
        """Return what memory has of a prompt, if that is more than what was left of a match whose shards failed.

        `limit` tokens are taken at most.
        """
        in_memory = self._find_in_memory(token_ids, limit)
        if in_memory is None or in_memory[1] <= found.n_tokens:
            return None
        found = replace(found, n_tokens=in_memory[1], n_bytes=0, in_memory=True, n_file_tokens=found.n_tokens)
        return self._from_memory(token_ids, found, lend=lend)

    def _find_again(self, token_ids: bytes, found: Match) -> Match:
        """Return what the files hold of a match whose cache went from memory meanwhile."""
        try:
            return self.find(token_ids, found.n_tokens)
        except PrefixBankError as exc:
            self.warn_of(exc, "match")
            return Match(found.n_prompt_tokens, 0, 0, REASON_UNAVAILABLE)

    def _lender(self) -> tuple[Namespace, CacheLayout] | None:
        """Return whose a lent cache is; None where a used one can't be cut back to what it was.

        Nor where there is one layer: its rows tell nothing of the tokens before (`sample_rows`).
        """
        if self.quantises_later:
            return None
        try:
            namespace, layout = self.identity.known
        except PrefixBankError:
            return None
        n_layers = sum(1 for layer in layout.layers if any(CacheLayout((layer,)).row_arrays()))
        return (namespace, layout) if n_layers > 1 and keeps_all_rows(layout) else None

    def keep_copy(
        self, token_ids: bytes, prompt_cache: list[Any], chunks: tuple[ChunkRecord, ...], seed: Sequence[Any] = ()
    ) -> None:
        """Keep a copy of a cache of exactly these packed token ids in memory, if it fits; its user may go on with it.

        The copy shares the arrays until the user writes to them.
        """
        memory = self.session.memory
        n_bytes = held_bytes(prompt_cache) + sum(piece.n_bytes for pieces in seed for piece in pieces)
        if self.quantises_later or not memory.has_room(n_bytes):
            return
        namespace, layout = self.identity.known
        kept = copy.deepcopy(prompt_cache)
        can_be_cut = keeps_all_rows(layout)
        memory.give(KeptPrefix(owner_of(namespace), token_ids, kept, n_bytes, can_be_cut, chunks, seed))

    def take_back(self, lent: Resolved, token_ids: bytes) -> None:
        """Keep a lent cache for these packed token ids, unless what was done to it leaves any doubt."""
        if lent.lent_by is None or not token_ids:
            return
        try:
            namespace, layout = lent.lent_by
            n_tokens = min(len(token_ids) // TOKEN_BYTES, n_cached_tokens(lent.prompt_cache) or 0)
            if n_tokens < lent.match.n_tokens or not self.is_of_these_weights(lent):
                return
            token_ids = token_ids[: n_tokens * TOKEN_BYTES]
            # A copy, so that who goes on with the lent objects changes nothing of what is kept.
            kept = cut_to(copy.deepcopy(lent.prompt_cache), layout, n_tokens)
            n_bytes = held_bytes(kept)
            if self.session.memory.has_room(n_bytes):
                mx.eval(held_arrays(kept))  # another thread may use it next
                chunks = lent.match.chunks
                self.session.memory.give(KeptPrefix(owner_of(namespace), token_ids, kept, n_bytes, True, chunks))
        except (PrefixBankError, RuntimeError):
            return

    def is_of_these_weights(self, resolved: Resolved) -> bool:
        """Tell whether the model is still the one that a prompt cache was resolved for."""
        try:
            self.identify()
        except PrefixBankError:
            return False
        return self.identity.generation == resolved.generation

    def note_computed(self, n_tokens: int, seconds: float) -> None:
        """Take the time that computing so many tokens of a prompt took."""
        try:
            namespace, _ = self.identity.known
        except PrefixBankError:
            return
        self.session.rates.computed(namespace, n_tokens, seconds)

    def note_use(self, found: Match) -> None:
        """Note for LRU that a match was used."""
        try:
            self.session.note_use(found)
        except PrefixBankError as exc:
            self.warn_of(exc, "note")

    def parting(self, found: Match) -> set[int]:
        """Return where the prompt parts from what is known, if states taken there would save later prompts enough."""
        worth_it = max(self.session.chunk_tokens // 4, 1)
        return {found.n_known_tokens} if found.n_known_tokens - found.n_tokens >= worth_it else set()

    def n_to_store(self, encoded: EncodedPrompt, hold_back: int) -> int:
        """Return how many tokens of its prompt a generation should leave in the bank: the shots, else full chunks."""
        n_tokens = max(len(encoded.token_ids) // TOKEN_BYTES - hold_back, 0)
        if encoded.n_shared_tokens is not None:
            return min(encoded.n_shared_tokens, n_tokens)
        return n_tokens - n_tokens % self.session.chunk_tokens

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


def owner_of(namespace: Namespace) -> Owner:
    """Return whose KV a namespace's is, as the memory tier knows it."""
    return namespace.fingerprint, namespace.salt_digest
