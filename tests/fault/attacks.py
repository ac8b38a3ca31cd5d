"""Make archives whose manifest or shards are what `export` does not write; with those on members, all the attacks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from prefixbank.chunking import root_key
from prefixbank.errors import ArchiveError, FingerprintMismatchError, PrefixBankError, SchemaError
from tests.cli.banks import CHUNK_TOKENS
from tests.fault.attacks_on_members import ATTACKS, ERRORS
from tests.fault.tampering import Parts, with_value


def changing(name: str, error: type[PrefixBankError] = ArchiveError) -> Callable[[Callable[[Parts], object]], None]:
    """Add an attack that changes parts, all of which are then packed as export would."""

    def add(change: Callable[[Parts], object]) -> None:
        def make(parts: Parts) -> bytes:
            change(parts)
            return parts.pack()

        ATTACKS[name], ERRORS[name] = make, error

    return add


# --- the manifest


def texts(name: str, error: type[PrefixBankError] = ArchiveError) -> Callable[[Callable[[str], str | bytes]], None]:
    """Add an attack that spells the manifest otherwise."""

    def add(change: Callable[[str], str | bytes]) -> None:
        ATTACKS[name] = lambda parts: parts.pack(change(json.dumps(parts.manifest)))
        ERRORS[name] = error

    return add


texts("a manifest that is empty")(lambda text: "")
texts("a manifest that is no JSON")(lambda text: text[:-1])
texts("a manifest that is a list")(lambda text: "[]")
texts("a manifest that is no UTF-8")(lambda text: text.encode().replace(b"models/first", b"models/\xff\xfe"))
texts("a manifest that is nested deeply")(lambda text: "[" * 200_000)
texts("a manifest of very many empty lists")(lambda text: "[" + "[]," * (8 << 20) + "[]]")
texts("a manifest of very many numbers")(lambda text: "[" + "7," * (12 << 20) + "7]")
texts("a manifest that is too long")(lambda text: text + " " * (33 << 20))
texts("a number of very many digits")(lambda text: with_value(text, "n_tokens", "9" * 100_000))
texts("a number that SQLite can't hold")(lambda text: with_value(text, "created_at", "9" * 30))
texts("a number that is NaN")(lambda text: with_value(text, "n_tokens", "NaN"))
texts("a number that is infinite")(lambda text: with_value(text, "n_tokens", "Infinity"))
texts("a number with a fraction")(lambda text: with_value(text, "n_tokens", "8.0"))
texts("a number that is true")(lambda text: with_value(text, "start", "true"))
texts("a negative size")(lambda text: with_value(text, "n_bytes", "-1840"))
texts("a negative number of tokens")(lambda text: with_value(text, "n_tokens", "-8"))
texts("a key twice")(lambda text: text.replace('"chunk_tokens"', '"chunk_tokens": 8, "chunk_tokens"', 1))
texts("a key too many")(lambda text: text.replace('"chunk_tokens"', '"__reduce__": "os.system", "chunk_tokens"', 1))
texts("a key too few")(lambda text: text.replace('"has_state": false, ', "", 1))
texts("a wrong format")(lambda text: text.replace("prefixbank archive", "prefixbank bank", 1))
texts("a newer format", SchemaError)(lambda text: with_value(text, "format_version", "2"))
texts("a format version that is true", SchemaError)(lambda text: with_value(text, "format_version", "true"))
texts("a newer shard format", SchemaError)(lambda text: with_value(text, "shard_format_version", '"2"'))
texts("half a surrogate pair as a name")(lambda text: text.replace('"name": "short"', '"name": "\\ud800"', 1))


@changing("chunks of another length", FingerprintMismatchError)
def _(parts: Parts) -> None:
    parts.manifest["chunk_tokens"] = 16
    keep_short(parts)


def keep_short(parts: Parts) -> None:
    """Leave one prefix of one chunk, so that any `chunk_tokens` above it would do."""
    entry = next(s for s in parts.manifest["shards"] if s["n_tokens"] == CHUNK_TOKENS and not s["parent_key"])
    number = parts.manifest["shards"].index(entry)
    parts.shards = [parts.shards[number]]
    parts.manifest["shards"] = [entry]
    prefix = parts.manifest["prefixes"][0] | {"namespace": 0, "chunk_key": entry["chunk_key"], "n_tokens": 8}
    parts.manifest["namespaces"] = [parts.manifest["namespaces"][entry["namespace"]]]
    parts.manifest["prefixes"] = [prefix]
    entry["namespace"] = 0


for _bad in ["", "../../x", "a/../b", "..", "x\ny", "\x1b[2J", "x" * 201, " x", "\x7f", "x\x00y"]:
    changing(f"the name {_bad[:8]!r}")(
        lambda parts, bad=_bad: parts.manifest["prefixes"][0].update(name=bad)  # type: ignore[misc]
    )
changing("a name that is a number")(lambda parts: parts.manifest["prefixes"][0].update(name=7))
changing("a name twice")(lambda parts: parts.manifest["prefixes"].append(parts.manifest["prefixes"][0]))
changing("a pin that is a text")(lambda parts: parts.manifest["prefixes"][0].update(pinned="yes"))
changing("namespaces in another order")(lambda parts: parts.manifest["namespaces"].reverse())
changing("no prefixes")(lambda parts: parts.manifest.update(prefixes=[]))
changing("a prefix without a shard")(lambda parts: parts.manifest["prefixes"][0].update(chunk_key="0" * 32))
changing("a prefix longer than its shards")(lambda parts: parts.manifest["prefixes"][0].update(n_tokens=1000))
changing("a prefix in a namespace that is not there")(lambda parts: parts.manifest["prefixes"][0].update(namespace=9))
changing("a prefix in another namespace than its shards")(
    lambda parts: parts.manifest["prefixes"][0].update(namespace=1)
)
changing("a shard that no prefix needs")(lambda parts: parts.manifest["prefixes"].pop())
changing("a namespace twice")(lambda parts: parts.manifest["namespaces"].append(parts.manifest["namespaces"][0]))
changing("a fingerprint that is none")(lambda parts: parts.manifest["namespaces"][0].update(fingerprint="../" * 21))
changing("a root key that is not the namespace's own")(
    lambda parts: parts.manifest["namespaces"][0].update(root_key="0" * 32)
)
changing("a salt in place of its digest")(lambda parts: parts.manifest["namespaces"][0].update(salt_digest="secret"))
changing("a label of a megabyte")(lambda parts: parts.manifest["namespaces"][0].update(label="x" * (1 << 20)))
changing("a parent that is missing")(lambda parts: parts.manifest["shards"][1].update(parent_key="0" * 32))
changing("a parent that is the chunk itself")(
    lambda parts: parts.manifest["shards"][1].update(parent_key=parts.manifest["shards"][1]["chunk_key"])
)
changing("a digest of other bytes")(lambda parts: parts.manifest["shards"][0].update(digest="0" * 32))
changing("states where the layout has none")(lambda parts: parts.manifest["shards"][0].update(has_state=True))


@changing("a cycle of parents")
def _(parts: Parts) -> None:
    first, second = parts.manifest["shards"][:2]
    first["parent_key"], second["parent_key"] = second["chunk_key"], first["chunk_key"]


def layouts(parts: Parts, layout: Any) -> None:
    for namespace in parts.manifest["namespaces"]:
        namespace["layout"] = layout if isinstance(layout, str) else json.dumps(layout, separators=(",", ":"))


_ROWS = {"arrays": [["keys", "F16", 2, 8]], "kind": "rows", "n_layers": 2, "settings": {}}
for _name, _layout in {
    "another layout": [_ROWS],
    "a layout of a billion layers": [_ROWS | {"n_layers": 10**9}],
    "a layout of minus one layers": [_ROWS | {"n_layers": -1}],
    "a layout of negative width": [_ROWS | {"arrays": [["keys", "F16", -2, -8]]}],
    "a layout whose sizes overflow": [_ROWS | {"arrays": [["keys", "F16", 2**62, 2**62]]}],
    "a layout of an unknown dtype": [_ROWS | {"arrays": [["keys", "object", 2, 8]]}],
    "a layout nested deeply": '[{"members":' * 5000,
    "a layout that is no JSON": "layout",
    "a layout that is empty": [],
}.items():
    changing(_name)(lambda parts, layout=_layout: layouts(parts, layout))  # type: ignore[misc]


# --- shards


@changing("a shard with a byte changed")
def _(parts: Parts) -> None:
    name, content = parts.shards[-1]
    parts.shards[-1] = (name, content[:-1] + bytes([content[-1] ^ 1]))


@changing("a shard with a byte changed and the digest right")
def _(parts: Parts) -> None:
    content = parts.shards[-1][1]
    parts.replace_shard(-1, content[:-1] + bytes([content[-1] ^ 1]))  # the seal is not


@changing("another chunk key than the token ids have")
def _(parts: Parts) -> None:
    keep_short(parts)
    parts.rename_shard(0, "ab" * 16)
    parts.manifest["prefixes"][0]["chunk_key"] = "ab" * 16
    parts.change_metadata(0, chunk_key="ab" * 16)


changing("other token ids")(lambda parts: parts.change_metadata(0, token_ids="[9,9,9,9,9,9,9,9]"))
changing("token ids that are too large")(lambda parts: parts.change_metadata(0, token_ids="[4294967296]"))
changing("token ids that are no list")(lambda parts: parts.change_metadata(0, token_ids='{"a":1}'))
changing("token ids nested deeply")(lambda parts: parts.change_metadata(0, token_ids="[" * 5000))
changing("a shard of another fingerprint")(lambda parts: parts.change_metadata(0, fingerprint="0f" * 32))
changing("a shard of another parent")(lambda parts: parts.change_metadata(1, parent_key="0f" * 16))
changing("a shard of another root")(lambda parts: parts.change_metadata(0, root_key="0f" * 16))
changing("a shard of another start")(lambda parts: parts.change_metadata(1, start="16"))
changing("a shard of another layout")(lambda parts: parts.change_metadata(0, layout="[]"))
changing("a shard of a newer format", SchemaError)(lambda parts: parts.change_metadata(0, format_version="2"))


@changing("a shard of another namespace of the archive")
def _(parts: Parts) -> None:
    ids = [n["fingerprint"] for n in parts.manifest["namespaces"]]
    parts.change_metadata(0, fingerprint=ids[1], root_key=root_key(ids[1]).hex())


def header_with(name: str, old: str, new: str) -> None:
    def change(parts: Parts) -> None:
        text = parts.header(0)
        assert old in text
        parts.replace_header(0, text.replace(old, new, 1))

    changing(name)(change)


header_with("a tensor that overlaps another", '"data_offsets":[0,', '"data_offsets":[8,')
header_with("a tensor of another shape", '"shape":[1,2,', '"shape":[1,4,')
header_with("a tensor whose shape overflows", '"shape":[1,2,', '"shape":[9223372036854775807,2,')
header_with("a tensor of a negative dimension", '"shape":[1,2,', '"shape":[-1,2,')
header_with("a tensor of another dtype", '"dtype":"F16"', '"dtype":"F32"')
header_with("a tensor twice", '"0.keys":', '"0.keys":{"dtype":"F16","shape":[0],"data_offsets":[0,0]},"0.keys":')
header_with("a header with blanks", '{"__metadata__"', '{ "__metadata__"')


@changing("a header longer than its shard")
def _(parts: Parts) -> None:
    content = parts.shards[0][1]
    parts.replace_shard(0, (2**40).to_bytes(8, "little") + content[8:])


@changing("a shard that is a pickle")
def _(parts: Parts) -> None:
    import pickle

    content = pickle.dumps({"cmd": os.system})
    parts.replace_shard(0, content.ljust(len(parts.shards[0][1]), b"."))
