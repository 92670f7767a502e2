"""How much one learner can do: what it says of itself is believed as far as others, the log and the clock allow.

Everything is relative: to what is usual, which the log says; to what this learner counted for before; to the time since
the version that an update is based on. What is beyond is clipped, and the commit records it. What is usual follows from
the newest commits alone, so that whoever reads the log finds every weight and scale again (`isthmus.inspect.replay`);
only how many steps were believed rests on a clock, and is recorded.

Usual among three or more learners is the median of what each said last: less than half of them cannot move it. One or
two have no majority. Of them the shorter one's length is usual, and it changes by no more than `FALLS` or `RISES` with
each version: one of two that explodes counts for `Bounds.norm` times the other's length at most, for ever. So is the
lower one's rate of tokens per step.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isthmus.format.records.objects import Input
from isthmus.format.rules import Bounds
from isthmus.reasons import Clip

LEAST = 1e-6
"""An update weighs at least so much of the median."""

REMEMBERED = 16
"""Versions after which a learner's last update says nothing any more of what is usual."""

MAJORITY = 3
"""Learners from which on there is one."""

FALLS, RISES = 0.95, 2.0
"""By how much the usual length of one or two learners may change with a version: one that is far too short holds the
other back only slowly, and a learning rate that is warmed up rises as fast as it likes."""

FIRST_RMS = 0.05
"""Where nothing is known of a fragment, an update of one or two learners is no longer than its parameters, or than this
for each of them."""

UNTIMED = 8.0
"""Where no clock says how many steps there was time for: so many times what is usual."""


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
    believed: int = 0
    """Steps that were believed when it was merged; 0: that is to be judged."""


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
    steps: int = 0
    """Steps that are believed; 0: all that it says."""


class _Seen(NamedTuple):
    """What a learner's newest update said it was, whether it counted for that or not."""

    version: int
    steps: int
    weight: float
    rate: float
    """Tokens per step."""
    length: float
    """Norm per root of a step: of a walk that is half drift and half noise neither steps nor their root is fair."""


