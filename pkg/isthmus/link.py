"""The front door for a training loop: `join` a run, call `step` after each optimizer step, `close` at the end.

    link = isthmus.join("s3://bucket/run", model, optimizer, bus="redis://host", learner="eu-1")
    for batch in loader:
        loss(batch).backward(); optimizer.step(); optimizer.zero_grad()
        link.step(tokens=batch.numel())
    link.close()

In a torchrun job whose model is sharded or replicated, every rank makes the same calls.
"""

import asyncio
import logging
import math
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, SupportsFloat, SupportsInt

import msgspec

from isthmus.bus import default_bus
from isthmus.errors import InputError, RunMissing, Unavailable
from isthmus.health import Vitals
from isthmus.layout import Layout, Spec
from isthmus.learner import Boundary, LearnerAgent, Replica, parts
from isthmus.learner.checkpoint import Checkpoint, Stateful
from isthmus.learner.step_arguments import loss_of, tokens_of
from isthmus.learner.steward import Arrays
from isthmus.learner.summary import Summary
from isthmus.log.creation import Seed, create_run
from isthmus.log.run import Run, heard_run, told_run
from isthmus.metrics import LearnerMetrics
from isthmus.owners.asked import Peers, Spread, Told, interfaces
from isthmus.owners.served import serve
from isthmus.ports import Ports, known_run
from isthmus.rules import CHECKPOINT_S, Adoption, Pace, Rules
from isthmus.runtime import cores
from isthmus.shell import OwnerThread, Shell
from isthmus.sinks import Sink
from isthmus.store import EdgeStore, require_create_only

if TYPE_CHECKING:
    import torch
    from torch import nn

    from isthmus.pytorch.device import Lane
    from isthmus.pytorch.sharded import Sharded

logger = logging.getLogger(__name__)

START_S = 60.0
"""Reaching the run may take this long before joining gives up; each request fails much sooner. Writing version 0 of a
missing run is not reaching it: that takes as long as it takes."""

NEWS_S = 1.0
"""A learner that waits for a version looks up this often, whether there is news or not."""

WARMUP_STEPS = 100


