"""Simulate one run: start the processes, let the planned faults strike, wait until the run recovers, and judge it."""

import asyncio
import functools
import gc
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from isthmus.errors import Denied, IsthmusError, LogCorrupt, RunMissing, first_cause
from isthmus.format.records import frame, messages
from isthmus.format.records.keys import BUS, UPDATES, commits_prefix, snapshot_key, snapshots_prefix, updates_prefix
from isthmus.format.records.messages import SYNCER_STREAM
from isthmus.learner import LearnerAgent
from isthmus.learner import agent as learner_agent
from isthmus.log import Log, merge
from isthmus.log import gc as collection
from isthmus.log.creation import Seed
from isthmus.log.run import Run
from isthmus.syncer import Syncer, snapshots
from isthmus.syncer import agent as syncer_agent
from isthmus_lab.simulate.clock import StandsStill
from isthmus_lab.simulate.conditions import Conditions, Fault
from isthmus_lab.simulate.process import Process
from isthmus_lab.simulate.world import SimulatedPorts, Times, World, learn, serve
from simulation import checker, speakers
from simulation.checker import Checker
from simulation.healing import Operator
from simulation.liars import Most
from simulation.mounts import Mounted
from simulation.scenario import (
    BUS_TIMEOUT_S,
    BYTES_SCALE,
    STORE_TIMEOUT_S,
    STRANGER,
    Hostility,
    Kind,
    Planned,
    Scenario,
    draw,
)
from simulation.speakers import Choir
from simulation.toy import Watched
from simulation.vigil import Vigil

# Every process decodes every message, so decoded messages are cached.
decode = functools.lru_cache(maxsize=4096)(messages.decode)
for _module in (syncer_agent, learner_agent, checker, speakers):
    vars(_module)["decode"] = decode

CALM_S = 60.0
"""After the last fault, everything must be well again within this many virtual seconds."""

CALM_AT_LEAST_S = 2.0

SOON_S, PAUSE_S_MAX = 6.0, 10.0
"""A process that ends less than `SOON_S` after its start is restarted after a pause that grows to `PAUSE_S_MAX`."""


@dataclass
class Outcome:
    """The result of one seed."""

    seed: int
    violations: list[str]
    events: list[str]
    faults: Counter[str]
    virtual_s: float
    commits: int


@dataclass
class Seat:
    """A name, and the processes that have it, one after another or two at once."""

    name: str
    is_syncer: bool
    step_s: float
    store: Conditions
    bus: Conditions
    evaluate_s: float = 0.0
    """Duration of the evaluation before its next step."""
    unfoldable: bool = False
    """Whether its last process ended because it could fold no fragment."""
    refused_at: float = -1e9
    """When the store last denied it a request that was not for a learner's update."""
    resumed_at: float = -1e9
    """When its process last went on after a pause: until then it cannot end."""
    ports: SimulatedPorts | None = None
    """The ports of its newest process."""
    lives: int = 0
    """The number of processes that were started."""
    processes: dict[int, tuple[Process, "Syncer | LearnerAgent | None"]] = field(default_factory=dict)
    """The processes alive, by number."""
    stops: dict[int, asyncio.Event] = field(default_factory=dict)
    ends: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """By number of the processes alive, a future that is done once the process is gone."""

    @property
    def agents(self) -> list["Syncer | LearnerAgent"]:
        return [agent for _, agent in self.processes.values() if agent is not None]

    def evaluation_s(self) -> float:
        """Return the duration of the next evaluation, 0 if there is none, and cancel it: it happens once."""
        seconds, self.evaluate_s = self.evaluate_s, 0.0
        return seconds

    def stop(self, life: int) -> None:
        """Send SIGTERM: a learner that waits for a version stops waiting."""
        self.stops[life].set()
        agent = self.processes[life][1]
        if isinstance(agent, LearnerAgent) and agent.boundary is not None:
            agent.boundary.let_go()
            agent.boundary.news()


