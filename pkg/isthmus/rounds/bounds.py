"""Bounds on the influence of one learner: its claims are believed as far as others, the log and the clock allow.

All bounds are relative. They compare an update to the usual update, which the log tells; to what its learner counted
for before; and to the time since its base. A claim beyond a bound is clipped, and the commit records that. The usual
update follows from the newest commits alone, so any reader of the log can compute every weight and scale again
(`isthmus.inspect.replay`). Only the number of believed steps depends on a clock, and the commit records it.

With three or more learners, the usual value is the median of what each learner said last: fewer than half of the
learners cannot move it. One or two learners have no majority. Among them the smaller length is usual, and it changes by
a factor of no more than `FALLS` or `RISES` with each version. If one of two learners explodes, its update thus counts
for at most `Bounds.norm` times the length of the other's. The usual rate of tokens per step is the lower of the two.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isthmus.format.records.charter import Terms
from isthmus.format.records.objects import Input
from isthmus.format.rules import Bounds, Rules
from isthmus.reasons import Clip

LEAST = 1e-6
"""An update weighs at least this share of the median weight, or what it asks for if that is less."""

REMEMBERED = 16
"""Versions after which a learner's last update no longer contributes to the usual values."""

MAJORITY = 3
"""The number of learners from which on the median is a majority's value."""

FALLS, RISES = 0.95, 2.0
"""Factors by which the usual length of one or two learners may change with a version. It falls slowly, so that a far
too short update does not hold the other learner back at once. It rises fast, so that the learning rate can be warmed
up."""

YOUNG = 3
"""The versions of a fragment in which an update that is far too long shows no learner that explodes: it is cut like any
long update, and not rejected.

While learning rates are warmed up, a learner that has trained a few steps more than another one sends an update that is
many times as long (a hundred times, where others have trained one step), and the usual length still rises with each
version.
"""

FIRST_RMS = 0.05
"""Root mean square of an update that is always believed. While a fragment has no history, an update of one or two
learners is cut to the length of the fragment's parameters, or to this for each parameter if that is longer."""

FIRST_PERIODS = 64.0
"""Periods of work in a first round with whose root that length grows, at most."""

UNTIMED = 8.0
"""The most steps that are believed while no clock says how many there was time for, in medians of the others' steps."""


class Claim(NamedTuple):
    """What an update claims to be, and its measured length."""

    learner: str
    steps: int
    tokens: int
    norm: float
    """Euclidean length of the outer gradient."""
    elapsed_s: float = math.inf
    """Seconds since this syncer has known the update's base; infinity while unknown."""
    step_s: float = 0.0
    """The shortest step that is believed of any learner, in seconds; 0 while unknown."""
    believed: int = 0
    """Steps that are believed; 0 while not judged."""


@dataclass(frozen=True, slots=True)
class Believed:
    """What an update counts for."""

    weight: float
    """Effective weight, in tokens² per step."""
    scale: float = 1.0
    """Factor by which the update's length is multiplied."""
    clipped: tuple[Clip, ...] = ()
    refused: bool = False
    """Whether the update is rejected because it is far longer than usual."""
    steps: int = 0
    """Steps that are believed; 0: all that the update claims."""


class Already(NamedTuple):
    """What the updates of a round that were judged before one weigh, before factors [tokens² per step]."""

    learner: float = 0.0
    """Those of its learner."""
    member: float = 0.0
    """Those of its learner's member in the charter."""


NOTHING_YET = Already()


class WeightSoFar:
    """The weight of a round's updates so far, by learner and by member of the charter, before factors."""

    def __init__(self) -> None:
        self._of_learner: dict[str, float] = {}
        self._of_member: dict[str, float] = {}

    def of(self, learner: str, terms: Terms) -> Already:
        """Return the weight of a learner's updates, and of its member's."""
        return Already(self._of_learner.get(learner, 0.0), self._of_member.get(terms.member, 0.0))

    def add(self, given: Input, terms: Terms) -> None:
        """Count an update that was merged."""
        weight = unscaled(given)
        self._of_learner[given.learner] = self._of_learner.get(given.learner, 0.0) + weight
        self._of_member[terms.member] = self._of_member.get(terms.member, 0.0) + weight


