"""Joining a run: it is found or created, the model brought to its newest version, the agent's thread started."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from isthmus.agent.ports import TRUSTING, known_run
from isthmus.bus import default_bus
from isthmus.errors import InputError, RunMissing, Unavailable
from isthmus.format.layout import Spec
from isthmus.format.rules import CHECKPOINT_S, Adoption, FrozenCheck, Hyperparameters, Pace, Rules, named
from isthmus.format.signing import Signer
from isthmus.learner.checkpoint import Stateful
from isthmus.link.agent_thread import AgentThread
from isthmus.link.link import Link
from isthmus.log.creation import Seed, create_run
from isthmus.log.run import Run
from isthmus.log.trust import Trust, trust_of
from isthmus.runtime.urls import as_environment_says
from isthmus.sinks import Sink
from isthmus.store import EdgeStore, require_create_only

if TYPE_CHECKING:
    import torch
    from torch import nn

    from isthmus.link.group import Group
    from isthmus.torch.sharded import Sharded


START_S = 60.0
"""Reaching the run may take this long before joining gives up; each request fails much sooner. Writing version 0 of a
missing run is not reaching it: that takes as long as it takes."""

WARMUP_STEPS = 100


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
    frozen: str = FrozenCheck.CHECKED.value,
    steps: int = 0,
    data: Stateful | None = None,
    state: Mapping[str, Stateful] | None = None,
    hyperparameters: str = Hyperparameters.RESTORED.value,
    checkpoint_s: float = CHECKPOINT_S,
    warmup_steps: int = WARMUP_STEPS,
    sink: Sink | None = None,
    key: str | Path | Signer | None = None,
    owner: str | None = None,
    run_digest: str | None = None,
    insecure: bool = False,
) -> Link:
    """Join a run and bring the model to its newest global version.

    Discarded: the parameters that `model` has now, where the run has newer ones; later, with `overwrite`, the steps
    between a fragment's upload and the version that answers it (`isthmus status --ledger` counts their tokens); and
    what was trained after the newest checkpoint when the process is killed.

    Restored, under a name that was here before: parameters with local work, buffers, the optimizer's state, the step
    count, the place in `data` and all of `state`, from its newest checkpoint, which is of one step boundary; then newer
    versions are adopted as they would have been. What comes back and what does not: docs/design/learner.md. A new name
    in a run in flight takes the moments of a learner that is doing well, or warms up (`Link.rate`).

    Who waits: this call, for the store and at first for the bus, up to a minute. Training never does, unless the run's
    pace has a `lead`. The others wait for this learner's updates for the grace of a round, a step or so, and for its
    next word for as long as `Pace.silence_s`.

    Args:
        run: where the run lives: `s3://bucket/prefix` or a folder.
        model: any module; its trainable parameters must be those of the run (tied ones once, any of float32, bfloat16,
            float16). Frozen parameters must be the run's; buffers stay local. What `torch.compile` and
            `DataParallel` have wrapped is unwrapped. Where FSDP2 or tensor parallelism shard it over the ranks of a
            job, or `DistributedDataParallel` replicates it, all of them are one learner: each calls this alike.
        optimizer: the inner optimizer; its state is kept when a fragment is adopted.
        bus: `redis://host:port`; by default the embedded bus beside a run in a folder. Where it names no user, the
            commands' `ISTHMUS_BUS_USER` and `ISTHMUS_BUS_PASSWORD` (or `…_PASSWORD_FILE`) do.
        learner: this learner's name, unique in the run; the same name goes on where it stopped.
        create: with rules, or what makes rules from the model's tensors, a missing run is created from this model; of
            several creators one wins, the others adopt its run and its initial values. `Rules.suited` chooses what
            suits the model, `functools.partial(Rules.suited, sync_every=24)` all but what you name; `Rules(…)` is
            taken as it is, and must then be what a run that is there was created with.
        vectors: where this creates the run: patterns of names of tensors that `merge="iso"` leaves to RDA, such as
            `*.router.weight`. An output layer that is not tied to an embedding is one without being named.
        pace: overrides the run's pace here.
        adopt: `overwrite` (default), `blend` or `carry`: what happens to local work when a version arrives.
        frozen: `checked` (default): frozen parameters must be stored in the bytes of the run's, read once; `trusted`:
            nobody looks, as for a base that is offloaded or too large to be read at each start. A run that is created
            so asks nothing of those who join either.
        steps: how many steps this learner will train, for display; 0 where it is not known.
        data: a sampler or loader whose `state_dict` goes into checkpoints and comes back with them. It is read right
            after a step: it must then stand behind that step's batch. Without one, start at batch `steps_done`.
        state: other objects with `state_dict` and `load_state_dict` that go on with the learner, by names of your own:
            `{"schedule": scheduler, "scaler": scaler, "random": isthmus.RandomState()}`. What belongs to a step (such
            as `scheduler.step()`) comes before its `link.step`.
        hyperparameters: `restored` (default): a restart goes on with its checkpoint's learning rate, weight decay,
            betas, momentum and eps; `passed`: with those that the optimizer was made with this time.
        checkpoint_s: seconds between two checkpoints (optimizer, local work, counters, data position) in the store. A
            restart under the same name goes on at the newest one. The training thread is held only for the copy.
        sink: where training metrics go, such as `isthmus.sinks.TensorBoard(folder)`.
        warmup_steps: length of the warm-up of `Link.rate`, for a start with fresh moments into a run in flight.
        key: an OpenSSH Ed25519 private key that signs all that this learner writes and says; by default what
            `ISTHMUS_KEY` names. A run that this creates is then signed, and belongs to that key.
        owner: the fingerprint (`SHA256:…`) or public key of who must own the run; by default what `ISTHMUS_OWNER` says.
        run_digest: which run it must be: its digest in hexadecimal, or at least half of it; by default what
            `ISTHMUS_RUN_DIGEST` says.
        insecure: take part although nothing in the run is signed and its store or bus is on another machine.

    Raises:
        RunMissing: no run there and `create` is not given.
        LayoutMismatch: the model is not the run's; the message names the first difference.
        InputError: a bad name, URL or setting; a key that is no member's; a run that is not signed, on another machine;
            a model that is sharded in a way that is not known;
            ranks of a job that do not join alike.
        Unavailable, Denied: store or bus cannot be reached or used.
        RankLost: a rank of the job is gone.
    """
    from isthmus.link.follower import follow
    from isthmus.link.leader import Leader
    from isthmus.torch.sharded import Sharded

    if create is not None and not (isinstance(create, Rules) or callable(create)):
        raise InputError(
            f"create={create!r}: say what rules a missing run is created with, create=isthmus.Rules.suited"
        )
    if not checkpoint_s > 0 or warmup_steps < 0:
        raise InputError(f"checkpoint_s {checkpoint_s:g} must be more than 0, warmup_steps {warmup_steps} at least 0")
    frozen_check = named(FrozenCheck, frozen, "value of frozen=")
    bus = bus or default_bus(run)
    if bus is None:
        raise InputError(f"{run} is in a bucket: say which bus it uses, bus='redis://host:port'")
    bus = as_environment_says(bus, os.environ)
    trust = trust_of(key, owner, insecure, run_digest)
    settings = named(Hyperparameters, hyperparameters, "value of hyperparameters=")
    alike = [f"as {learner}", f"the run {run}"]
    group = _group(model, optimizer, data, state, settings, alike)
    if isinstance(group, Sharded):
        return Link(follow(group, run, trust.signer), warmup_steps)
    thread = AgentThread(run, bus, learner, adopt, steps, pace, checkpoint_s, sink, trust)
    with group.call("JOIN") as said:
        try:
            plan = _Seeding(run, bus, create, vectors, pace or Pace(), trust, group, thread, group.frozen(frozen_check))
            thread.start(plan.enter, partial(group.find_donor, thread), partial(group.assembled, thread))
            leader = Leader(thread, group, _bring_to_where_it_was(group, thread))
        except BaseException:
            group.loop.close()
            thread.abandon()
            raise
        said.words = msgspec.msgpack.encode(leader.joined())
    return Link(leader, warmup_steps)


def _group(
    model: "nn.Module",
    optimizer: "torch.optim.Optimizer",
    data: Stateful | None,
    state: Mapping[str, Stateful] | None,
    settings: Hyperparameters,
    alike: list[str],
) -> "Group | Sharded":
    """Return the ranks that train this model as one learner, at the one that leads; at the others, their share of it.

    `alike`: what all ranks have to agree on. Raises `InputError` on all ranks where the model or the optimizer of one
    cannot be taken.
    """
    from isthmus.link.group import ManyRanks, OneRank
    from isthmus.torch import device
    from isthmus.torch import model as torch_model
    from isthmus.torch.loop import Loop
    from isthmus.torch.ranks import ranks_of
    from isthmus.torch.sharded import Sharded

    ranks = ranks_of(model)
    model = torch_model.unwrapped(model)
    torch_model.check_optimizer(model, optimizer)
    where = device.device_of(model)
    stream = None if where is None else device.DeviceStream(where)
    if ranks is None:
        return OneRank(Loop(model, optimizer, data, state), stream, settings)
    with ranks.refusing():
        loop = Loop(model, optimizer, data, state)
    sharded = Sharded(loop, ranks, alike, stream, settings)
    return ManyRanks(sharded) if ranks.leads else sharded


@dataclass(frozen=True, slots=True)
class _Seeding:
    """How a run is found, and what it is created from where it is missing."""

    run: str
    bus: str
    create: Create | None
    vectors: Sequence[str]
    pace: Pace
    trust: Trust
    group: "Group"
    thread: AgentThread
    frozen: dict[str, bytes]

    async def enter(self, store: EdgeStore) -> Run:
        """Return the run, which is the model's. Agent's thread."""
        found = await reach_or_create(
            store, self.create, lambda rules: self.thread.on_training_thread(lambda: self._seed(rules)), self.trust
        )
        found.require(self._specs(), self.frozen)
        return found

    def _specs(self) -> list[Spec]:
        from isthmus.torch.model import specs_of

        return specs_of(self.group.loop.model, self.vectors)

    def _seed(self, create: Create) -> Seed:
        specs = self._specs()
        rules = create if isinstance(create, Rules) else create(specs)
        if not isinstance(rules, Rules):
            raise InputError(f"create={create!r} returned a {type(rules).__name__}: it must return isthmus.Rules")
        if self.trust.signer is None:
            self.trust.require_near(self.run, self.bus)
        values = self.group.values(self.thread)
        return Seed(specs, values, self.frozen, rules.check(), self.pace, signer=self.trust.signer)


def _bring_to_where_it_was(group: "Group", thread: AgentThread) -> str:
    """Bring model, optimizer and data to where the learner was, and the model to the newest version, and let the agent
    run; return where the moments came from (see `Link.moments`)."""
    own, loop = thread.agent.history.checkpoint, group.loop
    replica, arrays = group.placed(thread.run.layout)
    if own is not None and loop.copies.paths:
        # What the optimizer's state holds of the weights stands beside these; newer versions move both.
        for p, point in enumerate(own.points):
            replica.write(p, point.values)
    origin = group.restore(own, thread)
    thread.attach(replica, arrays, group.saver)
    if origin == "peer":
        loop.copies.become(list(loop.model.parameters()))
    return origin


async def reach_or_create(
    store: EdgeStore, create: Create | None, seed: Callable[[Create], Awaitable[Seed]], trust: Trust = TRUSTING
) -> Run:
    """Return the run at this store; with rules, or what chooses them, a missing one is created from the seed they make.

    Raises `Unavailable` where reading the run, or the check before creating one, takes longer than `START_S`; and what
    `known_run`, `require_create_only` and `create_run` raise.
    """
    try:
        async with asyncio.timeout(START_S):
            try:
                found = await known_run(store, trust.require)
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
