"""Own what an analysis says: plain frozen values, which `dataclasses.asdict` makes JSON of, and their text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Analysis", "PartingPoint", "Place", "PromptFinding", "Way"]


@dataclass(frozen=True, slots=True)
class Place:
    """Name a place in a prompt: its index, the token offset (None where it is unknown), and the text there."""

    prompt: int
    offset: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Way:
    """Say how prompts go on behind a parting point.

    `n_prompts` of them go this way, `prompt` is the index of one; `token_ids` are the next few and `text` is theirs.
    Both are empty for prompts that end there.
    """

    n_prompts: int
    prompt: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class PartingPoint:
    """Say where prompts part: `n_prompts` share the first `offset` tokens, and go `n_ways` ways from there.

    `ways` are those that most prompts go. `text_before` is what the prompts have in common right before. `n_tokens` is
    what the parting costs: the unique tokens behind it on all ways but the longest.
    """

    offset: int
    n_prompts: int
    n_ways: int
    n_tokens: int
    text_before: str
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class PromptFinding:
    """Say what keeps prompts from sharing more, and what to do.

    `kind` is one of `volatile-text`, `redrawn-shots`, `other-order`, `early-query`, `spelling`, `seam`,
    `template-date`, `little-shared`, `one-prompt`. `tokens_saved` are the unique tokens that this edit alone saves,
    and `tokens_saved_with_others` those that are lost where all other edits are made and this one is not: both are
    counted after rewriting the prompts that were looked at (`Analysis.n_sampled`). For `template-date` it is what a
    run on another day computes again.
    """

    kind: str
    message: str
    advice: str
    tokens_saved: int
    tokens_saved_with_others: int
    places: tuple[Place, ...]

    def as_text(self, name_of: Callable[[int], str]) -> str:
        """Return the finding as lines, with prompts called what `name_of` calls them."""
        lines = [f"* {self.message}", f"  {self.advice}"]
        if self.tokens_saved > 0 or self.tokens_saved_with_others > 0:
            saved = f"  saves {self.tokens_saved:,} token{'s' * (self.tokens_saved != 1)}"
            if self.tokens_saved_with_others > self.tokens_saved:
                saved += f"; together with the other edits {self.tokens_saved_with_others:,}"
            lines.append(saved)
        for place in self.places:
            offset = "" if place.offset is None else f", token {place.offset}"
            lines.append(f"    {name_of(place.prompt)}{offset}: {place.text!r}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Analysis:
    """Say what many prompts share, where they part, and what would share more.

    `n_unique_tokens` are the nodes of the prompts' token trie, `n_shared_tokens` all others, `share_percent` their part
    of all. `n_saved_tokens` is what a bank saves that has the shared runs: the last token of a prompt is always
    computed. `partings` are the most costly ones. `findings` come from `n_sampled` prompts, those that save most first;
    `n_sampled_tokens` is how many tokens these have, and `n_saved_by_all_edits` what all findings together save of
    them.
    """

    n_prompts: int
    n_tokens: int
    n_unique_tokens: int
    n_shared_tokens: int
    share_percent: float
    n_saved_tokens: int
    partings: tuple[PartingPoint, ...]
    findings: tuple[PromptFinding, ...]
    n_sampled: int
    n_sampled_tokens: int
    n_saved_by_all_edits: int
    summary: str

    def __str__(self) -> str:
        return self.as_text(lambda index: f"prompt {index}")

    def as_text(self, name_of: Callable[[int], str]) -> str:
        """Return the analysis as lines, with prompts called what `name_of` calls them."""
        counts = f"{self.n_prompts:,} prompts of {self.n_tokens:,} tokens: {self.share_percent} % are shared, "
        counts += f"{self.n_unique_tokens:,} are unique, a bank saves {self.n_saved_tokens:,}"
        lines = [counts, self.summary]
        if self.findings and self.n_sampled < self.n_prompts:
            lines.append(
                f"(counted in {self.n_sampled:,} prompts of {self.n_sampled_tokens:,} tokens, drawn from all of them)"
            )
        lines += [finding.as_text(name_of) for finding in self.findings]
        for parting in self.partings:
            lines.append(
                f"at token {parting.offset} {parting.n_prompts:,} prompts part {parting.n_ways:,} ways, "
                f"{parting.n_tokens:,} tokens behind; before it {parting.text_before!r}"
            )
            for way in parting.ways:
                goes_on = f"{way.token_ids[0]} {way.text!r}" if way.token_ids else "the end"
                lines.append(f"    {way.n_prompts:,} (as {name_of(way.prompt)}): {goes_on}")
        return "\n".join(lines)
