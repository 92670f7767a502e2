"""The arithmetic of a round, pure and bit-exact: accumulate weighted outer gradients, take the outer step, publish.

The syncer calls it live; recovery and replay call it on what the log recorded. There is no second copy. The caller
chooses the order of accumulation and records it. No result depends on threads, machines or a library's sums.

    w    = tokens · (tokens / steps)                                   arXiv 2604.21428, quantity × quality
    Avg  = Σ w v / Σ w
    RDA  = (Σ w‖v‖ / Σ w) · φ( Σ w φ(v) / Σ w ),   φ(x) = x/‖x‖, φ(0) = 0, per tensor
    Iso  = (Σ w‖v‖ / Σ w) · φ( U Vᵀ ),   U S Vᵀ = Σ w v / Σ w           per matrix or block; as in arXiv 2607.03011
    b ← μ b + Δ;  Θ ← Θ − η (Δ + μ b)                                  Nesterov, per fragment, float32

Before this, `isthmus.rounds.bounds` limits w and the length of v to a multiple of what is usual. A commit records the
weight and the scale of each input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
import numpy as np

from isthmus.codecs import Codec, codec, cut, kernels, pack, room
from isthmus.codecs.base import PIECE, SHARE, Step, pieces
from isthmus.codecs.kernels import F32, U8
from isthmus.codecs.packed import Packed, add, length_of, plain
from isthmus.format import digests, memory
from isthmus.format.layout import Fragment, Tensor, TensorClass
from isthmus.format.records import frame
from isthmus.format.records.objects import SCHEMA, UNSTATED, Input, Outer, SnapshotHeader, ValueHeader
from isthmus.format.rules import ROBUST, CodecName, MergeRule, Rules
from isthmus.log import robust
from isthmus.log.polar import isotropic
from isthmus.reasons import Clip
from isthmus.runtime.clock import ALONE, ComputePool

CANCELLED_BELOW = 1e-3
"""Norm of the mean direction below which RDA does not renormalise it: the directions cancel and only noise is left.

M orthogonal directions of equal weight leave 1/√M, so this is the mean of a million unrelated directions. For Iso, the
norm of the mean relative to the mean norm; below this, the plain mean is used.
"""


def state_bytes(rules: Rules) -> int:
    """Return the bytes of a state per parameter: published, momentum, and master where it differs from published."""
    return 12 if rules.feedback_down else 8


@dataclass(frozen=True)
class State:
    """One fragment at one version. Arrays are [n] float32 and never written to once the state exists."""

    version: int
    published: F32
    """The value that learners hold, and that is evaluated and exported."""
    master: F32
    """The outer optimizer's parameters. The published value follows them through the codec; `master − published` goes
    into the next difference."""
    momentum: F32

    @cached_property
    def published_digest(self) -> bytes:
        """Digest [32 bytes] of the published value."""
        return array_digest(self.published)

    @property
    def is_published(self) -> bool:
        """Whether master and published are the same array: what the codec dropped is then not kept."""
        return self.master is self.published

    @cached_property
    def digest(self) -> bytes:
        """Digest [32 bytes] of the version and the digests of published, master and momentum."""
        master = self.published_digest if self.is_published else array_digest(self.master)
        return self._digest_of(self.published_digest, master, array_digest(self.momentum))

    def hashed(self, compute: ComputePool, *, whole: bool) -> "State":
        """Compute the digest of the published value, or the digests of all (`whole`); return this state.

        Each array is digested on one thread.
        """
        if not whole:
            vars(self)["published_digest"] = array_digest(self.published)  # fill the cache of the property
            return self
        arrays = (self.published, self.momentum, *(() if self.is_published else (self.master,)))
        found = [b""] * len(arrays)

        def work(first: int, last: int) -> None:
            for i in range(first, last):
                found[i] = array_digest(arrays[i])

        compute.share(work, len(arrays), 1)
        # Fill the caches of `published_digest` and `digest`.
        vars(self)["published_digest"] = found[0]
        vars(self)["digest"] = self._digest_of(found[0], found[0] if self.is_published else found[2], found[1])
        return self

    def _digest_of(self, published: bytes, master: bytes, momentum: bytes) -> bytes:
        return digests.digest_of((self.version.to_bytes(8, "little"), published, master, momentum))

    def measured(self) -> bytes:
        """Return `digest`, computed again from the arrays as they are now."""
        return State(self.version, self.published, self.master, self.momentum).digest


def initial(values: F32) -> State:
    """Return version 0: published and master are the initial parameters [n], momentum is zero."""
    return State(0, values, values, np.zeros_like(values))


def array_digest(x: F32) -> bytes:
    """Return the digest [32 bytes] of a flat float32 vector."""
    return digests.digest(x)


def weight(tokens: int, steps: int) -> float:
    """Return tokens · (tokens / steps), in tokens² per step."""
    return tokens * (tokens / steps)


def outers(rules: Rules, inputs: Sequence[Input] = ()) -> dict[str, Outer]:
    """Return the arithmetic of each class of tensors under these rules, in a round with these inputs.

    A fragment's first round may hold the work of k periods (`Rules.periods_of`), since learners train alone until a
    syncer comes. Its inputs are shortened to 1/k, so that the momentum takes the work of one period. The rate
    k / (1 + μ) makes up for that: the outer step is Δ, no more and no less than what the learners moved.
    """
    rate = rules.outer_lr
    if any(Clip.PERIODS in given.clipped for given in inputs):
        rate = rules.periods_of(given.believed or given.steps for given in inputs) / (1.0 + rules.outer_momentum)
    dense, embedding = (
        Outer(
            merge=rules.merge_for(role),
            learning_rate=rate,
            momentum=rules.outer_momentum,
            block=rules.iso_block if rules.merge_for(role) == MergeRule.ISO else 0,
            trim=rules.trim if rules.merge_for(role) == MergeRule.TRIMMED else 0.0,
        )
        for role in (TensorClass.DENSE, TensorClass.EMBEDDING)
    )
    return by_class(dense, embedding)


def by_class(dense: Outer, embedding: Outer) -> dict[str, Outer]:
    """Return the arithmetic of each class of tensors from a commit's two; that of vectors follows from dense."""
    vector = msgspec.structs.replace(dense, merge=MergeRule.RDA) if dense.merge == MergeRule.ISO else dense
    return {TensorClass.DENSE: dense, TensorClass.EMBEDDING: embedding, TensorClass.VECTOR: vector}


