"""The events that a fragment's rounds take, and the actions that they ask for (`Rounds.on`)."""

from dataclasses import dataclass
from enum import StrEnum

from isthmus.format.records.objects import CommitHeader
from isthmus.reasons import Reason


@dataclass(frozen=True, slots=True)
class Pointer:
    """An announced update: its place in the store, and what it claims to be."""

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
    """The time of the step boundary at which the update was captured, on the syncer's clock."""
    heard_at: float
    old: bool = False
    """Whether it was announced before this syncer listened. Then `boundary_at` means nothing, and a rejection of the
    announcement is not counted, except for an unknown base."""

    @property
    def rank(self) -> tuple[int, bytes]:
        """The rank among a learner's updates on one base: the update with the higher rank replaces the other."""
        return self.tokens, self.digest


class ClosedBy(StrEnum):
    """Why a round stopped waiting."""

    EVERYONE = "everyone"  # the updates of all expected learners are in, or they have passed
    GRACE = "grace"  # the quorum is in, and grace is over
    DEADLINE = "deadline"  # a period has passed since the round was opened
    FULL = "full"  # a commit can name no more inputs


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announced:
    """A learner has announced an update."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Invalid:
    """An announcement is invalid, so its update is not fetched."""

    pointer: Pointer
    reason: Reason


@dataclass(frozen=True, slots=True)
class Called:
    """Another syncer has called a round. All syncers take part in the same round, whichever of them called it."""

    version: int
    by: str


@dataclass(frozen=True, slots=True)
class Passed:
    """A learner has no update for this round."""

    learner: str
    version: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Take the fragment over, or leave it to another syncer once the round under way has ended."""

    holding: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """The fetch of an update has a slot, or waits only because its learner already has its share of the slots."""

    pointer: Pointer
    """The update that is read: the newest one on its base (`Rounds.newest`)."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """An update for which `Rounds.take_fetched` returned True has been accumulated."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Refused:
    """An update is rejected, since its bytes are missing or not acceptable."""

    pointer: Pointer
    reason: Reason


@dataclass(frozen=True, slots=True)
class Unreachable:
    """An update could not be read for this round. It stays a pointer and may be fetched again."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Turn:
    """Admission has room for the round that waits (`isthmus.rounds.admission`)."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Look at the clock. Also due after every event: if messages never cease, no timer ever finds the queue empty."""


@dataclass(frozen=True, slots=True)
class Appended:
    """The log has its next commit, by this syncer or another. Updates of the round that it left out wait again.

    `CaughtUp` follows the last of several commits: a round opened in between would create a version that exists.
    """

    commit: CommitHeader


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The log was read to its end: the next round opens if a due update on the newest version waits for it."""


@dataclass(frozen=True, slots=True)
class Spoiled:
    """The round cannot be committed because of some of its updates: the merged state would not be finite, or no commit
    can record it. Those updates are rejected."""

    by: frozenset[bytes]
    """The digests of those updates."""


@dataclass(frozen=True, slots=True)
class Lost:
    """This syncer's merge did not become the log. Its round ends, and its updates wait for the next round."""


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
    """Call a round to all learners and syncers: it creates this version."""

    version: int
    afresh: bool = False
    """Whether learners should send an update of what they have now, since the updates they sent have waited long."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch, verify and measure this update, then report `Arrived`, `Refused` or `Unreachable`."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Read the log: a learner or another syncer knows a newer version."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Stop waiting: merge what is accumulated into this version."""

    version: int
    closed_by: ClosedBy


@dataclass(frozen=True, slots=True)
class Abandon:
    """Drop the round: it gave up without any update."""


Action = CallRound | Fetch | CatchUp | Merge | Abandon
