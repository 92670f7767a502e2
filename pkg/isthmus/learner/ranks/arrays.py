"""The arrays and objects, by number, that a rank holds for the first rank. Several threads put and take them."""

# ruff: noqa: TID251  (threads: the training thread puts things here that the agent's thread takes)
import threading
from collections.abc import Iterable
from typing import Any

from isthmus.errors import RankLost

WAIT_S = 600.0
"""An announced array must be put within this many seconds: it is on its way between ranks."""


class Numbers:
    """Source of unused numbers, for any thread."""

    def __init__(self) -> None:
        self._next = 1
        self._taking = threading.Lock()

    def take(self, count: int = 1) -> int:
        """Return the first of `count` consecutive unused numbers."""
        with self._taking:
            first, self._next = self._next, self._next + count
        return first


class ArrayTable:
    """Arrays and other objects by number."""

    def __init__(self) -> None:
        self._things: dict[int, Any] = {}
        self._forgotten: set[int] = set()
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._things)

    def put(self, number: int, thing: Any) -> None:
        """Keep an object until its number is forgotten; do not keep it if that has happened already."""
        with self._changed:
            if number in self._forgotten:
                self._forgotten.discard(number)
                return
            self._things[number] = thing
            self._changed.notify_all()

    def find(self, number: int) -> Any | None:
        """Return the object under a number, or None."""
        return self._things.get(number)

    def wait_for(self, number: int) -> Any:
        """Return the object under a number, waiting until it is put. Raises `RankLost` if it never comes."""
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._things or self._closed, WAIT_S):
                raise RankLost(f"array {number} did not come in {WAIT_S:g} s")
            if number not in self._things:
                raise RankLost(f"array {number} will not come any more")
            return self._things[number]

    def close(self) -> None:
        """Stop all waiting: nothing will be put any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the objects under these numbers: they will not be asked for again."""
        with self._changed:
            for number in numbers:
                if self._things.pop(number, None) is None:
                    self._forgotten.add(number)
