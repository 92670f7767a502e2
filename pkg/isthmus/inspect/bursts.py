"""Learners that diverged for a moment and train as before again, as the commits show them. No I/O.

That an update was cut does not show that its learner diverged: it may have been compared with the short updates of a
warm-up, or of few steps. So an update leaps only if it is far longer than its learner's own updates before and after.
"""

import math
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from isthmus.format.records.objects import CommitHeader, Input
from isthmus.reasons import Reason
from isthmus.rounds.bounds import YOUNG

FAR = 0.1
"""An update that is cut to less than this share of its length may have diverged. (One of a learner that trained on
alone after a restart was seen cut to 0.29.)"""

RISE = 4.0
"""It has diverged if it is more than so many times as long as usual updates, whatever the number of its steps."""

DIVERGED = (Reason.NON_FINITE, Reason.OVERFLOW, Reason.TOO_LONG)
"""Reasons for which no update of a learner that trains well is rejected."""

LONG = 16
"""An update that is rejected as too long has not diverged if it may have so many times the usual steps."""

AGAIN = 0.5
"""A learner whose newest updates are cut to less than this share of their length does not train as before."""

BEFORE = 8
"""Updates before a leap with which the length is compared, and the fewest with which the loss is."""

BEFORE_LOSS = 64
"""Most updates before a leap of the loss: where losses scatter, one in eight may be twice as high as the others."""

LEAP = 2.0
"""The loss of an update leaps if it is more than so many times the largest one of the updates before."""

AFTER = 4
"""Newest updates of a learner that must be as usual before it is said to train as before. An update's length is
compared only if its learner has so many before and after it."""

KEPT = 4096
"""Updates of each learner that are remembered."""


FOR_A_MOMENT = "for a moment"
"""These words are in the sentence about each burst, which is over."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What was seen of a learner that diverged for a moment."""

    learner: str
    said: str
    place: str
    """The round, as `isthmus explain` takes it."""


class _Seen(NamedTuple):
    at: float
    """When the update was captured; of a rejected one, when the commit that lists it was written [s since 1970]."""
    place: str
    loss: float | None
    far: str
    """What became of an update that may have diverged; empty for any other."""
    fragment: int
    given: Input | None
    """The update, if it was merged."""


def rise(one: Input, other: Input) -> float:
    """Return how many times as long as another update one is, beyond what its steps explain.

    Length grows with the steps if they go one way, and with their root if they are noise: the smaller result counts.
    """
    more = max(1, one.steps) / max(1, other.steps)
    return one.norm / other.norm / max(more, math.sqrt(more)) if other.norm else math.inf


class Bursts:
    """Looks for such learners in commits, which may be taken in any order, and twice."""

    def __init__(self) -> None:
        self._seen = defaultdict[str, deque[_Seen]](lambda: deque(maxlen=KEPT))

    def take(self, header: CommitHeader) -> None:
        """Add a commit."""
        place = f"{header.fragment}/{header.version}"
        for given in header.inputs if header.version > YOUNG else ():
            far = f"cut to {given.scale:.2g} of its length" if given.scale < FAR else ""
            self._seen[given.learner].append(_Seen(given.taken_at, place, given.loss, far, header.fragment, given))
        for turned in header.rejected:
            if turned.reason in DIVERGED:
                far = f"rejected ({turned.reason})"
                self._seen[turned.learner].append(_Seen(header.written_at, place, None, far, header.fragment, None))

    def found(self) -> list[Burst]:
        """Return the bursts: of each learner the newest one, if its newest updates are as usual."""
        found = (_newest(name, sorted(set(seen), key=_at)) for name, seen in sorted(self._seen.items()))
        return [burst for burst in found if burst is not None]


def _at(seen: _Seen) -> float:
    return seen.at


def _newest(name: str, seen: list[_Seen]) -> Burst | None:
    now = seen[-AFTER:]
    if len(seen) <= AFTER or any(one.far or (one.given is not None and one.given.scale < AGAIN) for one in now):
        return None
    for one in reversed(seen[:-AFTER]):
        if one.far and _diverged(one, seen):
            said = f"{name} exploded {FOR_A_MOMENT}, and trains as before: an update was {one.far}"
            return Burst(name, said, one.place)
    return _leap(name, [one for one in seen if one.loss is not None])


def _diverged(one: _Seen, seen: list[_Seen]) -> bool:
    """Return whether an update that was cut or rejected was far longer than its learner's updates before and after."""
    if one.given is None and not one.far.endswith(f"({Reason.TOO_LONG})"):
        return True
    same = [(o.at, o.given) for o in seen if o.fragment == one.fragment and o.given and o.given.norm and not o.far]
    before = [given for at, given in same if at < one.at][-BEFORE:]
    after = [given for at, given in same if at > one.at][:BEFORE]
    if len(before) < AFTER or len(after) < AFTER:
        return False
    if one.given is None:  # its length is not known, and no more steps than between these two
        return after[0].step - before[-1].step < LONG * statistics.median(given.steps for given in before)
    rises = [rise(one.given, other) for other in before]
    return min(rises) > RISE and statistics.median(rise(one.given, other) for other in after) > RISE


def _leap(name: str, seen: list[_Seen]) -> Burst | None:
    losses = [one.loss or 0.0 for one in seen]
    for number in range(len(seen) - AFTER - 1, BEFORE - 1, -1):
        before = max(islice(losses, max(0, number - BEFORE_LOSS), number))
        now = statistics.median(losses[-AFTER:])
        if losses[number] > LEAP * before and now < min(losses[number] / LEAP, LEAP * before):
            said = (
                f"the loss of {name} leapt {FOR_A_MOMENT}: {losses[number]:.4g} in an update, {before:.4g} at most "
                f"before, {now:.4g} in the newest updates"
            )
            return Burst(name, said, seen[number].place)
    return None
