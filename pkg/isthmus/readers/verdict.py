"""How a run does, in one sentence: whether learners merge, and where they do not, why and what to do. Pure, no I/O."""

import time
from dataclasses import dataclass

from isthmus.readers.heard import LearnerView
from isthmus.readers.status import Status

NAMED_MAX = 3
"""Learners named with their trouble; of the others only how many there are."""


@dataclass(frozen=True, slots=True)
class Health:
    """What `status` says first."""

    ok: bool
    """Whether there is nothing to see to: somebody trains and all of them are merged, or everybody is done."""
    said: str


def health(status: Status, run: str, bus: str, expected: int = 0) -> Health:
    """Return the health of a run as it is heard now.

    `run` and `bus` are where they are, for commands to copy; `expected` is how many learners should be there at least,
    as long as not all are done.
    """
    written = max((c.header.written_at for c in status.heads if c is not None), default=0.0)
    last = f"the last commit is of {_clock(written, status.at)}" if written else "nothing was ever committed"
    syncer = f"isthmus syncer {run} --bus {bus}"
    if status.bus_error:
        return Health(False, f"{status.bus_error}: who is there is not known; {last}; see whether {bus} is there")
    here = sorted((v for v in status.hearing.learners.values() if v.name in status.live), key=lambda v: v.name)
    troubled = {v.name: trouble for v in here if (trouble := _trouble(status, v))}
    known = [v for v in status.hearing.learners.values() if v.left is None]
    silent = sorted(v.name for v in known if v.name not in status.live)
    if not known:
        return _nobody(status, last, syncer)
    parts = [f"{len(here) - len(troubled)} of {len(known)} learners merge"]
    able = [name for name in status.syncers_live if status.hearing.syncers[name].able]
    if not status.syncers_live:
        parts = [f"0 of {len(known)} learners merge", f"no syncer is heard; {last}; start one with: {syncer}"]
    elif not able:
        parts.append(f"none of {len(status.syncers_live)} syncers can serve for now: see their logs; {last}")
    parts += [f"{name}: {trouble}" for name, trouble in list(troubled.items())[:NAMED_MAX]]
    if len(troubled) > NAMED_MAX:
        parts.append(f"so do {len(troubled) - NAMED_MAX} more")
    if silent:
        more = f" and {len(silent) - NAMED_MAX} more" if len(silent) > NAMED_MAX else ""
        parts.append(f"nothing is heard of {', '.join(silent[:NAMED_MAX])}{more}")
    if len(here) < expected:
        parts.append(f"{expected} learners are expected, {len(here)} are heard")
    broken = sorted({p for name in status.syncers_live for p in status.hearing.syncers[name].broken})
    if broken:
        named = ", ".join(map(str, broken))
        parts.append(f"fragment {named} cannot be folded: isthmus heal {run} says what can be done")
    # Who fell silent was perhaps taken away; the run goes on without.
    ok = bool(able) and bool(here) and len(here) >= expected and not troubled and not broken
    return Health(ok, "; ".join(parts))


def _nobody(status: Status, last: str, syncer: str) -> Health:
    """Return the health of a run that nobody trains."""
    left = [v.left for v in status.hearing.learners.values() if v.left is not None]
    done = sum(farewell.done for farewell in left)
    if not left:
        return Health(False, f"nobody trains: no learner was ever heard; {last}")
    rest = f", {len(left) - done} stopped before" if done < len(left) else ""
    said = f"nobody trains: {done} of {len(left)} learners are done{rest}; {last}"
    if not any(status.heads):
        return Health(False, f"{said}: what they learnt is not in the run; next time start one first: {syncer}")
    return Health(done == len(left), said)


def _trouble(status: Status, view: LearnerView) -> str:
    """Return why nothing of a learner that is heard is merged; empty where something is, or may soon be."""
    if view.heartbeat is None:
        return ""
    return f"waits for {view.heartbeat.waiting_for}" if view.heartbeat.waiting_for else ""


def _clock(at: float, now: float) -> str:
    """Return a time of day, and the day where it is not today."""
    then, today = time.localtime(at), time.localtime(now)
    same = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if same else "%Y-%m-%d %H:%M", then)
