"""What a planted bug is, and the table of all of them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

Bug = Callable[[], contextlib.AbstractContextManager[object]]


class Planted(NamedTuple):
    """A bug, and what catches it."""

    bug: Bug
    within: int
    """Of so many seeds from 0 on, one must catch it."""
    kind: str | None
    """Of which kind they are; None: as they are drawn."""
    caught_by: int
    """The first that did when this was written: tried first, to keep tests short."""

    @property
    def seeds(self) -> Iterator[int]:
        """Those to try, in order."""
        yield self.caught_by
        yield from (seed for seed in range(self.within) if seed != self.caught_by)


BUGS: dict[str, Planted] = {}


def planted(
    within: int, kind: str | None = None, *, caught_by: int = 0
) -> Callable[[Callable[[], Iterator[None]]], Bug]:
    """Register a bug that is caught within so many seeds of a kind."""

    def register(fn: Callable[[], Iterator[None]]) -> Bug:
        bug = contextlib.contextmanager(fn)
        BUGS[fn.__name__.replace("_", "-")] = Planted(bug, within, kind, caught_by)
        return bug

    return register
