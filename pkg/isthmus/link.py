"""The front door for a training loop: `join` a run, call `step` after each optimizer step, `close` at the end.

    link = isthmus.join("s3://bucket/run", model, optimizer, bus="redis://host", learner="eu-1")
    for batch in loader:
        loss(batch).backward(); optimizer.step(); optimizer.zero_grad()
        link.step(tokens=batch.numel())
    link.close()

This is the outer shell, with a thread in which the agent runs on an event loop of its own.
"""

# ruff: noqa: TID251  (threads: this is their one place)
import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, SupportsFloat, SupportsInt

from isthmus.bus import default_bus
from isthmus.errors import InputError, IsthmusError, RunMissing, Unavailable, first_cause
from isthmus.health import Vitals
from isthmus.layout import Layout, Spec
from isthmus.learner import Boundary, LearnerAgent, Replica
from isthmus.learner.checkpoint import Checkpoint, Saver, Stateful
from isthmus.learner.step_arguments import loss_of, tokens_of
from isthmus.learner.summary import Summary
from isthmus.log.run import Run, Seed, create_run
from isthmus.metrics import LearnerMetrics
from isthmus.ports import Find, known_run, open_ports
from isthmus.records.fields import require_name
from isthmus.rules import CHECKPOINT_S, Adoption, Pace, Rules
from isthmus.sinks import CLOSE_S, Feeder, Sink
from isthmus.store import EdgeStore, require_create_only

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

FindDonor = Callable[[LearnerAgent], Awaitable[Checkpoint | None]]

START_S = 60.0
"""Reaching the run may take this long before joining gives up; each request fails much sooner. Writing version 0 of a
missing run is not reaching it: that takes as long as it takes."""

NEWS_S = 1.0
"""A learner that waits for a version looks up this often, whether there is news or not."""

