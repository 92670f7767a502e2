"""Running one setting of the lab: the library's learners and syncer in virtual time, or the data-parallel baseline."""

import asyncio
import contextlib
import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from isthmus.errors import InputError, first_cause
from isthmus.format.records.frame import payload_start
from isthmus.learner import LearnerAgent
from isthmus.learner.boundary import Boundary
from isthmus.learner.checkpoint import Checkpoint
from isthmus.log import Log
from isthmus.log.creation import Seed
from isthmus.log.figures import LogSums
from isthmus.log.run import Run
from isthmus.syncer import Syncer
from isthmus.torch import model as torch_model
from isthmus.torch import moments
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import SimulatedPorts, Times, World, learn, serve
from isthmus_lab.training import trainee
from isthmus_lab.training.setting import WINDOW_TOKENS, Failures, Row, Setting
from isthmus_lab.training.variants import merged_by, variant
from isthmus_lab.working_time import goodput

Progress = Callable[[float], None]

STUCK = 100
"""A run whose learners still fail after so many times the time that all their steps take will not end."""

WEIBULL_SHAPE = 1.5
"""Weibull shape of repair times: most repairs take about as long as the mean, a few much longer."""


def train(setting: Setting, seed: int, progress: Progress = lambda _: None) -> Row:
    """Return the outcome of a setting with a seed.

    The same processor, libraries and code give the same bits again; elsewhere losses differ in about the third digit.
    Raises `InputError` if a merge rule of one's own fails, or learners that fail get nowhere.
    """
    torch.set_num_threads(1)
    if setting.method == "data-parallel":
        return _data_parallel(setting, seed, progress)
    with variant(setting.variant), merged_by(setting.own_merge):
        lab = _Lab(setting, seed, progress)
        try:
            row: Row = lab.world.clock.run_until_complete(lab.run())
        except BaseExceptionGroup as error:
            raise first_cause(error) from error
        finally:
            lab.world.clock.close()
    return row


# --- data parallel ----------------------------------------------------------------------------------------------------


def all_reduce_s(setting: Setting, parameters: float) -> float:
    """Return the seconds of an all-reduce of all gradients in bfloat16: a ring moves 2 (1 − 1/M) times their bytes."""
    w = setting.wires
    if setting.learners == 1 or w.gbit_s is None:
        return 0.0 if setting.learners == 1 else 2.0 * w.latency_s
    size = 2.0 * (w.parameters or parameters) * 2.0 * (1.0 - 1.0 / setting.learners)
    return size * 8.0 / (w.gbit_s * 1e9) + 2.0 * w.latency_s


@dataclass
class _Saved:
    """A checkpoint of the data-parallel job, and the time since it."""

    number: int = 0
    parts: tuple[dict[str, Any], dict[str, Any]] | None = None
    since_s: float = 0.0
    """Virtual seconds of the job's steps since the checkpoint."""
    trained_s: float = 0.0
    """Virtual seconds that the learners computed since the checkpoint, summed over them; a failure takes these back."""


def _data_parallel(setting: Setting, seed: int, progress: Progress) -> Row:
    """Train one model with one optimizer and the batches of all learners in every step; return the outcome.

    Each step waits for the slowest learner. The failure of any learner stops all learners, and the job continues from
    its last checkpoint.
    """
    model = trainee.build(setting, seed)
    optimizer = trainee.optimizer(setting, model)
    parameters = sum(p.numel() for p in model.parameters())
    draw = random.Random(f"{seed}/data-parallel")
    durations = _durations(setting)
    wall = trained = down = 0.0
    reduce_s = all_reduce_s(setting, parameters)
    f = setting.failures
    limit_s = setting.steps * min(durations) if setting.until == "time" else math.inf
    life_s = draw.expovariate(setting.learners / f.every_s) if f else math.inf
    saved = _Saved()
    number = steps = 0
    if f:
        saved.parts = _kept(model, optimizer)
    # If the run ends by time, take a step only if it is expected to end in time.
    while wall + max(durations) + reduce_s <= limit_s if math.isfinite(limit_s) else number < setting.steps:
        parts = [
            trainee.windows(
                trainee.shard(m, setting.learners, prose=setting.adapters > 0), setting.batch, seed, m, number
            )
            for m in range(setting.learners)
        ]
        done = wall / limit_s if math.isfinite(limit_s) else number / setting.steps
        trainee.train_on(model, optimizer, torch.cat(parts), trainee.rate(setting, done))
        took = [s * max(0.2, 1.0 + setting.noise * draw.gauss(0.0, 1.0)) for s in durations]
        step_s = max(took) + reduce_s
        wall += step_s
        trained += sum(took)
        saved.since_s += step_s
        saved.trained_s += sum(took)
        life_s -= step_s
        number += 1
        steps += 1
        if f and life_s <= 0.0:
            assert saved.parts is not None, "a job that fails has a checkpoint from its beginning"
            model.load_state_dict(saved.parts[0])
            optimizer.load_state_dict(copy.deepcopy(saved.parts[1]))
            number, trained = saved.number, trained - saved.trained_s
            saved.since_s = saved.trained_s = 0.0
            repair_s = _repair_s(f, draw)
            down += repair_s
            wall += repair_s
            life_s = draw.expovariate(setting.learners / f.every_s)
        elif f and saved.since_s >= f.checkpoint_s:
            saved = _Saved(number, _kept(model, optimizer))
        progress(min(1.0, wall / limit_s if math.isfinite(limit_s) else number / setting.steps))
    if math.isfinite(limit_s):
        wall = limit_s
    return Row(
        setting=setting.name,
        learners=setting.learners,
        H=1,
        K=setting.learners,
        seed=seed,
        tokens=steps * setting.learners * setting.batch * WINDOW_TOKENS,
        val_loss=trainee.val_loss(model, setting),
        goodput=goodput(trained, 0.0, setting.learners * wall),
        uptime=1.0 - down / wall,
        participation=1.0,
        up_bits_per_param=16.0,
        down_bits_per_param=16.0,
        wall_virtual_s=wall,
    )


