"""A learner's checkpoint: one object, and parts, from which training goes on after a step as if never interrupted."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from msgspec import structs

from isthmus.codecs import kernels
from isthmus.codecs.kernels import U8
from isthmus.errors import RecordInvalid
from isthmus.format.records import frame, tree
from isthmus.format.records.objects import SCHEMA, CheckpointHeader, FragmentPoint, Part, PartHeader, Sent
from isthmus.learner import checkpoint_shards, residuals
from isthmus.learner.backend import ArrayBackend, ArrayRef, Remote, Stored, local_array, local_residual
from isthmus.learner.checkpoint_shards import ShardRef, ShardToWrite
from isthmus.learner.ledger import Account
from isthmus.log import Log
from isthmus.log.run import Run
from isthmus.log.verify import Verified
from isthmus.reasons import Reason
from isthmus.runtime.clock import Runtime


class Stateful(Protocol):
    """A sampler or loader whose place in the data can be kept, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data, as plain data and arrays."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the place that `state_dict` returned."""
        ...


@dataclass(frozen=True, slots=True)
class LoopState:
    """Copies of the state that a training loop has besides the merged parameters, as trees."""

    optimizer: object = None
    local: object = None
    """Tensors of the model that are not merged and have changed, by name."""
    ranks: tuple[object, ...] = ()
    """State that each rank of the learner has alone, such as its place in the data. It may be packed already."""


WITHOUT_STEP = "without link.step"
"""What `Saver.moved` says of a loop that does not say when its steps are done."""


class Saver(Protocol):
    """The state of a training loop besides the merged parameters. Training thread."""

    def mark(self, now: Callable[[], float]) -> None:
        """Note a step boundary. `save` returns the loop's state as it was at the last call of `mark`."""
        ...

    def moved(self, orderly: bool) -> str | None:
        """Return why the state of the last boundary can no longer be saved, or None if it can.

        `orderly`: the loop's owner says that the loop stands between two steps.
        """
        ...

    def save(self) -> LoopState:
        """Return copies of the loop's state as it was at the last boundary."""
        ...

    def take(self, node: object) -> tree.Leaf | None:
        """See `tree.Take`."""
        ...


@dataclass(frozen=True, slots=True)
class FragmentCopy:
    """A copy of one fragment's state at the training side."""

    base: int
    values: ArrayRef
    """Parameters [n], including local work."""
    origin_step: int
    origin_tokens: int
    sent_step: int | None
    sent_tokens: int
    sent_values: ArrayRef | None
    merged: bool


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The state of the training side right after a step; nothing changes it any more."""

    step: int
    tokens_seen: int
    loss: float | None
    points: tuple[FragmentCopy, ...]
    loop: LoopState
    held_s: float = 0.0
    """Seconds for which copying held the training thread."""
    first_loss: float | None = None
    """See `CheckpointHeader`."""


@dataclass(frozen=True, slots=True)
class UplinkPoint:
    """The agent's state of one fragment at the moment of a checkpoint."""

    account: Account
    settled_to: int
    attempts: tuple[tuple[Sent, ArrayRef | None], ...]
    residual: ArrayRef | None
    residual_of: str
    taken: tuple[tuple[int, ArrayRef | None], ...] = ()
    """For each base, the error feedback that updates on it carry. `residual` lacks it until they are settled."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read from the store."""

    key: str
    header: CheckpointHeader
    points: tuple[FragmentCopy, ...]
    traffic: tuple[UplinkPoint, ...]
    leaves: tuple[tree.Leaf, ...]

    def optimizer(self, make: Callable[[tree.Leaf], object]) -> Any:
        """Return the optimizer's state. Raises `RecordInvalid`."""
        return tree.rebuild(self.header.optimizer, self.leaves, make)

    def local(self, make: Callable[[tree.Leaf], object]) -> Any:
        """Return the model's local tensors by name, or None. Raises `RecordInvalid`."""
        return tree.rebuild(self.header.local, self.leaves, make)

    def ranks(self, make: Callable[[tree.Leaf], object]) -> list[Any]:
        """Return the state that each rank had alone. Raises `RecordInvalid`."""
        said = tree.rebuild(self.header.data, self.leaves, make)
        if isinstance(said, dict) and EACH_RANK in said:
            return [tree.unpacked(words, make) for words in said[EACH_RANK]]
        # Earlier releases wrote only the data's state, and packed it only for several ranks.
        packed = said.get(_BY_RANK) if isinstance(said, dict) else None
        places = [said] if packed is None else [tree.unpacked(words, make) for words in packed]
        return [None if place is None else {"objects": {"data": place}} for place in places]

    async def whole(self, log: Log) -> "Checkpoint":
        """Return the checkpoint with all state that does not belong to fragments read from its parts.

        `moved` moves the arrays of the fragments. Raises `Unavailable`, `ObjectMissing`, `RecordInvalid`.
        """
        first = sum(map(_arrays_of, self.header.fragments))
        slots = asyncio.Semaphore(READS_AT_ONCE)

        async def whole(leaf: tree.Leaf) -> tree.Leaf:
            async with slots:
                return await checkpoint_shards.whole(log, leaf)

        state = await asyncio.gather(*map(whole, self.leaves[first:]))
        return replace(self, leaves=(*self.leaves[:first], *state))