DRAIN_S = 10.0
"""Uploads under way, and a last checkpoint, get this long at the end."""

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

    def __init__(self, shell: "_Shell", moments: str, warmup: int) -> None:
        self._shell = shell
        self._closed = False
        self._said_nonfinite = False
        self._warmup = warmup
        self._first_step = shell.agent.history.step
        self.moments = moments
        """Where the inner optimizer's state came from: `own` checkpoint, `peer` (another learner's), or `fresh`."""

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
        if self.moments != "fresh" or not any(self._shell.joined_at):
            return 1.0
        from isthmus.pytorch.moments import warmth

        return warmth(self.steps_done - self._first_step, self._warmup)

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
        if not self._closed:
            self._closed = True
            self._shell.close(done)
            found = self.summary
            logger.log(logging.WARNING if found.never_merged or found.diverged else logging.INFO, "%s", found)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(done=kind is None)


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
            float16). Frozen parameters must hold the run's values; buffers stay local. What `torch.compile`,
            `DataParallel` or a `DistributedDataParallel` of one process have wrapped is unwrapped.
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
        InputError: a bad name, URL or setting; a model that is sharded, or that several processes share.
        Unavailable, Denied: store or bus cannot be reached or used.
    """
    from isthmus.pytorch import model as torch_model
    from isthmus.pytorch import moments

    if create is not None and not (isinstance(create, Rules) or callable(create)):
        raise InputError(
            f"create={create!r}: say what rules a missing run is created with, create=isthmus.Rules.suited"
        )
    model = torch_model.unwrapped(model)
    torch_model.check_optimizer(model, optimizer)
    if not checkpoint_s > 0 or warmup_steps < 0:
        raise InputError(f"checkpoint_s {checkpoint_s:g} must be more than 0, warmup_steps {warmup_steps} at least 0")
    bus = bus or default_bus(run)
    if bus is None:
        raise InputError(f"{run} is in a bucket: say which bus it uses, bus='redis://host:port'")

    def seed(rules: Create) -> Seed:
        specs, values = torch_model.specs_of(model, vectors), torch_model.values_of(model)
        chosen = rules if isinstance(rules, Rules) else rules(specs)
        if not isinstance(chosen, Rules):
            raise InputError(f"create={rules!r} returned a {type(chosen).__name__}: it must return isthmus.Rules")
        return Seed(specs, values, torch_model.frozen_of(model), chosen.check(), pace or Pace())

    async def enter(store: EdgeStore) -> Run:
        found = await reach_or_create(store, create, seed)
        found.require(torch_model.specs_of(model), torch_model.frozen_of(model))
        return found

    async def find_donor(agent: LearnerAgent) -> Checkpoint | None:
        judge = moments.Judge(model, optimizer)  # gone with this call: it may be as large as the model
        return await agent.donor(judge.fits, judge.glance)

    shell = _Shell(run, bus, learner, adopt, steps, pace, checkpoint_s, sink)
    shell.start(enter, find_donor)
    try:
        origin = moments.restore(model, optimizer, data, shell.agent.history.checkpoint, shell.donor)
        shell.attach(lambda layout: torch_model.TorchReplica(model, layout), moments.TorchSaver(model, optimizer, data))
    except BaseException:
        shell.abandon()
        raise
    return Link(shell, origin, warmup_steps)


async def reach_or_create(store: EdgeStore, create: Create | None, seed: Callable[[Create], Seed]) -> Run:
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
    return await create_run(store, store.runtime, seed(create))


class _Shell:
    """The thread in which the agent lives, and the way in and out of it."""

    def __init__(
        self,
        run_url: str,
        bus_url: str,
        learner: str,
        adopt: str,
        steps: int,
        pace: Pace | None,
        checkpoint_s: float,
        sink: Sink | None,
    ) -> None:
        require_name("learner name", learner)
        self.feeder: Feeder | None = None
        self._sink = sink
        self.donor: Checkpoint | None = None
        self.joined_at: list[int] = []
        """The version of each fragment at joining."""
        self.run: Run
        self.agent: LearnerAgent
        self._urls = run_url, bus_url
        self._settings = learner, adopt, steps, pace, checkpoint_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._abandoned = False
        self.news = threading.Event()
        """Set whenever the agent has something for the training thread."""
        self._joined = threading.Event()
        self._attached = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, enter: Find, find_donor: FindDonor) -> None:
        """Start the thread; return once the run is joined, and a donor looked for where one is needed."""
        self._thread = threading.Thread(target=self._main, args=(enter, find_donor), name="isthmus-agent", daemon=True)
        self._thread.start()
        self._joined.wait()
        self.check()

    def attach(self, replica: Callable[[Layout], Replica], saver: Saver) -> None:
        """Bring the model to the newest values, or the local work on them, and let the agent run."""
        loop, agent = self._loop, self.agent
        assert loop is not None, "joined without a loop"

        def notify() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(agent.wake)

        agent.attach(replica(self.run.layout), notify, saver).news = self.news.set
        self._attached.set()

    def abandon(self) -> None:
        """Let the thread end: joining came to nothing after all."""
        self._abandoned = True
        self._attached.set()

    def check(self) -> None:
        """Raise what ended the agent, if anything did. What is raised on purpose says all in its message; only
        of what nobody expected is the way through the agent's thread worth seeing."""
        if isinstance(self._failure, IsthmusError):
            raise self._failure.with_traceback(None) from None
        if self._failure is not None:
            raise self._failure

    def close(self, done: bool) -> None:
        """Let the agent finish what is under way, for a while, then end the thread."""
        loop, thread = self._loop, self._thread
        if loop is not None and thread is not None and thread.is_alive() and not loop.is_closed():
            try:
                if self.agent.boundary is not None and math.isfinite(self._settings[4]):
                    self.agent.boundary.freeze()
                loop.call_soon_threadsafe(lambda: self.agent.drain(done=done))
                loop.call_soon_threadsafe(lambda: loop.call_later(DRAIN_S, self._give_up))
            except RuntimeError:
                return  # it ended in this very moment
            thread.join(DRAIN_S + 5.0 + CLOSE_S)
            self.agent.vitals.rest()

    def _give_up(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _main(self, enter: Find, find_donor: FindDonor) -> None:
        from isthmus.pytorch.model import keep_denormals

        try:
            keep_denormals()  # the pool's threads are started from this one
            asyncio.run(self._agent(enter, find_donor))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = first_cause(error)
        finally:
            # Known before the sink is waited for: a training must not go on without its agent.
            self._joined.set()
            if self.feeder is not None:
                self.feeder.close()

    async def _agent(self, enter: Find, find_donor: FindDonor) -> None:
        self._loop = asyncio.get_running_loop()
        run_url, bus_url = self._urls
        learner, adopt, steps, pace, checkpoint_s = self._settings
        started = self._loop.time()
        async with open_ports(run_url, bus_url, enter) as ports:
            self.run = ports.log.run
            self.agent = LearnerAgent(
                ports.log, ports.store, ports.bus, ports.runtime, learner,
                adopt=adopt, steps_target=steps, pace=pace, checkpoint_s=checkpoint_s,
            )  # fmt: skip
            # As long as it takes: values and a checkpoint of a large model are many bytes.
            await self.agent.join()
            self.joined_at = [known.version for known in self.agent.downlink.known]
            if self.agent.history.checkpoint is None and any(self.joined_at):
                self.donor = await find_donor(self.agent)
            history = self.agent.history
            logger.info(
                "%s joined %s for the %d. time: goes on after step %d (%d tokens lost), in %.2f s",
                learner,
                run_url,
                self.agent.incarnation,
                history.step,
                history.tokens_lost,
                self._loop.time() - started,
            )
            if self._sink is not None:
                self.feeder = Feeder(self._sink, self.agent.scalars)
            self._joined.set()
            await ports.runtime.offload(self._attached.wait)
            if not self._abandoned:
                await self.agent.run()
