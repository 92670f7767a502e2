"""Every reader reads every kind of object, forged by everybody who may not write it, in every way.

    python -m forgery.matrix            the whole matrix, and its counts   (with tests on PYTHONPATH)

A cell is one reader, one object and one thing done to the object. The run is a small signed one that real agents have
trained. It has a charter that asks for manifests, a rotated key, an expelled learner, snapshots, checkpoints, packed commits and measurements. The
outcomes of a cell are:

    refused     the reader ends with an error of Isthmus, or reports one, which says what is wrong
    as ever     the result is the same as without the forgery
    as if gone  the result is the same as without the object: a store can always lose an object
    TAKEN       anything else, including an exception that is not Isthmus's

The forgery contains a mark, so that a reader that uses any part of it is found even if all else is the same.
"""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from isthmus.errors import IsthmusError, ObjectMissing, RecordInvalid
from isthmus.format.records import frame, keys
from isthmus.format.records.charter import Charter, Owner, PromotionRule
from isthmus.format.records.frame import Kind
from isthmus.format.records.objects import Evidence, MemberSpec, Record, SnapshotHeader
from isthmus.format.rules import MemberRole, Rules
from isthmus.format.signing import Signer, fingerprint
from isthmus.inspect import explain, follow
from isthmus.inspect.replay import replay
from isthmus.inspect.status import read_ledgers, read_status
from isthmus.learner.global_local import global_local
from isthmus.learner.manifest import statement
from isthmus.log import Log, evaluations, fold, gc, heal, manifests, merge, promotions
from isthmus.log.creation import create_run
from isthmus.log.listing import checkpoints_in
from isthmus.log.log_health import look
from isthmus.log.membership import Members, following, write
from isthmus.log.proposals import approve
from isthmus.log.run import read_run
from isthmus.log.trust import Trust
from isthmus.log.verify import _KEYS as KEY_OF
from isthmus_lab.simulate import world as simulate
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.store import Objects
from isthmus_services.board.history.history import RunHistory
from support.forgery import (
    BY,
    COLLECTOR,
    EU,
    EXPELLED,
    FOLLOWER,
    OWNER,
    ROTATED,
    SCHEMA_OF,
    STRANGER,
    SYNC,
    US,
    earlier,
    entries,
    sealed,
)
from support.world import QUICK, World, seed_of, serving, train

MARK, MARKED = 666.0, 666_666
RULES = Rules(fragments=2, sync_every=4, codec_up="f32", codec_down="f32")
STATED = statement({"code": "v1", "hardware": "one CPU", "source": [{"name": "web", "description": "pages"}]})
GATE = PromotionRule(series="loss", better="lower", evaluators=("fol",), least=1, promoters=("fol",))
CHARTER = Charter(owners=(Owner("founder", OWNER.author),), amend=1, admit=1, expel=1, manifests=True, gate=GATE)
"""In force with the second membership."""
KINDS = (*sorted(SCHEMA_OF.keys() - {Kind.PART}), Kind.RUN, Kind.MEMBERS)
"""Parts of checkpoints are left out: readers judge a part only by the digest that its checkpoint names."""

Facts = tuple[object, ...]


class Noticed(Exception):
    """A reader that reports what is wrong has reported something."""


def _require_nothing(wrong: object) -> None:
    if wrong:
        raise Noticed(str(wrong))


Reader = Callable[[World], Awaitable[Facts]]


# --- the run ----------------------------------------------------------------------------------------------------------


class Hiding(Objects):
    """Stored objects, some of which are listed but cannot be read."""

    hidden: frozenset[str] = frozenset()

    def get(self, key: str) -> bytes:
        """See `Objects.get`."""
        if key in self.hidden:
            raise ObjectMissing(key)
        return super().get(key)


