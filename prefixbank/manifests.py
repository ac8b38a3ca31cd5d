"""Own what an archive says about itself: its manifest, written as JSON and read without trust; must open no files.

What is read is a closed form: these keys and no others, of these types, within these limits, and all that can be known
without the shards is checked: which namespaces, chains from their roots on, and names there are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from prefixbank.archivefile import MAX_MANIFEST_BYTES, MAX_MEMBER_BYTES
from prefixbank.chunking import root_key
from prefixbank.errors import ArchiveError, ConfigError, PrefixBankError, SchemaError
from prefixbank.layout import SHARD_FORMAT_VERSION, CacheLayout
from prefixbank.sealing import KEY_FORM, MAX_HEADER_BYTES, SHA256_FORM, read_layout
from prefixbank.session import require_prefix_name
from prefixbank.values import ChunkKey, ChunkRecord, Namespace, PrefixRecord

__all__ = ["NOTICE", "Manifest", "chain_of", "read_manifest"]

ARCHIVE_FORMAT_VERSION = 1
MAX_SHARDS = 100_000
NOTICE = (
    "This archive holds token ids and KV, and both reveal the prompts word for word: keep it as you keep the prompts. "
    "KV can't be checked against a model without computing it again: who imports it trusts who made it."
)

_MAX_CONTAINERS = 2 * MAX_SHARDS + 10_000  # in a JSON text: `[],[],...` takes 20 times its length in memory
_MAX_VALUES = 10 * MAX_SHARDS
_MAX_NAMESPACES = 1000
_MAX_TEXT = 256 << 10

T = TypeVar("T")
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Say what an archive holds.

    Ids of namespaces are their numbers in the archive. A shard's record has its member's name as `file_name` and no
    token ids: those are in the shard. Parents come before their children.
    """

    chunk_tokens: int
    namespaces: tuple[Namespace, ...]
    prefixes: tuple[PrefixRecord, ...]
    shards: tuple[ChunkRecord, ...]

    @property
    def n_shard_bytes(self) -> int:
        """Return the bytes of all shards."""
        return sum(record.n_bytes for record in self.shards)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON."""
        document = {
            "format": "prefixbank archive",
            "format_version": ARCHIVE_FORMAT_VERSION,
            "shard_format_version": SHARD_FORMAT_VERSION,
            "notice": NOTICE,
            "chunk_tokens": self.chunk_tokens,
            "namespaces": [
                {
                    "fingerprint": namespace.fingerprint,
                    "salt_digest": namespace.salt_digest,
                    "root_key": namespace.root_key.hex(),
                    "label": namespace.label,
                    "layout": namespace.layout,
                    "created_at": namespace.created_at,
                }
                for namespace in self.namespaces
            ],
            "prefixes": [
                {
                    "name": prefix.name,
                    "namespace": prefix.namespace_id,
                    "chunk_key": prefix.chunk_key.hex() if prefix.chunk_key else "",
                    "n_tokens": prefix.n_tokens,
                    "pinned": prefix.pinned,
                    "source_digest": prefix.source_digest,
                    "created_at": prefix.created_at,
                }
                for prefix in self.prefixes
            ],
            "shards": [
                {
                    "chunk_key": record.key.hex(),
                    "parent_key": record.parent_key.hex() if record.parent_key else "",
                    "namespace": record.namespace_id,
                    "start": record.start,
                    "n_tokens": record.n_tokens,
                    "has_state": record.has_state,
                    "n_bytes": record.n_bytes,
                    "digest": record.digest.hex(),
                }
                for record in self.shards
            ],
        }
        content = json.dumps(document, indent=1).encode()
        if len(content) > MAX_MANIFEST_BYTES or len(self.shards) > MAX_SHARDS:
            raise ConfigError(f"{len(self.shards)} shards are too many for one archive: export fewer names")
        return content


def member_name(key: ChunkKey) -> str:
    """Return what a chunk's shard is called in an archive."""
    return f"shards/{key.hex()}.safetensors"


def chain_of(record: ChunkRecord, records: dict[ChunkKey, ChunkRecord]) -> list[ChunkRecord]:
    """Return a chunk and those that it stands on, from the root on; all are in `records`."""
    chain = [record]
    while chain[-1].parent_key is not None:
        chain.append(records[chain[-1].parent_key])
    return chain[::-1]


def states_inside(chain: list[ChunkRecord], records: Iterable[ChunkRecord]) -> list[ChunkRecord]:
    """Return the chunks with states that end inside those of a chain: siblings that are their beginning."""
    places = {(record.namespace_id, record.parent_key, record.start): record for record in chain}
    found = []
    for record in records:
        whole = places.get((record.namespace_id, record.parent_key, record.start))
        if whole is not None and record.has_state and record.n_tokens < whole.n_tokens:
            found.append(record)
    return found