class Influence:
    """What is usual in one fragment, and how far one update may be from it.

    Usual is what was seen of each learner last, not what was believed of it: where all of them change, as after a
    change of the learning rate, what is usual changes with them, and nobody is kept out for ever.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._seen: dict[str, _Seen] = {}
        self._counted: dict[str, float] = {}
        """Tokens per step that each learner counted for last, of several updates in a commit the most: what is left for
        the last of them says nothing of it."""
        self._version = 0
        self._length = 0.0

    @property
    def known(self) -> bool:
        """Whether anything was merged lately. Else what is usual is what the round itself holds."""
        return bool(self._counted)

    @property
    def length(self) -> float:
        """The usual length [norm per root of a step] from the newest commit on; 0 while unknown."""
        return self._length

    def note(self, version: int, inputs: Iterable[Input], length: float) -> None:
        """Take what a commit merged, and the usual length that it records."""
        self._version = version
        self._length = length
        counted: dict[str, float] = {}
        for given in inputs:
            steps = given.believed or max(1, given.steps)
            self._seen[given.learner] = _as_said(claim_of(given), version)
            counted[given.learner] = max(math.sqrt(given.weight / steps), counted.get(given.learner, 0.0))
        self._counted |= counted
        self._seen = {who: seen for who, seen in self._seen.items() if version - seen.version < REMEMBERED}
        self._counted = {who: rate for who, rate in self._counted.items() if who in self._seen}

    def after(self, inputs: Iterable[Input]) -> float:
        """Return the usual length once a commit has merged these."""
        seen = dict(self._seen)
        for given in inputs:
            seen[given.learner] = _as_said(claim_of(given), self._version + 1)
        return self._usual_length(self._recent(seen, self._version + 1))

    def longest(self, inputs: Iterable[Input]) -> float:
        """Return the longest that anything was lately, these included [norm per root of a step]."""
        said = {given.learner: _as_said(claim_of(given), self._version + 1) for given in inputs}
        return max((found.length for found in [*self._seen.values(), *said.values()]), default=0.0)

    def learners(self, inputs: Iterable[Input]) -> set[str]:
        """Return of whom something was merged lately, these included."""
        return {*self._seen, *(given.learner for given in inputs)}

    def usual_steps(self, besides: str) -> float:
        """Return how many steps the others' updates are of, as a rule; 0 where there are none."""
        return statistics.median([found.steps for who, found in self._seen.items() if who != besides] or [0])

    def judge(
        self, claim: Claim, among: Sequence[Claim] = (), *, already: float = 0.0, first: float = math.inf
    ) -> Believed:
        """Return what an update counts for.

        `among`: other updates of the round, before it; all of them where nothing was merged lately. `already`: what the
        learner's others weigh in the round, in tokens² per step: with one on each base that is not stale it weighs no
        more than with one. `first`: the norm that is believed where the fragment has no history yet.
        """
        b, clipped = self._bounds, list[Clip]()
        claim = self.timed(claim, among)
        steps = claim.believed
        if steps < claim.steps:
            clipped.append(Clip.STEPS)
        seen = self._with((*among, claim))
        usual = list(seen.values())
        rate = claim.tokens / claim.steps
        # Of an even number the lower one: of two the mean is what either of them says.
        usual_rate = statistics.median_low(u.rate for u in usual)
        # Whoever counted for little may come back to what is usual, and from there on grow by leaps.
        most = min(b.rate * usual_rate, max(usual_rate, b.jump * self._counted.get(claim.learner, math.inf)))
        if rate > most:
            rate = most
            clipped.append(Clip.TOKENS)
        asked = claim.tokens * (claim.tokens / claim.steps)
        weight = steps * rate * rate if clipped else asked
        weights = [u.weight for u in usual]
        if weight > (room := max(0.0, b.weight * statistics.median(weights) - already)):
            weight = room
            clipped.append(Clip.WEIGHT)
        scale, refused = 1.0, False
        usually = self._usual_length(seen)
        if usually > 0.0:
            # Of more steps than is usual none is longer for it: who says that it is sixteen times as fast is believed.
            length = claim.norm / math.sqrt(min(steps, max(1, statistics.median_low(u.steps for u in usual))))
            refused = len(usual) >= MAJORITY and length > b.refused * usually
            if length > b.norm * usually:
                scale = b.norm * usually / length
                clipped.append(Clip.NORM)
                if len(usual) >= MAJORITY and weight > (most := statistics.median(weights)):
                    weight = most  # long and heavy at once is nobody
                    clipped += [Clip.WEIGHT] if Clip.WEIGHT not in clipped else []
            elif (short := claim.norm / math.sqrt(steps)) < usually / b.norm:
                # RDA gives each direction the mean length: one that is hardly there would be as loud as any.
                weight *= b.norm * short / usually
                clipped.append(Clip.SHORT)
        if self._length <= 0.0 and len(usual) < MAJORITY and claim.norm * scale > first:
            scale = first / claim.norm
            if Clip.NORM not in clipped:
                clipped.append(Clip.NORM)
        # Far below this it makes no difference, but that sums are taken in units of the first weight there is. Nobody
        # counts for more than was asked, whatever others said of themselves.
        weight = max(weight, min(asked, LEAST * statistics.median_low(weights)))
        return Believed(weight, scale, tuple(clipped), refused, steps if steps < claim.steps else 0)

    def timed(self, claim: Claim, among: Sequence[Claim] = ()) -> Claim:
        """Return what an update says with the steps that there was time for: what is said of more is no work."""
        if claim.believed:
            return claim
        most = claim.steps
        if claim.step_s > 0.0 and math.isfinite(claim.elapsed_s):
            most = int(1 + claim.elapsed_s / claim.step_s)
        elif others := self._with(other for other in among if other.learner != claim.learner):
            most = int(UNTIMED * statistics.median(found.steps for found in others.values()))
        return claim._replace(believed=min(claim.steps, max(1, most)))

    def _with(self, claims: Iterable[Claim]) -> dict[str, _Seen]:
        """Return what was seen of each learner last, these claims included."""
        said = {claim.learner: _as_said(claim, self._version) for claim in claims}
        return self._recent(self._seen | said, self._version + 1)

    def _recent(self, seen: dict[str, _Seen], version: int) -> dict[str, _Seen]:
        return {who: found for who, found in seen.items() if version - found.version < REMEMBERED}

    def _usual_length(self, seen: dict[str, _Seen]) -> float:
        lengths = [found.length for found in seen.values() if found.length > 0.0]
        if not lengths:
            return self._length
        if len(seen) >= MAJORITY:
            return statistics.median(lengths)
        if self._length <= 0.0:
            return min(lengths)
        return min(max(min(lengths), FALLS * self._length), RISES * self._length)


def claim_of(given: Input) -> Claim:
    """Return what an update said that a commit has merged."""
    steps = max(1, given.steps)
    return Claim(given.learner, steps, given.tokens, given.norm, believed=given.believed or steps)


def first_norm(length: float, parameters: int) -> float:
    """Return the norm of an update that is believed of one or two learners where a fragment has no history: as long as
    its parameters are, or `FIRST_RMS` for each of them."""
    return max(length, FIRST_RMS * math.sqrt(parameters))


def _as_said(claim: Claim, version: int) -> _Seen:
    rate, steps = claim.tokens / claim.steps, claim.believed or claim.steps
    return _Seen(version, steps, claim.tokens * rate, rate, claim.norm / math.sqrt(steps))
