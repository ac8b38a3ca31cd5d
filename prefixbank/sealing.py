"""Own what a shard says of itself: its seal, and the proof of a shard that no row describes; opens no files.

A shard's metadata holds `content_digest`, the xxh3_128 of the whole file with these 32 digits as zeros. With it, and
with the chunk key that follows from the token ids, a shard is proven without the index. Nothing of a header is
believed: what it must be is made anew from its metadata, and compared byte for byte. So each of the many ways in which
a safetensors header can be malformed is one case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from prefixbank.chunking import FileDigest, chunk_key, pack_token_ids, root_key
from prefixbank.errors import PromptError, SchemaError, ShardCorruptError
from prefixbank.layout import SHARD_FORMAT_VERSION, CacheLayout
from prefixbank.runs import Buffer
from prefixbank.values import ChunkKey

__all__ = [
    "KEY_FORM",
    "MAX_HEADER_BYTES",
    "SEAL",
    "SHA256_FORM",
    "UNSEALED",
    "ShardDescription",
    "claimed_place",
    "describe",
    "read_layout",
    "seal",
    "seal_of",
    "unsealed",
]

SEAL = "content_digest"
UNSEALED = "0" * 32
"""What stands in the place of the seal while it is taken."""

MAX_HEADER_BYTES = 2 << 20
"""More than the header of any shard: 65,536 token ids take 0.7 MB, the tensors of 1,000 layers 0.2 MB."""

_MAX_ARRAYS = 65_536
# Quotes inside JSON strings are escaped, so no label or layout can look like this.
_SEALED = re.compile(rb'"content_digest":"([0-9a-f]{32})"')
KEY_FORM = re.compile("[0-9a-f]{32}")
SHA256_FORM = re.compile("[0-9a-f]{64}")
_NUMBER = re.compile("0|[1-9][0-9]{0,9}")
_METADATA = b'{"__metadata__":'
# Nothing else is parsed: a million empty lists take Python a second.
_TEXT = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_TEXTS_BY_NAME = re.compile(rf"\{{{_TEXT}:{_TEXT}(?:,{_TEXT}:{_TEXT})*\}}")
_TOKEN_IDS = re.compile(r"\[(?:0|[1-9][0-9]{0,9})(?:,(?:0|[1-9][0-9]{0,9}))*\]")
_MAX_LAYOUT_CHARS = 512 << 10  # 2,000 layers that are all different
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class ShardDescription:
    """Say which chunk a shard says that it holds; its header, key and size are proven, the bytes of its tensors not.

    `parent_key` is None for the first chunk of a prefix.
    """

    fingerprint: str
    salt_digest: str
    label: str
    layout: str
    root_key: ChunkKey
    key: ChunkKey
    parent_key: ChunkKey | None
    start: int
    n_tokens: int
    token_ids: bytes
    has_state: bool


def seal(header: bytes, runs: Iterable[Buffer]) -> bytes:
    """Return the head of a shard with the digest of the whole in its place; one without that place stays as it is."""
    found = _SEALED.search(header)
    if found is None:
        return header
    digest = FileDigest(header)
    for run in runs:
        digest.update(run)  # type: ignore[arg-type]  # any contiguous buffer
    return header[: found.start(1)] + digest.hexdigest().encode() + header[found.end(1) :]


def seal_of(header: bytes) -> str | None:
    """Return the seal that a shard's head holds, or None for one of a version that had none."""
    found = _SEALED.search(header)
    return None if found is None else found.group(1).decode()


def unsealed(header: bytes) -> bytes:
    """Return a shard's head as it was when the seal was taken."""
    found = _SEALED.search(header)
    return header if found is None else header[: found.start(1)] + UNSEALED.encode() + header[found.end(1) :]


def claimed_place(header: bytes) -> tuple[int, int]:
    """Return where the chunk of a shard's head begins, and how many tokens it holds, as it says: nothing is proven.

    Raises `ShardCorruptError` for a head that says neither.
    """
    try:
        metadata = _metadata(header)
        return int(metadata["start"]), int(metadata["n_tokens"])
    except (ValueError, KeyError) as exc:
        raise ShardCorruptError(f"the header is not one of a shard: {exc}") from exc


def describe(header: bytes, n_bytes: int, chunk_tokens: int) -> ShardDescription:
    """Return what the head of a shard file of `n_bytes` says, if all of it fits together.

    Raises `ShardCorruptError` for a head that no version of this program writes, `SchemaError` for a newer format.
    """
    try:
        return _describe(header, n_bytes, chunk_tokens)
    except SchemaError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, PromptError) as exc:
        raise ShardCorruptError(f"the header is not one of a shard: {exc}") from exc


