"""A learner whose uplink is too thin contributes its share, and to every fragment alike."""

import asyncio
import random

import numpy as np
import pytest

from isthmus.codecs import codec, packed_size
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.rules import Pace, Rules
from isthmus.learner import LearnerAgent
from isthmus.learner.boundary import Boundary
from isthmus.learner.upload_window import LIMIT_MAX, Window
from isthmus.log import Log
from isthmus.log.creation import Seed
from isthmus.syncer import Syncer
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import Times, World, learn, serve
from simulation.toy import Toy

SIZE, STEP_S = 65536, 0.2
SETTLING_S, MEASURED_S = 30.0, 600.0


def shares(uplink: float, fragments: int = 6, longest: int = 0) -> tuple[float, list[float]]:
    """Return the share of a learner's tokens that is merged, and the share of each fragment's commits that it is in."""
    world = World(f"thin/{uplink}")

    async def body() -> tuple[float, list[float]]:
        rules = Rules(fragments=fragments, sync_every=fragments, sync_every_max=longest)
        specs = [Spec(f"t{i}", (SIZE,), "float32", TensorClass.DENSE) for i in range(fragments)]
        run = await world.create(Seed(specs, [np.ones(SIZE, np.float32) for _ in specs], {}, rules, Pace()))
        # A learner needs to send one update per step.
        need = packed_size(codec(rules.codec_up), run.layout.fragments[0]) / STEP_S
        syncers: list[Syncer] = []
        agents: list[LearnerAgent] = []
        process = world.process("s")
        ports = world.ports(process, Conditions(0.01), Conditions(0.005))
        process.start(serve(ports, "s", asyncio.Event(), None, syncers.append))
        for i in range(3):
            process = world.process(f"l{i}")
            store = Conditions(0.01, up_bytes_s=uplink * need) if i == 2 else Conditions(0.01)
            toy = Toy(random.Random(i), STEP_S)
            ports = world.ports(process, store, Conditions(0.005))
            process.start(learn(ports, f"l{i}", toy, Times(), started=agents.append))
        await asyncio.sleep(SETTLING_S)
        thin = next(agent for agent in agents if agent.name == "l2").uplink
        before = [account.copy() for account in thin.accounts]
        heads = [coordinator.head for coordinator in syncers[0].coordinators]
        await asyncio.sleep(MEASURED_S)
        merged = processed = 0
        for old, new in zip(before, thin.accounts, strict=True):
            merged += new.merged - old.merged
            processed += sum(getattr(new, p) - getattr(old, p) for p in ("merged", "overwritten", "late", "rejected"))
        judge = world.ports(world.process("judge"))
        log, part = Log(run, judge.store, judge.process.runtime), []

        async def takes_part(p: int, version: int) -> bool:
            commit = await log.commit(p, version)
            assert commit is not None
            return any(given.learner == "l2" for given in commit.header.inputs)

        for p, first in enumerate(heads):
            last = syncers[0].coordinators[p].head
            taken = [await takes_part(p, version) for version in range(first + 1, last + 1)]
            part.append(sum(taken) / len(taken))
        return merged / processed, part

    try:
        measured: tuple[float, list[float]] = world.clock.run_until_complete(body())
        return measured
    finally:
        world.clock.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("uplink", "fragments", "longest", "at_least"),
    [
        pytest.param(*of, marks=pytest.mark.tier("all"))
        for of in (
            (4.0, 6, 0, 0.65),
            (0.85, 6, 0, 0.65),
            (0.6, 6, 0, 0.65),
            (0.4, 6, 0, 0.70),
            (0.4, 12, 0, 0.85),
            # Here the period may not grow.
            (4.0, 6, 6, 0.60),
            (0.85, 6, 6, 0.55),
            (0.6, 6, 6, 0.40),
            (0.4, 6, 6, 0.25),
        )
    ],
)
def test_a_thin_uplink_gives_its_share_and_no_fragment_falls_behind_for_its_number(
    uplink: float, fragments: int, longest: int, at_least: float
) -> None:
    merged, by_fragment = shares(uplink, fragments, longest)
    assert merged >= at_least, (merged, by_fragment)
    assert min(by_fragment) >= 0.75 * max(by_fragment), by_fragment


@pytest.mark.tier("all")
@pytest.mark.timeout(300)
def test_four_bodies_at_once_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the window, updates are captured early, and each waits for the others on the wire."""
    monkeypatch.setattr(Window, "room", lambda self, in_hand, now, step_s: in_hand < LIMIT_MAX)
    monkeypatch.setattr(Window, "full", property(lambda self: False))
    monkeypatch.setattr(Boundary, "_too_late", lambda self, slot, now: False)
    merged, _ = shares(0.6, longest=6)
    assert merged < 0.40
