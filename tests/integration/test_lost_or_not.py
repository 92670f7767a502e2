"""Whether work is lost by a rejection: the learner's ledger, the log, status, board, metrics and explain agree.

Each case sends a learner's update astray in one way: its bytes, its author, or when its announcement is heard. The
syncer and the learners are real. Without such a case nothing is rejected, and nothing of the ledger is lost.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typing_extensions import override

from advice.lives import training
from isthmus.bus import Bus, BusItem
from isthmus.errors import Denied
from isthmus.format.records import frame
from isthmus.format.records.keys import update_key
from isthmus.format.records.messages import Announce, decode, encode, learner_stream
from isthmus.format.records.objects import UpdateHeader
from isthmus.format.rules import Pace, Rules
from isthmus.format.signing import Signer
from isthmus.inspect.explain import explain
from isthmus.inspect.status import read_status
from isthmus.learner import LearnerAgent
from isthmus.learner.backend import ArrayRef, LocalBackend, PackedUpdate, local_array
from isthmus.log import Log
from isthmus.reasons import LOSSLESS, Reason
from isthmus.store import Layer, Store
from isthmus.syncer import Syncer
from isthmus_services.board.history import time_views
from isthmus_services.board.history.history import RunHistory
from isthmus_services.output.view import rejections
from support import signed
from support.world import World, all_commits, in_virtual_time, seed_of, serving, until, world

RULES = Rules(fragments=1, sync_every=4, codec_up="f32", codec_down="f32")
PACE = Pace(quorum=2, grace=1.0, heartbeat_s=0.2, silence_s=1.0, staleness=1)
AT = 3
"""The base of the update that goes astray."""


@dataclass
class Bytes:
    """What is wrong with the object of the update on base `AT`."""

    header: Mapping[str, Any] = field(default_factory=dict)
    longer: float = 0.0
    """What is added to the difference."""
    nan: bool = False
    signer: Signer | None = None
    spoil: slice | None = None
    """Bytes that are changed before the digest is made."""
    stored: Callable[[bytes], bytes | None] = bytes
    """What is stored in place of the announced bytes, if anything."""


class Odd(LocalBackend):
    """The arrays of a learner whose update on base `AT` goes astray."""

    def __init__(self, log: Log, odd: Bytes) -> None:
        super().__init__(log)
        self.odd = odd

    @override
    async def pack(
        self, header: UpdateHeader, base: ArrayRef, values: ArrayRef, feedback: ArrayRef | None
    ) -> PackedUpdate | None:
        odd = self.odd
        if header.base != AT or odd.stored is not bytes:
            return await super().pack(header, base, values, feedback)
        moved = local_array(values) - np.float32(odd.longer)
        blob, _ = self.packed(msgspec.structs.replace(header, **odd.header), local_array(base), moved, None)
        assert blob is not None
        if odd.nan:
            np.frombuffer(blob, np.uint8)[-4:] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
        frame.seal(blob, odd.signer)
        if odd.spoil is not None:
            np.frombuffer(blob, np.uint8)[odd.spoil] ^= 1
        return PackedUpdate(frame.digest(blob), len(blob), blob, None)

    @override
    async def store(self, key: str, packed: PackedUpdate) -> None:
        assert isinstance(packed.body, bytearray | memoryview)
        if f"/{AT:012d}-" not in key:
            return await super().store(key, packed)
        if (stored := self.odd.stored(bytes(packed.body))) is not None:
            await self.log.store.create(key, stored)
        return None


OWN = {
    Reason.MISSING: Bytes(stored=lambda _: None),
    Reason.TRUNCATED: Bytes(stored=lambda blob: blob[:-1]),
    Reason.OVERSIZED: Bytes(stored=lambda blob: blob + b"x"),
    Reason.DIGEST_MISMATCH: Bytes(stored=lambda blob: blob[:-1] + bytes([blob[-1] ^ 1])),
    Reason.MALFORMED: Bytes(header={"tokens": 1}),
    Reason.WRONG_RUN: Bytes(header={"run": bytes(32)}),
    Reason.WRONG_AUTHOR: Bytes(header={"learner": "other"}),
    Reason.WRONG_LAYOUT: Bytes(header={"codec": "bf16"}),
    Reason.NON_FINITE: Bytes(nan=True),
    Reason.OVERFLOW: Bytes(longer=1e25),
    Reason.TOO_LONG: Bytes(longer=1e6),
}


class Gate(Bus):
    """A learner's way to the bus, on which announcements are held or changed."""

    def __init__(self, bus: Bus) -> None:
        self.url, self._bus = bus.url, bus
        self.holds: Callable[[Announce], bool] = lambda _: False
        self.changes: Callable[[Announce], Announce] = lambda said: said
        self.held: list[Announce] = []
        self.said: list[Announce] = []

    async def release(self, *said: Announce) -> None:
        """Deliver announcements, whether they were held or said before."""
        for one in said:
            await self._bus.append(learner_stream(one.learner), encode(one))

    @override
    async def append(self, stream: str, *bodies: bytes) -> None:
        for body in bodies:
            whole = decode(body) if body else ()
            said = [message for message in whole if isinstance(message, Announce)]
            passing = [message for message in said if not self.holds(message)]
            self.held += [message for message in said if message not in passing]
            self.said += passing
            changed = [self.changes(message) for message in passing]
            if said == changed:
                await self._bus.append(stream, body)
                continue
            for message in whole:
                if message not in said:
                    await self._bus.append(stream, encode(message))
            await self.release(*changed)

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        return await self._bus.read(positions, timeout_s)

    @override
    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        return await self._bus.ago(streams, seconds)

    @override
    async def tail(self, stream: str) -> str:
        return await self._bus.tail(stream)

    @override
    async def names(self, within_s: float | None = None) -> set[str]:
        return await self._bus.names(within_s)


