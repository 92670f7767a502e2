"""The line that a service logs every minute while all is well, made of the gains of its metrics since the last line."""

import logging
import math
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from isthmus.format.records.messages import PARTS
from isthmus.runtime.metrics import PREFIX, SyncerMetrics

if TYPE_CHECKING:
    from isthmus.link import Link

EVERY_S = 60.0


class Gains:
    """Values of a metrics registry, and their gains between two calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._before: dict[str, float] = {}

    def value(self, name: str, **labels: str) -> float:
        """Return a value; 0 if the registry does not have it."""
        return self._registry.get_sample_value(PREFIX + name, labels) or 0.0

    def gained(self, name: str, **labels: str) -> float:
        """Return the gain of a counter since the last call for the same counter (at first, its value)."""
        key = f"{name} {sorted(labels.items())}"
        now = self.value(name, **labels)
        gain, self._before[key] = now - self._before.get(key, 0.0), now
        return gain

    def gained_by(self, name: str, label: str) -> dict[str, float]:
        """Return the gains of the counters of one name, by a label. Counters without a gain are left out."""
        values = {
            sample.labels[label]
            for metric in self._registry.collect()
            for sample in metric.samples
            if sample.name == PREFIX + name and label in sample.labels
        }
        gains = {value: self.gained(name, **{label: value}) for value in sorted(values)}
        return {value: gain for value, gain in gains.items() if gain}


def _listed(counts: dict[str, float]) -> str:
    return ", ".join(f"{what} {count:.0f}" for what, count in counts.items())


# --- a syncer's -------------------------------------------------------------------------------------------------------


class SyncerMinute:
    """Writes the line about a syncer's last minute."""

    def __init__(self, name: str, metrics: SyncerMetrics) -> None:
        self._name = name
        self._gains = Gains(metrics.registry)
        self.say()  # leaves the start out of the first minute

    def say(self) -> tuple[str, dict[str, object]]:
        """Return the line, and its facts as fields of the log event."""
        g = self._gains
        closed, rejected = g.gained_by("rounds_closed_total", "closed_by"), g.gained_by("rejections_total", "reason")
        commits, lost = int(sum(closed.values())), g.gained("races_lost_total")
        missed = g.gained("updates_missed_round_total")
        up, down = (g.gained("store_bytes_total", direction=way) for way in ("up", "down"))
        learners = int(g.value("learners_expected"))
        line = f"{self._name}: {commits} commits" + (f" (closed by {_listed(closed)})" if closed else "")
        line += f", {learners} learners here, rejected {_listed(rejected) or 'nothing'}"
        line += (f", {missed:.0f} missed their round" if missed else "") + (f", {lost:.0f} races lost" if lost else "")
        line += f", {up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down"
        facts = {"commits": commits, "closed_by": closed, "learners": learners, "rejections": rejected}
        return line, facts | {
            "missed_round": missed,
            "races_lost": lost,
            "store_bytes_up": up,
            "store_bytes_down": down,
        }


# --- a learner's ------------------------------------------------------------------------------------------------------


class LearnerMinute:
    """Writes the line about a learner's last minute."""

    def __init__(self, name: str, steps: int, link: "Link", now: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._steps = steps
        self._link = link
        self._now = now
        self._gains = Gains(link.metrics.registry)
        self._at = now()
        self._gains.gained("trained_tokens_total")
        self._gains.gained("steps_total")

    def say(self) -> tuple[str, dict[str, object]]:
        """Return the line, and its facts as fields of the log event."""
        now, g = self._now(), self._gains
        seconds, self._at = max(now - self._at, 1e-9), now
        steps, tokens = int(g.gained("steps_total")), g.gained("trained_tokens_total")
        loss = g.value("training_loss")
        ledger = {part: g.value("ledger_tokens", part=part) for part in PARTS}
        total = sum(ledger.values())
        versions = self._link.versions
        line = f"{self._name}: step {self._link.steps_done} of {self._steps} ({steps} since the last line)"
        line += "" if math.isnan(loss) else f", loss {loss:.3f}"
        line += f", {tokens / seconds:,.0f} tokens/s, versions {min(versions)} to {max(versions)}"
        line += f", merged {ledger['merged'] / total:.0%}" if total else ", nothing merged yet"
        facts: dict[str, object] = {"step": self._link.steps_done, "tokens_s": tokens / seconds, "versions": versions}
        return line, facts | {"ledger": ledger} | ({} if math.isnan(loss) else {"loss": loss})


class Diary:
    """Logs a learner's line of each minute, and each signal that asks it to stop, from a thread of its own.

    A signal handler must not log: it may interrupt the training thread in the middle of a write.
    """

    def __init__(self, logger: logging.Logger, name: str, every_s: float = EVERY_S) -> None:
        self._logger = logger
        self._name = name
        self._every_s = every_s
        self._told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._minute: LearnerMinute | None = None
        self._thread = threading.Thread(target=self._run, name="isthmus-diary", daemon=True)
        self._thread.start()

    def joined(self, steps: int, link: "Link") -> None:
        """Log a line a minute about this link from now on."""
        self._minute = LearnerMinute(self._name, steps, link)

    def asked(self, number: int) -> None:
        """Note a signal, which the thread then logs. The signal's handler may call this."""
        self._told.put(number)

    def close(self) -> None:
        """Log the signals that are not logged yet, and end the thread (wait at most 5 s)."""
        self._told.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        until = time.monotonic() + self._every_s
        while True:
            with suppress(queue.Empty):
                number = self._told.get(timeout=max(0.0, until - time.monotonic()))
                if number is None:
                    return
                self._logger.info(
                    "%s was asked to stop by %s: it finishes its step, completes its uploads and leaves",
                    self._name,
                    signal.Signals(number).name,
                    extra={"signal": signal.Signals(number).name},
                )
                continue
            until += self._every_s
            if self._minute is not None:
                line, facts = self._minute.say()
                self._logger.info("%s", line, extra=facts)
