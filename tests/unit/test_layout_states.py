"""Hold layouts with states and members, and the shards written by them, to the format."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from prefixbank.bank import PrefixBank
from prefixbank.layout import ITEM_BYTES, CacheLayout, LayerLayout, RowArray, StateArray
from tests.fakekv import HYBRID, LAYOUT, STATES_ONLY, FakeModel

SHOTS = list(range(1, 13))  # three chunks of 4

NAMES = st.text("abcxyz_", min_size=1, max_size=8)
DTYPES = st.sampled_from(sorted(ITEM_BYTES))
ROWS = st.lists(
    st.builds(RowArray, NAMES, DTYPES, st.integers(1, 8), st.integers(1, 64)), max_size=3, unique_by=lambda a: a.role
).map(tuple)
STATES = st.lists(
    st.builds(StateArray, NAMES, DTYPES, st.lists(st.integers(0, 5), max_size=4).map(tuple)),
    max_size=3,
    unique_by=lambda a: a.role,
).map(tuple)
LEAVES = st.builds(LayerLayout, NAMES, st.just(()), ROWS) | st.builds(
    LayerLayout, NAMES, st.just((("n", 2),)), st.just(()), STATES
)
LAYERS = st.recursive(
    LEAVES, lambda inner: st.builds(lambda m: LayerLayout("list", members=tuple(m)), st.lists(inner, max_size=3))
)
LAYOUTS = st.lists(LAYERS, max_size=4).map(lambda layers: CacheLayout(tuple(layers)))


@given(LAYOUTS, st.integers(1, 3))
def test_layouts_with_states_and_members_come_back_from_json(layout: CacheLayout, n_times: int) -> None:
    repeated = CacheLayout(layout.layers * n_times)
    again = CacheLayout.from_json(repeated.to_json())
    assert again == repeated
    assert again.to_json() == repeated.to_json()
    assert again.has_state == any(leaf.states for _, leaf in layout.leaves())


def test_layouts_that_differ_in_states_alone_differ_in_json() -> None:
    state = StateArray("0", "F32", (1, 2))
    leaves = [LayerLayout("arrays", (), (), states) for states in ((), (state,), (state, replace(state, role="1")))]
    leaves += [
        LayerLayout("arrays", (), (), (replace(state, shape=(2, 1)),)),
        LayerLayout("arrays", members=(leaves[1],)),
    ]
    assert len({CacheLayout((leaf,)).to_json() for leaf in leaves}) == len(leaves)


@given(LAYOUTS, st.integers(1, 50), st.booleans())
def test_headers_with_states_have_no_gaps(layout: CacheLayout, n_tokens: int, with_state: bool) -> None:
    header = layout.shard_header(n_tokens, {}, with_state=with_state)
    (length,) = struct.unpack("<Q", header[:8])
    assert len(header) == 8 + length
    tensors: dict[str, Any] = json.loads(header[8:])
    del tensors["__metadata__"]
    end = 0
    for tensor in tensors.values():
        assert tensor["data_offsets"][0] == end
        end = tensor["data_offsets"][1]
    assert end == layout.data_bytes(n_tokens, with_state=with_state)
    n_names = len(list(layout.row_arrays())) + with_state * len(list(layout.state_arrays()))
    assert len(tensors) == n_names  # no name twice
    safetensors.deserialize(header + bytes(end))


def test_members_have_paths_and_states_have_bytes() -> None:
    assert [path for path, _ in HYBRID.leaves()] == ["0", "1", "2.0", "2.1", "2.2.0", "2.2.1", "3"]
    state_bytes = 64 * 20 * 4 + 12 * 2 + 5
    assert HYBRID.data_bytes(3, with_state=True) - HYBRID.data_bytes(3) == state_bytes
    assert HYBRID.data_bytes(3) == 3 * HYBRID.token_bytes
    assert STATES_ONLY.data_bytes(7) == STATES_ONLY.token_bytes == 0
    assert (HYBRID.has_state, STATES_ONLY.has_state, LAYOUT.has_state) == (True, True, False)


@pytest.mark.parametrize("layout", [HYBRID, STATES_ONLY], ids=["hybrid", "states only"])
def test_the_safetensors_library_reads_shards_with_states(bank: PrefixBank, layout: CacheLayout) -> None:
    model = FakeModel(bank, layout=layout)
    model.store(SHOTS[:8], ends=[2, 8])
    assert sorted((c.start, c.end, c.has_state) for c in bank.chunks()) == [(0, 2, True), (0, 4, False), (4, 8, True)]
    for record in bank.chunks():
        source = model.source(SHOTS)
        expected = {
            f"{path}.{a.role}": (a.dtype, [1, a.n_heads, record.n_tokens, a.width]) for path, a in layout.row_arrays()
        }
        if record.has_state:
            expected |= {f"{path}.{a.role}": (a.dtype, list(a.shape)) for path, a in layout.state_arrays()}
        content = model.path_of(record).read_bytes()
        tensors = dict(safetensors.deserialize(content))
        assert {name: (t["dtype"], t["shape"]) for name, t in tensors.items()} == expected
        data = b"".join(bytes(tensors[name]["data"]) for name in expected)
        assert data == source.joined(record.start, record.n_tokens, with_state=record.has_state)
        assert len(content) == record.n_bytes
        assert record.n_bytes - record.data_offset == len(data)
        with safetensors.safe_open(model.path_of(record), framework="np") as shard:
            metadata = shard.metadata()
        assert CacheLayout.from_json(metadata["layout"]) == layout
        assert json.loads(metadata["token_ids"]) == SHOTS[record.start : record.end]
