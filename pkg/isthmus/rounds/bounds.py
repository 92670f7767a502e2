"""How much one learner can do: what it says of itself is believed as far as others, the log and the clock allow.

Everything is relative: to the median of what came lately of each learner, to what this learner counted for before, to
the time since the version that an update is based on. What is beyond is clipped, and that is recorded in the commit: an
input's weight and scale are those that were used, so that replay needs nothing of this.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isthmus.reasons import Clip
from isthmus.records.objects import Input
from isthmus.rules import Bounds

LEAST = 1e-6
"""An update weighs at least so much of the median."""

REMEMBERED = 32
"""Versions after which a learner's last update says nothing any more of what is usual."""


class Claim(NamedTuple):
    """What an update says it is, and how long it was found to be."""

    learner: str
    steps: int
    tokens: int
    norm: float
    """Euclidean length of the outer gradient."""
    elapsed_s: float = math.inf
    """From the version it is based on to now, as far as this syncer knows."""
    step_s: float = 0.0
    """The shortest step that is believed of anybody; 0 while unknown."""


@dataclass(frozen=True, slots=True)
class Believed:
    """What an update counts for."""

    weight: float
    """In tokens² per step."""
    scale: float = 1.0
    """Its length is multiplied by this."""
    clipped: tuple[Clip, ...] = ()
    refused: bool = False
    """Whether it is so much longer than what is usual that it is none."""


class _Seen(NamedTuple):
    """What a learner's newest update said it was, whether it counted for that or not."""

    version: int
    weight: float
    rate: float
    """Tokens per step."""
    length: float
    """Norm per root of a step: of a walk that is half drift and half noise neither steps nor their root is fair."""


class Influence:
    """What is usual in one fragment, and how far one update may be from it.

    Usual is the median of what was seen of each learner last, not of what was believed of it: where all of them change,
    as after a change of the learning rate, what is usual changes with them, and nobody is kept out for ever. Less than
    half of the learners cannot move it. Of two learners neither is far from the median, so nothing is cut.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._seen: dict[str, _Seen] = {}
        self._counted: dict[str, float] = {}
        """Tokens per step that each learner counted for last, of several updates in a commit the most: what is left for
        the last of them says nothing of it."""
        self._version = 0

    @property
    def known(self) -> bool:
        """Whether anything was merged lately. Else what is usual is what the round itself holds."""
        return bool(self._counted)

    def note(self, version: int, inputs: Iterable[Input]) -> None:
        """Take what a commit merged. An input of a release that recorded no norm says nothing of lengths."""
        self._version = version
        counted: dict[str, float] = {}
        for given in inputs:
            steps = max(1, given.steps)
            self._seen[given.learner] = _as_said(Claim(given.learner, steps, given.tokens, given.norm), version)
            counted[given.learner] = max(math.sqrt(given.weight / steps), counted.get(given.learner, 0.0))
        self._counted |= counted
        self._seen = {who: seen for who, seen in self._seen.items() if version - seen.version < REMEMBERED}
        self._counted = {who: rate for who, rate in self._counted.items() if who in self._seen}

    def judge(self, claim: Claim, among: Sequence[Claim] = (), *, already: float = 0.0) -> Believed:
        """Return what an update counts for.

        `among`: other updates of the round, where nothing was merged lately. `already`: what the learner's others weigh
        in the round, in tokens² per step: with one on each base that is not stale it weighs no more than with one.
        """
        for other in (*among, claim):
            self._seen[other.learner] = _as_said(other, self._version)
        b, usual = self._bounds, list(self._seen.values())
        clipped = []
        steps, rate = claim.steps, claim.tokens / claim.steps
        # No more steps than there was time for; what is said of more is no work.
        if claim.step_s > 0.0 and steps > (most := 1 + claim.elapsed_s / claim.step_s):
            steps = max(1, int(most))
            clipped.append(Clip.STEPS)
        usual_rate = statistics.median(u.rate for u in usual)
        # Whoever counted for little may come back to what is usual, and from there on grow by leaps.
        most = min(b.rate * usual_rate, max(usual_rate, b.jump * self._counted.get(claim.learner, math.inf)))
        if rate > most:
            rate = most
            clipped.append(Clip.TOKENS)
        weight = claim.tokens * (claim.tokens / claim.steps) if not clipped else steps * rate * rate
        usual_weight = statistics.median(u.weight for u in usual)
        if weight > (room := max(0.0, b.weight * usual_weight - already)):
            weight = room
            clipped.append(Clip.WEIGHT)
        scale, refused = 1.0, False
        lengths = [u.length for u in usual if u.length > 0.0]
        if lengths:
            length, usually = claim.norm / math.sqrt(claim.steps), statistics.median(lengths)
            refused = length > b.refused * usually
            if length > b.norm * usually:
                scale = b.norm * usually / length
                clipped.append(Clip.NORM)
            elif length < usually / b.norm:
                # RDA gives each direction the mean length: one that is hardly there would be as loud as any.
                weight *= b.norm * length / usually
                clipped.append(Clip.SHORT)
        # Far below this it makes no difference, but that sums are taken in units of the first weight there is. Nobody
        # counts for more than was asked, whatever others said of themselves.
        asked = claim.tokens * (claim.tokens / claim.steps)
        return Believed(max(weight, min(asked, LEAST * usual_weight)), scale, tuple(clipped), refused)


def _as_said(claim: Claim, version: int) -> _Seen:
    rate = claim.tokens / claim.steps
    return _Seen(version, claim.tokens * rate, rate, claim.norm / math.sqrt(claim.steps))