class Stage:
    """The run on a simulated store, as agents have left it. Its objects can be changed for a while."""

    def __init__(self, signed: bool = True) -> None:
        self.signed = signed
        self.objects = Hiding()
        self.world = simulate.World("forgery", objects=self.objects)
        self.clock = self.world.clock
        self.drive(self._build())
        self.whole = dict(self.objects.blobs)

    def drive(self, what: Awaitable[Any]) -> Any:
        """Await something in virtual time; return its result."""

        async def go() -> Any:
            return await what

        return self.clock.run_until_complete(go())

    def close(self) -> None:
        """End the tasks that readers have left behind."""
        self.clock.close()

    def ports(self, name: str, signer: Signer | None) -> World:
        """Return the world as a new process sees it, which knows nothing yet."""
        way = Conditions(latency_s=0.001)
        ports = self.world.ports(self.world.process(name), way, way)
        return World(self.run, ports.store, ports.bus, ports.process.runtime, signer if self.signed else None)

    async def _build(self) -> None:
        seed = seed_of(RULES, msgspec.structs.replace(QUICK, snapshot_every=3))
        seed = replace(seed, signer=OWNER if self.signed else None)
        way = Conditions(latency_s=0.001)
        ports = self.world.ports(self.world.process("init"), way, way)
        self.run = await create_run(ports.store, ports.process.runtime, seed)
        owner = self.ports("owner", OWNER)
        members = Members(self.run)
        if self.signed:
            await write(owner.store, members, OWNER, earlier(), [0, 0], 1.8e9)
        for learners in ((("eu", ROTATED), ("gone", EXPELLED), ("us", US)), (("eu", EU), ("us", US))):
            async with serving(self.ports("s", SYNC).syncer("s-1")) as syncer:
                before = min(k.head for k in syncer.coordinators)
                agents = [
                    self.ports(name, key).learner(name, checkpoint_s=0.2, manifest=STATED) for name, key in learners
                ]
                enough = lambda: min(k.head for k in syncer.coordinators) >= before + 4  # noqa: E731, B023
                await asyncio.gather(*(train(agent, 40, enough=enough) for agent in agents))
                heads = [k.head for k in syncer.coordinators]
            if members.current.version == 1:
                await approve(
                    owner.store, members, OWNER, following(members, entries(), heads, 1.8e9, charter=CHARTER), 9.0
                )
        collector = self.ports("col", COLLECTOR).log
        await collector.members.refresh(collector.store)
        await gc.apply(collector, await gc.plan(collector, keep=5, min_age_s=0.0))
        log = self.ports("fol", FOLLOWER).log
        await log.members.refresh(log.store)
        known = promotions.Promotions(log)
        for version in (min(heads) - 3, min(heads) - 1, min(heads)):
            self.cut = await promotions.cut_in_log(log, version)
            assert self.cut is not None, "all fragments have it"
            published = self.cut.published if self.signed else None
            await evaluations.note(log, "loss", version, 1.0 / version, by="fol", published=published)
            if self.signed and version < min(heads):
                numbers = await promotions.measured(log, GATE)
                await promotions.promote(
                    known, "fol", version, self.cut, [one for own in numbers[version].values() for one in own]
                )
                await known.refresh()
        self.newest = min(heads)

    @contextmanager
    def forged(self, changes: Mapping[str, bytes | None], hidden: frozenset[str] = frozenset()) -> Iterator[None]:
        """Replace or remove objects for a while. The `hidden` ones are listed but cannot be read."""
        self.objects.blobs.clear()
        self.objects.blobs.update(self.whole)
        for key, blob in changes.items():
            self.objects.blobs.pop(key, None)
            if blob is not None:
                self.objects.blobs[key] = blob, self.clock.time()
        self.objects.hidden = hidden
        yield
        self.objects.hidden = frozenset()


def targets(stage: Stage) -> Mapping[Kind, str]:
    """Return the key of the last object of each kind."""
    found: dict[Kind, str] = {}
    for key, (blob, _) in sorted(stage.whole.items()):
        kind = Kind(frame.kind_of(blob))
        if key.startswith(("updates/", "learners/", "manifests/")) and "/eu/" not in key:
            continue
        if kind == Kind.MANIFEST and stage.signed and frame.author_of(blob) != EU.author:
            continue  # by its earlier key, and named by no newer update
        if kind == Kind.EVALUATION and keys.version_in(key) == stage.newest:
            continue  # no promotion rests on it
        # Take one fragment only. Its last objects were signed after the key was rotated.
        if (
            kind in (Kind.UPDATE, Kind.VALUE, Kind.SNAPSHOT, Kind.COMMIT, Kind.PACKED, Kind.SEGMENT)
            and "/00000/" not in key
        ):
            continue
        found[kind] = key
    return found


