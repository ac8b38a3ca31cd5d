"""Own generating for many prompts: options, results in order or as they come, the results file, progress.

How shared runs are computed once is `triewalk`'s, how answers are decoded in batches `decoding`'s.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixbank.batching import SharedAttention, can_batch, check_shared_attention, decoded_from, sharing_for
from prefixbank.chunking import TOKEN_BYTES
from prefixbank.decoding import decode
from prefixbank.errors import ConfigError, PrefixBankError, PromptError
from prefixbank.generation import GenerationResult, LogitsProcessor, Sampler
from prefixbank.kvcache.parameters import digest_parameters
from prefixbank.kvcache.sharing import MOST_STEPS
from prefixbank.promptcaches import PromptCaches
from prefixbank.prompts import EncodedPrompt, Prompt, PromptEncoder, check_length, context_tokens
from prefixbank.resolver import REASON_NONE
from prefixbank.resultsfile import ResultLine, ResultsFile, prompt_digest
from prefixbank.triewalk import Job, TrieWalk, declared_prefixes
from prefixbank.values import Match

__all__ = ["ManyOptions", "ManyProgress", "ManyResult", "generate_many", "in_order", "progress_bar"]

ManyProgress = Callable[[int, int, int], None]
"""Called with (prompts done, prompts in all, prompt tokens that needed no computing)."""


@dataclass(frozen=True, slots=True)
class ManyResult(GenerationResult):
    """Hold the answer to prompt `index`, counted from 0 in the order in which the prompts came.

    What was computed for several prompts is counted with the first of them: the `computed_tokens` of all results are
    what was computed in all. `batched` tells whether it was decoded together with others, and of how many
    of its first tokens (`shared_tokens`) they held the KV together. `picked_up` tells whether it comes from the results
    file; then the counts are those of the run that made it.
    """

    index: int = 0
    batched: bool = False
    shared_tokens: int = 0
    picked_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyOptions:
    """Hold the options of `BankedModel.generate_many`, which documents them. Raises `ConfigError`."""

    max_tokens: int = 256
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    batch_size: int = 16
    prefill_step_size: int | None = None
    hold_back: int = 0
    results_file: str | os.PathLike[str] | None = None
    progress: ManyProgress | None = None
    shared_attention: SharedAttention = "auto"

    def __post_init__(self) -> None:
        if self.max_tokens == 0 or self.max_tokens < -1:
            raise ConfigError(f"max_tokens={self.max_tokens} must be a number of tokens, or -1 for no limit")
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("hold_back", self.hold_back, 0),
            ("prefill_step_size", 1 if self.prefill_step_size is None else self.prefill_step_size, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        check_shared_attention(self.shared_attention)

    @property
    def repeatable(self) -> bool:
        """Tell whether equal prompts have equal answers, so that one is enough."""
        return self.sampler is None and not self.logits_processors


def generate_many(
    caches: PromptCaches, encoder: PromptEncoder, tokenizer: Any, prompts: Iterable[Prompt], options: ManyOptions
) -> Iterator[tuple[int, ManyResult]]:
    """Return `(index, answer)` pairs, computed as they are asked for; prompts and results file are looked through now.

    Raises `PromptError` naming the prompt's index, and `ConfigError`; the iterator raises `StorageError` where the
    results file can't be written. Nothing that is wrong with the bank raises.
    """
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Iterable):
        raise PromptError("generate_many takes several prompts: for one, use generate or put it into a list")
    encoded = list(_encode_all(encoder, prompts, context_tokens(caches.model)))
    results_file = None
    if options.results_file is not None:
        results_file = Path(options.results_file), _settings_digest(caches, tokenizer, options)
        ResultsFile(*results_file).close()
    return _answers(caches, tokenizer, encoded, options, results_file)


def in_order(answers: Iterable[tuple[int, ManyResult]]) -> list[ManyResult]:
    """Return all answers in the order of their prompts."""
    by_index = dict(answers)
    return [by_index[index] for index in range(len(by_index))]


@contextmanager
def progress_bar(label: str = "prompts") -> Iterator[ManyProgress | None]:
    """Give a `progress` that draws a bar on standard error, with tokens saved and time left; None if no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    saved = TextColumn("{task.fields[n_saved]:,} tokens saved")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), saved, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None, n_saved=0)
        yield lambda done, total, n_saved: bar.update(task, completed=done, total=total, n_saved=n_saved)


def _encode_all(encoder: PromptEncoder, prompts: Iterable[Prompt], n_most: int | None) -> Iterator[EncodedPrompt]:
    for index, prompt in enumerate(prompts):
        try:
            encoded = encoder.encode(prompt)
        except PromptError as exc:
            raise PromptError(f"prompt {index}: {exc}") from exc
        except Exception as exc:  # tokenizers raise whatever they like
            raise PromptError(f"prompt {index} can't be encoded: {exc}") from exc
        check_length(encoded.token_ids, n_most, f"prompt {index}")
        yield encoded


