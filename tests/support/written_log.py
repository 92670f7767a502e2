"""A run whose log is written by hand: real updates, merged and committed as by a syncer, one version at a time.

Everything happens in virtual time, on one store that records its requests.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from isthmus.codecs import codec, pack
from isthmus.codecs.kernels import F32
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob, Body, Data, Kind
from isthmus.format.records.keys import commit_key, snapshot_key, update_key, value_key
from isthmus.format.records.objects import UNSTATED, CommitHeader, Input, SnapshotHeader, UpdateHeader
from isthmus.format.rules import Pace, Rules
from isthmus.log import Commit, Log, merge
from isthmus.log.merge import Accumulator, State
from isthmus.store import Entry, Store
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.process import Process
from isthmus_lab.simulate.world import World
from support.commits import committed, given
from support.opened import opened_update
from support.world import QUICK, seed_of

T = TypeVar("T")

ONE_WAY_S = 0.01
"""The time that a request takes to the store, and its answer back."""


class Asked:
    """A store that records its requests, and whose answers can be replaced by errors."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.url = inner, inner.url
        self.requests: list[tuple[str, str]] = []
        """Operation and key, in order."""
        self.answers: Callable[[str, str], BaseException | None] = lambda operation, key: None
        """Returns the error to raise instead of sending a request, or None."""

    def of(self, operation: str, prefix: str = "") -> list[str]:
        """Return the keys below a prefix for which an operation was requested. Getting a range counts as getting."""
        asked_for = ("get", "get_range") if operation == "get" else (operation,)
        return [key for asked, key in self.requests if asked in asked_for and key.startswith(prefix)]

    async def get(self, key: str) -> Body:
        return await self._asked("get", key, lambda: self.inner.get(key))

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        return await self._asked("get_range", key, lambda: self.inner.get_range(key, start, stop))

    async def put(self, key: str, data: Data) -> None:
        await self._asked("put", key, lambda: self.inner.put(key, data))

    async def create(self, key: str, data: Blob) -> bool:
        return await self._asked("create", key, lambda: self.inner.create(key, data))

    async def list(self, prefix: str) -> Sequence[Entry]:
        return await self._asked("list", prefix, lambda: self.inner.list(prefix))

    async def delete(self, key: str) -> None:
        await self._asked("delete", key, lambda: self.inner.delete(key))

    async def _asked(self, operation: str, key: str, send: Callable[[], Awaitable[T]]) -> T:
        self.requests.append((operation, key))
        if (error := self.answers(operation, key)) is not None:
            raise error
        return await send()


def unstated(commit: Commit) -> Commit:
    """Return a commit that does not state the digest of its state."""
    return Commit(replace(commit.header, state_digest=UNSTATED), commit.digest)


