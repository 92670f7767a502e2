"""Joining a run: find or create it, bring the model to its newest version, and start the agent's thread."""

import asyncio
import logging
import os
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from isthmus.agent.ports import TRUSTING, known_run
from isthmus.bus import default_bus, default_pace, require_bus
from isthmus.errors import BucketMissing, Denied, InputError, RunMissing, Unavailable
from isthmus.format.layout import Spec
from isthmus.format.rules import CHECKPOINT_S, Adoption, FrozenCheck, Hyperparameters, Pace, Rules, named
from isthmus.format.signing import Signer
from isthmus.learner.checkpoint import Stateful
from isthmus.learner.manifest import MANIFEST, statement
from isthmus.link.agent_thread import AgentThread
from isthmus.link.link import Link
from isthmus.log.creation import Seed, create_or_find
from isthmus.log.run import Run
from isthmus.log.trust import Trust, trust_of
from isthmus.runtime import log_lines
from isthmus.runtime.urls import Place, as_environment_says
from isthmus.sinks import Sink
from isthmus.store import EdgeStore, endpoint_of, make_bucket, require_create_only
from isthmus.wording import an

if TYPE_CHECKING:
    import torch
    from torch import nn

    from isthmus.link.group import Group
    from isthmus.torch.sharded import Sharded


logger = logging.getLogger(__name__)

START_S = 60.0
"""Reaching the run may take this many seconds before joining gives up; each request fails much sooner. The time limit
does not include writing version 0 of a missing run."""

WARMUP_STEPS = 100


T = TypeVar("T")

Create = Rules | Callable[[Sequence[Spec]], Rules]
"""The rules of a run that is to be created, or a function that chooses them by the model's tensors."""


