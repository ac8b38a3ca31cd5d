"""Own what becomes of shards that no row names: which are proven, where they belong, and which are not needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from prefixbank.chunking import first_token
from prefixbank.errors import SchemaError, ShardCorruptError, ShardMissingError, StorageError
from prefixbank.eviction import GRACE_S
from prefixbank.files import FileOnDisk
from prefixbank.proving import ProvenShard, prove
from prefixbank.shards import FILE_NAME, ShardStore
from prefixbank.values import NO_SHARD, ChunkKey, ChunkRecord, Namespace

__all__ = ["SETTLING_S", "Fate", "Foundling", "Sorted", "sort_foundlings"]

SETTLING_S = 60.0
"""How old a file must be to be taken up while others may store: its row may be about to be committed."""

Fate = Literal["take-up", "set-aside", "delete", "left"]
_Owner = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Foundling:
    """Hold a shard without a row, as far as it was proven: its chunk, with the namespace that it says it is of."""

    record: ChunkRecord
    namespace: Namespace

    @property
    def owner(self) -> _Owner:
        """Return fingerprint and salt digest of the namespace."""
        return self.namespace.fingerprint, self.namespace.salt_digest


@dataclass
class Sorted:
    """Hold what is to be done: chunks to take up, parents before children (a hole has no file), and what else and why.

    `others` are paths relative to the bank root, with their fate and its reason.
    """

    taken: list[Foundling] = field(default_factory=list)
    others: list[tuple[Fate, FileOnDisk, str]] = field(default_factory=list)


def sort_foundlings(
    shards: ShardStore,
    files: Iterable[FileOnDisk],
    rows: Mapping[ChunkKey, ChunkRecord],
    namespaces: Iterable[Namespace],
    chunk_tokens: int,
    *,
    known_digests: Mapping[str, bytes],
    unproven: bool,
    settling_s: float,
    progress: Callable[[int], None] | None = None,
) -> Sorted:
    """Say what is to be done with files in `shards/` that no row names; changes nothing.

    `rows` are the chunks that stay, those of lost shards without a file. A shard whose bytes nothing proves (no seal,
    and no digest of it among `known_digests`) is taken up only where `unproven`.
    """
    done = Sorted()
    candidates: list[tuple[Foundling, FileOnDisk]] = []
    damaged: dict[ChunkKey, Foundling] = {}
    now_s = time.time()
    for file in files:
        name = file.name
        old = now_s - file.mtime_s > GRACE_S
        if not FILE_NAME.fullmatch(name) or not shards.is_in_place(file):
            if old:
                done.others.append(("set-aside", file, "it is no shard, or lies in the wrong folder"))
            continue
        if now_s - file.mtime_s < settling_s:
            done.others.append(("left", file, "it is new, and may be of a store in progress: try again in a minute"))
            continue
        try:
            proven = prove(shards, name, chunk_tokens)
        except ShardMissingError:
            continue  # deleted meanwhile
        except SchemaError as exc:
            done.others.append(("left", file, f"{exc}: upgrade prefixbank"))
            continue
        except StorageError as exc:
            done.others.append(("left", file, str(exc)))
            continue
        except ShardCorruptError as exc:
            done.others.append(("set-aside", file, str(exc)))
            continue
        finally:
            if progress is not None:
                progress(file.n_bytes)
        foundling = _foundling(proven)
        if proven.sealed == "broken":
            done.others.append(("set-aside", file, "it has other bytes than were stored"))
            damaged.setdefault(foundling.record.key, _without_file(foundling))
        elif proven.sealed == "no" and known_digests.get(name) != proven.file.digest and not unproven:
            why = (
                "an older version wrote it without a digest of its bytes: `repair --unproven` believes it all the same"
            )
            done.others.append(("left", file, why))
        else:
            candidates.append((foundling, file))
    _sort(done, candidates, damaged, rows, {(n.fingerprint, n.salt_digest): n for n in namespaces})
    return done


def _sort(
    done: Sorted,
    candidates: list[tuple[Foundling, FileOnDisk]],
    damaged: dict[ChunkKey, Foundling],
    rows: Mapping[ChunkKey, ChunkRecord],
    namespaces: dict[_Owner, Namespace],
) -> None:
    """Take up the candidates that have a place: a parent, or a root, and no chunk as good there."""
    there = dict(rows)
    owners: dict[ChunkKey, _Owner] = {}
    by_id = {namespace.id: owner for owner, namespace in namespaces.items()}
    for key, row in rows.items():
        owners[key] = by_id.get(row.namespace_id, ("", ""))
    taken: dict[ChunkKey, tuple[Foundling, FileOnDisk | None]] = {}

    def owner_fits(foundling: Foundling) -> bool:
        known = namespaces.setdefault(foundling.owner, foundling.namespace)
        return (known.root_key, known.layout) == (foundling.namespace.root_key, foundling.namespace.layout)

    def parent_of(foundling: Foundling) -> ChunkRecord | None:
        key = foundling.record.parent_key
        lost = damaged.get(key) if key is not None and key not in there else None
        # Its token ids follow from its key, so what stands on it keeps its place: a hole, which a store fills.
        if lost is not None and owner_fits(lost) and (lost.record.parent_key is None or parent_of(lost) is not None):
            there[lost.record.key], owners[lost.record.key] = lost.record, lost.owner
            taken[lost.record.key] = lost, None
        parent = there.get(key) if key is not None else None
        fits = parent is not None and parent.end == foundling.record.start and owners[parent.key] == foundling.owner
        return parent if fits else None

    # Of two files of a chunk, the one with states first.
    for foundling, file in sorted(
        candidates, key=lambda c: (c[0].record.start, not c[0].record.has_state, c[0].record.file_name or "")
    ):
        record = foundling.record
        if not owner_fits(foundling):
            done.others.append(("set-aside", file, "its layout or root key is not that of its namespace"))
            continue
        if record.parent_key is not None and parent_of(foundling) is None:
            why = "a chunk in front of it is lost: once that is stored again, a repair takes this one up"
            done.others.append(("left", file, why))
            continue
        known = there.get(record.key)
        if known is not None and (known.file_name is not None and not (record.has_state and not known.has_state)):
            _not_needed(done, file)
            continue
        if known is not None and (known.token_ids != record.token_ids or owners[record.key] != foundling.owner):
            done.others.append(("left", file, "another prefix has its key"))
            continue
        there[record.key], owners[record.key], taken[record.key] = record, foundling.owner, (foundling, file)
    for key in _covered(there, owners):
        if key in taken:
            _, covered = taken.pop(key)
            if covered is not None:
                _not_needed(done, covered)
    done.taken += sorted((foundling for foundling, _ in taken.values()), key=lambda f: f.record.start)


def _covered(there: Mapping[ChunkKey, ChunkRecord], owners: Mapping[ChunkKey, _Owner]) -> list[ChunkKey]:
    """Return the tails that a longer chunk with a file begins with: a store would have superseded them."""
    siblings: dict[object, list[ChunkRecord]] = {}
    for record in there.values():
        siblings.setdefault((owners[record.key], record.parent_key, first_token(record.token_ids)), []).append(record)
    parents = {record.parent_key for record in there.values()}
    return [
        tail.key
        for group in siblings.values()
        for tail in group
        if not tail.has_state
        and tail.key not in parents
        and any(
            other.n_tokens > tail.n_tokens and other.file_name and other.token_ids.startswith(tail.token_ids)
            for other in group
        )
    ]


def _not_needed(done: Sorted, file: FileOnDisk) -> None:
    if time.time() - file.mtime_s > GRACE_S:
        done.others.append(("delete", file, "another shard holds the same tokens"))


def _foundling(proven: ProvenShard) -> Foundling:
    said, file = proven.description, proven.file
    record = ChunkRecord(
        key=said.key,
        parent_key=said.parent_key,
        namespace_id=0,
        start=said.start,
        n_tokens=said.n_tokens,
        token_ids=said.token_ids,
        file_name=file.file_name,
        data_offset=file.data_offset,
        n_bytes=file.n_bytes,
        disk_bytes=file.disk_bytes,
        digest=file.digest,
        has_state=said.has_state,
    )
    namespace = Namespace(
        0, said.root_key, said.fingerprint, said.salt_digest, said.label, said.layout, int(proven.mtime_s)
    )
    return Foundling(record, namespace)


def _without_file(foundling: Foundling) -> Foundling:
    return Foundling(replace(foundling.record, **NO_SHARD), foundling.namespace)
