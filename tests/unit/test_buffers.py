"""Hold the allocation of buffers to it: of the right shape, evaluated, their own memory, and written through."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from prefixbank.kvcache import buffers
from prefixbank.kvcache.buffers import allocate as allocate_from

WANTED: list[tuple[tuple[int, ...], mx.Dtype]] = [
    ((1, 2, 7, 6), mx.uint32),
    ((1, 2, 0, 6), mx.uint32),  # the kept rows of a window that keeps none
    ((1, 3, 5, 8), mx.uint16),
    ((5,), mx.uint8),
    ((0,), mx.uint8),
    ((1, 1, 1, 1), mx.uint8),
    *(((1, 2, number + 1, 3), mx.uint16) for number in range(12)),
]


THREADS = ThreadPoolExecutor(2)


def allocate(wanted: list[tuple[tuple[int, ...], mx.Dtype]]) -> list[mx.array]:
    return allocate_from(wanted, THREADS)


def view(array: mx.array) -> Any:
    """Return the array's memory for numpy."""
    return np.array(array, copy=False)


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the buffers be allocated as on this device."""
    kind = getattr(mx.DeviceType, request.param)
    monkeypatch.setattr(buffers.mx, "default_device", lambda: SimpleNamespace(type=kind))
    return request.param


@pytest.mark.usefixtures("device")
def test_arrays_have_the_wanted_shapes_and_dtypes_in_order() -> None:
    assert [(a.shape, a.dtype) for a in allocate(WANTED)] == WANTED


@pytest.mark.usefixtures("device")
def test_nothing_wanted_is_nothing_given() -> None:
    assert allocate([]) == []
    assert [a.shape for a in allocate([((1, 0, 4), mx.uint8)])] == [(1, 0, 4)]


@pytest.mark.usefixtures("device")
def test_each_array_has_memory_of_its_own_that_numpy_writes_through_to() -> None:
    arrays = allocate(WANTED * 2)
    for number, array in enumerate(arrays):
        view(array)[...] = number + 1
    for number, array in enumerate(arrays):
        assert mx.all(array == number + 1).item()
        assert view(array).flags.c_contiguous


@pytest.mark.usefixtures("device")
def test_contents_that_were_written_are_what_mlx_computes_with() -> None:
    (array,) = allocate([((1, 2, 300, 8), mx.uint32)])
    wanted = np.random.default_rng(1).standard_normal((1, 2, 300, 8)).astype(np.float32)
    view(array)[...] = wanted.view(np.uint32)
    floats = array.view(mx.float32)
    assert mx.array_equal(floats, mx.array(wanted))
    assert mx.allclose(floats.sum(axis=2), mx.array(wanted.sum(axis=2)), atol=1e-4)


def test_memory_stays_where_it_is_while_it_is_used() -> None:
    (array,) = allocate([((1, 2, 300, 8), mx.uint32)])
    before = view(array).ctypes.data
    view(array)[...] = 7
    mx.eval(array + 1, array.view(mx.float32))
    assert view(array).ctypes.data == before


def test_large_buffers_are_whole_from_the_first_byte_to_the_last() -> None:
    for array in allocate([((1, 4, 9000, 64), mx.uint16), ((3_000_001,), mx.uint8)]):
        rows = view(array).reshape(-1)
        rows[0], rows[-1] = 1, 2
        assert (int(array.reshape(-1)[0].item()), int(array.reshape(-1)[-1].item())) == (1, 2)


def test_buffers_are_given_free_again() -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    for _ in range(30):
        arrays = allocate([((1 << 20,), mx.uint8), ((1 << 18,), mx.uint32)])
        assert mx.get_active_memory() >= before + (2 << 20)
        del arrays
    assert mx.get_active_memory() == before


def test_threads_allocate_at_once() -> None:
    def work(number: int) -> bool:
        good = True
        for _ in range(20):
            arrays = allocate(WANTED)
            for array in arrays:
                view(array)[...] = number
            good = good and all(mx.all(array == number).item() for array in arrays)
        return good

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(1, 5))) == [True] * 4


def test_one_thread_allocates_while_another_clears_the_cache() -> None:
    """As mlx-lm does at the first token of each answer. In a process of its own, which may stand still."""
    script = (
        "import threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from prefixbank.kvcache.buffers import allocate, mx\n"
        "def clear():\n"
        "    for _ in range(500):\n"
        "        array = mx.ones(1000); mx.eval(array); del array; mx.clear_cache()\n"
        "clearing = threading.Thread(target=clear)\n"
        "clearing.start()\n"
        "threads = ThreadPoolExecutor(2)\n"
        "for _ in range(500):\n"
        "    allocate([((1, 2, 100, 8), mx.uint32)] * 6, threads)\n"
        "clearing.join()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
