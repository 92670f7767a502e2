"""Cost of the signatures of updates and announcements, and the share of a core that they cost a syncer."""

from collections.abc import Callable, Iterator

import numpy as np

from isthmus.codecs import codec, kernels, pack
from isthmus.format.records import frame
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import update_key
from isthmus.format.records.messages import Announce, encode, learner_stream
from isthmus.format.records.objects import SCHEMA, MemberSpec, RunHeader, UpdateHeader
from isthmus.format.rules import MemberRole, Pace, Rules
from isthmus.format.signing.keys import new_signer
from isthmus.log import updates
from isthmus.log.bus_messages import verify_batch
from isthmus.log.membership import Members, Membership
from isthmus.log.run import Run
from isthmus.log.verify import Verifier
from isthmus_lab.bench.kernels import flat
from isthmus_lab.bench.measure import Case, Row, Say, counted, in_turns, parted, row

SIZES = (1 << 20, 16 << 20)
"""Parameters of a fragment."""

A_SECOND = 300
"""Updates a second that a syncer is assumed to take."""

BATCH = 4
"""Announcements of one author under one signature, as when a few fragments share a link."""

AT_ONCE = 32
"""Messages that are timed together, because the time of a single message is too short."""


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the times of signed updates and messages beside unsigned ones, the share of a core, and the bytes."""
    kernels.warm()
    says = parted(say, len(SIZES) + 1)
    extra: dict[int, list[float]] = {}
    for size, part in zip(SIZES, says, strict=False):
        took = in_turns(list(_updates(size)), repeats, part)
        n = counted(size)
        yield row("signing", "open an update, signed", n, took["open, signed"], "s", limits=took["open"], at_most=True)
        yield row("signing", "seal an update", n, took["seal"], "s", limits=took["digest"], at_most=True)
        extra[size] = [signed - plain for signed, plain in zip(took["open, signed"], took["open"], strict=True)]
    plain, signed = _announced(1), _announced(BATCH)
    took = in_turns(list(_messages(plain, signed)), repeats, says[-1])
    one = [t / AT_ONCE for t in took["heard, signed"]]
    yield row("signing", "hear an announcement, signed", "1 in a batch", one, "s",
              limits=[t / AT_ONCE for t in took["heard"]], at_most=True)  # fmt: skip
    many = [t / AT_ONCE / BATCH for t in took["heard, signed, in batches"]]
    yield row("signing", "hear an announcement, signed", f"{BATCH} in a batch", many, "s",
              limits=[t / AT_ONCE for t in took["heard"]], at_most=True)  # fmt: skip
    yield row("signing", "sign an announcement", "1 in a batch", [t / AT_ONCE for t in took["sign"]], "s")
    alone = [(s - p) / AT_ONCE for s, p in zip(took["heard, signed"], took["heard"], strict=True)]
    for size in SIZES:
        # An update is opened once, and announced about twice: when it is stored, and again before it is settled.
        shares = [A_SECOND * (a + 2 * b) for a, b in zip(extra[size], alone, strict=True)]
        yield row("signing", f"a syncer's share at {A_SECOND} updates a second", counted(size), shares, "cores")
    sizes = [float(len(bytes_of(plain, None)[0])), float(len(bytes_of(plain, new_signer())[0]))]
    yield row("signing", "bytes of an announcement, signed", "1 in a batch", [sizes[1]] * repeats, "B",
              limits=[sizes[0]] * repeats, at_most=True)  # fmt: skip
    per = len(bytes_of(signed, new_signer())[0]) / BATCH
    yield row("signing", "bytes of an announcement, signed", f"{BATCH} in a batch", [per] * repeats, "B",
              limits=[sizes[0]] * repeats, at_most=True)  # fmt: skip


def _updates(size: int) -> Iterator[Case]:
    fragment, code = flat(size), codec("int4")
    x = (0.02 * np.random.default_rng(0).standard_normal(size)).astype(np.float32)
    signer = new_signer()
    run, members = _run(signer.author)
    unsigned = Members(run)
    unsigned.signed = False
    header = UpdateHeader(
        schema=SCHEMA, run=run.digest, fragment=0, learner="eu", incarnation=1, base=0, codec="int4", steps=12,
        tokens=12000, step=12, tokens_seen=12000, train_s=1.0,
    )  # fmt: skip
    plain = frame.written(Kind.UPDATE, header, pack(code, fragment, x))
    signed = frame.written(Kind.UPDATE, header, pack(code, fragment, x))
    frame.seal(signed, signer)
    sealed = frame.written(Kind.UPDATE, header, pack(code, fragment, x))

    def opened(blob: frame.Body, judge: Members) -> Callable[[], object]:
        digest, verifier = frame.digest(blob), Verifier(run, judge)
        key = update_key(0, "eu", 0, digest)
        return lambda: updates.verify_update(verifier, blob, key, digest, fragment, "eu", 0, under=0)

    yield Case("open", opened(plain, unsigned))
    yield Case("open, signed", opened(signed, members))
    yield Case("digest", lambda: frame.digest(plain))

    def seal() -> None:
        frame.seal(sealed, signer)
        frame.digest(sealed)

    yield Case("seal", seal)


def _messages(plain: list[Announce], several: list[Announce]) -> Iterator[Case]:
    signer = new_signer()
    run, members = _run(signer.author)
    stream = learner_stream("eu")
    (bare,), (one,), (many,) = bytes_of(plain, None), bytes_of(plain, signer), bytes_of(several, signer)

    def hear(body: bytes, judge: Members | None) -> Callable[[], object]:
        return lambda: [verify_batch(stream, body, run.digest, judge) for _ in range(AT_ONCE)]

    yield Case("heard", hear(bare, None))
    yield Case("heard, signed", hear(one, members))
    yield Case("heard, signed, in batches", hear(many, members))
    yield Case("sign", lambda: [encode(*plain, signer=signer) for _ in range(AT_ONCE)])


def bytes_of(messages: list[Announce], signer: object) -> tuple[bytes]:
    """Return messages as they are sent, under one signature, or unsigned if there is no signer."""
    return (encode(*messages, signer=signer),)  # type: ignore[arg-type]


def _announced(count: int) -> list[Announce]:
    run, _ = _run(bytes(32))
    return [
        Announce(
            run=run.digest, id="0123456789abcdef", learner="eu", incarnation=1, fragment=n, base=7,
            key=f"updates/{n:05d}/eu/000000000007-0123456789abcdef", digest=bytes(range(32)), size=1 << 20, steps=12,
            tokens=12000, step=84, tokens_seen=84000, due=True, age_s=0.5, step_s=0.1, upload_s=0.3, sync_s=0.2,
            seen=7, seen_digest=bytes(range(32)),
        )
        for n in range(count)
    ]  # fmt: skip


def _run(owner: bytes) -> tuple[Run, Members]:
    """Return a run of one fragment, and its members: one learner whose key is `owner`."""
    rules = Rules(fragments=1, codec_up="int4")
    header = RunHeader(
        schema=SCHEMA, rules=rules, pace=Pace(), arithmetic=kernels.ARITHMETIC, model="", seed=0, created_at=0.0,
        snapshots=(bytes(32),), layout=bytes(32), owner=owner,
    )  # fmt: skip
    run = Run("bench", bytes(range(32)), header, None, {})  # type: ignore[arg-type]
    members = Members(run)
    members.versions[0] = Membership(0, bytes(32), (MemberSpec("eu", MemberRole.LEARNER, owner),))
    return run, members
