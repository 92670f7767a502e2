"""A small signed run with one object of every kind, and the means to forge each object."""

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from isthmus.codecs import codec, pack
from isthmus.format.records import frame, keys
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.objects import (
    CheckpointHeader,
    ClaimHeader,
    CommitHeader,
    EvaluationHeader,
    Evidence,
    FragmentPoint,
    Input,
    ManifestHeader,
    MemberSpec,
    PackedHeader,
    PromotionHeader,
    Record,
    SegmentHeader,
    SnapshotHeader,
    UpdateHeader,
)
from isthmus.format.records.tree import laid, numpy_leaf
from isthmus.format.rules import MemberRole, Rules
from isthmus.format.signing import Signer
from isthmus.format.signing.keys import new_signer
from isthmus.log import merge
from isthmus.log.membership import Members, changed, write
from isthmus.log.verify import _KEYS, KINDS, Verifier
from support.commits import committed, given
from support.world import seed_of, world

OWNER, STRANGER, EXPELLED, ROTATED, EU, US, SYNC, SECOND, COLLECTOR, FOLLOWER = (new_signer() for _ in range(10))

BY: Mapping[Kind, Signer] = {
    Kind.UPDATE: EU,
    Kind.CLAIM: EU,
    Kind.CHECKPOINT: EU,
    Kind.VALUE: SYNC,
    Kind.SNAPSHOT: SYNC,
    Kind.COMMIT: SYNC,
    Kind.SEGMENT: COLLECTOR,
    Kind.PACKED: COLLECTOR,
    Kind.EVALUATION: FOLLOWER,
    Kind.MANIFEST: EU,
    Kind.PROMOTION: FOLLOWER,
}
"""The key that signs each kind here."""

SCHEMA_OF = {kind: record for record, kind in KINDS.items()}
RULES = Rules(fragments=2, sync_every=4)


def sealed(blob: frame.Blob, signer: Signer | None) -> tuple[str, Body]:
    """Return an object's key in the store, by its content, and the object signed by `signer`, or unsigned."""
    out = frame.unsealed(blob)
    frame.seal(out, signer)
    kind = Kind(frame.kind_of(out))
    header, _ = frame.parse(out, kind, SCHEMA_OF[kind])
    return _KEYS[SCHEMA_OF[kind]](header, frame.digest(out)), out


def entries() -> list[MemberSpec]:
    """Return the members from the second version of the membership on."""
    return [
        MemberSpec("col", MemberRole.COLLECTOR, COLLECTOR.author),
        MemberSpec("eu", MemberRole.LEARNER, EU.author),
        MemberSpec("fol", MemberRole.FOLLOWER, FOLLOWER.author),
        MemberSpec("s-1", MemberRole.SYNCER, SYNC.author),
        MemberSpec("s-2", MemberRole.SYNCER, SECOND.author),
        MemberSpec("us", MemberRole.LEARNER, US.author),
    ]


def earlier() -> list[MemberSpec]:
    """Return the members of the first version: there is one more, and one has another key."""
    members = changed(entries(), added=MemberSpec("eu", MemberRole.LEARNER, ROTATED.author))
    return changed(members, added=MemberSpec("gone", MemberRole.LEARNER, EXPELLED.author))