def join(
    run: str | os.PathLike[str],
    model: "nn.Module",
    optimizer: "torch.optim.Optimizer",
    *,
    bus: str | None = None,
    learner: str | None = None,
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
    manifest: str | Path | Mapping[str, Any] | None = None,
    takeover: bool = False,
) -> Link:
    """Join a run and bring the model to its newest global version.

    If the run has newer parameters, those that `model` has now are discarded. Later, with `overwrite`, a new version of
    a fragment discards the steps since the fragment's upload (`isthmus status --ledger` counts their tokens). If the
    process is killed, everything that it trained after its newest checkpoint is lost.

    A name that was in the run before resumes from its newest checkpoint, which belongs to one step boundary. This
    restores the parameters with local work, the buffers, the optimizer's state, the step count, the place in `data` and
    all of `state`. Then newer versions are adopted as they would have been. docs/design/learner.md says what is
    restored and what is not. A new name in a run under way takes the moments of a healthy learner, or warms up
    (`Link.rate`).

    If the program configures no logging, what Isthmus logs goes to stderr from level INFO on.

    This call waits for the store, and at first for the bus, for up to a minute. Training never waits, unless the run's
    pace has a `lead`. A round waits for this learner's updates for its grace, about a step. It does not wait for a
    learner that has been silent for `Pace.silence_s`.

    Args:
        run: the run's location: `s3://bucket/prefix` or a folder, which may be a `Path`.
        model: any module; its trainable parameters must be those of the run (tied ones once; float32, bfloat16 or
            float16). Frozen parameters must be the run's; buffers stay local. Wrappers of `torch.compile` and
            `DataParallel` are removed. If FSDP2 or tensor parallelism shard the model over the ranks of a job, or
            `DistributedDataParallel` replicates it, all these ranks are one learner: each makes the same call.
        optimizer: the inner optimizer; its state is kept when a fragment is adopted.
        bus: `redis://host:port`; by default the value of `ISTHMUS_BUS`, else `store:` for a run in a bucket (messages
            are objects there), and the embedded bus beside a run in a folder.
            If the URL names no user, `ISTHMUS_BUS_USER` and `ISTHMUS_BUS_PASSWORD` (or `…_PASSWORD_FILE`) are used, as
            by the commands.
        learner: this learner's name, unique in the run; by default the value of `ISTHMUS_LEARNER`. A process that joins
            under the same name later goes on where the name stopped.
        create: rules, or a function that makes rules from the model's tensors: a missing run is created from this
            model, in a bucket of S3 with its bucket. If several processes create it, one wins, and the others adopt its
            run and its initial values. `Rules.suited` chooses rules that suit the model;
            `functools.partial(Rules.suited, sync_every=24)` chooses all but those you name. `Rules(…)` is taken as it
            is, and an existing run must have been created with it.
        vectors: if this call creates the run: patterns of names of tensors that `merge="iso"` merges by RDA, such as
            `*.router.weight`. An output layer that is not tied to an embedding needs no pattern.
        pace: overrides the run's pace for this learner.
        adopt: `overwrite` (default), `blend` or `carry`: what happens to local work when a version arrives.
        frozen: `checked` (default): frozen parameters must have the same bytes as the run's and are read once;
            `trusted`: they are not checked, for a base that is offloaded or too large to be read at each start. If the
            run was created with `trusted`, they are not checked at learners that join it either.
        steps: how many steps this learner will train, for display; 0 if that is not known.
        data: a sampler or loader whose `state_dict` goes into checkpoints and is restored from them. It is read right
            after a step, when it must stand behind that step's batch. Without it, start at batch `steps_done`.
        state: other objects with `state_dict` and `load_state_dict` that are saved and restored with the learner, by
            names that you choose: `{"schedule": scheduler, "scaler": scaler, "random": isthmus.RandomState()}`. Calls
            that belong to a step (such as `scheduler.step()`) come before its `link.step`.
        hyperparameters: `restored` (default): a restart uses its checkpoint's learning rate, weight decay, betas,
            momentum and eps; `passed`: it uses those that the optimizer was made with this time, and a schedule in
            `state` those that the schedule was made with, at its place.
        checkpoint_s: seconds between two checkpoints (optimizer, local work, counters, data position) in the store. A
            restart under the same name resumes from the newest one. The training thread only waits for the copy.
        sink: where training metrics go, such as `isthmus.sinks.TensorBoard(folder)`.
        warmup_steps: length of the warm-up of `Link.rate`, for a start with fresh moments in a run under way.
        key: an OpenSSH Ed25519 private key that signs everything that this learner writes and publishes; by default the
            one that `ISTHMUS_KEY` names. A run that this call creates is then signed, and this key owns it.
        owner: the fingerprint (`SHA256:…`) or public key that the run's owner must have; by default the value of
            `ISTHMUS_OWNER`.
        run_digest: which run it must be: its digest in hexadecimal, or at least the first half; by default the value of
            `ISTHMUS_RUN_DIGEST`.
        insecure: take part even if nothing in the run is signed and its store or bus is on another machine.
        manifest: what this learner trains and on what, as a TOML file or a mapping (docs/your-loop.md has the fields);
            by default the file that `ISTHMUS_MANIFEST` names. Its digests are signed and go into the run; no file does.
        takeover: end another process that still trains under this name. Otherwise this call raises an error then.

    Raises:
        RunMissing: there is no run, and `create` is not given.
        LayoutMismatch: the model is not the run's; the message names the first difference.
        InputError: a bad name, URL or setting; a name under which another process trains; a key that does not belong to
            a member; a run on another machine that is not signed; a model that is sharded in an unknown way; ranks of a
            job that do not make the same call.
        Unavailable, Denied: store or bus cannot be reached or used.
        RankLost: a rank of the job is gone.
    """
    import torch
    from torch import nn

    from isthmus.link.follower_rank import follow
    from isthmus.link.leader import Leader
    from isthmus.torch.sharded import Sharded

    run = _given("run", os.fspath(run) if isinstance(run, os.PathLike) else run, str, "a URL or a folder")
    _given("model", model, nn.Module, "the module itself")
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        _given("optimizer", optimizer, torch.optim.Optimizer, "an optimizer of the model's parameters")
    for name, text in {"bus": bus, "learner": learner, "owner": owner, "run_digest": run_digest}.items():
        _given(name, text, str | None, "a text")
    steps = int(_given("steps", steps, Integral, "a whole number"))
    warmup_steps = int(_given("warmup_steps", warmup_steps, Integral, "a whole number"))
    checkpoint_s = float(_given("checkpoint_s", checkpoint_s, Real, "seconds"))
    _given("pace", pace, Pace | None, "an isthmus.Pace")
    _given("state", state, Mapping | None, 'a mapping by names of your own, such as {"schedule": scheduler}')
    if isinstance(create, type):
        raise InputError(f"join(create={create.__name__}): pass isthmus.Rules.suited, or rules: isthmus.Rules(…)")
    if create is not None and not (isinstance(create, Rules) or callable(create)):
        raise InputError(
            f"create={create!r}: pass the rules of a run to be created, such as create=isthmus.Rules.suited"
        )
    if not checkpoint_s > 0 or warmup_steps < 0:
        raise InputError(f"checkpoint_s {checkpoint_s:g} must be more than 0, warmup_steps {warmup_steps} at least 0")
    frozen_check = named(FrozenCheck, frozen, "value of frozen=")
    log_lines.show()
    learner = learner_name(learner)
    bus = bus or os.environ.get("ISTHMUS_BUS") or default_bus(run)
    require_bus(bus)
    bus = as_environment_says(bus, os.environ)
    trust = trust_of(key, owner, insecure, run_digest)
    manifest = os.environ.get(MANIFEST) or None if manifest is None else manifest
    stated = None if manifest is None else statement(manifest, partial(_accelerators, model))
    settings = named(Hyperparameters, hyperparameters, "value of hyperparameters=")
    alike = [f"as {learner}", f"the run {run}"]
    before, theirs = _OPEN.get(model, (None, ""))
    if before is not None and (still := before()) is not None and not still.closed:
        raise InputError(f"this model has an open link already, of learner {theirs}: call its close() first")
    group = _group(model, optimizer, data, state, settings, alike)
    if isinstance(group, Sharded):
        return _opened(Link(follow(group, run, trust.signer), warmup_steps), model, learner)
    thread = AgentThread(run, bus, learner, adopt, steps, pace, checkpoint_s, sink, trust, stated, takeover)
    with group.call("JOIN") as said:
        try:
            pace = pace or default_pace(bus, run)
            plan = _Seeding(run, bus, create, vectors, pace, trust, group, thread, group.frozen(frozen_check))
            thread.start(plan.enter, partial(group.find_donor, thread), partial(group.assembled, thread))
            leader = Leader(thread, group, _bring_to_where_it_was(group, thread))
        except BaseException:
            group.loop.close()
            thread.abandon()
            raise
        said.words = msgspec.msgpack.encode(leader.joined())
    return _opened(Link(leader, warmup_steps), model, learner)


