"""Memory that kernels stream through: every array has its own."""

import threading
from pathlib import Path

import numpy as np
import pytest

from jetserve.kernels.native import memory
from jetserve.kernels.native.memory import ALIGNMENT, Arena

THREADS, ARRAYS = 8, 8


def test_threads_get_memory_of_their_own() -> None:
    arena, start = Arena(), threading.Barrier(THREADS)
    copies: list[list[np.ndarray]] = [[] for _ in range(THREADS)]

    def work(number: int) -> None:
        start.wait()
        for _ in range(ARRAYS):
            copies[number].append(arena.copy(np.full(2**20, number, np.uint8)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [{int(value) for a in made for value in (a.min(), a.max())} for made in copies] == [
        {n} for n in range(THREADS)
    ]


def test_arrays_are_aligned_and_may_be_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK", 4096)
    arena = Arena()
    for a in (np.arange(3, dtype=np.int8), np.ones((2, 5), np.float32), np.full(memory.CHUNK + 1, 7, np.uint8)):
        copy = arena.copy(a)
        np.testing.assert_array_equal(copy, a)
        assert copy.ctypes.data % ALIGNMENT == 0


MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not list a process's memory")
def test_memory_is_of_the_kind_that_has_huge_pages() -> None:
    """Private: most systems give none to shared memory."""
    copy = Arena().copy(np.ones(2**20, np.uint8))
    for line in MAPS.read_text().splitlines():
        limits, permissions, *_ = line.split()
        first, last = (int(limit, 16) for limit in limits.split("-"))
        if first <= copy.ctypes.data < last:
            assert permissions == "rw-p"
            return
    pytest.fail("the array is nowhere")
