"""How long a round waits after its quorum, and what that is computed from: durations in seconds."""

from dataclasses import dataclass

from isthmus.format.rules import Pace


@dataclass(frozen=True, slots=True)
class Terms:
    """What the waits of a round are computed from, in seconds; 0 while unknown."""

    fastest_step_s: float = 0.0
    slowest_step_s: float = 0.0
    sync_s: float = 0.0
    """From close to adoptable at a learner."""
    cap_s: float = 0.0
    """The most that grace may be: one step and what the slowest missing learner takes to answer a call."""


@dataclass(frozen=True, slots=True)
class Grace:
    """The waiting time granted after quorum, and the overlap it assumes."""

    seconds: float
    overlap_steps: float


def adaptive_grace(pace: Pace, period: float, terms: Terms, quorum_s: float) -> Grace:
    """Return how long to wait for more learners after the quorum (arXiv 2604.21428, adaptive grace window).

    slack = τ·t_step − (t_quorum + t_sync); grace = clamp(γ·slack, 0, cap). Where a slow link or short steps leave no
    slack, τ is raised to what lets the cap fit, at most the period: the local work that waiting costs
    there is worth less than that nobody's update is a version late (docs/design/departures.md).
    """
    if pace.grace == 0.0 or terms.fastest_step_s <= 0.0:
        return Grace(0.0, pace.overlap)
    needed = (quorum_s + terms.sync_s + terms.cap_s / pace.grace) / terms.fastest_step_s
    overlap = max(pace.overlap, min(needed, period))
    slack = overlap * terms.fastest_step_s - (quorum_s + terms.sync_s)
    return Grace(min(max(pace.grace * slack, 0.0), terms.cap_s), overlap)