def _read_json(content: bytes | bytearray) -> Any:
    """Return the values of a JSON text that nobody vouches for. Raises `ArchiveError`; takes bounded time and memory.

    No floats, no keys twice, no NaN, nothing nested deeply.
    """

    def pairs(found: list[tuple[str, Any]]) -> Fields:
        fields = dict(found)
        if len(fields) != len(found):
            raise ValueError("a key is there twice")
        return fields

    def refuse(_: str) -> Any:
        raise ValueError("a number is no whole one")

    if content.count(b"[") + content.count(b"{") > _MAX_CONTAINERS or content.count(b",") > _MAX_VALUES:
        raise ArchiveError("its JSON holds too many values")
    try:
        return json.loads(content.decode(), object_pairs_hook=pairs, parse_constant=refuse, parse_float=refuse)
    except (ValueError, RecursionError) as exc:  # without the text: it may be token ids
        raise ArchiveError(f"its JSON can't be read ({type(exc).__name__})") from exc


def read_manifest(content: bytes) -> Manifest:
    """Return the manifest, proven as far as it can be without the shards.

    Raises `ArchiveError`, and `SchemaError` for a format that this version does not know.
    """
    document = _read_json(content)
    if not isinstance(document, dict) or document.get("format") != "prefixbank archive":
        raise ArchiveError("its manifest is not that of a prefixbank archive")
    versions = document.get("format_version"), document.get("shard_format_version")
    if versions != (ARCHIVE_FORMAT_VERSION, SHARD_FORMAT_VERSION) or isinstance(versions[0], bool):
        raise SchemaError("the archive has a format that this version does not know: use the prefixbank that made it")
    _require_keys(document, "format format_version shard_format_version notice chunk_tokens namespaces prefixes shards")
    _text(document, "notice")
    chunk_tokens = _number(document, "chunk_tokens", 1, 65536)
    namespaces = _each(document, "namespaces", _MAX_NAMESPACES, _read_namespace)
    if len({(n.fingerprint, n.salt_digest) for n in namespaces}) < len(namespaces):
        raise ArchiveError("a namespace is in its manifest twice")
    if len({n.root_key for n in namespaces}) < len(namespaces):
        raise ArchiveError("two namespaces in its manifest have one root key")
    layouts = [CacheLayout.from_json(namespace.layout) for namespace in namespaces]
    shards = _each(document, "shards", MAX_SHARDS, lambda fields, _: _read_shard(fields, layouts))
    prefixes = _each(document, "prefixes", MAX_SHARDS, lambda fields, _: _read_prefix(fields, len(namespaces)))
    _require_chains(shards, chunk_tokens)
    _require_names(prefixes, shards, len(namespaces))
    return Manifest(chunk_tokens, namespaces, prefixes, shards)


def _each(document: Fields, name: str, limit: int, read: Callable[[Fields, int], T]) -> tuple[T, ...]:
    values = document[name]
    if not isinstance(values, list) or not 1 <= len(values) <= limit:
        raise ArchiveError(f"its manifest must have from 1 to {limit} {name}")
    if not all(isinstance(fields, dict) for fields in values):
        raise ArchiveError(f"its manifest has {name} that are no objects")
    return tuple(read(fields, number) for number, fields in enumerate(values))


def _require_keys(fields: Fields, names: str) -> None:
    if fields.keys() != set(names.split()):
        raise ArchiveError(f"its manifest must have exactly these keys together: {names}")


def _number(fields: Fields, name: str, low: int, high: int) -> int:
    value = fields[name]
    if type(value) is not int or not low <= value <= high:
        raise ArchiveError(f"{name} in its manifest must be a number from {low} to {high}")
    return value


def _flag(fields: Fields, name: str) -> bool:
    value = fields[name]
    if type(value) is not bool:
        raise ArchiveError(f"{name} in its manifest must be true or false")
    return value


def _text(fields: Fields, name: str, pattern: re.Pattern[str] | None = None, *, or_empty: bool = False) -> str:
    value = fields[name]
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not _is_unicode(value):
        raise ArchiveError(f"{name} in its manifest must be a text")
    if pattern is not None and not pattern.fullmatch(value) and not (or_empty and not value):
        raise ArchiveError(f"{name} in its manifest must be lower-case hex digits of the right number")
    return value


