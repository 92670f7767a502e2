"""Metrics from the commits of one fragment: the rounds that this syncer committed, and the age of the newest commit."""

from isthmus.format.records.objects import CommitHeader
from isthmus.log.figures import places, shares
from isthmus.runtime.clock import Runtime
from isthmus.runtime.metrics import SyncerMetrics


class Counting:
    """The metrics of one fragment."""

    def __init__(self, fragment: int, name: str, metrics: SyncerMetrics, runtime: Runtime) -> None:
        self._fragment = fragment
        self._name = name
        self._metrics = metrics
        self._runtime = runtime
        self._committed_at = runtime.now()
        self._rejected: dict[str, int] = {}
        metrics.commit_age.labels(fragment).set_function(lambda: runtime.now() - self._committed_at)

    def begun(self, version: int, newest: CommitHeader | None) -> None:
        """Note the version and the newest commit at which the log stands at start."""
        self._metrics.fragment_version.labels(self._fragment).set(version)
        if newest is not None:
            self._committed_at = self._runtime.now() - max(0.0, self._runtime.wall() - newest.written_at)
            self._rejected = dict(newest.rejected_total)

    def settled(self, header: CommitHeader) -> None:
        """Note a commit that was added to the log. Only its writer counts the round."""
        m, w = self._metrics, header.waited
        self._committed_at = self._runtime.now()
        m.fragment_version.labels(self._fragment).set(header.version)
        before, self._rejected = self._rejected, dict(header.rejected_total)
        if header.writer != self._name:
            return
        m.commits.labels(self._fragment).inc()
        m.rounds_closed.labels(w.closed_by).inc()
        m.quorum_missed.inc(w.quorum_missed)
        m.quorum_seconds.observe(w.quorum_s)
        m.grace_seconds.observe(w.grace_s)
        m.round_seconds.observe(w.waited_s)
        m.merge_seconds.observe(w.merge_s)
        m.publish_seconds.observe(w.publish_s)
        there, count = places(header)
        m.participation.observe(there / count)
        for learner, (weight, tokens) in shares(header).items():
            m.weight_shares.labels(learner).inc(weight)
            m.token_shares.labels(learner).inc(tokens)
        for given in header.inputs:
            m.staleness.observe(header.version - 1 - given.base)
            m.updates_merged.labels(given.learner).inc()
            m.tokens_merged.labels(self._fragment).inc(given.tokens)
            for reason in given.clipped:
                m.clipped.labels(reason).inc()
        m.updates_missed.inc(len(header.late))
        for reason, count in header.rejected_total.items():
            m.rejections.labels(reason).inc(max(0, count - before.get(reason, 0)))