_OPEN: "weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Link], str]]" = weakref.WeakKeyDictionary()
"""By model, the link that it was last joined with, and the learner. Two open links would write into one model."""


def _opened(link: Link, model: "nn.Module", learner: str) -> Link:
    _OPEN[model] = weakref.ref(link), learner
    return link


def _given(name: str, value: T, kind: Any, what: str) -> T:
    """Return an argument of `join`. Raises `InputError` if it is of another type."""
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    shown = f"={value!r}" if isinstance(value, str | int | float) else ""
    raise InputError(f"join({name}{shown}): pass {what}, not {an(type(value).__name__)}")


def learner_name(given: str | None) -> str:
    """Return the name that a program gives its learner, or the environment's. Raises `InputError`."""
    if name := os.environ.get("ISTHMUS_LEARNER", "") if given is None else given:
        return name
    raise InputError('the learner has no name: pass learner="…", unique in the run, or set ISTHMUS_LEARNER')


def _accelerators(model: "nn.Module") -> str:
    """Return the number and the names of this machine's GPUs; empty if the model lies on none."""
    import torch

    if not any(p.is_cuda for p in model.parameters()):
        return ""
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return ", ".join(f"{count} {name}" for name, count in names.items())


def _group(
    model: "nn.Module",
    optimizer: "torch.optim.Optimizer",
    data: Stateful | None,
    state: Mapping[str, Stateful] | None,
    settings: Hyperparameters,
    alike: list[str],
) -> "Group | Sharded":
    """Return the ranks that train this model as one learner; on a rank that follows, its share of the model.

    `alike`: the facts on which all ranks must agree. Raises `InputError` on all ranks if the model or the optimizer of
    one rank cannot be used.
    """
    from isthmus.link.group import ManyRanks, OneRank
    from isthmus.torch import device
    from isthmus.torch import model as torch_model
    from isthmus.torch.loop import Loop
    from isthmus.torch.ranks import ranks_of
    from isthmus.torch.sharded import Sharded

    ranks = ranks_of(model)
    model = torch_model.unwrapped(model)
    torch_model.require_numbers(model)
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
    """How the run is found and, if it is missing, what it is created from."""

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
        """Return the run, after checking that it fits the model. Agent's thread."""
        try:
            found = await self._found(store)
        except BucketMissing as missing:
            if self.create is None:
                raise
            self._require_may_create()
            place = Place.of(self.run)
            try:
                made = await make_bucket(place, store.runtime)
            except Denied as error:
                raise Denied(f"{missing}; join could not create it: {error}") from None
            if made:  # else another learner was quicker
                logger.warning(
                    "created the bucket %s at %s, which did not exist, for a new run %s: if that is a mistyped "
                    "address, stop this learner, correct it, and delete the bucket",
                    place.authority, endpoint_of(self.run), self.run,
                )  # fmt: skip
            found = await self._found(store)
        found.require(self._specs(), self.frozen)
        return found

    async def _found(self, store: EdgeStore) -> Run:
        return await reach_or_create(
            store, self.create, lambda rules: self.thread.on_training_thread(lambda: self._seed(rules)), self.trust
        )

    def _require_may_create(self) -> None:
        if self.trust.signer is None:
            self.trust.require_near(self.run, self.bus)

    def _specs(self) -> list[Spec]:
        from isthmus.torch.model import specs_of

        return specs_of(self.group.loop.model, self.vectors)

    def _seed(self, create: Create) -> Seed:
        specs = self._specs()
        rules = create if isinstance(create, Rules) else create(specs)
        if not isinstance(rules, Rules):
            raise InputError(f"create={create!r} returned {an(type(rules).__name__)}: it must return isthmus.Rules")
        self._require_may_create()
        values = self.group.values(self.thread)
        return Seed(specs, values, self.frozen, rules.check(), self.pace, signer=self.trust.signer)