Move = Callable[[int, ArrayRef], Awaitable[ArrayRef]]
"""Takes a fragment's index and an array of it; moves the array and returns it."""


async def moved(
    points: Sequence[FragmentCopy], traffic: Sequence[UplinkPoint], move: Move
) -> tuple[tuple[FragmentCopy, ...], tuple[UplinkPoint, ...]]:
    """Return copies of `points` and `traffic` with all arrays moved by `move`."""

    async def maybe(p: int, array: ArrayRef | None) -> ArrayRef | None:
        return None if array is None else await move(p, array)

    new_points, new_traffic = [], []
    for p, (point, known) in enumerate(zip(points, traffic, strict=True)):
        values, sent_values = await move(p, point.values), await maybe(p, point.sent_values)
        new_points.append(replace(point, values=values, sent_values=sent_values))
        attempts = [(sent, await maybe(p, residual)) for sent, residual in known.attempts]
        taken = [(base, await maybe(p, residual)) for base, residual in known.taken]
        residual = await maybe(p, known.residual)
        new_traffic.append(replace(known, attempts=tuple(attempts), taken=tuple(taken), residual=residual))
    return tuple(new_points), tuple(new_traffic)


_NOTHING = np.empty(0, np.float32)

APART_BYTES = 64 << 10
"""Arrays of fragments and optimizer of at least this many bytes go into a part: a restart can read them singly."""

FIRST_RESIDUAL = 2
"""From this index on, a fragment's arrays in a checkpoint are residuals; see `CheckpointHeader`."""


async def why_useless(frozen: StateCopy, backend: ArrayBackend, runtime: Runtime) -> str | None:
    """Return why neither this learner nor a peer could go on from this state; None if it can be stored."""
    why: str | None = await runtime.offload(_why_useless_here, frozen)
    if why is not None:
        return why
    for p, point in enumerate(frozen.points):
        for held in (point.values, point.sent_values):
            if isinstance(held, Remote) and not await backend.is_finite(held):
                return _not_finite(p)
    return None


def _why_useless_here(frozen: StateCopy) -> str | None:
    """Return the same, judging by the loss and by the arrays in this process."""
    if frozen.loss is not None and not np.isfinite(frozen.loss):
        return f"the loss is {frozen.loss}"
    for p, point in enumerate(frozen.points):
        for held in (point.values, point.sent_values):
            if isinstance(held, np.ndarray) and not kernels.all_finite(local_array(held)):
                return _not_finite(p)
    return None


def _not_finite(p: int) -> str:
    return f"fragment {p} holds a NaN or an infinity"


@dataclass(frozen=True, slots=True)
class UnwrittenCheckpoint:
    """A checkpoint before any rank has written its part."""

    header: CheckpointHeader
    leaves: tuple[tree.Leaf, ...]

    def parts(self) -> list[tuple[PartHeader, list[ArrayRef | U8]]]:
        """Return, for each rank, the header of the part that the rank has to write, and the arrays for it."""
        h = self.header
        return [
            (
                PartHeader(
                    schema=SCHEMA, run=h.run, learner=h.learner, incarnation=h.incarnation, step=h.step, rank=rank,
                    pieces=tuple(piece for piece, _ in written),
                ),
                [held for _, held in written],
            )
            for rank, written in checkpoint_shards.by_rank(self.leaves).items()
        ]  # fmt: skip

    def pack(self, stored: Sequence[Part]) -> frame.Gathered:
        """Return the checkpoint object, which names the stored parts. Its own arrays are not copied."""
        _, payload = tree.laid([leaf for leaf in self.leaves if not leaf.pieces])
        return frame.gathered(frame.Kind.CHECKPOINT, structs.replace(self.header, parts=tuple(stored)), payload)


