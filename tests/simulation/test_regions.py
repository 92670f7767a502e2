"""Two learners have buckets near them, in virtual time: if one bucket fails for long, only its learner is affected."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from isthmus.format.layout import Spec, TensorClass
from isthmus.format.records.objects import MemberSpec
from isthmus.format.rules import MemberRole, Pace, Rules
from isthmus.format.signing.keys import new_signer
from isthmus.inspect.replay import replay
from isthmus.learner import LearnerAgent
from isthmus.log import Log
from isthmus.log.creation import Seed
from isthmus.log.membership import Members, write
from isthmus.syncer import Syncer
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.store import Objects
from isthmus_lab.simulate.world import Times, World, learn, serve
from simulation.toy import Toy

FRAGMENTS, SIZE, STEP_S = 3, 4096, 0.2
NEAR = {"eu": "sim://eu", "us": "sim://us"}
OWNER, SYNC, EU, US = (new_signer() for _ in range(4))


async def merged(world: World, log: Log) -> dict[str, int]:
    """Return the number of each learner's updates in the log."""
    found: dict[str, int] = {}
    for p in range(FRAGMENTS):
        async for commit in log.commits(p, 0):
            for given in commit.header.inputs:
                found[given.learner] = found.get(given.learner, 0) + 1
    return found


def simulated(fails: str, fault: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], World, int]:
    """Train for 60 s, for 60 s with a fault of one bucket, and for 60 s more. Return how many updates were merged
    before and during the fault, the world, and how many fragments differ in replay."""
    world = World("regions")

    async def body() -> tuple[dict[str, int], dict[str, int], int]:
        rules = Rules(fragments=FRAGMENTS, sync_every=6)
        specs = [Spec(f"t{i}", (SIZE,), "float32", TensorClass.DENSE) for i in range(FRAGMENTS)]
        values = [np.ones(SIZE, np.float32) for _ in specs]
        run = await world.create(Seed(specs, values, {}, rules, Pace(), signer=OWNER))
        for url in NEAR.values():
            world.buckets[url] = Objects()
            world.ways[url] = Conditions(0.01 if url.endswith("eu") else 0.08)
        init = world.ports(world.process("owner"))
        entries = [
            MemberSpec("eu", MemberRole.LEARNER, EU.author, NEAR["eu"]),
            MemberSpec("s", MemberRole.SYNCER, SYNC.author),
            MemberSpec("us", MemberRole.LEARNER, US.author, NEAR["us"]),
        ]
        await write(init.store, Members(run), OWNER, entries, [0] * FRAGMENTS, init.process.runtime.wall())
        syncers: list[Syncer] = []
        agents: list[LearnerAgent] = []
        stopping = asyncio.Event()
        process = world.process("s")
        ports = world.ports(process, Conditions(0.01), Conditions(0.005))
        process.start(serve(ports, "s", stopping, None, syncers.append, signer=SYNC))
        for i, (name, signer) in enumerate((("eu", EU), ("us", US))):
            process = world.process(name)
            ports = world.ports(process, Conditions(0.01), Conditions(0.005))
            toy = Toy(random.Random(i), STEP_S)
            process.start(learn(ports, name, toy, Times(), started=agents.append, signer=signer))
        judge = world.ports(world.process("judge"))
        log = Log(run, judge.store, judge.process.runtime, US)
        await log.members.refresh(judge.store)
        await asyncio.sleep(60.0)
        way = world.ways[NEAR[fails]]
        for name, value in fault.items():
            setattr(way, name, value)
        before = await merged(world, log)
        await asyncio.sleep(60.0)
        during = await merged(world, log)
        way.clear()
        await asyncio.sleep(60.0)
        found = await replay(log)
        return (
            before,
            {name: during[name] - before[name] for name in during},
            sum(one.difference is not None for one in found),
        )

    try:
        before, during, differ = world.clock.run_until_complete(body())
        return before, during, world, differ
    finally:
        world.clock.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fault",
    [
        {"cut_off": True},
        pytest.param({"cut_writes": True}, marks=pytest.mark.tier("all")),
        pytest.param({"denies_reads": True}, marks=pytest.mark.tier("all")),
        pytest.param({"denies_writes": True}, marks=pytest.mark.tier("all")),
    ],
    ids=str,
)
def test_a_bucket_that_fails_costs_its_learner_little_and_others_nothing(fault: dict[str, Any]) -> None:
    before, during, world, differ = simulated("us", fault)
    assert differ == 0
    assert during["eu"] >= 0.9 * before["eu"]
    assert during["us"] >= 0.5 * before["us"]
    for name, url in NEAR.items():
        mine = {key for key in world.buckets[url].blobs if key.startswith("updates/")}
        assert {key.split("/")[2] for key in mine} == {name}
        assert any(key.startswith("values/") for key in world.buckets[url].blobs)
    # Updates that the failing bucket did not take are in the run's bucket; those of the other learner are not.
    home = {key.split("/")[2] for key in world.objects.blobs if key.startswith("updates/")}
    assert home <= {"us"}
