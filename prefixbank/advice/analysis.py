"""Own the analysis of many prompts: counting them in the trie, trying edits on a sample, keeping what saves tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prefixbank.advice import placement, seams, shots, spelling, templates, volatile
from prefixbank.advice.documents import Document, document_of
from prefixbank.advice.edits import Documents, Edit, Seen
from prefixbank.advice.partings import partings
from prefixbank.advice.results import Analysis, Place, PromptFinding
from prefixbank.chunking import TOKEN_BYTES, common_run, unpack_token_ids
from prefixbank.errors import PromptError
from prefixbank.fewshot import RenderedPrompt
from prefixbank.prompts import PromptEncoder
from prefixbank.tokentrie import n_unique_tokens, shared_runs

if TYPE_CHECKING:
    from prefixbank.prompts import Prompt

__all__ = ["Analyzer", "analyze", "tools_of"]

Encode = Callable[["Prompt"], bytes]
Decode = Callable[[Sequence[int]], str]

N_SAMPLED = 256
"""How many prompts are rewritten: enough that what most prompts have shows, and a second for each edit."""
N_ALWAYS = 8
"""How many of these are the first ones, where a prefix on its own is likely to stand."""
MOST_SAMPLED_TOKENS = 500_000
_LEAST_SAVED = 16
_LEAST_SAVED_SHARE = 0.01
_WORTH_A_BANK = 16  # tokens a prompt: `generate_many` folds shorter runs
_MOST_VOLATILE = 3
_MOST_ROUNDS = 4


def analyze(prompts: Iterable[Prompt], encode: Encode, decode: Decode, template: str | None = None) -> Analysis:
    """Return what prompts share, where they part, and what would share more.

    Args:
        prompts: whole prompts of any kind, mixed as they come; two at least for anything to be compared.
        encode: returns the packed token ids of a prompt.
        decode: returns the text of token ids.
        template: the text of the chat template, if there is one: dates in it are fixed ones.

    Raises `PromptError` that names a bad prompt's index, or says that there is none.
    """
    if isinstance(prompts, str | bytes | dict | RenderedPrompt) or not isinstance(prompts, Iterable):
        raise PromptError("analyze takes several prompts: put them into a list")
    analyzer = Analyzer(encode, decode, template)
    for index, prompt in enumerate(prompts):
        try:
            analyzer.add(prompt)
        except PromptError as exc:
            raise PromptError(f"prompt {index}: {exc}") from exc
    return analyzer.analysis()


def tools_of(tokenizer: Any) -> tuple[Encode, Decode, str | None]:
    """Return what `analyze` needs of an mlx-lm tokenizer: it encodes prompts as generating does."""
    encoder = PromptEncoder(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    return lambda prompt: encoder.encode(prompt).token_ids, encoder.decode, None if template is None else str(template)


class Analyzer:
    """Take prompts one by one and analyse those that were taken. Keeps all token ids, and a sample of the prompts."""

    def __init__(self, encode: Encode, decode: Decode, template: str | None = None) -> None:
        """Take what `analyze` takes."""
        self._encode = encode
        self._decode = decode
        self._template = template
        self._packed: list[bytes] = []
        self._sample: list[tuple[int, Prompt | None]] = []  # None: the prompt is its token ids
        self._random = random.Random(0)  # noqa: S311 - equal prompts get equal analyses

    def __len__(self) -> int:
        return len(self._packed)

    def add(self, prompt: Prompt) -> bytes:
        """Take a prompt and return its packed token ids. Raises `PromptError`, and goes on without the prompt then."""
        plain: Prompt = prompt
        if isinstance(prompt, RenderedPrompt):  # where its shots end, the trie knows better
            plain = prompt.text if prompt.text is not None else list(prompt.messages or ())
        try:
            token_ids = self._encode(plain)
        except PromptError:
            raise
        except Exception as exc:  # tokenizers raise whatever they like
            raise PromptError(f"it can't be encoded: {exc}") from exc
        index = len(self._packed)
        self._packed.append(token_ids)
        kept = (index, prompt if _has_text(prompt) else None)
        if len(self._sample) < N_SAMPLED:
            self._sample.append(kept)
        elif (place := self._random.randrange(N_ALWAYS, index + 1)) < N_SAMPLED:
            self._sample[place] = kept
        return token_ids

    def analysis(self) -> Analysis:
        """Return the analysis of the prompts so far. Raises `PromptError` if there are none."""
        if not self._packed:
            raise PromptError("there is no prompt to analyse")
        order = sorted(self._packed)
        n_tokens = sum(len(prompt) for prompt in order) // TOKEN_BYTES
        runs = [(common_run(one, other), len(other) // TOKEN_BYTES) for one, other in pairwise(order)]
        n_shared = sum(n_common for n_common, _ in runs)
        n_saved = sum(min(n_common, n - 1) for n_common, n in runs)
        sample = self._sampled()
        n_sampled_tokens = sum(len(self._packed[index]) for index, _ in sample) // TOKEN_BYTES
        findings, n_saved_by_all = self._findings(sample, n_sampled_tokens)
        if not n_saved_by_all and n_saved < _WORTH_A_BANK * max(len(order) - 1, 1):
            findings.append(_little_shared(len(order), n_tokens, n_saved))
        findings.sort(key=lambda finding: (-finding.tokens_saved, -finding.tokens_saved_with_others))
        return Analysis(
            n_prompts=len(order),
            n_tokens=n_tokens,
            n_unique_tokens=n_tokens - n_shared,
            n_shared_tokens=n_shared,
            share_percent=round(100 * n_shared / n_tokens, 1),
            n_saved_tokens=n_saved,
            partings=tuple(partings(shared_runs(self._packed), self._packed, self._decode)),
            findings=tuple(findings),
            n_sampled=len(sample),
            n_sampled_tokens=n_sampled_tokens,
            n_saved_by_all_edits=n_saved_by_all,
            summary=_summary(findings, n_saved_by_all, n_sampled_tokens),
        )

    def _sampled(self) -> list[tuple[int, Prompt | None]]:
        """Return the sample, in order, thinned where its prompts are very long."""
        sample = sorted(self._sample, key=lambda kept: kept[0])
        n_tokens = sum(len(self._packed[index]) for index, _ in sample) // TOKEN_BYTES
        step = -(-n_tokens // MOST_SAMPLED_TOKENS)
        return sample if len(sample) // step < N_ALWAYS else sample[::step]

    def _findings(self, sample: Sequence[tuple[int, Prompt | None]], n_tokens: int) -> tuple[list[PromptFinding], int]:
        """Return what was found in the sample, and how many tokens all edits save together."""
        given = [self._packed[index] for index, _ in sample]
        documents = [
            document_of(index, self._decode(unpack_token_ids(ids)) if prompt is None else _as_sequence(prompt))
            for (index, prompt), ids in zip(sample, given, strict=True)
        ]
        # The ids of a text that was decoded may not be those that it was decoded from: compare like with like.
        encoded = [
            ids if prompt is not None else self._encode_document(document)
            for (_, prompt), ids, document in zip(sample, given, documents, strict=True)
        ]
        least = max(_LEAST_SAVED, int(_LEAST_SAVED_SHARE * n_tokens))
        trial = Trial(documents, encoded, self._encode_document, least)
        counted, n_saved = _worthwhile(trial, documents)
        findings = [self._finding(edit, alone, together) for edit, alone, together in counted]
        other_ids = seams.find_other_ids(documents, given, encoded, self._decode)
        n_ids = n_unique_tokens(given) - n_unique_tokens(encoded)
        if other_ids is not None and n_ids >= least:
            findings.append(self._finding(other_ids, n_ids, n_ids))
            n_saved += n_ids
        prefixes = seams.find_prefixes(documents, encoded, self._encode, self._decode)
        if prefixes is not None and (n_cut := trial.saved_by(prefixes)) is not None and n_cut > 0:
            findings.append(self._finding(prefixes, n_cut, n_cut))
            n_saved += n_cut
        dated = templates.find(documents, given, self._template, self._decode, self._offset_of)
        return [*findings, *([dated] if dated else [])], n_saved

    def _encode_document(self, document: Document) -> bytes:
        return self._encode(document.prompt)

    def _finding(self, edit: Edit, alone: int, together: int) -> PromptFinding:
        places = tuple(map(self._place, edit.seen))
        return PromptFinding(edit.kind, edit.message, edit.advice, alone, together, places)

    def _place(self, seen: Seen) -> Place:
        offset = self._offset_of(self._packed[seen.prompt], seen.text) if seen.offset is None else seen.offset
        return Place(seen.prompt, offset, seen.text)

    def _offset_of(self, packed: bytes, text: str) -> int | None:
        """Return the offset of the token in which a text begins, None where the tokens' text has it nowhere."""
        token_ids = unpack_token_ids(packed)
        wanted = text.removesuffix("...").strip("\n").split("\n", 1)[0]
        at = self._decode(token_ids).find(wanted) if wanted.strip() else -1
        if at < 0:
            return None
        low, high = 0, len(token_ids)  # the text of the first `low` tokens ends at `at` or before
        while high - low > 1:
            middle = (low + high) // 2
            if len(self._decode(token_ids[:middle])) <= at:
                low = middle
            else:
                high = middle
        return low