class Link:
    """A learner's hold on a run. Made by `join`; used from the training thread only.

    `step` is the only place where the model changes under the loop: there fragments are copied out, at the cost of a
    copy each every H steps, and newer versions are copied in, two at a time at most. Whatever store and bus do, `step`
    returns; it raises only what training on could not mend. Everything else happens in a thread of its own, which
    compresses, sends, fetches and repeats while the loop computes.

    When the process dies, nothing that was merged is lost, and nobody else notices beyond a round's grace. Leave with
    `close`, or use it as a context manager: an exception then leaves the run as something that is not done.
    """

    def __init__(self, shell: Shell, moments: str, warmup: int, sharded: "Sharded | None" = None) -> None:
        self._shell = shell
        self._sharded = sharded
        self._closed = False
        self._said_nonfinite = False
        self._warmup = warmup
        self._first_step = shell.agent.history.step
        self.moments = moments
        """Where the inner optimizer's state came from: `own` checkpoint, `peer` (another learner's), or `fresh`."""

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for the learner; of a job of several ranks the first does. `metrics`, `vitals`,
        `versions` and `summary` are its own."""
        return True

    @property
    def run(self) -> Run:
        """The run: layout, rules, pace."""
        return self._shell.run

    @property
    def metrics(self) -> LearnerMetrics:
        """What this learner counts; `metrics.registry` is a Prometheus registry."""
        return self._shell.agent.metrics

    @property
    def vitals(self) -> Vitals:
        """Whether the agent behind this link is well; may be asked from any thread."""
        return self._shell.agent.vitals

    @property
    def steps_done(self) -> int:
        """Optimizer steps this learner's name has behind it, over all restarts: where the training loop goes on."""
        return self._boundary.step

    @property
    def rate(self) -> float:
        """Multiply the learning rate with this: it rises to 1 over the warm-up after a start with fresh moments into a
        run in flight, where the first steps of an Adam without a past are too long. Otherwise 1."""
        fresh_into_flight = self.moments == "fresh" and any(self._shell.joined_at)
        return _rate(fresh_into_flight, self.steps_done - self._first_step, self._warmup)

    @property
    def tokens_seen(self) -> int:
        """Tokens of those steps."""
        return self._boundary.tokens_seen

    @property
    def versions(self) -> list[int]:
        """The global version each fragment of the model is based on."""
        return [slot.base for slot in self._boundary.slots]

    @property
    def incarnation(self) -> int:
        """How often this name has joined the run, this time included."""
        return self._shell.agent.incarnation

    @property
    def summary(self) -> Summary:
        """What the stay came to: steps, versions, where the work went; `str` of it is one line. Whole after `close`."""
        return self._shell.agent.summary()

    @property
    def _boundary(self) -> Boundary:
        boundary = self._shell.agent.boundary
        assert boundary is not None, "a link exists only once it has joined"
        return boundary

    def step(self, tokens: SupportsInt, *, loss: SupportsFloat | None = None) -> None:
        """Report one optimizer step over this many tokens; call it right after `optimizer.step()`.

        Copies a few fragments out of the model and into it, and now and then what a checkpoint holds. A store or bus
        that is away does not hold it up. `loss` is shown by `status`; while it is not finite no checkpoint is written,
        for none could be gone on from. Both may be numbers of Python or NumPy, or tensors of one element; a tensor on
        a GPU is waited for.

        Raises `InputError` for a token count that is no whole number of at least one and for a loss that is no number,
        and whatever ended the agent for good: `Denied` (credentials were revoked) or `Fenced` (this name was started
        again elsewhere), for example.
        """
        tokens, loss = tokens_of(tokens), loss_of(loss)
        if self._closed:
            raise InputError("the link is closed: join again under the same name to go on")
        with self._all_ranks("STEP", self.steps_done + 1, tokens):
            self._shell.check()
            with self.metrics.hold_seconds.time():
                self._boundary.after_step(tokens, loss)
            while self._boundary.overdue():  # only where the run's pace has a lead
                self._shell.news.wait(NEWS_S)
                self._shell.news.clear()
                self._shell.check()
                self._boundary.wait_on()
        self.metrics.steps.inc()
        self.metrics.tokens.inc(tokens)
        if loss is not None and math.isfinite(loss):
            self.metrics.loss.set(loss)
            self._said_nonfinite = False
        elif loss is not None:
            self.metrics.losses_nonfinite.inc()
            if not self._said_nonfinite:
                self._said_nonfinite = True
                logger.warning(
                    "%s: the loss of step %d is %s: training goes on; differences that are not finite are not sent, "
                    "and no checkpoint is written until it is a number again",
                    self._shell.agent.name, self.steps_done, loss,
                )  # fmt: skip
        if self._shell.feeder is not None:
            values = {"train/tokens": float(self.tokens_seen)} | ({} if loss is None else {"train/loss": loss})
            self._shell.feeder.note(self.steps_done, values)

    def let_go(self) -> None:
        """Wait for no version any more; only a run whose pace has a `lead` ever waits.

        For signal handlers: a loop that stands at its boundary goes on within a second and can then be ended.
        """
        self._boundary.let_go()

    def close(self, *, done: bool = True) -> None:
        """Announce what is under way, write a last checkpoint and leave the run; then sum up on the log.

        `done` says that this learner has trained all its steps. Call it between two steps, as `step`. A learner of
        whose work nothing was merged yet stays for up to five seconds to hear of it, and leaves with a warning if it
        does not.
        """
        self._leave(done, keep=True)

    def _leave(self, done: bool, keep: bool) -> None:
        if not self._closed:
            self._closed = True
            # Ranks of which one fails are not at one step: no checkpoint can be taken of them.
            with self._all_ranks("CLOSE", self.steps_done) if keep else nullcontext():
                self._shell.close(done, keep)
            found = self.summary
            logger.log(logging.WARNING if found.never_merged or found.diverged else logging.INFO, "%s", found)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(done=kind is None, keep=kind is None or self._sharded is None)

    def _all_ranks(self, call: str, number: int, tokens: int = 0) -> AbstractContextManager[object]:
        """Meet the other ranks of this learner, if it has any; when all is done here, let them go on."""
        return nullcontext() if self._sharded is None else self._sharded.call(call, number, tokens)


def _rate(fresh_into_flight: bool, steps: int, warmup: int) -> float:
    if not fresh_into_flight:
        return 1.0
    from isthmus.pytorch.moments import warmth

    return warmth(steps, warmup)


class _Joined(msgspec.Struct, frozen=True):
    """What the first rank says to the others when it has joined."""

    step: int
    tokens_seen: int
    moments: str
    fresh_into_flight: bool
    incarnation: int


