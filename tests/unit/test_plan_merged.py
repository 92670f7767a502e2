"""The share of the work that a plan calls merged is about what the library's own agents merge, once a period is at rest.

The agents run in virtual time, on links of the plan's bandwidth and latency, with steps that vary by 5 %. Their ledgers
say what was merged and what was overwritten. The plan is arithmetic and shares nothing with them.
"""

import asyncio
import math
import random

import numpy as np
import pytest
from typing_extensions import override

from isthmus.agent.speed import Speeds
from isthmus.codecs import codec, packed_size
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.rules import Pace, Rules
from isthmus.learner import LearnerAgent
from isthmus.log.creation import Seed
from isthmus.syncer import Syncer
from isthmus_lab.forecast import matrices, traffic
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.outcome import Case, Outcome, outcome
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import Times, World, learn, serve
from isthmus_services.board.prices import Prices

pytestmark = pytest.mark.tier("test")

PARAMS = 1e8
ELEMENTS = 256
PRICES = Prices(put_per_1000=0.005, get_per_1000=0.0004, storage_gb_month=0.023, egress_gb=0.02)

WITHIN = 0.1
"""Difference between plan and agents, as a share of the work: docs/paper.md says what it is over a larger grid."""

BIG = [Spec(f"w{n}", (ELEMENTS * size,), "float32", TensorClass.DENSE) for n, size in enumerate((8, 1, 1, 1, 1))]
"""Fragments that are uneven: one has two thirds of the parameters."""


class Steady(traffic._Still):
    """Trains nothing, in steps that vary by 5 %."""

    def __init__(self, step_s: float, name: str) -> None:
        super().__init__(step_s)
        self._draw = random.Random(name)

    @override
    def duration(self) -> float:
        return self._step_s * max(0.2, 1.0 + 0.05 * self._draw.gauss(0.0, 1.0))


def merged(rules: Rules, islands: list[Island], specs: list[Spec], rounds: tuple[int, int] = (10, 6)) -> float:
    """Return the share that the agents merge. `rounds`: those of each fragment that pass before, and those counted."""
    world = World("merged")
    try:
        found: float = world.clock.run_until_complete(_merged(world, rules, islands, specs, rounds))
    finally:
        world.clock.close()
    return found


async def _merged(
    world: World, rules: Rules, islands: list[Island], specs: list[Spec], rounds: tuple[int, int]
) -> float:
    zeros = [np.zeros(spec.shape, np.float32) for spec in specs]
    run = await world.create(Seed(specs, zeros, {}, rules, Pace(heartbeat_s=5.0, silence_s=15.0)))
    up, down = (
        traffic.bits(name, PARAMS, rules.fragments) / 8.0 * run.layout.size
        / sum(packed_size(codec(name), f) for f in run.layout.fragments)
        for name in (rules.codec_up, rules.codec_down)
    )  # fmt: skip
    stopping, ended = asyncio.Event(), False
    syncers: list[Syncer] = []
    agents: list[LearnerAgent] = []
    process = world.process("syncer")
    near = world.ports(process, Conditions(0.002), Conditions(0.002))
    tasks = [process.start(serve(near, "syncer", stopping, None, syncers.append))]
    for name, island in [(f"{i.name}{n}", i) for i in islands for n in range(i.count)]:
        # Small objects stand for large ones; both directions have the small codec's own excess taken out.
        wire = Conditions(
            island.latency_s, up_bytes_s=island.up_gbit_s * 1e9 / 8.0 * down / up,
            down_bytes_s=island.down_gbit_s * 1e9 / 8.0, payload_scale=PARAMS / run.layout.size * down,
            timeout_s=1e5,
        )  # fmt: skip
        process = world.process(name)
        body = learn(
            world.ports(process, wire, wire), name, Steady(island.step_s, name), Times(), started=agents.append,
            stopping=lambda: ended, checkpoint_s=math.inf,
        )  # fmt: skip
        tasks.append(process.start(body))

    async def after(count: int) -> tuple[float, float]:
        learners = sum(i.count for i in islands)
        while len(agents) < learners or min(k.head for k in syncers[0].coordinators) < count:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        accounts = [(share, a) for agent in agents for share, a in zip(run.shares, agent.uplink.accounts, strict=True)]
        kept = sum(share * a.merged for share, a in accounts)
        return kept, kept + sum(share * (a.overwritten + a.late + a.rejected) for share, a in accounts)

    before, then = await after(rounds[0]), await after(sum(rounds))
    ended = True
    stopping.set()
    await asyncio.gather(*tasks)
    assert not world.clock.failures
    return (then[0] - before[0]) / (then[1] - before[1])