# --- readers ----------------------------------------------------------------------------------------------------------


def rounded(values: Any) -> tuple[float, ...]:
    """Return an array as a tuple of numbers, which can be compared."""
    return tuple(np.asarray(values, np.float64).ravel().tolist())


async def _log(w: World) -> Log:
    """Open the log as a process does, which checks the run object against the known owner and digest."""
    owner = fingerprint(OWNER.author) if w.run.header.owner else ""
    trust = Trust(owner=owner, run_digest=w.run.digest.hex())
    log = Log(await read_run(w.store, trust.require), w.store, w.runtime, w.signer)
    await log.members.refresh(w.store)
    return log


def by(w: World, signer: Signer) -> World:
    """Return the world with a signer; with none in a run that is not signed."""
    return replace(w, signer=signer if w.run.header.owner else None)


async def _joins(w: World) -> Facts:
    await _log(w)
    agent = by(w, EU).learner("eu", manifest=STATED)
    await agent.join()
    h = agent.history
    assert agent.uplink.manifest is not None, "it states something"
    stated = await manifests.read(await _log(w), "eu", agent.uplink.manifest)
    held = [(k.version, rounded(k.values)) for k in agent.downlink.known]
    sent = [[(s.key, s.header.tokens) for s in one] for one in h.stored]
    checkpoint = h.checkpoint.header if h.checkpoint else None
    # The number of its incarnation does not matter: it takes the next free one.
    return ("eu", held, h.step, h.tokens_lost, h.settled_to, sent, checkpoint and checkpoint.loss, stated.code)


async def _newcomer(w: World) -> Facts:
    await _log(w)
    agent = by(w, US).learner("us", manifest=STATED)
    await agent.join()
    found = await agent.donor(lambda _: None)
    return ("donor", found and (found.key, [rounded(p.values) for p in found.points]))


async def _syncs(w: World) -> Facts:
    log = await _log(w)
    states = [(await fold.fold(log, p, fold.Merging(log), keep=16, need=2)) for p in range(2)]
    for given in states[0].last[-1].header.inputs:  # as it judges an update when it is announced
        if given.manifest is not None:
            stated = await manifests.Manifests(log).of(given.learner, given.manifest)
            manifests.require(log.members.current, given.learner, given.manifest, stated)
    return tuple((at.version, rounded(at.carried.published), rounded(at.carried.momentum)) for at in states)


async def _exports(w: World) -> Facts:
    log = await _log(w)
    local, of = await global_local(log)
    values = [(await fold.fold(log, p, fold.PublishedValue(log))) for p in range(2)]
    return (*((at.version, rounded(at.carried)) for at in values), sorted(local), sorted(of))


async def _follows(w: World) -> Facts:
    follower = follow.CutFollower(await _log(w))
    cut = await follower.cut(await follower.head(1))
    return (cut.number, *(rounded(values) for values in cut.values.values()))


async def _exports_promoted(w: World) -> Facts:
    log = await _log(w)
    found = await promotions.require(log)
    values = [(await fold.fold(log, p, fold.PublishedValue(log), until=found.version)) for p in range(2)]
    return (*((at.version, rounded(at.carried)) for at in values),)


async def _follows_promoted(w: World) -> Facts:
    log = await _log(w)
    try:
        async with asyncio.timeout(10 * follow.LOOK_S):
            async for cut in follow.cuts(log, log.runtime, promoted=True):
                return (cut.number, *(rounded(values) for values in cut.values.values()))
    except TimeoutError:
        pass
    return ("no promoted cut",)


async def _status(w: World) -> Facts:
    log = await _log(w)
    status = await read_status(log, w.bus, w.runtime, 0.0)
    _require_nothing(status.wrong)
    ledgers = await read_ledgers(log, checkpoints_in(await w.store.list(keys.LEARNERS)))
    heads = [(c.version, c.digest.hex(), sum(i.tokens for i in c.header.inputs)) if c else None for c in status.heads]
    return (heads, sorted((name, found["step"], found["processed"]) for name, found in ledgers.items()))