class Way(Layer):
    """A store whose reads below a prefix wait, or are denied, while a condition holds."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.waits: Callable[[str], bool] = lambda _: False
        self.denies: Callable[[str], bool] = lambda _: False

    @override
    async def _through(self, operation: str, key: str, send: Callable[[], Awaitable[Any]]) -> Any:
        while operation.startswith("get") and self.waits(key):  # noqa: ASYNC110 (a test may change it at any time)
            await asyncio.sleep(0.02)
        if operation.startswith("get") and self.denies(key):
            raise Denied(key)
        return await send()


@dataclass
class Case:
    """A run of two learners, `a` and `x`. What happens to `x`'s update on base `AT` is up to a test."""

    syncer: Syncer
    a: Gate
    x: Gate
    of_x: LearnerAgent
    read_by_syncer: Way
    read_by_x: Way

    @property
    def head(self) -> int:
        return self.syncer.coordinators[0].head

    @property
    def arrived(self) -> set[tuple[str, int]]:
        r = self.syncer.coordinators[0].rounds.round
        return set(r.arrived) if r is not None else set()

    async def reach(self, version: int) -> None:
        await until(lambda: self.head >= version, f"version {version}")


Story = Callable[[Case], Awaitable[None]]


async def nothing(c: Case) -> None:
    """Let all updates come."""


async def late(c: Case) -> None:
    """Deliver the announcement when its base is too old."""
    c.x.holds = lambda said: said.base == AT
    await c.reach(AT + 2)
    await c.x.release(*c.x.held)


async def longer(c: Case) -> None:
    """Let the learner send more work on a base that was merged already: it has not read the commit."""
    await c.reach(AT)
    c.read_by_x.waits = lambda key: key.startswith("commits/") and int(key.split("/")[-1]) > AT
    await until(lambda: sum(said.base == AT for said in c.x.said) > 1, "a longer update on the base")
    await c.reach(AT + 1)
    await until(lambda: len({said.tokens for said in c.x.said if said.base == AT}) > 1, "a longer update on the base")
    c.read_by_x.waits = lambda _: False


async def overtaken(c: Case) -> None:
    """Deliver the announcement when a newer update of the learner is in the round."""
    c.x.holds = lambda said: said.base == AT
    c.a.holds = lambda said: said.base == AT + 1
    await until(lambda: ("x", AT + 1) in c.arrived, "the newer update has arrived")
    await c.x.release(*c.x.held)
    await until(lambda: "overtaken" in c.syncer.coordinators[0].rounds.rejected_total, "it is rejected")
    c.a.holds = lambda _: False