class Accumulator:
    """The running sum of one round. Its memory does not grow with the number of learners; `compute` can share the work.

    Rules that look at all updates together (`ROBUST`) are the exception: they keep all updates, packed, until `deltas`.
    """

    def __init__(self, fragment: Fragment, outer: Mapping[str, Outer], compute: ComputePool = ALONE) -> None:
        self.fragment = fragment
        self.outer = outer
        self.compute = compute
        self.count = 0
        self._total = memory.zeros(fragment.size)
        self._unit = 0.0  # weights are relative to the first one, so that the sum stays in the range of the updates
        self._weights = 0.0
        self._norms = [0.0] * len(fragment.tensors)  # Σ w‖v‖ per tensor
        self._merges = [_merge_of(t, outer[t.spec.role].merge) for t in fragment.tensors]
        self._kept: list[robust.KeptUpdate] = []
        """All updates of the round, packed, if a rule needs them together."""

    def add(self, x: Packed | F32, weight: float, scale: float = 1.0, *, learner: str = "") -> None:
        """Add one finite outer gradient, packed or [n] float32, with its effective weight (> 0).

        `scale`: the factor that its length was clipped by, 0 < scale ≤ 1; 1: not clipped. `learner`: the learner that
        sent it; robust rules count learners, not updates. The caller must not change an array before `deltas` has
        returned. Raises `DenormalsFlushed`.
        """
        kernels.require_denormals()
        if not isinstance(x, Packed):
            x = plain(self.fragment, x)
        self._unit = self._unit or weight
        weight /= self._unit
        if ROBUST.intersection(self._merges):
            self._kept.append(robust.KeptUpdate(x, weight, scale, learner or f"#{self.count}"))
        for i, t in enumerate(self.fragment.tensors):
            if self._merges[i] in ROBUST:
                continue
            coefficient = weight * scale
            if self._merges[i] != MergeRule.AVG:
                norm = x.norms[i]
                self._norms[i] += weight * (scale * norm)
                if self._merges[i] == MergeRule.RDA:  # clipping a length does not change a direction
                    coefficient = weight / norm if norm > 0.0 else 0.0
            if coefficient:
                x.add(i, coefficient, self._total[t.start : t.stop], self.compute)
        self._weights += weight
        self.count += 1

    def deltas(self) -> tuple[list[tuple[F32, float]], int]:
        """Return Δ of each tensor, as an array [n] and a factor to it, and how many tensors' directions cancelled."""
        deltas, cancelled = [], 0
        for i, t in enumerate(self.fragment.tensors):
            total, scale = self._total[t.start : t.stop], 1.0 / self._weights
            magnitude, rule = self._norms[i] / self._weights, self._merges[i]
            if rule in ROBUST:
                trim = self.outer[t.spec.role].trim if rule == MergeRule.TRIMMED else None
                scale, off = robust.merged(self._kept, i, total, trim, self.compute)
                cancelled += off
            elif rule != MergeRule.AVG:
                norm = length_of(total, self.compute)
                # RDA has summed directions, so their mean is at most 1 long. Iso has summed the differences themselves.
                whole = self._weights if rule == MergeRule.RDA else self._norms[i]
                if whole > 0.0 and norm / whole >= CANCELLED_BELOW:
                    if rule == MergeRule.ISO:
                        block = self.outer[t.spec.role].block
                        total = isotropic(total.reshape(t.shape), block, self.compute).reshape(-1)
                        norm = kernels.norm(total)
                    scale = magnitude / norm
                else:
                    cancelled += magnitude > 0.0
                    scale = magnitude / self._weights if rule == MergeRule.RDA else scale
            deltas.append((total, scale))
        return deltas, cancelled

    def outer_step(self, state: State, publication: "Publication | None" = None) -> tuple[F32, F32, int]:
        """Return new master [n], new momentum [n] and the number of cancelled tensors; `state` is not changed.

        `publication`: takes the results, piece by piece, while they are in the cache.
        """
        deltas, cancelled = self.deltas()
        master, momentum = memory.empty(state.master.size), memory.empty(state.momentum.size)
        for i, (t, (delta, scale)) in enumerate(zip(self.fragment.tensors, deltas, strict=True)):
            step = partial(self._step, state, i, t, delta, scale, master, momentum, publication)
            self.compute.share(step, pieces(t.size), SHARE)
        return master, momentum, cancelled

    def _step(
        self, state: State, i: int, t: Tensor, delta: F32, scale: float, master: F32, momentum: F32,
        publication: "Publication | None", first: int, last: int,
    ) -> None:  # fmt: skip
        rate, mu = self.outer[t.spec.role].learning_rate, self.outer[t.spec.role].momentum
        in_one_pass = publication is not None and publication.code.advances
        size = max(1, last - first if in_one_pass else 1) * PIECE
        for start in range(first * PIECE, min(t.size, last * PIECE), size):
            piece = slice(start, min(t.size, start + size))
            at = slice(t.start + piece.start, t.start + piece.stop)
            before = delta[piece], scale, rate, mu, state.master[at], state.momentum[at]
            if publication is not None and in_one_pass:
                publication.step(
                    i,
                    start,
                    at,
                    Step(*before, state.published[at], master[at], momentum[at], publication.published[at]),
                )
            else:
                kernels.outer_step(*before, master[at], momentum[at])
                if publication is not None:
                    publication.take(at, master[at], momentum[at])


