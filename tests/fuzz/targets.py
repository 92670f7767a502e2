"""The fuzzer's targets: for each parser, a function that takes bytes. It raises an exception only if there is a fault.

A target catches the exceptions that its parser may raise. Any other exception is a finding. So is an object that a
signed run accepts although no member signed it.
"""

import asyncio
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forgery.matrix import READERS, Forgery, Stage, own_key, read
from forgery.matrix import targets as targets_of
from isthmus.codecs import BadCode, as_bytes, codec, packed_bounds, unpack
from isthmus.codecs.kernels import F32
from isthmus.codecs.packed import packed
from isthmus.errors import InputError, LogCorrupt, RankLost, RecordInvalid
from isthmus.format import digests
from isthmus.format.layout import Layout, Spec, TensorClass, partition
from isthmus.format.records import frame, objects, tree
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import commit_in
from isthmus.format.records.messages import decode, learner_stream
from isthmus.format.signing.keys import public_key
from isthmus.learner import checkpoint, checkpoint_shards
from isthmus.learner.ranks import protocol
from isthmus.log import merge, run
from isthmus.log.bus_messages import verify_batch
from isthmus.log.membership import Members, opened
from isthmus.log.run import Run
from isthmus.log.verify import KINDS, Verifier
from isthmus.runtime.urls import Place, redacted
from support.opened import opened_update, verified_checkpoint

CORPUS = Path(__file__).with_name("corpus")

SCHEMAS: dict[Kind, type[msgspec.Struct]] = {
    Kind.RUN: objects.RunHeader,
    Kind.UPDATE: objects.UpdateHeader,
    Kind.VALUE: objects.ValueHeader,
    Kind.SNAPSHOT: objects.SnapshotHeader,
    Kind.COMMIT: objects.CommitHeader,
    Kind.CLAIM: objects.ClaimHeader,
    Kind.SEGMENT: objects.SegmentHeader,
    Kind.PACKED: objects.PackedHeader,
    Kind.CHECKPOINT: objects.CheckpointHeader,
    Kind.PART: objects.PartHeader,
    Kind.EVALUATION: objects.EvaluationHeader,
    Kind.MEMBERS: objects.MembersHeader,
    Kind.MANIFEST: objects.ManifestHeader,
    Kind.PROMOTION: objects.PromotionHeader,
}
"""Every kind of stored object. (Messages have a target of their own.)"""

CODECS = ("f32", "bf16", "int8", "int4", "q3", "q2", "q1.5", "q1", "q0.75")

FRAGMENT = partition(
    [
        Spec("embed", (40, 8), "float32", TensorClass.EMBEDDING),
        Spec("weight", (33, 17), "float32", TensorClass.DENSE),
        Spec("gain", (19,), "float32", TensorClass.DENSE),
        Spec("scalar", (), "float32", TensorClass.DENSE),
    ],
    1,
).fragments[0]
"""The fragment that the codecs' payloads encode."""


@dataclass(frozen=True)
class Target:
    """One parser."""

    name: str
    run: Callable[[bytes], None]
    framed: bool = True
    """Whether its bytes are an object of Isthmus, whose checksum a mutation may correct."""


# --- the run whose objects the corpus holds ---------------------------------------------------------------------------


@cache
def the_run() -> Run:
    """Return the run that `corpus.py` has made."""
    blob = (CORPUS / "run" / "object").read_bytes()
    header, cut = run.parsed(blob)
    return Run("corpus", frame.digest(blob), header, run._placed(cut), dict(cut.frozen))


@cache
def the_members() -> Members:
    """Return the run's members, as its owner signed them, and with the charter."""
    members = Members(the_run())
    for name in ("object", "1"):
        members.versions.append(opened((CORPUS / "members" / name).read_bytes(), members.current, members.run))
    return members


@cache
def originals() -> frozenset[bytes]:
    """Return the digests of all objects and messages that a member signed."""
    return frozenset(digests.digest(path.read_bytes()) for path in CORPUS.glob("*/*"))


# --- parsers ----------------------------------------------------------------------------------------------------------


