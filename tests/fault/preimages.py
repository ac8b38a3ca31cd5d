"""Build second preimages of xxh3_128: other token ids that have the very chunk key of given ones.

xxh3 adds up, for each of eight 8-byte lanes of a 64-byte stripe, the product of the lane's low and high halves, each
xored with a constant, and the lane itself; 16 stripes go into one sum before it is scrambled
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). A lane is two token ids. With its low half left as it
is, the product is linear in the high one; so it takes small changes of high halves in several stripes whose sums cancel
in the product and in the lane, which a meeting in the middle finds.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import xxhash

from prefixbank.chunking import pack_token_ids, unpack_token_ids

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a"
    "51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8f"
    "f8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The default secret of xxh3, from its specification."""

_N_CHANGES = 8  # of a token id: its three low bits, so that it stays below any vocabulary that is a multiple of 8
_N_STRIPES = 15  # of the first block; the last 64 bytes of the input are hashed once more on their own
_KEY_BYTES = 16


def second_preimage(parent_key: bytes, token_ids: list[int], lane: int = 3) -> list[int]:
    """Return other token ids with the key of the given 256 behind `parent_key`; few ids change, by less than 8."""
    data = parent_key + pack_token_ids(token_ids)
    assert len(data) == 1040, "a full chunk of 256 token ids"
    places = [64 * stripe + 8 * lane for stripe in range(_N_STRIPES)]
    options = [_options(data, stripe, lane) for stripe in range(_N_STRIPES)]
    left, right = _sums(options[:7]), _sums(options[7:14])
    order = np.argsort(left, kind="stable")
    found = np.searchsorted(left[order], -right)
    inside = np.minimum(found, len(left) - 1)
    for at in np.flatnonzero(left[order][inside] == -right):
        number_left, number_right = int(order[inside[at]]), int(at)
        if not (number_left or number_right):
            continue  # nothing is changed
        changes = [*_digits(number_left, 7), *_digits(number_right, 7)]
        other = bytearray(data)
        for place, change in zip(places, changes, strict=False):
            other[place + 4] ^= change
        if xxhash.xxh3_128_digest(bytes(other)) == xxhash.xxh3_128_digest(data):
            return unpack_token_ids(bytes(other[_KEY_BYTES:]))
    if lane == 7:
        raise ValueError("no second preimage found")
    return second_preimage(parent_key, token_ids, lane + 1)


def _options(data: bytes, stripe: int, lane: int) -> npt.NDArray[np.int64]:
    """Return, for each change of a lane's high half, what it adds to the product, and to the lane in the low bits."""
    secret = _SECRET[8 * stripe + 8 * lane :]
    place = 64 * stripe + 8 * lane
    low = int.from_bytes(data[place : place + 4], "little") ^ int.from_bytes(secret[:4], "little")
    high, mask = int.from_bytes(data[place + 4 : place + 8], "little"), int.from_bytes(secret[4:8], "little")
    added = [
        (low * (((high ^ change) ^ mask) - (high ^ mask)) << 10) + ((high ^ change) - high)
        for change in range(_N_CHANGES)
    ]
    return np.array(added, np.int64)


def _sums(options: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    total = np.zeros(1, np.int64)
    for added in options:
        total = (total[:, None] + added[None, :]).ravel()
    return total


def _digits(number: int, n: int) -> list[int]:
    return list(itertools.islice((number >> 3 * at & 7 for at in reversed(range(n))), n))