def _arrays_of(f: FragmentPoint) -> int:
    """Return how many of a checkpoint's arrays belong to a fragment; see `CheckpointHeader`."""
    return 3 + len(f.attempts) + len(f.taken_by)


def _leaf(array: ArrayRef | None, size: int, half: bool) -> tree.Leaf:
    """Return an array of a fragment of `size` parameters as a leaf.

    `half`: the array is a residual of two bytes per parameter.
    """
    if isinstance(array, Remote):
        dtype, width = ("<u2", 2) if half else ("<f4", 4)
        spec = tree.LeafSpec(maker="numpy", dtype=dtype, shape=(size,), size=width * size)
        return tree.Leaf(spec, tree.NOWHERE, (ShardToWrite(array.rank, array, (0,), (size,)),))
    return tree.numpy_leaf(_NOTHING if array is None else local_residual(array))


def _apart(leaf: tree.Leaf, part: int, smallest: int) -> tree.Leaf:
    """Return a leaf to be written into the part with this number; unchanged if it has less than `smallest` bytes."""
    if leaf.pieces or leaf.spec.size < smallest:
        return leaf
    shape = leaf.spec.shape
    return tree.Leaf(leaf.spec, tree.NOWHERE, (ShardToWrite(part, leaf.data, (0,) * len(shape), shape),))


READS_AT_ONCE = 4
"""Arrays that are read from parts at the same time. Each needs twice its size in memory until it is checked."""

EACH_RANK = "isthmus: each rank"
"""Key of the state that each rank has alone. It is packed into arrays, since the size of a header is limited."""

_BY_RANK = "isthmus: by rank"


def _packed(ranks: Sequence[object], take: tree.Take) -> object:
    """Return the state that each rank has alone, as arrays of bytes; None if no rank has any."""
    if not any(alone is not None for alone in ranks):
        return None
    packed = [alone if isinstance(alone, np.ndarray) else pack_alone(alone, take) for alone in ranks]
    return {EACH_RANK: packed}


def pack_alone(alone: object, take: tree.Take) -> U8:
    """Return the state that a rank has alone, as bytes [n]. Raises `InputError`, naming what cannot be kept."""
    return np.frombuffer(tree.packed(alone, "", take), np.uint8)


def draft(
    run: Run, learner: str, incarnation: int, tokens_lost: int, taken_at: float, frozen: StateCopy,
    traffic: Sequence[UplinkPoint], take: tree.Take,
) -> UnwrittenCheckpoint:  # fmt: skip
    """Return a checkpoint to be stored. Raises `InputError` for state that cannot be kept."""
    leaves: list[tree.Leaf] = []
    fragments = []
    for fragment, point, known in zip(run.layout.fragments, frozen.points, traffic, strict=True):
        arrays = [point.values, point.sent_values, known.residual, *(residual for _, residual in known.attempts)]
        arrays += [residual for _, residual in known.taken]
        halves = residuals.are_halves(fragment)
        leaves += [_leaf(array, fragment.size, halves and n >= FIRST_RESIDUAL) for n, array in enumerate(arrays)]
        a = known.account
        fragments.append(
            FragmentPoint(
                base=point.base,
                settled_to=known.settled_to,
                origin_step=point.origin_step,
                origin_tokens=point.origin_tokens,
                sent_step=point.sent_step,
                sent_tokens=point.sent_tokens,
                merged=point.merged,
                ledger=(a.merged, a.overwritten, a.late, a.rejected, a.lost),
                open_bases=tuple(a.sent.items()),
                settled_bases=tuple(a.settled.items()),
                given_up=tuple((base, *parts) for base, parts in a.given_up.items()),
                attempts=tuple(sent for sent, _ in known.attempts),
                residual_of=known.residual_of,
                taken_by=tuple(base for base, _ in known.taken),
            )
        )
    optimizer = tree.flatten(frozen.loop.optimizer, "optimizer", take, leaves)
    first = len(leaves)
    local = tree.flatten(frozen.loop.local, "model", take, leaves) if frozen.loop.local else None
    leaves[:first] = [_apart(leaf, 0, APART_BYTES) for leaf in leaves[:first]]
    leaves[first:] = [_apart(leaf, checkpoint_shards.LOCAL, 1) for leaf in leaves[first:]]
    data = tree.flatten(_packed(frozen.loop.ranks, take), "ranks", take, leaves)
    header = CheckpointHeader(
        schema=SCHEMA,
        run=run.digest,
        learner=learner,
        incarnation=incarnation,
        step=frozen.step,
        tokens_seen=frozen.tokens_seen,
        tokens_lost=tokens_lost,
        loss=frozen.loss,
        first_loss=frozen.first_loss,
        taken_at=taken_at,
        fragments=tuple(fragments),
        arrays=tuple(leaf.spec for leaf in leaves),
        optimizer=optimizer,
        data=data,
        local=local,
        in_parts=tuple(number for number, leaf in enumerate(leaves) if leaf.pieces),
    )
    return UnwrittenCheckpoint(header, tuple(leaves))