def _is_unicode(text: str) -> bool:
    """Tell whether the text has no half of a surrogate pair, which JSON can spell and SQLite can't keep."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read_namespace(fields: Fields, number: int) -> Namespace:
    _require_keys(fields, "fingerprint salt_digest root_key label layout created_at")
    namespace = Namespace(
        id=number,
        root_key=ChunkKey(bytes.fromhex(_text(fields, "root_key", KEY_FORM))),
        fingerprint=_text(fields, "fingerprint", SHA256_FORM),
        salt_digest=_text(fields, "salt_digest", SHA256_FORM, or_empty=True),
        label=_text(fields, "label"),
        layout=_text(fields, "layout"),
        created_at=_number(fields, "created_at", 0, 2**62),
    )
    if not namespace.salt_digest and namespace.root_key != root_key(namespace.fingerprint):
        raise ArchiveError("a namespace in its manifest has a root key that is not its own")
    try:
        known = read_layout(namespace.layout).layers
    except ValueError:
        known = ()
    if not known:
        raise ArchiveError("a cache layout in its manifest is none that prefixbank writes")
    return namespace


def _read_shard(fields: Fields, layouts: list[CacheLayout]) -> ChunkRecord:
    _require_keys(fields, "chunk_key parent_key namespace start n_tokens has_state n_bytes digest")
    key = ChunkKey(bytes.fromhex(_text(fields, "chunk_key", KEY_FORM)))
    number = _number(fields, "namespace", 0, len(layouts) - 1)
    n_tokens = _number(fields, "n_tokens", 1, 65536)
    has_state = _flag(fields, "has_state")
    n_bytes = _number(fields, "n_bytes", 1, MAX_MEMBER_BYTES)
    if has_state and not layouts[number].has_state:
        raise ArchiveError("a shard in its manifest has states, and its cache layout none")
    data_offset = n_bytes - layouts[number].data_bytes(n_tokens, with_state=has_state)
    if not 8 < data_offset <= 8 + MAX_HEADER_BYTES:
        raise ArchiveError("a shard in its manifest has a length that does not fit its cache layout")
    return ChunkRecord(
        key=key,
        parent_key=ChunkKey(bytes.fromhex(_text(fields, "parent_key", KEY_FORM, or_empty=True))) or None,
        namespace_id=number,
        start=_number(fields, "start", 0, 2**40),
        n_tokens=n_tokens,
        token_ids=b"",
        file_name=member_name(key),
        data_offset=data_offset,
        n_bytes=n_bytes,
        disk_bytes=0,
        digest=bytes.fromhex(_text(fields, "digest", KEY_FORM)),
        has_state=has_state,
    )


def _read_prefix(fields: Fields, n_namespaces: int) -> PrefixRecord:
    _require_keys(fields, "name namespace chunk_key n_tokens pinned source_digest created_at")
    name = _text(fields, "name")
    try:
        require_prefix_name(name)
    except PrefixBankError as exc:
        raise ArchiveError(f"a name in its manifest is refused: {exc}") from exc
    return PrefixRecord(
        name=name,
        namespace_id=_number(fields, "namespace", 0, n_namespaces - 1),
        chunk_key=ChunkKey(bytes.fromhex(_text(fields, "chunk_key", KEY_FORM))),
        n_tokens=_number(fields, "n_tokens", 1, 2**40),
        pinned=_flag(fields, "pinned"),
        source_digest=_text(fields, "source_digest", SHA256_FORM, or_empty=True),
        created_at=_number(fields, "created_at", 0, 2**62),
    )


def _require_chains(shards: Iterable[ChunkRecord], chunk_tokens: int) -> None:
    """Raise `ArchiveError` unless every shard is a first one, or stands on a full one before it: so no cycles."""
    before: dict[ChunkKey, ChunkRecord] = {}
    for record in shards:
        if record.key in before:
            raise ArchiveError("a shard is in its manifest twice")
        parent = None if record.parent_key is None else before.get(record.parent_key)
        if (record.parent_key is not None and parent is None) or record.start != (parent.end if parent else 0):
            raise ArchiveError("a shard in its manifest does not stand on those before it")
        if record.n_tokens > chunk_tokens or (parent is not None and parent.n_tokens != chunk_tokens):
            raise ArchiveError("a shard in its manifest is longer or shorter than its place allows")
        if parent is not None and parent.namespace_id != record.namespace_id:
            raise ArchiveError("a shard in its manifest stands on one of another namespace")
        before[record.key] = record


def _require_names(prefixes: Iterable[PrefixRecord], shards: Iterable[ChunkRecord], n_namespaces: int) -> None:
    """Raise `ArchiveError` unless every prefix ends with a shard, and every shard and namespace serves a prefix."""
    records = {record.key: record for record in shards}
    named: set[tuple[str, int]] = set()
    needed: dict[ChunkKey, ChunkRecord] = {}
    for prefix in prefixes:
        last = None if prefix.chunk_key is None else records.get(prefix.chunk_key)
        if last is None or last.namespace_id != prefix.namespace_id or last.end != prefix.n_tokens:
            raise ArchiveError("a prefix in its manifest does not end with a shard")
        if (prefix.name, prefix.namespace_id) in named:
            raise ArchiveError(f"the name {prefix.name!r} is in its manifest twice")
        named.add((prefix.name, prefix.namespace_id))
        walked: ChunkRecord | None = last
        while walked is not None and walked.key not in needed:
            needed[walked.key] = walked
            walked = None if walked.parent_key is None else records[walked.parent_key]
    inside = states_inside(list(needed.values()), records.values())
    if len(needed.keys() | {record.key for record in inside}) < len(records):
        raise ArchiveError("a shard in its manifest belongs to no prefix")
    if {prefix.namespace_id for prefix in prefixes} != set(range(n_namespaces)):
        raise ArchiveError("a namespace in its manifest has no prefix")