class RankLink(Link):
    """What a `Link` is to the ranks of a learner that do not speak for it: they do with it as they are told."""

    def __init__(
        self, sharded: "Sharded", run: Run, joined: _Joined, warmup: int, threads: Sequence[OwnerThread]
    ) -> None:
        self._sharded = sharded
        self._threads = threads
        self._run = run
        self._joined = joined
        self._step, self._tokens_seen = joined.step, joined.tokens_seen
        self._closed = False
        self._warmup = warmup
        self.moments = joined.moments

    @property
    def speaks(self) -> bool:  # noqa: D102
        return False

    @property
    def run(self) -> Run:  # noqa: D102
        return self._run

    @property
    def steps_done(self) -> int:  # noqa: D102
        return self._step

    @property
    def tokens_seen(self) -> int:  # noqa: D102
        return self._tokens_seen

    @property
    def incarnation(self) -> int:  # noqa: D102
        return self._joined.incarnation

    @property
    def rate(self) -> float:  # noqa: D102
        return _rate(self._joined.fresh_into_flight, self._step - self._joined.step, self._warmup)

    @property
    def metrics(self) -> LearnerMetrics:  # noqa: D102
        raise self._elsewhere("metrics")

    @property
    def vitals(self) -> Vitals:  # noqa: D102
        raise self._elsewhere("vitals")

    @property
    def versions(self) -> list[int]:  # noqa: D102
        raise self._elsewhere("versions")

    @property
    def summary(self) -> Summary:  # noqa: D102
        raise self._elsewhere("summary")

    def _elsewhere(self, what: str) -> InputError:
        return InputError(f"link.{what} is with the rank that speaks for the learner: ask where link.speaks is true")

    def step(self, tokens: SupportsInt, *, loss: SupportsFloat | None = None) -> None:  # noqa: D102
        tokens, _ = tokens_of(tokens), loss_of(loss)
        if self._closed:
            raise InputError("the link is closed: join again under the same name to go on")
        with self._all_ranks("STEP", self._step + 1, tokens):
            self._step += 1
            self._tokens_seen += tokens

    def let_go(self) -> None:
        """Wait as long as the rank that speaks does."""

    def _leave(self, done: bool, keep: bool) -> None:
        if not self._closed:
            self._closed = True
            if keep:
                with self._all_ranks("CLOSE", self._step):
                    pass
            for thread in self._threads:
                if keep:
                    thread.close()
                else:
                    thread.stop()


Create = Rules | Callable[[Sequence[Spec]], Rules]
"""The rules of a run that is to be created, or what chooses them by the model's tensors."""