class Trial:
    """Try edits on documents and count the unique tokens of what they make."""

    def __init__(
        self, documents: Documents, encoded: Sequence[bytes], encode: Callable[[Document], bytes], least_saved: int
    ) -> None:
        """Take the documents and their packed token ids; an edit that saves fewer tokens than `least_saved` is none."""
        self._least_saved = least_saved
        self._documents = documents
        self._encoded = encoded
        self._encode = encode
        self._n_unique = n_unique_tokens(encoded)

    def saved_by(self, *edits: Edit) -> int | None:
        """Return how many unique tokens the edits save together, None where what they make can't be encoded."""
        documents: Documents = self._documents
        for edit in edits:
            documents = edit.rewrite(documents)
        try:
            encoded = [
                before if document == original else self._encode(document)
                for document, original, before in zip(documents, self._documents, self._encoded, strict=True)
            ]
        except PromptError:
            return None  # a chat template that refuses it
        return self._n_unique - n_unique_tokens(encoded)

    def count(self, edits: Sequence[Edit]) -> tuple[list[tuple[Edit, int, int]], int]:
        """Return edits that save tokens, each with what it saves alone and on top of the others, and what all save."""
        alone = [(edit, saved) for edit in edits if (saved := self.saved_by(edit)) is not None]
        if len(alone) < 2:
            kept = [(edit, saved, saved) for edit, saved in alone if self._is_worth(edit, saved)]
            return kept, sum(saved for _, saved, _ in kept)
        n_all = self.saved_by(*(edit for edit, _ in alone)) or 0
        counted = []
        for edit, saved in alone:
            n_others = self.saved_by(*(other for other, _ in alone if other is not edit)) or 0
            if self._is_worth(edit, max(saved, n_all - n_others)):
                counted.append((edit, saved, n_all - n_others))
        if len(counted) < len(alone):
            n_all = self.saved_by(*(edit for edit, _, _ in counted)) or 0 if counted else 0
        if len(counted) == 1:
            counted = [(edit, saved, saved) for edit, saved, _ in counted]
        return counted, n_all

    def _is_worth(self, edit: Edit, n_saved: int) -> bool:
        return n_saved >= max(self._least_saved, edit.least_saved_a_prompt * (len(self._documents) - 1))