class _Seen(NamedTuple):
    """What a learner's newest update claimed, whether it counted for that or not; of its steps, those believed."""

    version: int
    steps: int
    weight: float
    rate: float
    """Tokens per step."""
    length: float
    """Norm divided by the square root of the steps. Training is part drift and part noise, so neither the steps nor
    their root is an exact measure."""


class Influence:
    """What is usual in one fragment, and how far one update may differ from it.

    The usual values come from what each learner claimed last, not from what was believed. If all learners change, as
    after a change of the learning rate, the usual values change with them, and no learner is kept out for ever.
    """

    def __init__(self, bounds: Bounds, rules: Rules) -> None:
        self._bounds = bounds
        self._rules = rules
        self._seen: dict[str, _Seen] = {}
        self._counted: dict[str, float] = {}
        """Tokens per step that each learner counted for last. Of several updates of a learner in a commit the largest
        value is kept: a later update may have been cut only because the earlier ones used up the learner's weight."""
        self._version = 0
        self._length = 0.0

    @property
    def known(self) -> bool:
        """Whether any update was merged lately. If not, the usual values come from the updates of the round itself."""
        return bool(self._counted)

    @property
    def version(self) -> int:
        """The newest version noted."""
        return self._version

    @property
    def length(self) -> float:
        """The usual length [norm per root of a step] that the newest commit records; 0 while unknown."""
        return self._length

    def note(self, version: int, inputs: Iterable[Input], length: float) -> None:
        """Take in the inputs that a commit merged, and the usual length that it records."""
        self._version = version
        self._length = length
        counted: dict[str, float] = {}
        for given in inputs:
            steps = given.believed or max(1, given.steps)
            self._seen[given.learner] = _as_said(claim_of(given), version)
            counted[given.learner] = max(math.sqrt(unscaled(given) / steps), counted.get(given.learner, 0.0))
        self._counted |= counted
        self._seen = {who: seen for who, seen in self._seen.items() if version - seen.version < REMEMBERED}
        self._counted = {who: rate for who, rate in self._counted.items() if who in self._seen}

    def after(self, inputs: Iterable[Input]) -> float:
        """Return the usual length after the next commit has merged `inputs`."""
        seen = dict(self._seen)
        for given in inputs:
            seen[given.learner] = _as_said(claim_of(given), self._version + 1)
        return self._usual_length(self._recent(seen, self._version + 1))

    def longest(self, inputs: Iterable[Input]) -> float:
        """Return the greatest length of any learner's last update, `inputs` included [norm per root of a step]."""
        said = {given.learner: _as_said(claim_of(given), self._version + 1) for given in inputs}
        return max((found.length for found in [*self._seen.values(), *said.values()]), default=0.0)

    def learners(self, inputs: Iterable[Input]) -> set[str]:
        """Return the learners with an update that was merged lately, those of `inputs` included."""
        return {*self._seen, *(given.learner for given in inputs)}

    def usual_steps(self, besides: str) -> float:
        """Return the median steps of the updates of all learners but `besides`; 0 if there are none."""
        return statistics.median([found.steps for who, found in self._seen.items() if who != besides] or [0])

    def judge(
        self,
        claim: Claim,
        among: Sequence[Claim] = (),
        *,
        already: Already = NOTHING_YET,
        first: float = math.inf,
        terms: Terms | None = None,
    ) -> Believed:
        """Return what an update counts for, before the factor of its member in the charter.

        `among`: the updates of the round that were judged before this one, or all of them if nothing was merged lately.
        `already`: what the round's other updates weigh. Thus a learner with an update on each base that is not stale
        weighs no more than with one. `first`: the norm that is believed while the fragment has no history. `terms`:
        those of the learner's member in the charter; None: there is no charter.
        """
        b, clipped = self._bounds, list[Clip]()
        claim = self.timed(claim, among)
        steps = claim.believed
        if steps < claim.steps:
            clipped.append(Clip.STEPS)
        seen = self._with((*among, claim))
        _, usual_steps, usual_weights, usual_rates, _ = zip(*seen.values(), strict=True)
        rate = claim.tokens / claim.steps
        # Take the lower of two middle values: either of two learners could move their mean.
        usual_rate = statistics.median_low(usual_rates)
        # A learner that counted for little may return to the usual rate at once. Beyond it, its rate grows by `jump`.
        most = min(b.rate * usual_rate, max(usual_rate, b.jump * self._counted.get(claim.learner, math.inf)))
        if rate > most:
            rate = most
            clipped.append(Clip.TOKENS)
        asked = claim.tokens * (claim.tokens / claim.steps)
        weight = steps * rate * rate if clipped else asked
        weights = sorted(usual_weights)
        if weight > (room := max(0.0, b.weight * statistics.median(weights) - already.learner)):
            weight = room
            clipped.append(Clip.WEIGHT)
        if terms and terms.cap and weight > (room := max(0.0, terms.cap * statistics.median(weights) - already.member)):
            weight = room
            clipped.append(Clip.CHARTER)
        scale, refused = 1.0, False
        usually = self._usual_length(seen)
        if usually > 0.0:
            # Steps beyond the median allow no extra length, since a learner that claims to be 16 times as fast is
            # believed.
            length = claim.norm / math.sqrt(min(steps, max(1, statistics.median_low(usual_steps))))
            refused = self.version >= YOUNG and len(seen) >= MAJORITY and length > b.refused * usually
            if length > b.norm * usually:
                scale = b.norm * usually / length
                clipped.append(Clip.NORM)
                if len(seen) >= MAJORITY and weight > (most := statistics.median(weights)):
                    weight = most  # no honest update is both too long and too heavy
                    clipped += [Clip.WEIGHT] if Clip.WEIGHT not in clipped else []
            elif (short := claim.norm / math.sqrt(steps)) < usually / b.norm:
                # RDA gives each direction the mean length: an update of almost no length would count like any other.
                weight *= b.norm * short / usually
                clipped.append(Clip.SHORT)
        periods = 1.0 if self.known else self._rules.periods_of(c.believed or c.steps for c in among or [claim])
        first *= math.sqrt(min(periods, FIRST_PERIODS))
        if self._length <= 0.0 and len(seen) < MAJORITY and claim.norm * scale > first:
            scale = first / claim.norm
            if Clip.NORM not in clipped:
                clipped.append(Clip.NORM)
        if periods > 1.0:
            scale /= periods
            clipped.append(Clip.PERIODS)
        # A smaller weight would not change the mean, but sums are taken in units of the first weight of the round,
        # which must not be tiny. No update counts for more than it asks for, whatever the others claim.
        weight = max(weight, min(asked, LEAST * statistics.median_low(weights)))
        return Believed(weight, scale, tuple(clipped), refused, steps if steps < claim.steps else 0)

    def timed(self, claim: Claim, among: Sequence[Claim] = ()) -> Claim:
        """Return the claim with `believed` set to the steps that there was time for; further steps do not count."""
        if claim.believed:
            return claim
        most = claim.steps
        if claim.step_s > 0.0 and math.isfinite(claim.elapsed_s):
            most = int(1 + claim.elapsed_s / claim.step_s)
        elif others := self._with(other for other in among if other.learner != claim.learner):
            most = int(UNTIMED * statistics.median(found.steps for found in others.values()))
        return claim._replace(believed=min(claim.steps, max(1, most)))

    def _with(self, claims: Iterable[Claim]) -> dict[str, _Seen]:
        """Return what each learner claimed last, `claims` included."""
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


def unscaled(given: Input) -> float:
    """Return what a merged update weighed before the factor of its member [tokens² per step]."""
    return given.weight / given.factor


def claim_of(given: Input) -> Claim:
    """Return the claim of an update that a commit has merged."""
    steps = max(1, given.steps)
    return Claim(given.learner, steps, given.tokens, given.norm, believed=given.believed or steps)


def first_norm(length: float, parameters: int) -> float:
    """Return the greatest norm that is believed of one or two learners while a fragment has no history.

    It is the norm of the fragment's parameters, `length`, or that of `FIRST_RMS` for each parameter if that is greater.
    """
    return max(length, FIRST_RMS * math.sqrt(parameters))


def _as_said(claim: Claim, version: int) -> _Seen:
    rate, steps = claim.tokens / claim.steps, claim.believed or claim.steps
    return _Seen(version, steps, claim.tokens * rate, rate, claim.norm / math.sqrt(steps))