def _settings_digest(caches: PromptCaches, tokenizer: Any, options: ManyOptions) -> str:
    """Return what tells apart runs whose answers may differ. Functions go by their names only."""
    try:
        model = caches.identify()[0].fingerprint
    except PrefixBankError:
        model = digest_parameters(caches.model)
    functions = [options.sampler, *(options.logits_processors or ())]
    names = [getattr(function, "__qualname__", type(function).__qualname__) for function in functions]
    settings = [model, options.max_tokens, sorted(tokenizer.eos_token_ids), names]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _answers(
    caches: PromptCaches,
    tokenizer: Any,
    prompts: list[EncodedPrompt],
    options: ManyOptions,
    results_file: tuple[Path, str] | None,
) -> Iterator[tuple[int, ManyResult]]:
    """Yield what the results file has, then the rest as it is computed; a result is in the file before it is given."""
    token_ids = [prompt.token_ids for prompt in prompts]
    n_done = n_saved = 0
    to_do: dict[bytes, list[int]] = defaultdict(list)  # equal prompts with equal answers come together
    lines = ResultsFile(*results_file) if results_file else None

    def done(result: ManyResult) -> tuple[int, ManyResult]:
        nonlocal n_done, n_saved
        n_done += 1
        n_saved += result.cached_tokens
        if options.progress is not None:
            options.progress(n_done, len(token_ids), n_saved)
        return result.index, result

    try:
        if options.progress is not None:
            options.progress(0, len(token_ids), 0)
        for index, ids in enumerate(token_ids):
            line = lines and lines.take(prompt_digest(ids), index, once=not options.repeatable)
            if line:
                yield done(_picked_up(line, index, len(ids) // TOKEN_BYTES))
            else:
                to_do[ids if options.repeatable else index.to_bytes(8, "big")].append(index)
        groups = list(to_do.values())
        batch_size = options.batch_size if can_batch(caches) else 1
        sharing = sharing_for(caches, options.shared_attention) if batch_size > 1 else None
        n_steps = options.max_tokens if options.max_tokens > 0 else MOST_STEPS
        walk = TrieWalk(
            caches,
            [token_ids[group[0]] for group in groups],
            hold_back=options.hold_back,
            prefill_step_size=options.prefill_step_size,
            sharing=sharing,
            n_together=batch_size,
            shared_from=decoded_from(sharing, options.shared_attention, n_steps),
            declared=declared_prefixes([prompts[group[0]] for group in groups]),
        )
        with closing(
            decode(
                caches,
                tokenizer,
                walk,
                max_tokens=options.max_tokens,
                sampler=options.sampler,
                logits_processors=options.logits_processors,
                batch_size=batch_size,
                prefill_step_size=options.prefill_step_size,
            )
        ) as finished:
            for jobs in finished:
                results = [
                    _result(job, index, is_first=index == groups[job.index][0], tokenizer=tokenizer)
                    for job in jobs
                    for index in groups[job.index]
                ]
                if lines is not None and results_file is not None:
                    for result in results:
                        lines.append(_line(result, prompt_digest(token_ids[result.index]), results_file[1]))
                for result in results:
                    yield done(result)
    finally:
        if lines is not None:
            lines.close()


def _result(job: Job, index: int, *, is_first: bool, tokenizer: Any) -> ManyResult:
    n_computed = job.n_computed if is_first else 0
    return ManyResult(
        text=job.text,
        token_ids=list(job.answer),
        cached_tokens=job.found.n_prompt_tokens - n_computed,
        computed_tokens=n_computed,
        ttft_s=job.ttft_s,
        finish_reason=job.finish_reason,
        match=job.found,
        index=index,
        batched=job.batched,
        shared_tokens=job.shared_tokens,
    )


def _line(result: ManyResult, digest: str, settings_digest: str) -> ResultLine:
    return ResultLine(
        index=result.index,
        prompt_digest=digest,
        settings_digest=settings_digest,
        text=result.text,
        token_ids=result.token_ids,
        cached_tokens=result.cached_tokens,
        computed_tokens=result.computed_tokens,
        finish_reason=result.finish_reason,
    )


def _picked_up(line: ResultLine, index: int, n_prompt: int) -> ManyResult:
    return ManyResult(
        text=line.text,
        token_ids=line.token_ids,
        cached_tokens=line.cached_tokens,
        computed_tokens=line.computed_tokens,
        ttft_s=0.0,
        finish_reason=line.finish_reason,
        match=Match(n_prompt, 0, 0, REASON_NONE),
        index=index,
        picked_up=True,
    )
