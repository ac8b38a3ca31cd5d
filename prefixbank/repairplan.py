"""Hold what a repair is going to do, or did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefixbank.files import FileOnDisk
from prefixbank.foundlings import Foundling
from prefixbank.indexfile import IndexState
from prefixbank.namesfile import KeptName
from prefixbank.values import ChunkKey, ChunkRecord, Namespace

__all__ = ["RepairPlan", "RepairStep"]

Action = Literal[
    "bank-file",
    "new-index",
    "take-up",
    "hole",
    "forget",
    "correct",
    "set-aside",
    "delete",
    "name",
    "write-names",
    "recount",
    "chmod",
]


@dataclass(frozen=True, slots=True)
class RepairStep:
    """Say one thing that is done (or, in `left`, that is not) to a file, chunk key or name, and why."""

    action: Action | Literal["left"]
    subject: str
    message: str
    needs_hand: bool = False
    """Of what is left: whether it stays so until somebody does something."""


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """List what is to be done, in order, and what is left as it is; the rest is what executing it takes."""

    steps: tuple[RepairStep, ...]
    left: tuple[RepairStep, ...]
    index: IndexState
    lost: tuple[tuple[ChunkRecord, FileOnDisk | None], ...] = ()
    corrected: tuple[ChunkRecord, ...] = ()
    taken: tuple[Foundling, ...] = ()
    names: tuple[tuple[KeptName, ChunkKey | None], ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    moved: tuple[FileOnDisk, ...] = ()
    deleted: tuple[FileOnDisk, ...] = ()
    modes: tuple[tuple[Path, int], ...] = ()
    lost_chunk_tokens: int | None = None
    """What a lost or damaged `bank.json` is made anew with."""

    @property
    def ok(self) -> bool:
        """Tell whether nothing is left that needs a hand."""
        return not any(step.needs_hand for step in self.left)