async def _doctor(w: World) -> Facts:
    state = await look(await _log(w))
    _require_nothing([*state.wrong, *state.standing])
    return ([c and c.digest.hex() for c in state.heads],)


async def _board(w: World) -> Facts:
    log = await _log(w)
    history = RunHistory(log.run)
    read = await history.follow(log)
    _require_nothing([end.broken for end in history.ends if end.broken])
    return (read, sorted(history.learners.known), [end.version for end in history.ends])


async def _explains(w: World) -> Facts:
    log = await _log(w)
    newest = await log.newest(0)
    assert newest is not None, "there are commits"
    told = await explain.explain(log, f"0/{newest.version}")
    before = await log.commit(0, newest.version - 1)
    assert before is not None, "there are several"
    own = await explain.explain(log, next(i.key for i in before.header.inputs if i.learner == "eu"))
    return (*told.lines, *own.lines)


async def _replays(w: World) -> Facts:
    found = await replay(await _log(w))
    _require_nothing([wrong for r in found if (wrong := r.difference or r.gaps or r.nobodys or r.unstated)])
    return tuple((r.fragment, r.start, r.compared) for r in found)


async def _collects(w: World) -> Facts:
    log = await _log(by(w, COLLECTOR))
    plan = await gc.plan(log, keep=2, min_age_s=0.0)
    return (sorted(e.key for doomed in plan.doomed.values() for e in doomed),)


async def _heals(w: World) -> Facts:
    found = await heal.diagnose(await _log(w))
    _require_nothing([d for d in found if not d.sound])
    return tuple((d.fragment, d.head) for d in found)


async def _measures(w: World) -> Facts:
    return tuple((p.cut, p.value) for p in (await evaluations.series(await _log(w), "loss")).points)


async def _lists(w: World) -> Facts:
    members = (await _log(w)).members
    return (members.current.version, [(m.name, m.role, m.key.hex()) for m in members.current.members])


READERS: Mapping[str, Reader] = {
    "join": _joins,
    "join, new": _newcomer,
    "syncer": _syncs,
    "export": _exports,
    "follow": _follows,
    "export --promoted": _exports_promoted,
    "follow --promoted": _follows_promoted,
    "status": _status,
    "doctor": _doctor,
    "board": _board,
    "explain": _explains,
    "replay": _replays,
    "gc": _collects,
    "heal": _heals,
    "evaluations": _measures,
    "members list": _lists,
}


NOTHING: Mapping[str, Facts] = {"join, new": ("donor", None)}
"""The result of a reader that finds no object it can use."""


# --- forgers, and what they do ----------------------------------------------------------------------------------------


