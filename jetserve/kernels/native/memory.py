"""Memory for weights that kernels stream through: in huge pages, which saves a page walk every 4 KiB.

On the machine that this was measured on, streaming 70 MB of weights is a third faster for it.
"""

import mmap
import threading

import numpy as np

CHUNK = 32 * 2**20
"""Bytes that small weights share."""
ALIGNMENT = 64
"""Of every array: what jax wants in order to use it in place."""


class Arena:
    """Hands out arrays of bytes, to any thread. A chunk is given back when the last of its arrays is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def copy(self, a: np.ndarray) -> np.ndarray:
        """A copy of `a`."""
        chunk, start = self._reserve(a.nbytes)
        out = np.frombuffer(chunk, a.dtype, a.size, start).reshape(a.shape)
        np.copyto(out, a)
        return out

    def _reserve(self, size: int) -> tuple[mmap.mmap, int]:
        """A chunk, and where in it `size` bytes are nobody else's."""
        with self._lock:
            if self._chunk is None or self._used + size > len(self._chunk):
                # Shared memory, mmap's own choice, gets no huge pages on most systems.
                private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._chunk, self._used = mmap.mmap(-1, max(CHUNK, size), flags=private), 0
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    self._chunk.madvise(mmap.MADV_HUGEPAGE)
            start = self._used
            self._used += -(-size // ALIGNMENT) * ALIGNMENT
            return self._chunk, start
