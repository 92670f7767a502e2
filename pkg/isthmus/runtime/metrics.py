"""The metrics of syncers and learners for Prometheus, each declared once with its unit.

Each agent has one object with a registry of its own, so that several agents in one process do not mix. Names end in
their unit (seconds, bytes, tokens, steps, versions, ratio; `_total` for counters). Durations are seconds on a clock
that never goes back.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from isthmus.reasons import Clip, Reason

PREFIX = "isthmus_"

FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets for durations of requests and of holding the training thread [s]."""

ROUND_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
"""Buckets for the times of a round [s]: they reach from steps of fast learners to those of very slow ones."""

RATIO = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.999, 1.0)
VERSIONS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True)
class Declared:
    """The declaration of one metric."""

    name: str
    kind: str
    description: str
    labels: tuple[str, ...]


class Metrics:
    """Metrics that every agent has: of its store, its bus and its event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.declared: list[Declared] = []
        self.store_seconds = self._histogram(
            "store_request_seconds", "Duration of one request to the store, tries counted apart.", FAST_S, "operation"
        )
        self.store_bytes = self._counter(
            "store_bytes_total", "Bytes of objects moved to (up) and from (down) the store.", "direction"
        )
        self.store_failures = self._counter(
            "store_failures_total", "Requests to the store that went unanswered and were tried again.", "operation"
        )
        self.store_silence = self._gauge("store_silence_seconds", "Time since the store last answered a request.")
        self.bus_seconds = self._histogram(
            "bus_request_seconds", "Duration of one request to the bus; waiting reads are not measured.", FAST_S,
            "operation",
        )  # fmt: skip
        self.bus_failures = self._counter("bus_failures_total", "Requests to the bus that failed.", "operation")
        self.bus_silence = self._gauge("bus_silence_seconds", "Time since the bus last answered a request.")
        self.loop_lag = self._histogram(
            "event_loop_lag_seconds", "Delay of a callback on the agent's event loop, sampled ten times a second.",
            FAST_S,
        )  # fmt: skip
        self.histories = self._counter(
            "other_histories_total", "Commits of which another process says that it read other bytes under their key."
        )
        self.process = self._gauge(
            "process_info", "Always 1; its labels say who this process is.", "service", "run", "name", "version"
        )
        self.fragment_version = self._gauge(
            "fragment_version",
            "Newest version of the fragment this process holds (a learner: has adopted).",
            "fragment",
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        self._declare(name, "histogram", text, labels)
        return Histogram(PREFIX + name, text, labels, registry=self.registry, buckets=tuple(buckets))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        self._declare(name, "counter", text, labels)
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        self._declare(name, "gauge", text, labels)
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _declare(self, name: str, kind: str, text: str, labels: tuple[str, ...]) -> None:
        self.declared.append(Declared(PREFIX + name, kind, text, labels))


class SyncerMetrics(Metrics):
    """Metrics of a syncer. It counts only its own rounds and commits, so that the sum over syncers is right."""

    def __init__(self) -> None:
        super().__init__()
        self.commits = self._counter("commits_total", "Commits this syncer wrote.", "fragment")
        self.races_lost = self._counter("races_lost_total", "Merges dropped because another syncer was first.")
        self.rounds_closed = self._counter("rounds_closed_total", "Rounds merged, by what closed them.", "closed_by")
        self.quorum_missed = self._counter("quorum_missed_total", "Rounds merged with fewer learners than the quorum.")
        self.quorum_seconds = self._histogram(
            "quorum_seconds", "From the opener's step boundary to the arrival that made the quorum.", ROUND_S
        )
        self.grace_seconds = self._histogram("grace_seconds", "Grace granted after the quorum.", ROUND_S)
        self.round_seconds = self._histogram("round_seconds", "From opening a round to closing it.", ROUND_S)
        self.merge_seconds = self._histogram("merge_seconds", "Outer step of one round.", FAST_S)
        self.publish_seconds = self._histogram("publish_seconds", "Storing the value of one round.", FAST_S)
        self.participation = self._histogram(
            "participation_ratio", "Share of the expected learners whose work a commit merged.", RATIO
        )
        self.staleness = self._histogram(
            "staleness_versions", "How many versions old the base of a merged update was.", VERSIONS
        )
        self.updates_merged = self._counter("updates_merged_total", "Updates merged.", "learner")
        self.tokens_merged = self._counter(
            "merged_tokens_total", "Tokens of merged updates; a token counts once in each fragment.", "fragment"
        )
        self.weight_shares = self._counter(
            "weight_shares_total",
            "Shares of the weight of rounds that merged several learners, summed over the learner's updates.",
            "learner",
        )
        self.token_shares = self._counter(
            "token_shares_total", "Shares of those rounds' tokens, summed over the learner's updates.", "learner"
        )
        self.updates_missed = self._counter(
            "updates_missed_round_total", "Updates that were not in their round; the next one may still merge them."
        )
        self.rejections = self._counter("rejections_total", "Updates and messages rejected.", "reason")
        for reason in Reason:
            self.rejections.labels(reason.value)  # start at 0, so that the first rejection is an increase
        self.clipped = self._counter(
            "updates_clipped_total",
            "Updates scaled down to a bound before they were merged, by bound. An update may count under several.",
            "reason",
        )
        for clip in Clip:
            self.clipped.labels(clip.value)
        self.commit_age = self._gauge(
            "fragment_commit_age_seconds", "Time since this syncer last saw a new commit of the fragment.", "fragment"
        )
        self.fragments_held = self._gauge("fragments_held", "Fragments this syncer opens rounds of.")
        self.fragments_broken = self._gauge("fragments_broken", "Fragments whose log it cannot fold to its end.")
        self.fragments_holed = self._gauge(
            "fragments_holed", "Fragments it keeps whose log lacks a commit, looked for every ten minutes."
        )
        self.fragments = self._gauge("fragments", "Fragments of the run.")
        self.learners = self._gauge("learners_expected", "Learners a round opened now would wait for.")
        self.rounds_waiting = self._gauge(
            "rounds_waiting", "Rounds that are due and wait until it has room to read and merge their updates."
        )
        self.period = self._gauge("period_steps", "Steps between two uploads of a fragment, the longest of those held.")
        self.messages_dropped = self._counter(
            "messages_dropped_total", "Bus messages dropped because too many waited; they are said again."
        )
        self.fold_seconds = self._gauge(
            "fold_seconds", "How long folding a fragment took when it was last taken over, the longest of those held."
        )

    def forget(self, learner: str) -> None:
        """Drop the counts of a learner that is long gone, so that old names do not fill the memory."""
        for counter in (self.updates_merged, self.weight_shares, self.token_shares):
            with contextlib.suppress(KeyError):
                counter.remove(learner)


class LearnerMetrics(Metrics):
    """Metrics of a learner."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self._counter("steps_total", "Optimizer steps taken by this process.")
        self.tokens = self._counter("trained_tokens_total", "Tokens of those steps.")
        self.steps_done = self._gauge("learner_steps", "Optimizer steps of this learner, over all restarts.")
        self.loss = self._gauge("training_loss", "Last finite loss that the training loop reported; NaN before.")
        self.loss.set(math.nan)
        self.losses_nonfinite = self._counter("nonfinite_losses_total", "Steps whose reported loss was not finite.")
        self.step_seconds = self._gauge("step_seconds", "Duration of an optimizer step, a moving average.")
        self.hold_seconds = self._histogram(
            "step_hold_seconds", "Time that a call of step() held the training thread.", FAST_S
        )
        self.upload_seconds = self._gauge(
            "upload_seconds", "From a step boundary to the announcement of its update, a moving average."
        )
        self.sync_seconds = self._gauge(
            "sync_seconds", "From hearing of a commit to its value being ready to adopt, a moving average."
        )
        self.ledger = self._gauge(
            "ledger_tokens", "Where the tokens of this learner went, over all restarts; the parts add up.", "part"
        )
        self.tokens_trained_again = self._gauge(
            "trained_again_tokens", "Tokens that earlier incarnations trained beyond the checkpoint gone on from."
        )
        self.incarnation = self._gauge("incarnation", "How often this name has joined the run.")
        self.checkpoint_age = self._gauge("checkpoint_age_seconds", "Time since the last checkpoint was stored.")
        self.checkpoints_failed = self._counter("checkpoints_failed_total", "Checkpoints that could not be stored.")


def declared() -> list[Declared]:
    """Return the declarations of the metrics of syncers and learners, each once."""
    every = {d.name: d for metrics in (SyncerMetrics(), LearnerMetrics()) for d in metrics.declared}
    return list(every.values())
