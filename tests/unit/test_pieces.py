"""Large objects are read in pieces: each is checked as it arrives, and only a damaged piece is read again."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import RecordInvalid
from isthmus.format.digests import digest as digest_of
from isthmus.format.records import frame
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.objects import SCHEMA, ClaimHeader, ValueHeader
from isthmus.format.rules import Pace, Rules
from isthmus.reasons import Reason
from isthmus.runtime.clock import single_threaded, threaded
from isthmus.store import FileStore, Layer, Store, checked
from isthmus_services.main import main
from support.world import seed_of, serving, train, world

PIECE = 4096
HEADER = ValueHeader(schema=SCHEMA, run=bytes(32), fragment=3, version=8, codec="f32")


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "PIECE_BYTES", PIECE)
        patch.setattr(frame, "PIECE_LEAST", PIECE)
        yield


def value(size: int) -> bytes:
    payload = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    return bytes(frame.written(Kind.VALUE, HEADER, payload))


class Way(Layer):
    """A store that records its requests and can damage its answers."""

    def __init__(self, folder: Path, blob: bytes, spoil: Callable[[int, int, Body], Body] = lambda n, at, body: body):
        super().__init__(FileStore(folder, single_threaded(0)))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "x").write_bytes(blob)
        self.spoil = spoil
        self.asked: list[tuple[int, int]] = []
        self.times: Counter[int] = Counter()

    async def get(self, key: str) -> Body:
        self.asked.append((0, -1))
        return await super().get(key)

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        self.asked.append((start, stop))
        self.times[start] += 1
        return self.spoil(self.times[start], start, await super().get_range(key, start, stop))


def read(way: Way, at_most: int, first: int | None = None, cut: bool = False) -> bytes:
    return bytes(asyncio.run(checked.read(way, single_threaded(0), "x", at_most, first=first, cut=cut)))


@given(st.integers(0, 5 * PIECE))
def test_what_is_written_says_its_pieces_and_is_read_as_it_was(size: int) -> None:
    blob = value(size)
    header, payload = frame.parse(blob, Kind.VALUE, ValueHeader)
    assert (header, len(payload)) == (HEADER, size)
    assert frame.payload_start(blob) == len(blob) - size
    assert frame.parse_head(blob[: frame.payload_start(blob)], Kind.VALUE, ValueHeader) == HEADER
    table = frame.table_of(blob)
    assert len(blob) <= frame.largest(Kind.VALUE, size)
    if size <= PIECE:
        assert table is None
        return
    assert table is not None
    pieces = list(table.pieces())
    assert [begin for begin, *_ in pieces] == list(range(table.start, len(blob), PIECE))
    assert pieces[-1][1] == len(blob)
    assert all(digest_of(blob[a:b]) == digest for a, b, digest in pieces)
    assert bytes(frame.gathered(Kind.VALUE, HEADER, [payload[:100], payload[100:]])) == blob


def test_pieces_come_one_by_one_and_a_small_object_at_once(tmp_path: Path) -> None:
    blob = value(3 * PIECE + 100)
    way = Way(tmp_path / "a", blob)
    assert read(way, len(blob)) == blob
    start = frame.payload_start(blob)
    ends = [min(a + PIECE, len(blob)) for a in range(start, len(blob), PIECE)]
    assert way.asked[0] == (0, checked.HEAD_BYTES)
    assert sorted(way.asked[1:]) == list(zip(range(start, len(blob), PIECE), ends, strict=True))
    for known in (value(PIECE), b"anything at all" * 1000, blob[:100], b""):
        for about in (len(known), 10 * PIECE):
            way = Way(tmp_path / "b", known)
            assert read(way, about) == known
            assert way.asked[-1] == (0, about + 1)
            if known:
                with pytest.raises(RecordInvalid, match=f"x has more than the {len(known) - 1} bytes"):
                    read(way, len(known) - 1)


def test_a_piece_that_arrives_damaged_or_cut_is_asked_for_again_alone(tmp_path: Path) -> None:
    blob = value(4 * PIECE)
    start = frame.payload_start(blob)

    def spoil(n: int, at: int, body: Body) -> Body:
        if at == start + PIECE and n == 1:
            body[17] ^= 1
        return body[:-1] if at == start + 2 * PIECE and n < 3 else body

    way = Way(tmp_path, blob, spoil)
    assert read(way, len(blob)) == blob
    assert [way.times[start + n * PIECE] for n in range(4)] == [1, 2, 3, 1]


@pytest.mark.parametrize("where", ["a piece", "a digest"])
def test_a_piece_that_stays_damaged_is_named(tmp_path: Path, where: str) -> None:
    blob = bytearray(value(3 * PIECE))
    start = frame.payload_start(blob)
    blob[start + 2 * PIECE if where == "a piece" else frame.PREFIX.size + frame.header_size(blob) + 64] ^= 1
    way = Way(tmp_path, bytes(blob))
    with pytest.raises(RecordInvalid, match=f"x: bytes {start + 2 * PIECE} to {len(blob)} are not what") as caught:
        read(way, len(blob))
    assert caught.value.reason == Reason.DIGEST_MISMATCH
    assert way.times[start + 2 * PIECE] == checked.TRIES


def test_no_more_is_read_than_is_allowed_or_wanted(tmp_path: Path) -> None:
    blob = value(6 * PIECE)
    start = frame.payload_start(blob)
    way = Way(tmp_path, blob)
    assert read(way, 2 * PIECE, cut=True) == blob[: 2 * PIECE]
    assert way.asked[1:] == [(0, 2 * PIECE)]
    way = Way(tmp_path, blob)
    assert read(way, len(blob) - 1, cut=True) == blob[:-1]
    way = Way(tmp_path, blob)
    assert read(way, len(blob), cut=True) == blob
    assert len(way.asked) == 7
    way = Way(tmp_path, blob)
    assert read(way, len(blob), first=start + PIECE + 1) == blob[: start + 2 * PIECE]
    assert max(stop for _, stop in way.asked[1:]) == start + 2 * PIECE
    way = Way(tmp_path, value(PIECE))
    assert read(way, 3000, first=300) == value(PIECE)[:300]


def test_what_an_object_says_of_itself_makes_nobody_read_or_hold_more(tmp_path: Path) -> None:
    """A hostile header may state endless pieces, pieces of any size, or a payload of an impossible size."""
    for size, piece in ((2**50, PIECE), (1900 * (2**30), 2**30), (2**63, 2**30), (5 * PIECE, 2**32 - 1)):
        head = frame.PREFIX.pack(
            frame.MAGIC, frame.FRAME_VERSION, Kind.UPDATE, 10, size, 0, piece, bytes(32), bytes(64)
        )
        way = Way(tmp_path, head.ljust(80_000, b"\1"))
        assert len(read(way, 20 * PIECE, cut=True)) == 80_000
        assert way.asked == [(0, checked.HEAD_BYTES), (0, 20 * PIECE)]


def test_a_head_that_is_long_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = value(40 * PIECE)
    monkeypatch.setattr(checked, "HEAD_BYTES", 256)
    way = Way(tmp_path, blob)
    assert read(way, len(blob)) == blob
    assert way.asked[:2] == [(0, 256), (0, frame.payload_start(blob))]


@pytest.mark.parametrize(
    ("kind", "piece"), [(Kind.VALUE, 1), (Kind.VALUE, 4095), (Kind.VALUE, 2**30 + 1), (Kind.CLAIM, 4096)]
)
def test_pieces_that_nobody_writes_are_turned_away(kind: Kind, piece: int) -> None:
    header: ValueHeader | ClaimHeader = HEADER
    if kind == Kind.CLAIM:
        header = ClaimHeader(
            schema=SCHEMA, run=bytes(32), learner="a", incarnation=1, claimed_at=0.0, resumed="", versions=(0,),
            tokens_seen=0, tokens_lost=0,
        )  # fmt: skip
    blob = frame.draft(kind, header).blob
    blob[28:32] = piece.to_bytes(4, "little")
    with pytest.raises(RecordInvalid, match=f"pieces of {piece} bytes in a {kind.name.lower()}"):
        frame.parse(blob, kind, type(header))
    assert frame.table_of(blob) is None


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_no_beginning_of_anything_is_dangerous(tail: bytes, piece: int, size: int) -> None:
    prefix = frame.PREFIX.pack(frame.MAGIC, frame.FRAME_VERSION, Kind.UPDATE, 10, size, 0, piece, bytes(32), bytes(64))
    table = frame.table_of(prefix + tail)
    assert table is None or len(table.digests) <= len(tail) // 32
    frame.table_of(tail)


class Rough(Layer):
    """A store that damages every range of a large object when it is first read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.spoilt: set[tuple[str, int]] = set()

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        body = await super().get_range(key, start, stop)
        large = start and len(body) and key.split("/", maxsplit=1)[0] in ("updates", "values", "snapshots")
        if large and (key, start) not in self.spoilt:
            self.spoilt.add((key, start))
            body = bytearray(body)
            body[len(body) // 2] ^= 1
        return body


def test_a_run_over_a_store_that_damages_what_it_sends_loses_nothing(tmp_path: Path) -> None:
    rough: list[Rough] = []

    def over(inner: Store) -> Rough:
        rough.append(Rough(inner))
        return rough[-1]

    async def go() -> None:
        with threaded(2, 0) as runtime:
            seed = seed_of(Rules(fragments=1, sync_every=2, codec_up="f32", codec_down="f32"))
            pace = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=2)
            async with world(tmp_path / "run", seed, runtime=runtime) as clean:
                w = clean.through(over)
                async with serving(w.syncer(pace=pace)) as syncer:
                    await train(w.learner("a"), 4, enough=lambda: syncer.coordinators[0].head >= 5)
                    assert Reason.DIGEST_MISMATCH not in syncer.coordinators[0].rounds.rejected_total

    asyncio.run(go())
    seen = {key.split("/")[0] for key, _ in rough[0].spoilt}
    assert seen == {"updates", "values", "snapshots"}
    assert main(["replay", str(tmp_path / "run")]) == 0
