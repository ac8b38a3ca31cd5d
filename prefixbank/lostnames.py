"""Own which names a repair gives: those of the names file, or what a broken index still tells of them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from prefixbank import namesfile
from prefixbank.chunking import root_key
from prefixbank.errors import IndexCorruptError
from prefixbank.foundlings import Foundling
from prefixbank.namesfile import NAMES_FILE, KeptName, KeptNames, find_end
from prefixbank.repairplan import RepairStep
from prefixbank.values import ChunkKey, ChunkRecord, Namespace

__all__ = ["plan_names"]


def plan_names(
    root: Path,
    in_index: KeptNames,
    saved: KeptNames,
    rows: dict[ChunkKey, ChunkRecord],
    taken: list[Foundling],
    namespaces: list[Namespace],
    steps: list[RepairStep],
) -> tuple[tuple[tuple[KeptName, ChunkKey | None], ...], tuple[Namespace, ...]]:
    """Return the names to give, each with the chunk that it ends in, and the namespaces that they are of.

    `in_index` are the names that a sound index has, `saved` those that a broken one still tells; `rows` the chunks that
    stay and `taken` those that are taken up. What is to be done is added to `steps`.
    """
    try:
        kept = namesfile.read(root)
    except IndexCorruptError as exc:
        steps.append(RepairStep("set-aside", NAMES_FILE, str(exc)))
        kept = None
    # The file has every name that was acknowledged; a broken index may tell others that nobody gave.
    wanted = kept or _believable(saved, taken)
    owners = {(n.fingerprint, n.salt_digest): n for n in (*wanted.namespaces.values(), *namespaces)}
    owners |= {f.owner: f.namespace for f in taken if f.owner not in owners}
    owner_ids = {n.id: (n.fingerprint, n.salt_digest) for n in namespaces}
    # By owner, parent and start, as a name says where it ends.
    places: dict[object, list[ChunkRecord]] = {}
    for owner, chunk in chain(
        ((owner_ids[row.namespace_id], row) for row in rows.values()),
        ((foundling.owner, foundling.record) for foundling in taken),
    ):
        places.setdefault((owner, chunk.parent_key.hex() if chunk.parent_key else None), []).append(chunk)
    given: list[tuple[KeptName, ChunkKey | None]] = []
    for key, name in sorted(wanted.names.items()):
        owner = (name.fingerprint, name.salt_digest)
        there = in_index.names.get(key)
        if owner not in owners:
            continue
        end = find_end(name, places.get((owner, name.parent_key), ()), owners[owner].root_key)
        same = there is not None and there.without_place() == name.without_place()
        if same and (end is None or (there is not None and there.end_key is not None)):
            continue
        what = "restored" if there is None else "put right"
        pin = ", pinned" if name.pinned else ""
        state = f"{name.n_tokens} tokens{pin}" if end is not None else f"its KV is gone{pin}: warm it again"
        steps.append(RepairStep("name", name.name, f"{what}: {state}"))
        given.append((name, None if end is None else end.key))
    will_be = {**in_index.names, **{name.key: name for name, _ in given}}
    if will_be and (kept is None or set(will_be) != set(kept.names)):
        steps.append(RepairStep("write-names", NAMES_FILE, "it lacked names that the index has"))
    of_names = {(name.fingerprint, name.salt_digest) for name, _ in given}
    return tuple(given), tuple(owners[owner] for owner in sorted(of_names))


def _believable(saved: KeptNames, taken: list[Foundling]) -> KeptNames:
    """Return the names of a broken index that are of a namespace which its root key or a shard proves to be one."""
    proven = {foundling.owner: foundling.namespace for foundling in taken}
    namespaces = {
        owner: proven.get(owner, namespace)
        for owner, namespace in saved.namespaces.items()
        if owner in proven or (not namespace.salt_digest and namespace.root_key == root_key(namespace.fingerprint))
    }
    names = {key: name for key, name in saved.names.items() if (name.fingerprint, name.salt_digest) in namespaces}
    return KeptNames(names, namespaces)
