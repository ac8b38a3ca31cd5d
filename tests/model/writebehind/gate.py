"""A gate in front of the writing thread, two prompts, and looks at what became of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_lm import generate

from prefixbank import PrefixBank
from tests.model.tiny import FROM_DISK, random_ids

PROMPT = random_ids(64)
OTHER = random_ids(64, seed=2)


@dataclass
class Gate:
    """Stand in front of each store of the writing thread until it is opened."""

    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    n_stores: int = 0

    def pass_through(self) -> None:
        if threading.current_thread().name.startswith("prefixbank-write"):
            self.entered.set()
            assert self.opened.wait(20)
            self.n_stores += 1


def cold_text(llm: Any, prompt: list[int], n_tokens: int = 4) -> str:
    text: str = generate(llm.model, llm.tokenizer, prompt, max_tokens=n_tokens)
    return text


def n_stored(root: Path, prompt: list[int], llama: Any, tokenizer: Any) -> int:
    """Return how much of a prompt another process would find."""
    with PrefixBank.open(root, read_only=True, **FROM_DISK) as bank:
        n_tokens: int = bank.attach(llama, tokenizer).match([*prompt, 1]).n_tokens
        return n_tokens


def writing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefixbank-write")]
