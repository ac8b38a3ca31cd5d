"""Own few-shot prompts: instructions and examples, rendered with a query as text or chat messages; no tokens here."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from prefixbank.errors import PromptError

__all__ = ["Example", "FewShotPrompt", "RenderedPrompt"]

_PLAIN_LABELS = ("Input: ", "Output: ")
_CHAT_LABELS = ("", "")


@dataclass(frozen=True, slots=True)
class Example:
    """Hold one worked example."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class FewShotPrompt:
    """Hold what all queries share: instructions and worked examples.

    As plain text it reads::

        {instructions}

        {input_label}{example.input}
        {output_label}{example.output}

        {input_label}{query}
        {output_label}

    With `chat=True` the instructions are the system message, and inputs and outputs those of user and assistant, for
    the tokenizer's chat template. The labels are `"Input: "` and `"Output: "` unless given; in a chat they are empty.
    `examples` and `queries` may be given as lists; they are kept as tuples.
    `name` is what `warm` calls the prefix unless told otherwise; `queries` are samples, for trying the prompt out.

    Raises `PromptError` for a prompt without instructions and examples.
    """

    instructions: str = ""
    examples: Sequence[Example] = ()
    chat: bool = False
    input_label: str | None = None
    output_label: str | None = None
    name: str = ""
    queries: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "examples", tuple(self.examples))
        object.__setattr__(self, "queries", tuple(self.queries))
        if not self.instructions.strip() and not self.examples:
            raise PromptError("a few-shot prompt needs instructions, examples, or both")
        for number, example in enumerate(self.examples, 1):
            if not isinstance(example, Example):
                raise PromptError(f"example {number} is a {type(example).__name__}, not an Example")

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Read a prompt from a TOML file with this class's fields as keys and `[[examples]]` tables.

        Raises `PromptError` that names the file, and the line or key that is wrong.
        """
        try:
            with Path(path).open("rb") as file:
                table = tomllib.load(file)
        except OSError as exc:
            raise PromptError(f"{path} can't be read: {exc.strerror or exc}") from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise PromptError(f"{path} is no valid TOML: {exc}") from exc
        return cls.from_mapping(table, str(path))

    @classmethod
    def from_mapping(cls, table: Mapping[str, Any], where: str) -> Self:
        """Make a prompt of plain values, as TOML and JSON give them; `where` is named in errors."""
        types: dict[str, type | tuple[type, ...]] = {
            "chat": bool,
            "examples": list,
            "queries": list,
        }
        known = {field.name for field in fields(cls)}
        for key, value in table.items():
            if key not in known:
                raise PromptError(f"{where}: unknown key {key!r} (known: {', '.join(sorted(known))})")
            if not isinstance(value, types.get(key, str)):
                raise PromptError(f"{where}: {key} has the wrong type {type(value).__name__}")
        examples = [
            _example(example, f"{where}: example {number}")
            for number, example in enumerate(table.get("examples", []), 1)
        ]
        if not all(isinstance(query, str) for query in table.get("queries", [])):
            raise PromptError(f"{where}: queries must be texts")
        values = dict(table) | {"instructions": str(table.get("instructions", "")).strip()}
        try:
            return cls(**{**values, "examples": tuple(examples)})
        except PromptError as exc:
            raise PromptError(f"{where}: {exc}") from exc

    @property
    def labels(self) -> tuple[str, str]:
        """Return what stands before an input and before an output."""
        defaults = _CHAT_LABELS if self.chat else _PLAIN_LABELS
        given = (self.input_label, self.output_label)
        return (
            defaults[0] if given[0] is None else given[0],
            defaults[1] if given[1] is None else given[1],
        )

    @property
    def source_digest(self) -> str:
        """Return the SHA-256, in hex, of all that the shared part is made of."""
        shared = {key: value for key, value in asdict(self).items() if key not in ("name", "queries")}
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()

    def render(self, query: str) -> RenderedPrompt:
        """Return the whole prompt for one query."""
        before_input, before_output = self.labels
        if self.chat:
            turns: list[dict[str, str]] = []
            if self.instructions:
                turns.append({"role": "system", "content": self.instructions})
            for example in self.examples:
                turns.append({"role": "user", "content": before_input + example.input})
                turns.append({"role": "assistant", "content": before_output + example.output})
            turns.append({"role": "user", "content": before_input + query})
            return RenderedPrompt(self, query, None, tuple(turns))
        parts = [f"{self.instructions}\n\n"] if self.instructions else []
        parts += [f"{before_input}{e.input}\n{before_output}{e.output}\n\n" for e in self.examples]
        # Without the label's last blank: tokenizers join it to the word that the model is to write.
        parts.append(f"{before_input}{query}\n{before_output.rstrip()}")
        return RenderedPrompt(self, query, "".join(parts), None)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Hold a few-shot prompt with its query: `text` if it is plain, `messages` if it is a chat."""

    shots: FewShotPrompt
    query: str
    text: str | None
    messages: tuple[dict[str, str], ...] | None

    def __str__(self) -> str:
        return self.text if self.text is not None else json.dumps(self.messages, ensure_ascii=False)


def _example(value: object, where: str) -> Example:
    if isinstance(value, Mapping) and value.keys() == {"input", "output"}:
        given: Iterable[object] = value.values()
        if all(isinstance(text, str) for text in given):
            return Example(**value)
    raise PromptError(f"{where} must have the texts input and output, and nothing else")
