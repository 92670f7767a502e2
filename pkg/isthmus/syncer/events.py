"""What happens to a fragment at a syncer: the bus, its own fetches, and who else is there, as its keeper is told."""

import asyncio
from dataclasses import dataclass

from isthmus import fold
from isthmus.errors import LogCorrupt
from isthmus.merge import State
from isthmus.reasons import Reason
from isthmus.rounds import Pointer
from isthmus.updates import Update


@dataclass(frozen=True, slots=True)
class Announced:
    """A learner's update."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Called:
    """Another syncer's call."""

    version: int
    by: str


@dataclass(frozen=True, slots=True)
class Passed:
    """A learner has nothing for this round."""

    learner: str
    version: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A commit is said to exist."""

    version: int


@dataclass(frozen=True, slots=True)
class Invalid:
    """An announcement that is not worth a fetch."""

    pointer: Pointer
    reason: Reason


@dataclass(frozen=True, slots=True)
class Hold:
    """Take the fragment over, or leave it to another syncer."""

    holding: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    """The outcome of a fetch; `done` is set once it was dealt with, so that memory in flight stays bounded."""

    pointer: Pointer
    update: Update | None
    reason: Reason | None
    at: float
    done: asyncio.Event


@dataclass(frozen=True, slots=True)
class Folded:
    """Others committed: the fragment as a look at the log found it; `done` as with `Fetched`."""

    at: fold.At[State]
    done: asyncio.Event


@dataclass(frozen=True, slots=True)
class Looked:
    """A look at the log is over; `through` where it came to the end of it."""

    through: bool
    error: LogCorrupt | None = None
    """Why the log cannot be folded to its end, where that is so."""


FromBus = Announced | Called | Passed | Heard | Invalid
Event = FromBus | Hold | Fetched | Folded | Looked
