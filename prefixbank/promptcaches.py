"""Own one model's prompt caches: found, loaded, computed, stored and taken back.

On the way to a generation nothing that is wrong with the bank raises: it becomes a miss and one `BankWarning`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, ConcatenateKVCache, RotatingKVCache

from prefixbank.chunking import TOKEN_BYTES, pack_token_ids, unpack_token_ids
from prefixbank.errors import ConfigError, PrefixBankError, UnsupportedCacheError
from prefixbank.identity import ModelIdentity
from prefixbank.kvcache.assemble import cut_to
from prefixbank.kvcache.capture import CacheRecorder, n_cached_tokens
from prefixbank.kvcache.kinds import keeps_all_rows
from prefixbank.kvcache.probe import CacheOptions, new_prompt_cache, quantize
from prefixbank.layout import CacheLayout
from prefixbank.prompts import EncodedPrompt
from prefixbank.session import BankSession
from prefixbank.storing import Stored
from prefixbank.values import Match, Namespace

__all__ = ["Lease", "PromptCaches", "Resolved"]

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
    `batch_generate`; the cache is changed by that. `computed_tokens` were computed on the way here. (`seed` is the
    bank's own: what a recorder must know of the cache.)
    """

    prompt_cache: list[Any]
    rest: list[int]
    match: Match
    computed_tokens: int = 0
    seed: Sequence[Any] = field(default=(), repr=False)

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

    def can_run_ahead(self) -> bool:
        """Tell whether mlx-lm can trim the model's caches, so that a draft model may run ahead."""
        if self.options.kv_bits is not None:
            return False  # mlx-lm quantises copies of the list there: what it made could not be stored
        return not any(
            isinstance(layer_cache, _NOT_TRIMMABLE) for layer_cache in new_prompt_cache(self.model, self.options)
        )

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

    def find(self, token_ids: bytes, limit: int) -> Match:
        """Return how much of packed token ids is stored, `limit` tokens at most. Raises the bank's errors."""
        found = self.session.match(self.identify()[0], token_ids, limit)
        if self._below is None or self.for_length(found.n_tokens) is self:
            return found
        limit = min(limit, self.options.quantized_kv_start - 1)
        return self.session.match(self._below.identify()[0], token_ids, limit)

    def match(self, encoded: EncodedPrompt, hold_back: int) -> Match:
        """Return how much of a prompt is stored, but for the last token and the last `hold_back` ones."""
        if hold_back < 0:
            raise ConfigError(f"hold_back={hold_back} must not be negative")
        n_tokens = len(encoded.token_ids) // TOKEN_BYTES
        limit = max(n_tokens - max(hold_back, 1), 0)
        self.session.count(matches=1)
        try:
            return self.find(encoded.token_ids, limit)
        except PrefixBankError as exc:
            self.warn_of(exc, "match")
            reason = REASON_UNSUPPORTED if isinstance(exc, UnsupportedCacheError) else REASON_UNAVAILABLE
            return Match(n_tokens, 0, 0, reason)

    def resolve(self, encoded: EncodedPrompt, *, reserve: int, hold_back: int = 0) -> Resolved:
        """Return the longest stored prefix of a prompt as a prompt cache, and the rest; see `BankedModel.resolve`."""
        found = self.match(encoded, hold_back)
        return self.load(encoded.token_ids, found, max(reserve, 0))

    def load(self, token_ids: bytes, found: Match, reserve: int) -> Resolved:
        """Return the prompt cache of a match of packed token ids, as far as its shards are whole."""
        prompt_cache: list[Any] = []
        seed: Sequence[Any] = ()
        if found.n_tokens:
            try:
                layout = self.for_length(found.n_tokens).identity.layout
                loaded = self.session.load(found, layout, reserve)
            except (PrefixBankError, RuntimeError) as exc:  # RuntimeError: MLX has no memory left
                self.warn_of(exc, "load")
                found = replace(found, n_tokens=0, n_bytes=0, reason=REASON_UNAVAILABLE, chunks=())
            else:
                found, prompt_cache, seed = loaded.match, loaded.prompt_cache, loaded.seed
        if found.n_tokens:
            self.note_use(found)
        else:
            prompt_cache = new_prompt_cache(self.model, self.options)
        return Resolved(prompt_cache, unpack_token_ids(token_ids[found.n_tokens * TOKEN_BYTES :]), found, seed=seed)

    def recorder(self, resolved: Resolved) -> CacheRecorder | None:
        """Return a recorder of what will be computed behind a resolved prefix; None where none is needed."""
        try:
            layout = self.identity.layout
        except PrefixBankError:  # said when the prompt was matched
            return None
        if self.session.read_only or self._below is not None:  # caches to be quantised hold everything themselves
            return None
        return CacheRecorder(layout, resolved.seed or None)

    def compute(
        self,
        prompt_cache: list[Any],
        token_ids: list[int],
        start: int,
        end: int,
        prefill_step_size: int | None,
        progress: Progress | None,
        recorder: CacheRecorder | None = None,
        boundaries: Collection[int] = (),
    ) -> None:
        """Run the tokens `[start, end)` through the model in steps that end at chunk boundaries.

        Steps also end at the given boundaries and each `state_every_chunks` chunks, and there the recorder takes the
        states of recurrent layers.
        """
        every = self.state_every_chunks * self.session.chunk_tokens
        boundaries = {*boundaries, *(range(every, end + 1, every) if every else ())}
        step = prefill_step_size or self.prefill_step_size
        if step < 1:
            raise ConfigError(f"prefill_step_size={step} must be at least 1")
        if progress is not None:
            progress(start, end)
        with wired_limit(self.model, [generation_stream]), mx.stream(generation_stream):
            while start < end:
                stop = min(start + step, end, *(boundary for boundary in boundaries if boundary > start))
                aligned = stop - stop % self.session.chunk_tokens
                if stop < end and stop not in boundaries and aligned > start:
                    stop = aligned
                self.model(mx.array(token_ids[start:stop])[None], cache=prompt_cache)
                quantize(prompt_cache, self.options)
                mx.eval([layer_cache.state for layer_cache in prompt_cache if layer_cache is not None])
                if recorder is not None and recorder.must_follow:
                    recorder.record(start, stop, prompt_cache, with_state=stop in boundaries)
                mx.clear_cache()
                start = stop
                if progress is not None:
                    progress(start, end)

    def store(
        self,
        token_ids: bytes,
        prompt_cache: Sequence[Any],
        n_held: int | None = None,
        recorder: CacheRecorder | None = None,
    ) -> Stored:
        """Store the KV of packed token ids from a live cache, of as many as are known. Raises the bank's errors.

        How many tokens the cache holds it knows itself, unless all layers are recurrent: then it is `n_held`, or all
        token ids. `recorder` has followed its making.
        """
        n_counted = n_cached_tokens(prompt_cache)
        if n_counted is not None:
            n_held = n_counted
        elif n_held is None:
            n_held = len(token_ids) // TOKEN_BYTES
        if n_held == 0:
            return Stored(0, None)
        whose = self.for_length(n_held)
        if whose is not self.for_length(len(token_ids) // TOKEN_BYTES):
            return Stored(0, None)  # what is shorter than the start is kept as it was before it was quantised
        namespace, layout = whose.identify()
        recorder = recorder or CacheRecorder(layout)
        recorder.finish(prompt_cache, n_held)
        return self.session.store(namespace, token_ids[: n_held * TOKEN_BYTES], recorder)

    def try_store(
        self,
        token_ids: bytes,
        prompt_cache: Sequence[Any],
        n_held: int | None = None,
        recorder: CacheRecorder | None = None,
    ) -> None:
        """Store on the way to a generation, where it is merely a pity if that fails."""
        if self.session.read_only or not token_ids:
            return
        try:
            self.store(token_ids, prompt_cache, n_held, recorder)
        except (PrefixBankError, RuntimeError) as exc:
            self.warn_of(exc, "store")

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

    def follow(
        self,
        encoded: EncodedPrompt,
        resolved: Resolved,
        hold_back: int,
        prefill_step_size: int | None,
        progress: Progress | None,
    ) -> tuple[Resolved, CacheRecorder | None]:
        """Compute what is to be stored and must be recorded step by step; all but the last token at most.

        Returns the rest still to compute and the recorder; None where the finished cache will hold everything itself.
        """
        if self._below is not None and not self.session.read_only:
            return self._store_before_quantising(encoded, resolved, hold_back, prefill_step_size), None
        recorder = self.recorder(resolved)
        if recorder is None or not recorder.must_follow:
            return resolved, None
        n_prompt = len(encoded.token_ids) // TOKEN_BYTES
        boundaries = self.parting(resolved.match)
        if encoded.n_shared_tokens is not None:
            boundaries.add(encoded.n_shared_tokens)
        n_last = min(n_prompt - max(hold_back, 1), max(self.n_to_store(encoded, hold_back), *boundaries, 0))
        start = resolved.match.n_tokens
        if n_last <= start:
            return resolved, recorder
        token_ids = unpack_token_ids(encoded.token_ids)
        whole = None if progress is None else lambda done, _: progress(done, n_prompt)
        self.compute(resolved.prompt_cache, token_ids, start, n_last, prefill_step_size, whole, recorder, boundaries)
        return replace(resolved, rest=token_ids[n_last:], computed_tokens=n_last - start), recorder

    def _store_before_quantising(
        self, encoded: EncodedPrompt, resolved: Resolved, hold_back: int, prefill_step_size: int | None
    ) -> Resolved:
        """Compute and store what is to be stored, if the cache is not quantised by then; returns what is left."""
        n_last = min(self.n_to_store(encoded, hold_back), len(encoded.token_ids) // TOKEN_BYTES - 1)
        start = resolved.match.n_tokens
        if n_last <= start or self.for_length(n_last) is self:
            return resolved
        token_ids = unpack_token_ids(encoded.token_ids)
        self.compute(resolved.prompt_cache, token_ids, start, n_last, prefill_step_size, None)
        self.try_store(encoded.token_ids[: n_last * TOKEN_BYTES], resolved.prompt_cache, n_last)
        return replace(resolved, rest=token_ids[n_last:], computed_tokens=n_last - start)

    def store_after_generation(
        self,
        encoded: EncodedPrompt,
        resolved: Resolved,
        recorder: CacheRecorder | None,
        answer: Sequence[int],
        *,
        keep: bool,
        hold_back: int,
    ) -> None:
        """Store what a generation should leave: the declared shots, else full chunks; with `keep`, everything."""
        n_prompt = len(encoded.token_ids) // TOKEN_BYTES
        n_tokens = self.n_to_store(encoded, hold_back)
        if recorder is not None:
            n_tokens = max(n_tokens, *recorder.state_ends(), 0)
        whole = encoded.token_ids + pack_token_ids(answer)
        token_ids = whole if keep else whole[: n_tokens * TOKEN_BYTES]
        # mlx-lm has run every token that it gave out through the model, the last one included.
        n_held = n_prompt + len(answer) if recorder is not None else None
        if len(token_ids) // TOKEN_BYTES > resolved.match.n_tokens:
            self.try_store(token_ids, resolved.prompt_cache, n_held, recorder)

    def what(self, encoded: EncodedPrompt, found: Match) -> tuple[str, str, bytes] | None:
        """Return what a prompt cache of the match is kept in memory under: whose it is, and its very token ids.

        None where it can't be kept: nothing matches, or a used cache can't be cut back to the match.
        """
        if not found.n_tokens or self._below is not None:
            return None
        namespace, layout = self.identify()
        if not keeps_all_rows(layout):
            return None
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
