"""The scenario of a seed: its number of processes, its rules and conditions, and which faults strike where and when."""

import math
import random
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from isthmus.format.layout import Spec, TensorClass
from isthmus.format.rules import BOUNDS, Adoption, Pace, Rules
from isthmus.syncer.agent import ACCUMULATORS_MAX, HUNG_S
from isthmus.syncer.holders import BEATS_PER_INTERVAL, SILENT_BEATS
from isthmus_lab.simulate.conditions import Fault
from isthmus_lab.simulate.process import MEASURED, Costs

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


SHARE = 0.25
"""The most that updates at the scenario's pace may take of a syncer's loop, and of its threads."""

MATRICES = 0.2
"""Share of seeds whose tensors are matrices, merged isotropically."""

FED_BACK = 0.7
"""Share of seeds with error feedback for versions: what the codec down drops stays with the syncer."""

RESTS = 0.15
"""Share of plain seeds in which a training loop takes no step for long."""

UPDATE_BYTES = 600
"""Approximate size of a small update, header included."""

BYTES_SCALE = 1e4
"""Bytes that offloaded work stands for, per byte of the simulated objects. The largest of the small fragments then
stands for a quarter of a million parameters."""

STORE_TIMEOUT_S, BUS_TIMEOUT_S = 3.0, 2.0

MARGIN_S = 4.0

LEAST_BYTES = 10_000
"""Bytes per round that every link can carry: about twice the commits, values and messages that a learner reads."""


BLOCKED = (Fault.DENIED, Fault.HALF_CUT, Fault.ENDLESS, Fault.THROTTLED)
"""Planned faults that make the same requests fail each time."""


STRANGE = (Fault.GATEWAY, Fault.DEMOTED, Fault.UNMOUNTED, Fault.SILENT, Fault.DEAF, Fault.FALSE_WORD)
"""Planned faults whose answers are well formed but false, or do not come at all."""

STRANGE_SHARE = 0.4
"""Share of seeds with such faults."""

SILENCES = 0.3
"""Share of sieges in which the store or bus of a process falls silent without an error."""


class Kind(StrEnum):
    """The kind of a scenario. All but plain ones are expensive to simulate, so most scenarios are plain."""

    PLAIN = "plain"
    CHOIR = "choir"
    SIEGE = "siege"
    THIN = "thin"
    HOSTILE = "hostile"
    OVERLOAD = "overload"
    LIARS = "liars"
    BUCKET = "bucket"


SHARES = {Kind.PLAIN: 0.89, Kind.CHOIR: 0.02, Kind.SIEGE: 0.06, Kind.THIN: 0.01, Kind.HOSTILE: 0.02}


OVERLOADS = 0.01
"""Share of plain seeds in which syncers are asked for more than their links carry. It is drawn separately."""

LIES = 0.02
"""Share of plain seeds in which a member lies. It is drawn separately."""

BUCKETS = 0.05
"""Share of plain seeds whose bus is in the store. It is drawn separately."""

CRAMPED = 0.1
"""Share of plain seeds whose syncers have places for the sums of one or two rounds only. It is drawn separately."""

STRANGER = "stranger"
"""The name under which false messages are sent on the syncers' stream."""


class Ailment(StrEnum):
    """A fault that one process can have for long."""

    STORE_LOST = "has lost the store"
    BUS_LOST = "has lost the bus"
    HEARS_NOTHING = "hears nothing on the bus"
    SAYS_NOTHING = "cannot append to the bus"
    DENIED = "is denied everything by the store"
    WRITES_DENIED = "is denied its writes by the store"
    STORE_SILENT = "hears nothing of the store, and no timeout"
    DEAF = "is told that nothing is said on the bus"
    # Only learners can have these.
    UNREADABLE = "has stored what nobody may read"
    UNREADABLE_TO_ONE = "has stored what one syncer may not read"
    ENDLESS = "has stored what never ends"
    ENDLESS_TO_ONE = "has stored what never ends for one syncer"
    EVALUATES = "evaluates"