def _record(kind: Kind) -> Callable[[bytes], None]:
    def work(data: bytes) -> None:
        try:
            header, payload = frame.parse(data, kind, SCHEMAS[kind])
        except RecordInvalid:
            pass
        else:
            assert len(payload) < len(data), "a payload must be shorter than its object"
            # A header that was read can be written, and read again with the same result.
            again = bytes(frame.gathered(kind, header, [bytes(payload)]))
            once_more = frame.gathered(kind, frame.parse(again, kind, SCHEMAS[kind])[0], [bytes(payload)])
            assert bytes(once_more) == again, "the header changes when it is written and read"
        try:
            frame.parse_head(data, kind, SCHEMAS[kind])
            frame.head_end(data, kind)
        except RecordInvalid:
            pass
        frame.kind_of(data)
        frame.payload_start(data)
        table = frame.table_of(data)
        if table is not None:
            assert len(table.digests) <= len(data) // 32, "there are more digests than bytes for them"

    return work


def _messages(data: bytes) -> None:
    try:
        assert len(decode(data)) >= 1, "an empty batch was accepted"
    except RecordInvalid:
        return
    try:
        verify_batch(learner_stream("eu"), data, the_run().digest, the_members())
    except RecordInvalid:
        return
    assert digests.digest(data) in originals(), "accepted a message that no member signed"


def _signed(data: bytes) -> None:
    try:
        kind = Kind(frame.kind_of(data))
        if kind in (Kind.RUN, Kind.MEMBERS):
            frame.require_signature(data, kind)
        else:
            the_members().require_author(data, kind)
    except (RecordInvalid, ValueError):
        return
    assert digests.digest(data) in originals(), f"a {kind.name.lower()} that no member signed"


def _run_object(data: bytes) -> None:
    try:
        header, cut = run.parsed(data)
        run._require_owner(data, header)
        layout: Layout = run._placed(cut)
    except (RecordInvalid, msgspec.ValidationError, ValueError):
        return
    assert layout.size >= 0, "not a layout"


def _membership(data: bytes) -> None:
    for before in the_members().versions[:2]:
        try:
            opened(data, before, the_run())
        except RecordInvalid:
            continue
        assert digests.digest(data) in originals(), "accepted a membership that the owner did not sign"


def _update(data: bytes) -> None:
    found = the_run()
    try:
        update = opened_update(found, data, found.layout.fragments[0], "eu", 0, members=the_members(), under=1)
    except RecordInvalid:
        return
    assert np.isfinite(update.gradient.norm), "the norm must be finite"
    assert digests.digest(data) in originals(), "accepted an update that its learner did not sign"


def _payload(name: str) -> Callable[[bytes], None]:
    code = codec(name)
    least, most = packed_bounds(code, FRAGMENT)
    out: F32 = np.empty(FRAGMENT.size, np.float32)

    def work(data: bytes) -> None:
        """Check that bytes which are accepted as a packed fragment decode to the same values in both ways."""
        try:
            found = packed(FRAGMENT, code, as_bytes(data))
        except BadCode:
            return
        assert least <= len(data) <= most, "accepted a size that no encoder makes"
        try:
            unpack(code, FRAGMENT, as_bytes(data), out)
        except BadCode:
            return
        whole = found.decode()
        assert np.array_equal(whole.view(np.uint32), out.view(np.uint32)), "two ways to decode differ"

    return work


def _snapshot(data: bytes) -> None:
    found = the_run()
    try:
        header, payload = frame.parse(data, Kind.SNAPSHOT, objects.SnapshotHeader)
        state = merge.restore(header, payload, found.layout.fragments[0].size)
    except (RecordInvalid, ValueError):
        return
    assert len(state.digest) == 32, "not a state"


def _checkpoint(data: bytes) -> None:
    try:
        # Elsewhere, only a signed checkpoint gets this far. Here nothing has to be signed.
        bare = frame.unsealed(data) if len(data) >= frame.PREFIX.size else data
        found = checkpoint.open_checkpoint(verified_checkpoint(the_run(), bare, nobody()), the_run())
        if found.optimizer is not None:
            tree.rebuild(found.header.optimizer, found.leaves, lambda leaf: leaf.data)
    except RecordInvalid:
        pass


@cache
def nobody() -> Members:
    """Return members of a run in which nothing is signed."""
    members = Members(the_run())
    members.signed = False
    return members


def _part(data: bytes) -> None:
    try:
        header = frame.parse_head(data, Kind.CHECKPOINT, objects.CheckpointHeader)
        for number in header.in_parts:
            checkpoint_shards._require_whole(header, number, [])
    except RecordInvalid:
        pass


