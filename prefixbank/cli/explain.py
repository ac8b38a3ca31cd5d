"""Own `prefixbank explain`: how far prompts match what is stored, and why no further."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prefixbank.cli import models
from prefixbank.cli.options import JsonOption, open_bank
from prefixbank.cli.output import print_document, print_text
from prefixbank.cli.sources import JsonLinesOption, SourceArgument, SourcePrompt, read_prompts
from prefixbank.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from prefixbank.prompts import Prompt


def run(
    ctx: typer.Context,
    model: models.ModelOption,
    source: SourceArgument = "-",
    query: Annotated[
        str | None,
        typer.Option("--query", metavar="TEXT", help="The query of a few-shot prompt (its first sample without)."),
    ] = None,
    adapter: models.AdapterOption = None,
    salt: models.SaltOption = "",
    kv_bits: models.KVBitsOption = None,
    kv_group_size: models.KVGroupSizeOption = None,
    precision: models.PrecisionOption = "auto",
    as_lines: JsonLinesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say how far prompts match what is stored, which token differs, and why."""
    prompts = [(given.where, _with_query(given, query)) for given in read_prompts(source, as_lines=as_lines)]
    explained = []
    with open_bank(ctx) as bank:
        llm = models.load_model(
            bank,
            model,
            adapter=adapter,
            salt=salt,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            precision=precision,
        )
        for where, prompt in prompts:
            try:
                explained.append((where, llm.explain(prompt)))
            except PromptError as exc:
                raise PromptError(f"{where}: {exc}") from exc
    if as_json:
        print_document(explanations=[{"source": where, **asdict(explanation)} for where, explanation in explained])
    else:
        print_text("\n".join(f"{where}: {explanation}" for where, explanation in explained))


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