def planned(rules: Rules, islands: list[Island], specs: list[Spec] | None) -> Outcome:
    case = Case(
        params=PARAMS, islands=islands, prices=PRICES, store_region="", specs=specs,
        speeds=lambda _: Speeds(add_s=1e-13, round_s=1e-13), matrices=matrices.typical(PARAMS),
    )  # fmt: skip
    return outcome(case, rules)


def link(load: float, sync_every: int) -> float:
    """Return the Gbit/s of which fragments take this share at a period that is asked for."""
    return PARAMS * 4.125 / sync_every / 1e9 / load


EVERY = [(12, 12, 0.1, 0.5), (12, 12, 0.69, 0.02), (12, 12, 0.69, 0.2), (12, 12, 1.5, 0.5), (12, 12, 3.0, 0.02)]
EVERY += [(24, 12, 0.35, 0.5), (24, 12, 1.5, 0.06)]
QUICK = {(12, 12, 0.1, 0.5)}


@pytest.mark.parametrize(
    ("sync_every", "fragments", "load", "latency_s"),
    [pytest.param(*of, marks=() if of in QUICK else pytest.mark.tier("all")) for of in EVERY],
)
def test_the_agents_merge_what_the_plan_says(sync_every: int, fragments: int, load: float, latency_s: float) -> None:
    gbit_s = link(load, sync_every)
    islands = [Island(name="a", count=3, up_gbit_s=gbit_s, down_gbit_s=gbit_s, latency_s=latency_s)]
    rules = Rules.suited(merge="rda", codec_up="int4", codec_down="int4", sync_every=sync_every, fragments=fragments)
    even = [Spec(f"w{n}", (ELEMENTS,), "float32", TensorClass.DENSE) for n in range(fragments)]
    found = planned(rules.check(), islands, None)
    assert found.kept == pytest.approx(merged(rules, islands, even), abs=WITHIN)


def test_learners_that_are_slower_are_called_and_merge_more() -> None:
    islands = [
        Island(name=name, count=2, step_s=step_s, latency_s=0.2, up_gbit_s=10.0, down_gbit_s=10.0)
        for name, step_s in (("fast", 1.0), ("slow", 1.3))
    ]
    rules = Rules.suited(
        merge="rda", codec_up="int4", codec_down="int4", sync_every=12, fragments=6, sync_every_max=12
    ).check()
    even = [Spec(f"w{n}", (ELEMENTS,), "float32", TensorClass.DENSE) for n in range(6)]
    found = planned(rules, islands, None)
    assert found.kept == pytest.approx(merged(rules, islands, even), abs=WITHIN)
    fast, slow = found.forecasts
    assert slow.kept > fast.kept


def test_uneven_fragments_merge_less_if_the_tensors_are_known() -> None:
    gbit_s = link(0.35, 24)
    islands = [Island(name="a", count=2, up_gbit_s=gbit_s, down_gbit_s=gbit_s, latency_s=0.02)]
    rules = Rules.suited(
        merge="rda", codec_up="int4", codec_down="int4", sync_every=24, fragments=5, sync_every_max=24
    ).check()
    known, unknown = planned(rules, islands, BIG), planned(rules, islands, None)
    assert known.kept < unknown.kept - 0.1
    assert known.kept == pytest.approx(merged(rules, islands, BIG), abs=WITHIN)
