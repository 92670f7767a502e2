"""A learner that hears no syncer says whether one has to be started, or this is another bus than the syncers'."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import cast

import pytest

from isthmus.format.rules import Pace, Rules
from isthmus_lab.simulate.bus import SimulatedBus, Streams
from isthmus_lab.simulate.conditions import Conditions
from support.world import in_virtual_time, seed_of, serving, train, world

RULES = Rules(fragments=1, sync_every=20)
PACE = Pace(heartbeat_s=0.5, silence_s=2.0)
STEP_S = 0.1
STEPS = 300

ELSEWHERE = (
    "training goes on, but its updates are not merged meanwhile; sim://other is not the bus of its syncers: use theirs "
    "(--bus, ISTHMUS_BUS, join(bus=…))"
)


@pytest.mark.parametrize("goes_on", [True, False], ids=["on another bus", "nowhere"])
@in_virtual_time
async def test_a_learner_that_hears_no_syncer_says_where_they_are(
    goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with world("", seed_of(RULES, PACE)) as w, AsyncExitStack() as stack:
        bus = SimulatedBus(Streams(), cast(SimulatedBus, w.bus)._process, Conditions(), "sim://other")
        lost = replace(w, bus=bus).learner("lost")
        if goes_on:
            await stack.enter_async_context(serving(w.syncer()))
            await asyncio.gather(*(train(learner, STEPS, step_s=STEP_S) for learner in (w.learner("a"), lost)))
        else:
            await train(lost, STEPS, step_s=STEP_S)
        said = [m for m in caplog.messages if m.startswith("lost: no syncer is heard")]
        if goes_on:
            assert said[-1].startswith("lost: no syncer is heard, but the run goes on (for ")
            assert said[-1].endswith(ELSEWHERE)
        else:
            assert said
            start = "; else start one: isthmus syncer sim://run --bus sim://other"
            assert all(
                m.endswith(f"{start} (nothing was ever merged in sim://run: is that the address of the run?)")
                for m in said
            )
