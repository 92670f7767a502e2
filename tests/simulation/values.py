"""Check the values of the log against `reference`, and those of each learner against a record of its incarnations.

Error feedback: the learner's work in the log, plus what is still to be sent, is the work that was done.
Adoption: the parameters follow by the rule from the published value, the local ones, and those at the last upload.
Checkpoints: an incarnation continues with the parameters of the step from which it says that it continues.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.codecs.kernels import F32
from isthmus.format.layout import TensorClass
from isthmus.format.records import frame
from isthmus.format.records.objects import CommitHeader, Input, SnapshotHeader, UpdateHeader, ValueHeader
from isthmus.learner import LearnerAgent
from isthmus.learner.backend import local_array
from isthmus.learner.boundary import Boundary, Ready, ToTraining
from isthmus.learner.uplink import MADE_MAX, Uplink
from isthmus_lab.simulate.world import Arrays
from simulation import reference
from simulation.reference import AMPLIFIED, EPS, Given, Tensor, decode, leveled

if TYPE_CHECKING:
    from simulation.checker import Checker

AMPLIFICATION = 560.0
"""Factor by which the smallest directions of a matrix grow, relative to its length, when it is made isotropic."""

ROUNDINGS = 8.0
"""Rounding errors of float32 by which an adoption or an upload may differ, relative to its operands."""


@dataclass
class Packed:
    """A packed update: the local work in it, and the decoded gradient."""

    base: int
    work: np.ndarray
    sent: np.ndarray


@dataclass
class Life:
    """The record of one incarnation of a learner."""

    who: str
    agent: LearnerAgent
    arrays: Arrays
    reads: dict[tuple[int, int], list[np.ndarray]] = field(default_factory=dict)
    """By fragment and step, the parameters as often as they were copied out; an upload's copy is the first."""
    frozen: dict[int, list[np.ndarray]] = field(default_factory=dict)
    """All parameters, by the step of their checkpoint."""
    packed: dict[bytes, Packed] = field(default_factory=dict)
    order: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    """By fragment and base, the digests of packed updates, oldest first."""
    left: list[np.ndarray | None] = field(default_factory=list)
    """By fragment, the error feedback that should be there; None if it is no longer known."""
    since: list[int] = field(default_factory=list)
    """By fragment, the version of the log up to which `left` counts."""
    off: list[float] = field(default_factory=list)
    offered: list[weakref.ref[Any]] = field(default_factory=list)
    """Values of versions that were offered to the training thread."""


