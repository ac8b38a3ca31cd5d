"""Hold chunk keys to their laws, and packing and comparing token ids to naive versions of themselves."""

from __future__ import annotations

import struct
from itertools import takewhile

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefixbank import chunking
from prefixbank.chunking import chunk_key, common_run, full_chunks, pack_token_ids, root_key, unpack_token_ids
from prefixbank.errors import PromptError

FINGERPRINT = "ab" * 32
ROOT = root_key(FINGERPRINT)
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
FEW_TOKENS = st.lists(st.integers(0, 2), max_size=40)


def keys_of(token_ids: list[int], chunk_tokens: int) -> list[bytes]:
    return [key for _, key in full_chunks(ROOT, pack_token_ids(token_ids), chunk_tokens)]


@given(TOKEN_IDS, TOKEN_IDS, st.integers(1, 9))
def test_chunk_keys_depend_on_the_prefix_alone(prefix: list[int], rest: list[int], chunk_tokens: int) -> None:
    whole_keys = keys_of(prefix + rest, chunk_tokens)
    assert whole_keys[: len(prefix) // chunk_tokens] == keys_of(prefix, chunk_tokens)


@given(FEW_TOKENS, FEW_TOKENS, st.integers(1, 5))
def test_chunk_keys_agree_exactly_as_far_as_the_token_ids_do(left: list[int], right: list[int], n: int) -> None:
    n_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    pairs = zip(keys_of(left, n), keys_of(right, n), strict=False)
    assert sum(1 for a, b in pairs if a == b) == n_common // n


@given(TOKEN_IDS, st.integers(1, 9))
def test_full_chunks_leave_out_the_tail(token_ids: list[int], chunk_tokens: int) -> None:
    starts = [start for start, _ in full_chunks(ROOT, pack_token_ids(token_ids), chunk_tokens)]
    assert starts == list(range(0, len(token_ids) - chunk_tokens + 1, chunk_tokens))


@given(TOKEN_IDS, st.integers(1, 9))
def test_keys_go_on_from_any_chunk(token_ids: list[int], chunk_tokens: int) -> None:
    packed = pack_token_ids(token_ids)
    whole = list(full_chunks(ROOT, packed, chunk_tokens))
    for number, (start, key) in enumerate(whole, 1):
        assert list(full_chunks(key, packed, chunk_tokens, start + chunk_tokens)) == whole[number:]


def test_keys_are_the_documented_hash_so_that_a_prefix_has_one_address_in_every_bank() -> None:
    token_ids = [1, 2, 3, 2**32 - 1]
    root = xxhash.xxh3_128_digest(bytes.fromhex(FINGERPRINT) + b"salt")
    first = xxhash.xxh3_128_digest(root + struct.pack("<2I", 1, 2))
    second = xxhash.xxh3_128_digest(first + struct.pack("<2I", 3, 2**32 - 1))
    found = list(full_chunks(root_key(FINGERPRINT, b"salt"), pack_token_ids(token_ids), 2))
    assert found == [(0, first), (2, second)]


def test_addresses_stay_as_they_are_released() -> None:
    """Banks of older versions are found by these very bytes."""
    assert ROOT.hex() == "17835edf8c4d2a8b3205c3e29590539a"
    assert chunk_key(ROOT, pack_token_ids(range(256))).hex() == "bb8ab7ae594993b6a67630d300c29178"


def test_a_tail_has_a_key_of_its_own() -> None:
    four, three = pack_token_ids([1, 2, 3, 4]), pack_token_ids([1, 2, 3])
    assert chunk_key(ROOT, four) != chunk_key(ROOT, three)
    assert chunk_key(ROOT, three) == chunk_key(ROOT, three)


def test_the_salt_changes_every_key() -> None:
    salted = [key for _, key in full_chunks(root_key(FINGERPRINT, b"s"), pack_token_ids(range(12)), 4)]
    assert not set(salted) & set(keys_of(list(range(12)), 4))


@given(TOKEN_IDS)
def test_packing_is_little_endian_and_comes_back(token_ids: list[int]) -> None:
    packed = pack_token_ids(token_ids)
    assert packed == struct.pack(f"<{len(token_ids)}I", *token_ids)
    assert unpack_token_ids(packed) == token_ids


def test_packing_is_the_same_on_big_endian_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes in memory are swapped there; played by swapping on a little-endian one, both ways."""
    packed = pack_token_ids([1, 2])
    other = "big" if chunking.sys.byteorder == "little" else "little"
    monkeypatch.setattr(chunking.sys, "byteorder", other)
    assert unpack_token_ids(pack_token_ids([1, 2])) == [1, 2]
    assert pack_token_ids([1, 2]) != packed


@pytest.mark.parametrize("wrong", [[-1], [2**32], [1.5], ["1"], [None], "abc", b"abcd", b"abc", bytearray(4)])
def test_what_is_no_token_ids_is_refused(wrong: object) -> None:
    with pytest.raises(PromptError, match="token ids"):
        pack_token_ids(wrong)  # type: ignore[arg-type]


@given(FEW_TOKENS, FEW_TOKENS)
def test_common_run_is_what_a_loop_finds(left: list[int], right: list[int]) -> None:
    naive = 0
    while naive < min(len(left), len(right)) and left[naive] == right[naive]:
        naive += 1
    assert common_run(pack_token_ids(left), pack_token_ids(right)) == naive


@given(TOKEN_IDS, TOKEN_IDS, TOKEN_IDS)
def test_common_run_finds_a_shared_beginning(shared: list[int], left: list[int], right: list[int]) -> None:
    run = common_run(pack_token_ids(shared + left), pack_token_ids(shared + right))
    assert run >= len(shared)
    assert (shared + left)[:run] == (shared + right)[:run]
    assert (shared + left)[run : run + 1] != (shared + right)[run : run + 1] or run == len(shared + left)


def test_common_run_sees_ids_that_differ_in_one_byte_only() -> None:
    for shift in (0, 8, 16, 24):
        assert common_run(pack_token_ids([7, 0, 5]), pack_token_ids([7, 1 << shift, 5])) == 1
