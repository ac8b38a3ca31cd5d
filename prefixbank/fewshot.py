"""Own few-shot prompts: instructions and examples, rendered with a query as text or chat messages; no tokens here."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from prefixbank.errors import PromptError
from prefixbank.variables import SHOTS_KEY, Value, Variables, variation_name

__all__ = ["Boundaries", "ChatRoles", "Example", "FewShotPrompt", "RenderedPrompt", "read_toml"]

Boundaries = Literal["end", "examples"]

_PLAIN_LABELS = ("Input: ", "Output: ")
_CHAT_LABELS = ("", "")
_INPUT, _OUTPUT = "{input}", "{output}"
_TYPES: dict[str, type] = {"chat": bool, "examples": list, "queries": list, "roles": Mapping, "variables": Mapping}
"""What the keys of a file hold; all others hold texts."""


@dataclass(frozen=True, slots=True)
class Example:
    """Hold one worked example."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class ChatRoles:
    """Name the roles of a chat's messages.

    For models without a system role, `instructions="user"` puts the instructions in front of the first input, in one
    message with it.
    """

    instructions: str = "system"
    input: str = "user"
    output: str = "assistant"

    def __post_init__(self) -> None:
        for key, role in asdict(self).items():
            if not isinstance(role, str) or not role.strip():
                raise PromptError(f"the role of {key} is no name: {role!r}")


_USUAL_ROLES = ChatRoles()


