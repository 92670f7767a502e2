"""Grace: how long a round waits after its quorum, and the durations that this is computed from, in seconds."""

from dataclasses import dataclass

from isthmus.format.rules import Pace


@dataclass(frozen=True, slots=True)
class Terms:
    """The durations from which the waits of a round are computed, in seconds; 0 while unknown."""

    fastest_step_s: float = 0.0
    slowest_step_s: float = 0.0
    sync_s: float = 0.0
    """From the close of a round until its version can be adopted by a learner."""
    cap_s: float = 0.0
    """The most that grace may be: the sum of one step of the slowest learner and the time in which the slowest missing
    learner answers a call."""


@dataclass(frozen=True, slots=True)
class Grace:
    """The waiting time that is granted after the quorum, and the overlap τ that it assumes."""

    seconds: float
    overlap_steps: float


def adaptive_grace(pace: Pace, period: float, terms: Terms, quorum_s: float) -> Grace:
    """Return how long to wait for more learners after the quorum (arXiv 2604.21428, adaptive grace window).

    slack = τ·t_step − (t_quorum + t_sync); grace = clamp(γ·slack, 0, cap). If this is less than the cap, τ is raised
    until the cap fits, at most to the period. So grace is the cap, unless the period is too short for it. Waiting then
    costs local work, but that matters less than an update that is a version late (docs/design/departures.md).
    """
    if pace.grace == 0.0 or terms.fastest_step_s <= 0.0:
        return Grace(0.0, pace.overlap)
    needed = (quorum_s + terms.sync_s + terms.cap_s / pace.grace) / terms.fastest_step_s
    overlap = max(pace.overlap, min(needed, period))
    slack = overlap * terms.fastest_step_s - (quorum_s + terms.sync_s)
    return Grace(min(max(pace.grace * slack, 0.0), terms.cap_s), overlap)
