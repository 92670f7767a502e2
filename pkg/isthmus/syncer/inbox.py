"""The events of a fragment's coordinator that are not events of its rounds: ends of fetches and of reads of the log."""

import asyncio
from dataclasses import dataclass

from isthmus.errors import LogCorrupt
from isthmus.log.updates import Update
from isthmus.reasons import Reason
from isthmus.rounds.events import Announced, Begun, Called, Hold, Invalid, Passed, Pointer, Turn
from isthmus.syncer.fragment_reader import At


@dataclass(frozen=True, slots=True)
class Heard:
    """A message says that a commit exists."""

    version: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The outcome of a fetch. `done` is set once it was handled, so that the memory in use stays bounded."""

    pointer: Pointer
    update: Update | None
    reason: Reason | None
    at: float
    done: asyncio.Event


@dataclass(frozen=True, slots=True)
class Folded:
    """A read of the log has reached a new place. `done` is set once it was handled."""

    at: At
    done: asyncio.Event


@dataclass(frozen=True, slots=True)
class Looked:
    """A read of the log is over; `through`: whether it reached the end of the log."""

    through: bool
    error: LogCorrupt | None = None
    """Why the log cannot be folded to its end; None if it can, or if the store was away."""
    said: int = 0
    """The newest version that a message had named when the read began."""


FromBus = Announced | Called | Passed | Heard | Invalid
Event = FromBus | Hold | Begun | Turn | Fetched | Folded | Looked
