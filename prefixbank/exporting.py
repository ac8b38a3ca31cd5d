"""Own what goes into an archive: which shards the named prefixes need, cut where a prefix ends; writes no files.

A name may have moved to a longer chunk that covers it (`storing`): that chunk's other tokens are another prompt's, who
may be nobody that exported anything. So the last shard of a prefix is cut to the prefix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefixbank.archivefile import MANIFEST_MEMBER, archive_bytes
from prefixbank.chunking import TOKEN_BYTES, FileDigest, chunk_key
from prefixbank.errors import ShardCorruptError, StorageError, UnknownPrefixError
from prefixbank.index import Index, chunk_rows, namespace_rows, prefix_rows
from prefixbank.layout import CacheLayout
from prefixbank.manifests import Manifest, member_name
from prefixbank.sealing import seal
from prefixbank.session import require_prefix_name
from prefixbank.shards import ShardStore
from prefixbank.storing import shard_header
from prefixbank.values import ChunkKey, ChunkRecord, Namespace, PrefixRecord

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["ExportPlan", "plan"]

_READ_STEP = 8 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    """Name a chunk and how many of its leading tokens are exported: all of them, or fewer of one without states."""

    record: ChunkRecord
    n_tokens: int

    @property
    def is_whole(self) -> bool:
        """Tell whether the shard goes as it is."""
        return self.n_tokens == self.record.n_tokens


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Hold a manifest, and in its order the pieces of the bank's shards.

    `left_out` are names that nothing can be exported of, each with the reason.
    """

    manifest: Manifest
    pieces: tuple[_Piece, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def n_bytes(self) -> int:
        """Return the length that the archive will have."""
        return archive_bytes([len(self.manifest.to_bytes()), *(record.n_bytes for record in self.manifest.shards)])

    def members(
        self, shards: ShardStore, progress: Callable[[int, int], None] | None
    ) -> Iterator[tuple[str, int, Iterator[bytes]]]:
        """Yield name, length and content of each member, the manifest first.

        The contents raise `ShardError` for a shard that is not what was stored, or was deleted meanwhile.
        """
        content = self.manifest.to_bytes()
        yield MANIFEST_MEMBER, len(content), iter([content])
        done = 0
        for wanted, piece in zip(self.manifest.shards, self.pieces, strict=True):
            namespace = self.manifest.namespaces[wanted.namespace_id]
            blocks = _whole(shards, piece.record) if piece.is_whole else iter(_cut(shards, piece, namespace)[1])
            yield wanted.file_name or "", wanted.n_bytes, blocks
            done += wanted.n_bytes
            if progress is not None:
                progress(done, self.manifest.n_shard_bytes)


def plan(
    index: Index, shards: ShardStore, chunk_tokens: int, names: Sequence[str], namespace_id: int | None
) -> ExportPlan:
    """Return what to export: the prefixes of these names, or all; of one namespace, or all.

    Raises `UnknownPrefixError` for a name that nothing can be exported of, and where there is nothing at all;
    `ShardError` for a shard to be cut that is not what was stored.
    """
    with index.reading() as tx:
        of_bank = {namespace.id: namespace for namespace in namespace_rows.list_all(tx)}
        found = [
            (prefix, _pieces(tx, prefix, of_bank[prefix.namespace_id]))
            for prefix in prefix_rows.list_all(tx)
            if (not names or prefix.name in names) and namespace_id in (None, prefix.namespace_id)
        ]
    left_out = {prefix.name: pieces for prefix, pieces in found if isinstance(pieces, str)}
    taken = [(prefix, pieces) for prefix, pieces in found if not isinstance(pieces, str)]
    for name in names:
        if name not in {prefix.name for prefix, _ in taken}:
            why = left_out.get(name, "no prefix has that name (`prefixbank ls`)")
            raise UnknownPrefixError(f"{name!r} can't be exported: {why}")
    if not taken:
        raise UnknownPrefixError(
            "no named prefix can be exported: `prefixbank ls` lists them, `warm --name` makes some"
        )
    numbers = {ns: number for number, ns in enumerate(dict.fromkeys(prefix.namespace_id for prefix, _ in taken))}
    prefixes: list[PrefixRecord] = []
    members: dict[ChunkKey, tuple[ChunkRecord, _Piece]] = {}
    for prefix, pieces in taken:
        require_prefix_name(prefix.name)  # an index of an earlier version may have others
        last: ChunkRecord | None = None
        for piece in pieces:
            wanted = _member(shards, piece, of_bank[prefix.namespace_id], numbers[prefix.namespace_id])
            members.setdefault(wanted.key, (wanted, piece))
            last = wanted
        assert last is not None
        prefixes.append(replace(prefix, namespace_id=last.namespace_id, chunk_key=last.key, n_tokens=last.end))
    ordered = sorted(members.values(), key=lambda pair: (pair[0].namespace_id, pair[0].start, pair[0].key))
    manifest = Manifest(
        chunk_tokens,
        tuple(of_bank[ns] for ns in numbers),
        tuple(prefixes),
        tuple(wanted for wanted, _ in ordered),
    )
    return ExportPlan(manifest, tuple(piece for _, piece in ordered), tuple(left_out.items()))


def _pieces(tx: sa.Connection, prefix: PrefixRecord, namespace: Namespace) -> list[_Piece] | str:
    """Return what a prefix is exported as, its last piece at the end; or why it can't be."""
    if prefix.chunk_key is None:
        return "it was evicted: warm it again"
    keys = prefix_rows.chain_keys(tx, [prefix.chunk_key])
    chain = sorted(chunk_rows.find(tx, list(keys)).values(), key=lambda record: record.start)
    if any(record.file_name is None for record in chain):
        return "a shard of it was lost: warm it again"
    has_state = CacheLayout.from_json(namespace.layout).has_state
    inside = [
        tail
        for record in (chain if has_state else ())
        for tail in chunk_rows.shorter_siblings(tx, record, with_state=True)
        if tail.file_name is not None and tail.end <= prefix.n_tokens
    ]
    last = chain[-1]
    n_left = prefix.n_tokens - last.start
    if n_left >= last.n_tokens:
        return [_Piece(record, record.n_tokens) for record in [*inside, *chain]]
    chain.pop()
    if not has_state:
        return [*(_Piece(record, record.n_tokens) for record in chain), _Piece(last, n_left)]
    # States can't be cut; so it ends with the last ones inside it.
    ends = [tail for tail in inside if tail.start == last.start]
    pieces = [tail for tail in inside if tail not in ends] + chain + sorted(ends, key=lambda tail: tail.end)
    return [_Piece(record, record.n_tokens) for record in pieces] or "no states are stored where it ends: warm it again"


def _member(shards: ShardStore, piece: _Piece, namespace: Namespace, number: int) -> ChunkRecord:
    """Return the record of a piece as an archive has it."""
    record = piece.record
    if not piece.is_whole:
        record, blocks = _cut(shards, piece, namespace)
        digest = FileDigest()
        for block in blocks:
            digest.update(block)
        record = replace(record, digest=digest.digest(), n_bytes=sum(map(len, blocks)))
    return replace(record, namespace_id=number, file_name=member_name(record.key))


def _whole(shards: ShardStore, record: ChunkRecord) -> Iterator[bytes]:
    """Yield a shard's bytes; raises `ShardError` at the end where they are not those that were stored."""
    digest = FileDigest()
    with shards.open_shard(record) as descriptor:
        left = record.n_bytes
        while left:
            try:
                block = os.read(descriptor, min(left, _READ_STEP))
            except OSError as exc:
                raise StorageError(f"shard {record.file_name} can't be read: {exc.strerror or exc}") from exc
            if not block:
                break
            left -= len(block)
            digest.update(block)
            yield block
    if left or digest.digest() != record.digest:
        raise ShardCorruptError(f"shard {record.file_name} has other bytes than were stored: `prefixbank check`")


def _cut(shards: ShardStore, piece: _Piece, namespace: Namespace) -> tuple[ChunkRecord, list[bytes]]:
    """Return the chunk of a shard's first tokens, and the shard that a store would have written of them."""
    record, n_tokens = piece.record, piece.n_tokens
    layout = CacheLayout.from_json(namespace.layout)
    content = memoryview(bytearray(record.n_bytes - record.data_offset))
    shards.read_into(record, [content])
    token_ids = record.token_ids[: n_tokens * TOKEN_BYTES]
    key = chunk_key(record.parent_key or namespace.root_key, token_ids)
    short = replace(record, key=key, n_tokens=n_tokens, token_ids=token_ids, has_state=False)
    blocks = []
    offset = 0
    for _, rows in layout.row_arrays():
        for _ in range(rows.n_heads):
            blocks.append(bytes(content[offset : offset + n_tokens * rows.row_bytes]))
            offset += record.n_tokens * rows.row_bytes
    return short, [seal(shard_header(short, layout, namespace), map(memoryview, blocks)), *blocks]