def _kept(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def _repair_s(failures: Failures, draw: random.Random) -> float:
    return draw.weibullvariate(failures.repair_s / math.gamma(1.0 + 1.0 / WEIBULL_SHAPE), WEIBULL_SHAPE)


def _durations(setting: Setting, count: int | None = None) -> list[float]:
    s = setting.step_s
    return [s[min(m, len(s) - 1)] for m in range(count or setting.learners)]


# --- decoupled --------------------------------------------------------------------------------------------------------


@dataclass
class _Seat:
    """One learner, with one process after another."""

    name: str
    order: int
    step_s: float
    lives: int = 0
    times: list[Times] = field(default_factory=list)
    here_s: float = 0.0
    """Virtual seconds for which the learner was meant to take part."""
    lost: float = 0.0
    """Tokens that were trained and that failures took back, weighted by fragments."""
    unsaved: list[int] = field(default_factory=list)
    """By fragment, tokens that no capture held when the last process failed; the next process may restore some of them
    from a checkpoint."""
    boundary: Boundary | None = None
    """Boundary of the running process."""
    down: list[tuple[float, float]] = field(default_factory=list)
    """Beginning and end of each repair, in virtual seconds."""


class _Lab:
    """One run in progress."""

    def __init__(self, setting: Setting, seed: int, progress: Progress) -> None:
        self.setting = setting
        self.seed = seed
        self.world = World(f"lab/{seed}")
        self.tokens = 0
        self._progress = progress
        self._draw = random.Random(f"{seed}/failures")
        self._began = 0.0
        self._run: Run
        self._syncer: Syncer
        self._idle: list[float] = []
        self._done = asyncio.Event()
        self._awaited = {1.0: self._done}
        """By share of the run: an event that is set when this share is done."""

    # --- progress -----------------------------------------------------------------------------------------------------

    def done(self) -> float:
        """Return the share of the run that is done."""
        if self.setting.until == "time":
            fastest = self.setting.steps * min(_durations(self.setting))
            return min(1.0, (self.world.clock.time() - self._began) / fastest)
        return min(1.0, self.tokens / self.setting.budget)

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        done = self.done()
        for share, event in self._awaited.items():
            if done >= share:
                event.set()
        self._progress(done)

    # --- the run ------------------------------------------------------------------------------------------------------

    async def run(self) -> Row:
        """Train until the run is done; evaluate the global model and return the row."""
        s = self.setting
        model = trainee.build(s, self.seed)
        self._run = await self.world.create(
            Seed(torch_model.specs_of(model), torch_model.values_of(model), {}, s.rules, s.pace)
        )
        self._began = self.world.clock.time()
        stopping = asyncio.Event()
        serving = self._serve(stopping)
        seats = [_Seat(f"l{m}", m, step_s) for m, step_s in enumerate(_durations(s))]
        guests = [_Seat(f"g{m}", s.learners + m, _durations(s)[-1]) for m in range(s.guests.count if s.guests else 0)]
        async with asyncio.TaskGroup() as tasks:
            seated = [tasks.create_task(self._sit(seat)) for seat in seats]
            seated += [tasks.create_task(self._visit(seat)) for seat in guests]

            def ended(_: "asyncio.Task[None]") -> None:
                for task in seated:
                    task.cancel()  # A syncer that fails ends before its learners, which would train for nothing.

            serving.add_done_callback(ended)
        wall = self.world.clock.time() - self._began
        stopping.set()
        await serving
        torch_model.load(model, self._run.layout, [k.state.published for k in self._syncer.coordinators if k.state])
        row = await self._row(seats + guests, wall, trainee.val_loss(model, s))
        if self.world.clock.failures:
            raise RuntimeError(f"the simulation broke: {self.world.clock.failures[0]}")
        return row

    def _conditions(self, order: int = 0) -> Conditions:
        last = order == self.setting.learners - 1
        w = self.setting.thin if last and self.setting.thin is not None else self.setting.wires
        scale = w.parameters / self._run.layout.size if w.parameters else 1.0
        speed = math.inf if w.gbit_s is None else w.gbit_s * 1e9 / 8.0
        return Conditions(
            w.latency_s, w.spread, up_bytes_s=speed, down_bytes_s=speed, payload_scale=scale, timeout_s=60.0
        )

    def _serve(self, stopping: asyncio.Event) -> "asyncio.Task[None]":
        process = self.world.process("syncer")
        # The syncer is close to the store.
        ports = self.world.ports(process, Conditions(0.002, 0.2), Conditions(0.002, 0.2))

        def started(syncer: Syncer) -> None:
            self._syncer = syncer

        return process.start(serve(ports, "syncer", stopping, None, started))

    async def _sit(self, seat: _Seat) -> None:
        """Run a learner for the whole run, with a new process after each failure."""
        f, clock = self.setting.failures, self.world.clock
        while self.done() < 1.0:
            life_s = self._draw.expovariate(1.0 / f.every_s) if f else math.inf
            failed = await self._live(seat, lambda: self.done() >= 1.0, life_s)
            if not failed or f is None:
                break
            repair = _repair_s(f, self._draw)
            since = clock.time()
            slowest = self.setting.steps * max(_durations(self.setting))
            if since - self._began > STUCK * slowest:
                raise InputError(
                    f"{self.setting.name}: after {STUCK} times the time that its steps take, {self.done():.0%} of its "
                    "tokens are trained: learners fail before they have read their checkpoints over their links; let "
                    "them fail less often (every_s), or give them faster links (gbit_s)"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(repair):
                    await self._done.wait()
            seat.down.append((since, clock.time()))
        seat.here_s = clock.time() - self._began

    async def _visit(self, seat: _Seat) -> None:
        """Run a guest for its part of the run."""
        g, clock = self.setting.guests, self.world.clock
        assert g is not None, "a guest without an invitation"
        self._awaited.setdefault(g.come, asyncio.Event())
        await self._awaited[g.come].wait()
        since = clock.time()
        await self._live(seat, lambda: self.done() >= min(1.0, g.go), math.inf)
        seat.here_s = clock.time() - since

    async def _live(self, seat: _Seat, enough: Callable[[], bool], life_s: float) -> bool:
        """Run one process of a learner; return whether it failed."""
        s, f = self.setting, self.setting.failures
        own = f is None or f.moments == "own"
        name = seat.name if own or seat.lives == 0 else f"{seat.name}.{seat.lives}"
        process = self.world.process(seat.name, seat.lives)
        ports = self.world.ports(process, self._conditions(seat.order), self._conditions(seat.order))
        donors = await self._donors(ports, name) if f and f.moments in ("peer", "mean") and seat.lives else []
        times = Times()
        body = trainee.Trained(
            s,
            self.seed,
            order=seat.order if own else seat.order + 1000 * seat.lives,
            step_s=seat.step_s,
            draw=random.Random(f"{self.seed}/{name}/{seat.lives}"),
            progress=self.done,
            enough=enough,
            count=self._count,
            donors=donors if f and f.moments == "mean" else donors[:1],
        )

        def attached(boundary: Boundary) -> None:
            seat.boundary = boundary
            if seat.unsaved:
                seat.lost -= self._weigh(list(map(min, _local_tokens(boundary), seat.unsaved)))
                seat.unsaved = []

        checkpoint_s = math.inf if f is None else f.checkpoint_s
        task = process.start(
            learn(ports, name, body, times, attached=attached, adopt=s.adopt, checkpoint_s=checkpoint_s)
        )
        seat.lives += 1
        seat.times.append(times)
        timer: asyncio.Future[None] = asyncio.ensure_future(asyncio.sleep(life_s if math.isfinite(life_s) else 1e12))
        await asyncio.wait([task, timer], return_when=asyncio.FIRST_COMPLETED)
        failed = not task.done()
        if failed:
            process.kill()
            if seat.boundary is not None:
                seat.unsaved = _local_tokens(seat.boundary)
                seat.lost += self._weigh(seat.unsaved)
                seat.boundary = None
        else:
            timer.cancel()
            task.result()
        self._idle += body.idle_experts
        return failed

    def _weigh(self, tokens: Sequence[float]) -> float:
        """Return the tokens of the whole model that the given tokens of each fragment are equal to."""
        return sum(share * n for share, n in zip(self._run.shares, tokens, strict=True))

    async def _donors(self, ports: SimulatedPorts, name: str) -> list[Checkpoint]:
        """Return the checkpoints that `join` chooses from: those of healthy learners that fit, newest first."""
        log = Log(self._run, ports.store, ports.process.runtime)
        agent = LearnerAgent(log, ports.store, ports.bus, ports.process.runtime, name)
        model = trainee.build(self.setting, self.seed)
        optimizer = trainee.optimizer(self.setting, model)
        # This agent does not join, so it reads here which learners the log has merged recently.
        await agent.downlink.begin()
        judge = moments.DonorCheck(model, optimizer)
        found: list[Checkpoint] = []

        def keep(checkpoint: Checkpoint) -> str | None:
            if judge.fits(checkpoint) is None:
                found.append(checkpoint)
            return "the others too"

        await agent.donor(keep, judge.glance)
        return found

    # --- the row ------------------------------------------------------------------------------------------------------

    async def _row(self, seats: list[_Seat], wall: float, loss: float) -> Row:
        s = self.setting
        merged, participation, rounds = await self._read_log()
        processed = max(1, self.tokens)
        here = sum(seat.here_s for seat in seats)
        trained = sum(t.trained_s for seat in seats for t in seat.times)
        per_token = trained / processed
        lost = sum(seat.lost for seat in seats)
        extra = {"idle_experts": sum(self._idle) / len(self._idle)} if self._idle else {}
        extra["period"] = wall / min(_durations(s)) / max(1.0, rounds)
        return Row(
            setting=s.name,
            learners=s.learners,
            H=s.rules.sync_every,
            K=s.pace.quorum,
            seed=self.seed,
            tokens=self.tokens,
            val_loss=loss,
            goodput=goodput(trained, lost * per_token, here),
            uptime=1.0 - _all_down(seats, self._began, self._began + wall) / wall,
            participation=participation,
            up_bits_per_param=self._bits("updates"),
            down_bits_per_param=self._bits("values"),
            wall_virtual_s=wall,
            kept=merged / processed,
            extra=extra,
        )

    async def _read_log(self) -> tuple[float, float, float]:
        """Return the tokens that commits hold, weighted by fragments, the participation, and the commits per
        fragment."""
        ports = self.world.ports(self.world.process("reader"))
        log = Log(self._run, ports.store, ports.process.runtime)
        merged, headers = 0.0, []
        for p, share in enumerate(self._run.shares):
            async for commit in log.commits(p, 0):
                h = commit.header
                merged += share * sum(given.tokens for given in h.inputs)
                headers.append(h)
        return merged, LogSums(headers).participation or 0.0, len(headers) / len(self._run.shares)

    def _bits(self, kind: str) -> float:
        """Return the mean payload of stored updates or values in bits per parameter of their fragments."""
        payloads = parameters = 0
        for fragment in self._run.layout.fragments:
            for entry in self.world.objects.list(f"{kind}/{fragment.index:05d}/"):
                payloads += entry.size - payload_start(self.world.objects.get(entry.key))
                parameters += fragment.size
        return 8.0 * payloads / max(1, parameters)


def _local_tokens(boundary: Boundary) -> list[int]:
    """Return, by fragment, the tokens of local work that no capture holds: a process that fails loses them."""
    return [boundary.local_tokens(p) for p in range(len(boundary.slots))]


def _all_down(seats: list[_Seat], since: float, until: float) -> float:
    """Return the seconds in which no learner had a process."""
    edges = sorted({since, until, *(t for seat in seats for span in seat.down for t in span)})
    total = 0.0
    for a, b in itertools.pairwise(edges):
        middle = (a + b) / 2
        total += (b - a) * all(any(x <= middle < y for x, y in seat.down) for seat in seats)
    return total
