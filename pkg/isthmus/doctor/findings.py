"""What a check found, and for whom it is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from isthmus.records.keys import LEARNERS, SCRATCH
from isthmus.records.messages import SYNCER_STREAM, learner_stream


class Outcome(StrEnum):
    """How a check ended. A note is what cannot be otherwise in this place, and is worth knowing."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILURE = "failure"


OK, NOTE, WARNING, FAILURE = Outcome


class RoleKind(StrEnum):
    """Who takes part in a run."""

    OPERATOR = "operator"
    SYNCER = "syncer"
    LEARNER = "learner"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    check: str
    outcome: Outcome
    said: str
    """What is the case, with figures and units."""
    advice: str = ""
    """What to do, where something is to be done."""

    def as_json(self) -> dict[str, str]:
        """Return it as plain data."""
        return {"check": self.check, "outcome": self.outcome, "said": self.said, "advice": self.advice}


@dataclass(frozen=True)
class Role:
    """Whose permissions are looked at. An operator creates runs and collects garbage: it may do everything."""

    kind: RoleKind
    learner: str = ""

    @property
    def place(self) -> str:
        """Where this role may create objects, and delete them."""
        # A learner's identity may delete old checkpoints and nothing else.
        return f"{LEARNERS}{self.learner}/doctor/checkpoints/" if self.kind == RoleKind.LEARNER else SCRATCH

    @property
    def stream(self) -> str:
        """The stream this role writes."""
        return learner_stream(self.learner) if self.kind == RoleKind.LEARNER else SYNCER_STREAM

    @property
    def others_streams(self) -> tuple[str, ...]:
        """Streams this role must not write: those of syncers, and of learners that are somebody else."""
        another = learner_stream("doctor")
        return {RoleKind.LEARNER: (SYNCER_STREAM, another), RoleKind.SYNCER: (another,)}.get(self.kind, ())


def clock(check: str, skew_s: float, coarse_s: float, other: str) -> Finding:
    """Judge a difference between this machine's clock and another's, measured to within `coarse_s`."""
    if abs(skew_s) <= max(SKEW_WARNING_S, coarse_s):
        return Finding(
            check, OK, f"this machine's clock and {other}'s agree to within {max(abs(skew_s), coarse_s):.1f} s"
        )
    ahead = "ahead of" if skew_s > 0 else "behind"
    said = f"this machine's clock is {abs(skew_s):.0f} s {ahead} {other}'s"
    if abs(skew_s) < SKEW_FAILURE_S:
        return Finding(check, WARNING, said, "run an NTP client (chrony): dates in the log and `export --at` are off")
    return Finding(check, FAILURE, said, "run an NTP client (chrony): S3 refuses requests signed 15 minutes off")


SKEW_WARNING_S = 2.0
SKEW_FAILURE_S = 300.0
"""A third of what S3 tolerates: clocks that drifted so far go on drifting."""


def counted(count: int, what: str) -> str:
    """Return a count and what is counted, in the plural where there is not exactly one."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def spread(seconds: Sequence[float]) -> str:
    """Return median and worst of some durations, in milliseconds."""
    ordered = sorted(seconds)
    return f"median {ordered[len(ordered) // 2] * 1e3:.1f} ms, worst {ordered[-1] * 1e3:.1f} ms of {len(ordered)}"
