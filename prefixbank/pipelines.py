"""Own what a model does with many prompts at once, and with choices behind prompts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from prefixbank import generation, many, scoring
from prefixbank.advice import Analysis, analyze, tools_of
from prefixbank.batching import SharedAttention
from prefixbank.promptcaches import Progress, PromptCaches
from prefixbank.prompts import Prompt, PromptEncoder, context_tokens

__all__ = ["Pipelines"]


class Pipelines:
    """Answer, score and analyse many prompts; `BankedModel` is one."""

    tokenizer: TokenizerWrapper
    _encoder: PromptEncoder
    _caches: PromptCaches

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
            context_tokens=context_tokens(self._caches.model),
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
            context_tokens=context_tokens(self._caches.model),
        )

    def rank(self, prompt: Prompt, choices: Iterable[scoring.Choice], **options: Any) -> list[tuple[str, float]]:
        """Return choices with their scores, the best first. Options and errors as for `score`."""
        return self.score(prompt, choices, **options).ranked()

    def best(self, prompt: Prompt, choices: Iterable[scoring.Choice], **options: Any) -> str:
        """Return the text of the most probable choice. Options and errors as for `score`."""
        return self.score(prompt, choices, **options).best_choice

    def analyze(self, prompts: Iterable[Prompt]) -> Analysis:
        """Say what prompts share, where they part, and which order or edit would share more; asks no bank.

        Prompts may be of any kind, mixed. Raises `PromptError` that names a bad prompt's index.
        """
        return analyze(prompts, *tools_of(self.tokenizer))
