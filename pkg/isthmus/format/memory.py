"""A pool that keeps the memory of large arrays that are no longer used, for later arrays of the same size.

New memory costs a page fault for every 4 KiB when it is first written, which takes three times as long as copying as
much. An array from this pool is an ordinary array. Once nothing refers to it or to a view of it, the pool keeps its
memory, up to `KEPT_MAX` bytes in all. A run needs arrays of few sizes, those of its fragments.
"""

import os
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST = 1 << 20
"""Fewest bytes of an array whose memory is kept. The C library itself keeps the memory of smaller ones."""

_SHARE = 16  # The pool keeps at most a sixteenth of the machine's memory.


def machine_bytes() -> int:
    """Return the size of the machine's memory in bytes, or 8 GiB if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # Not every system has these names.
        return 8 << 30


class Pool:
    """Unused memory, by its size in bytes."""

    def __init__(self, kept_max: int) -> None:
        self.kept_max = kept_max
        # Any thread takes memory. Memory comes back when an array dies, which can happen in the middle of any code. So
        # there is no lock, and only operations are used that the interpreter executes in one step.
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)

    @property
    def kept(self) -> int:
        """Bytes of unused memory."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an array [size] uint8 of arbitrary values."""
        if size < SMALLEST:
            return np.empty(size, np.uint8)
        try:
            memory = self._free[size].pop()
        except IndexError:
            memory = np.empty(size, np.uint8).data
        # The base of this array is a memoryview, not an array. A view of a view therefore refers to this array itself,
        # and keeps it alive.
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._give, size, memory).atexit = False
        return array

    def _give(self, size: int, memory: memoryview) -> None:
        for other in [s for s in list(self._free) if s != size]:  # Memory of other sizes is freed first.
            while self._free[other] and self.kept + size > self.kept_max:
                try:
                    self._free[other].pop()
                except IndexError:  # Another thread has taken the last one of this size.
                    break
        if self.kept + size <= self.kept_max:
            self._free[size].append(memory)


KEPT_MAX = machine_bytes() // _SHARE
"""Most bytes of unused memory that are kept."""

_POOL = Pool(KEPT_MAX)


def room(size: int) -> NDArray[np.uint8]:
    """Return an array [size] uint8 of arbitrary values."""
    return _POOL.take(size)


def empty(n: int) -> NDArray[np.float32]:
    """Return an array [n] float32 of arbitrary values."""
    return _POOL.take(4 * n).view(np.float32)


def zeros(n: int) -> NDArray[np.float32]:
    """Return an array [n] float32 of zeros."""
    if 4 * n < SMALLEST:
        return np.zeros(n, np.float32)
    found = empty(n)
    found.fill(0.0)
    return found


def copy(x: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of a flat array [n]."""
    found = _POOL.take(x.nbytes).view(x.dtype)
    np.copyto(found, x)
    return found
