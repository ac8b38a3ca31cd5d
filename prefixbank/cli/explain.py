"""Own `prefixbank explain`: how far prompts match what is stored, why no further, and what would share more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixbank.cli import models
from prefixbank.cli.options import JsonOption, chosen_bank, open_bank
from prefixbank.cli.output import print_document, print_text, progress_bar
from prefixbank.cli.sources import JsonLinesOption, SourceArgument, SourcePrompt, read_prompts
from prefixbank.errors import BankNotFoundError, ConfigError, PrefixBankError, PromptError

if TYPE_CHECKING:
    from prefixbank.advice import Analysis, Analyzer
    from prefixbank.explain import Explanation
    from prefixbank.prompts import Prompt

SHOWN_EACH = 8
"""How many prompts are explained one by one; of more the matches are counted."""
SHOWN_REASONS = 5

Explain = Callable[["Prompt"], "Explanation"]


@dataclass(slots=True)
class _Read:
    """Hold the prompts of a source up to the first one that can't be used, and what ended the work."""

    prompts: list[tuple[str, Prompt]] = field(default_factory=list)
    error: PrefixBankError | None = None


def run(
    ctx: typer.Context,
    model: models.ModelOption,
    source: SourceArgument = "-",
    query: Annotated[
        str | None,
        typer.Option("--query", metavar="TEXT", help="The query of a few-shot prompt (its first sample without)."),
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help=f"Explain each prompt, also where there are more than {SHOWN_EACH}.")
    ] = False,
    analyze_only: Annotated[
        bool,
        typer.Option("--analyze", help="Only compare the prompts with each other: needs no bank and no weights."),
    ] = False,
    adapter: models.AdapterOption = None,
    salt: models.SaltOption = "",
    kv_bits: models.KVBitsOption = None,
    kv_group_size: models.KVGroupSizeOption = None,
    precision: models.PrecisionOption = "auto",
    as_lines: JsonLinesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say how far prompts match what is stored, which token differs, and why; of several, what would share more."""
    read = _read(read_prompts(source, as_lines=as_lines, root=chosen_bank(ctx).root), query)
    if not read.prompts and read.error is not None:
        raise read.error
    explained: list[tuple[str, Explanation]] = []
    if analyze_only:
        analyzer = _analyzer(_load_tokenizer(model))
        _work(read, analyzer, None, explained)
    else:
        with _open_bank(ctx, len(read.prompts)) as bank:
            llm = models.load_model(
                bank,
                model,
                adapter=adapter,
                salt=salt,
                kv_bits=kv_bits,
                kv_group_size=kv_group_size,
                precision=precision,
            )
            analyzer = _analyzer(llm.tokenizer)
            _work(read, analyzer, llm.explain, explained)
    analysis = analyzer.analysis() if len(analyzer) > 1 or (analyze_only and len(analyzer)) else None
    names = [where for where, _ in read.prompts]
    if as_json and (explained or analysis):
        print_document(
            explanations=[{"source": where, **asdict(explanation)} for where, explanation in explained],
            analysis=None if analysis is None else _with_sources(asdict(analysis), names),
        )
    elif explained or analysis:
        print_text("\n".join(_lines(explained, analysis, names, each=each)))
    if read.error is not None:
        raise read.error


def _read(given: Iterable[SourcePrompt], query: str | None) -> _Read:
    read = _Read()
    try:
        for prompt in given:
            read.prompts.append((prompt.where, _with_query(prompt, query)))
    except ConfigError as exc:
        read.error = exc
    return read


def _open_bank(ctx: typer.Context, n_prompts: int) -> Any:
    try:
        return open_bank(ctx)
    except BankNotFoundError as exc:
        if n_prompts < 2:
            raise
        raise BankNotFoundError(f"{exc}; --analyze compares the prompts without a bank") from exc


def _load_tokenizer(model: str) -> Any:
    from prefixbank.blas import load_blas

    load_blas()  # before mlx
    from prefixbank.kvcache.loading import load_tokenizer

    return load_tokenizer(model)


def _analyzer(tokenizer: Any) -> Analyzer:
    from prefixbank.advice import Analyzer, tools_of

    return Analyzer(*tools_of(tokenizer))


def _work(read: _Read, analyzer: Analyzer, explain: Explain | None, explained: list[tuple[str, Explanation]]) -> None:
    """Analyse and explain the prompts up to the first that fails; its error is the first of the source then."""
    from prefixbank.chunking import unpack_token_ids

    with progress_bar("looking at prompts") as progress:
        for number, (where, prompt) in enumerate(read.prompts, 1):
            try:
                token_ids = analyzer.add(prompt)
            except PromptError as exc:
                read.error = PromptError(f"{where}: {exc}")
                return
            if explain is not None:
                try:
                    explained.append((where, explain(unpack_token_ids(token_ids))))
                except PrefixBankError as exc:
                    read.error = exc
                    return
            if progress is not None:
                progress(number, len(read.prompts))


def _lines(
    explained: Sequence[tuple[str, Explanation]], analysis: Analysis | None, names: Sequence[str], *, each: bool
) -> list[str]:
    lines = []
    if each or len(explained) <= SHOWN_EACH:
        lines += [f"{where}: {explanation}" for where, explanation in explained]
    else:
        lines += _summary([explanation for _, explanation in explained])
    if analysis is not None:
        lines += [*([""] if lines else []), analysis.as_text(names.__getitem__)]
    return lines


def _summary(explanations: Sequence[Explanation]) -> list[str]:
    """Return how many tokens of all prompts are stored, and what keeps most of them from matching more."""
    n_tokens = sum(explanation.n_prompt_tokens for explanation in explanations)
    n_matched = sum(explanation.n_matched_tokens for explanation in explanations)
    n_hits = sum(explanation.n_matched_tokens > 0 for explanation in explanations)
    counts = f"{n_hits:,} of {len(explanations):,} prompts match, {n_matched:,} of {n_tokens:,} tokens are stored"
    lines = [f"{counts} (--each explains each prompt)"]
    causes = Counter((e.n_matched_tokens, e.reason, e.hint) for e in explanations)
    for (n_tokens_each, reason, hint), n_prompts in causes.most_common(SHOWN_REASONS):
        lines.append(f"  {n_prompts:,} with {n_tokens_each:,} tokens: {reason}" + (f" ({hint})" if hint else ""))
    if len(causes) > SHOWN_REASONS:
        lines.append(f"  and {len(causes) - SHOWN_REASONS:,} other ends and reasons")
    return lines


def _with_sources(analysis: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Add to each place what the source calls its prompt."""
    for finding in analysis["findings"]:
        for place in finding["places"]:
            place["source"] = names[place["prompt"]]
    for parting in analysis["partings"]:
        for way in parting["ways"]:
            way["source"] = names[way["prompt"]]
    return analysis


def _with_query(given: SourcePrompt, query: str | None) -> Prompt:
    from prefixbank.fewshot import FewShotPrompt

    if not isinstance(given.prompt, FewShotPrompt):
        if query is not None:
            raise ConfigError(f"{given.where} is no few-shot prompt: --query is for these")
        prompt: Prompt = given.prompt
        return prompt
    wanted = next(iter(given.prompt.queries), None) if query is None else query
    if wanted is None:
        raise ConfigError(f"{given.where} is a few-shot prompt without sample queries: give --query TEXT")
    return given.prompt.render(wanted)
