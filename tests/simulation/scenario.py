"""What one seed means: how many processes, which rules, what weather, and which faults strike whom and when."""

import math
import random
from dataclasses import dataclass, field

from isthmus.layout import Spec
from isthmus.rules import ADOPTIONS, Pace, Rules
from isthmus.simulate.weather import Fault

STORE_FAULTS = (Fault.ERROR, Fault.LOST_REQUEST, Fault.LOST_REPLY, Fault.LANDS_LATE, Fault.SLOW, Fault.CORRUPTED)
BUS_FAULTS = (Fault.ERROR, Fault.LOST_REQUEST, Fault.LOST_REPLY, Fault.LANDS_LATE, Fault.SWALLOWED)
PLANNED = (
    Fault.KILLED,
    Fault.PAUSED,
    Fault.CUT_OFF,
    Fault.TWIN,
    Fault.WIPED,
    Fault.SKEWED,
    Fault.COLLECTED,
    Fault.STRAY,
    Fault.STOPPED,
)
WEIGHTS = (4, 5, 5, 2, 3, 1, 3, 3, 1)


LEAST_BYTES = 10_000
"""Per round that every link can carry: about twice what a learner reads of a round, in commits, values and messages."""


@dataclass(frozen=True)
class Planned:
    """One fault that strikes at a time; `who` is drawn among those it can strike."""

    at: float
    fault: Fault
    lasts_s: float
    draw: float


@dataclass(frozen=True)
class Scenario:
    """Everything about one simulated run that is decided beforehand."""

    seed: int
    syncers: int
    learners: int
    rules: Rules
    pace: Pace
    specs: tuple[Spec, ...]
    adopt: str
    step_s: tuple[float, ...]
    checkpoint_s: float
    latency_s: float
    bytes_s: tuple[float, ...]
    """Bandwidth of each process, up and down: syncers first."""
    store: dict[Fault, float]
    bus: dict[Fault, float]
    storm_s: float
    planned: tuple[Planned, ...] = field(default=())

    def describe(self) -> str:
        """Return it in a line."""
        return (
            f"seed {self.seed}: {self.syncers} syncers, {self.learners} learners, "
            f"P {self.rules.fragments}, H {self.rules.sync_every}, K {self.pace.quorum}, "
            f"staleness {self.pace.staleness}, grace {self.pace.grace:g}, lead {self.pace.lead}, {self.rules.codec_up} up, "
            f"{self.adopt}, {len(self.planned)} planned faults in {self.storm_s:.0f} s"
        )


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    d = random.Random(f"scenario/{seed}")
    fragments = d.choice((1, 2, 2, 3))
    specs = tuple(
        Spec(f"t{i}", (d.randrange(3, 24),), "float32", "embedding" if i == 0 else "dense")
        for i in range(fragments + d.randrange(2))
    )
    rules = Rules(
        fragments=fragments,
        sync_every=d.choice((2, 3, 4, 6)),
        merge=d.choice(("rda", "avg")),
        codec_up=d.choice(("int4", "int4", "int8", "bf16", "f32")),
        codec_down=d.choice(("int8", "int4", "f32")),
        error_feedback=d.random() < 0.8,
    )
    pace = Pace(
        quorum=d.choice((1, 1, 2, 3)),
        grace=d.choice((0.0, 0.8, 0.8)),
        staleness=d.choice((0, 1, 1, 1, 3)),
        lead=d.choice((None, None, None, None, 1.0)),
        snapshot_every=d.choice((2, 3, 5)),
        heartbeat_s=1.0,
        silence_s=3.0,
    )
    learners = d.choice((1, 2, 2, 3, 4))
    storm_s = d.uniform(8.0, 22.0)
    # Swarm testing: each seed has a choice of faults, and those more often, instead of all of them a little.
    store = {f: d.uniform(0.0, 0.06) for f in STORE_FAULTS if d.random() < 0.4} if d.random() < 0.7 else {}
    bus = {f: d.uniform(0.0, 0.08) for f in BUS_FAULTS if d.random() < 0.4} if d.random() < 0.5 else {}
    kinds = [(f, w) for f, w in zip(PLANNED, WEIGHTS, strict=True) if d.random() < 0.6]
    planned = []
    for _ in range(d.randrange(2, 9) if kinds else 0):
        fault = d.choices([f for f, _ in kinds], [w for _, w in kinds])[0]
        planned.append(Planned(d.uniform(1.0, storm_s), fault, d.uniform(0.3, 9.0), d.random()))
    syncers = d.choice((1, 2, 2, 2, 3))
    adopt = d.choices(ADOPTIONS, (3, 1, 1))[0]
    step_s = tuple(d.choice((0.15, 0.3, 0.6, 1.0)) * d.uniform(0.8, 1.2) for _ in range(learners))
    checkpoint_s, latency_s = d.choice((2.0, 5.0, 1e9)), d.choice((0.002, 0.01, 0.05))
    # A link that cannot carry the log is no fault: whoever is behind it stays behind.
    least = LEAST_BYTES * fragments / (rules.sync_every * min(step_s))
    bytes_s = tuple(max(least, d.choice((math.inf, 2e4, 5e4, 2e5))) for _ in range(syncers + learners))
    return Scenario(
        seed=seed,
        syncers=syncers,
        learners=learners,
        rules=rules,
        pace=pace,
        specs=specs,
        adopt=adopt,
        step_s=step_s,
        checkpoint_s=checkpoint_s,
        latency_s=latency_s,
        bytes_s=bytes_s,
        store=store,
        bus=bus,
        storm_s=storm_s,
        planned=tuple(sorted(planned, key=lambda p: p.at)),
    )