def _merge_of(tensor: Tensor, rule: MergeRule) -> MergeRule:
    return MergeRule.RDA if rule == MergeRule.ISO and not tensor.is_matrix else rule


@dataclass(frozen=True, slots=True)
class Advance:
    """The result of a round: the next state and the value object that publishes it."""

    state: State
    value: frame.Body
    value_digest: bytes
    published_digest: bytes
    state_digest: bytes
    """`UNSTATED` if it was not to be computed."""
    cancelled: int
    finite: bool
    """Whether the new state is finite: numbers near the end of float32's range can overflow in a sum."""


class Publication:
    """The publication of a version through a codec. Threads may give it different pieces at the same time."""

    def __init__(self, before: F32, fragment: Fragment, code: Codec) -> None:
        """`before`: the published value [n] of the version before."""
        self.before = before
        self.fragment = fragment
        self.code = code
        self.published = memory.empty(fragment.size)
        """The next published value [n], once `finish` has returned. Until then parts of it may hold the difference that
        leads to it: both are as large as the fragment."""
        self._packed = room(code, fragment) if code.advances else None
        self._parts = () if self._packed is None else cut(code, fragment, self._packed)
        self._in_one_pass = False
        self._broken: list[slice] = []

    def step(self, tensor: int, start: int, at: slice, step: Step) -> None:
        """Take the outer step of a part of a tensor, which begins at its parameter `start`, pack it and publish it."""
        self._in_one_pass = True
        if not self.code.advance_part(self._parts[tensor], self.fragment.tensors[tensor].size, start, step):
            self._broken.append(at)

    def take(self, at: slice, master: F32, momentum: F32) -> None:
        """Take the new master and momentum of a part of the fragment."""
        kernels.subtract(master, self.before[at], self.published[at])
        if not (kernels.all_finite(master) and kernels.all_finite(momentum)):
            self._broken.append(at)

    def finish(self, compute: ComputePool, *, whole: bool) -> tuple[U8, bool]:
        """Return the packed difference and whether everything is finite. `whole`: see `Codec.encode`."""
        if self._in_one_pass:
            assert self._packed is not None, "every part was packed into it"
            return self._packed, not self._broken
        packed = pack(self.code, self.fragment, self.published, compute, whole=whole)
        next_published(self.before, self.fragment, self.code, packed, self.published, compute)
        return packed, not self._broken and kernels.all_finite(self.published)