async def shorter(c: Case) -> None:
    """Deliver the announcement of an update after a longer one on its base was merged."""
    c.x.holds = c.a.holds = lambda said: said.base == AT
    await until(lambda: len({said.tokens for said in c.x.held}) > 1, "a longer update on the base")
    c.x.holds = c.a.holds = lambda _: False
    await c.a.release(c.a.held[-1])
    await c.x.release(c.x.held[-1])
    await c.reach(AT + 1)
    await c.x.release(c.x.held[0])


async def again(c: Case) -> None:
    """Deliver the announcement of a merged update again, at once and when its base is too old."""
    await c.reach(AT + 1)
    said = next(said for said in c.x.said if said.base == AT)
    await c.x.release(said)
    c.x.holds = lambda _: True  # no later one of this learner
    await c.reach(AT + 4)
    await c.x.release(said)
    c.x.holds = lambda _: False
    await c.x.release(*c.x.held)


def unreadable(times: float) -> Story:
    async def story(c: Case) -> None:
        """Deny the syncer the update, a few times or for good."""
        seen = 0

        def denies(key: str) -> bool:
            nonlocal seen
            its_own = key.startswith("updates/00000/x/") and f"/{AT:012d}-" in key
            seen += its_own
            return its_own and seen <= times

        c.read_by_syncer.denies = denies

    return story


def other_history(times: float) -> Story:
    async def story(c: Case) -> None:
        """Let the learner name another commit than the syncer knows, a few times or for good."""
        seen = 0

        def changes(said: Announce) -> Announce:
            nonlocal seen
            seen += said.base == AT
            return (
                msgspec.structs.replace(said, seen_digest=bytes(31) + b"x")
                if said.base == AT and seen <= times
                else said
            )

        c.x.changes = changes

    return story


STORIES: dict[str, tuple[Story, set[Reason]]] = {
    "nothing": (nothing, set()),
    "late": (late, {Reason.STALE}),
    "longer": (longer, {Reason.BASE_MERGED}),
    "overtaken": (overtaken, {Reason.OVERTAKEN}),
    "shorter": (shorter, {Reason.SUPERSEDED}),
    "again": (again, {Reason.DUPLICATE}),
    "unreadable for now": (unreadable(1), {Reason.UNREADABLE}),
    "unreadable": (unreadable(1e9), {Reason.UNREADABLE, Reason.STALE}),
    "another history for now": (other_history(1), {Reason.OTHER_HISTORY}),
    "another history": (other_history(1e9), {Reason.OTHER_HISTORY, Reason.STALE}),
}


async def happened(
    w: World, story: Story, odd: Bytes | None, keys: Mapping[str, Signer] | None = None
) -> tuple[Case, World]:
    """Let the learners train until the log has listed what became of the update; return what was there."""
    read_by_syncer, read_by_x = Way(w.store), Way(w.store)
    own: dict[str, World] = {name: w.by(key) for name, key in (keys or {}).items()}
    gates = {name: Gate(w.bus) for name in "abx"}
    of = {name: replace(own.get(name, w), bus=gates[name]) for name in "abx"}
    syncer = own.get("s1", w).through(lambda _: read_by_syncer).syncer("s1")
    make = (lambda inner, *_: Odd(inner.log, odd)) if odd is not None else None
    x = of["x"].through(lambda _: read_by_x).learner("x", make_backend=make)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(syncer))
        case = Case(syncer, gates["a"], gates["x"], x, read_by_syncer, read_by_x)
        telling = asyncio.ensure_future(story(case))
        # Of two learners, neither is usual: only among three is an update too long.
        others = "ab" if odd == OWN[Reason.TOO_LONG] else "a"
        for agent in (*(of[name].learner(name) for name in others), x):
            await stack.enter_async_context(training(agent, step_s=0.05))
        await telling
        await case.reach(max(case.head, AT) + 4)
    return case, w


