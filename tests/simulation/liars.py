"""Members that lie: a learner whose updates explode, or a syncer that commits what is not the result of a round.

The learner may be in every round, but its updates may count only as far as the run's bounds allow. This module judges
that from outside, by what other learners sent and by the clock. A lie that processes can detect stops its fragment at
that version, and nothing else. A lie about what an update counts for is accepted, and replay names its version.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.codecs import pack
from isthmus.format.records import frame
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import commit_key, update_key
from isthmus.format.records.messages import SYNCER_STREAM, Committed, encode, learner_stream
from isthmus.format.records.objects import CommitHeader, Input
from isthmus.format.rules import BOUNDS
from isthmus.log import Commit
from isthmus.log.updates import Update
from isthmus.reasons import Clip
from isthmus.rounds.bounds import MAJORITY, REMEMBERED, Believed
from isthmus.syncer import Syncer
from isthmus_lab.simulate.process import EPOCH_S
from simulation.hostile import NAME
from simulation.scenario import STRANGER, Hostility
from support.lies import REFUSED

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.speakers import Speaker

GROWS, LONGEST = 6.0, 1e8
"""The factor by which each update of a learner that explodes is longer than the one before, and its final value."""

CLAIMS = (1, 40, 1 << 20, 1 << 40)
"""The numbers of steps that this learner claims."""

STEADY = 1.5
"""The step times that learners state are at least the shortest true step time divided by this."""

EXACT = 1.0 + 1e-5

LIGHT = 1e-3
"""The factor on weight or length that a lying syncer gives an input."""


class Liar:
    """The liar of one world, during the vigil. `speaker`: its place in the choir, if it is a learner."""

    def __init__(self, cluster: "Cluster", speaker: "Speaker") -> None:
        self._cluster = cluster
        self._speaker = speaker
        self._draw = random.Random(f"liar/{cluster.scenario.seed}")
        self._acting = False
        self._longer = 1.0
        self._honest: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """Lie from here on."""
        self._acting = True
        match self._cluster.scenario.hostile:
            case Hostility.EXPLODES:
                self._speaker.answers = False
                self._cluster.checker.most.exploding = True
                self._explode()
            case Hostility.COMMITS:
                self._commit()
            case _:
                self._misjudge()

    def end(self) -> None:
        """Stop lying."""
        self._acting = False
        if self._honest is not None:
            usually, judge = self._honest
            usually.judge = judge

    def _explode(self) -> None:
        """Send an update on each newest version: each is longer than the last, and most claim many steps."""
        if not self._acting:
            return
        choir, world, run = self._cluster.choir, self._cluster.world, self._cluster.run
        for p, head in self._cluster.checker.heads().items():
            if self._speaker.answered.get(p, -1) >= head:
                continue
            self._speaker.answered[p] = head
            self._longer = min(GROWS * self._longer, LONGEST)
            fragment = run.layout.fragments[p]
            values = np.array([self._draw.gauss(0.0, 0.05) for _ in range(fragment.size)], np.float32)
            payload = pack(choir.codec, fragment, values * np.float32(self._longer)).tobytes()
            steps = self._draw.choice(CLAIMS)
            tokens = steps * self._draw.choice((1, 100, 4000))
            blob = choir.update(self._speaker, p, head, tokens, steps, payload)
            digest = frame.digest(blob)
            key = update_key(p, NAME, head, digest)
            world.objects.put(key, blob, EPOCH_S + world.clock.time())
            said = choir.announcement(self._speaker, p, head, key, digest, len(blob), tokens, steps, True)
            world.streams.append(learner_stream(NAME), said)
        world.clock.call_later(0.1, self._explode, context=world.clock.world.context)

    def _commit(self) -> None:
        """Take a fragment's next commit key with a lie, as soon as there is a commit to derive it from."""
        cluster = self._cluster
        fit = [p for p, c in enumerate(cluster.checker.commits) if c and c[-1][0].healed is None]
        if fit:
            p = self._draw.choice(fit)
            header, digest = cluster.checker.commits[p][-1]
            name = self._draw.choice(list(REFUSED))
            lying = REFUSED[name][0](Commit(header, digest))
            key = commit_key(p, lying.version)
            cluster.checker.lies[p] = lying.version
            cluster.say("liar", f"takes {key}: {name}")
            cluster.world.objects.put(key, bytes(frame.draft(Kind.COMMIT, lying).blob), cluster.world.clock.time())
            if self._draw.random() < 0.5:
                word = Committed(run=cluster.run.digest, id="lie", syncer=STRANGER, fragment=p, version=lying.version)
                cluster.world.streams.append(SYNCER_STREAM, encode(word), cluster.world.clock.time())
        elif self._acting:
            cluster.world.clock.call_later(0.5, self._commit, context=cluster.world.clock.world.context)

    def _misjudge(self) -> None:
        """Make one coordinator claim that updates were clipped that were not."""
        cluster = self._cluster
        coordinators = [
            (seat.name, coordinator)
            for seat in cluster.seats
            for agent in seat.agents
            if isinstance(agent, Syncer)
            for coordinator in agent.coordinators
            if coordinator.rounds.holding
        ]
        if not coordinators:
            return
        name, coordinator = self._draw.choice(coordinators)
        usually, honest, p = coordinator._sum.usual, coordinator._sum.usual.judge, coordinator.fragment.index
        short = self._draw.random() < 0.5

        def judge(*a: Any, **k: Any) -> Believed:
            found = honest(*a, **k)
            cluster.checker.misjudges = name, p
            if short:
                return replace(found, scale=LIGHT, clipped=(Clip.NORM,))
            return replace(found, weight=LIGHT * found.weight, clipped=(Clip.WEIGHT,))

        usually.judge = judge  # type: ignore[method-assign]
        self._honest = usually, honest
        cluster.say(name, f"lies of what updates of fragment {p} count for")


