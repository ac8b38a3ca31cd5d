"""Own the way from a prompt to token ids: texts, ids, chat messages and rendered few-shot prompts alike.

A prompt is tokenised whole, then matched. A prefix tokenised alone can end in other ids than it has inside the prompt,
where its last characters may join the query's first ones; so the shared part of a few-shot prompt is what the ids of
prompts with quite different queries have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefixbank.chunking import TOKEN_BYTES, common_run, pack_token_ids, unpack_token_ids
from prefixbank.errors import PromptError
from prefixbank.fewshot import FewShotPrompt, RenderedPrompt

__all__ = ["EncodedPrompt", "Prompt", "PromptEncoder", "check_length", "context_tokens", "known_token_ids", "named"]

Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | RenderedPrompt
"""A text, token ids (a list, or an array with `tolist`), chat messages, or what `FewShotPrompt.render` returns."""

_PROBES = ("a", "the", "The", "I", "7", "(", "é")
_SHARED_KEPT = 64
_EMBEDDINGS = ("Embedding", "QuantizedEmbedding")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Hold a prompt's token ids, packed, and where its declared shared part ends (None: none was declared)."""

    token_ids: bytes
    n_shared_tokens: int | None = None


def context_tokens(model: Any) -> int | None:
    """Return how many tokens the model's positions reach, where its config says so.

    What mlx-lm takes where a config says nothing is no limit: its recurrent models have such defaults, too.
    """
    name = "max_position_embeddings"
    args = getattr(model, "args", None)
    n_tokens = getattr(args, name, None)
    if not isinstance(n_tokens, int) or n_tokens <= 0 or n_tokens == getattr(type(args), name, None):
        return None
    return n_tokens


def known_token_ids(model: Any) -> int | None:
    """Return how many token ids the largest embedding of an MLX model has rows for; None where it has no embedding.

    MLX does not check indices: an id beyond them reads whatever lies there
    (https://ml-explore.github.io/mlx/build/html/usage/indexing.html).
    """
    sizes = [
        module.weight.shape[0]
        for module in (model.modules() if hasattr(model, "modules") else ())
        if type(module).__name__ in _EMBEDDINGS
    ]
    return max(sizes, default=None)


def check_length(token_ids: bytes, n_most: int | None, what: str = "the prompt") -> None:
    """Raise `PromptError` for packed token ids that are more than a model's context holds."""
    n_tokens = len(token_ids) // TOKEN_BYTES
    if n_most is not None and n_tokens > n_most:
        raise PromptError(f"{what} has {n_tokens} tokens, but the model's context holds {n_most}")


def named(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, with its argument named in errors."""
    try:
        return function(*args)
    except PromptError as exc:
        raise PromptError(f"{what}: {exc}") from exc


class PromptEncoder:
    """Turn prompts into token ids as mlx-lm does."""

    def __init__(self, tokenizer: Any, n_known_ids: int | None = None) -> None:
        """Take an mlx-lm `TokenizerWrapper`, and how many token ids the model knows, if that is to be checked."""
        self._tokenizer = tokenizer
        self._n_known_ids = n_known_ids
        self._shared: dict[FewShotPrompt, bytes] = {}

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Return the token ids of a whole prompt.

        Raises `PromptError` for an empty or unusable one, or one with a token id that the model does not know.
        """
        encoded = self._encode(prompt)
        ids = unpack_token_ids(encoded.token_ids)
        if not ids:
            raise PromptError("the prompt is empty: at least one token is needed")
        if self._n_known_ids is not None and max(ids) >= self._n_known_ids:
            raise PromptError(f"the prompt has the token id {max(ids)}: the model knows {self._n_known_ids} ids")
        return encoded

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        if isinstance(prompt, RenderedPrompt):
            token_ids = self._encode_rendered(prompt)
            shared = self.shared_token_ids(prompt.shots)
            return EncodedPrompt(token_ids, common_run(token_ids, shared))
        if isinstance(prompt, str):
            return EncodedPrompt(self._encode_text(prompt))
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if not isinstance(prompt, Sequence):
            raise PromptError(
                f"a {type(prompt).__name__} is no prompt: give a text, token ids, chat messages or a rendered "
                "few-shot prompt"
            )
        if prompt and isinstance(prompt[0], dict):
            return EncodedPrompt(self._encode_chat(prompt))
        return EncodedPrompt(pack_token_ids(prompt))  # type: ignore[arg-type]

    def shared_token_ids(self, shots: FewShotPrompt) -> bytes:
        """Return the packed token ids that prompts of these shots have in common, whatever the query is."""
        known = self._shared.get(shots)
        if known is None:
            first, *others = (self._encode_rendered(shots.render(probe)) for probe in _PROBES)
            n_shared = min(common_run(first, other) for other in others)
            known = pack_token_ids(unpack_token_ids(first)[:n_shared])
            if len(self._shared) >= _SHARED_KEPT:
                self._shared.pop(next(iter(self._shared)))
            self._shared[shots] = known
        return known

    def example_ends(self, shots: FewShotPrompt) -> list[int]:
        """Return the token offsets behind the instructions and behind each example, as far as they are shared."""
        whole = self.shared_token_ids(shots)
        ends = set()
        for n_examples in range(len(shots.examples)):
            if n_examples or shots.instructions.strip():
                part = self.shared_token_ids(replace(shots, examples=shots.examples[:n_examples]))
                ends.add(common_run(part, whole))
        return sorted(ends - {0})

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens shown."""
        return str(self._tokenizer.decode(list(token_ids)))

    def _encode_rendered(self, prompt: RenderedPrompt) -> bytes:
        if prompt.text is not None:
            return self._encode_text(prompt.text)
        return self._encode_chat(list(prompt.messages or ()))

    def _encode_text(self, text: str) -> bytes:
        # As mlx_lm.stream_generate does: a text that brings its own first special token gets no second one.
        bos = self._tokenizer.bos_token
        add_special_tokens = bos is None or not text.startswith(bos)
        return pack_token_ids(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _encode_chat(self, messages: Sequence[Any]) -> bytes:
        if not self._tokenizer.has_chat_template:
            raise PromptError("the model's tokenizer has no chat template: give a text or token ids")
        try:
            token_ids = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        except Exception as exc:  # templates raise whatever they like
            raise PromptError(f"the chat template refuses these messages: {exc}") from exc
        return pack_token_ids(token_ids)
