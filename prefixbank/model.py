"""Own a model that works from a bank: matching, resolving, prefilling, storing, lending, generating.

On the way to a generation nothing that is wrong with the bank raises: it becomes a miss and one `BankWarning`. `put`
and `warm` are asked for, so they raise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixbank import computing, generation, warming
from prefixbank import explain as explaining
from prefixbank.chunking import TOKEN_BYTES, unpack_token_ids
from prefixbank.errors import ConfigError, PrefixBankError
from prefixbank.fewshot import Boundaries, FewShotPrompt
from prefixbank.kvcache.capture import sample_rows
from prefixbank.layout import CacheLayout
from prefixbank.pipelines import Pipelines
from prefixbank.promptcaches import Lease, Progress, PromptCaches, Resolved
from prefixbank.prompts import Prompt, PromptEncoder, check_length, context_tokens, known_token_ids
from prefixbank.session import BankSession
from prefixbank.storing import Stored
from prefixbank.values import Match, Namespace
from prefixbank.warming import Warmed, WarmPlan

__all__ = ["BankedModel"]

DEFAULT_RESERVE = 256


class BankedModel(Pipelines):
    """Run a model from a bank. Make one with `PrefixBank.load_model` or `PrefixBank.attach`.

    A prompt is a text, token ids, chat messages, or what `FewShotPrompt.render` returns; always the whole prompt, never
    a suffix. Attributes: `model` and `tokenizer` are mlx-lm's, `label` names the model in lists.
    """

    def __init__(self, session: BankSession, model: Any, tokenizer: Any, label: str, caches: PromptCaches) -> None:
        """Face a model's prompt caches; `attaching` makes both."""
        self.model = model
        self.tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self.label = label
        self._encoder = PromptEncoder(self.tokenizer, known_token_ids(model))
        self._caches = caches
        self._session = session

    # --- looking

    @property
    def namespace(self) -> Namespace:
        """Return the namespace of the model as it is now. Raises `UnsupportedCacheError` and the bank's errors."""
        return self._caches.identify()[0]

    @property
    def layout(self) -> CacheLayout:
        """Return the layout of the model's prompt cache. Raises as `namespace` does."""
        return self._caches.identify()[1]

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a whole prompt. Raises `PromptError`."""
        return unpack_token_ids(self._encoder.encode(prompt).token_ids)

    def shared_token_ids(self, shots: FewShotPrompt) -> list[int]:
        """Return the token ids that all prompts of these shots begin with. Raises `PromptError`."""
        return unpack_token_ids(self._encoder.shared_token_ids(shots))

    def match(self, prompt: Prompt, *, hold_back: int = 0) -> Match:
        """Return how much of a prompt is stored; reads no shard.

        At least one token, and at least the last `hold_back`, are left to compute. Raises `PromptError`.
        """
        return self._caches.match(self._encoder.encode(prompt), hold_back)

    def explain(self, prompt: Prompt) -> explaining.Explanation:
        """Say how far a prompt matches, which token differs, and what is stored there. Raises the bank's errors."""
        encoded = self._encoder.encode(prompt)
        namespace = self.namespace
        limit = len(encoded.token_ids) // TOKEN_BYTES - 1
        found = self._session.match(namespace, encoded.token_ids, limit)
        return explaining.explain(self._session, namespace, encoded.token_ids, found, self._encoder.decode)

    # --- resuming and computing

    def resolve(self, prompt: Prompt, *, reserve: int = DEFAULT_RESERVE, hold_back: int = 0) -> Resolved:
        """Return the longest stored prefix of a prompt as a prompt cache, and the rest.

        Args:
            prompt: the whole prompt.
            reserve: how many tokens behind the prompt the buffers have room for without growing.
            hold_back: leave at least the last n tokens uncached, for logits processors that must see them computed.

        Without a match, or where the bank fails, the cache is empty and `rest` the whole prompt. Raises `PromptError`.
        """
        return self._caches.resolve(self._encoder.encode(prompt), reserve=reserve, hold_back=hold_back)

    def prefill(
        self,
        prompt: Prompt,
        *,
        progress: Progress | None = None,
        prefill_step_size: int | None = None,
        reserve: int = DEFAULT_RESERVE,
        hold_back: int = 0,
    ) -> Resolved:
        """Resolve a prompt, compute what is missing but the last token, and store it.

        Args:
            prompt: the whole prompt.
            progress: called with (tokens processed, tokens in all), those from the bank counted as processed.
            prefill_step_size: how many tokens a step computes; steps end at chunk boundaries.
            reserve: how many tokens behind the prompt the buffers have room for.
            hold_back: leave the last n tokens uncomputed instead of one.

        What can't be stored is computed all the same, with one warning. Raises `PromptError`.
        """
        encoded = self._encoder.encode(prompt)
        resolved = self._caches.resolve(encoded, reserve=reserve, hold_back=hold_back)
        end = max(len(encoded.token_ids) // TOKEN_BYTES - max(hold_back, 1), 0)
        token_ids = unpack_token_ids(encoded.token_ids)
        start = resolved.match.n_tokens
        recorder = computing.recorder_for(self._caches, resolved)
        boundaries = {end} | self._caches.parting(resolved.match)
        computing.compute(
            self._caches,
            resolved.prompt_cache,
            token_ids,
            start,
            end,
            prefill_step_size,
            progress,
            recorder,
            boundaries,
        )
        self._session.count(cached_tokens=start, computed_tokens=end - start)
        if start < end:
            computing.store_behind(
                self._caches,
                encoded.token_ids[: end * TOKEN_BYTES],
                resolved,
                end,
                recorder,
            )
        return Resolved(resolved.prompt_cache, token_ids[end:], resolved.match, end - start)

    # --- storing

    def put(self, prompt: Prompt, prompt_cache: Sequence[Any]) -> Stored:
        """Store a live prompt cache: the KV of the prompt's tokens, as many of them as the cache holds.

        The caller vouches that the cache was computed by this model from exactly these tokens. Raises
        `UnsupportedCacheError`, `FingerprintMismatchError` for a cache of another layout, and the bank's errors.
        """
        return computing.store(self._caches, self._encoder.encode(prompt).token_ids, prompt_cache)

    def warm(
        self,
        prompt: Prompt | FewShotPrompt,
        *,
        name: str | None = None,
        pin: bool = False,
        progress: Progress | None = None,
        prefill_step_size: int | None = None,
        reserve: int = 0,
        hold_back: int = 0,
        boundaries: Boundaries | None = None,
        old: warming.OldVersion = "leave",
    ) -> Warmed:
        """Store a prefix ahead of its use: the part that all queries of a `FewShotPrompt` share, or a whole prompt.

        Args:
            prompt: shots, or any prompt.
            name: what the prefix is called from now on, in place of what had this name; None takes the shots' name.
            pin: never evict it. A pin needs a name.
            progress: called with (tokens processed, tokens in all).
            prefill_step_size: how many tokens a step computes.
            reserve: how many tokens the working cache has room for behind the prefix; what is stored is the same.
            hold_back: leave the last n tokens out of the prefix.
            boundaries: where models with recurrent layers can go on from: at the end, or also behind the instructions
                and each example of a `FewShotPrompt`; None does what the prompt says. Other models can anywhere.
            old: where the name is that of another version of a few-shot prompt: `"leave"` that one without a name, to
                be evicted some time, `"keep"` it as `<name>@<8 hex of its digest>`, or `"drop"` what only it needs.

        Raises `PromptError`, `UnsupportedCacheError` and the bank's errors.
        """
        return warming.warm(
            self._caches,
            self._encoder,
            prompt,
            name=name,
            pin=pin,
            progress=progress,
            prefill_step_size=prefill_step_size,
            reserve=reserve,
            hold_back=hold_back,
            boundaries=boundaries,
            old=old,
        )

    def plan_warm(
        self,
        prompt: Prompt | FewShotPrompt,
        *,
        name: str | None = None,
        hold_back: int = 0,
        boundaries: Boundaries | None = None,
        old: warming.OldVersion = "leave",
        after: Sequence[WarmPlan] = (),
    ) -> WarmPlan:
        """Say what `warm` with these arguments would do, and how many bytes and seconds that takes; changes nothing.

        `after` are plans that are to be carried out before. Raises as `warm` does.
        """
        return warming.plan(
            self._caches,
            self._encoder,
            prompt,
            name=name,
            hold_back=hold_back,
            boundaries=boundaries,
            old=old,
            after=after,
        )

    # --- lending

    @contextmanager
    def checkout(self, prompt: Prompt, *, reserve: int = DEFAULT_RESERVE, hold_back: int = 0) -> Iterator[Lease]:
        """Lend the prompt cache of a prompt's stored prefix; it is taken back, cut to that prefix, when the block ends.

        The next `checkout` with the same prefix gets it from memory, within the bank's `memory_bytes`. While it is
        lent, another checkout of the prefix gets a cache of its own. Arguments and errors as for `resolve`.
        """
        encoded = self._encoder.encode(prompt)
        lease = self._caches.resolve(encoded, reserve=reserve, hold_back=hold_back, lend=True)
        n_tokens = lease.match.n_tokens if lease.lent_by is not None else 0
        sampled = sample_rows(lease.prompt_cache, n_tokens) if n_tokens else b""
        try:
            yield lease
        finally:
            if n_tokens and self._is_as_lent(lease, sampled):
                self._caches.take_back(lease, encoded.token_ids[: n_tokens * TOKEN_BYTES])

    def _is_as_lent(self, lease: Lease, sampled: bytes) -> bool:
        """Tell whether the rows of the lent prefix are what they were."""
        try:
            return sample_rows(lease.prompt_cache, lease.match.n_tokens) == sampled
        except (PrefixBankError, RuntimeError, ValueError):
            return False

    # --- generating

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        sampler: generation.Sampler | None = None,
        logits_processors: Sequence[generation.LogitsProcessor] | None = None,
        prefill_step_size: int | None = None,
        reserve: int | None = None,
        hold_back: int = 0,
        keep: bool = False,
        draft_model: BankedModel | None = None,
        num_draft_tokens: int = 2,
        return_prompt_cache: bool = False,
        progress: Progress | None = None,
    ) -> generation.GenerationResult:
        """Answer a prompt, computing only what is not stored.

        Args:
            prompt: the whole prompt.
            max_tokens: how many tokens to generate at most; -1 for no limit.
            sampler: as in mlx-lm, a function of log-probabilities; None is greedy.
            logits_processors: as in mlx-lm; they see all token ids, those from the bank included.
            prefill_step_size: how many prompt tokens a step computes.
            reserve: how many tokens behind the prompt the buffers have room for; None is
                `max_tokens`, 1,024 at most.
            hold_back: compute at least the last n tokens of the prompt.
            keep: store prompt and answer, so that a conversation goes on from the bank. Otherwise the shots of a
                rendered few-shot prompt are stored, or the full chunks of any other prompt.
            draft_model: a smaller model of the same tokenizer, for speculative decoding; its own prefixes are matched
                and stored too, in its own namespace.
            num_draft_tokens: how many tokens the draft model runs ahead.
            return_prompt_cache: give the live prompt cache with the result.
            progress: called with (prompt tokens processed, prompt tokens in all).

        Raises `PromptError` and `ConfigError`; nothing that is wrong with the bank raises.
        """
        outcome: list[Resolved] = []
        options = generation.GenerationOptions(
            max_tokens=max_tokens,
            sampler=sampler,
            logits_processors=logits_processors,
            prefill_step_size=prefill_step_size,
            reserve=reserve,
            hold_back=hold_back,
            keep=keep,
            draft_model=draft_model,
            num_draft_tokens=num_draft_tokens,
            progress=progress,
        )
        return generation.collect(
            self._stream(prompt, options, outcome, lend=not return_prompt_cache),
            outcome,
            self.tokenizer.eos_token_ids,
            with_prompt_cache=return_prompt_cache,
        )

    def stream_generate(self, prompt: Prompt, **options: Any) -> Iterator[generation.BankedResponse]:
        """Yield the answer as it comes, as mlx-lm's `GenerationResponse` with `cached_tokens`, `computed_tokens`,
        `ttft_s`.

        Options are those of `generate` but `return_prompt_cache`. What is to be stored is stored when the answer ends
        or the caller stops asking.
        """
        try:
            given = generation.GenerationOptions(**options)
        except TypeError as exc:
            raise ConfigError(f"stream_generate: {str(exc).split('()')[-1].strip()}") from exc
        return self._stream(prompt, given, [], lend=True)

    def _stream(
        self, prompt: Prompt, options: generation.GenerationOptions, outcome: list[Resolved], *, lend: bool
    ) -> Iterator[generation.BankedResponse]:
        started_at = time.perf_counter()
        if options.max_tokens == 0:
            raise ConfigError("max_tokens must not be 0: give a number of tokens, or -1 for no limit")
        encoded = self._encoder.encode(prompt)
        check_length(encoded.token_ids, context_tokens(self.model))
        draft = options.draft_model
        if draft is not None and not isinstance(draft, BankedModel):
            raise ConfigError("draft_model must be a BankedModel: load or attach it to a bank first")
        return generation.stream(
            self._caches,
            self.tokenizer,
            encoded,
            options,
            started_at,
            outcome,
            None if draft is None else draft._caches,
            lend=lend,
        )