SILENT = (Ailment.STORE_SILENT, Ailment.DEAF)
"""Ailments without an error. They are drawn separately."""

LEARNERS_ONLY = frozenset(
    {Ailment.UNREADABLE, Ailment.UNREADABLE_TO_ONE, Ailment.ENDLESS, Ailment.ENDLESS_TO_ONE, Ailment.EVALUATES}
)


class Hostility(StrEnum):
    """What a hostile learner does with its own stream and prefix, or what a member lies about."""

    OVERWRITES = "overwrites and deletes what it has stored"
    FLOODS = "floods with announcements on bases that do not exist"
    FORGES = "forges ages, durations and tokens"
    SHOUTS = "sends huge messages"
    EXPLODES = "sends updates without measure"
    COMMITS = "takes the key of a commit with a lie"
    MISJUDGES = "commits that updates count for less"


LIARS = (Hostility.EXPLODES, Hostility.COMMITS, Hostility.MISJUDGES)
"""Members that lie. Only the first is a learner."""

PESTS = tuple(hostility for hostility in Hostility if hostility not in LIARS)
"""Hostile learners that do only what permissions allow."""


@dataclass(frozen=True)
class Ailing:
    """One ailment. `draw` chooses its process among those that can have it."""

    ailment: Ailment
    of_syncer: bool
    draw: float


@dataclass(frozen=True)
class Planned:
    """One fault, and the time at which it strikes. `draw` chooses the process that it strikes."""

    at: float
    fault: Fault
    lasts_s: float
    draw: float


@dataclass(frozen=True)
class Scenario:
    """All decisions about a simulated run that are made before it starts."""

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
    """Bandwidth of each process, the same up and down; syncers come first."""
    store: dict[Fault, float]
    bus: dict[Fault, float]
    storm_s: float
    handling: float = 0.0
    """Factor on the measured costs of handling; 0: handling takes no time."""
    stall_s: float = 0.0
    """How long event loops stall every few seconds, as they do for a snapshot or a garbage collection."""
    kind: Kind = Kind.PLAIN
    speakers: int = 0
    """Additional learners without an agent."""
    vigil_s: float = 0.0
    """Length of the vigil, between storm and calm: ailments last so long, and the other processes are watched."""
    ailments: tuple[Ailing, ...] = ()
    hostile: Hostility | None = None
    bereft: bool = False
    """Whether every syncer is killed at the end of the vigil, and an operator heals fragments that cannot be folded."""
    thin: tuple[str, float] | None = None
    """Direction of the one thin link, and the share of the needed bandwidth that it has."""
    overload: float = 0.0
    """Traffic that syncers are asked for, as a multiple of what their links carry."""
    places: int = ACCUMULATORS_MAX
    """Rounds of a syncer that hold an accumulator at once."""
    planned: tuple[Planned, ...] = ()

    def describe(self) -> str:
        """Return a description of the scenario in one line."""
        return (
            f"seed {self.seed}: {self.kind}, {self.syncers} syncers, {self.learners} learners, {self.speakers} speakers, "
            f"P {self.rules.fragments}, H {self.rules.sync_every}, K {self.pace.quorum}, "
            f"staleness {self.pace.staleness}, grace {self.pace.grace:g}, lead {self.pace.lead}, {self.rules.codec_up} up, "
            f"{self.adopt}, {len(self.planned)} planned faults in {self.storm_s:.0f} s"
        )

    @property
    def needs_a_forger(self) -> bool:
        """Whether no round reaches its quorum without the learner that forges. That learner then decides how fast
        fragments get commits, within the bounds of what is believed."""
        return self.hostile is Hostility.FORGES and self.pace.quorum > self.learners

    @property
    def goes_on_s(self) -> float:
        """The seconds within which each fragment gets a commit, from any moment, if a syncer and a learner are well.

        A syncer that has lost the store notices it at its first timeout. Its peers leave it out after one more silence.
        Silent learners are given up after `silence_s`. Then two rounds pass, and fetches that had begun are repeated.
        A round that needs a learner that forges waits as long as its claims are believed.
        """
        silence_s = SILENT_BEATS / BEATS_PER_INTERVAL * self.pace.heartbeat_s
        round_s = max((self.rules.sync_every + 2) * max(self.step_s), self.pace.silence_s)
        if self.needs_a_forger:
            round_s *= BOUNDS.slow
        hung_s = HUNG_S if any(a.ailment is Ailment.STORE_SILENT for a in self.ailments) else 0.0
        return hung_s + STORE_TIMEOUT_S + 2.0 * silence_s + self.pace.silence_s + 2.0 * round_s + MARGIN_S

    @property
    def costs(self) -> Costs:
        """The costs of handling. Requests and offloaded work take at most `SHARE` of a syncer, or it would never keep
        up."""
        costs = MEASURED.scaled(self.handling)
        updates = (self.learners + self.speakers) * self.rules.fragments * self.syncers
        most = SHARE * self.rules.sync_every * min(self.step_s) / updates
        return replace(
            costs,
            request_s=min(costs.request_s, most),
            byte_s=min(costs.byte_s, most * costs.threads / (UPDATE_BYTES * BYTES_SCALE)),
        )


