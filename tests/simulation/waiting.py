"""Check that rounds wait as they say: recompute from the recorded times why a round closed, and how late."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from isthmus.format.records.objects import CommitHeader, Waited
from isthmus.rounds.admission import PATIENCE
from isthmus.rounds.rounds import STEP_UNKNOWN_S
from isthmus_lab.simulate.process import EPOCH_S, Process

if TYPE_CHECKING:
    from simulation.checker import Checker

LATE_S = 0.25
"""A round closes within this time after it has nothing left to wait for, unless its syncer's event loop stood still."""

TRIPS = 12
"""Round trips to the store that handling earlier events may take."""

EXACT_S = 0.01
"""Error of a date: it is made of reads of two clocks, and time passes between them."""


class Waiting:
    """Judges the waits that commits record."""

    def __init__(self, checker: "Checker") -> None:
        self._checker = checker

    def judge(self, header: CommitHeader, period: float) -> Iterator[str]:
        """Yield what is wrong with the wait of a commit's round. `period`: the period in force, in steps."""
        w = header.waited
        exact = EXACT_S + self._checker.stall_s
        # Compare durations, in seconds after opening: a stall between two clock reads makes dates differ.
        ends = w.quorum_s - w.boundary_s + w.grace_s
        if len({given.learner for given in header.inputs if given.base == header.version - 1}) <= 1:
            ends = max(ends, w.hold_s)
        if w.closed_by == "grace":
            if w.quorum_missed and not w.expected:
                yield "closed by grace, and nobody was expected"
            if w.waited_s < ends - EXACT_S:
                yield f"closed by grace {ends - w.waited_s:.3f} s before grace was over"
        if abs(w.closed_at - w.opened_at - w.waited_s) > exact:
            yield f"waited {w.waited_s:.3f} s, and from opening to closing it is {w.closed_at - w.opened_at:.3f} s"
        granted = w.closed_by == "grace" or not w.quorum_missed
        gives_up = period * max(self._checker.step_s, STEP_UNKNOWN_S)
        gives_up = min(gives_up, w.gives_up_s or gives_up)
        # Without an update the round waits for `silence_s`. The first update that comes then closes it at once.
        first = next((seen.at for seen in w.seen if seen.what == "in"), 0.0)
        gives_up = max(gives_up, min(first, self._checker.run.pace.silence_s))
        last = max(w.hold_s, min(ends, gives_up) if granted else gives_up)
        # The round may be kept open for announced updates, for twice the time that their fetch takes. A fetch may fail.
        came = max((seen.at for seen in w.seen if seen.what == "in"), default=0.0)
        took = max((given.fetched_at - given.heard_at for given in header.inputs), default=0.0)
        last = max(last, min(w.own_s, max(came, last) + PATIENCE * took))
        late = w.waited_s - last
        if late <= LATE_S:
            return
        process = self._undisturbed(header.writer, w)
        if process is None:
            return
        # The dates are of the syncer's clock: convert them to the world's time.
        skew = EPOCH_S + process.wall_skew_s
        stood = process.life.stood_s(w.opened_at + last - skew, w.closed_at - skew)
        trips = TRIPS * self._checker.latency_s
        if late > LATE_S + stood + trips:
            yield (
                f"closed by {w.closed_by} {late:.2f} s after {header.writer} had nothing left to wait for (grace of "
                f"{w.grace_s:.2f} s; its loop stood {stood:.2f} s of that)"
            )

    def when(self, writer: str, date: float) -> float:
        """Return the world's time at which a syncer's wall clock showed a date."""
        return date - EPOCH_S - self._checker.processes[writer].wall_skew_s

    def _undisturbed(self, writer: str, w: Waited) -> Process | None:
        """Return the process that closed a round; None if it is gone, or if a disturbance explains that it was late."""
        checker = self._checker
        process = checker.processes.get(writer)
        if process is None or process.life.ended:
            return None
        opened = self.when(writer, w.opened_at)
        if checker.disturbed.get((writer, "wall"), -1e9) > opened - 1.0 or checker.began[writer] > opened:
            return None
        # A coordinator that waits for the store handles no events meanwhile.
        return None if checker.disturbed.get((writer, "store"), -1e9) > opened - 1.0 else process
