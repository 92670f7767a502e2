"""Learners without a model, which a syncer cannot tell from real ones.

They store and announce real updates when they are told to.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from isthmus.agent.ports import Ports
from isthmus.codecs import codec, pack
from isthmus.codecs.kernels import U8
from isthmus.format.records import frame
from isthmus.format.records.keys import update_key
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    Alive,
    Announce,
    Call,
    Committed,
    Heartbeat,
    Pass,
    Tally,
    decode,
    encode,
    learner_stream,
)
from isthmus.format.records.objects import SCHEMA, UpdateHeader

NOTHING = Tally(processed=0.0, merged=0.0, overwritten=0.0, late=0.0, pending=0.0, rejected=0.0, lost=0.0)
STEP_S = 0.1
WAIT_S = 60.0


class Crowd:
    """`count` learners of one run."""

    def __init__(self, ports: Ports, count: int) -> None:
        self.ports = ports
        self.run = ports.log.run
        self.names = [f"l{i:03d}" for i in range(count)]
        self.heads = [0] * len(self.run.layout.fragments)
        self.writers: dict[int, str] = {}
        """Name of the syncer that made the newest version of each fragment."""
        self.lags_ms: list[float] = []
        """Longest delays [ms] of syncers' event loops, each between two of their `Alive` messages."""
        self._ids = 0
        self._news = asyncio.Condition()
        draw = np.random.default_rng(0)
        code = codec(self.run.rules.codec_up)
        self._payloads = [
            pack(code, f, (0.01 * draw.standard_normal(f.size)).astype(np.float32)) for f in self.run.layout.fragments
        ]

    def _id(self) -> str:
        self._ids += 1
        return f"bench-{self._ids}"

    async def beat(self) -> None:
        """Publish a heartbeat of every learner twice per heartbeat interval, until cancelled."""
        while True:
            for name in self.names:
                await self.ports.bus.append(
                    learner_stream(name),
                    encode(
                        Heartbeat(
                            run=self.run.digest,
                            id=self._id(),
                            learner=name,
                            incarnation=1,
                            step=1,
                            steps_target=0,
                            tokens_seen=1,
                            loss=None,
                            step_s=STEP_S,
                            upload_s=0.01,
                            sync_s=0.01,
                            versions=tuple(self.heads),
                            bytes_up=0,
                            bytes_down=0,
                            tokens_lost=0,
                            ledger=NOTHING,
                            waiting_for="",
                        )
                    ),
                )
            await asyncio.sleep(0.5 * self.run.pace.heartbeat_s)

    async def listen(self) -> None:
        """Note the versions and delays that syncers announce, and answer calls for newer updates, until cancelled."""
        at = await self.ports.bus.tail(SYNCER_STREAM)
        while True:
            for said in (await self.ports.bus.read({SYNCER_STREAM: at}, 1.0)).get(SYNCER_STREAM, ()):
                at = said.position
                for message in decode(said.body) if said.body else ():
                    if isinstance(message, Committed) and message.version > self.heads[message.fragment]:
                        self.writers[message.fragment] = message.syncer
                        await self._learn({message.fragment: message.version})
                    elif isinstance(message, Call) and message.afresh:
                        await self._pass(message.fragment, message.version)
                    elif isinstance(message, Alive):
                        self.lags_ms.append(message.lag_ms)
                        # A syncer that was killed may have stored a version without announcing it.
                        await self._learn(dict(enumerate(message.heads)))

    async def _pass(self, fragment: int, version: int) -> None:
        """Say for every learner that it has nothing newer: else the round of a slow syncer waits for newer updates."""
        for name in self.names:
            said = Pass(run=self.run.digest, id=self._id(), learner=name, fragment=fragment, version=version)
            await self.announce(name, encode(said))

    async def _learn(self, versions: dict[int, int]) -> None:
        for fragment, version in versions.items():
            self.heads[fragment] = max(self.heads[fragment], version)
        async with self._news:
            self._news.notify_all()

    async def train(self, fragment: int, pause_s: float) -> None:
        """Answer each version of a fragment with an update of every learner, `pause_s` later, until cancelled."""
        while True:
            wanted = [head + 1 if p == fragment else 0 for p, head in enumerate(self.heads)]
            for name in self.names:
                await self.announce(name, await self.store(name, fragment))
            await self.until(wanted)
            await asyncio.sleep(pause_s)

    async def store(self, name: str, fragment: int, payload: U8 | None = None) -> bytes:
        """Store an update on the newest version; return its encoded announcement.

        Without a `payload`, the update has the payload that all learners share.
        """
        base = self.heads[fragment]
        header = UpdateHeader(
            schema=SCHEMA, run=self.run.digest, fragment=fragment, learner=name, incarnation=1, base=base,
            codec=self.run.rules.codec_up, steps=1, tokens=1, step=base + 1, tokens_seen=base + 1, train_s=1.0,
        )  # fmt: skip
        blob = frame.written(frame.Kind.UPDATE, header, self._payloads[fragment] if payload is None else payload)
        digest = frame.digest(blob)
        key = update_key(fragment, name, base, digest)
        await self.ports.store.create(key, blob)
        return encode(
            Announce(
                run=self.run.digest,
                id=self._id(),
                learner=name,
                incarnation=1,
                fragment=fragment,
                base=base,
                key=key,
                digest=digest,
                size=len(blob),
                steps=1,
                tokens=1,
                step=base + 1,
                tokens_seen=base + 1,
                due=True,
                age_s=0.0,
                step_s=STEP_S,
                upload_s=0.01,
                sync_s=0.01,
            )
        )

    async def announce(self, name: str, said: bytes) -> None:
        """Publish an encoded announcement."""
        self.ports.bus.hurry()
        await self.ports.bus.append(learner_stream(name), said)

    async def until(self, wanted: Sequence[int]) -> None:
        """Wait until every fragment has reached its version in `wanted`. Raises `TimeoutError`."""
        await self.changed(lambda: all(head >= version for head, version in zip(self.heads, wanted, strict=True)))

    async def changed(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true, checking it after each announced version. Raises `TimeoutError`."""
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(condition)
