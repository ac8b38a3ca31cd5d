"""Own the memo of content digests of weights files."""

from __future__ import annotations

from dataclasses import asdict

import sqlalchemy as sa

from prefixbank.index.soundness import is_digest
from prefixbank.schema import weights_digests
from prefixbank.values import WeightsFile

__all__ = ["recall", "remember"]


def recall(tx: sa.Connection, file: WeightsFile) -> str | None:
    """Return the digest of the file in exactly this state, or None; a damaged one is none."""
    conditions = [weights_digests.c[name] == value for name, value in asdict(file).items()]
    digest = tx.execute(sa.select(weights_digests.c.digest).where(*conditions)).scalar_one_or_none()
    return digest if isinstance(digest, str) and is_digest(digest) else None


def remember(tx: sa.Connection, digests: dict[WeightsFile, str]) -> None:
    """Keep the digests of files, in place of those of earlier states of the same paths."""
    for file, digest in digests.items():
        tx.execute(sa.delete(weights_digests).where(weights_digests.c.path == file.path))
        tx.execute(sa.insert(weights_digests).values(**asdict(file), digest=digest))
