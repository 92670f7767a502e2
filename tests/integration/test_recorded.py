"""What the goodput model reads from a run's log agrees with what happened in a simulated run."""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from isthmus.format.layout import Layout, Spec, TensorClass
from isthmus.format.rules import Pace, Rules
from isthmus.learner.agent import LearnerAgent
from isthmus.learner.boundary import Boundary
from isthmus.log import Log
from isthmus.log.creation import Seed
from isthmus.log.run import read_run
from isthmus_lab.forecast.recorded import Observed, check, observe
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import Arrays, Times, World, learn, serve
from isthmus_services.main import main

pytestmark = pytest.mark.tier("all")

STEP_S = 0.5
WHOLE_S = 900.0


class Steps:
    """Trains nothing; takes steps of equal length and counts them."""

    def __init__(self) -> None:
        self.first = self.taken = 0

    def begin(self, agent: LearnerAgent, layout: Layout) -> tuple[Arrays, None]:
        self.first = self.taken = agent.history.step
        return Arrays(layout), None

    def duration(self) -> float:
        return STEP_S

    def step(self, number: int) -> tuple[int, float]:
        self.taken = number + 1
        return 1, 0.0

    def enough(self, agent: LearnerAgent) -> bool:
        return False


def unsent(boundary: Boundary) -> list[int]:
    """Return, by fragment, the steps of local work that no update holds. Each step has one token."""
    return [boundary.local_tokens(p) for p in range(len(boundary.slots))]


class Failing:
    """Learners that are killed at exponential intervals and come back after a repair. Counts failures and steps."""

    def __init__(self, seed: int, learners: int, every_s: float | None, repair_s: float, checkpoint_s: float) -> None:
        self.world = World(f"recorded/{seed}")
        self.draw = random.Random(seed)
        self.learners, self.every_s, self.repair_s, self.checkpoint_s = learners, every_s, repair_s, checkpoint_s
        self.failures = 0
        self.taken: list[tuple[str, int]] = []
        """Steps of each process."""
        self.unsaved: dict[str, list[int]] = {}
        self.lost = 0.0
        """Steps that no update of the process held when it was killed, and that no checkpoint gave back. Every fragment
        has a quarter of the parameters."""

    async def learner(self, name: str) -> None:
        life = 0
        while True:
            process = self.world.process(name, life)
            ports = self.world.ports(process, Conditions(0.01), Conditions(0.01))
            trainee = Steps()
            boundaries: list[Boundary] = []

            def attached(boundary: Boundary, boundaries: list[Boundary] = boundaries) -> None:
                boundaries.append(boundary)
                held = zip(unsent(boundary), self.unsaved.pop(name, [0] * 4), strict=True)
                self.lost -= sum(min(pair) for pair in held) / 4.0

            body = learn(
                ports,
                name,
                trainee,
                Times(),
                attached=attached,
                stopping=lambda: self.over,
                checkpoint_s=self.checkpoint_s,
            )
            task = process.start(body)
            until = self.draw.expovariate(1.0 / self.every_s) if self.every_s else 1e9
            await asyncio.wait([task], timeout=until)
            self.taken.append((name, trainee.taken - trainee.first))
            if task.done():
                return task.result()
            process.kill()
            self.failures += 1
            if boundaries:
                self.unsaved[name] = unsent(boundaries[0])
                self.lost += sum(self.unsaved[name]) / 4.0
            await asyncio.sleep(self.draw.uniform(0.5, 1.5) * self.repair_s)
            if self.over:
                return None
            life += 1

    async def run(self) -> Observed:
        self.over = False
        specs = [Spec(f"w{i}", (8,), "float32", TensorClass.DENSE) for i in range(4)]
        values = [np.zeros(8, np.float32) for _ in specs]
        rules = Rules(fragments=4, sync_every=4, codec_up="f32", codec_down="f32")
        pace = Pace(heartbeat_s=5.0, silence_s=15.0)
        await self.world.create(Seed(specs, values, {}, rules, pace))
        stopping = asyncio.Event()
        syncer = self.world.process("syncer")
        serving = syncer.start(serve(self.world.ports(syncer), "syncer", stopping))
        learners = [asyncio.ensure_future(self.learner(f"l{m}")) for m in range(self.learners)]
        await asyncio.sleep(WHOLE_S)
        self.over = True
        await asyncio.gather(*learners)
        stopping.set()
        await serving
        ports = self.world.ports(self.world.process("reader"))
        return await observe(Log(await read_run(ports.store), ports.store, ports.process.runtime))


@pytest.mark.parametrize(("every_s", "repair_s", "checkpoint_s"), [(150.0, 20.0, 10.0), (400.0, 60.0, 40.0)])
def test_the_model_predicts_what_failing_learners_achieved(
    every_s: float, repair_s: float, checkpoint_s: float
) -> None:
    failing = Failing(1, 4, every_s, repair_s, checkpoint_s)
    seen = failing.world.clock.run_until_complete(failing.run())
    failing.world.clock.close()
    assert seen.learners == 4
    assert seen.step_s == pytest.approx(STEP_S, rel=0.03)
    assert 0.8 * failing.failures <= seen.failures <= failing.failures
    assert seen.recovery_s == pytest.approx(repair_s, rel=0.35)
    assert seen.checkpoint_s == pytest.approx(checkpoint_s, rel=0.3)
    # The true goodput is the time of the steps whose work no failure undid, as a share of the whole time.
    trained = sum(steps for _, steps in failing.taken)
    truth = (trained - failing.lost) * STEP_S / (4 * WHOLE_S)
    assert seen.goodput == pytest.approx(truth, abs=0.02)
    assert seen.again == pytest.approx((trained - seen.steps) * STEP_S / (4 * WHOLE_S), abs=0.02)
    assert seen.again > failing.lost * STEP_S / (4 * WHOLE_S) > 0.0
    found = check(seen)
    assert found.error == pytest.approx(0.0, abs=0.06)
    assert found.predicted.goodput < 0.95
    assert found.observed.uptime > 0.99


def test_without_failures_there_is_nothing_to_predict() -> None:
    calm = Failing(2, 2, None, 0.0, 50.0)
    seen = calm.world.clock.run_until_complete(calm.run())
    calm.world.clock.close()
    assert (seen.failures, seen.recovery_s) == (0, 0.0)
    assert check(seen).predicted.goodput == pytest.approx(1.0, abs=1e-6)
    assert seen.goodput == pytest.approx(1.0, abs=0.02)


def test_a_run_without_updates_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "run")]) == 0
    assert main(["simulate", "goodput", "--check", str(tmp_path / "run")]) == 2
    assert "holds no update" in capsys.readouterr().err