def draw(seed: int, kind: Kind | None = None) -> Scenario:
    """Return the scenario of a seed, of the given kind or else of a drawn one."""
    d = random.Random(f"kind/{seed}")
    drawn = d.choices(list(SHARES), list(SHARES.values()))[0]
    scenario = _given_up(_strange(_harder(_plain(seed))))
    match kind or drawn:
        case Kind.CHOIR:
            return _choir(scenario)
        case Kind.SIEGE:
            return _siege(scenario)
        case Kind.THIN:
            return _thin(scenario)
        case Kind.HOSTILE:
            return _hostile(scenario)
        case Kind.OVERLOAD:
            return _overload(scenario)
        case Kind.LIARS:
            return _liars(scenario)
        case Kind.BUCKET:
            return _bucket(scenario)
        case _ if kind is None and random.Random(f"overload/{seed}").random() < OVERLOADS:
            return _overload(scenario)
        case _ if kind is None and random.Random(f"liars/{seed}").random() < LIES:
            return _liars(scenario)
        case _ if kind is None and random.Random(f"bus/box/{seed}").random() < BUCKETS:
            return _bucket(scenario)
        case _:
            return _cramped(_rests(scenario))


def _harder(s: Scenario) -> Scenario:
    """In a share of the seeds, let handling take time, stall event loops, and block some requests."""
    d = random.Random(f"harder/{s.seed}")
    handling = d.choices((0.0, 1.0, 10.0), (6, 3, 1))[0]
    stall_s = d.uniform(0.2, 0.4) if d.random() < 0.15 else 0.0
    more = [
        Planned(d.uniform(1.0, s.storm_s), d.choice(BLOCKED), d.uniform(1.0, 9.0), d.random())
        for _ in range(d.choice((0, 0, 0, 1, 2)))
    ]
    return replace(
        s, handling=handling, stall_s=stall_s, planned=tuple(sorted((*s.planned, *more), key=lambda p: p.at))
    )


def _strange(s: Scenario) -> Scenario:
    """In a share of the seeds, plan faults whose answers are well formed but false."""
    d = random.Random(f"strange/{s.seed}")
    if d.random() >= STRANGE_SHARE:
        return s
    more = [
        Planned(d.uniform(1.0, s.storm_s), d.choice(STRANGE), d.uniform(0.4, 9.0), d.random())
        for _ in range(d.choice((1, 1, 2)))
    ]
    return replace(s, planned=tuple(sorted((*s.planned, *more), key=lambda p: p.at)))