def join(
    run: str,
    model: "nn.Module",
    optimizer: "torch.optim.Optimizer",
    *,
    bus: str | None = None,
    learner: str,
    create: Create | None = None,
    vectors: Sequence[str] = (),
    pace: Pace | None = None,
    adopt: str = Adoption.OVERWRITE.value,
    steps: int = 0,
    data: Stateful | None = None,
    checkpoint_s: float = CHECKPOINT_S,
    warmup_steps: int = WARMUP_STEPS,
    sink: Sink | None = None,
) -> Link:
    """Join a run and bring the model to its newest global version.

    Discarded: the parameters that `model` has now, where the run has newer ones; later, with `overwrite`, the steps
    between a fragment's upload and the version that answers it (`isthmus status --ledger` counts their tokens); and
    what was trained after the newest checkpoint when the process is killed.

    Restored, under a name that was here before: parameters with local work, the optimizer's state, the step count and
    the place in `data`, from its newest checkpoint; then newer versions are adopted as they would have been. A new name
    in a run in flight takes the moments of a learner that is doing well, or warms up (`Link.rate`).

    Who waits: this call, for the store and at first for the bus, up to a minute. Training never does, unless the run's
    pace has a `lead`. The others wait for this learner's updates for the grace of a round, a step or so, and for its
    next word for as long as `Pace.silence_s`.

    Args:
        run: where the run lives: `s3://bucket/prefix` or a folder.
        model: any module; its trainable parameters must be those of the run (tied ones once, any of float32, bfloat16,
            float16). Frozen parameters must hold the run's values; buffers stay local. What `torch.compile` and
            `DataParallel` have wrapped is unwrapped. Where FSDP2 or tensor parallelism shard it over the ranks of a
            job, or `DistributedDataParallel` replicates it, all of them are one learner: each calls this alike.
        optimizer: the inner optimizer; its state is kept when a fragment is adopted.
        bus: `redis://host:port`; by default the embedded bus beside a run in a folder.
        learner: this learner's name, unique in the run; the same name goes on where it stopped.
        create: with rules, or what makes rules from the model's tensors, a missing run is created from this model; of
            several creators one wins, the others adopt its run and its initial values. `Rules.suited` chooses what
            suits the model, `functools.partial(Rules.suited, sync_every=24)` all but what you name; `Rules(…)` is
            taken as it is, and must then be what a run that is there was created with.
        vectors: where this creates the run: patterns of names of tensors that `merge="iso"` leaves to RDA, such as
            `*.router.weight`. An output layer that is not tied to an embedding is one without being named.
        pace: overrides the run's pace here.
        adopt: `overwrite` (default), `blend` or `carry`: what happens to local work when a version arrives.
        steps: how many steps this learner will train, for display; 0 where it is not known.
        data: a sampler or loader whose `state_dict` goes into checkpoints and comes back with them. It is read right
            after a step: it must then stand behind that step's batch. Without one, start at batch `steps_done`.
        checkpoint_s: seconds between two checkpoints (optimizer, local work, counters, data position) in the store. A
            restart under the same name goes on at the newest one. The training thread is held only for the copy.
        sink: where training metrics go, such as `isthmus.sinks.TensorBoard(folder)`.
        warmup_steps: length of the warm-up of `Link.rate`, for a start with fresh moments into a run in flight.

    Raises:
        RunMissing: no run there and `create` is not given.
        LayoutMismatch: the model is not the run's; the message names the first difference.
        InputError: a bad name, URL or setting; a model that is sharded in a way that is not known;
            ranks of a job that do not join alike.
        Unavailable, Denied: store or bus cannot be reached or used.
        RankLost: a rank of the job is gone.
    """
    from isthmus.pytorch import device, moments
    from isthmus.pytorch import model as torch_model
    from isthmus.pytorch.ranks import ranks_of
    from isthmus.pytorch.sharded import Sharded

    if create is not None and not (isinstance(create, Rules) or callable(create)):
        raise InputError(
            f"create={create!r}: say what rules a missing run is created with, create=isthmus.Rules.suited"
        )
    if not checkpoint_s > 0 or warmup_steps < 0:
        raise InputError(f"checkpoint_s {checkpoint_s:g} must be more than 0, warmup_steps {warmup_steps} at least 0")
    bus = bus or default_bus(run)
    if bus is None:
        raise InputError(f"{run} is in a bucket: say which bus it uses, bus='redis://host:port'")
    ranks = ranks_of(model)
    model = torch_model.unwrapped(model)
    torch_model.check_optimizer(model, optimizer)
    specs = torch_model.specs_of(model, vectors)
    sharded = None
    if ranks is not None:
        sharded = Sharded(model, optimizer, data, ranks, [f"as {learner}", f"the run {run}"])
        if not ranks.leads:
            return _follow(sharded, warmup_steps, run)

    def seed(rules: Create) -> Seed:
        chosen = rules if isinstance(rules, Rules) else rules(specs)
        if not isinstance(chosen, Rules):
            raise InputError(f"create={rules!r} returned a {type(chosen).__name__}: it must return isthmus.Rules")
        values = torch_model.values_of(model) if sharded is None else sharded.values(specs)
        return Seed(specs, values, frozen, chosen.check(), pace or Pace())

    async def enter(store: EdgeStore) -> Run:
        found = await reach_or_create(store, create, lambda rules: shell.on_training_thread(lambda: seed(rules)))
        found.require(specs, frozen)
        return found

    async def find_donor(agent: LearnerAgent) -> Checkpoint | None:
        # Gone with this call: it may be as large as the model.
        if sharded is None:
            judge = moments.Judge(model, optimizer)
            return await agent.donor(judge.fits, judge.glance)
        judge = moments.Judge(model, optimizer, sharded.tried)  # all ranks step: from the training thread
        return await agent.donor(
            lambda found: shell.ask_training_thread(lambda: judge.fits(found)),
            lambda header: shell.ask_training_thread(lambda: judge.glance(header)),
        )

    @asynccontextmanager
    async def spread(ports: Ports) -> AsyncIterator[Spread | None]:
        if sharded is None:
            yield None
            return
        # Every rank that owns fragments comes to the first one, from a thread of its own.
        ranks, found = sharded.ranks, ports.log.run
        owner = ranks.owners(len(found.layout.fragments))
        secret = (ports.runtime.new_id() + ports.runtime.new_id()).encode()
        peers = Peers(range(1, ranks.size), secret)
        alone = len(set(ranks.nodes)) == 1
        host, names = interfaces(alone, os.environ.get("MASTER_ADDR"), socket.gethostname())
        async with peers.listening(host):
            told = Told(told_run(found), owner, [(name, peers.port) for name in names], secret)
            words = msgspec.msgpack.encode(told)
            await shell.on_training_thread(lambda: sharded.place(found.layout, owner, peers, words))
            await peers.complete()
            yield Spread(peers, owner)

    where = device.device_of(model) if sharded is None else None
    lane = None if where is None else device.Lane(where)
    shell = Shell(run, bus, learner, adopt, steps, pace, checkpoint_s, sink)
    with nullcontext() if sharded is None else sharded.call("JOIN") as said:
        frozen = torch_model.frozen_of(model) if sharded is None else sharded.frozen()
        shell.start(enter, find_donor, spread, None if lane is None else partial(device.steward, lane))
        try:
            own = shell.agent.history.checkpoint
            if sharded is None:
                origin = moments.restore(model, optimizer, data, own, shell.donor)
                saver = moments.TorchSaver(model, optimizer, data)
                shell.attach(partial(_replica, model, lane), saver)
            else:
                sharded.fetch = lambda *where: shell.ask_agent(lambda log: parts.read(log, *where))
                origin = sharded.restore(own, shell.donor)
                shell.attach(lambda _: (sharded, sharded), sharded)
        except BaseException:
            shell.abandon()
            raise
        link = Link(shell, origin, warmup_steps, sharded)
        if said is not None:
            fresh = origin == "fresh" and any(shell.joined_at)
            joined = _Joined(link.steps_done, link.tokens_seen, origin, fresh, link.incarnation)
            said.words = msgspec.msgpack.encode(joined)
    return link


