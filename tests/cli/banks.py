"""Prompts, banks with content that need no model, and what a command line left behind."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prefixbank.bank import PrefixBank
from prefixbank.chunking import pack_token_ids, root_key
from prefixbank.layout import CacheLayout, LayerLayout, RowArray
from prefixbank.values import Namespace, PrefixRecord
from tests.fakekv import RowsOnly

LAYER = LayerLayout("rows", (), (RowArray("keys", "F16", 2, 8), RowArray("values", "F16", 2, 8)))
LAYOUT = CacheLayout((LAYER, LAYER))
CHUNK_TOKENS = 8
FINGERPRINTS = ("ab" * 32, "cd" * 32)
LABELS = {FINGERPRINTS[0]: "models/first", FINGERPRINTS[1]: "models/second"}

SHOTS = """
name = "lamps/v1"
instructions = "Say positive or negative."
queries = ["the wick broke"]

[[examples]]
input = "the lamp is lovely"
output = "positive"
"""
TEXT = "the lamp is lovely and the zip broke\n"


@dataclass(frozen=True)
class Outcome:
    """Hold what a command line left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Return the one JSON document that stdout must be."""
        document = json.loads(self.out)
        assert document.pop("schema") == 1
        return document  # type: ignore[no-any-return]


class Rows(RowsOnly):
    """Give out rows of bytes as a live prompt cache would."""

    def runs(self, start: int, n_tokens: int) -> Iterator[Any]:
        for number, (_, row_array) in enumerate(LAYOUT.row_arrays()):
            n_bytes = row_array.n_heads * n_tokens * row_array.row_bytes
            yield np.full(n_bytes, (start + number) % 251, np.uint8)


@dataclass
class FilledBank:
    """Make and fill a bank without a model."""

    root: Path
    last_keys: dict[str, str] = field(default_factory=dict)

    def copy(self, root: Path) -> FilledBank:
        """Return a copy of the bank at another root."""
        shutil.copytree(self.root, root)
        return FilledBank(root, dict(self.last_keys))

    def store(
        self,
        name: str | None,
        token_ids: list[int],
        *,
        fingerprint: str = FINGERPRINTS[0],
        salt: bytes = b"",
        pinned: bool = False,
        **options: Any,
    ) -> None:
        """Store token ids, all of them, under a name if it is given."""
        wanted = Namespace(
            id=0,
            root_key=root_key(fingerprint, salt),
            fingerprint=fingerprint,
            salt_digest=hashlib.sha256(salt).hexdigest() if salt else "",
            label=LABELS[fingerprint],
            layout=LAYOUT.to_json(),
            created_at=1_700_000_000,
        )
        with PrefixBank.open(self.root, chunk_tokens=CHUNK_TOKENS, durability="fast", **options) as bank:
            namespace = bank._session.namespace(wanted)
            stored = bank._session.store(namespace, pack_token_ids(token_ids), Rows())
            assert stored.last_key is not None
            if name is not None:
                self.last_keys[name] = stored.last_key.hex()
                prefix = PrefixRecord(
                    name, namespace.id, stored.last_key, len(token_ids), pinned, "5e" * 32, 1_700_000_000
                )
                bank._session.name_prefix(prefix)


def digest_of(folder: Path) -> str:
    """Return a digest of all names, modes and bytes below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_mode}\n".encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
