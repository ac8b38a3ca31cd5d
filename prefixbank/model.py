"""Own a model that works from a bank: matching, resolving, prefilling, storing, lending, generating.

On the way to a generation nothing that is wrong with the bank raises: it becomes a miss and one `BankWarning`. `put`
and `warm` are asked for, so they raise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixbank import computing, generation, many, scoring, warming
from prefixbank import explain as explaining
from prefixbank.advice import Analysis, analyze, tools_of
from prefixbank.batching import SharedAttention
from prefixbank.chunking import TOKEN_BYTES, unpack_token_ids
from prefixbank.errors import ConfigError, PrefixBankError
from prefixbank.fewshot import Boundaries, FewShotPrompt
from prefixbank.kvcache.capture import sample_rows
from prefixbank.layout import CacheLayout
from prefixbank.promptcaches import Lease, Progress, PromptCaches, Resolved
from prefixbank.prompts import Prompt, PromptEncoder
from prefixbank.session import BankSession
from prefixbank.storing import Stored
from prefixbank.values import Match, Namespace
from prefixbank.warming import Warmed, WarmPlan

__all__ = ["BankedModel"]

DEFAULT_RESERVE = 256


class BankedModel:
    """Run a model from a bank. Make one with `PrefixBank.load_model` or `PrefixBank.attach`.

    A prompt is a text, token ids, chat messages, or what `FewShotPrompt.render` returns; always the whole prompt, never
    a suffix. Attributes: `model` and `tokenizer` are mlx-lm's, `label` names the model in lists.
    """

    def __init__(self, session: BankSession, model: Any, tokenizer: Any, label: str, caches: PromptCaches) -> None:
        """Face a model's prompt caches; `attaching` makes both."""
        self.model = model
        self.tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self.label = label
        self._encoder = PromptEncoder(self.tokenizer)
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

    def analyze(self, prompts: Iterable[Prompt]) -> Analysis:
        """Say what prompts share, where they part, and which order or edit would share more; asks no bank.

        Prompts may be of any kind, mixed. Raises `PromptError` that names a bad prompt's index.
        """
        return analyze(prompts, *tools_of(self.tokenizer))

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

    # --- many prompts

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        max_tokens: int = 256,
        sampler: generation.Sampler | None = None,
        logits_processors: Sequence[generation.LogitsProcessor] | None = None,
        batch_size: int = 16,
        prefill_step_size: int | None = None,
        hold_back: int = 0,
        results_file: str | os.PathLike[str] | None = None,
        progress: many.ManyProgress | None = None,
        shared_attention: SharedAttention = "auto",
        as_completed: bool = False,
    ) -> list[many.ManyResult] | Iterator[tuple[int, many.ManyResult]]:
        """Answer many prompts, computing each run of tokens that several share once, and decoding in batches.

        Args:
            prompts: whole prompts of any kind; all are encoded before anything is computed.
            max_tokens: how many tokens to generate for each at most; -1 for no limit.
            sampler: as in mlx-lm; None is greedy. Prompts are answered in another order than they came, so a random
                seed does not give what one by one would.
            logits_processors: as in mlx-lm; they see all token ids of their prompt, and must keep nothing in between.
            batch_size: how many answers are decoded together; 1 where mlx-lm can't do it exactly.
            prefill_step_size: how many prompt tokens a step computes.
            hold_back: compute at least the last n tokens of each prompt with it.
            results_file: a JSONL file to which each answer is added when it is done; answers that it has already, of
                the same prompt, model and settings, are taken from it. Samplers and processors go by their names.
            progress: called with (prompts done, prompts in all, prompt tokens that needed no computing).
            shared_attention: `"auto"` holds the KV of what prompts of a batch share once, where that was measured to
                pay; `"off"` copies it for each, as mlx-lm does, `"always"` only where the model leaves no other way.
            as_completed: yield `(index, answer)` as they are done, instead of a list in the order of the prompts.

        What only one prompt has is not stored. Raises `PromptError` that names a prompt's index, `ConfigError`, and
        `StorageError` where the results file can't be written; nothing that is wrong with the bank raises.
        """
        options = many.ManyOptions(
            max_tokens=max_tokens,
            sampler=sampler,
            logits_processors=logits_processors,
            batch_size=batch_size,
            prefill_step_size=prefill_step_size,
            hold_back=hold_back,
            results_file=results_file,
            progress=progress,
            shared_attention=shared_attention,
        )
        answers = many.generate_many(self._caches, self._encoder, self.tokenizer, prompts, options)
        return answers if as_completed else many.in_order(answers)

    def score(
        self,
        prompt: Prompt,
        choices: Iterable[scoring.Choice],
        *,
        normalise: scoring.Normalise = "none",
        calibrate: Prompt | Sequence[Prompt] | None = None,
        prefill_step_size: int | None = None,
    ) -> scoring.ScoreResult:
        """Return how probable each choice is as what follows on a prompt.

        Prompt and choice are tokenised as one text; scored are all tokens behind those that prompt and all choices
        share. A choice whose first characters join the prompt's last token is scored with that token.

        Args:
            prompt: the whole prompt.
            choices: texts, or lists of token ids.
            normalise: divide each log-probability by the choice's length in `"tokens"`, `"characters"` or `"bytes"`.
            calibrate: one or several content-free prompts, as `shots.render("N/A")`: the choices' probabilities are
                divided by those behind these (Zhao et al. 2021, https://arxiv.org/abs/2102.09690).
            prefill_step_size: how many tokens a step computes.

        Raises `PromptError` that names a bad choice; nothing that is wrong with the bank raises.
        """
        return scoring.score(
            self._caches,
            self._encoder,
            self.tokenizer,
            prompt,
            choices,
            normalise=normalise,
            calibrate=calibrate,
            prefill_step_size=prefill_step_size,
        )

    def score_many(
        self,
        prompts: Iterable[Prompt],
        choices: Sequence[scoring.Choice] | Sequence[Sequence[scoring.Choice]],
        *,
        normalise: scoring.Normalise = "none",
        calibrate: Prompt | Sequence[Prompt] | None = None,
        prefill_step_size: int | None = None,
        progress: Progress | None = None,
        batch_size: int = 16,
        shared_attention: SharedAttention = "auto",
    ) -> list[scoring.ScoreResult]:
        """Score choices behind many prompts: the same for all, or a list of them for each. In the order of the prompts.

        What prompts share is computed once, and up to `batch_size` of them are scored together. `progress` is called
        with (prompts done, prompts in all, content-free ones included). `shared_attention` is that of `generate_many`,
        the other arguments and errors those of `score`.
        """
        return scoring.score_many(
            self._caches,
            self._encoder,
            self.tokenizer,
            prompts,
            choices,
            normalise=normalise,
            calibrate=calibrate,
            prefill_step_size=prefill_step_size,
            progress=progress,
            batch_size=batch_size,
            shared_attention=shared_attention,
        )

    def rank(self, prompt: Prompt, choices: Iterable[scoring.Choice], **options: Any) -> list[tuple[str, float]]:
        """Return choices with their scores, the best first. Options and errors as for `score`."""
        return self.score(prompt, choices, **options).ranked()

    def best(self, prompt: Prompt, choices: Iterable[scoring.Choice], **options: Any) -> str:
        """Return the text of the most probable choice. Options and errors as for `score`."""
        return self.score(prompt, choices, **options).best_choice