def _rests(s: Scenario) -> Scenario:
    """In a share of the seeds, let a training loop take no step for most of the storm."""
    d = random.Random(f"rests/{s.seed}")
    if d.random() >= RESTS:
        return s
    at = d.uniform(1.0, 0.5 * s.storm_s)
    rest = Planned(at, Fault.RESTS, d.uniform(0.5, 1.0) * (s.storm_s - at), d.random())
    return replace(s, planned=tuple(sorted((*s.planned, rest), key=lambda p: p.at)))


def _cramped(s: Scenario) -> Scenario:
    """In a share of the seeds, let fragments wait for one another's accumulators."""
    d = random.Random(f"cramped/{s.seed}")
    return replace(s, places=d.choice((1, 2))) if d.random() < CRAMPED else s


def _choir(s: Scenario) -> Scenario:
    """Add many speakers, and make rounds long enough for grace: messages must not hold rounds up."""
    d = random.Random(f"choir/{s.seed}")
    fragments = d.choice((2, 3, 4, 6))
    return replace(
        s,
        kind=Kind.CHOIR,
        speakers=d.choices((8, 24, 64), (4, 4, 2))[0],
        syncers=min(s.syncers, 2),
        learners=min(s.learners, 2),
        step_s=tuple(d.uniform(0.6, 1.2) for _ in range(min(s.learners, 2))),
        handling=d.choice((1.0, 10.0, 10.0)),
        rules=msgspec.structs.replace(s.rules, fragments=fragments, sync_every=d.choice((6, 8, 12))),
        pace=msgspec.structs.replace(s.pace, grace=0.8, staleness=1, lead=None),
        specs=_small(d, fragments),
        bytes_s=(math.inf,) * len(s.bytes_s),
        storm_s=d.uniform(20.0, 28.0),
    )


def _quick(s: Scenario, d: random.Random) -> Scenario:
    """Make rounds short, so that a fault that outlasts many rounds need not last long."""
    step_s = d.choice((0.15, 0.2, 0.3))
    learners = max(2, s.learners)
    return replace(
        s,
        syncers=max(2, s.syncers),
        learners=learners,
        step_s=tuple(step_s * d.uniform(0.8, 1.2) for _ in range(learners)),
        rules=msgspec.structs.replace(s.rules, sync_every=d.choice((3, 4))),
        pace=msgspec.structs.replace(s.pace, lead=None),
        bytes_s=(math.inf,) * (max(2, s.syncers) + learners),
        latency_s=min(s.latency_s, 0.01),
        stall_s=0.0,
        storm_s=d.uniform(4.0, 8.0),
        planned=s.planned[: d.randrange(3)],
    )


def _siege(s: Scenario) -> Scenario:
    """Let some processes fail for long; the others must go on."""
    d = random.Random(f"siege/{s.seed}")
    usual = [ailment for ailment in Ailment if ailment not in SILENT]
    ailments = tuple(Ailing(d.choice(usual), d.random() < 0.5, d.random()) for _ in range(d.choice((1, 1, 2))))
    silence = random.Random(f"silence/{s.seed}")
    if silence.random() < SILENCES:
        ailments = (Ailing(silence.choice(SILENT), silence.random() < 0.8, silence.random()), *ailments[1:])
    quick = replace(_quick(s, d), kind=Kind.SIEGE, ailments=ailments)
    return replace(quick, vigil_s=quick.goes_on_s + 8.0)


