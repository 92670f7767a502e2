"""What a commit records about its round: the updates that it merged, when they came, and how long each phase took."""

from isthmus.format.records.fields import SECONDS_MAX
from isthmus.format.records.objects import INPUTS_MAX, SEEN_MAX, Input, Passing, UpdateHeader, Waited, work_of
from isthmus.log.merge import weight
from isthmus.rounds.events import ClosedBy, Pointer
from isthmus.rounds.rounds import Round
from isthmus.runtime.clock import Runtime


class Recorder:
    """Builds the records of a round, and turns times on this syncer's clock into dates."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def given(self, pointer: Pointer, header: UpdateHeader, fetched_at: float, norm: float) -> Input:
        """Return the record of an update of length `norm` that has just arrived, with the weight that it asks for."""
        return Input(
            key=pointer.key,
            digest=pointer.digest,
            learner=pointer.learner,
            incarnation=header.incarnation,
            **work_of(header),
            bytes=pointer.size,
            train_s=header.train_s,
            loss=header.loss,
            manifest=header.manifest,
            taken_at=self.wall(pointer.boundary_at),
            heard_at=self.wall(pointer.heard_at),
            fetched_at=self.wall(fetched_at),
            arrived_at=self._runtime.wall(),
            weight=weight(header.tokens, header.steps),
            norm=norm,
        )

    def wall(self, at: float) -> float:
        """Return the date of a time on this syncer's clock."""
        return max(0.0, self._runtime.wall() - (self._runtime.now() - at))

    def waited(self, r: Round, closed_by: ClosedBy, merge_s: float, publish_s: float) -> Waited:
        """Return the record of a round's waits. `merge_s`, `publish_s`: the durations of merging and of storing the
        value [s]."""
        return Waited(
            called_by=r.called_by,
            quorum=r.quorum,
            quorum_missed=r.quorum_missed,
            closed_by=closed_by.value,
            expected=tuple(sorted(r.expected))[:INPUTS_MAX],
            missing=tuple(sorted(r.missing))[:INPUTS_MAX],
            passed=tuple(Passing(learner=who, at=self.wall(at)) for who, at in sorted(r.passed.items())[:INPUTS_MAX]),
            boundary_at=self.wall(r.boundary_at),
            opened_at=self.wall(r.opened_at),
            closed_at=self.wall(r.closed_at),
            hold_until=self.wall(r.all_heard_at),
            quorum_s=_bounded(r.quorum_s),
            grace_s=_bounded(r.grace_s),
            waited_s=_bounded(r.closed_at - r.opened_at),
            fastest_step_s=_bounded(r.terms.fastest_step_s),
            slowest_step_s=_bounded(r.terms.slowest_step_s),
            sync_s=_bounded(r.terms.sync_s),
            cap_s=_bounded(r.terms.cap_s),
            merge_s=_bounded(merge_s),
            publish_s=_bounded(publish_s),
            overlap_steps=r.overlap_steps,
            boundary_s=_bounded(r.opened_at - r.boundary_at),
            gives_up_s=_bounded(r.gives_up_at - r.opened_at),
            hold_s=r.all_heard_at - r.opened_at,
            own_s=_bounded(r.own_until - r.opened_at),
            seen=() if r.cut or len(r.seen) > SEEN_MAX else tuple(r.seen),
        )


def _bounded(seconds: float) -> float:
    """Return a duration [s] limited to what a commit can record: durations come from what learners state."""
    return min(max(0.0, seconds), SECONDS_MAX)
