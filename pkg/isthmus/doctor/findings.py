"""The result of a check, and the role that the check is made for."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from isthmus.errors import IsthmusError
from isthmus.format.permissions import ALL_STREAMS, DELETE, STREAMS, Operation, Participant, may, streams
from isthmus.format.records.keys import LEARNERS, SCRATCH
from isthmus.format.records.messages import SYNCER_STREAM, learner_stream
from isthmus.runtime.urls import Place


class CheckOutcome(StrEnum):
    """How a check ended. A note reports a fact worth knowing that cannot be changed in this place."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILURE = "failure"


OK, NOTE, WARNING, FAILURE = CheckOutcome


class RoleKind(StrEnum):
    """A kind of role in a run. An operator is one identity for everything."""

    OPERATOR = "operator"
    OWNER = "owner"
    SYNCER = "syncer"
    COLLECTOR = "collector"
    LEARNER = "learner"
    FOLLOWER = "follower"
    READER = "reader"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    check: str
    outcome: CheckOutcome
    said: str
    """What was found, with figures and units."""
    advice: str = ""
    """What to do; empty if there is nothing to do."""

    def as_json(self) -> dict[str, str]:
        """Return the finding as plain data."""
        return {"check": self.check, "outcome": self.outcome, "said": self.said, "advice": self.advice}


@dataclass(frozen=True)
class Role:
    """The role whose permissions are checked. An operator may do everything."""

    kind: RoleKind
    learner: str = "doctor"
    """A learner's name. The default stands for a learner without one, for which keys of this name are tried."""
    series: str = ""

    @property
    def participant(self) -> Participant | None:
        """The role's line in the table of permissions; None for an operator."""
        return None if self.kind == RoleKind.OPERATOR else Participant(self.kind)

    @property
    def name(self) -> str:
        """The name of this role in keys: a follower's series, or a learner's name."""
        return self.series if self.kind == RoleKind.FOLLOWER else self.learner

    @property
    def place(self) -> str:
        """The prefix below which this role may create and delete objects; empty if there is none."""
        # A learner may delete nothing but its own checkpoints.
        if self.kind == RoleKind.LEARNER:
            return f"{LEARNERS}{self.learner}/doctor/checkpoints/"
        return SCRATCH if self.may(DELETE, f"{SCRATCH}x") else ""

    @property
    def creates(self) -> bool:
        """Whether the role may be checked before there is a run: it creates runs. All others need one."""
        return self.kind in (RoleKind.OPERATOR, RoleKind.OWNER)

    def may(self, operation: Operation, key: str) -> bool:
        """Return whether the table grants this role an operation on a key."""
        return self.participant is None or may(self.participant, operation, key, self.name)

    @property
    def on_bus(self) -> bool:
        """Whether this role uses the bus."""
        return self.participant is None or any(STREAMS[self.participant])

    @property
    def stream(self) -> str:
        """The stream that this role writes; empty for a role that only reads."""
        written = streams(self.participant, self.name)[1] if self.participant else (SYNCER_STREAM,)
        return next(iter(written), "")

    @property
    def hears_all(self) -> bool:
        """Whether this role reads all streams, and looks for new ones."""
        return self.participant is None or ALL_STREAMS in streams(self.participant, self.name)[0]

    @property
    def others_streams(self) -> tuple[str, ...]:
        """Streams that this role must not write: the syncers' (unless it is a syncer) and another learner's."""
        if self.participant is None:
            return ()
        return tuple(s for s in (SYNCER_STREAM, learner_stream(SOMEBODY)) if s != self.stream)


SOMEBODY = "somebody-else"
"""A name that stands for another participant in keys and streams."""


def untried(check: str, error: IsthmusError) -> Finding:
    """Return the finding about a check whose request failed, while the server answers other requests."""
    return Finding(check, WARNING, f"not tried: {error}", "do what the server asks for, and run the doctor again")


def clock(check: str, skew_s: float, coarse_s: float, other: str) -> Finding:
    """Return the finding about a difference between this machine's clock and another's.

    `skew_s`: how far this clock is ahead [s]. `coarse_s`: how exactly that was measured [s].
    """
    if abs(skew_s) <= max(SKEW_WARNING_S, coarse_s):
        return Finding(
            check, OK, f"this machine's clock and {other}'s agree to within {max(abs(skew_s), coarse_s):.1f} s"
        )
    ahead = "ahead of" if skew_s > 0 else "behind"
    said = f"this machine's clock is {abs(skew_s):.0f} s {ahead} {other}'s"
    if abs(skew_s) < SKEW_FAILURE_S:
        more = "dates in the log and `export --at` are off"
        return Finding(check, WARNING, said, f"run an NTP client (chrony) on both machines: {more}")
    more = "S3 refuses requests signed 15 minutes off"
    return Finding(check, FAILURE, said, f"run an NTP client (chrony) on both machines: {more}")


def in_the_clear(url: str) -> str:
    """Return the problem with a URL that leaves this machine without TLS; empty if there is none."""
    place = Place.of(url)
    if place.scheme in ("https", "rediss") or not place.host or place.is_loopback:
        return ""
    return f"{place.scheme}://{place.host}: passwords and data can be read and changed in transit"


SKEW_WARNING_S = 2.0
SKEW_FAILURE_S = 300.0
"""A third of what S3 tolerates: a clock that has drifted so far will drift on."""


def spread(seconds: Sequence[float]) -> str:
    """Return the median and the longest of some durations [s] as text, in milliseconds."""
    ordered = sorted(seconds)
    return f"median {ordered[len(ordered) // 2] * 1e3:.1f} ms, worst {ordered[-1] * 1e3:.1f} ms of {len(ordered)}"