class Values:
    """Checks the values of one world."""

    def __init__(self, checker: "Checker") -> None:
        self._checker = checker
        self._run = run = checker.run
        self._lives: dict[tuple[str, int], Life] = {}
        self.fragments = []
        for fragment in run.layout.fragments:
            tensors = [
                Tensor(
                    t.start,
                    t.stop,
                    run.rules.merge_embeddings if t.spec.role == TensorClass.EMBEDDING else run.rules.merge,
                    t.spec.shape,
                    run.rules.iso_block,
                )
                for t in fragment.tensors
            ]
            rules = run.rules
            self.fragments.append(
                reference.Fragment(tensors, rules.outer_lr, rules.outer_momentum, rules.codec_down, rules.feedback_down)
            )

    def begin(self, fragment: int, snapshot: bytes) -> None:
        """Take version 0 of a fragment."""
        _, payload = frame.parse(snapshot, frame.Kind.SNAPSHOT, SnapshotHeader)
        self.fragments[fragment].begin(
            np.frombuffer(payload, "<f4").reshape(-1, self.fragments[fragment].tensors[-1].stop)[0]
        )

    # --- the log ------------------------------------------------------------------------------------------------------

    def committed(self, header: CommitHeader) -> list[str]:
        """Return what is wrong with the values of a commit."""
        p = header.fragment
        fragment = self.fragments[p]
        read = [self._given(given, p) for given in header.inputs]
        inputs = [given for given in read if given is not None]
        value = self._checker.stored(header.value_key)
        if fragment.lost or value is None or len(inputs) < len(read):
            fragment.lost = True
            return []
        code, payload = frame.parse(value, frame.Kind.VALUE, ValueHeader)
        fragment.codec_down = code.codec
        wrong = [] if code.codec == self._run.rules.codec_down else [f"published in {code.codec}"]
        steps = sorted(given.believed or given.steps for given in header.inputs)
        periods = steps[(len(steps) - 1) // 2] / self._run.rules.sync_every
        many = {"periods" in given.clipped for given in header.inputs} == {True}
        # The round after a heal may be a first one, too, or not: that depends on what is read of the log before it.
        if many > (periods > 4.0 and fragment.is_new(header.version)) or many < (periods > 4.0 and header.version == 1):
            wrong.append(f"its updates hold {periods:g} periods, and are {'' if many else 'not '}merged as many")
        return wrong + fragment.commit(
            header.version,
            inputs,
            bytes(payload),
            header.published_digest,
            header.cancelled,
            periods=periods if many else 1.0,
        )

    def healed(self, header: CommitHeader) -> list[str]:
        """Return what is wrong with the values of a commit that heals its fragment."""
        value = self._checker.stored(header.value_key)
        if value is None or header.healed is None:
            return []
        code, payload = frame.parse(value, frame.Kind.VALUE, ValueHeader)
        wrong = [] if code.codec == "f32" else [f"starts again in {code.codec}"]
        fragment = self.fragments[header.fragment]
        return wrong + fragment.heal(header.version, header.healed.source, bytes(payload), header.published_digest)

    def snapshot(self, header: SnapshotHeader, data: bytes) -> list[str]:
        """Return what is wrong with a stored state."""
        _, payload = frame.parse(data, frame.Kind.SNAPSHOT, SnapshotHeader)
        return self.fragments[header.fragment].snapshot(header.version, bytes(payload))

    def _given(self, given: Input, p: int) -> Given | None:
        blob = self._checker.stored(given.key)
        if blob is None:
            return None
        header, payload = frame.parse(blob, frame.Kind.UPDATE, UpdateHeader)
        return Given(given.scale * self._decode(header.codec, p, payload), given.weight)

    def _decode(self, name: str, p: int, payload: memoryview) -> np.ndarray:
        return decode(name, self._sizes(p), bytes(payload))[0].astype(np.float64)

    def _sizes(self, p: int) -> list[int]:
        return [t.stop - t.start for t in self.fragments[p].tensors]

    def _published(self, p: int, version: int) -> np.ndarray | None:
        point = self.fragments[p].points.get(version)
        return None if point is None or self.fragments[p].lost else point.published

    # --- a learner's incarnation --------------------------------------------------------------------------------------

    def lives(self, who: str, name: str, agent: LearnerAgent, arrays: Arrays) -> Life:
        """Begin the record of an incarnation after its agent has joined."""
        life = self._lives[name, agent.incarnation] = Life(who, agent, arrays)
        for p, fragment in enumerate(self._run.layout.fragments):
            life.left.append(_account(agent.uplink, p, fragment.size))
            life.since.append(agent.uplink.settled_to[p])
            life.off.append(0.0)
        c = agent.history.checkpoint
        before = self._lives.get((name, c.header.incarnation)) if c is not None else None
        if c is not None and before is not None:
            life.reads = {at: list(values) for at, values in before.reads.items() if at[1] <= c.header.step}
        return life

    def attached(self, life: Life, boundary: Boundary) -> None:
        """Check an incarnation's first parameters: its checkpoint's, or the published ones if the log is ahead."""
        post = boundary.post

        def noted(message: ToTraining) -> None:
            if isinstance(message, Ready):
                life.offered.append(weakref.ref(local_array(message.values)))
            post(message)

        boundary.post = noted  # type: ignore[method-assign]
        c = life.agent.history.checkpoint
        before = self._lives.get((life.agent.name, c.header.incarnation)) if c is not None else None
        step = c.header.step if c is not None else None
        for p, slot in enumerate(boundary.slots):
            published = self._published(p, slot.base)
            now = life.arrays.values[p]
            kept = before.frozen.get(c.header.step) if c is not None and before is not None else None
            goes_on = c is not None and slot.base == c.points[p].base
            if goes_on and slot.merged and kept is not None and np.array_equal(now, kept[p]):
                continue  # this state was merged as of the checkpoint; the next update starts from it
            if goes_on and not slot.merged:
                if kept is not None and not np.array_equal(now, kept[p]):
                    self._violate(life, f"fragment {p} does not go on as it was at step {step}")
            elif published is not None and not np.array_equal(now, published):
                self._violate(life, f"fragment {p} does not begin with version {slot.base} as it was published")

    def read(self, life: Life, p: int, values: np.ndarray) -> None:
        """Note that parameters were copied out."""
        if life.agent.boundary is not None:
            # A step can have several copies: one for an upload, and one for a checkpoint after a version was adopted.
            life.reads.setdefault((p, life.agent.boundary.step), []).append(values.copy())

    def freeze(self, life: Life) -> None:
        """Note that all parameters were copied for a checkpoint."""
        boundary = life.agent.boundary
        assert boundary is not None
        life.frozen[boundary.step] = [values.copy() for values in life.arrays.values]
        while len(life.frozen) > 8:
            life.frozen.pop(next(iter(life.frozen)))

    def write(self, life: Life, p: int, local: np.ndarray, now: np.ndarray, adopt: str) -> None:
        """Check the parameters that an adoption has set."""
        boundary = life.agent.boundary
        if boundary is None:
            return  # the learner still joins: `attached` checks these parameters
        slot = boundary.slots[p]
        if slot.ready is None:
            self._violate(life, f"fragment {p} was written, and no version was there to adopt")
            return
        published = self._published(p, slot.ready.version)
        if published is None:
            return
        since: list[np.ndarray | None] = [None]
        if adopt == "carry":
            sent = life.reads.get((p, slot.sent_step), []) if slot.sent_step is not None else None
            since = [self._published(p, slot.base)] if sent is None else list(sent)
            if not since or since[0] is None:
                return
        wrong = [self._off(local, now, published, adopt, values) for values in since]
        if all(wrong):
            self._violate(life, f"adopts {p}/{slot.ready.version} by {adopt}: {wrong[0]}")

    def _off(
        self, local: np.ndarray, now: np.ndarray, published: np.ndarray, adopt: str, since: np.ndarray | None
    ) -> str:
        """Return how parameters differ from what the adoption of a version gives; empty if they do not."""
        if adopt == "overwrite":
            wanted, size = published.astype(np.float64), 0.0
        elif adopt == "blend":
            wanted = 0.5 * local.astype(np.float64) + 0.5 * published
            size = np.abs(local) + np.abs(published)
        else:
            assert since is not None
            wanted = published.astype(np.float64) + (local.astype(np.float64) - since)
            size = np.abs(local) + np.abs(published) + np.abs(since)
        far = np.abs(now - wanted) - ROUNDINGS * EPS * size
        at = int(np.argmax(far))
        return f"element {at} is {now[at]:.9g}, should be {wanted[at]:.9g}" if far[at] > 0.0 else ""

    # --- error feedback -----------------------------------------------------------------------------------------------

    def packs(
        self,
        life: Life,
        header: UpdateHeader,
        base_values: F32,
        values: F32,
        residual: F32 | None,
        blob: frame.Blob,
        after: F32,
    ) -> None:
        """Check a packed update. `residual` was added to the local work; `after` is what the codec dropped."""
        p, lossy = header.fragment, life.agent.own_backend.lossy
        read = life.reads.get((p, header.step))
        if read is not None and not any(np.array_equal(values, had) for had in read):
            self._violate(life, f"fragment {p} is sent with other parameters than it had at step {header.step}")
        base = self._published(p, header.base)
        if base is not None and not np.array_equal(base, base_values):
            self._violate(life, f"fragment {p} is sent as the way from something that is not version {header.base}")
        work = base_values.astype(np.float64) - values
        taken = np.zeros(work.size) if residual is None else residual.astype(np.float64)
        _, payload = frame.parse(blob, frame.Kind.UPDATE, UpdateHeader)
        said, dropped = decode(header.codec, self._sizes(p), bytes(payload))
        sent = said.astype(np.float64)
        size = np.abs(base_values) + np.abs(values) + np.abs(taken)
        rounding = ROUNDINGS * EPS * size
        if self._run.rules.isotropic_up:
            work, rounding = self._leveled(p, work, rounding)
        # A codec's bounds are relative to the decoded values, which differ from its input by at most a step.
        if (np.abs(work + taken - sent) > dropped + rounding).any():
            self._violate(life, f"fragment {p}: what is sent is more than a codec step off")
        if lossy and (np.abs(work + taken - sent - after) > rounding).any():
            self._violate(life, f"fragment {p}: sent and left over are not what there was and what was taken over")
        if lossy:
            self._balance(life, p)
        digest = frame.digest(blob)
        life.packed[digest] = Packed(header.base, work, sent)
        life.order.setdefault((p, header.base), []).append(digest)
        life.off[p] += float(rounding.max())

    def _leveled(self, p: int, work: np.ndarray, rounding: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return local work with its matrices made isotropic, as it is sent, and how far float32 may be from it."""
        work, rounding = work.copy(), rounding.copy()
        for t, own in zip(self.fragments[p].tensors, self._run.layout.fragments[p].tensors, strict=True):
            at = slice(t.start, t.stop)
            length = float(np.linalg.norm(work[at]))
            if own.is_matrix and own.spec.role == TensorClass.DENSE and length > 0.0:
                # Errors of the work grow like its small directions.
                off = AMPLIFIED * length + AMPLIFICATION * float(np.linalg.norm(rounding[at]))
                work[at] = leveled(work[at], t, length)
                rounding[at] += off
        return work, rounding

    def _own(self, life: Life, p: int, since: int, until: int) -> Iterator[Input]:
        for header, _ in self._checker.commits[p][since:until]:
            for given in header.inputs:
                if given.learner == life.agent.name:
                    yield given

    def _balance(self, life: Life, p: int) -> None:
        """Check that residuals, stored and in open updates, are all that the codec dropped from merged updates."""
        left, known = life.left[p], life.agent.uplink.settled_to[p]
        for given in self._own(life, p, life.since[p], known):
            packed = life.packed.get(given.digest)
            remembered = given.digest in life.order.get((p, given.base), [])[-MADE_MAX:]
            if left is None or packed is None or not remembered or given.incarnation != life.agent.incarnation:
                left = None  # of another incarnation, or forgotten: error feedback starts anew
                break
            left = left + packed.work - packed.sent
        life.left[p], life.since[p] = left, known
        if left is None:
            return
        there = _account(life.agent.uplink, p, left.size)
        if (np.abs(left - there) > life.off[p] + EPS).any():
            at = int(np.argmax(np.abs(left - there)))
            self._violate(
                life,
                f"fragment {p}: of element {at} {there[at]:.6g} is to be sent yet or on its way, and what was dropped of "
                f"what the log has merged is {left[at]:.6g}",
            )

    def _violate(self, life: Life, what: str) -> None:
        self._checker.violate(f"{life.who}: {what}")


def _account(uplink: Uplink, p: int, size: int) -> np.ndarray:
    """Return an uplink's total error feedback that is still to be sent, stored or in open updates."""
    total = np.zeros(size)
    for residual in (uplink.residuals[p], *uplink.taken[p].values()):
        if residual is not None:
            total += local_array(residual)
    return total