def _bring_to_where_it_was(group: "Group", thread: AgentThread) -> str:
    """Restore model, optimizer and data, bring the model to the newest version, and let the agent run.

    Return where the moments came from (see `Link.moments`).
    """
    own, loop = thread.agent.history.checkpoint, group.loop
    replica, arrays = group.placed(thread.run.layout)
    if own is not None and loop.copies.paths:
        # Copies of the weights in the optimizer's state belong to these values. Newer versions then move both.
        for p, point in enumerate(own.points):
            replica.write(p, point.values)
    origin = group.restore(own, thread)
    thread.attach(replica, arrays, group.saver)
    if origin == "peer":
        loop.copies.become(list(loop.model.parameters()))
    return origin


def _asked_otherwise(create: Create | None, run: Run) -> str:
    """Return which rules a partial of `Rules.suited` names that differ from the run's; else nothing."""
    named = create.keywords if isinstance(create, partial) and create.func == Rules.suited else {}
    theirs = {name: getattr(run.rules, name, value) for name, value in named.items()}
    return ", ".join(
        f"{name} is {theirs[name]} there, not {value}" for name, value in named.items() if theirs[name] != value
    )


async def reach_or_create(
    store: EdgeStore, create: Create | None, seed: Callable[[Create], Awaitable[Seed]], trust: Trust = TRUSTING
) -> Run:
    """Return the run at this store. If it is missing and `create` is given, create it from the seed.

    Raises `Unavailable` if reading the run, or the check before creating it, takes longer than `START_S`; also raises
    the errors of `known_run`, `require_create_only` and `create_run`.
    """
    try:
        async with asyncio.timeout(START_S):
            try:
                found = await known_run(store, trust)
            except RunMissing as missing:
                if create is None or missing.near or missing.beside:  # never create a run around another one
                    raise
                await require_create_only(store.at_start, store.runtime)
            else:
                if isinstance(create, Rules):
                    found.require_rules(create.check(), "leave create= out to join it, or choose another place")
                elif other := _asked_otherwise(create, found):
                    logger.warning("%s exists, and its rules never change: %s", store.url, other)
                return found
    except TimeoutError:
        raise Unavailable(f"{store.url}: not reached within {START_S:g} s") from None
    found, ours = await create_or_find(store, store.runtime, await seed(create))
    said = "created the run %s, which did not exist: if that is a mistyped address, stop this learner"
    logger.info(said if ours else "another learner has just created the run %s, which did not exist", store.url)
    return found