def _hostile(s: Scenario) -> Scenario:
    """Add a learner that misuses its own prefix and its own stream."""
    d = random.Random(f"hostile/{s.seed}")
    quick = replace(_quick(s, d), kind=Kind.HOSTILE, hostile=d.choice(PESTS), planned=())
    if quick.hostile is Hostility.OVERWRITES:
        # Between snapshots that are far apart, there are updates to spoil.
        pace = msgspec.structs.replace(quick.pace, snapshot_every=d.choice((2, 5, 4096)))
        quick = replace(quick, bereft=d.random() < 0.6, pace=pace)
    if quick.hostile is Hostility.FLOODS:
        quick = replace(quick, handling=min(quick.handling, 1.0))  # a machine ten times as slow is flooded by less
    if quick.hostile is Hostility.FORGES and d.random() < 0.5:
        # The quorum needs every learner, and one of them forges its messages.
        quick = replace(quick, pace=msgspec.structs.replace(quick.pace, quorum=quick.learners + 1))
    return replace(quick, vigil_s=quick.goes_on_s + 5.0)


def _liars(s: Scenario) -> Scenario:
    """Let a member lie: a learner in its updates, or a syncer about the result of a round."""
    d = random.Random(f"liars/{s.seed}/drawn")
    quick, fragments = _quick(s, d), d.choice((2, 3))
    return replace(
        quick,
        kind=Kind.LIARS,
        hostile=d.choice(LIARS),
        planned=(),
        rules=msgspec.structs.replace(quick.rules, fragments=fragments),
        specs=_small(d, fragments),
        # With grace and late work, honest learners are merged, so three learners determine the usual values.
        pace=msgspec.structs.replace(
            quick.pace, grace=0.8, staleness=max(1, quick.pace.staleness), quorum=min(quick.pace.quorum, quick.learners)
        ),
        vigil_s=quick.goes_on_s + 5.0,
    )


def _bucket(s: Scenario) -> Scenario:
    """Put the bus into the store: what is said are objects, and listings of them may be late or repeat themselves."""
    d = random.Random(f"bucket/{s.seed}/drawn")
    of_servers = (Fault.DEMOTED, Fault.DEAF, Fault.FALSE_WORD)
    late = {Fault.LISTED_LATE: d.uniform(0.05, 0.3), Fault.LISTED_TWICE: d.uniform(0.05, 0.3)}
    return replace(
        s,
        kind=Kind.BUCKET,
        bus={fault: chance for fault, chance in s.bus.items() if fault is not Fault.SWALLOWED} | late,
        planned=tuple(planned for planned in s.planned if planned.fault not in of_servers),
    )


def _thin(s: Scenario) -> Scenario:
    """Give one learner a link that carries less than it needs, up or down. Some fragments are ahead of others."""
    d = random.Random(f"thin/{s.seed}")
    quick = _quick(s, d)
    code = random.Random(f"rate/{s.seed}").choice(("int4", "q1.5"))
    return replace(
        quick,
        kind=Kind.THIN,
        syncers=2,
        learners=2,
        step_s=(0.2, 0.2),
        bytes_s=(math.inf,) * 4,
        rules=msgspec.structs.replace(
            s.rules, fragments=6, sync_every=6, codec_up=code, codec_down=code, error_feedback=True
        ),
        pace=msgspec.structs.replace(s.pace, lead=None, staleness=1, quorum=1, snapshot_every=5),
        specs=tuple(Spec(f"t{i}", (4096,), "float32", TensorClass.DENSE) for i in range(6)),
        handling=0.0,
        store={},
        bus={},
        planned=(),
        # No round needs checkpoints, and they would fill the link.
        checkpoint_s=1e9,
        thin=(d.choice(("up", "down")), d.uniform(0.6, 0.95)),
        storm_s=20.0,
        vigil_s=60.0,
    )


