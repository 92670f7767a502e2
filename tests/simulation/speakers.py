"""Learners without an agent: they answer calls with real stored updates, repeat unsettled ones, and cost little.

A syncer cannot tell them from other learners. One speaker of each choir answers no round: it only sends heartbeats, as
in a long evaluation.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from isthmus.codecs import codec, pack
from isthmus.format.records import frame
from isthmus.format.records.keys import update_key
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    Announce,
    AnyMessage,
    Call,
    Heartbeat,
    Leave,
    Tally,
    decode,
    encode,
    learner_stream,
)
from isthmus.format.records.objects import SCHEMA, UpdateHeader
from isthmus_lab.simulate.process import EPOCH_S
from simulation import hostile, liars
from simulation.scenario import LIARS

if TYPE_CHECKING:
    from simulation.cluster import Cluster

NOTHING = Tally(processed=0.0, merged=0.0, overwritten=0.0, late=0.0, pending=0.0, rejected=0.0, lost=0.0)


class Common(TypedDict):
    """The fields of every message."""

    run: bytes
    id: str


@dataclass
class Speaker:
    """One learner without an agent."""

    name: str
    step_s: float
    answers: bool
    claims_s: float | None = None
    """The step time that it states, if that is not the true one."""
    unsettled: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """By fragment: base and announcement of an update that no commit has settled."""
    answered: dict[int, int] = field(default_factory=dict)
    """By fragment: the newest base of an update."""


class Choir:
    """All speakers of one world."""

    def __init__(self, cluster: "Cluster", count: int) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._run = cluster.run
        self._draw = random.Random(f"speakers/{cluster.scenario.seed}")
        self.codec = codec(self._run.rules.codec_up)
        self._ids = 0
        self._over = False
        d = self._draw
        paces = cluster.scenario.step_s
        self.speakers = [
            Speaker(f"x{i:02d}", d.choice(paces) * d.uniform(0.8, 1.2), answers=i > 0) for i in range(count)
        ]
        if cluster.scenario.hostile is not None:
            self.speakers.append(Speaker(hostile.NAME, min(paces), answers=True))
            acts = liars.Liar if cluster.scenario.hostile in LIARS else hostile.Hostile
            self.hostile = acts(cluster, self.speakers[-1])
        self._payloads = {s.name: self._gradients(d.uniform(0.001, 0.05)) for s in self.speakers}
        self._world.streams.appended.append(self._hear)
        self._world.objects.written.append(self._written)
        for speaker in self.speakers:
            self._later(d.uniform(0.0, 1.0), self._beat, speaker)
            self._schedule(speaker)

    def leave(self) -> None:
        """Announce that all speakers leave."""
        self._over = True
        for s in self.speakers:
            self._say(s, Leave(**self._common(s), learner=s.name, incarnation=1, step=1, done=False))

    # --- what they do -------------------------------------------------------------------------------------------------

    def _beat(self, s: Speaker) -> None:
        if self._over:
            return
        heads = tuple(self._cluster.checker.heads().values())
        self._say(
            s,
            Heartbeat(
                **self._common(s),
                learner=s.name,
                incarnation=1,
                step=1,
                steps_target=0,
                tokens_seen=1,
                loss=None,
                step_s=s.claims_s or s.step_s,
                upload_s=0.01,
                sync_s=0.01,
                versions=heads,
                bytes_up=0,
                bytes_down=0,
                tokens_lost=0,
                ledger=NOTHING,
                waiting_for="",
            ),
        )
        for _, said in s.unsettled.values():
            self._world.streams.append(learner_stream(s.name), said)
        self._later(self._run.pace.heartbeat_s * self._draw.uniform(0.8, 1.0), self._beat, s)

    def _hear(self, stream: str, body: bytes) -> None:
        if stream != SYNCER_STREAM or self._over:
            return
        (message,) = decode(body)
        if isinstance(message, Call) and message.version == len(self._cluster.checker.commits[message.fragment]) + 1:
            for s in self.speakers:
                if s.answers and s.answered.get(message.fragment, -1) < message.version - 1:
                    s.answered[message.fragment] = message.version - 1
                    wait = self._draw.uniform(0.0, 0.5 * s.step_s)
                    self._later(wait, self._send, s, message.fragment, message.version - 1, False)

    def _written(self, key: str, data: bytes, before: bytes | None) -> None:
        if not key.startswith("commits/") or before is not None:
            return
        p = int(key.split("/")[1])
        head = len(self._cluster.checker.commits[p])
        for s in self.speakers:
            if p in s.unsettled and s.unsettled[p][0] < head - self._run.pace.staleness:
                del s.unsettled[p]
        for given in self._cluster.checker.commits[p][-1][0].inputs if head else ():
            for s in self.speakers:
                if given.learner == s.name and p in s.unsettled and s.unsettled[p][0] <= given.base:
                    del s.unsettled[p]

    def _schedule(self, s: Speaker) -> None:
        """Send every fragment that no syncer has asked for within H steps."""
        if self._over:
            return
        if s.answers:
            for p, head in self._cluster.checker.heads().items():
                if s.answered.get(p, -1) < head:
                    s.answered[p] = head
                    self._send(s, p, head, True)
        self._later(self._run.rules.sync_every * s.step_s * self._draw.uniform(0.9, 1.1), self._schedule, s)

    def _send(self, s: Speaker, p: int, base: int, due: bool) -> None:
        if self._over or base < len(self._cluster.checker.commits[p]) - self._run.pace.staleness:
            return
        tokens, steps = self._draw.randrange(1, 400), self._draw.randrange(1, 7)
        blob = self.update(s, p, base, tokens, steps)
        digest = frame.digest(blob)
        key = update_key(p, s.name, base, digest)
        self._world.objects.put(key, blob, EPOCH_S + self._world.clock.time())
        said = self.announcement(s, p, base, key, digest, len(blob), tokens, steps, due)
        s.unsettled[p] = base, said
        self._world.streams.append(learner_stream(s.name), said)

    # --- what they say ------------------------------------------------------------------------------------------------

    def update(self, s: Speaker, p: int, base: int, tokens: int, steps: int, payload: bytes = b"") -> bytes:
        """Return an update object of a speaker, with its usual payload if none is given."""
        payload = payload or self._payloads[s.name][p]
        header = UpdateHeader(
            schema=SCHEMA, run=self._run.digest, fragment=p, learner=s.name, incarnation=1, base=base,
            codec=self.codec.name, steps=steps, tokens=tokens, step=steps, tokens_seen=tokens, train_s=1.0,
        )  # fmt: skip
        out = frame.draft(frame.Kind.UPDATE, header, len(payload))
        out.payload[:] = payload
        return bytes(out.blob)

    def announcement(
        self, s: Speaker, p: int, base: int, key: str, digest: bytes, size: int, tokens: int, steps: int, due: bool,
        *, age_s: float = 0.0, upload_s: float = 0.01, sync_s: float = 0.01,
    ) -> bytes:  # fmt: skip
        """Return the message that announces an update; durations may be forged."""
        return encode(
            Announce(
                **self._common(s), learner=s.name, incarnation=1, fragment=p, base=base, key=key, digest=digest,
                size=size, steps=steps, tokens=tokens, step=steps, tokens_seen=tokens, due=due,
                age_s=age_s, step_s=s.claims_s or s.step_s, upload_s=upload_s, sync_s=sync_s,
            )
        )  # fmt: skip

    def _gradients(self, length: float) -> list[bytes]:
        found = []
        for fragment in self._run.layout.fragments:
            values = np.array([self._draw.gauss(0.0, length) for _ in range(fragment.size)], np.float32)
            found.append(pack(self.codec, fragment, values).tobytes())
        return found

    def _common(self, s: Speaker) -> Common:
        self._ids += 1
        return {"run": self._run.digest, "id": f"{s.name}-{self._ids}"}

    def _say(self, s: Speaker, message: AnyMessage) -> None:
        self._world.streams.append(learner_stream(s.name), encode(message))

    def _later(self, seconds: float, fn: Callable[..., None], *args: object) -> None:
        self._world.clock.call_later(seconds, fn, *args, context=self._world.clock.world.context)