async def agrees(c: Case, w: World, expected: set[Reason]) -> None:
    """Compare all places that say whether work was lost."""
    headers = [commit.header for chain in (await all_commits(w.log)).values() for commit in chain]
    found = [r for h in headers for r in h.rejected]
    by_reason: dict[str, int] = {}
    for r in found:
        by_reason[r.reason] = by_reason.get(r.reason, 0) + r.count
    astray = {r.reason for r in found if (r.learner, r.base) == ("x", AT)}
    assert expected <= astray
    assert astray - LOSSLESS == expected - LOSSLESS
    losses = [r for r in found if r.reason not in LOSSLESS]
    lost = {r.reason for r in losses}

    sent = {said.digest: said.tokens for said in (*c.x.said, *c.x.held)}
    merged = {i.base: i.tokens for h in headers for i in h.inputs if i.learner == "x"}
    account = c.of_x.uplink.accounts[0]
    longest: dict[int, int] = {}
    for r in losses:
        if r.learner == "x":
            assert r.count <= len({said.digest for said in (*c.x.said, *c.x.held) if said.base == r.base}), "lost once"
            longest[r.base] = max(sent[r.digest], longest.get(r.base, 0))
    assert account.rejected + account.late == sum(longest[base] - merged.get(base, 0) for base in longest)

    status = await read_status(w.log, w.bus, w.runtime, 0.1)
    assert status.rejections == by_reason
    said, spare = rejections(status.rejections)
    assert {part.split()[0] for part in said.split(", ") if part} == lost
    assert {part.split()[0] for part in spare.split(", ") if part} == by_reason.keys() - lost

    history = RunHistory(w.run)
    for commit in (await all_commits(w.log))[0]:
        history.take(commit)
    totals = time_views.totals(history, w.runtime.wall())
    whole = sum(by_reason.values())
    times = sum(r.count for r in losses)
    assert (totals["updates_rejected"], totals["rejected_without_loss"]) == (times, whole - times)
    rows = time_views.learners(history, np.inf)
    for row in rows:
        assert row["updates_rejected"] == sum(r.count for r in losses if r.learner == row["learner"])
        assert row["updates_rejected"] + row["rejected_without_loss"] == sum(
            r.count for r in found if r.learner == row["learner"]
        )
    assert {r["reason"] for r in time_views.reasons(history, np.inf) if r["work_lost"]} == lost

    counted = {
        sample.labels["reason"]: sample.value
        for family in c.syncer.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "isthmus_rejections_total" and sample.value
    }
    assert counted == by_reason

    for header in headers:
        for r in header.rejected:
            lines = (await explain(w.log, f"0/{header.version}")).lines
            word = "rejected" if r.reason in lost else "rejected, without loss"
            assert any(
                line.startswith(f"  {word}: {r.learner} from version {r.base}, {r.count} times: {r.reason}")
                for line in lines
            )
            if any(i.digest == r.digest for h in headers[: header.version] for i in h.inputs):
                continue  # its own story ends where it is merged
            story = (await explain(w.log, update_key(0, r.learner, r.base, r.digest))).lines
            assert any(
                line.startswith(f"{word} before version {header.version}, {r.count} times: {r.reason}")
                for line in story
            )


@pytest.mark.parametrize("name", STORIES)
@in_virtual_time
async def test_whether_work_is_lost_is_the_same_everywhere(name: str, folder: Path) -> None:
    story, expected = STORIES[name]
    async with world(folder, seed_of(RULES, PACE)) as w:
        await agrees(*await happened(w, story, None), expected)


@pytest.mark.parametrize("reason", OWN)
@in_virtual_time
async def test_an_update_that_cannot_be_used_is_lost_everywhere(reason: Reason, folder: Path) -> None:
    async with world(folder, seed_of(RULES, PACE)) as w:
        await agrees(*await happened(w, nothing, OWN[reason]), {reason})


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        (Bytes(signer=None), {Reason.UNSIGNED}),
        (Bytes(signer=signed.US, spoil=slice(64, 65)), {Reason.BAD_SIGNATURE}),
        (Bytes(signer=signed.EVIL), {Reason.NOT_A_MEMBER, Reason.STALE}),
    ],
)
@in_virtual_time
async def test_an_update_without_the_right_signature_is_lost_everywhere(
    odd: Bytes, expected: set[Reason], folder: Path
) -> None:
    keys = {"a": signed.EU, "x": signed.US, "s1": signed.SYNC}
    roles = {"a": signed.L, "x": signed.L, "s1": signed.S}
    async with world(folder, replace(seed_of(RULES, PACE), signer=signed.OWNER)) as w:
        await signed.admit(w, *((name, roles[name], key) for name, key in keys.items()))
        await agrees(*await happened(w, nothing, odd, keys), expected)