@dataclass
class Written:
    """A run that a test writes. `states` and `commits` are its newest states and all its commits, by fragment."""

    rules: Rules = field(default_factory=lambda: Rules(fragments=2, sync_every=4))
    pace: Pace = QUICK
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World("written")
        self.process: Process = self.world.process("writer")
        self.clock = self.world.clock
        self.runtime = self.process.runtime
        self.store = Asked(self.world.ports(self.process, Conditions(latency_s=ONE_WAY_S)).store)
        self.states: list[State] = []
        self.commits: list[list[Commit]] = []

    def drive(self, body: Callable[["Written"], Awaitable[T]]) -> T:
        """Create the run, then run `body`, in virtual time."""

        async def go() -> T:
            self.run = await self.world.create(seed_of(self.rules, self.pace, **self.options))
            self.log = Log(self.run, self.store, self.runtime)
            for fragment in self.run.layout.fragments:
                key = snapshot_key(fragment.index, 0, self.run.header.snapshots[fragment.index])
                header, payload = frame.parse(self.world.objects.get(key), Kind.SNAPSHOT, SnapshotHeader)
                self.states.append(merge.restore(header, payload, fragment.size))
                self.commits.append([])
            return await body(self)

        try:
            came: T = self.clock.run_until_complete(go())
            return came
        finally:
            self.clock.close()

    def update(self, learner: str, base: int, p: int = 0, values: F32 | None = None, **changed: Any) -> Body:
        """Return the bytes of an update. `values` [n] are its outer gradient; by default they are drawn."""
        fragment, code = self.run.layout.fragments[p], codec(self.run.rules.codec_up)
        if values is None:
            draw = np.random.default_rng([p, base, *learner.encode()])
            values = draw.normal(scale=0.01, size=fragment.size).astype(np.float32)
        plausible = UpdateHeader(
            schema=1,
            run=self.run.digest,
            fragment=p,
            learner=learner,
            incarnation=1,
            base=base,
            codec=code.name,
            steps=4,
            tokens=400,
            step=4 * (base + 1),
            tokens_seen=400 * (base + 1),
            train_s=1.0,
        )
        header = replace(plausible, **changed)
        return frame.written(Kind.UPDATE, header, pack(code, fragment, values))

    def upload(self, learner: str, base: int, p: int = 0, values: F32 | None = None, **changed: Any) -> str:
        """Store an update; return its key."""
        blob = self.update(learner, base, p, values, **changed)
        key = update_key(p, learner, base, frame.digest(blob))
        self.put(key, blob)
        return key

    def put(self, key: str, blob: Data) -> None:
        """Put an object into the store without a request."""
        self.world.objects.put(key, bytes(blob), self.runtime.wall())

    def blob(self, key: str) -> Body:
        """Return an object of the store."""
        return bytearray(self.world.objects.get(key))

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys below a prefix."""
        return [entry.key for entry in self.world.objects.list(prefix)]

    def merged(self, key: str, version: int, p: int = 0) -> tuple[Input, F32]:
        """Return the input that a commit records for a stored update, and its outer gradient."""
        blob = self.blob(key)
        _, _, learner, name = key.split("/")
        base, digest = int(name.split("-")[0]), frame.digest(blob)
        found = opened_update(self.run, blob, self.run.layout.fragments[p], learner, base, digest=digest)
        h = found.header
        about = given(
            learner,
            base,
            version,
            p=p,
            key=key,
            digest=digest,
            incarnation=h.incarnation,
            steps=h.steps,
            tokens=h.tokens,
            step=h.step,
            tokens_seen=h.tokens_seen,
            bytes=len(blob),
            weight=merge.weight(h.tokens, h.steps),
        )
        return about, found.gradient.decode()

    def draft(self, *keys: str, p: int = 0, **changed: Any) -> tuple[CommitHeader, merge.Advance]:
        """Return a fragment's next commit, which merges these updates, and its result. Nothing is written."""
        state, run = self.states[p], self.run
        version = state.version + 1
        accumulator = Accumulator(run.layout.fragments[p], merge.outers(run.rules))
        inputs = []
        for key in keys:
            about, gradient = self.merged(key, version, p)
            accumulator.add(gradient, about.weight, about.scale, learner=about.learner)
            inputs.append(about)
        result = merge.advance(state, accumulator, codec(run.rules.codec_down), run.digest, run.rules.feedback_down)
        outer = merge.outers(run.rules)
        last = self.commits[p][-1].digest if self.commits[p] else run.digest
        fields: dict[str, object] = {
            "run": run.digest,
            "previous": last,
            "dense": outer["dense"],
            "embedding": outer["embedding"],
            "codec_down": run.rules.codec_down,
            "value_key": value_key(p, version, result.value_digest),
            "value_digest": result.value_digest,
            "published_digest": result.published_digest,
            "state_digest": result.state_digest,
            "written_at": self.runtime.wall(),
        }
        return committed(version, *inputs, p=p, **fields | changed), result

    async def commit(self, *keys: str, p: int = 0, **changed: Any) -> Commit:
        """Merge updates (by default one update each of learners a and b) into the next version, and commit it."""
        base = self.states[p].version
        header, result = self.draft(*(keys or [self.upload(who, base, p) for who in ("a", "b")]), p=p, **changed)
        self.put(header.value_key, result.value)
        body = frame.draft(Kind.COMMIT, header).blob
        assert await self.log.append(p, header.version, body)
        self.states[p] = result.state
        self.commits[p].append(Commit(header, frame.digest(body)))
        return self.commits[p][-1]

    async def grow(self, versions: int, p: int = 0, snapshot_every: int = 0) -> None:
        """Commit until there are this many versions, with a snapshot every `snapshot_every` versions."""
        while self.states[p].version < versions:
            await self.commit(p=p)
            if snapshot_every and self.states[p].version % snapshot_every == 0:
                self.snapshot(p)

    def snapshot(self, p: int = 0) -> str:
        """Store a snapshot of the current state; return its key."""
        blob = merge.snapshot(self.states[p], p, self.run.digest)
        key = snapshot_key(p, self.states[p].version, frame.digest(blob))
        self.put(key, blob)
        return key

    def replace_commit(self, version: int, /, p: int = 0, **changed: Any) -> None:
        """Replace a stored commit by one with other fields."""
        header = replace(self.commits[p][version - 1].header, **changed)
        self.put(commit_key(p, version), frame.draft(Kind.COMMIT, header).blob)
