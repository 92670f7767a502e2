"""The sum of one round: each update is compared to what is usual, and is added with the weight that is believed."""

import logging
import math
from collections.abc import Callable, Sequence

import msgspec

from isthmus.codecs.base import PIECE
from isthmus.codecs.kernels import norm
from isthmus.codecs.packed import Packed
from isthmus.format.layout import Fragment
from isthmus.format.records.charter import Terms
from isthmus.format.records.objects import CommitHeader, Input
from isthmus.format.rules import Rules
from isthmus.log.merge import Accumulator, State, outers
from isthmus.rounds.bounds import YOUNG, Believed, Claim, Influence, WeightSoFar, first_norm
from isthmus.runtime.clock import Runtime, SmallWork

logger = logging.getLogger(__name__)

EXPLODES = 0.1
"""An update that is cut to less than this share of its length is logged as a warning."""


class RoundSum:
    """The sum of one fragment's round, and the judgement of its updates."""

    def __init__(
        self,
        fragment: Fragment,
        rules: Rules,
        usual: Influence,
        runtime: Runtime,
        state: Callable[[], State],
        terms: Callable[[str], Terms],
    ) -> None:
        """`usual`: what is known of usual updates. `state` returns the fragment's newest state, `terms` those of a
        learner in the charter by which the round is judged."""
        self._fragment = fragment
        self._rules = rules
        self._runtime = runtime
        self._compute = SmallWork(runtime, small=fragment.size <= PIECE)
        self._state = state
        self._terms = terms
        self.usual = usual
        self.total: Accumulator | None = None
        self.inputs: list[Input] = []
        """The updates in the sum, with their effective weights."""
        self._so_far = WeightSoFar()
        self._unjudged: list[tuple[Packed, Input, Claim]] = []
        """The updates that came while nothing was known of what is usual. They stay packed until the round closes."""
        self._claims: list[Claim] = []
        """The claims of the round's updates, rejected ones included."""
        self._merged: set[str] = set()
        """The learners that an earlier round has merged. A learner's first update may be far longer than usual."""

    def clear(self) -> None:
        """Clear the sum for a new round."""
        self.total, self.inputs, self._unjudged, self._claims = None, [], [], []
        self._so_far = WeightSoFar()

    def note(self, commit: CommitHeader) -> None:
        """Learn from a commit what updates are usual, and which learners were merged."""
        self._merged.update(given.learner for given in commit.inputs)
        self.usual.note(commit.version, commit.inputs, commit.usual_length)

    @property
    def usual_length(self) -> float:
        """The usual length of updates after this round is merged [norm per root of a step]."""
        return self.usual.after(self.inputs)

    async def offer(self, gradient: Packed, given: Input, claim: Claim) -> bool:
        """Judge an update and add it to the sum; return False if it is far longer than usual and thus rejected.

        While nothing is known of what is usual, as in a run's first round, `settle` judges all updates of the round
        together, so that their order does not matter.
        """
        if not self.usual.known:
            self._unjudged.append((gradient, given, claim))
            return True
        claim = self.usual.timed(claim, self._claims)
        believed = self._judge(claim, self._claims)
        self._claims.append(claim)
        p = self._fragment.index
        if believed.refused:
            logger.warning(
                "fragment %d: %s of %s is %g long, far beyond what is usual",
                p, given.key, given.learner, claim.norm, extra={"fragment": p},
            )  # fmt: skip
            return False
        if believed.scale < EXPLODES and given.learner in self._merged:
            young = self.usual.version < YOUNG
            logger.log(
                logging.INFO if young else logging.WARNING,
                "fragment %d: %s is cut to %.2g of its length: %s", p, given.key, believed.scale,
                "it is compared with the run's first updates, which are short" if young
                else f"if that happens again and again, {given.learner} explodes",
                extra={"fragment": p},
            )  # fmt: skip
        await self._take(gradient, given, believed)
        return True

    async def settle(self) -> None:
        """Judge and add the updates that came while nothing was known of what is usual. To be called before the
        merge."""
        waiting, self._unjudged = self._unjudged, []
        among = [claim for _, _, claim in waiting]
        among = [self.usual.timed(claim, among) for claim in among]
        for (gradient, given, _), claim in zip(waiting, among, strict=True):
            await self._take(gradient, given, self._judge(claim, among))
        if self.total is not None:
            self.total.outer = outers(self._rules, self.inputs)

    def furthest(self) -> Input:
        """Return the update with the greatest weight · length: a sum that overflows may not overflow without it."""
        return max(self.inputs, key=lambda given: given.weight * (given.scale * given.norm))

    def _judge(self, claim: Claim, among: Sequence[Claim]) -> Believed:
        terms = self._terms(claim.learner)
        already, first = self._so_far.of(claim.learner, terms), math.inf
        if not self.usual.length:
            first = first_norm(norm(self._state().published), self._fragment.size)
        return self.usual.judge(claim, among, already=already, first=first, terms=terms)

    async def _take(self, gradient: Packed, given: Input, believed: Believed) -> None:
        terms = self._terms(given.learner)
        weight = believed.weight * terms.factor
        self.total = await self._compute(self._add, gradient, weight, believed.scale, given.learner)
        taken = msgspec.structs.replace(
            given,
            weight=weight,
            factor=terms.factor,
            scale=believed.scale,
            clipped=tuple(reason.value for reason in believed.clipped),
            believed=believed.steps,
        )
        self.inputs.append(taken)
        self._so_far.add(taken, terms)

    def _add(self, gradient: Packed, weight: float, scale: float, learner: str) -> Accumulator:
        """Return the sum with one more update; the first update creates it. Not for the event loop: it takes long."""
        total = self.total or Accumulator(self._fragment, outers(self._rules), self._runtime.compute)
        total.add(gradient, weight, scale, learner=learner)
        return total
