"""The type of a planted bug, and the table of all planted bugs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

Bug = Callable[[], contextlib.AbstractContextManager[object]]


class Planted(NamedTuple):
    """A bug, and the seeds that must catch it."""

    bug: Bug
    within: int
    """One of this many seeds, from 0 on, must catch the bug."""
    kind: str | None
    """The kind of these seeds; None: each seed draws its kind."""
    caught_by: int
    """The first seed that caught the bug when this was written. It is tried first, to keep tests short."""

    @property
    def seeds(self) -> Iterator[int]:
        """The seeds to try, in order."""
        yield self.caught_by
        yield from (seed for seed in range(self.within) if seed != self.caught_by)


BUGS: dict[str, Planted] = {}


def planted(
    within: int, kind: str | None = None, *, caught_by: int = 0
) -> Callable[[Callable[[], Iterator[None]]], Bug]:
    """Register a bug that is caught within this many seeds of a kind."""

    def register(fn: Callable[[], Iterator[None]]) -> Bug:
        bug = contextlib.contextmanager(fn)
        BUGS[fn.__name__.replace("_", "-")] = Planted(bug, within, kind, caught_by)
        return bug

    return register