class Stage:
    """The run, its membership of two versions, and one object of every kind. The objects fit together."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory(prefix="isthmus-stage-") as folder:
            asyncio.run(self._build(Path(folder) / "run"))

    async def _build(self, folder: Path) -> None:
        seed = seed_of(RULES)
        async with world(folder, replace(seed, signer=OWNER)) as w:
            self.run = w.run
            self.members = Members(w.run)
            heads = [0] * len(w.run.layout.fragments)
            for members in (earlier(), entries()):
                await write(w.store, self.members, OWNER, members, heads, 1.8e9)
            self._first = [
                await w.store.get(keys.snapshot_key(f.index, 0, digest))
                for f, digest in zip(w.run.layout.fragments, w.run.header.snapshots, strict=True)
            ]
        self.verifier = Verifier(self.run, self.members)
        self._made: dict[Kind, tuple[str, Body]] = {}
        self._make()

    def first(self, p: int) -> tuple[str, Body]:
        """Return version 0 of a fragment."""
        return keys.snapshot_key(p, 0, self.run.header.snapshots[p]), self._first[p]

    def one(self, kind: Kind) -> tuple[str, Body]:
        """Return the valid object of a kind, and its key."""
        key, blob = self._made[kind]
        return key, bytearray(blob)

    def header(self, kind: Kind) -> Record:
        """Return the header of the object of a kind."""
        return frame.parse(self._made[kind][1], kind, SCHEMA_OF[kind])[0]

    def changed(self, kind: Kind, **fields: Any) -> Body:
        """Return the object of a kind with other fields, unsigned."""
        header, payload = frame.parse(self._made[kind][1], kind, SCHEMA_OF[kind])
        return frame.written(kind, msgspec.structs.replace(header, **fields), np.frombuffer(payload, np.uint8))

    def inputs(self) -> tuple[Input, ...]:
        """Return the inputs of the commit."""
        header = self.header(Kind.COMMIT)
        assert isinstance(header, CommitHeader)
        return header.inputs

    def _keep(self, kind: Kind, blob: Body) -> tuple[str, Body]:
        self._made[kind] = sealed(blob, BY[kind])
        return self._made[kind]

    def _make(self) -> None:
        run, digest = self.run, self.run.digest
        f = run.layout.fragments[0]
        up, down = codec(run.rules.codec_up), codec(run.rules.codec_down)
        state = merge.restore(*frame.parse(self._first[0], Kind.SNAPSHOT, SnapshotHeader), f.size)
        values = (0.01 * np.random.default_rng(0).standard_normal(f.size)).astype(np.float32)
        update = UpdateHeader(
            schema=1, run=digest, fragment=0, learner="eu", incarnation=1, base=0, codec=up.name, steps=12, tokens=120,
            step=12, tokens_seen=120, train_s=1.0,
        )  # fmt: skip
        key, blob = self._keep(Kind.UPDATE, frame.written(Kind.UPDATE, update, pack(up, f, values)))
        asked = merge.weight(120, 12)
        about = given("eu", 0, 1, key=key, digest=frame.digest(blob), steps=12, tokens=120, step=12, tokens_seen=120,
                      bytes=len(blob), weight=asked)  # fmt: skip
        outer = merge.outers(run.rules)
        round_ = merge.Accumulator(f, outer)
        round_.add(values, asked, learner="eu")
        result = merge.advance(state, round_, down, digest, run.rules.feedback_down)
        value_key, value = self._keep(Kind.VALUE, result.value)
        commit = committed(
            1, about, run=digest, previous=digest, dense=outer["dense"], embedding=outer["embedding"],
            codec_down=down.name, value_key=value_key, value_digest=frame.digest(value), writer="s-1", members=2,
            published_digest=result.published_digest, state_digest=result.state_digest,
        )  # fmt: skip
        _, body = self._keep(Kind.COMMIT, frame.draft(Kind.COMMIT, commit).blob)
        self._keep(Kind.SNAPSHOT, bytearray(bytes(merge.snapshot(result.state, 0, digest))))
        segment = SegmentHeader(schema=1, run=digest, fragment=0, first=1, sizes=(len(body),))
        at, packed = self._keep(Kind.SEGMENT, frame.written(Kind.SEGMENT, segment, np.frombuffer(body, np.uint8)))
        pointer = PackedHeader(
            schema=1, run=digest, fragment=0, version=1, segment=at, offset=len(packed) - len(body), size=len(body),
            digest=frame.digest(body),
        )  # fmt: skip
        self._keep(Kind.PACKED, frame.draft(Kind.PACKED, pointer).blob)
        claim = ClaimHeader(
            schema=1, run=digest, learner="eu", incarnation=1, claimed_at=1.8e9, resumed="",
            versions=(0,) * len(run.layout.fragments), tokens_seen=0, tokens_lost=0,
        )  # fmt: skip
        self._keep(Kind.CLAIM, frame.draft(Kind.CLAIM, claim).blob)
        self._keep(Kind.CHECKPOINT, self.checkpoint())
        series = EvaluationHeader(schema=1, run=digest, series="loss", cut=1, value=1.0, written_at=1.8e9)
        measured, number = self._keep(Kind.EVALUATION, frame.draft(Kind.EVALUATION, series).blob)
        manifest = ManifestHeader(
            schema=1, run=digest, learner="eu", code="1.0", model=bytes(32), configuration=bytes(32), sources=(),
            hardware="one CPU", written_at=1.8e9,
        )  # fmt: skip
        self._keep(Kind.MANIFEST, frame.draft(Kind.MANIFEST, manifest).blob)
        promotion = PromotionHeader(
            schema=1, run=digest, number=1, previous=digest, members=2, versions=(1,) * len(run.layout.fragments),
            published=bytes(32), evidence=(Evidence(measured, frame.digest(number)),), by="fol", written_at=1.8e9,
        )  # fmt: skip
        self._keep(Kind.PROMOTION, frame.draft(Kind.PROMOTION, promotion).blob)

    def checkpoint(self, learner: str = "eu", incarnation: int = 1, step: int = 12, value: float = 0.5) -> Body:
        """Return an unsigned checkpoint whose parameters all have this value."""
        point = FragmentPoint(
            base=0, settled_to=0, origin_step=0, origin_tokens=0, sent_step=None, sent_tokens=0, merged=False,
            ledger=(0, 0, 0, 0, 0), open_bases=(), settled_bases=(), given_up=(), attempts=(), residual_of="",
        )  # fmt: skip
        leaves = []
        for f in self.run.layout.fragments:
            leaves += [numpy_leaf(np.full(f.size, value, np.float32))]
            leaves += [numpy_leaf(np.zeros(0, np.float32)) for _ in range(2)]
        _, pieces = laid(leaves)
        header = CheckpointHeader(
            schema=1, run=self.run.digest, learner=learner, incarnation=incarnation, step=step, tokens_seen=10 * step,
            tokens_lost=0, loss=1.0, taken_at=1.8e9, fragments=(point,) * len(self.run.layout.fragments),
            arrays=tuple(leaf.spec for leaf in leaves), optimizer=None, data=None,
        )  # fmt: skip
        return bytearray(bytes(frame.gathered(Kind.CHECKPOINT, header, pieces)))