def _replica(model: "nn.Module", lane: "Lane | None", layout: Layout) -> tuple[Replica, Arrays | None]:
    from isthmus.pytorch.device import DeviceArrays
    from isthmus.pytorch.model import TorchReplica

    if lane is None:
        return TorchReplica(model, layout), None
    there = DeviceArrays(model, layout, lane)
    return there, there


def _follow(sharded: "Sharded", warmup: int, url: str) -> RankLink:
    """Join as a rank that does not speak."""
    run: list[Run] = []
    threads: list[OwnerThread] = []

    def layout_of(words: bytes) -> tuple[Layout, Sequence[int]]:
        told = msgspec.msgpack.decode(words, type=Told)
        run.append(heard_run(told.run))
        rank, nodes = sharded.ranks.order, sharded.ranks.nodes
        crew = max(1, cores() // nodes.count(nodes[rank]))
        thread = OwnerThread(partial(serve, url, run[0], sharded.shelf, rank, told.addresses, told.secret, crew))
        threads.append(thread)
        sharded.fetch = lambda *where: thread.ask(lambda log: parts.read(log, *where))
        return run[0].layout, told.owner

    try:
        with sharded.call("JOIN", layout_of=layout_of) as said:
            pass
    except BaseException:
        for thread in threads:
            thread.stop()
        raise
    return RankLink(sharded, run[0], msgspec.msgpack.decode(said.words, type=_Joined), warmup, threads)


async def reach_or_create(store: EdgeStore, create: Create | None, seed: Callable[[Create], Awaitable[Seed]]) -> Run:
    """Return the run at this store; with rules, or what chooses them, a missing one is created from the seed they make.

    Raises `Unavailable` where reading the run, or the check before creating one, takes longer than `START_S`; and what
    `known_run`, `require_create_only` and `create_run` raise.
    """
    try:
        async with asyncio.timeout(START_S):
            try:
                found = await known_run(store)
            except RunMissing as missing:
                if create is None or missing.near:  # never create one around another
                    raise
                await require_create_only(store.at_start, store.runtime)
            else:
                if isinstance(create, Rules):
                    found.require_rules(create.check())
                return found
    except TimeoutError:
        raise Unavailable(f"{store.url}: not reached within {START_S:g} s") from None
    return await create_run(store, store.runtime, await seed(create))
