"""A hostile learner, which misuses its own prefix and its own stream as far as permissions allow.

At first it takes part like a speaker, so it is known, and its updates are merged. It turns hostile during the vigil.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from isthmus.format.records import frame
from isthmus.format.records.fields import SECONDS_MAX
from isthmus.format.records.keys import update_key, updates_prefix
from isthmus.format.records.messages import learner_stream
from isthmus_lab.simulate.process import EPOCH_S
from simulation.scenario import Hostility

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.speakers import Speaker

NAME = "evil"

FLOOD_A_SECOND = 1200
FLOOD_EVERY_S = 0.05

SHOUT_BYTES = 200_000
SHOUTS_A_SECOND = 20


def is_its_own(key: str) -> bool:
    """Return whether only the hostile learner may write this key."""
    return key.startswith("updates/") and key.split("/")[2] == NAME


class Hostile:
    """The hostile learner of one world. `speaker`: its place in the choir."""

    def __init__(self, cluster: "Cluster", speaker: "Speaker") -> None:
        self._cluster = cluster
        self._speaker = speaker
        self._draw = random.Random(f"hostile/{cluster.scenario.seed}")
        self._acting = False

    def begin(self) -> None:
        """Be hostile from here on."""
        self._acting = True
        match self._cluster.scenario.hostile:
            case Hostility.OVERWRITES:
                self._overwrite()
            case Hostility.FLOODS:
                self._flood()
            case Hostility.FORGES:
                # In half of the seeds it is expected and never answers. Else it opens and closes every round it can.
                self._speaker.answers = self._draw.random() < 0.5
                self._speaker.claims_s = self._draw.choice((SECONDS_MAX, 1e-9))
                self._forge()
            case _:
                self._shout()

    def end(self) -> None:
        """Stop being hostile."""
        self._acting = False

    def _overwrite(self) -> None:
        """Spoil a third of its stored updates, merged or not, every half second."""
        if not self._acting:
            return
        objects = self._cluster.world.objects
        own = [key for key in objects.blobs if is_its_own(key)]
        for key in self._draw.sample(own, k=-(-len(own) // 3)):
            if self._draw.random() < 0.5:
                objects.delete(key)
            else:
                objects.put(key, self._draw.randbytes(400), self._wall())
        self._later(0.5, self._overwrite)

    def _flood(self) -> None:
        """Announce updates that do not exist, mostly on bases far or just ahead of the log, some on the newest."""
        if not self._acting:
            return
        run, world = self._cluster.run, self._cluster.world
        heads = self._cluster.checker.heads()
        bodies = []
        for _ in range(round(FLOOD_A_SECOND * FLOOD_EVERY_S)):
            p = self._draw.randrange(len(heads))
            base = heads[p] + self._draw.choice((50, 50, 50, 3, 1, 2, 1, 2, 0, 0))
            digest = self._draw.randbytes(32)
            size = 4 * run.layout.fragments[p].size + 256
            key = update_key(p, NAME, base, digest)
            bodies.append(self._cluster.choir.announcement(self._speaker, p, base, key, digest, size, 1, 1, False))
        for body in bodies:
            world.streams.append(learner_stream(NAME), body)
        self._later(FLOOD_EVERY_S, self._flood)

    def _forge(self) -> None:
        """Announce a due update on each newest version at once, with the greatest weight and ages that a message can
        hold."""
        if not self._acting:
            return
        choir = self._cluster.choir
        for p, head in self._cluster.checker.heads().items():
            if not self._speaker.answers or self._speaker.answered.get(p, -1) >= head:
                continue
            self._speaker.answered[p] = head
            blob = choir.update(self._speaker, p, head, 1 << 53, 1)
            digest = frame.digest(blob)
            key = update_key(p, NAME, head, digest)
            self._cluster.world.objects.put(key, blob, self._wall())
            said = choir.announcement(
                self._speaker, p, head, key, digest, len(blob), 1 << 53, 1, True,
                age_s=self._draw.choice((0.0, 9e8)), upload_s=SECONDS_MAX, sync_s=self._draw.choice((0.01, SECONDS_MAX)),
            )  # fmt: skip
            self._cluster.world.streams.append(learner_stream(NAME), said)
        self._later(0.1, self._forge)

    def _shout(self) -> None:
        """Append bytes that cannot be a message, again and again."""
        if not self._acting:
            return
        garbage = bytes(SHOUT_BYTES)
        long = self._cluster.choir.announcement(
            self._speaker, 0, 0, updates_prefix(0, NAME) + "x" * 400, bytes(32), 1, 1, 1, True
        )
        for body in (garbage, long, long + garbage):
            self._cluster.world.streams.append(learner_stream(NAME), body)
        self._later(3.0 / SHOUTS_A_SECOND, self._shout)

    def _wall(self) -> float:
        return EPOCH_S + self._cluster.world.clock.time()

    def _later(self, seconds: float, fn: Callable[[], None]) -> None:
        self._cluster.world.clock.call_later(seconds, fn, context=self._cluster.world.clock.world.context)