def _tree(data: bytes) -> None:
    try:
        tree.unpacked(data, lambda leaf: leaf.data)
    except RecordInvalid:
        pass


def _wire(data: bytes) -> None:
    async def body() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        envelope, rest = await protocol.read(reader, protocol.HELLO_MAX, 1 << 16)
        assert len(rest) <= len(data), "more was read than was sent"
        assert envelope.number is not None, "not a message"

    try:
        asyncio.run(body())
    except RankLost:
        pass


def _metadata(data: bytes) -> None:
    from isthmus.torch import dcp

    try:
        dcp._understood(data)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError):
        pass  # `dcp.read` turns these into an `InputError`


def _verify(data: bytes) -> None:
    """Check that the verifier admits only objects that a member signed, and, in a run that is not signed, only objects of
    this run."""
    try:
        kind = Kind(frame.kind_of(data))
        record = next(record for record, of in KINDS.items() if of == kind)
    except (ValueError, StopIteration):
        return
    bare = bytes(frame.unsealed(data)) if len(data) >= frame.PREFIX.size else data
    for blob, members in ((data, the_members()), (bare, nobody())):
        verifier, key = Verifier(the_run(), members), own_key(blob, kind) or "commits/00000/000000000001"
        try:
            if kind == Kind.COMMIT:
                verifier.commit(blob, 0, max(1, commit_in(key)))
            else:
                found = verifier.open(blob, key, record)
                assert getattr(found.header, "run") in (the_run().digest, bytes(32)), "another run's"  # noqa: B009
        except (RecordInvalid, LogCorrupt):
            continue
        assert not members.signed or digests.digest(blob) in originals(), f"a {kind.name.lower()} that no member signed"


@cache
def a_stage() -> Stage:
    """Return a run in which nothing is signed, so that every object with its own digest and key reaches the readers."""
    return Stage(signed=False)


def _readers(data: bytes) -> None:
    """Check that a reader ends with a valid result or with an error of Isthmus, whatever is in the store."""
    try:
        kind = Kind(frame.kind_of(data))
    except ValueError:
        return
    stage = a_stage()
    key = own_key(data, kind) or targets_of(stage).get(kind)
    if key is None:
        return
    reader = list(READERS)[zlib.crc32(data) % len(READERS)]
    found = read(stage, reader, Forgery(kind, "replaced", "the fuzzer", {key: data}))
    assert not (isinstance(found, str) and found.startswith("TAKEN")), f"{reader}, {key}: {found}"


def _of_readers() -> list[bytes]:
    """Return the objects of the stage that readers read."""
    return [blob for key in targets_of(a_stage()).values() for blob in (a_stage().whole[key][0],)]


def _words(data: bytes) -> None:
    text = data.decode(errors="replace")
    for work in (public_key, Place.of, redacted):
        try:
            work(text)
        except InputError:
            pass


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        *(Target(f"record-{kind.name.lower()}", _record(kind)) for kind in SCHEMAS),
        Target("messages", _messages),
        Target("signed", _signed),
        Target("run", _run_object),
        Target("membership", _membership),
        Target("update", _update),
        *(Target(f"codec-{name}", _payload(name), framed=False) for name in CODECS),
        Target("snapshot", _snapshot),
        Target("checkpoint", _checkpoint),
        Target("parts", _part),
        Target("tree", _tree, framed=False),
        Target("verify", _verify),
        Target("readers", _readers),
        Target("wire", _wire, framed=False),
        Target("dcp-metadata", _metadata, framed=False),
        Target("words", _words, framed=False),
    )
}


def seeds(target: Target) -> list[bytes]:
    """Return the inputs from which a target begins: real bytes of its kind, and earlier findings."""
    name = target.name.removeprefix("record-")
    if name == "readers":
        return [*_of_readers(), b""]
    folders = {
        "signed": ["*"],
        "verify": ["*"],
        "tree": ["tree"],
        "membership": ["members"],
        "parts": ["checkpoint"],
    }.get(target.name, [name])
    found = [path.read_bytes() for folder in folders for path in sorted(CORPUS.glob(f"{folder}/*"))]
    return [*found, b""]


def facts() -> dict[str, Any]:
    """Return the number of seeds of each target, for a report."""
    return {name: {"seeds": len(seeds(target))} for name, target in TARGETS.items()}


if __name__ == "__main__":
    print(json.dumps(facts(), indent=1))