def marked(stage: Stage, kind: Kind, blob: bytes) -> frame.Body:
    """Return an unsigned object of the same kind with other content that contains the mark."""
    if kind in (Kind.RUN, Kind.MEMBERS):
        return bytearray(blob)
    header, payload = frame.parse(blob, kind, SCHEMA_OF[kind])
    values = np.frombuffer(payload, np.uint8)
    changes: dict[str, Any] = {}
    match kind:
        case Kind.UPDATE:
            changes, values = {"tokens": MARKED, "tokens_seen": MARKED}, _evil(values)
        case Kind.VALUE:
            values = _evil(values)
        case Kind.SNAPSHOT:
            values = _evil(values)
            assert isinstance(header, SnapshotHeader), "it is one"
            state = merge.restore(header, memoryview(values.tobytes()), values.size // 8)
            changes = {"published_digest": state.published_digest, "state_digest": state.digest}
        case Kind.COMMIT:
            inputs = [msgspec.structs.replace(i, tokens=MARKED) for i in getattr(header, "inputs")]  # noqa: B009
            changes = {"inputs": tuple(inputs), "attempt": "forged"}
        case Kind.CLAIM:
            changes = {"tokens_lost": MARKED, "tokens_seen": MARKED}
        case Kind.CHECKPOINT:
            changes = {"step": MARKED, "tokens_seen": MARKED, "tokens_lost": MARKED}
            values = _evil(values)
        case Kind.PACKED:
            changes = {"digest": bytes(32)}
        case Kind.SEGMENT:
            values = values[::-1].copy()
        case Kind.EVALUATION:
            changes = {"value": MARK}
        case Kind.PROMOTION:
            # All that it names is genuine: only its author is false.
            assert stage.cut is not None, "it is the newest"
            number = max(key for key in stage.whole if key.startswith(keys.evaluations_prefix("loss")))
            evidence = Evidence(number, frame.digest(stage.whole[number][0]))
            versions = (stage.newest,) * len(getattr(header, "versions"))  # noqa: B009
            changes = {"versions": versions, "published": stage.cut.published, "evidence": (evidence,)}
        case Kind.MANIFEST:
            changes = {"code": str(MARKED)}
    return frame.written(kind, msgspec.structs.replace(header, **changes), values)


def _evil(values: Any) -> Any:
    return np.full(values.size // 4, MARK, np.float32).view(np.uint8)


OTHER_ROLE: Mapping[Kind, Signer] = {kind: SYNC if BY[kind] is not SYNC else EU for kind in BY}
FORGERS = ("nobody", "stranger", "expelled", "rotated", "other role", "other member", "other run", "older", "flipped")


def forger_of(name: str, kind: Kind) -> Signer | None:
    """Return the key with which a forger signs an object of a kind."""
    found: dict[str, Signer | None] = {
        "nobody": None,
        "stranger": STRANGER,
        "expelled": EXPELLED,
        "rotated": ROTATED,
        "other role": OTHER_ROLE.get(kind, EU),
        "other member": US if BY.get(kind) in (EU, FOLLOWER) else FOLLOWER,
        "other run": BY.get(kind, OWNER),
    }
    return found[name]


def members_by(stage: Stage, signer: Signer | None, version: int) -> bytes:
    """Return a membership that admits a stranger, signed by this signer."""
    known = stage.whole[keys.members_key(2)][0]
    header, _ = frame.parse(known, Kind.MEMBERS, _MEMBERS)
    more = MemberSpec("mark", MemberRole.SYNCER, STRANGER.author)
    previous = frame.digest(known) if version == 3 else header.previous
    changed = msgspec.structs.replace(header, members=(*header.members, more), version=version, previous=previous)
    out = frame.draft(Kind.MEMBERS, changed).blob
    frame.seal(out, signer)
    return bytes(out)


def run_by(stage: Stage, signer: Signer | None) -> bytes:
    """Return the run object with another seed and this signer as its owner."""
    blob = stage.whole[keys.RUN_KEY][0]
    header, payload = frame.parse(blob, Kind.RUN, _RUN)
    changed = msgspec.structs.replace(header, seed=MARKED, owner=signer.author if signer else None)
    out = frame.draft(Kind.RUN, changed, len(payload))
    out.payload[:] = payload
    frame.seal(out.blob, signer)
    return bytes(out.blob)


_MEMBERS: type[Any] = __import__("isthmus.format.records.objects", fromlist=["MembersHeader"]).MembersHeader
_RUN: type[Any] = __import__("isthmus.format.records.objects", fromlist=["RunHeader"]).RunHeader


@dataclass(frozen=True, slots=True)
class Forgery:
    """Something done to one object."""

    kind: Kind
    deed: str
    forger: str
    changes: Mapping[str, bytes | None]
    hidden: frozenset[str] = frozenset()


def forgeries(stage: Stage) -> Iterator[Forgery]:
    """Yield all forgeries."""
    for kind, key in targets(stage).items():
        genuine = stage.whole[key][0]
        yield Forgery(kind, "removed", "the store", {key: None})
        yield Forgery(kind, "withheld", "the store", {}, frozenset([key]))
        yield from _duplicated(kind, key, genuine)
        for forger in FORGERS:
            made = _made(stage, kind, key, genuine, forger)
            if made is None:
                continue
            yield Forgery(kind, "replaced", forger, {key: made})
            if forger not in ("older", "flipped") and kind in _BESIDE:
                beside, blob = _BESIDE[kind](stage, kind, genuine, forger)
                yield Forgery(kind, "added", forger, {beside: bytes(blob)})


def _made(stage: Stage, kind: Kind, key: str, genuine: bytes, forger: str) -> bytes | None:
    """Return what a forger puts in the place of an object; None if there is no such forgery."""
    if forger == "flipped":
        out = bytearray(genuine)
        out[len(out) // 2] ^= 1
        return bytes(out)
    if forger == "older":
        same = [k for k, (b, _) in sorted(stage.whole.items()) if frame.kind_of(b) == kind and k < key]
        return stage.whole[same[-1]][0] if same else None
    if kind == Kind.MEMBERS:
        return members_by(stage, forger_of(forger, kind), 2) if forger != "other run" else None
    if kind == Kind.RUN:
        return run_by(stage, forger_of(forger, kind)) if forger != "other run" else run_by(stage, OWNER)
    body = marked(stage, kind, genuine)
    if forger == "other run":
        header, payload = frame.parse(body, kind, SCHEMA_OF[kind])
        changed: Record = msgspec.structs.replace(header, run=bytes(31) + b"1")
        body = frame.written(kind, changed, np.frombuffer(payload, np.uint8))
    return bytes(sealed(body, forger_of(forger, kind))[1])


def _beside(**changes: Any) -> Callable[[Stage, Kind, bytes, str], tuple[str, frame.Body]]:
    """Return a function that makes a forgery with its own key, beside the genuine objects.

    `changes` make fields of the header newer than those of the genuine object.
    """

    def make(stage: Stage, kind: Kind, genuine: bytes, forger: str) -> tuple[str, frame.Body]:
        header, payload = frame.parse(marked(stage, kind, genuine), kind, SCHEMA_OF[kind])
        fields = {name: change(header) for name, change in changes.items()}
        if forger == "other run":
            fields["run"] = bytes(31) + b"1"
        changed = msgspec.structs.replace(header, **fields)
        return sealed(frame.written(kind, changed, np.frombuffer(payload, np.uint8)), forger_of(forger, kind))

    return make


def _next_members(stage: Stage, kind: Kind, genuine: bytes, forger: str) -> tuple[str, frame.Body]:
    return keys.members_key(3), bytearray(members_by(stage, forger_of(forger, kind), 3))


def _next_promotion(stage: Stage, kind: Kind, genuine: bytes, forger: str) -> tuple[str, frame.Body]:
    follows = _beside(number=lambda h: h.number + 1, previous=lambda h: frame.digest(genuine))
    return follows(stage, kind, genuine, forger)


_BESIDE: Mapping[Kind, Callable[[Stage, Kind, bytes, str], tuple[str, frame.Body]]] = {
    Kind.UPDATE: _beside(),
    Kind.SNAPSHOT: _beside(),
    Kind.COMMIT: _beside(
        version=lambda h: h.version + 1,
        value_key=lambda h: keys.value_key(h.fragment, h.version + 1, h.value_digest),
    ),
    Kind.CLAIM: _beside(incarnation=lambda h: h.incarnation + 1),
    Kind.CHECKPOINT: _beside(),
    Kind.EVALUATION: _beside(cut=lambda h: h.cut + 1),
    Kind.MANIFEST: _beside(),
    Kind.PROMOTION: _next_promotion,
    Kind.MEMBERS: _next_members,
}


def _duplicated(kind: Kind, key: str, genuine: bytes) -> Iterator[Forgery]:
    """Yield the same bytes under keys of the next version or incarnation, another learner and another fragment."""
    number = next((part[:12] for part in key.split("/") if part[:12].isdigit() and len(part[:12]) == 12), "")
    other = {
        "the next version": key.replace(number, f"{int(number) + 1:012d}") if number else key,
        "another learner": key.replace("/eu/", "/us/"),
        "another fragment": key.replace("/00000/", "/00001/"),
        "the next life": key.replace("/000002/", "/000003/"),
    }
    for name, place in other.items():
        if place != key:
            yield Forgery(kind, f"duplicated as of {name}", "the store", {place: genuine})


# --- outcomes ---------------------------------------------------------------------------------------------------------


def outcome(stage: Stage, reader: str, forgery: Forgery, clean: Facts, gone: Facts | None) -> str:
    """Return the outcome of a cell. `clean`: the reader's result without the forgery; `gone`: without the object, None
    for an error.
    """
    found = read(stage, reader, forgery)
    if isinstance(found, str):
        return found
    if reader != "gc" and _is_marked(found):
        return "TAKEN: it bears the mark"
    if found == clean:
        return "as ever"
    if found == NOTHING.get(reader):
        return "as if gone"
    if reader == "gc":
        # It does no harm if the forgery itself is collected, or if less is collected.
        genuine = {key for key in _collected(found) if forgery.changes.get(key, b"") == b""}
        return "as if gone" if genuine <= _collected(clean) else "TAKEN: what is needed is collected"
    if gone is not None and found == gone:
        return "as if gone"
    return "TAKEN: it comes to something else"


def _collected(facts: Facts) -> set[str]:
    [doomed] = facts
    assert isinstance(doomed, list), "keys"
    return set(doomed)


def own_key(blob: bytes, kind: Kind) -> str | None:
    """Return the key that an object's header implies; None if the object is invalid or its kind has a fixed key."""
    try:
        header, _ = frame.parse(blob, kind, SCHEMA_OF[kind])
        return KEY_OF[SCHEMA_OF[kind]](header, frame.digest(blob))
    except (RecordInvalid, KeyError):
        return None


def read(stage: Stage, reader: str, forgery: Forgery) -> Facts | str:
    with stage.forged(forgery.changes, forgery.hidden):
        try:
            found: Facts = stage.drive(READERS[reader](stage.ports("reader", FOLLOWER)))
        except (IsthmusError, Noticed):
            return "refused"
        except Exception as error:
            return f"TAKEN: {type(error).__name__}: {error}"
        return found


def _is_marked(facts: object) -> bool:
    if isinstance(facts, tuple | list | set):
        return any(map(_is_marked, facts))
    if isinstance(facts, str):
        return str(MARKED) in facts or STRANGER.author.hex() in facts
    return isinstance(facts, int | float) and (facts == MARKED or abs(float(facts) - MARK) < 1e-3)


def cells(stage: Stage, draw: random.Random | None = None, share: float = 1.0) -> Iterator[tuple[str, Forgery, str]]:
    """Yield reader, forgery and outcome of all cells, or of a random share of them."""
    nothing = Forgery(Kind.RUN, "nothing", "", {})
    clean = {reader: read(stage, reader, nothing) for reader in READERS}
    assert not (wrong := {r: f for r, f in clean.items() if isinstance(f, str)}), wrong
    gone: dict[tuple[str, Kind], Facts | None] = {}
    for forgery in forgeries(stage):
        for reader in READERS:
            if draw is not None and draw.random() >= share:
                continue
            place = reader, forgery.kind
            if place not in gone:
                key = targets(stage)[forgery.kind]
                without = read(stage, reader, Forgery(forgery.kind, "removed", "", {key: None}))
                gone[place] = None if isinstance(without, str) else without
            was = clean[reader]
            assert not isinstance(was, str), "seen above"
            yield reader, forgery, outcome(stage, reader, forgery, was, gone[place])


def main() -> int:
    """Print the number of cells by kind and outcome, and each TAKEN cell; return 1 if there is any."""
    stage = Stage()
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    for reader, forgery, came in cells(stage):
        name = came.partition(":")[0]
        counts[forgery.kind.name.lower(), name] += 1
        if name == "TAKEN":
            wrong.append(f"{reader}: {forgery.kind.name.lower()} {forgery.deed} by {forgery.forger}: {came}")
    names = ("refused", "as ever", "as if gone", "TAKEN")
    print(f"{'kind':12}" + "".join(f"{name:>12}" for name in names))
    for kind in KINDS:
        word = kind.name.lower()
        if any(counts[word, name] for name in names):
            print(f"{word:12}" + "".join(f"{counts[word, name]:12}" for name in names))
    print(f"{'all':12}" + "".join(f"{sum(counts[k.name.lower(), name] for k in KINDS):12}" for name in names))
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
