"""Joining gives up soon if the store does not answer, but takes as long as needed to write a new run."""

import pytest

from isthmus.errors import RunMissing, Unavailable
from isthmus.format.rules import Rules
from isthmus.link.joining import START_S, Create, reach_or_create
from isthmus.log.creation import Seed
from isthmus.log.run import Run, read_run
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import World
from support.world import seed_of


async def seeded(create: Create) -> Seed:
    assert isinstance(create, Rules)
    return seed_of(create)


def entering(world: World, conditions: Conditions, create: Rules | None = None) -> tuple[Run, float]:
    """Reach or create a run under these network conditions; return the run and the seconds that it took."""

    async def body() -> tuple[Run, float]:
        ports = world.ports(world.process("l0"), conditions)
        since = world.clock.time()
        run = await reach_or_create(ports.store, create, seeded)
        return run, world.clock.time() - since

    found: tuple[Run, float] = world.clock.run_until_complete(body())
    return found


def test_writing_version_0_takes_as_long_as_it_takes() -> None:
    world = World("slow uplink")
    run, took = entering(world, Conditions(up_bytes_s=130.0), Rules(fragments=4))
    version_0 = 8 * run.layout.size
    assert took >= version_0 / 130.0 > START_S, "with the time limit, writing would have failed long before"
    # A later process finds the run complete, and finds it fast.
    again, took = entering(world, Conditions(up_bytes_s=130.0), Rules(fragments=4))
    assert again.digest == run.digest
    assert took < START_S


@pytest.mark.parametrize("create", [None, Rules(fragments=4)], ids=["join", "create"])
def test_a_store_that_does_not_answer_is_given_up_soon(create: Rules | None) -> None:
    world = World("away")
    with pytest.raises(Unavailable, match="sim://run"):
        entering(world, Conditions(cut_off=True), create)
    assert world.clock.time() <= START_S


def test_a_missing_run_is_named_where_nobody_asked_for_it() -> None:
    world = World("missing")
    with pytest.raises(RunMissing):
        entering(world, Conditions())
    with pytest.raises(RunMissing):
        world.clock.run_until_complete(read_run(world.ports(world.process("p")).store))
