"""Own the token ids of choices behind a prompt, and the tree of the runs that they share; no arrays here.

Prompt and choice are tokenised as one text, since the choice's first characters may join the prompt's last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefixbank.chunking import TOKEN_BYTES, common_run, pack_token_ids, unpack_token_ids
from prefixbank.errors import ConfigError, PromptError
from prefixbank.fewshot import RenderedPrompt
from prefixbank.prompts import EncodedPrompt, Prompt, PromptEncoder, check_length

__all__ = ["Branch", "Choice", "EncodedChoices", "Normalise", "branches", "checked_choices", "encode_choices"]

Choice = str | Sequence[int]
"""A text that follows on the prompt, or token ids (a list, or an array with `tolist`)."""

Normalise = Literal["none", "tokens", "characters", "bytes"]


@dataclass(frozen=True, slots=True)
class EncodedChoices:
    """Hold what prompt and all choices begin with (`prompt`, never empty), and each choice's own token ids behind it.

    Texts of choices that were given as token ids are decoded.
    """

    prompt: EncodedPrompt
    suffixes: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]

    def check_lengths(self, n_most: int | None) -> None:
        """Raise `PromptError` for a prompt that is longer with a choice than the model's context."""
        longest = max(range(len(self.suffixes)), key=lambda index: len(self.suffixes[index]))
        whole = self.prompt.token_ids + bytes(len(self.suffixes[longest]) * TOKEN_BYTES)
        check_length(whole, n_most, f"the prompt with choice {longest}")

    def lengths(self, unit: Normalise) -> list[int]:
        """Return each choice's length in a unit; 1 for "none". Raises `ConfigError` for an unknown unit."""
        if unit == "none":
            return [1] * len(self.texts)
        if unit == "tokens":
            return [len(suffix) for suffix in self.suffixes]
        if unit == "characters":
            return [max(len(text), 1) for text in self.texts]
        if unit == "bytes":
            return [max(len(text.encode()), 1) for text in self.texts]
        raise ConfigError(f"normalise={unit!r} is unknown: use none, tokens, characters or bytes")


@dataclass(frozen=True, slots=True)
class Branch:
    """Hold a run of token ids, how many of them belong to each choice (by index), and what choices go on with."""

    token_ids: tuple[int, ...]
    n_of_choices: Mapping[int, int]
    children: tuple[Branch, ...]


def branches(suffixes: Mapping[int, Sequence[int]]) -> tuple[Branch, ...]:
    """Return the tree of token ids (none of them empty) by the index of the choice; each shared run is there once.

    A run ends where choices part, not where one ends and the others go on together.
    """
    groups: dict[int, dict[int, Sequence[int]]] = {}
    for index, suffix in suffixes.items():
        groups.setdefault(suffix[0], {})[index] = suffix
    found = []
    for group in groups.values():
        longest = max(group.values(), key=len)
        n_run = min(_n_alike(longest, suffix) for suffix in group.values())
        left = {index: suffix[n_run:] for index, suffix in group.items() if len(suffix) > n_run}
        n_of_choices = {index: min(len(suffix), n_run) for index, suffix in group.items()}
        found.append(Branch(tuple(longest[:n_run]), n_of_choices, branches(left)))
    return tuple(found)


def checked_choices(choices: Iterable[Choice]) -> tuple[str | tuple[int, ...], ...]:
    """Return choices as texts and tuples of token ids. Raises `PromptError` that names the index of a bad one."""
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise PromptError(f"choices must be a list of texts or of token ids, not a {type(choices).__name__}")
    checked: list[str | tuple[int, ...]] = []
    indices: dict[str | tuple[int, ...], int] = {}
    for index, choice in enumerate(choices):
        if not isinstance(choice, str):
            given: Any = choice.tolist() if hasattr(choice, "tolist") else choice
            if not isinstance(given, Sequence):
                raise PromptError(f"choice {index} is a {type(choice).__name__}: give a text or token ids")
            try:
                choice = tuple(unpack_token_ids(pack_token_ids(given)))
            except PromptError as exc:
                raise PromptError(f"choice {index}: {exc}") from exc
        if not choice:
            raise PromptError(f"choice {index} is empty: at least one token is needed")
        if choice in indices:
            raise PromptError(f"choice {index} is the same as choice {indices[choice]}")
        indices[choice] = index
        checked.append(choice)
    if not checked:
        raise PromptError("there are no choices: give at least one")
    return tuple(checked)


def encode_choices(
    encoder: PromptEncoder, tokenizer: Any, prompt: Prompt, choices: Sequence[str | tuple[int, ...]]
) -> EncodedChoices:
    """Split prompt and choices where the token ids of the prompt and of all `prompt + choice` part.

    A text is tokenised together with the prompt: behind a chat, together with the text that the chat template renders,
    its generation prompt included. Behind token ids it is tokenised alone, without special tokens. A choice of token
    ids is appended as it is. Raises `PromptError`.
    """
    encoded = encoder.encode(prompt)
    join = _joiner(encoder, tokenizer, prompt, encoded.token_ids)
    wholes = [
        join(choice) if isinstance(choice, str) else encoded.token_ids + pack_token_ids(choice) for choice in choices
    ]
    runs = [common_run(encoded.token_ids, whole) for whole in wholes]
    n_shared = min(runs)
    if n_shared == 0:
        raise PromptError(
            f"choice {runs.index(0)} joins the prompt's first token, so that nothing stands before it: give a longer "
            "prompt"
        )
    suffixes: dict[bytes, int] = {}
    for index, whole in enumerate(wholes):
        suffix = whole[n_shared * TOKEN_BYTES :]
        if not suffix:
            raise PromptError(f"choice {index} adds no token to the prompt")
        if suffix in suffixes:
            raise PromptError(f"choice {index} has the same token ids as choice {suffixes[suffix]}")
        suffixes[suffix] = index
    declared = encoded.n_shared_tokens
    return EncodedChoices(
        EncodedPrompt(
            encoded.token_ids[: n_shared * TOKEN_BYTES], None if declared is None else min(declared, n_shared)
        ),
        tuple(tuple(unpack_token_ids(suffix)) for suffix in suffixes),
        tuple(choice if isinstance(choice, str) else encoder.decode(choice) for choice in choices),
    )


def _joiner(encoder: PromptEncoder, tokenizer: Any, prompt: Prompt, prompt_ids: bytes) -> Callable[[str], bytes]:
    """Return what gives the packed token ids of prompt and a text behind it."""
    text = prompt.text if isinstance(prompt, RenderedPrompt) else prompt
    if isinstance(text, str):
        before = text
        return lambda choice: encoder.encode(before + choice).token_ids

    def alone(text: str) -> bytes:
        return pack_token_ids(tokenizer.encode(text, add_special_tokens=False))

    messages: Any = prompt.messages if isinstance(prompt, RenderedPrompt) else prompt
    if isinstance(messages, Sequence) and isinstance(messages[0], dict):
        rendered = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        if isinstance(rendered, str) and alone(rendered) == prompt_ids:
            return lambda choice: alone(rendered + choice)
    return lambda choice: prompt_ids + alone(choice)


def _n_alike(longest: Sequence[int], other: Sequence[int]) -> int:
    """Return where another run parts from the longest one; behind its end it does not."""
    return next((n for n, (a, b) in enumerate(zip(longest, other, strict=False)) if a != b), len(longest))
