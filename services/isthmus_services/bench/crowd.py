"""Learners without a model: they store and announce real updates when told to, and a syncer cannot tell them apart."""

import asyncio
from collections.abc import Sequence

import numpy as np

from isthmus.codecs import codec, pack
from isthmus.ports import Ports
from isthmus.records import frame
from isthmus.records.keys import update_key
from isthmus.records.messages import (
    SYNCER_STREAM,
    Announce,
    Committed,
    Heartbeat,
    Tally,
    decode,
    encode,
    learner_stream,
)
from isthmus.records.objects import SCHEMA, UpdateHeader

NOTHING = Tally(processed=0.0, merged=0.0, overwritten=0.0, late=0.0, pending=0.0, rejected=0.0, lost=0.0)
STEP_S = 0.1
WAIT_S = 60.0


class Crowd:
    """So many learners of one run."""

    def __init__(self, ports: Ports, count: int) -> None:
        self.ports = ports
        self.run = ports.log.run
        self.names = [f"l{i:03d}" for i in range(count)]
        self.heads = [0] * len(self.run.layout.fragments)
        self._ids = 0
        self._news = asyncio.Event()
        draw = np.random.default_rng(0)
        code = codec(self.run.rules.codec_up)
        self._payloads = [
            pack(code, f, (0.01 * draw.standard_normal(f.size)).astype(np.float32)) for f in self.run.layout.fragments
        ]

    def _id(self) -> str:
        self._ids += 1
        return f"bench-{self._ids}"

    async def beat(self) -> None:
        """Say that all of them are there, now and then, until cancelled."""
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
        """Hear of versions, until cancelled."""
        at = await self.ports.bus.tail(SYNCER_STREAM)
        while True:
            for said in (await self.ports.bus.read({SYNCER_STREAM: at}, 1.0)).get(SYNCER_STREAM, ()):
                at = said.position
                message = decode(said.body) if said.body else None
                if isinstance(message, Committed):
                    self.heads[message.fragment] = max(self.heads[message.fragment], message.version)
                    self._news.set()

    async def store(self, name: str, fragment: int) -> bytes:
        """Store an update on the newest version; return its announcement."""
        base = self.heads[fragment]
        header = UpdateHeader(
            schema=SCHEMA, run=self.run.digest, fragment=fragment, learner=name, incarnation=1, base=base,
            codec=self.run.rules.codec_up, steps=1, tokens=1, step=base + 1, tokens_seen=base + 1, train_s=1.0,
        )  # fmt: skip
        blob = frame.written(frame.Kind.UPDATE, header, self._payloads[fragment])
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
        """Say that an update is stored."""
        await self.ports.bus.append(learner_stream(name), said)

    async def until(self, wanted: Sequence[int]) -> None:
        """Wait until every fragment is at its version. Raises `TimeoutError`."""
        async with asyncio.timeout(WAIT_S):
            while any(head < version for head, version in zip(self.heads, wanted, strict=True)):
                self._news.clear()
                await self._news.wait()
