"""What happens to a fragment's rounds, and what they ask for: values in, values out (`Rounds.on`)."""

from dataclasses import dataclass
from enum import StrEnum

from isthmus.format.records.objects import CommitHeader
from isthmus.reasons import Reason


@dataclass(frozen=True, slots=True)
class Pointer:
    """An announced update: where it is and what it claims to be."""

    learner: str
    incarnation: int
    base: int
    digest: bytes
    key: str
    size: int
    steps: int
    tokens: int
    step: int
    tokens_seen: int
    due: bool
    boundary_at: float
    """The step boundary at which it was taken, on the syncer's clock."""
    heard_at: float
    old: bool = False
    """Said before this syncer listened: `boundary_at` means nothing, and rejections of it are not counted."""

    @property
    def rank(self) -> tuple[int, bytes]:
        """Of two updates on one base the one with the higher rank replaces the other."""
        return self.tokens, self.digest


class ClosedBy(StrEnum):
    """Why a round stopped waiting."""

    EVERYONE = "everyone"  # all expected are in or have passed
    GRACE = "grace"  # the quorum was there and grace is over
    DEADLINE = "deadline"  # H steps after opening
    FULL = "full"  # a commit names no more inputs


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announced:
    """A learner's update."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Invalid:
    """An announcement that is not worth a fetch."""

    pointer: Pointer
    reason: Reason


@dataclass(frozen=True, slots=True)
class Called:
    """Another syncer's call: one round, whoever called it."""

    version: int
    by: str


@dataclass(frozen=True, slots=True)
class Passed:
    """A learner has nothing for this round."""

    learner: str
    version: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Take the fragment over, or leave it to another syncer once the round under way is through."""

    holding: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """The fetch of an update has a slot, or waits only because its learner has its share of the slots."""

    pointer: Pointer
    """What is read: the newest on its base (`Rounds.newest`)."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """An update that `Rounds.accepts` is accumulated."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Refused:
    """An update's bytes are missing or not acceptable."""

    pointer: Pointer
    reason: Reason


@dataclass(frozen=True, slots=True)
class Unreachable:
    """An update could not be fetched for now: it stays a pointer."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Turn:
    """Admission has room for the round that waits here (`isthmus.rounds.admission`)."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The clock. Due after every event, too: where messages never cease, no timer would ever find the queue empty."""


@dataclass(frozen=True, slots=True)
class Appended:
    """The log has its next commit, ours or another syncer's; what the round left over is taken up again.

    After the last of several comes `CaughtUp`: a round opened in between would be for a version that exists.
    """

    commit: CommitHeader


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The log was read to its end: the next round opens where a due update on the newest version waits for it."""


@dataclass(frozen=True, slots=True)
class Spoiled:
    """Merging the round would give no finite state, by these of its updates: they are turned away."""

    by: frozenset[bytes]
    """Their digests."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Our merge did not become the log: the round is forgotten until the winner's commit is folded."""


Event = (
    Announced
    | Invalid
    | Called
    | Passed
    | Hold
    | Begun
    | Arrived
    | Refused
    | Unreachable
    | Turn
    | Tick
    | Appended
    | CaughtUp
    | Spoiled
    | Lost
)


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallRound:
    """Say to all: a round is open that creates this version."""

    version: int
    afresh: bool = False
    """Whether learners are to send anew what they have now, since what they sent has waited long."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get, verify and decode this update, then report `Arrived` or `Refused`."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Somebody knows a newer version: read the log."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Stop waiting: merge what is accumulated into this version."""

    version: int
    closed_by: ClosedBy


@dataclass(frozen=True, slots=True)
class Abandon:
    """The round came to nothing: forget it."""


Action = CallRound | Fetch | CatchUp | Merge | Abandon
