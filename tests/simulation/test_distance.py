"""Far from the store and the bus, a learner's messages and fetches do not queue up behind round trips."""

import asyncio

import numpy as np

from isthmus.format.layout import Spec, TensorClass
from isthmus.format.rules import Pace, Rules
from isthmus.log.creation import Seed
from isthmus.syncer import Syncer
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import Times, World, learn, serve
from simulation.toy import Toy

LEARNERS, H, STEPS = 4, 12, 180


def test_rounds_keep_their_pace_half_a_step_away() -> None:
    """A round trip takes a whole step, and each step has a fragment to send, to announce and to fetch."""
    world = World("distance")

    async def body() -> list[int]:
        rules = Rules(fragments=H, sync_every=H, sync_every_max=H)
        specs = [Spec(f"t{i}", (8,), "float32", TensorClass.DENSE) for i in range(H)]
        zeros = [np.zeros(8, np.float32) for _ in specs]
        run = await world.create(Seed(specs, zeros, {}, rules, Pace(heartbeat_s=5.0, silence_s=15.0)))
        stopping = asyncio.Event()
        syncers: list[Syncer] = []
        process = world.process("syncer")
        serving = process.start(serve(world.ports(process), "syncer", stopping, None, syncers.append))
        ended = False
        far = Conditions(0.5, 0.5)
        learning = []
        for m in range(LEARNERS):
            process = world.process(f"l{m}")
            toy = Toy(process.random, 1.0)
            ports = world.ports(process, far, far)
            learning.append(process.start(learn(ports, f"l{m}", toy, Times(), stopping=lambda: ended)))
        await asyncio.sleep(STEPS)
        heads = [coordinator.head for coordinator in syncers[0].coordinators]
        ended = True
        await asyncio.gather(*learning)
        stopping.set()
        await serving
        assert run.layout.size == 8 * H
        return heads

    heads = world.clock.run_until_complete(body())
    world.clock.close()
    # Joining takes a few steps, and the first round takes a period.
    assert min(heads) >= STEPS // H - 4, heads