def open_checkpoint(
    found: Verified[CheckpointHeader], run: Run, elsewhere: Mapping[int, tuple[ShardRef, ...]] | None = None
) -> Checkpoint:
    """Return a checkpoint, checked against the run. Slow, so call it off the loop. Raises `RecordInvalid`.

    `elsewhere`: by number, where the arrays lie that are in parts. These arrays are not read.
    """
    key, header, payload = found.key, found.header, found.payload
    if len(header.fragments) != len(run.layout.fragments):
        raise RecordInvalid(Reason.WRONG_LAYOUT, f"a checkpoint of {len(header.fragments)} fragments")
    elsewhere = elsewhere or {}
    if set(elsewhere) != set(header.in_parts):
        raise RecordInvalid(Reason.TRUNCATED, "its parts are not at hand")
    inside = iter(tree.cut([spec for i, spec in enumerate(header.arrays) if i not in elsewhere], payload))
    leaves = [
        tree.Leaf(spec, tree.NOWHERE, elsewhere[i]) if i in elsewhere else next(inside)
        for i, spec in enumerate(header.arrays)
    ]
    points, traffic, at = [], [], 0
    for fragment, f in zip(run.layout.fragments, header.fragments, strict=True):
        arrays: list[ArrayRef | None] = []
        count = _arrays_of(f)
        for n, leaf in enumerate(leaves[at : at + count]):
            # A residual may be float32 if an earlier release wrote it, or if the learner's parameters were wider then.
            widths = {"<f4": 4, "<u2": 2} if n >= FIRST_RESIDUAL else {"<f4": 4}
            width = widths.get(leaf.spec.dtype) if leaf.spec.maker == "numpy" else None
            sizes: dict[tuple[int, ...], int] = {(0,): 0, (fragment.size,): (width or 0) * fragment.size}
            if width is None or sizes.get(leaf.spec.shape) != leaf.spec.size:
                raise RecordInvalid(Reason.WRONG_LAYOUT, f"an array of fragment {fragment.index} is not of its size")
            if leaf.pieces:
                arrays.append(Stored(tuple(leaf.pieces), n >= FIRST_RESIDUAL))
                continue
            array: residuals.Residual = leaf.data.view(np.float32) if width == 4 else leaf.data.view(np.uint16)
            if not kernels.all_finite(residuals.whole(array)):
                raise RecordInvalid(Reason.NON_FINITE, f"fragment {fragment.index} holds a NaN or an infinity")
            if n >= FIRST_RESIDUAL:
                array = residuals.kept(fragment, residuals.whole(array))
            arrays.append(array if array.size else None)
        at += count
        values, sent_values, residual, *more = arrays if len(arrays) == count else [None] * 3
        if values is None:
            raise RecordInvalid(Reason.TRUNCATED, f"fragment {fragment.index} is not whole")
        points.append(
            FragmentCopy(
                f.base, values, f.origin_step, f.origin_tokens, f.sent_step, f.sent_tokens, sent_values, f.merged
            )
        )
        merged, overwritten, late, rejected, lost = f.ledger
        account = Account(
            merged=merged, overwritten=overwritten, late=late, rejected=rejected, lost=lost,
            sent=dict(f.open_bases), settled=dict(f.settled_bases),
            given_up={base: (late, rejected) for base, late, rejected in f.given_up},
        )  # fmt: skip
        attempts = tuple(zip(f.attempts, more[: len(f.attempts)], strict=True))
        taken = tuple(zip(f.taken_by, more[len(f.attempts) :], strict=True))
        traffic.append(UplinkPoint(account, f.settled_to, attempts, residual, f.residual_of, taken))
    return Checkpoint(key, header, tuple(points), tuple(traffic), tuple(leaves))
