"""The array backend: it holds the arrays of a learner's fragments and computes with them.

The code that decides what happens never looks into an array. A learner of one process has one backend, `LocalBackend`,
which works in that process. In a learner of several processes, each process holds the arrays of its fragments. The
process that decides asks the others (`isthmus.learner.ranks`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from typing_extensions import override

from isthmus.codecs import codec, kernels, pack
from isthmus.codecs.kernels import F32, U8, U16
from isthmus.codecs.packed import keep_dropped
from isthmus.errors import RecordInvalid
from isthmus.format import memory
from isthmus.format.layout import Fragment, Layout, Tensor
from isthmus.format.records import frame
from isthmus.format.records.objects import Part, PartHeader, UpdateHeader
from isthmus.format.rules import Adoption
from isthmus.learner import checkpoint_shards, residuals
from isthmus.learner.checkpoint_shards import ShardRef
from isthmus.learner.residuals import Residual
from isthmus.log import Commit, Log, fold
from isthmus.log.polar import isotropic
from isthmus.reasons import Reason

BLEND = np.float32(0.5)
"""α of Streaming DiLoCo (arXiv 2501.18512): θ ← α θ_local + (1 − α) Θ."""


@dataclass(eq=False, frozen=True, slots=True, weakref_slot=True)
class Remote:
    """An array in the memory of another process of this learner; it is kept there as long as this object exists."""

    rank: int
    """The process that holds the array."""
    number: int
    """The array's number in that process."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An array in a checkpoint of this learner in the store."""

    pieces: tuple[ShardRef, ...]
    residual: bool = False
    """Whether the array is a residual: `home` then returns it in the precision of its fragment's residuals."""


class OnDevice:
    """An array on the device that trains, in a form that only its array backend knows."""

    __slots__ = ()


ArrayRef = F32 | U16 | Remote | Stored | OnDevice
"""An array [n] of a fragment, wherever it lies: float32, except residuals, which may be bfloat16 (`residuals`)."""


@dataclass(frozen=True, slots=True)
class PackedUpdate:
    """An update object that is made but not yet stored."""

    digest: bytes
    size: int
    """Bytes."""
    body: frame.Body | Remote
    dropped: ArrayRef | None
    """What the codec dropped from the update [n]; None if it is given up, or if the codec drops nothing."""


class Arrays(Protocol):
    """The array operations that the training side needs. Training thread."""

    def empty(self, fragment: int) -> ArrayRef:
        """Return an uninitialised array of a fragment."""
        ...

    def mixed(
        self, fragment: int, adopt: Adoption, local: ArrayRef, values: ArrayRef, base: ArrayRef, since: ArrayRef | None
    ) -> ArrayRef:
        """Return the parameters after adopting a version that does not overwrite local work; see function `mixed`."""
        ...


class ArrayBackend(fold.Carry[ArrayRef], Protocol):
    """The array operations that the agent needs. A backend also carries published values along the log."""

    divides: bool
    """Whether the arrays of this learner are spread over several processes."""

    async def staged(self, fragment: int, held: ArrayRef) -> ArrayRef:
        """Return a published value, moved to where it can be adopted without waiting."""
        ...

    async def landed(self, fragment: int, held: ArrayRef) -> ArrayRef:
        """Return an array, moved to where a checkpoint can be written from it."""
        ...

    async def pack(
        self, header: UpdateHeader, base: ArrayRef, values: ArrayRef, feedback: ArrayRef | None
    ) -> PackedUpdate | None:
        """Return the update from `base` to `values`, plus the error feedback; None if the update is not finite."""
        ...

    async def store(self, key: str, packed: PackedUpdate) -> None:
        """Create an update's object in the store. Raises `Unavailable`, `Denied`."""
        ...

    def sum(self, fragment: int, a: ArrayRef, b: ArrayRef) -> ArrayRef:
        """Return the sum a + b of two residuals."""
        ...

    async def home(self, fragment: int, held: ArrayRef) -> ArrayRef:
        """Return an array of a checkpoint, moved to where all arrays of its fragment lie.

        Raises `ObjectMissing`, `Unavailable`, and `RecordInvalid` if the array is not what was stored, or not finite.
        """
        ...

    async def is_finite(self, held: ArrayRef) -> bool:
        """Return whether an array has no NaN and no infinity."""
        ...

    async def keep(self, part: PartHeader, held: Sequence[ArrayRef | U8]) -> Part:
        """Have the rank that holds the pieces of a part store the part. Raises `Unavailable`, `Denied`."""
        ...


