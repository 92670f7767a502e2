"""Any rectangle of a checkpoint's arrays is read back from pieces unchanged, and damaged pieces are rejected."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from isthmus.errors import ObjectMissing, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.objects import SCHEMA, CheckpointHeader, Part, PartHeader
from isthmus.format.records.tree import NOWHERE, Leaf, LeafSpec
from isthmus.learner import checkpoint_shards
from isthmus.learner.checkpoint_shards import ShardRef, ShardToWrite
from isthmus.log.listing import parts_in
from isthmus.reasons import Reason
from isthmus.store import Entry
from isthmus.torch import model as torch_model
from support.written_log import Written

WHOLE = np.arange(7 * 5, dtype=np.uint16).reshape(7, 5)
"""An array whose elements have two bytes, as in bfloat16."""

BLOCKS = [((0, 0), (3, 5)), ((3, 0), (4, 2)), ((3, 2), (4, 3))]
"""Offsets and shapes of the pieces that three ranks hold. The pieces tile `WHOLE`."""


def block(of: np.ndarray, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    return of[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]


def leaf(array: np.ndarray, blocks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Leaf:
    """Return a leaf for an array of which the first rank holds the first block, and so on."""
    spec = LeafSpec(maker="torch", dtype="bfloat16", shape=array.shape, size=array.nbytes)
    pieces = [ShardToWrite(rank, block(array, *where).copy(), *where) for rank, where in enumerate(blocks)]
    return Leaf(spec, NOWHERE, pieces)


async def stored(w: Written, *leaves: Leaf) -> CheckpointHeader:
    """Have each rank write its part; return the header of a checkpoint that names the parts."""
    found = []
    for rank, held in checkpoint_shards.by_rank(leaves).items():
        header = PartHeader(
            schema=SCHEMA, run=w.run.digest, learner="a", incarnation=1, step=7, rank=rank,
            pieces=tuple(piece for piece, _ in held),
        )  # fmt: skip
        found.append(await checkpoint_shards.write(w.log, header, [array for _, array in held]))
    return CheckpointHeader(
        schema=SCHEMA, run=w.run.digest, learner="a", incarnation=1, step=7, tokens_seen=1, tokens_lost=0, loss=None,
        taken_at=0.0, fragments=(), arrays=tuple(x.spec for x in leaves), optimizer=None, data=None,
        parts=tuple(found), in_parts=tuple(i for i, x in enumerate(leaves) if x.pieces),
    )  # fmt: skip


def test_a_part_lies_under_the_key_that_it_says() -> None:
    async def body(w: Written) -> None:
        [part] = (await stored(w, leaf(np.arange(3, dtype=np.uint16), [((0,), (3,))]))).parts
        blob = await w.store.get(part.key)
        assert (await w.log.open(blob, part.key, PartHeader)).header.step == 7
        for other in (part.key.replace("/a/", "/b/"), part.key.replace("/000001/", "/000007/"), part.key[:-1] + "x"):
            with pytest.raises(RecordInvalid, match="it lies under"):
                await w.log.open(blob, other, PartHeader)

    Written().drive(body)


@pytest.mark.parametrize("where", [*BLOCKS, ((0, 0), (7, 5)), ((2, 1), (3, 3)), ((6, 4), (1, 1)), ((3, 0), (4, 5))])
def test_any_rectangle_is_read_from_the_pieces_it_lies_in(where: Any) -> None:
    async def body(w: Written) -> None:
        other = np.arange(3, dtype=np.uint16)
        header = await stored(w, leaf(other, [((0,), (3,))]), leaf(WHOLE, BLOCKS))
        assert len(header.parts) == 3, "one part for each rank, however many arrays the rank holds"
        lies = await checkpoint_shards.located(w.log, header, 1 << 20)
        w.store.requests.clear()
        found = await checkpoint_shards.read(w.log, lies[1], 2, *where)
        assert np.array_equal(found.view(np.uint16).reshape(where[1]), block(WHOLE, *where))
        assert len(w.store.of("get_range")) == sum(meets(b, where) for b in BLOCKS), "no other pieces are fetched"
        whole = await checkpoint_shards.whole(w.log, Leaf(header.arrays[0], NOWHERE, lies[0]))
        assert np.array_equal(whole.data.view(np.uint16), other)
        made = torch_model.make_tensor(whole)
        assert made.data_ptr() == whole.data.ctypes.data, "nothing else uses these bytes, so they are not copied"

    Written().drive(body)


def meets(a: Any, b: Any) -> bool:
    (ao, an), (bo, bn) = a, b
    return all(ao[i] < bo[i] + bn[i] and bo[i] < ao[i] + an[i] for i in range(2))


def test_a_number_without_dimensions_is_an_array_too() -> None:
    async def body(w: Written) -> None:
        header = await stored(w, leaf(np.array(9, np.uint16), [((), ())]))
        lies = await checkpoint_shards.located(w.log, header, 1 << 20)
        assert (await checkpoint_shards.whole(w.log, Leaf(header.arrays[0], NOWHERE, lies[0]))).data.view(np.uint16)[
            0
        ] == 9

    Written().drive(body)


def test_what_is_damaged_or_gone_is_not_believed() -> None:
    async def body(w: Written) -> None:
        header = await stored(w, leaf(WHOLE, BLOCKS))
        lies = await checkpoint_shards.located(w.log, header, 1 << 20)
        part = header.parts[1]
        good = bytes(await w.log.store.get(part.key))
        await w.log.store.put(part.key, good[:-64] + bytes([good[-64] ^ 1]) + good[-63:])
        with pytest.raises(RecordInvalid, match=r"the bytes from \d+ on are not what was written") as caught:
            await checkpoint_shards.read(w.log, lies[0], 2, (0, 0), (7, 5))
        assert caught.value.reason == Reason.DIGEST_MISMATCH
        await checkpoint_shards.read(w.log, lies[0], 2, (0, 0), (3, 5))  # this does not need the damaged piece
        await w.log.store.put(part.key, good[: lies[0][1].at + 3])
        with pytest.raises(RecordInvalid, match="not what was written"):
            await checkpoint_shards.read(w.log, lies[0], 2, (0, 0), (7, 5))
        await w.log.store.put(part.key, good[:200] + b"!" + good[201:])
        with pytest.raises(RecordInvalid, match="does not begin as was said"):
            await checkpoint_shards.located(w.log, header, 1 << 20)
        await w.log.store.delete(part.key)
        with pytest.raises(ObjectMissing):
            await checkpoint_shards.located(w.log, header, 1 << 20)

    Written().drive(body)


def test_pieces_that_do_not_make_up_an_array_are_refused() -> None:
    async def body(w: Written) -> None:
        gap = await stored(w, leaf(WHOLE, BLOCKS[:2]))
        with pytest.raises(RecordInvalid, match="do not make up array 0"):
            await checkpoint_shards.located(w.log, gap, 1 << 20)
        beyond = await stored(w, leaf(np.zeros((8, 5), np.uint16), [((0, 0), (6, 5)), ((7, 0), (1, 5))]))
        shape = msgspec.structs.replace(beyond.arrays[0], shape=(7, 5), size=WHOLE.nbytes)
        with pytest.raises(RecordInvalid, match="do not make up array 0"):
            await checkpoint_shards.located(w.log, msgspec.structs.replace(beyond, arrays=(shape,)), 1 << 20)
        with pytest.raises(RecordInvalid, match="there is no array 3"):
            await checkpoint_shards.located(w.log, msgspec.structs.replace(gap, in_parts=(3,)), 1 << 20)
        another = await stored(w, leaf(WHOLE, BLOCKS))
        with pytest.raises(RecordInvalid, match="is of another checkpoint"):
            await checkpoint_shards.located(w.log, msgspec.structs.replace(another, step=8), 1 << 20)
        short: list[Part] = [msgspec.structs.replace(part, size=part.size - 64) for part in another.parts]
        with pytest.raises(RecordInvalid, match="ends before what it holds"):
            await checkpoint_shards.located(w.log, msgspec.structs.replace(another, parts=tuple(short)), 1 << 20)

    Written().drive(body)


def test_a_part_lies_where_collectors_find_it_and_says_what_is_in_it() -> None:
    async def body(w: Written) -> None:
        header = await stored(w, leaf(WHOLE, BLOCKS))
        for rank, part in enumerate(header.parts):
            assert part.key.startswith(f"learners/a/000001/checkpoints/parts/000000000007-{rank:05d}-")
            blob = await w.log.store.get(part.key)
            said, payload = frame.parse(blob, frame.Kind.PART, PartHeader)
            assert len(blob) == part.size
            assert len(payload) == part.size - part.head
            assert (said.rank, [piece.array for piece in said.pieces]) == (rank, [0])
            assert all(piece.at % frame.ALIGN == 0 for piece in said.pieces)
        listed = [Entry(part.key, part.size, 0.0) for part in header.parts]
        assert parts_in([*listed, Entry("learners/a/000001/checkpoints/parts/mine", 1, 0.0)]) == listed

    Written().drive(body)


def test_pieces_are_told_between_ranks_as_they_are() -> None:
    lies = ShardRef("learners/a/000001/parts/x", 64, 30, bytes(32), (3, 0), (4, 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(lies), type=ShardRef) == lies
