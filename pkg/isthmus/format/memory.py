"""Memory of large arrays that are gone, kept for the next: what is touched for the first time costs a page fault for
every 4 KiB, which takes three times as long as copying as much.

An array from here is an ordinary one. Once nothing refers to it any more, nor to any view of it, its memory is kept
under its size, as long as no more than `KEPT_MAX` is. What runs needs again and again is of a few sizes: fragments.
"""

import os
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST = 1 << 20
"""Bytes from which on memory is kept; the C library keeps less by itself."""

_SHARE = 16  # of the machine's memory


def machine_bytes() -> int:
    """Return how much memory the machine has, in bytes; 8 GiB where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not on every system
        return 8 << 30


class Pool:
    """Memory that was given back, by its size in bytes."""

    def __init__(self, kept_max: int) -> None:
        self.kept_max = kept_max
        # Taken and given by any thread, also in the middle of anything, when arrays die: without a lock, and so by
        # operations alone that are one step for the interpreter.
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)

    @property
    def kept(self) -> int:
        """Bytes that nobody uses."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an array [size] uint8 with anything in it."""
        if size < SMALLEST:
            return np.empty(size, np.uint8)
        try:
            memory = self._free[size].pop()
        except IndexError:
            memory = np.empty(size, np.uint8).data
        # Its base is no array: a view of a view keeps this one alive, and not only what is under it.
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._give, size, memory).atexit = False
        return array

    def _give(self, size: int, memory: memoryview) -> None:
        for other in [s for s in list(self._free) if s != size]:  # what is of other sizes makes way
            while self._free[other] and self.kept + size > self.kept_max:
                try:
                    self._free[other].pop()
                except IndexError:  # somebody has taken it
                    break
        if self.kept + size <= self.kept_max:
            self._free[size].append(memory)


KEPT_MAX = machine_bytes() // _SHARE
"""Bytes that may be kept for nobody."""

_POOL = Pool(KEPT_MAX)


def room(size: int) -> NDArray[np.uint8]:
    """Return an array [size] uint8 with anything in it."""
    return _POOL.take(size)


def empty(n: int) -> NDArray[np.float32]:
    """Return an array [n] float32 with anything in it."""
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
