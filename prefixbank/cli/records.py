"""Own how rows of the index look outside: as fields of JSON documents and as rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from prefixbank.cli.output import table, utc, yes_no
from prefixbank.config import PREFIXES_FOLDER, format_size

if TYPE_CHECKING:
    from pathlib import Path

    from prefixbank.bank import PrefixBank
    from prefixbank.eviction import PrunePlan
    from prefixbank.index.namespace_rows import NamespaceUsage
    from prefixbank.prefixfiles import PrefixFiles
    from prefixbank.values import ChunkKey, ChunkRecord, PrefixRecord

__all__ = [
    "Fields",
    "Holdings",
    "chunks_table",
    "files_table",
    "namespace_fields",
    "namespaces_table",
    "plan_text",
    "prefixes_table",
    "stored_text",
]

Fields = dict[str, Any]

_NUMBERS = ("start", "tokens", "bytes", "hits", "chunks", "examples")


class Holdings:
    """Know the namespaces and chunks of a bank at one moment, to say whose a chunk is and what a prefix stands on."""

    def __init__(self, bank: PrefixBank) -> None:
        """Read the namespaces; the chunks, which may be very many, once they are asked for while the bank is open."""
        from prefixbank.shards import ShardStore

        self.root = bank.root
        self._bank = bank
        self._namespaces = {usage.namespace.id: usage.namespace for usage in bank.namespaces(empty=True)}
        self._shards = ShardStore(bank.root, durability="full", verify="once")

    @cached_property
    def chunks(self) -> dict[ChunkKey, ChunkRecord]:
        """Return all chunks by their key."""
        return {record.key: record for record in self._bank.chunks()}

    @cached_property
    def files(self) -> PrefixFiles | None:
        """Return the few-shot files of the bank; None where it has no folder for them."""
        if not (self.root / PREFIXES_FOLDER).exists():
            return None
        from prefixbank.prefixfiles import PrefixFiles  # late: 12 ms

        return PrefixFiles(self.root)

    def chain(self, prefix: PrefixRecord) -> list[ChunkRecord]:
        """Return the chunks of a named prefix from the root on; [] once it was evicted."""
        chain: list[ChunkRecord] = []
        key = prefix.chunk_key
        while key is not None and (record := self.chunks.get(key)) is not None:
            chain.append(record)
            key = record.parent_key
        return chain[::-1]

    def whose(self, namespace_id: int) -> Fields:
        """Return the fields that say whose KV it is."""
        namespace = self._namespaces[namespace_id]
        return {
            "fingerprint": namespace.fingerprint,
            "salt_digest": namespace.salt_digest or None,
            "label": namespace.label,
        }

    def chunk_fields(self, record: ChunkRecord) -> Fields:
        """Return a chunk as fields; `file` is relative to the bank root, null for a hole."""
        path = None if record.file_name is None else self._shards.path_of(record.file_name).relative_to(self.root)
        return {
            "key": record.key.hex(),
            "parent_key": None if record.parent_key is None else record.parent_key.hex(),
            **self.whose(record.namespace_id),
            "start": record.start,
            "n_tokens": record.n_tokens,
            "n_bytes": record.n_bytes,
            "disk_bytes": record.disk_bytes,
            "file": None if path is None else path.as_posix(),
            "hits": record.hits,
            "created_at": utc(record.created_at),
            "last_used_at": utc(record.last_used_at),
        }

    def prefix_fields(self, prefix: PrefixRecord) -> Fields:
        """Return a named prefix as fields; `n_stored_tokens` of its `n_tokens` can be resumed."""
        chain = self.chain(prefix)
        n_stored_tokens = prefix.n_stored_tokens(chain)
        return {
            "name": prefix.name,
            **self.whose(prefix.namespace_id),
            "n_tokens": prefix.n_tokens,
            "n_stored_tokens": n_stored_tokens,
            "n_bytes": sum(record.n_bytes for record in chain),
            "disk_bytes": sum(record.disk_bytes for record in chain),
            "pinned": prefix.pinned,
            "stored": n_stored_tokens == prefix.n_tokens,
            "source_digest": prefix.source_digest or None,
            **self._fields_of_file(prefix, n_stored_tokens),
            "chunk_key": None if prefix.chunk_key is None else prefix.chunk_key.hex(),
            "created_at": utc(prefix.created_at),
            "last_used_at": utc(chain[-1].last_used_at) if chain else None,
        }

    def file_fields(self) -> list[Fields]:
        """Return the few-shot files, and few-shot prompts without a file, with what is stored of them, as fields."""
        return [
            {
                "name": file.name,
                "prefix_file": self._relative(file.path),
                "n_examples": None if file.shots is None else len(file.shots.examples),
                "source_digest": None if file.shots is None else file.shots.source_digest,
                "error": file.error or None,
                "stored": [
                    {
                        "name": version.prefix.name,
                        **self.whose(version.prefix.namespace_id),
                        "n_tokens": version.prefix.n_tokens,
                        "n_stored_tokens": version.n_stored_tokens,
                        "source_digest": version.prefix.source_digest,
                        "file_state": version.state,
                    }
                    for version in file.stored
                ],
            }
            for file in self._bank.prefix_files()
        ]

    def _fields_of_file(self, prefix: PrefixRecord, n_stored_tokens: int) -> Fields:
        """Return the fields that say how a named prefix and its file compare."""
        if self.files is None:
            return {"prefix_file": None, "file_state": "no file" if prefix.source_digest else None}
        file = self.files.file_of(prefix.name) if prefix.source_digest else None
        return {
            "prefix_file": None if file is None else self._relative(file.path),
            "file_state": self.files.state_of(prefix, n_stored_tokens),
        }

    def _relative(self, path: Path | None) -> str | None:
        """Return a path relative to the bank root."""
        return None if path is None else path.relative_to(self.root).as_posix()

    def plan_fields(self, plan: PrunePlan) -> Fields:
        """Return what a plan removes as fields."""
        return {
            "chunks": [self.chunk_fields(planned.record) | {"reason": planned.reason} for planned in plan.chunks],
            "files": [{"path": file.path, "n_bytes": file.n_bytes} for file in plan.files],
            "freed_bytes": plan.freed_bytes,
            "kept_bytes": plan.kept_bytes,
        }


def namespace_fields(usage: NamespaceUsage) -> Fields:
    """Return a namespace, with what it holds, as fields."""
    return {
        "fingerprint": usage.namespace.fingerprint,
        "salt_digest": usage.namespace.salt_digest or None,
        "label": usage.namespace.label,
        "n_chunks": usage.n_chunks,
        "n_tokens": usage.n_tokens,
        "disk_bytes": usage.disk_bytes,
        "created_at": utc(usage.namespace.created_at),
        "last_used_at": utc(usage.last_used_at),
    }


def prefixes_table(prefixes: Sequence[Fields], *, show_file: bool = False) -> str:
    """Return named prefixes, as fields, as a table; with how they and their files compare."""
    headers = ["name", "model", "tokens", "bytes", "pinned", "stored", "last used"]
    rows = [
        [
            p["name"],
            p["label"],
            str(p["n_tokens"]),
            format_size(p["disk_bytes"]),
            yes_no(p["pinned"]),
            stored_text(p),
            p["last_used_at"] or "-",
        ]
        for p in prefixes
    ]
    if show_file:
        headers.append("file")
        for row, prefix in zip(rows, prefixes, strict=True):
            row.append(prefix["file_state"] or "-")
    return table(headers, rows, right=_NUMBERS)


def files_table(files: Sequence[Fields]) -> str:
    """Return few-shot files, as fields, as a table with a row for each stored version."""
    rows = []
    for file in files:
        nothing = {"name": file["name"], "label": "-", "n_tokens": "-"}
        nothing["file_state"] = "broken" if file["error"] else "not warmed"
        for version in file["stored"] or [nothing]:
            cells = (version["name"], file["prefix_file"], file["n_examples"], version["label"], version["n_tokens"])
            rows.append([*("-" if cell is None else str(cell) for cell in cells), version["file_state"] or "-"])
    return table(["name", "file", "examples", "model", "tokens", "state"], rows, right=_NUMBERS)


def stored_text(prefix: Fields) -> str:
    """Say whether a named prefix, as fields, is stored."""
    if prefix["stored"]:
        return "yes"
    return f"{prefix['n_stored_tokens']} tokens" if prefix["chunk_key"] else "no (evicted)"


def chunks_table(chunks: Sequence[Fields], *, show_file: bool = False) -> str:
    """Return chunks, as fields, as a table; with their reasons where they are removed."""
    headers = ["key", "namespace", "start", "tokens", "bytes", "hits", "last used"]
    rows = [
        [
            c["key"],
            c["fingerprint"][:8],
            str(c["start"]),
            str(c["n_tokens"]),
            format_size(c["disk_bytes"]),
            str(c["hits"]),
            c["last_used_at"] or "-",
        ]
        for c in chunks
    ]
    for header, wanted in (("reason", any("reason" in c for c in chunks)), ("file", show_file)):
        if wanted:
            headers.append(header)
            for row, chunk in zip(rows, chunks, strict=True):
                row.append(chunk[header] or "(lost)")
    return table(headers, rows, right=_NUMBERS)


def namespaces_table(namespaces: Sequence[Fields]) -> str:
    """Return namespaces, as fields, as a table."""
    rows = [
        [
            n["fingerprint"][:12],
            (n["salt_digest"] or "-")[:8],
            n["label"],
            str(n["n_chunks"]),
            str(n["n_tokens"]),
            format_size(n["disk_bytes"]),
            n["last_used_at"] or "-",
        ]
        for n in namespaces
    ]
    return table(["fingerprint", "salt", "model", "chunks", "tokens", "bytes", "last used"], rows, right=_NUMBERS)


def plan_text(plan: Fields, *, dry_run: bool) -> str:
    """Return what a plan, as fields, removes as a table and a sentence."""
    lines = [chunks_table(plan["chunks"])] if plan["chunks"] else []
    lines += [f"{file['path']} ({format_size(file['n_bytes'])})" for file in plan["files"]]
    done = "would be removed" if dry_run else "removed"
    lines.append(
        f"{len(plan['chunks'])} chunks and {len(plan['files'])} other files {done}: "
        f"{format_size(plan['freed_bytes'])} freed, {format_size(plan['kept_bytes'])} kept"
    )
    return "\n".join(lines)
