"""The verifier rejects every kind of object that is forged in its header, its key or its signature."""

import ast
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from isthmus.errors import LogCorrupt, RecordInvalid
from isthmus.format.records import frame, keys
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.objects import (
    UNSTATED,
    CheckpointHeader,
    CommitHeader,
    Healed,
    Record,
    SnapshotHeader,
    UpdateHeader,
)
from isthmus.format.signing import Signer
from isthmus.log import merge
from isthmus.log.verify import KINDS, Commit, Verified, Verifier, glance, head_of
from support.forgery import BY, EXPELLED, OWNER, ROTATED, STRANGER, Stage, sealed

ROOT = Path(__file__).parents[2]

STAGE = Stage()
VERIFIER = STAGE.verifier
ALONE = sorted(kind for kind in KINDS.values() if kind is not Kind.PART)
"""Kinds whose objects are checked by themselves. Parts are checked with their checkpoint."""


def opened(key: str, blob: Body, kind: Kind, under: int | None = None) -> Verified[Any]:
    record = next(record for record, of in KINDS.items() if of is kind)
    return VERIFIER.open(blob, key, record, under=under)


@pytest.mark.parametrize("kind", ALONE)
def test_what_is_as_it_should_be_goes_through(kind: Kind) -> None:
    key, blob = STAGE.one(kind)
    found = opened(key, blob, kind)
    assert (found.key, found.digest, found.author) == (key, frame.digest(blob), BY[kind].author)
    assert bytes(found.payload) == bytes(blob[frame.payload_start(blob) :])


@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize(
    ("forger", "why"),
    [
        (None, "unsigned"),
        (STRANGER, "the membership has no"),
        ("another role", "the membership has no"),
    ],
    ids=["nobody", "a stranger", "another role"],
)
def test_nobody_writes_who_may_not(kind: Kind, forger: Signer | str | None, why: str) -> None:
    if forger == "another role":
        if kind is Kind.EVALUATION:
            return  # every member may measure
        forger = BY[Kind.COMMIT if BY[kind] is not BY[Kind.COMMIT] else Kind.UPDATE]
    assert forger is None or isinstance(forger, Signer)
    key, blob = sealed(STAGE.one(kind)[1], forger)
    with pytest.raises(RecordInvalid, match=why):
        opened(key, blob, kind)


@pytest.mark.parametrize("kind", [Kind.UPDATE, Kind.CLAIM, Kind.CHECKPOINT])
@pytest.mark.parametrize("forger", [EXPELLED, ROTATED], ids=["expelled", "rotated"])
def test_who_was_a_member_is_none_now(kind: Kind, forger: Signer) -> None:
    """An object that a verified object vouches for may still be by a former member."""
    name = "gone" if forger is EXPELLED else "eu"
    key, blob = sealed(STAGE.changed(kind, learner=name), forger)
    opened(key, blob, kind)
    with pytest.raises(RecordInvalid, match=f"membership {STAGE.members.current.version} has no"):
        opened(key, blob, kind, STAGE.members.current.version)


@pytest.mark.parametrize("kind", [Kind.UPDATE, Kind.CLAIM, Kind.CHECKPOINT])
def test_nobody_writes_under_anothers_name(kind: Kind) -> None:
    key, blob = sealed(STAGE.changed(kind, learner="us"), BY[kind])
    with pytest.raises(RecordInvalid, match="us with the key"):
        opened(key, blob, kind)


def test_a_syncer_commits_under_its_own_name_and_the_membership_it_names() -> None:
    for changed, why in (
        ({"writer": "s-2"}, "s-2 with the key"),
        ({"members": 99}, "members/000000000003: is missing"),
    ):
        _, blob = sealed(STAGE.changed(Kind.COMMIT, **changed), BY[Kind.COMMIT])
        with pytest.raises(LogCorrupt, match=why):
            VERIFIER.commit(blob, 0, 1)


@pytest.mark.parametrize("kind", ALONE)
def test_what_is_of_another_run_is_not_of_this_one(kind: Kind) -> None:
    key, blob = sealed(STAGE.changed(kind, run=bytes(32)), BY[kind])
    with pytest.raises(RecordInvalid, match="belongs to another run"):
        opened(key, blob, kind)


@pytest.mark.parametrize("kind", ALONE)
def test_an_object_lies_under_its_own_key_or_nowhere(kind: Kind) -> None:
    key, blob = STAGE.one(kind)
    number = key.rsplit("/", 1)[1][:12]
    elsewhere = [key[:-1] + ("0" if key[-1] != "0" else "1"), f"{key}0", key.replace("00000", "00001", 1)]
    if number.isdigit():
        elsewhere.append(key.replace(number, f"{int(number) + 1:012d}"))
    for other in set(elsewhere) - {key}:
        with pytest.raises(RecordInvalid, match="it lies under"):
            opened(other, blob, kind)


