"""What a rank holds for the first one: arrays and objects by number, put and taken by more than one thread."""

# ruff: noqa: TID251  (threads: the training thread puts here what the agent's takes)
import threading
from collections.abc import Iterable
from typing import Any

from isthmus.errors import RankLost

WAIT_S = 600.0
"""What was announced must be put within this long: it is on its way between ranks."""


class Numbers:
    """Numbers that nothing has yet, to any thread."""

    def __init__(self) -> None:
        self._next = 1
        self._taking = threading.Lock()

    def take(self, count: int = 1) -> int:
        """Return the first of so many, one after another."""
        with self._taking:
            first, self._next = self._next, self._next + count
        return first


class ArrayTable:
    """Things by number."""

    def __init__(self) -> None:
        self._things: dict[int, Any] = {}
        self._forgotten: set[int] = set()
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._things)

    def put(self, number: int, thing: Any) -> None:
        """Keep something until it is forgotten; not at all where it already was."""
        with self._changed:
            if number in self._forgotten:
                self._forgotten.discard(number)
                return
            self._things[number] = thing
            self._changed.notify_all()

    def find(self, number: int) -> Any | None:
        """Return what is kept under a number, or None."""
        return self._things.get(number)

    def wait_for(self, number: int) -> Any:
        """Return what is kept under a number, or will be in a moment. Raises `RankLost` where it never comes."""
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._things or self._closed, WAIT_S):
                raise RankLost(f"array {number} did not come in {WAIT_S:g} s")
            if number not in self._things:
                raise RankLost(f"array {number} will not come any more")
            return self._things[number]

    def close(self) -> None:
        """Let nobody wait any more: nothing will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def forget(self, numbers: Iterable[int]) -> None:
        """Let go of these: nobody will ask for them again."""
        with self._changed:
            for number in numbers:
                if self._things.pop(number, None) is None:
                    self._forgotten.add(number)