@dataclass(frozen=True, slots=True)
class FewShotPrompt:
    """Hold what all queries share: instructions and worked examples.

    As plain text it reads::

        {instructions}

        {input_label}{example.input}
        {output_label}{example.output}

        {input_label}{query}
        {output_label}

    With `template` each example reads as it says, as in `"Q: {input}\\nA: {output}\\n\\n"`, and the query as it says up
    to `{output}`; the instructions and a blank line stay in front.
    With `chat=True` the instructions are the system message, and inputs and outputs those of user and assistant, for
    the tokenizer's chat template; `roles` names other roles. The labels are `"Input: "` and `"Output: "` unless given;
    in a chat they are empty.
    `examples` and `queries` may be given as lists; they are kept as tuples.
    `name` is what `warm` calls the prefix unless told otherwise; `queries` are samples, for trying the prompt out.
    `boundaries` says where models with recurrent layers can go on from once it is warmed: at the `"end"` of the
    examples, or also behind each of the `"examples"`.

    Raises `PromptError` for a prompt without instructions and examples, and for what does not go together.
    """

    instructions: str = ""
    examples: Sequence[Example] = ()
    chat: bool = False
    input_label: str | None = None
    output_label: str | None = None
    name: str = ""
    queries: Sequence[str] = ()
    template: str | None = None
    roles: ChatRoles = _USUAL_ROLES
    boundaries: Boundaries = "end"

    def __post_init__(self) -> None:
        object.__setattr__(self, "examples", tuple(self.examples))
        object.__setattr__(self, "queries", tuple(self.queries))
        if not self.instructions.strip() and not self.examples:
            raise PromptError("a few-shot prompt needs instructions, examples, or both")
        for number, example in enumerate(self.examples, 1):
            if not isinstance(example, Example):
                raise PromptError(f"example {number} is a {type(example).__name__}, not an Example")
        if self.template is not None:
            _require_template(self.template)
            if self.chat or self.input_label is not None or self.output_label is not None:
                raise PromptError("a template takes the place of chat and labels: leave those out, or the template")
        if not isinstance(self.roles, ChatRoles):
            raise PromptError(f"roles is a {type(self.roles).__name__}, not ChatRoles")
        if self.roles != _USUAL_ROLES and not self.chat:
            raise PromptError("roles are those of a chat: set chat = true too")
        if self.boundaries not in ("end", "examples"):
            raise PromptError(f"boundaries is {self.boundaries!r}: use 'end' or 'examples'")

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], *, variables: Mapping[str, Value] | None = None) -> Self:
        """Read a prompt from a TOML file with this class's fields as keys and `[[examples]]` tables.

        A table `[variables]` gives variables their values, and `variables` others in their place; in instructions,
        examples, template and labels `{{name}}` stands for them. Raises `PromptError` that names the file, and the
        line, key or variable that is wrong.
        """
        return cls.from_mapping(read_toml(path), str(path), variables=variables)

    @classmethod
    def from_mapping(
        cls, table: Mapping[str, Any], where: str, *, variables: Mapping[str, Value] | None = None, name: str = ""
    ) -> Self:
        """Make a prompt of plain values, as TOML and JSON give them; `where` is named in errors.

        `variables` are those of `from_toml`; `name` is the prompt's name where the table has none.
        """
        known = {field.name for field in fields(cls)} | {"variables"}
        for key, value in table.items():
            if key not in known:
                raise PromptError(f"{where}: unknown key {key!r} (known: {', '.join(sorted(known))})")
            if not isinstance(value, _TYPES.get(key, str)):
                raise PromptError(f"{where}: {key} has the wrong type {type(value).__name__}")
        if not all(isinstance(query, str) for query in table.get("queries", [])):
            raise PromptError(f"{where}: queries must be texts")
        texts = Variables(table.get("variables"), variables or {}, where)
        values = {key: value for key, value in table.items() if key != "variables"}
        for key in ("instructions", "template", "input_label", "output_label"):
            if key in values:
                values[key] = texts.fill(values[key])
        values["instructions"] = values.get("instructions", "").strip()
        values["examples"] = tuple(
            _example(example, f"{where}: example {number}", texts)
            for number, example in enumerate(table.get("examples", []), 1)
        )
        texts.require_known()
        values["name"] = variation_name(table.get("name") or name, texts.changed)
        try:
            if "roles" in values:
                values["roles"] = _roles(values["roles"])
            return cls(**values)
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
        without = {"name", "queries", "boundaries"}
        # What is as it always was is left out: digests that banks hold stay true.
        without |= {"template"} if self.template is None else set()
        without |= {"roles"} if self.roles == _USUAL_ROLES else set()
        shared = {key: value for key, value in asdict(self).items() if key not in without}
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()

    def first(self, k: int) -> Self:
        """Return the prompt with its first `k` examples only; its name says so (`mood/v1@k=4`).

        What is stored of the whole prompt serves it too. Raises `PromptError` for more examples than there are.
        """
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= len(self.examples):
            raise PromptError(f"k={k!r} is out of range: {self.name or 'the prompt'} has {len(self.examples)} examples")
        if k == len(self.examples):
            return self
        return replace(self, examples=self.examples[:k], name=variation_name(self.name, {SHOTS_KEY: k}))

    def render(self, query: str, *, k: int | None = None) -> RenderedPrompt:
        """Return the whole prompt for one query; with `k`, of the first k examples only. Raises as `first` does."""
        if k is not None:
            return self.first(k).render(query)
        if self.chat:
            return RenderedPrompt(self, query, None, self._messages(query))
        before_input, before_output = self.labels
        between, behind = f"\n{before_output}", "\n\n"
        # Without the label's last blank: tokenizers join it to the word that the model is to write.
        end = f"\n{before_output.rstrip()}"
        if self.template is not None:
            before_input, _, rest = self.template.partition(_INPUT)
            between, _, behind = rest.partition(_OUTPUT)
            end = between.rstrip(" \t")  # a line break stays: the answer begins on its own line
        parts = [f"{self.instructions}\n\n"] if self.instructions else []
        parts += [f"{before_input}{e.input}{between}{e.output}{behind}" for e in self.examples]
        parts.append(f"{before_input}{query}{end}")
        return RenderedPrompt(self, query, "".join(parts), None)

    def _messages(self, query: str) -> tuple[dict[str, str], ...]:
        before_input, before_output = self.labels
        turns: list[dict[str, str]] = []
        head = ""
        if self.instructions and self.roles.instructions == self.roles.input:
            # Chat templates refuse two messages of one role in a row.
            head = f"{self.instructions}\n\n"
        elif self.instructions:
            turns.append({"role": self.roles.instructions, "content": self.instructions})
        for example in self.examples:
            turns.append({"role": self.roles.input, "content": head + before_input + example.input})
            turns.append({"role": self.roles.output, "content": before_output + example.output})
            head = ""
        turns.append({"role": self.roles.input, "content": head + before_input + query})
        return tuple(turns)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Hold a few-shot prompt with its query: `text` if it is plain, `messages` if it is a chat."""

    shots: FewShotPrompt
    query: str
    text: str | None
    messages: tuple[dict[str, str], ...] | None

    def __str__(self) -> str:
        return self.text if self.text is not None else json.dumps(self.messages, ensure_ascii=False)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises `PromptError` that names the file and the line."""
    text = ""
    try:
        text = Path(path).read_bytes().decode()
        return tomllib.loads(text)
    except OSError as exc:
        raise PromptError(f"{path} can't be read: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:  # broken TOML, no UTF-8; a null character in the path
        last_line = f"at the end of the file, line {max(len(text.splitlines()), 1)}"
        raise PromptError(f"{path} is no valid TOML: {str(exc).replace('at end of document', last_line)}") from exc


def _example(value: object, where: str, texts: Variables) -> Example:
    if isinstance(value, Mapping) and value.keys() == {"input", "output"}:
        given: Iterable[object] = value.values()
        if all(isinstance(text, str) for text in given):
            return Example(texts.fill(value["input"]), texts.fill(value["output"]))
    raise PromptError(f"{where} must have the texts input and output, and nothing else")


def _roles(table: Mapping[str, Any]) -> ChatRoles:
    known = [field.name for field in fields(ChatRoles)]
    for key in table:
        if key not in known:
            raise PromptError(f"unknown key {key!r} in roles (known: {', '.join(known)})")
    return ChatRoles(**table)


def _require_template(template: str) -> None:
    if template.count(_INPUT) != 1 or template.count(_OUTPUT) != 1 or _INPUT not in template.partition(_OUTPUT)[0]:
        raise PromptError(f"the template needs {_INPUT} once, and behind it {_OUTPUT} once")
