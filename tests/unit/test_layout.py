"""Hold shards to the safetensors format, and layouts to their JSON."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from prefixbank.bank import PrefixBank
from prefixbank.errors import SchemaError
from prefixbank.layout import ITEM_BYTES, CacheLayout, LayerLayout, RowArray
from tests.fakekv import LAYOUT, FakeModel

NAMES = st.text("abcxyz_", min_size=1, max_size=8)
ROW_ARRAYS = st.builds(RowArray, NAMES, st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 64), st.integers(1, 256))
SETTINGS = st.dictionaries(NAMES, st.integers(-5, 5000), max_size=3).map(lambda s: tuple(sorted(s.items())))
LAYERS = st.builds(
    LayerLayout, NAMES, SETTINGS, st.lists(ROW_ARRAYS, min_size=1, max_size=3, unique_by=lambda a: a.role).map(tuple)
)
LAYOUTS = st.lists(LAYERS, max_size=5).map(lambda layers: CacheLayout(tuple(layers)))


@given(LAYOUTS, st.integers(1, 4))
def test_layouts_come_back_from_json(layout: CacheLayout, n_times: int) -> None:
    repeated = CacheLayout(layout.layers * n_times)
    assert CacheLayout.from_json(repeated.to_json()) == repeated


def test_equal_layers_take_no_more_json_than_one() -> None:
    layer = LAYOUT.layers[0]
    assert len(CacheLayout((layer,) * 64).to_json()) <= len(CacheLayout((layer,)).to_json()) + 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "5",
        "null",
        '{"n_layers": 1}',
        '[{"n_layers":1,"kind":"kv","settings":{}}]',
        '[{"n_layers":1,"kind":"kv","settings":[],"arrays":[]}]',
        '[{"n_layers":1,"kind":"kv","settings":{"max_size":null},"arrays":[]}]',
        '[{"n_layers":1,"kind":"kv","settings":{},"arrays":[["keys","F8",1,1]]}]',
        '[{"n_layers":1,"kind":"kv","settings":{},"arrays":[["keys","F32",1]]}]',
        '[{"n_layers":1e999,"kind":"kv","settings":{},"arrays":[]}]',
    ],
)
def test_a_layout_that_can_not_be_read_is_a_schema_error(text: str) -> None:
    with pytest.raises(SchemaError, match="layout"):
        CacheLayout.from_json(text)


@given(LAYOUTS, st.integers(1, 300))
def test_headers_are_aligned_and_their_tensors_have_no_gaps(layout: CacheLayout, n_tokens: int) -> None:
    header = layout.shard_header(n_tokens, {"format": "prefixbank"})
    (length,) = struct.unpack("<Q", header[:8])
    assert len(header) == 8 + length
    assert length % 8 == 0
    tensors: dict[str, Any] = json.loads(header[8:])
    assert tensors.pop("__metadata__") == {"format": "prefixbank"}
    offset = 0
    for tensor in tensors.values():
        low, high = tensor["data_offsets"]
        assert low == offset
        assert high - low == int(np.prod(tensor["shape"])) * ITEM_BYTES[tensor["dtype"]]
        offset = high
    assert offset == layout.data_bytes(n_tokens)


TOKENS = [5, 6, 7, 8, 2**32 - 1, 0]


def test_the_safetensors_library_reads_our_shards(bank: PrefixBank, model: FakeModel) -> None:
    model.store(TOKENS)
    full, tail = sorted(bank.chunks(), key=lambda record: record.start)
    for record in (full, tail):
        tensors = dict(safetensors.deserialize(model.path_of(record).read_bytes()))
        assert sorted(tensors) == sorted(f"{layer}.{a.role}" for layer, a in LAYOUT.row_arrays())
        rows = b""
        for layer, row_array in LAYOUT.row_arrays():
            tensor = tensors[f"{layer}.{row_array.role}"]
            assert tensor["dtype"] == row_array.dtype
            assert tensor["shape"] == [1, row_array.n_heads, record.n_tokens, row_array.width]
            rows += bytes(tensor["data"])
        assert rows == model.source(TOKENS).joined(record.start, record.n_tokens)
    assert (full.n_tokens, tail.n_tokens) == (4, 2)  # never padded


def test_bfloat16_tensors_keep_their_bits(bank: PrefixBank, model: FakeModel) -> None:
    model.store(TOKENS)
    first = min(bank.chunks(), key=lambda record: record.start)
    tensor = dict(safetensors.deserialize(model.path_of(first).read_bytes()))["1.keys"]
    assert tensor["dtype"] == "BF16"
    one_head = list(model.source(TOKENS).runs(0, 4))[4]  # behind two heads of keys and two of values
    assert bytes(tensor["data"]) == one_head.tobytes()


def test_a_shards_metadata_suffices_to_rebuild_its_row(bank: PrefixBank, model: FakeModel) -> None:
    model.store(TOKENS)
    for record in bank.chunks():
        with safetensors.safe_open(model.path_of(record), framework="np") as shard:
            said = shard.metadata()
        ids = TOKENS[record.start : record.end]
        assert json.loads(said["token_ids"]) == ids
        assert said["format"] == "prefixbank"
        assert said["format_version"] == "1"
        assert said["chunk_key"] == record.key.hex()
        assert said["parent_key"] == (record.parent_key.hex() if record.parent_key else "")
        assert (said["start"], said["n_tokens"]) == (str(record.start), str(record.n_tokens))
        assert said["fingerprint"] == model.namespace.fingerprint
        assert said["root_key"] == model.namespace.root_key.hex()
        assert said["salt_digest"] == ""
        assert CacheLayout.from_json(said["layout"]) == LAYOUT


def test_a_shard_tells_no_salt(bank: PrefixBank) -> None:
    model = FakeModel(bank, salt=b"tenant-secret")
    model.store(TOKENS)
    for record in bank.chunks():
        assert b"tenant-secret" not in model.path_of(record).read_bytes()
    assert b"tenant-secret" not in (bank.root / "index.sqlite3").read_bytes()
