"""What a learner's log says is the matter when syncers are away, and when the learner was expelled."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest

from isthmus.bus import IN_STORE, open_bus
from isthmus.errors import Unavailable
from isthmus.format.rules import Pace, Rules
from isthmus.reasons import REMEDIES, Reason
from isthmus.store import Patience, Store
from isthmus.store.layer import Layer, Send
from support.signed import EU, EVERYBODY, EVIL, SYNC, L, admit
from support.signed import seed as signed
from support.world import World, in_virtual_time, seed_of, serving, train, until, world

T = TypeVar("T")

PACE = Pace(heartbeat_s=0.5, silence_s=2.0)
AWAY_S = 42.0


@in_virtual_time
async def test_no_rejection_is_blamed_while_all_syncers_are_away(caplog: pytest.LogCaptureFixture) -> None:
    """The last commit that the learner heard of rejected one of its updates, as happens to a slow learner."""
    caplog.set_level(logging.WARNING)
    async with world(Path(), seed_of(Rules(fragments=1, sync_every=4), PACE)) as w:
        learner, back = w.learner("us-1"), asyncio.Event()
        task = asyncio.ensure_future(train(learner, 8, step_s=0.25, enough=back.is_set))
        async with serving(w.syncer("s1"), killed=True) as syncer:
            await until(lambda: syncer.coordinators[0].head >= 3, "it is merged")
        learner.uplink.unmerged.rejected_for = Reason.STALE
        await asyncio.sleep(AWAY_S)
        async with serving(w.syncer("s2")) as syncer:
            head = syncer.coordinators[0].head
            await until(lambda: syncer.coordinators[0].head >= head + 3, "it is merged again")
            back.set()
            await task
    said = [m for m in caplog.messages if m.startswith("us-1: ")]
    assert said[0].startswith("us-1: no syncer is heard (for ")
    assert not [m for m in said if "rejected" in m]


@in_virtual_time
async def test_an_expelled_learner_is_told_that_it_is_no_member(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with world(folder, signed()) as w:
        await admit(w, *EVERYBODY, ("more", L, EVIL))
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            others = asyncio.ensure_future(train(w.by(EU).learner("eu"), 120, step_s=0.25))
            expelled = asyncio.ensure_future(train(w.by(EVIL).learner("more"), 120, step_s=0.25))
            await until(lambda: syncer.coordinators[0].head >= 3, "both are merged")
            await admit(w, *EVERYBODY)
            await asyncio.gather(others, expelled)
    said = [m for m in caplog.messages if m.startswith("more: ")]
    assert said[0].startswith("more: every update is rejected: not-a-member (for ")
    assert said[0].endswith(REMEDIES[Reason.NOT_A_MEMBER])
    assert not [m for m in caplog.messages if "no update is merged" in m]


@in_virtual_time
async def test_an_outage_of_a_store_that_has_the_bus_is_one_trouble(caplog: pytest.LogCaptureFixture) -> None:
    """Requests for messages fail with those for objects, and wait longer for their next try: both are one cause."""
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.INFO, "isthmus.agent.trouble")
    async with world(Path(), seed_of(Rules(fragments=1, sync_every=4), PACE)) as whole:
        away = Away(whole)
        async with away.process() as its, away.process() as hers:
            learner, back = hers.learner("us-1"), asyncio.Event()
            task = asyncio.ensure_future(train(learner, 8, step_s=0.25, enough=back.is_set))
            async with serving(its.syncer("s1")) as syncer:
                await until(lambda: syncer.coordinators[0].head >= 3, "it is merged")
                away.now = True
                await asyncio.sleep(AWAY_S)
                away.now = False
                head = syncer.coordinators[0].head
                await until(lambda: syncer.coordinators[0].head >= head + 3, "it is merged again")
                back.set()
                await task
    for name in ("s1", "us-1"):
        said = [m for m in caplog.messages if m.startswith(f"{name}: ")]
        assert said[0].startswith(f"{name}: the store does not answer (for 1")
        assert said[0].endswith(f"; check that {whole.store.url} is reachable")
        assert said[1:] == [f"{name}: the store does not answer: over"]


@dataclass
class Away:
    """A store that can be away, with the bus in it."""

    whole: World
    now: bool = False

    @asynccontextmanager
    async def process(self) -> AsyncIterator[World]:
        """Yield the world as one process has it, with a bus of its own."""
        w = self.whole.through(lambda store: _Gated(store, self), Patience(attempts=1))
        async with open_bus(IN_STORE, w.run.digest, w.store, PACE.heartbeat_s) as bus:
            yield replace(w, bus=bus)


class _Gated(Layer):
    def __init__(self, store: Store, away: Away) -> None:
        super().__init__(store)
        self._away = away

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if self._away.now:
            raise Unavailable("503")
        return await send()