def _worthwhile(trial: Trial, documents: Documents) -> tuple[list[tuple[Edit, int, int]], int]:
    """Return the edits that save tokens, as `Trial.count` does.

    What others that save nothing did to the documents must not make them look otherwise: it is looked again without.
    """
    worthless: set[str] = set()
    for _ in range(_MOST_ROUNDS):
        edits = list(_candidates(documents, worthless))
        counted, n_saved = trial.count(edits)
        kept = {edit.message for edit, _, _ in counted}
        if len(counted) == len(edits) or len(edits) == 1:
            return counted, n_saved
        worthless |= {edit.message for edit in edits} - kept
    return counted, n_saved


def _candidates(documents: Documents, worthless: set[str]) -> Iterator[Edit]:
    """Yield edits, each found in the documents as those before it have changed them: one fault hides another."""
    for find in (spelling.find, *[volatile.find] * _MOST_VOLATILE, placement.find):
        edit = find(documents)
        if edit is not None and edit.message not in worthless:
            changed = edit.rewrite(documents)
            if changed != documents:
                documents = changed
                yield edit
    yield from (edit for edit in shots.find(documents) if edit.message not in worthless)


def _has_text(prompt: Prompt) -> bool:
    if isinstance(prompt, str | RenderedPrompt):
        return True
    return not hasattr(prompt, "tolist") and bool(prompt) and isinstance(prompt[0], dict)


def _as_sequence(prompt: Prompt) -> str | Sequence[object] | RenderedPrompt:
    return prompt


def _little_shared(n_prompts: int, n_tokens: int, n_saved: int) -> PromptFinding:
    if n_prompts == 1:
        return PromptFinding(
            "one-prompt", "There is only one prompt: nothing to compare it with.", "Give two or more.", 0, 0, ()
        )
    message = (
        f"A bank won't help with these prompts: they share {n_saved:,} of {n_tokens:,} tokens, "
        f"{n_saved / (n_prompts - 1):.1f} a prompt."
    )
    advice = f"It pays from some {_WORTH_A_BANK} shared tokens a prompt on, and where they stand in front."
    return PromptFinding("little-shared", message, advice, 0, 0, ())


def _summary(findings: Sequence[PromptFinding], n_saved: int, n_tokens: int) -> str:
    if n_saved:
        return f"With the advice followed, {n_saved:,} of {n_tokens:,} tokens more are shared."
    if any(finding.kind in ("little-shared", "one-prompt") for finding in findings):
        return "No order or edit was found that shares more."
    return "The prompts are well shared: no order or edit was found that shares more."
