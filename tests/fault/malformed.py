"""Make malformed shards: each structure has a name, and is wrong in one way that some reader of safetensors lets pass.

Bodies and lengths are right as far as the fault allows, so that nothing but the fault itself gives it away.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

Header = dict[str, Any]


def pack(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """Return a file of a header and the tensors behind it; `length` is what the first 8 bytes say, if not the truth."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def compact(header: Header) -> bytes:
    """Return a header as the program writes it."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def malformed(shard: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield `(name, file)` of every malformed structure made of a right shard of at least two tensors."""
    (length,) = struct.unpack("<Q", shard[:8])
    text, data = shard[8 : 8 + length], shard[8 + length :]
    good: Header = json.loads(text)
    names = [name for name in good if name != "__metadata__"]
    first, second, last = names[0], names[1], names[-1]

    def edited(change: Callable[[Header], Any]) -> bytes:
        header = deepcopy(good)
        change(header)
        return pack(compact(header), data)

    def tensor(name: str, field: str, value: object) -> bytes:
        return edited(lambda header: header[name].__setitem__(field, value))

    def meta(field: str, value: object) -> bytes:
        return edited(lambda header: header["__metadata__"].__setitem__(field, value))

    shape = good[first]["shape"]
    begin, end = good[first]["data_offsets"]
    dims: dict[str, object] = {
        "overflow to the same product": [2**32, 2**32, *shape],
        "overflow to zero": [2**63, 2],
        "2**64 - 1": [2**64 - 1],
        "2**64": [2**64, *shape],
        "negative": [-n for n in shape],
        "two negative": [shape[0], -shape[1], -shape[2], shape[3]],
        "minus one": [-1, *shape[1:]],
        "float": [float(n) for n in shape],
        "fraction": [shape[0], shape[1], shape[2], shape[3] + 0.9],
        "huge float": [1e300, *shape[1:]],
        "bool": [True, *shape[1:]],
        "text": [str(n) for n in shape],
        "null": [None, *shape[1:]],
        "nested": [shape],
        "no list": shape[1],
        "object": {"0": shape},
        "empty": [],
        "zero": [0, *shape[1:]],
        "one less": [*shape[:2], shape[2] - 1, shape[3]],
        "one more": [*shape[:2], shape[2] + 1, shape[3]],
        "transposed": shape[::-1],
        "flat": [shape[0] * shape[1] * shape[2] * shape[3]],
        "trailing one": [*shape, 1],
        "very many": [1] * 5000 + shape,
        "digits without end": 10**4000,
    }
    for name, value in dims.items():
        yield f"dims: {name}", tensor(first, "shape", value)
    second_begin, second_end = good[second]["data_offsets"]
    offsets: dict[str, object] = {
        "reversed": [end, begin],
        "empty": [begin, begin],
        "negative begin": [-8, end],
        "negative both": [-end, -begin],
        "end beyond the file": [begin, len(data) + 8],
        "far beyond the file": [2**62, 2**62 + end],
        "wrapping": [2**64 - 8, 2**64 + end - 8],
        "one short": [begin, end - 1],
        "one long": [begin, end + 1],
        "shifted": [begin + 1, end + 1],
        "float": [float(begin), float(end)],
        "bool": [False, end],
        "text": [str(begin), str(end)],
        "null": None,
        "one": [begin],
        "three": [begin, end, end],
        "none": [],
        "overlapping the next": [begin, second_end],
        "those of the next": [second_begin, second_end],
    }
    for name, value in offsets.items():
        yield f"offsets: {name}", tensor(first, "data_offsets", value)
    yield "offsets: a gap", tensor(last, "data_offsets", [n + 8 for n in good[last]["data_offsets"]])
    yield "offsets: all the same", edited(lambda h: [h[n].__setitem__("data_offsets", [begin, end]) for n in names])
    for dtype in ("F64", "I64", "F8_E4M3", "C64", "BOOL", "f32", "", "F32 ", "X" * 10_000, None, 32, ["F32"], True):
        if dtype != good[first]["dtype"]:
            yield f"dtype: {str(dtype)[:12]!r} {type(dtype).__name__}", tensor(first, "dtype", dtype)
    swapped = good[second]["dtype"] if good[second]["dtype"] != good[first]["dtype"] else "U8"
    yield "dtype: the next one's", tensor(first, "dtype", swapped)
    for field in ("shape", "dtype", "data_offsets"):
        yield f"tensor: without {field}", edited(lambda h, field=field: h[first].pop(field))
    yield "tensor: with a field more", tensor(first, "extra", 1)
    for value in (None, [], 7, "F32", True, {}):
        yield f"tensor: is {value!r}", edited(lambda h, value=value: h.__setitem__(first, value))
    yield "names: one is lost", edited(lambda h: h.pop(last))
    yield "names: all are lost", pack(compact({"__metadata__": good["__metadata__"]}), data)
    yield "names: one more", edited(lambda h: h.__setitem__("extra", h[last]))
    yield (
        "names: one more, of no bytes",
        edited(lambda h: h.__setitem__("x", {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]})),
    )
    for name in ("", "9.keys", "../../x", "0.keys\0", "x" * 100_000, "\u202e0.keys", "__proto__"):
        renamed = {(name if key == first else key): value for key, value in good.items()}
        yield f"names: the first is {name[:10]!r}", pack(compact(renamed), data)
    exchanged = {{first: second, second: first}.get(key, key): value for key, value in good.items()}
    yield "names: two are exchanged", pack(compact(exchanged), data)
    order = {key: good[key] for key in ("__metadata__", *names[::-1])}
    yield "names: in another order", pack(compact(order), data)
    twice = compact(good).rstrip()[:-1] + b',"' + first.encode() + b'":' + json.dumps(good[second]).encode() + b"}"
    yield "names: one is there twice", pack(twice, data)
    first_text = json.dumps({first: good[first]}, separators=(",", ":")).encode()[1:-1]
    yield "names: one is there twice, the same", pack(text.rstrip()[:-1] + b"," + first_text + b"}", data)
    lone = text.replace(b'"label":"', b'"label":"\\ud800', 1)
    yield "names: a lone surrogate in the label", pack(lone, data)
    yield "metadata: there twice", pack(b'{"__metadata__":{},' + text[1:], data)
    yield "metadata: a field twice", pack(text.replace(b'"start":', b'"start":"8","start":', 1), data)
    metadata_last = {**{name: good[name] for name in names}, "__metadata__": good["__metadata__"]}
    yield "metadata: is last", pack(compact(metadata_last), data)
    yield "metadata: is lost", edited(lambda h: h.pop("__metadata__"))
    for value in (None, [], "text", 7, {"format": 7}, {"a": {"b": "c"}}, {}):
        yield f"metadata: is {value!r}", edited(lambda h, value=value: h.__setitem__("__metadata__", value))
    for field in good["__metadata__"]:
        if field != "content_digest":  # older versions wrote none
            yield f"metadata: without {field}", edited(lambda h, field=field: h["__metadata__"].pop(field))
        yield f"metadata: {field} is a number", meta(field, 1)
    metas: dict[str, list[object]] = {
        "format": ["pt", "prefixbank "],
        "format_version": ["0", "01", "-1", "one", ""],
        "fingerprint": ["0" * 64, "A" * 64, "0" * 63, "g" * 64, ""],
        "salt_digest": ["0" * 64, "none"],
        "root_key": ["0" * 32, "", "0" * 31],
        "chunk_key": ["0" * 32, "../" * 10 + "ab", ""],
        "parent_key": ["0" * 32, "x"],
        "start": ["-4", "4.0", "1" * 5000, "4", " 0", "\u0664", ""],
        "n_tokens": ["0", "-1", "3", "5", "999999999999999999999", "1e3", ""],
        "token_ids": [
            "",
            "[]",
            "null",
            "[1,2,3]",
            "[1.0,2.0,3.0,4.0]",
            "[true,true,true,true]",
            "[-1,2,3,4]",
            "[4294967296,1,1,1]",
            "[1, 2, 3, 4]",
            "[1e999,1,1,1]",
            "[NaN,1,1,1]",
            '{"0":1}',
            "[" * 100_000,
            "[" + "9" * 5000 + "]",
        ],
        "layout": [
            "",
            "[]",
            "{}",
            "null",
            "[" * 100_000,
            '[{"kind":"kv","n_layers":1000000000000,"settings":{},"arrays":[["keys","F32",1,1]]}]',
            '[{"kind":"kv","n_layers":-1,"settings":{},"arrays":[["keys","F32",1,1]]}]',
            '[{"kind":"kv","n_layers":1,"settings":{},"arrays":[["keys","F32",-2,-6]]}]',
            '[{"kind":"kv","n_layers":1e400,"settings":{},"arrays":[]}]',
            '[{"kind":"list","n_layers":1,"settings":{},"arrays":[],"members":' + "[" * 900 + "]" * 900 + "}]",
            '[{"kind":"none","n_layers":9999,"settings":{},"arrays":[' + ",".join(['["k","F32",0,0]'] * 9_000) + "]}]",
        ],
        "content_digest": ["f" * 32, "", "0" * 31, "F" * 32],
    }
    for field, values in metas.items():
        for number, value in enumerate(values):
            if value != good["__metadata__"][field]:
                yield f"metadata: {field} wrong in way {number}", meta(field, value)
    yield "bytes: trailing", shard + b"\0"
    yield "bytes: a block trailing", shard + bytes(4096)
    yield "bytes: a second shard trailing", shard + shard
    yield "bytes: one short", shard[:-1]
    yield "bytes: no tensors", pack(text, b"")
    yield "bytes: tensors one up", pack(text, b"\0" + data[:-1])
    yield "header: padded with more spaces", pack(text + b" " * 8, data)
    yield "header: padded with zeros", pack(text.rstrip() + b"\0" * 8, data)
    yield "header: spaces in front", pack(b" " * 8 + text, data)
    yield "header: a byte-order mark", pack(b"\xef\xbb\xbf" + text, data)
    yield "header: UTF-16", pack(text.decode().encode("utf-16"), data)
    yield "header: not UTF-8", pack(text.replace(b'"label":"', b'"label":"\xff\xfe', 1), data)
    yield "header: overlong UTF-8", pack(text.replace(b'"label":"', b'"label":"\xc0\x80', 1), data)
    yield "header: a null character", pack(text.replace(b'"label":"', b'"label":"\0', 1), data)
    yield "header: garbage behind it", pack(text.rstrip() + b"{}      ", data)
    yield "header: a comment", pack(text.rstrip()[:-1] + b"/**/}", data)
    yield "header: a trailing comma", pack(text.rstrip()[:-1] + b",}", data)
    yield "header: single quotes", pack(text.replace(b'"', b"'"), data)
    yield "header: a list", pack(b"[" + text.rstrip() + b"]", data)
    for value in (b"", b"{", b"}", b"{}", b"null", b"0", b'""', b"NaN"):
        yield f"header: is {value.decode()!r}", pack(value, data)
    for name, number in {
        "0": 0,
        "1": 1,
        "8 more": length + 8,
        "8 less": length - 8,
        "the file's": len(shard),
        "beyond the file": len(shard) + 1,
        "100 MB": 10**8,
        "2**31": 2**31,
        "2**63": 2**63,
        "2**64 - 1": 2**64 - 1,
    }.items():
        yield f"length: {name}", pack(text, data, number)
    yield "nesting: 100,000 lists", pack(b"[" * 100_000, data)
    yield "nesting: 100,000 objects", pack(b'{"a":' * 100_000, data)
    yield "nesting: in the metadata", pack(b'{"__metadata__":' + b"[" * 100_000, data)
    yield "nesting: 40 MB of brackets", pack(b"[" * 40_000_000, data)
    yield "nesting: 2 MB of empty lists", pack(b'{"__metadata__":[' + b"[]," * 690_000 + b"[]]}", data)
    yield "nesting: 2 MB of empty objects", pack(b'{"__metadata__":[' + b"{}," * 690_000 + b"{}]}", data)
    many_lists = "[" + "[]," * 170_000 + "[]]"
    yield "nesting: half a MB of empty lists for token ids", meta("token_ids", many_lists)
    yield "nesting: half a MB of empty lists for a layout", meta("layout", many_lists)
    yield "size: empty", b""
    yield "size: 7 bytes", shard[:7]
    yield "size: 8 bytes", shard[:8]
    yield "size: half a header", shard[: 8 + length // 2]
    yield "zeros", bytes(len(shard))
    yield "ones", b"\xff" * len(shard)
