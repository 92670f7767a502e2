"""Commits for tests: every field has a plausible value, and a test sets only the fields that matter to it."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from isthmus.errors import ObjectMissing
from isthmus.format.records import frame
from isthmus.format.records.frame import Body
from isthmus.format.records.keys import commit_key, update_key
from isthmus.format.records.objects import CommitHeader, Input, Late, Outer, Rejection, UpdateHeader, Waited
from isthmus.format.rules import MergeRule, Rules
from isthmus.log import Commit
from isthmus.log.membership import Membership
from isthmus.store import Entry

RUN = bytes(range(32))
CREATED_AT = 1.8e9
ROUND_S = 10.0
"""Seconds between two versions, and from the run's creation to the first round."""

OUTER = Outer(merge=MergeRule.RDA, learning_rate=0.4, momentum=0.8)


def digest_of(name: str) -> bytes:
    return frame.digest(name.encode())


def opened_at(version: int) -> float:
    return CREATED_AT + ROUND_S * version


def given(learner: str, base: int, version: int, name: str = "", p: int = 0, **changed: Any) -> Input:
    """Return an input of a version: trained for 5 s, captured 1 s before the round opened, accumulated 3 s after."""
    digest, at = digest_of(name or f"{learner}/{base}"), opened_at(version)
    plausible = Input(
        key=update_key(p, learner, base, digest),
        digest=digest,
        learner=learner,
        incarnation=1,
        base=base,
        steps=12,
        tokens=1200,
        step=12 * (base + 1),
        tokens_seen=1200 * (base + 1),
        bytes=1000,
        train_s=5.0,
        taken_at=at - 1.0,
        heard_at=at + 1.0,
        fetched_at=at + 2.0,
        arrived_at=at + 3.0,
        weight=1.0,
    )
    return replace(plausible, **changed)


def late(learner: str, base: int, version: int, name: str = "") -> Late:
    """Return an update that was announced 1 s after the round of this version closed."""
    return Late(
        learner=learner, base=base, digest=digest_of(name or f"{learner}/{base}"), heard_at=opened_at(version) + 5
    )


def rejected(learner: str, base: int, reason: str, version: int, name: str = "") -> Rejection:
    digest = digest_of(name or f"{learner}/{base}")
    return Rejection(learner=learner, base=base, reason=reason, digest=digest, count=1, at=opened_at(version))


def committed(version: int, *inputs: Input, p: int = 0, **changed: Any) -> CommitHeader:
    """Return a commit whose round was open for 4 s and merged for 0.5 s; it is in the log 1 s after the close."""
    at = opened_at(version)
    waited = Waited(
        called_by="l0",
        quorum=1,
        quorum_missed=False,
        closed_by="all",
        expected=("l0",),
        missing=(),
        passed=(),
        boundary_at=at - 1.0,
        opened_at=at,
        closed_at=at + 4.0,
        hold_until=0.0,
        quorum_s=2.0,
        grace_s=1.0,
        waited_s=4.0,
        fastest_step_s=1.0,
        slowest_step_s=1.0,
        sync_s=0.5,
        cap_s=2.0,
        merge_s=0.5,
        publish_s=0.5,
        overlap_steps=2.0,
    )
    plausible = CommitHeader(
        schema=1,
        run=RUN,
        previous=bytes(32),
        arithmetic=1,
        fragment=p,
        version=version,
        inputs=inputs,
        late=(),
        dense=OUTER,
        embedding=OUTER,
        codec_down="int4",
        cancelled=0,
        value_key=f"values/{p:05d}/{version:012d}-{'0' * 16}",
        value_digest=bytes(32),
        published_digest=bytes(32),
        state_digest=bytes(32),
        rejected=(),
        rejected_total={},
        waited=waited,
        writer="s1",
        attempt="0",
        written_at=at + 5.0,
    )
    return replace(plausible, **changed)


@dataclass
class RecordedLog:
    """A log of these commits, and a store of these updates."""

    headers: list[CommitHeader]
    updates: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run = SimpleNamespace(url="memory://run", layout=SimpleNamespace(fragments=[None]), rules=Rules())
        self.store = self
        self.members = SimpleNamespace(current=Membership(0, bytes(32)))

    async def commit(self, fragment: int, version: int) -> Commit | None:
        found = [h for h in self.headers if (h.fragment, h.version) == (fragment, version)]
        return Commit(found[0], digest_of(commit_key(fragment, version))) if found else None

    async def newest(self, fragment: int) -> Commit | None:
        return await self.commit(fragment, max((h.version for h in self.headers if h.fragment == fragment), default=0))

    async def list(self, prefix: str) -> list[Entry]:
        return [Entry(key, len(blob), 0.0) for key, blob in sorted(self.updates.items()) if key.startswith(prefix)]

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        if key not in self.updates:
            raise ObjectMissing(key)
        return bytearray(self.updates[key][start:stop])

    async def get(self, key: str) -> Body:
        if key not in self.updates:
            raise ObjectMissing(key)
        return bytearray(self.updates[key])

    async def fetch(self, key: str, kind: frame.Kind, fragment: int) -> Body:
        return await self.get(key)

    async def open(self, blob: Body, key: str, record: type[UpdateHeader]) -> SimpleNamespace:
        """Return an update's header. These updates have no payload, and the test chooses their keys."""
        return SimpleNamespace(key=key, header=frame.parse_head(blob, frame.Kind.UPDATE, record))

    def upload(self, learner: str, base: int, name: str = "", tokens: int = 1200, p: int = 0) -> str:
        """Store an update; return its key."""
        digest = digest_of(name or f"{learner}/{base}")
        header = UpdateHeader(
            schema=1,
            run=RUN,
            fragment=p,
            learner=learner,
            incarnation=1,
            base=base,
            codec="int4",
            steps=12,
            tokens=tokens,
            step=12,
            tokens_seen=tokens,
            train_s=5.0,
        )
        key = update_key(p, learner, base, digest)
        self.updates[key] = bytes(frame.draft(frame.Kind.UPDATE, header).blob)
        return key
