"""Convert a run's log to a timeline in Chrome's trace format, which Perfetto opens.

Each learner is a process with two tracks per fragment: its training, and its updates. The syncers together are one
process with two tracks per fragment: rounds, and the merging and publishing after them. Arrows go from an update to the
commit that merged it, and from a commit to the training that learners based on it. Times are by the merging syncers'
clocks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from isthmus.format.records.objects import CommitHeader, Input

SYNCERS = 1
_FIRST_LEARNER = 2

Event = dict[str, Any]


def trace(headers: Iterable[CommitHeader]) -> Mapping[str, object]:
    """Return the trace of these commits, to be written as JSON."""
    commits = sorted(headers, key=lambda h: (h.fragment, h.version))
    names = sorted({i.learner for h in commits for i in h.inputs})
    pids = {name: _FIRST_LEARNER + number for number, name in enumerate(names)}
    start = min((_earliest(h) for h in commits), default=0.0)
    tracks = _Tracks(start)
    tracks.process(SYNCERS, "syncers")
    for name, pid in pids.items():
        tracks.process(pid, f"learner {name}")
    trained: dict[tuple[int, int], list[Event]] = {}
    published: dict[tuple[int, int], Event] = {}
    for h in commits:
        merged, published[h.fragment, h.version] = _round(tracks, h)
        for i in h.inputs:
            training, sent = _update(tracks, h, i, pids[i.learner])
            tracks.arrow(f"merge {h.fragment}/{h.version}", sent, merged)
            trained.setdefault((h.fragment, i.base), []).append(training)
    for place, source in published.items():
        for target in trained.get(place, ()):
            tracks.arrow(f"adopt {place[0]}/{place[1]}", source, target)
    return {"traceEvents": tracks.events, "displayTimeUnit": "ms"}


def _earliest(h: CommitHeader) -> float:
    return min([h.waited.opened_at, *(i.taken_at - i.train_s for i in h.inputs)])


def _round(tracks: "_Tracks", h: CommitHeader) -> tuple[Event, Event]:
    """Add a round and what followed it; return the spans of merging and of publishing."""
    w, p = h.waited, h.fragment
    facts = {"version": h.version, "closed_by": w.closed_by, "missing": ", ".join(w.missing), "writer": h.writer}
    tracks.thread(SYNCERS, _waiting(p), f"fragment {p}: rounds")
    tracks.thread(SYNCERS, _after(p), f"fragment {p}: merges")
    tracks.span(SYNCERS, _waiting(p), f"round {p}/{h.version}", w.opened_at, w.closed_at, facts)
    merged = min(w.closed_at + w.merge_s, h.written_at)
    return (
        tracks.span(SYNCERS, _after(p), f"merge {p}/{h.version}", w.closed_at, merged, {"inputs": len(h.inputs)}),
        tracks.span(SYNCERS, _after(p), f"publish {p}/{h.version}", merged, h.written_at, {"value": h.value_key}),
    )


def _update(tracks: "_Tracks", h: CommitHeader, i: Input, pid: int) -> tuple[Event, Event]:
    """Add an update; return the spans of its training and of its wait in the round."""
    p = h.fragment
    facts = {"base": i.base, "steps": i.steps, "tokens": i.tokens, "merged into": h.version, "key": i.key}
    tracks.thread(pid, _training(p), f"fragment {p}: training")
    tracks.thread(pid, _sending(p), f"fragment {p}: updates")
    training = tracks.span(pid, _training(p), f"train {p}/{i.base}", i.taken_at - i.train_s, i.taken_at, facts)
    tracks.span(pid, _sending(p), f"upload {p}/{i.base}", i.taken_at, i.heard_at, facts)
    tracks.span(pid, _sending(p), f"fetch {p}/{i.base}", i.heard_at, i.fetched_at, {"bytes": i.bytes})
    return training, tracks.span(pid, _sending(p), f"wait {p}/{h.version}", i.arrived_at, h.waited.closed_at, facts)


def _waiting(fragment: int) -> int:
    return 2 * fragment + 1


def _after(fragment: int) -> int:
    return 2 * fragment + 2


_training, _sending = _waiting, _after
"""A learner's two tracks of a fragment have the same numbers as the syncers' two."""


class _Tracks:
    """Collects events. Spans of one track never overlap: a span that begins before the last one ended starts there."""

    def __init__(self, start: float) -> None:
        self.events: list[Event] = []
        self._start = start
        self._ends: dict[tuple[int, int], int] = {}
        self._named: set[tuple[int, int]] = set()
        self._arrows = 0

    def process(self, pid: int, name: str) -> None:
        """Name a process."""
        self.events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})

    def thread(self, pid: int, tid: int, name: str) -> None:
        """Name a track, unless it has a name."""
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            self.events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})

    def span(self, pid: int, tid: int, name: str, begin: float, end: float, facts: Mapping[str, object]) -> Event:
        """Add a span from `begin` to `end` [seconds since 1970] to a track, and return it."""
        first = max(self._us(begin), self._ends.get((pid, tid), 0))
        last = max(self._us(end), first + 1)
        self._ends[pid, tid] = last
        event: Event = {
            "ph": "X",
            "cat": "isthmus",
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": first,
            "dur": last - first,
            "args": dict(facts),
        }
        self.events.append(event)
        return event

    def arrow(self, name: str, source: Event, target: Event) -> None:
        """Add an arrow from the beginning of one span to the beginning of another."""
        self._arrows += 1
        for phase, event in (("s", source), ("f", target)):
            end = {"bp": "e"} if phase == "f" else {}
            place = {key: event[key] for key in ("pid", "tid", "ts")}
            self.events.append({"ph": phase, "cat": "isthmus", "name": name, "id": self._arrows, **place, **end})

    def _us(self, at: float) -> int:
        return round((at - self._start) * 1e6)