@pytest.mark.parametrize("kind", ALONE)
def test_one_bit_is_enough(kind: Kind) -> None:
    key, blob = STAGE.one(kind)
    draw = np.random.default_rng(int(kind))
    for bit in draw.integers(0, 8 * len(blob), 60):
        other = bytearray(blob)
        other[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(RecordInvalid):
            opened(key, other, kind)


@pytest.mark.parametrize("kind", [Kind.COMMIT, Kind.CLAIM, Kind.PACKED, Kind.EVALUATION])
def test_what_has_no_payload_has_none(kind: Kind) -> None:
    header = STAGE.header(kind)
    key, blob = sealed(frame.draft(kind, header, 64).blob, BY[kind])
    with pytest.raises(RecordInvalid, match="with a payload"):
        opened(key, blob, kind)


def test_what_is_named_by_its_digest_is_that_and_nothing_else() -> None:
    key, blob = STAGE.one(Kind.UPDATE)
    VERIFIER.open(blob, key, UpdateHeader, digest=frame.digest(blob))
    with pytest.raises(RecordInvalid, match="was named"):
        VERIFIER.open(blob, key, UpdateHeader, digest=bytes(32))


def test_only_a_verifier_makes_a_verified_object() -> None:
    header = STAGE.header(Kind.UPDATE)
    with pytest.raises(TypeError, match="only a Verifier"):
        Verified("k", header, memoryview(b""), bytes(32), bytes(32), proof=object())  # type: ignore[arg-type]


def test_the_author_is_judged_before_the_header_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of 64 MiB takes gigabytes to decode. Only a member's header may cost that."""
    key, blob = sealed(STAGE.one(Kind.CHECKPOINT)[1], STRANGER)

    def never(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(frame, "parse", never)
    with pytest.raises(RecordInvalid, match="the membership has no"):
        VERIFIER.open(blob, key, CheckpointHeader)


def test_a_stranger_makes_nobody_decode_a_long_header(monkeypatch: pytest.MonkeyPatch) -> None:
    key, blob = STAGE.one(Kind.CHECKPOINT)
    assert VERIFIER.header_most == (1 << 20) + 4096 * len(STAGE.run.layout.specs)
    end = frame.head_end(blob, Kind.CHECKPOINT) - frame.PREFIX.size
    assert VERIFIER.open(blob, key, CheckpointHeader, header_most=end).key == key
    monkeypatch.setattr(frame, "parse", None)
    with pytest.raises(RecordInvalid, match=f"but at most {end - 1} are decoded here"):
        VERIFIER.open(blob, key, CheckpointHeader, header_most=end - 1)


# --- commits ----------------------------------------------------------------------------------------------------------


def committed(**changed: Any) -> Commit:
    _, blob = sealed(STAGE.changed(Kind.COMMIT, **changed), BY[Kind.COMMIT])
    return VERIFIER.commit(blob, 0, 1)


def first_input(**changed: Any) -> dict[str, Any]:
    header = STAGE.header(Kind.COMMIT)
    assert isinstance(header, CommitHeader)
    return {"inputs": (msgspec.structs.replace(header.inputs[0], **changed), *header.inputs[1:])}


def outer(**changed: Any) -> Any:
    header = STAGE.header(Kind.COMMIT)
    assert isinstance(header, CommitHeader)
    return msgspec.structs.replace(header.dense, **changed)


def test_a_commit_of_the_runs_own_rules_goes_through() -> None:
    assert committed().version == 1
    steps = STAGE.run.rules.periods
    for period in (0.0, *map(float, steps)):
        assert committed(period=period).header.period == period
    asked = 120.0 * (120.0 / 12)
    assert committed(**first_input(weight=asked / 3, scale=0.5, clipped=("norm",))).header.inputs[0].scale == 0.5


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"arithmetic": 99}, "written with arithmetic 99"),
        ({"inputs": ()}, "merges nothing and does not heal"),
        ({"healed": Healed(source=0, broken_at=1, key="k", why="")}, "merges and heals at once"),
        ({"dense": outer(learning_rate=-1e4)}, "by other rules"),
        ({"dense": outer(momentum=0.0)}, "by other rules"),
        ({"embedding": outer(learning_rate=0.3)}, "by other rules"),
        ({"codec_down": "f32"}, "published in f32, and not in int4"),
        ({"value_key": "values/00000/000000000001-0000000000000000"}, "which cannot be"),
        ({"period": STAGE.run.rules.periods[0] - 0.5}, "says a period of"),
        ({"period": STAGE.run.rules.periods[1] + 0.5}, "says a period of"),
        ({"inputs": STAGE.inputs() * 2}, "two updates of one learner on one base"),
        (first_input(key="updates/00000/eu/000000000000-0000000000000000"), "is not where that update is"),
        (first_input(learner="us"), "is not where that update is"),
        (first_input(weight=1201.0), "nothing is said of why"),
        (first_input(scale=0.5), "nothing is said of why"),
        (first_input(weight=1201.0, clipped=("tokens",)), "more than the 1200 that it asked for"),
        (first_input(steps=0, weight=1.0), "is no work"),
        (first_input(tokens=0, weight=1.0), "is no work"),
    ],
)
def test_a_commit_that_cannot_be_is_none_whoever_signed_it(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(LogCorrupt, match=why):
        committed(**changed)


def test_what_is_merged_was_based_on_what_was_there() -> None:
    given = STAGE.inputs()[0]
    key = keys.update_key(0, given.learner, 1, given.digest)
    with pytest.raises(LogCorrupt, match="which was not there yet"):
        committed(**first_input(base=1, key=key))


@pytest.mark.parametrize(
    "healed", [Healed(source=1, broken_at=1, key="k", why=""), Healed(source=0, broken_at=2, key="k", why="")]
)
def test_what_heals_begins_with_what_was_there(healed: Healed) -> None:
    with pytest.raises(LogCorrupt, match="not there yet"):
        committed(inputs=(), healed=healed, codec_down="f32", writer="heal")


def test_an_expelled_syncer_commits_no_more_beyond_what_the_membership_grants() -> None:
    last = STAGE.members.current.until[0]
    for version, may in ((last, True), (last + 1, False)):
        digest = bytes(32)
        changed = {
            "version": version,
            "members": 1,
            "value_key": keys.value_key(0, version, digest),
            "value_digest": digest,
        }
        _, blob = sealed(STAGE.changed(Kind.COMMIT, **changed), BY[Kind.COMMIT])
        if may:
            assert VERIFIER.commit(blob, 0, version).version == version
        else:
            with pytest.raises(LogCorrupt, match="made under membership 1, when 2 was in force"):
                VERIFIER.commit(blob, 0, version)


# --- what commits name ------------------------------------------------------------------------------------------------


def test_a_value_is_what_its_commit_published() -> None:
    commit = committed()
    _, blob = STAGE.one(Kind.VALUE)
    assert VERIFIER.value(blob, commit.header).header.version == 1
    _, other = sealed(STAGE.changed(Kind.VALUE, codec="int8"), BY[Kind.VALUE])
    named = msgspec.structs.replace(
        commit.header, value_key=keys.value_key(0, 1, frame.digest(other)), value_digest=frame.digest(other)
    )
    with pytest.raises(RecordInvalid, match="packed in int8, and not in int4"):
        VERIFIER.value(other, named)
    with pytest.raises(RecordInvalid, match="was named"):
        VERIFIER.value(other, commit.header)


def test_version_0_is_what_the_run_object_names_whole_or_in_part() -> None:
    key, blob = STAGE.first(0)
    size = STAGE.run.layout.fragments[0].size
    begin = frame.payload_start(blob) + 4 * size
    wanted = np.frombuffer(blob[begin - 4 * size : begin], np.float32)
    assert np.array_equal(VERIFIER.published(blob[:begin], key, 0, None), wanted)
    assert np.array_equal(VERIFIER.snapshot(blob, key, 0, None).published, wanted)
    evil = bytearray(blob)
    evil[begin - 4 : begin] = np.float32(666.0).tobytes()
    forged: list[Body] = [evil, frame.unsealed(blob)]
    state = merge.initial(np.full(size, 666.0, np.float32))
    forged.append(sealed(bytearray(bytes(merge.snapshot(state, 0, bytes(32)))), OWNER)[1])
    for other in forged:
        with pytest.raises(RecordInvalid, match="digest-mismatch"):
            VERIFIER.published(other[:begin], key, 0, None)
        with pytest.raises(RecordInvalid, match="digest-mismatch"):
            VERIFIER.snapshot(other, key, 0, None)
    with pytest.raises(RecordInvalid, match="of published value, its fragment has"):
        VERIFIER.published(blob[: begin - 4], key, 0, None)


def test_a_snapshot_is_the_state_that_its_commit_recorded() -> None:
    key, blob = STAGE.one(Kind.SNAPSHOT)
    assert VERIFIER.snapshot(blob, key, 0, committed()).version == 1
    with pytest.raises(RecordInvalid, match="it holds state"):
        VERIFIER.snapshot(blob, key, 0, committed(state_digest=b"x" * 32))
    with pytest.raises(RecordInvalid, match="commit 1 does not state the digest of its state"):
        VERIFIER.snapshot(blob, key, 0, committed(state_digest=UNSTATED))
    with pytest.raises(RecordInvalid, match="version 1 published"):
        VERIFIER.published(blob, key, 0, committed(published_digest=bytes(32)))
    second = sealed(STAGE.changed(Kind.SNAPSHOT, version=2), BY[Kind.SNAPSHOT])
    with pytest.raises(RecordInvalid, match="it is of fragment 0, version 2"):
        VERIFIER.snapshot(second[1], second[0], 0, committed())


# --- nothing bypasses the verifier ------------------------------------------------------------------------------------

READS = {"parse", "parse_head"}
GATES = {
    "format/records/frame.py": "the frame itself",
    "format/records/messages.py": "words on the bus, which `log.authenticate` judges",
    "log/run.py": "the run object, which vouches for everything",
    "log/membership.py": "the membership, which says who may write what",
    "log/proposals.py": "proposed memberships, which `log.membership` judges when they are created",
    "log/verify.py": "the verifier",
}


def test_no_other_module_parses_an_object() -> None:
    """No other module makes the verifier's types, either."""
    wrong = []
    for folder in ("pkg/isthmus", "services/isthmus_services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).as_posix()
            if folder == "pkg/isthmus" and inside in GATES:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                name = ""
                if isinstance(node, ast.Call):
                    f = node.func
                    name = f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""
                    of = f.value.id if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) else ""
                    if (name in READS and of == "frame") or name in ("Verified", "Unverified", "Commit"):
                        wrong.append(f"{folder}/{inside}:{node.lineno} calls {name}: only {', '.join(GATES)} may")
                if isinstance(node, ast.ImportFrom) and node.module == "isthmus.format.records.frame":
                    names = {alias.name for alias in node.names} & READS
                    wrong += [f"{folder}/{inside}:{node.lineno} imports {name}" for name in names]
    assert not wrong, "\n".join(wrong)


WHOLE = {
    "doctor/store.py": "what it has just written itself",
    "store": "stores",
    "agent/tolerance.py": "a store",
}


def test_nobody_reads_an_object_to_its_end() -> None:
    """An attacker who may write could store a terabyte. `checked` reads no more than an object of its kind can have."""
    wrong = []
    for path in sorted((ROOT / "pkg/isthmus").rglob("*.py")):
        inside = path.relative_to(ROOT / "pkg/isthmus").as_posix()
        if inside in WHOLE or inside.split("/")[0] in WHOLE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            f = node.func if isinstance(node, ast.Call) else None
            if (
                isinstance(f, ast.Attribute)
                and f.attr == "get"
                and ast.unparse(f.value).split(".")[-1] in ("store", "_store")
            ):
                wrong.append(f"{inside}:{node.lineno} reads a whole object")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


def test_of_what_is_unverified_only_what_it_says_is_known() -> None:
    _, blob = STAGE.one(Kind.CHECKPOINT)
    found = glance(blob[: frame.payload_start(blob)], CheckpointHeader)
    assert found.said.learner == "eu"
    assert not hasattr(found, "header"), "code for verified objects cannot use this one"


def test_the_verifier_knows_every_kind() -> None:
    missing = set(Kind) - set(KINDS.values()) - {Kind.RUN, Kind.MEMBERS, Kind.MESSAGE}
    assert not missing
    assert all(issubclass(record, Record) for record in KINDS)
    assert isinstance(STAGE.header(Kind.SNAPSHOT), SnapshotHeader)
    assert isinstance(VERIFIER, Verifier)


def test_a_head_that_is_named_by_its_digest_is_that_one() -> None:
    key, blob = STAGE.one(Kind.UPDATE)
    head = blob[: frame.payload_start(blob)]
    assert head_of(head, key, UpdateHeader, frame.digest(head)).learner == "eu"
    with pytest.raises(RecordInvalid, match=f"{key} does not begin as was said"):
        head_of(head, key, UpdateHeader, bytes(32))


@pytest.mark.parametrize("key", ["values/../../x", "values//x", "./x", "x/.y", "/x", "x/", "", "x\n", "a b"])
def test_no_key_leads_out_of_the_run(key: str) -> None:
    key_of, _ = STAGE.one(Kind.PACKED)
    header = STAGE.header(Kind.PACKED)
    other = frame.draft(Kind.PACKED, msgspec.structs.replace(header, segment=key)).blob
    frame.seal(other, BY[Kind.PACKED])
    with pytest.raises(RecordInvalid, match="malformed"):
        opened(key_of, other, Kind.PACKED)