def is_a_lie(given: Input) -> bool:
    """Return whether an input is as a lying syncer records it. An honest syncer may have recorded the same."""
    return given.scale == LIGHT or given.clipped == (Clip.WEIGHT,)


def _norm(update: Update) -> float:
    return float(np.linalg.norm(update.gradient.decode().astype(np.float64)))


@dataclass
class Most:
    """How far the updates of a learner that explodes may reach, by the merged updates of others and by the clock."""

    step_s: float
    """The shortest step time of any learner."""
    exploding: bool = False
    longest: dict[int, float] = field(default_factory=dict)
    """By fragment, the most of honest updates: norm per root of a step."""
    heaviest: dict[int, float] = field(default_factory=dict)
    """By fragment, the most of honest updates: tokens² per step."""
    fastest: dict[int, float] = field(default_factory=dict)
    """By fragment, the most of honest updates: tokens per step."""
    lately: dict[tuple[int, str], int] = field(default_factory=dict)
    """By fragment and learner, the newest version that merged an update of the learner."""
    at: dict[tuple[int, int], float] = field(default_factory=dict)
    """By fragment and version, the time of the commit."""

    def judge(self, header: CommitHeader, updates: Sequence[tuple[Input, Update]], now: float) -> list[str]:
        """Note a commit; return which of its inputs reach too far."""
        p, wrong = header.fragment, list[str]()
        for given, update in updates:
            norm = _norm(update)
            if given.learner != NAME or not self.exploding:
                steps, tokens = update.header.steps, update.header.tokens
                # Fewer steps may be believed of an honest update, too. Its length per root of a step is then greater.
                self.longest[p] = max(norm / (given.believed or steps) ** 0.5, self.longest.get(p, 0.0))
                self.heaviest[p] = max(tokens * (tokens / steps), self.heaviest.get(p, 0.0))
                self.fastest[p] = max(tokens / steps, self.fastest.get(p, 0.0))
        for given, update in updates:
            if given.learner != NAME or not self.exploding:
                continue
            norm = _norm(update)
            steps = given.believed or given.steps
            elapsed_s = now - self.at.get((p, given.base), 0.0)
            if steps > 1 + elapsed_s * BOUNDS.slow * STEADY / self.step_s:
                wrong.append(f"{steps} steps of {NAME} are believed, and {elapsed_s:.1f} s have passed")
            others = self._others(p, header.version)
            if not others:
                continue  # a learner alone is bounded only by its own history
            if given.scale * norm > EXACT * BOUNDS.norm * self.longest.get(p, 0.0) * steps**0.5:
                wrong.append(f"an update of {NAME} of length {norm:g} counts for {given.scale:g} of it")
            # Two learners have no majority, so the measure is the other learner's tokens per step.
            most = steps * (BOUNDS.rate * self.fastest.get(p, 0.0)) ** 2
            if len(others) >= MAJORITY - 1:
                most = min(most, BOUNDS.weight * self.heaviest.get(p, 0.0))
            if given.weight > EXACT * most:
                wrong.append(f"{NAME} weighs {given.weight:g}, and by what others say {most:g} at most")
        self.at[p, header.version] = now
        for given, _ in updates:
            self.lately[p, given.learner] = header.version
        return wrong

    def _others(self, p: int, version: int) -> set[str]:
        """Return the other learners whose updates determine the usual values when a version is merged."""
        return {who for (q, who), v in self.lately.items() if q == p and who != NAME and version - v < REMEMBERED}