def _describe(header: bytes, n_bytes: int, chunk_tokens: int) -> ShardDescription:
    metadata = _metadata(header)
    if metadata["format"] != "prefixbank":
        raise ValueError("it is another program's")
    if (version := metadata["format_version"]) != SHARD_FORMAT_VERSION:
        if _NUMBER.fullmatch(version) and int(version) > int(SHARD_FORMAT_VERSION):
            raise SchemaError(f"a shard has format {version}, this version knows {SHARD_FORMAT_VERSION}")
        raise ValueError("its format is unknown")
    metadata["label"].encode()  # a lone surrogate could not be kept in the index
    for name, form in (("fingerprint", SHA256_FORM), ("root_key", KEY_FORM), ("chunk_key", KEY_FORM)):
        if not form.fullmatch(metadata[name]):
            raise ValueError(f"{name} is none")
    for name, form in (("salt_digest", SHA256_FORM), ("parent_key", KEY_FORM)):
        if metadata[name] and not form.fullmatch(metadata[name]):
            raise ValueError(f"{name} is none")
    if not all(_NUMBER.fullmatch(metadata[name]) for name in ("start", "n_tokens")):
        raise ValueError("start or n_tokens is no number")
    start, n_tokens = int(metadata["start"]), int(metadata["n_tokens"])
    if not _TOKEN_IDS.fullmatch(metadata["token_ids"]):
        raise ValueError("its token ids are none, or written in another way")
    token_ids = pack_token_ids(json.loads(metadata["token_ids"]))
    if len(token_ids) != len(pack_token_ids([0])) * n_tokens or not 1 <= n_tokens <= chunk_tokens:
        raise ValueError("it has another number of tokens than a chunk of this bank")
    if start % chunk_tokens or (start == 0) != (metadata["parent_key"] == ""):
        raise ValueError("it begins where no chunk of this bank does")
    first_parent = ChunkKey(bytes.fromhex(metadata["root_key"]))
    if (metadata["salt_digest"] == "") != (first_parent == root_key(metadata["fingerprint"])):
        raise ValueError("its root key is not its own")
    parent_key = ChunkKey(bytes.fromhex(metadata["parent_key"])) if metadata["parent_key"] else None
    key = chunk_key(parent_key or first_parent, token_ids)
    if key.hex() != metadata["chunk_key"]:
        raise ValueError("its key does not fit its token ids")
    if SEAL in metadata and not KEY_FORM.fullmatch(metadata[SEAL]):
        raise ValueError("its seal is none")
    layout = read_layout(metadata["layout"])
    data_bytes = n_bytes - len(header)
    has_state = data_bytes != layout.data_bytes(n_tokens)
    if has_state and not (layout.has_state and data_bytes == layout.data_bytes(n_tokens, with_state=True)):
        raise ValueError("the file's length is not that of its tensors")
    if layout.shard_header(n_tokens, metadata, with_state=has_state) != header:
        raise ValueError("its tensors are not those of its layout")
    return ShardDescription(
        fingerprint=metadata["fingerprint"],
        salt_digest=metadata["salt_digest"],
        label=metadata["label"],
        layout=metadata["layout"],
        root_key=first_parent,
        key=key,
        parent_key=parent_key,
        start=start,
        n_tokens=n_tokens,
        token_ids=token_ids,
        has_state=has_state,
    )


def _metadata(header: bytes) -> dict[str, str]:
    """Return the metadata of a shard's head. Raises `ValueError` for anything else than texts by name."""
    text = header[_LENGTH_BYTES:].decode("ascii")
    if not text.startswith(_METADATA.decode()):
        raise ValueError("it does not begin with its metadata")
    flat = _TEXTS_BY_NAME.match(text, len(_METADATA))
    if flat is None:
        raise ValueError("its metadata are not texts by name")
    metadata: dict[str, str] = json.loads(flat.group())
    return metadata


def read_layout(text: str) -> CacheLayout:
    """Return a cache layout that nobody vouches for, written in the one way in which layouts are, and small enough.

    Raises `ValueError`.
    """
    if len(text) > _MAX_LAYOUT_CHARS:
        raise ValueError("its layout is longer than that of any model")
    try:
        layout = CacheLayout.from_json(text)
    except SchemaError as exc:
        raise ValueError(str(exc)) from exc
    n_arrays = 0
    for _, leaf in layout.leaves():
        n_arrays += 1 + len(leaf.arrays) + len(leaf.states)
        if n_arrays > _MAX_ARRAYS:
            raise ValueError("its layout has too many arrays")
    numbers = [n for _, a in layout.row_arrays() for n in (a.n_heads, a.width)]
    numbers += [n for _, state in layout.state_arrays() for n in state.shape]
    if any(n < 0 for n in numbers) or layout.to_json() != text:
        raise ValueError("its layout is none that this program writes")
    return layout