class Cluster:
    """The processes and the world of one seed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(f"sim/{scenario.seed}")
        self.events: list[str] = []
        self.faults: Counter[str] = Counter()
        self.calm = False
        self.over = False
        self.draw = random.Random(f"faults/{scenario.seed}")
        self.run: Run
        self.checker: Checker
        self.folder = ""
        """The folder of the mounts, in seeds that have mounts."""
        s = scenario
        self.seats = [self._seat(f"s{i}", True, 0.0, s.bytes_s[i]) for i in range(s.syncers)]
        self.seats += [self._seat(f"l{i}", False, s.step_s[i], s.bytes_s[s.syncers + i]) for i in range(s.learners)]

    def _seat(self, name: str, is_syncer: bool, step_s: float, bytes_s: float) -> Seat:
        s = self.scenario

        def told(port: str) -> Callable[[Fault, str], None]:
            def tell(fault: Fault, request: str) -> None:
                self.faults[fault.value] += 1
                # A request without an answer holds its sender up until the timeout.
                waits = fault in (
                    Fault.LOST_REQUEST,
                    Fault.LOST_REPLY,
                    Fault.LANDS_LATE,
                    Fault.CUT_OFF,
                    Fault.HALF_CUT,
                    Fault.ENDLESS,
                )
                if fault is Fault.DENIED and not request.startswith("get updates/"):
                    seat.refused_at = self.world.clock.time()
                self.checker.disturb(name, port, (store if port == "store" else bus).timeout_s if waits else 0.0)
                self.say(name, f"{port}: {fault.value}: {request}")

            return tell

        store = Conditions(
            s.latency_s, 0.5, bytes_s, bytes_s, timeout_s=STORE_TIMEOUT_S, late_s=40.0, chances=dict(s.store)
        )
        bus = Conditions(s.latency_s / 2, 0.5, timeout_s=BUS_TIMEOUT_S, late_s=10.0, chances=dict(s.bus))
        store.told, bus.told = told("store"), told("bus")
        seat = Seat(name, is_syncer, step_s, store, bus)
        return seat

    def say(self, who: str, what: str) -> None:
        """Add a line to the event log."""
        self.events.append(f"{self.world.clock.time():9.4f} {who:8} {what}")

    # --- processes ----------------------------------------------------------------------------------------------------

    async def keep(self, seat: Seat) -> None:
        """Keep a process of this name running: start another one whenever it ends."""
        pause_s = 0.0
        while not self.over:
            began = self.world.clock.time()
            await self.live(seat)
            # A process that ends again and again is restarted after longer and longer pauses, as Kubernetes does.
            soon = self.world.clock.time() - began < SOON_S and not self.calm
            pause_s = min(2.0 * pause_s + 1.0, PAUSE_S_MAX) if soon else 0.0
            await asyncio.sleep(pause_s + self.draw.uniform(0.2, 2.0))
            while (twins := list(seat.ends.values())) and not self.over:
                await asyncio.wait(twins, timeout=1.0)

    async def live(self, seat: Seat) -> None:
        """Run one process of a name until it ends or is killed."""
        life = seat.lives
        seat.lives += 1
        s = self.scenario
        slow = 0.0 if self.draw.random() < 0.5 else 0.02
        process = self.world.process(
            seat.name,
            life,
            wall_skew_s=self.draw.choice((0.0, 0.0, 3600.0, -5.0)),
            compute_s=lambda d: d.uniform(0.0, slow) if slow else 0.0,
            costs=s.costs,
            bytes_scale=BYTES_SCALE,
        )
        beat_s = s.pace.heartbeat_s if s.kind is Kind.BUCKET else None
        ports = seat.ports = self.world.ports(process, seat.store, seat.bus, beat_s)
        strange = {planned.fault for planned in s.planned}
        if Fault.GATEWAY in strange:
            ports.store.landmark = snapshots_prefix(0)
        if Fault.UNMOUNTED in strange:
            ports.wire.mount = Mounted(self.world.objects, process.runtime, self.folder)
        stopping = seat.stops[life] = asyncio.Event()
        seat.processes[life] = process, None
        self.say(seat.name, f"life {life} starts")
        if not seat.is_syncer:
            self.checker.disturb(seat.name)
        gone = seat.ends[life] = self.world.clock.create_future()

        def started(agent: Syncer | LearnerAgent) -> None:
            seat.processes[life] = process, agent
            if isinstance(agent, Syncer):
                agent.coordinators[0]._limits.accumulators = asyncio.Semaphore(s.places)  # all fragments share them
            self.checker.watch(seat.name, life, agent, process)

        if seat.is_syncer:
            body = serve(ports, seat.name, stopping, None, started)
        else:
            toy = Watched(self.checker, seat.name, life, s.adopt, process.random, seat.step_s, seat.evaluation_s)
            body = learn(
                ports, seat.name, toy, Times(), started=started, attached=toy.attached, stopping=stopping.is_set,
                adopt=s.adopt, checkpoint_s=s.checkpoint_s, takeover=life % 2 == 1,
            )  # fmt: skip
        task = process.start(body)
        if s.stall_s:
            self.spawn(self.stalls(process, gone))
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            gone.set_result(None)
        del seat.processes[life], seat.stops[life], seat.ends[life]
        if not task.done():
            self.say(seat.name, f"life {life} was killed")
            return
        failure = task.exception()
        error = first_cause(failure) if failure else None
        self.say(seat.name, f"life {life} ended: {error!r}" if error else f"life {life} ended")
        seat.unfoldable = isinstance(error, LogCorrupt)
        # A syncer may end if every fragment is damaged: it can serve none until an operator heals the log.
        damaged = self.scenario.store.get(Fault.CORRUPTED) or self.scenario.hostile is Hostility.OVERWRITES
        damaged = damaged or bool(self.checker.lies)  # no process can join a run in which a lie has a commit's key
        lost = any(planned.fault is Fault.UNMOUNTED for planned in self.scenario.planned)
        blamed_at = max(seat.refused_at, seat.resumed_at)
        if error is not None and not isinstance(error, IsthmusError):
            self.checker.violate(f"{seat.name} ended by {error!r}", error)
        elif isinstance(error, Denied) and seat.is_syncer and self.world.clock.time() - blamed_at > 1.0:
            self.checker.violate(f"{seat.name} was ended by what a learner has stored: {error}")
        elif (isinstance(error, LogCorrupt) and not damaged) or (isinstance(error, RunMissing) and not lost):
            self.checker.violate(f"{seat.name}: {error}")
        elif isinstance(error, LogCorrupt) and seat.is_syncer and error.key.startswith(UPDATES):
            self.checker.violate(f"{seat.name} was ended by one fragment that it could not fold: {error}")

    async def stalls(self, process: Process, gone: asyncio.Future[None]) -> None:
        """Stall a process's event loop every few seconds while the process lives."""
        while not self.calm and not gone.done():
            await asyncio.wait([gone], timeout=self.draw.uniform(1.0, 3.0))
            if not gone.done():
                process.stall(self.scenario.stall_s)
                self.faults[Fault.STALLED.value] += 1

    def kill(self, seat: Seat, life: int) -> None:
        """Send SIGKILL."""
        process, _ = seat.processes[life]
        process.kill()
        if not seat.ends[life].done():
            seat.ends[life].set_result(None)

    # --- faults -------------------------------------------------------------------------------------------------------

    async def strike(self) -> None:
        """Let the planned faults strike."""
        for planned in self.scenario.planned:
            await asyncio.sleep(max(0.0, planned.at - (self.world.clock.time() - self.began)))
            seats = [seat for seat in self.seats if seat.processes]
            if not seats:
                continue
            seat = seats[int(planned.draw * len(seats))]
            life = max(seat.processes)
            struck = True
            match planned.fault:
                case Fault.KILLED:
                    self.kill(seat, life)
                case Fault.PAUSED:
                    process, _ = seat.processes[life]
                    process.pause()
                    seat.resumed_at = self.world.clock.time() + planned.lasts_s
                    self.later(planned.lasts_s, process.resume)
                    self.later(planned.lasts_s, functools.partial(self.checker.disturb, seat.name))
                case Fault.CUT_OFF:
                    both = [seat.store, seat.bus]
                    for conditions in both if planned.draw < 0.3 else [both[int(planned.draw * 100) % 2]]:
                        conditions.cut_off = True
                        self.later(planned.lasts_s, functools.partial(setattr, conditions, "cut_off", False))
                        self.later(planned.lasts_s, functools.partial(self.checker.disturb, seat.name))
                case Fault.TWIN:
                    seat = self.seats[self.scenario.syncers + int(planned.draw * self.scenario.learners)]
                    struck = bool(seat.processes)
                    if struck:
                        self.spawn(self.live(seat))
                case Fault.WIPED:
                    self.world.streams.wipe()
                    for key in [key for key in self.world.objects.blobs if key.startswith(BUS)]:
                        self.world.objects.delete(key)
                    syncers = [s for s in self.seats if s.is_syncer and s.processes]
                    if planned.draw < 0.5 and syncers:
                        # The bus and the syncers were on one machine.
                        for dead in syncers:
                            self.kill(dead, max(dead.processes))
                case Fault.SKEWED:
                    seat.processes[life][0].wall_skew_s = self.draw.choice((-7200.0, 7200.0, 30.0))
                    self.checker.disturb(seat.name, "wall")
                case Fault.COLLECTED:
                    self.spawn(self.gather())
                case Fault.STRAY:
                    struck = self.stray()
                case Fault.STOPPED:
                    seat.stop(life)
                case Fault.RESTS:
                    seat = self.seats[self.scenario.syncers + int(planned.draw * self.scenario.learners)]
                    seat.evaluate_s = planned.lasts_s
                case Fault.DENIED | Fault.HALF_CUT | Fault.ENDLESS | Fault.THROTTLED:
                    self.block(planned, seat)
                case Fault.GATEWAY | Fault.SILENT | Fault.DEAF | Fault.UNMOUNTED:
                    everybody = planned.fault is Fault.GATEWAY and planned.draw * 100 % 1.0 < 0.5
                    restarts = planned.fault is Fault.GATEWAY and planned.draw * 10000 % 1.0 < 0.7
                    for s in self.seats if everybody else [seat]:
                        self.mislead(s, planned)
                        if restarts and s.processes:
                            self.kill(s, max(s.processes))  # its next process starts with answers that are partly false
                case Fault.DEMOTED:
                    self.world.streams.fail_over()
                case Fault.FALSE_WORD:
                    self.spawn(self.false_words(planned))
            if struck:
                self.faults[planned.fault.value] += 1
                if not (seat.is_syncer and planned.fault is Fault.KILLED) and planned.fault is not Fault.WIPED:
                    self.checker.disturb(seat.name)
                self.say(seat.name, f"fault: {planned.fault.value}")

    def block(self, planned: Planned, seat: Seat) -> None:
        """Make some requests fail for a while, each time they are sent."""
        one = int(planned.draw * 100) % 2
        until = planned.lasts_s
        match planned.fault:
            case Fault.DENIED:
                seat.store.denies_writes, seat.store.denies_reads = True, one == 0
                self.later(until, lambda: setattr(seat.store, "denies_writes", False))
                self.later(until, lambda: setattr(seat.store, "denies_reads", False))
            case Fault.HALF_CUT:
                which = "cut_reads" if one else "cut_writes"
                setattr(seat.bus, which, True)
                self.later(until, lambda: setattr(seat.bus, which, False))
                self.later(until, lambda: self.checker.disturb(seat.name))
            case Fault.ENDLESS:
                whose = self.seats[-1 - int(planned.draw * self.scenario.learners)].name
                keys = frozenset(updates_prefix(f.index, whose) for f in self.run.layout.fragments)

                def ends(store: Conditions) -> None:
                    store.endless -= keys

                for s in self.seats if one else [seat]:
                    s.store.endless |= keys
                    self.later(until, functools.partial(ends, s.store))
            case _:
                keys = frozenset({commits_prefix(int(planned.draw * len(self.run.layout.fragments)))})

                def eases(store: Conditions) -> None:
                    store.throttled -= keys

                for s in self.seats:
                    s.store.throttled |= keys
                    self.later(until, functools.partial(eases, s.store))

    def mislead(self, seat: Seat, planned: Planned) -> None:
        """Give one process answers for a while that are well formed and false, or no answers at all."""
        conditions = seat.bus if planned.fault is Fault.DEAF else seat.store
        which = planned.fault.name.lower()
        if planned.fault is Fault.GATEWAY and planned.draw * 1000 % 1.0 < 0.5:
            which = "lists_nothing"
        setattr(conditions, which, True)
        self.later(planned.lasts_s, functools.partial(setattr, conditions, which, False))
        self.later(planned.lasts_s, functools.partial(self.checker.disturb, seat.name))

    async def false_words(self, planned: Planned) -> None:
        """Announce versions on the syncers' stream for a while that are not in the log."""
        until = self.world.clock.time() + planned.lasts_s
        while self.world.clock.time() < until and not self.calm:
            p = self.draw.randrange(len(self.run.layout.fragments))
            word = messages.Committed(
                run=self.run.digest, id=f"{self.draw.random()}", syncer=STRANGER, fragment=p,
                version=self.checker.heads()[p] + self.draw.randrange(1, 40), digest=bytes(32),
            )  # fmt: skip
            self.world.streams.append(SYNCER_STREAM, messages.encode(word), self.world.clock.time())
            await asyncio.sleep(self.draw.uniform(0.1, 1.0))

    def later(self, seconds: float, fn: Callable[[], object]) -> None:
        """Undo a fault after this many seconds."""
        self.world.clock.call_later(seconds, fn, context=self.world.clock.world.context)

    def spawn(self, body: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        self.beside.append(asyncio.ensure_future(body))

    async def gather(self) -> None:
        """Collect garbage with new conditions, at once, and keep only a few versions."""
        process = self.world.process("gc", len(self.beside))
        ports = self.world.ports(process, replace(self.seats[0].store, cut_off=False))
        keep = self.draw.choice((1, 2, 4))

        async def body() -> None:
            log = Log(self.run, ports.store, process.runtime)
            # Clocks differ, so an object that is young by one clock is old by another.
            plan = await collection.plan(log, keep=keep, min_age_s=self.draw.choice((-1e5, 0.5, 5.0)))
            if self.draw.random() < 0.3:
                await asyncio.sleep(self.draw.uniform(0.0, 10.0))
            await collection.apply(log, plan)

        task = process.start(body())
        await asyncio.wait([task])
        failure = task.exception()
        error = first_cause(failure) if failure else None
        if error is not None and not isinstance(error, IsthmusError):
            self.checker.violate(f"gc ended by {error!r}", error)

    def stray(self) -> bool:
        """Store a snapshot of a history that lost: it is sound in itself, but belongs to no commit in the log."""
        heads = self.checker.heads()
        p = int(self.draw.random() * len(heads))
        version = heads[p] - int(self.draw.random() * 2)
        if version < 1:
            return False
        size = self.run.layout.fragments[p].size
        state = merge.State(version, *(np.full(size, v, np.float32) for v in (1.0, 1.5, 0.25)))
        blob = bytes(merge.snapshot(state, p, self.run.digest))
        key = snapshot_key(p, version, frame.digest(blob))
        self.checker.strays.add(key)
        self.world.objects.put(key, blob, 0.0)
        return True

    # --- the run ------------------------------------------------------------------------------------------------------

    async def whole(self) -> None:
        """Run the storm, the vigil, the calm and the end."""
        s, clock = self.scenario, self.world.clock
        values = [np.linspace(-1.0, 1.0, spec.size, dtype=np.float32) for spec in s.specs]
        self.run = await self.world.create(Seed(list(s.specs), values, {}, s.rules, s.pace))
        self.checker = Checker(self.world, self.run, self.say, Most(min(s.step_s)), s.latency_s, s.stall_s, s.places)
        self.beside: list[asyncio.Future[None]] = []
        self.choir = Choir(self, s.speakers)
        self.vigil = Vigil(self)
        self.operator = Operator(self)
        self.began = clock.time()
        keeping = [asyncio.ensure_future(self.keep(seat)) for seat in self.seats]
        self.vigil.begin()
        if s.kind is Kind.THIN:
            self.spawn(self.vigil.drift())
        striking = asyncio.ensure_future(self.strike())
        while clock.time() < self.began + s.storm_s:
            await asyncio.sleep(1.0)
            self.checker.look(self.seats)
        await striking
        if s.vigil_s:
            self.conditions_clears()
            self.say("world", f"vigil: {self.vigil}")
            await self.vigil.run()
        self.end_of_faults()
        if s.hostile is Hostility.OVERWRITES:
            await self.operator.run()
        await self.recovered()
        # All processes stop in order and finish what is under way.
        self.over = True
        self.choir.leave()
        for seat in self.seats:
            for life in seat.stops:
                seat.stop(life)
        _, hanging = await asyncio.wait([*keeping, *self.beside], timeout=60.0)
        for seat in self.seats if hanging else ():
            for life in seat.processes:
                self.checker.violate(f"{seat.name}, life {life}, does not end")
        for key in self.checker.strays:
            self.world.objects.blobs.pop(key, None)  # replay would rightly report them
        await self.checker.judge()

    def end_of_faults(self) -> None:
        """Begin the calm: no fault strikes from here on, and paused processes go on."""
        self.calm = True
        self.calm_since = self.world.clock.time()
        self.say("world", "calm")
        self.conditions_clears()

    def conditions_clears(self) -> None:
        """Let every request through, and paused processes go on."""
        for seat in self.seats:
            held_up = any(process.life.frozen for process, _ in seat.processes.values())
            for conditions in (seat.store, seat.bus):
                held_up |= conditions.blocked
                conditions.clear()
            for process, _ in seat.processes.values():
                process.resume()
            if held_up:
                self.checker.disturb(seat.name)

    async def recovered(self) -> None:
        """Wait until the run is well again. If that takes longer than `CALM_S`, it counts as never: a violation."""
        since = dict(self.checker.heads())
        while True:
            await asyncio.sleep(0.5)
            self.checker.look(self.seats)
            waited = self.world.clock.time() - self.calm_since
            ill = self.checker.ill(self.seats, since)
            if not ill and waited >= CALM_AT_LEAST_S:
                self.say("world", f"well again after {waited:.1f} s")
                return
            if waited > CALM_S:
                self.checker.violate(f"after {waited:.0f} s of calm: {'; '.join(ill)}")
                return


def simulate(seed: int, kind: str | None = None) -> Outcome:
    """Run one seed, as a scenario of the named kind if a kind is given."""
    cluster = Cluster(draw(seed, Kind(kind) if kind else None))
    clock = cluster.world.clock
    # The collector frees cycles at times that no seed decides, and a freed generator would schedule callbacks.
    gc.disable()
    cluster.say("world", cluster.scenario.describe())
    violations: list[str] = []
    try:
        # Of half the seeds, fragments count as large: their commits state no state but where a snapshot is due.
        small = patch.object(snapshots, "SMALL", 0 if seed % 2 else snapshots.SMALL)
        with small, tempfile.TemporaryDirectory(prefix="mounts-") as cluster.folder:
            clock.run_until_complete(cluster.whole())
    except StandsStill as error:
        violations.append(str(error))
    finally:
        violations += cluster.checker.violations
        clock.close()
        gc.enable()
    violations += [f"unhandled: {failure}" for failure in clock.failures]
    return Outcome(
        seed, violations, cluster.events, cluster.faults, clock.time(), sum(cluster.checker.heads().values())
    )