Seal = Callable[[frame.Body], None]
"""Signs an object if the run is signed."""


def _unsigned(body: frame.Body) -> None:
    """Leave an object unsigned, for callers that only compute and do not store it."""


def advance(
    state: State,
    round_: Accumulator,
    codec_down: Codec,
    run: bytes,
    feedback: bool = True,
    seal: Seal = _unsigned,
    *,
    stated: bool = True,
) -> Advance:
    """Take the outer step from `state` and publish the result through `codec_down`. Pure; `state` is not changed.

    With `feedback`, what the codec drops stays in master − published and is part of the next version's difference.
    Without it this is given up, and the master becomes the published value. `stated`: whether the state's digest is
    computed. Raises `DenormalsFlushed` if the thread
    would compute other bits than the log records.
    """
    kernels.require_denormals()
    fragment = round_.fragment
    version = state.version + 1
    publication = Publication(state.published, fragment, codec_down)
    master, momentum, cancelled = round_.outer_step(state, publication)
    packed, finite = publication.finish(round_.compute, whole=not feedback)
    value = _value(run, fragment, version, codec_down, packed)
    seal(value)
    published = publication.published
    after = State(version, published, master if feedback else published, momentum)
    after.hashed(round_.compute, whole=stated)
    return Advance(
        state=after,
        value=value,
        value_digest=frame.digest(value),
        published_digest=after.published_digest,
        state_digest=after.digest if stated else UNSTATED,
        cancelled=cancelled,
        finite=finite,
    )


def healed(version: int, published: F32, fragment: Fragment, run: bytes, seal: Seal = _unsigned) -> Advance:
    """Return a fragment's new start at a version, from a published value [n]: an equal master and zero momentum.

    The value object holds the published value itself, as float32.
    """
    code = codec(CodecName.F32)
    value = _value(run, fragment, version, code, pack(code, fragment, published))
    seal(value)
    state = State(version, published, published, np.zeros_like(published))
    return Advance(
        state=state,
        value=value,
        value_digest=frame.digest(value),
        published_digest=state.published_digest,
        state_digest=state.digest,
        cancelled=0,
        finite=kernels.all_finite(published),
    )


def _value(run: bytes, fragment: Fragment, version: int, code: Codec, packed: U8) -> frame.Body:
    header = ValueHeader(schema=SCHEMA, run=run, fragment=fragment.index, version=version, codec=code.name)
    return frame.written(frame.Kind.VALUE, header, packed)


def next_published(
    published: F32,
    fragment: Fragment,
    codec_down: Codec,
    packed: U8,
    out: F32 | None = None,
    compute: ComputePool = ALONE,
) -> F32:
    """Return the next published value [n], published + the decoded difference, written to `out` if it is given.

    Raises `DenormalsFlushed`, `BadCode`.
    """
    kernels.require_denormals()
    out = memory.empty(published.size) if out is None else out
    for t, data in zip(fragment.tensors, cut(codec_down, fragment, packed), strict=True):
        add(codec_down, data, 1.0, published[t.start : t.stop], out[t.start : t.stop], compute)
    return out


# --- snapshots: a state as bytes --------------------------------------------------------------------------------------


def snapshot(state: State, fragment: int, run: bytes) -> frame.Gathered:
    """Return a state's snapshot object: published, master unless it is the same array, momentum. Nothing is copied."""
    header = SnapshotHeader(
        schema=SCHEMA,
        run=run,
        fragment=fragment,
        version=state.version,
        published_digest=state.published_digest,
        state_digest=state.digest,
    )
    arrays = (state.published, *(() if state.is_published else (state.master,)), state.momentum)
    return frame.gathered(frame.Kind.SNAPSHOT, header, arrays)


def restore(header: SnapshotHeader, payload: memoryview, n: int) -> State:
    """Return the state of a fragment of n parameters from a snapshot's payload [12 n or 8 n bytes].

    The caller compares `State.digest` with a commit's. Raises `ValueError` for a payload of another size.
    """
    arrays = np.frombuffer(payload, np.dtype("<f4"))
    if arrays.size not in (2 * n, 3 * n):
        raise ValueError(f"{len(payload)} bytes of state, its fragment has {12 * n} or {8 * n}")
    published, master = arrays[:n], arrays[n : 2 * n]
    if arrays.size == 2 * n:
        return State(header.version, published, published, master)
    return State(header.version, published, master, arrays[2 * n :])
