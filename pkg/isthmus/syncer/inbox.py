"""What happens to a fragment at a syncer beside its rounds: fetches and looks at the log, as its coordinator is
told."""

import asyncio
from dataclasses import dataclass

from isthmus.errors import LogCorrupt
from isthmus.log.updates import Update
from isthmus.reasons import Reason
from isthmus.rounds.events import Announced, Begun, Called, Hold, Invalid, Passed, Pointer, Turn
from isthmus.syncer.fragment_reader import At


@dataclass(frozen=True, slots=True)
class Heard:
    """A commit is said to exist."""

    version: int


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

    at: At
    done: asyncio.Event


@dataclass(frozen=True, slots=True)
class Looked:
    """A look at the log is over; `through` where it came to the end of it."""

    through: bool
    error: LogCorrupt | None = None
    """Why the log cannot be folded to its end, where that is so."""
    said: int = 0
    """The newest version that somebody said is there, when the look began."""


FromBus = Announced | Called | Passed | Heard | Invalid
Event = FromBus | Hold | Begun | Turn | Fetched | Folded | Looked
