"""An outage of the bus, the store or all syncers wastes almost nothing of what learners train meanwhile."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from isthmus.format.layout import Spec, TensorClass
from isthmus.format.records.messages import Tally
from isthmus.format.rules import Pace, Rules
from isthmus.learner import LearnerAgent
from isthmus.log.creation import Seed
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.process import Process
from isthmus_lab.simulate.world import Times, World, learn, serve
from simulation.toy import Toy

ALL = pytest.mark.tier("all")
STEP_S = 0.1
WASTED = 0.06
"""Largest share of the work of an outage that may be wasted: on bases that were merged without it, or too late."""


@dataclass(frozen=True)
class Outage:
    """What is away, and in what kind of run."""

    away: str
    """`bus`: nobody reaches it; `emptied bus`: the bus has also lost its messages; `syncers`: all syncers were killed;
    `frozen syncer`: the only syncer stands still, as by SIGSTOP, and goes on with what it had; `store`: no request to it
    is answered in time; `silent store`: no request to it is ever answered."""
    away_s: float = 45.0
    learners: int = 3
    fragments: int = 6
    quorum: int = 1
    seed: int = 0


def ledger(agents: list[LearnerAgent]) -> Counter[str]:
    """Return the tokens of all learners by what became of them."""
    tallies: list[Tally] = [agent.summary().ledger for agent in agents]
    return Counter({part: sum(getattr(t, part) for t in tallies) for part in Tally.__struct_fields__})


def spent(outage: Outage) -> Counter[str]:
    """Return what became of the tokens trained from the beginning of an outage until a while after it."""
    world = World(f"outage {outage}")

    async def body() -> Counter[str]:
        rules = Rules(fragments=outage.fragments, sync_every=12, sync_every_max=12)
        specs = [Spec(f"t{i}", (8,), "float32", TensorClass.DENSE) for i in range(outage.fragments)]
        pace = Pace(quorum=outage.quorum)
        await world.create(Seed(specs, [np.zeros(8, np.float32) for _ in specs], {}, rules, pace))
        ways = [Conditions(0.005, 0.3) for _ in range(outage.learners + 1)]
        stores = [Conditions(0.005, 0.3) for _ in ways]
        agents: list[LearnerAgent] = []
        stopping, ended = asyncio.Event(), False

        def syncer(life: int) -> tuple[Process, asyncio.Task[None]]:
            process = world.process("syncer", life)
            return process, process.start(serve(world.ports(process, stores[-1], ways[-1]), f"syncer{life}", stopping))

        killed, serving = syncer(0)
        learning = []
        for m in range(outage.learners):
            process = world.process(f"l{m}")
            ports = world.ports(process, stores[m], ways[m])
            trainee = Toy(process.random, STEP_S)
            learning.append(
                process.start(learn(ports, f"l{m}", trainee, Times(), started=agents.append, stopping=lambda: ended))
            )
        await asyncio.sleep(30.0 + outage.seed / 7)
        before = ledger(agents)
        if outage.away == "syncers":
            killed.kill()
            await asyncio.sleep(outage.away_s)
            _, serving = syncer(1)
        elif outage.away == "frozen syncer":
            killed.pause()
            await asyncio.sleep(outage.away_s)
            killed.resume()
        elif outage.away in ("store", "silent store"):
            for store in stores:
                store.cut_off, store.silent = outage.away == "store", outage.away == "silent store"
            await asyncio.sleep(outage.away_s)
            for store in stores:
                store.clear()
        else:
            for way in ways:
                way.cut_off = True
            await asyncio.sleep(outage.away_s)
            if outage.away == "emptied bus":
                world.streams.wipe()
            for way in ways:
                way.clear()
        await asyncio.sleep(15.0)
        after = ledger(agents)
        ended = True
        await asyncio.gather(*learning)
        stopping.set()
        await serving
        after.subtract(before)
        return after

    try:
        return world.clock.run_until_complete(body())
    finally:
        world.clock.close()


@pytest.mark.parametrize(
    "away",
    [
        "bus",
        pytest.param("emptied bus", marks=ALL),
        "syncers",
        pytest.param("frozen syncer", marks=ALL),
        pytest.param("store", marks=ALL),
        "silent store",
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="three"),
        pytest.param({"quorum": 2}, id="quorum of two", marks=ALL),
        pytest.param({"learners": 6, "seed": 1}, id="six", marks=ALL),
        pytest.param({"away_s": 600.0, "seed": 1}, id="ten minutes", marks=ALL),
    ],
)
def test_work_of_an_outage_is_merged_after_it(away: str, more: dict[str, Any]) -> None:
    found = spent(Outage(away, **more))
    assert found["rejected"] + found["late"] < WASTED * found["processed"], found
    # A fragment that was merged right before an outage of the store: no learner can read the new version, which then
    # replaces what all have trained on the old one.
    replaced = 0.0 if "store" not in away else 1.0 / 6.0
    assert found["merged"] > (0.85 - replaced) * found["processed"], found


@pytest.mark.parametrize("away", ["store", "silent store"])
def test_a_short_outage_of_the_store_is_noticed_by_what_was_held_up(away: str) -> None:
    """The syncer asks the store for nothing meanwhile. Without this, more than half of the work was replaced."""
    found = spent(Outage(away, away_s=10.0))
    assert found["rejected"] + found["late"] < WASTED * found["processed"], found
    assert found["merged"] > 0.75 * found["processed"], found


def test_a_learner_that_stood_still_blames_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """It was stopped for 30 s, as by SIGSTOP: it says so, and not that no syncer is heard."""
    world = World("stopped")

    async def body() -> None:
        specs = [Spec("t", (8,), "float32", TensorClass.DENSE)]
        rules = Rules(fragments=1, sync_every=12)
        await world.create(Seed(specs, [np.zeros(8, np.float32)], {}, rules, Pace()))
        stopping, ended = asyncio.Event(), False
        process = world.process("syncer")
        serving = process.start(serve(world.ports(process), "syncer", stopping))
        learner = world.process("l")
        agents: list[LearnerAgent] = []
        learning = learner.start(
            learn(world.ports(learner, None, Conditions(0.5)), "l", Toy(learner.random, STEP_S), Times(), started=agents.append,
                  stopping=lambda: ended)
        )  # fmt: skip
        await asyncio.sleep(10.0)
        learner.pause()
        await asyncio.sleep(30.0)
        learner.resume()
        await asyncio.sleep(10.0)
        assert not agents[0].waiting_for
        ended = True
        await learning
        stopping.set()
        await serving

    world.clock.run_until_complete(body())
    world.clock.close()
    assert caplog.text.count("this process stood still for 30 s") == 1
    assert "no syncer is heard" not in caplog.text