def rounded(values: F32, tensors: tuple[Tensor, ...]) -> F32:
    """Return values [n] rounded to the parameters' dtypes: what bfloat16 or float16 drops is not local progress."""
    if all(t.spec.dtype == "float32" for t in tensors):
        return values
    out = memory.copy(values)
    for t in tensors:
        piece = out[t.start : t.stop]
        if t.spec.dtype == "bfloat16":
            half = np.empty(piece.size, np.uint16)
            kernels.encode_bf16(piece, half)
            kernels.decode_bf16(half, piece)
        elif t.spec.dtype == "float16":
            piece[:] = piece.astype(np.float16)
    return out


def mixed(fragment: Fragment, adopt: Adoption, local: F32, values: F32, base: F32, since: F32 | None) -> F32:
    """Return the parameters [n] after adopting a version: a blend, or the version plus the work since the upload.

    `since`: the parameters at that upload; None if there was no upload, so local work began at `base`.
    """
    if adopt == Adoption.BLEND:
        return BLEND * local + (np.float32(1.0) - BLEND) * values
    return values + (local - (rounded(base, fragment.tensors) if since is None else since))


class LocalArrays(Arrays):
    """Arrays in this process."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @override
    def empty(self, fragment: int) -> F32:
        return memory.empty(self._layout.fragments[fragment].size)

    @override
    def mixed(
        self, fragment: int, adopt: Adoption, local: ArrayRef, values: ArrayRef, base: ArrayRef, since: ArrayRef | None
    ) -> F32:
        since = None if since is None else local_array(since)
        return mixed(
            self._layout.fragments[fragment], adopt, local_array(local), local_array(values), local_array(base), since
        )


def local_array(held: ArrayRef) -> F32:
    """Return an array that must lie in this process and be float32."""
    assert isinstance(held, np.ndarray), f"{held} lies elsewhere"
    assert held.dtype == np.float32, "a residual"
    return cast(F32, held)


def local_residual(held: ArrayRef) -> Residual:
    """Return a residual that must lie in this process."""
    assert isinstance(held, np.ndarray), f"{held} lies elsewhere"
    return held


class LocalBackend(ArrayBackend):
    """An array backend for arrays in this process."""

    divides = False

    def __init__(self, log: Log) -> None:
        self.log = log
        self._run, self.runtime = log.run, log.runtime
        self._carry = fold.PublishedValue(log)
        self._up = codec(log.run.rules.codec_up)
        self.lossy = log.run.rules.error_feedback and not self._up.lossless
        """Whether what the codec drops is kept."""

    @override
    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> F32:
        return await self._carry.start(fragment, version, key, commit)

    @override
    async def step(self, carried: ArrayRef, commit: Commit) -> F32:
        return await self._carry.step(local_array(carried), commit)

    @override
    async def restart(self, commit: Commit) -> F32:
        return await self._carry.restart(commit)

    @override
    async def pack(
        self, header: UpdateHeader, base: ArrayRef, values: ArrayRef, feedback: ArrayRef | None
    ) -> PackedUpdate | None:
        carried = None if feedback is None else local_residual(feedback)
        blob, dropped = await self.runtime.offload(
            self._packed, header, local_array(base), local_array(values), carried
        )
        if blob is None:
            return None
        digest = await self.log.sealed_digest(blob)
        return PackedUpdate(digest, len(blob), blob, dropped)

    def _packed(
        self, header: UpdateHeader, base: F32, values: F32, feedback: Residual | None
    ) -> tuple[frame.Body | None, Residual | None]:
        """Return the update object (None if not finite) and the residual, as it is kept (None if it is not kept)."""
        blob, dropped = self.packed(header, base, values, None if feedback is None else residuals.whole(feedback))
        if blob is None or not self.lossy:
            return blob, None
        return blob, residuals.kept(self._run.layout.fragments[header.fragment], dropped)

    @override
    async def store(self, key: str, packed: PackedUpdate) -> None:
        assert not isinstance(packed.body, Remote), "packed elsewhere"
        # `create` never overwrites an object: a merged update must keep its bytes.
        await self.log.store.create(key, packed.body)

    @override
    def sum(self, fragment: int, a: ArrayRef, b: ArrayRef) -> Residual:
        part = self._run.layout.fragments[fragment]
        total = memory.empty(part.size)
        kernels.add(residuals.whole(local_residual(a)), residuals.whole(local_residual(b)), total)
        return residuals.kept(part, total)

    @override
    async def staged(self, fragment: int, held: ArrayRef) -> ArrayRef:
        return held

    @override
    async def landed(self, fragment: int, held: ArrayRef) -> ArrayRef:
        return held

    @override
    async def home(self, fragment: int, held: ArrayRef) -> Residual:
        if not isinstance(held, Stored):
            return local_residual(held)
        size = self._run.layout.fragments[fragment].size
        width = sum(piece.size for piece in held.pieces) // size
        data = await checkpoint_shards.read(self.log, held.pieces, width, (0,), (size,))
        found: Residual = data.view(np.uint16) if width == 2 else data.view(np.float32)
        if held.residual:
            found = residuals.kept(self._run.layout.fragments[fragment], residuals.whole(found))
        if not await self.is_finite(found):
            raise RecordInvalid(Reason.NON_FINITE, f"fragment {fragment} holds a NaN or an infinity")
        return found

    @override
    async def is_finite(self, held: ArrayRef) -> bool:
        return await self.runtime.offload(lambda: kernels.all_finite(residuals.whole(local_residual(held))))

    @override
    async def keep(self, part: PartHeader, held: Sequence[ArrayRef | U8]) -> Part:
        arrays = [array for array in held if isinstance(array, np.ndarray)]
        return await checkpoint_shards.write(self.log, part, arrays)

    def packed(
        self, header: UpdateHeader, base: F32, values: F32, feedback: F32 | None
    ) -> tuple[frame.Body | None, F32]:
        """Return the update object and, if `lossy`, what its codec dropped; (None, …) if the update is not finite."""
        fragment = self._run.layout.fragments[header.fragment]
        gradient = memory.empty(fragment.size)
        kernels.subtract(rounded(base, fragment.tensors), values, gradient)
        for t in fragment.tensors:
            if self._run.rules.sends_isotropic(t.spec.role) and t.is_matrix:
                if not kernels.all_finite(gradient[t.start : t.stop]):
                    return None, gradient
                self._level(gradient[t.start : t.stop].reshape(t.shape))
        if feedback is not None:
            kernels.add(gradient, feedback, gradient)
        if not kernels.all_finite(gradient):
            return None, gradient
        compute = self.runtime.compute
        packed = pack(self._up, fragment, gradient, compute, whole=not self._run.rules.error_feedback)
        if self.lossy:
            keep_dropped(fragment, self._up, packed, gradient, compute)
        return frame.written(frame.Kind.UPDATE, header, packed), gradient

    def _level(self, difference: F32) -> None:
        """Make all singular values of a matrix's difference [m, n] equal, in place; its norm stays the same."""
        before = kernels.norm(difference.reshape(-1))
        level = isotropic(difference, self._run.rules.iso_block, self.runtime.compute)
        after = kernels.norm(level.reshape(-1))
        if after > 0.0:
            kernels.scale(level, before / after, difference)