def _overload(s: Scenario) -> Scenario:
    """Add many learners, and give syncers downlinks that carry only a part of what they are asked to read."""
    d = random.Random(f"overload/{s.seed}")
    learners, fragments = d.choice((4, 8, 12)), d.choice((3, 4, 6))
    quick = _quick(s, d)
    sync_every, overload = d.choice((4, 6)), d.choice((1.5, 3.0, 5.0))
    longest = d.choice((0, 0, 0, 2)) * sync_every
    rules = msgspec.structs.replace(s.rules, fragments=fragments, sync_every=sync_every, sync_every_max=longest)
    return replace(
        quick,
        kind=Kind.OVERLOAD,
        syncers=min(quick.syncers, 2),
        learners=learners,
        step_s=tuple(d.uniform(0.25, 0.35) for _ in range(learners)),
        bytes_s=(math.inf,) * (min(quick.syncers, 2) + learners),
        rules=rules,
        pace=msgspec.structs.replace(s.pace, lead=None, staleness=1, grace=0.8),
        specs=tuple(Spec(f"t{i}", (1024,), "float32", TensorClass.DENSE) for i in range(fragments)),
        checkpoint_s=1e9,
        store={},
        bus={},
        planned=(),
        overload=overload,
        storm_s=12.0,
        vigil_s=120.0,
    )


def _small(d: random.Random, fragments: int) -> tuple[Spec, ...]:
    return tuple(
        Spec(f"t{i}", (d.randrange(3, 24),), "float32", TensorClass.EMBEDDING if i == 0 else TensorClass.DENSE)
        for i in range(fragments)
    )


def _plain(seed: int) -> Scenario:
    d = random.Random(f"scenario/{seed}")
    fragments = d.choice((1, 2, 2, 3))
    specs = _small(d, fragments + d.randrange(2))
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
    # Swarm testing: each seed has only some faults, but has them more often.
    store = {f: d.uniform(0.0, 0.06) for f in STORE_FAULTS if d.random() < 0.4} if d.random() < 0.7 else {}
    bus = {f: d.uniform(0.0, 0.08) for f in BUS_FAULTS if d.random() < 0.4} if d.random() < 0.5 else {}
    kinds = [(f, w) for f, w in zip(PLANNED, WEIGHTS, strict=True) if d.random() < 0.6]
    planned = []
    for _ in range(d.randrange(2, 9) if kinds else 0):
        fault = d.choices([f for f, _ in kinds], [w for _, w in kinds])[0]
        planned.append(Planned(d.uniform(1.0, storm_s), fault, d.uniform(0.3, 9.0), d.random()))
    syncers = d.choice((1, 2, 2, 2, 3))
    adopt = d.choices(tuple(Adoption), (3, 1, 1))[0]
    step_s = tuple(d.choice((0.15, 0.3, 0.6, 1.0)) * d.uniform(0.8, 1.2) for _ in range(learners))
    checkpoint_s, latency_s = d.choice((2.0, 5.0, 1e9)), d.choice((0.002, 0.01, 0.05))
    # A link that cannot carry the log is not a fault to recover from: its process would stay behind forever.
    least = LEAST_BYTES * fragments / (rules.sync_every * min(step_s))
    bytes_s = tuple(max(least, d.choice((math.inf, 2e4, 5e4, 2e5))) for _ in range(syncers + learners))
    return _matrices(
        Scenario(
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
    )


def _matrices(s: Scenario) -> Scenario:
    """Return the scenario; in a share of the seeds its tensors are matrices that are merged isotropically."""
    d = random.Random(f"matrices/{s.seed}")
    if d.random() > MATRICES:
        return s
    specs = [replace(spec, shape=(spec.shape[0] // 3 + 1, d.randrange(2, 5))) for spec in s.specs]
    rules = msgspec.structs.replace(s.rules, merge="iso", iso_block=d.choice((0, 0, 3)))
    return replace(s, specs=tuple(specs), rules=msgspec.structs.replace(rules, isotropic_up=d.random() < 0.5))


def _given_up(s: Scenario) -> Scenario:
    """Return the scenario; in a share of the seeds syncers do not keep what their codec drops."""
    kept = random.Random(f"feedback/{s.seed}").random() < FED_BACK
    return replace(s, rules=msgspec.structs.replace(s.rules, feedback_down=kept))
