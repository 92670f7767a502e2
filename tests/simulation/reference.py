"""Compute the values of a run again, without code of the library: plain NumPy in float64, from the equations alone.

    w = tokens² / steps      Avg: Δ = Σ w v / Σ w      RDA: Δ = (Σ w‖v‖ / Σ w) · φ(Σ w φ(v) / Σ w) per tensor
    Iso: Δ = (Σ w‖v‖ / Σ w) · φ(U q(S) Vᵀ), U S Vᵀ = Σ w v / Σ w, q five odd quintics nearest to 1 on [0.003, 1]
    b ← μ b + Δ;  Θ ← Θ − η (Δ + μ b);  published ← published + code(Θ − published)

Each number has a bound of how far float32 may be from it. What a codec drops is bounded by its step. A commit's
published value is followed bit for bit, since learners add exactly the decoded difference.
"""

from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

EPS = 2.0**-24
"""Half a unit in the last place of a float32, as a relative error."""

BLOCK = 128

TABLED = 4096
"""With a codec that has a rate, a tensor of at least this many parameters has its own table."""

CANCELLED_BELOW = 1e-3
"""A mean direction shorter than this is not lengthened."""

VERSIONS_KEPT = 64
"""The number of newest points of a fragment that are kept."""


# --- formats ----------------------------------------------------------------------------------------------------------


def decode(name: str, sizes: list[int], payload: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the decoded payload [n] float32, tensor by tensor, and the most that its codec may have dropped [n]."""
    values, dropped, at = [], [], 0
    for n in sizes:
        if name.startswith("q") and n >= TABLED:
            length = int.from_bytes(payload[at : at + 4], "little")
            value, most = _coded(n, payload[at : at + length])
            values.append(value)
            dropped.append(most)
            at += length
            continue
        blocks = -(-n // BLOCK)
        length = {"f32": 4 * n, "bf16": 2 * n, "int8": 2 * blocks + n, "int4": (2 + BLOCK // 2) * blocks}[
            "int4" if name.startswith("q") else name
        ]
        value, most = _piece(name, n, blocks, payload[at : at + length])
        values.append(value)
        dropped.append(most)
        at += -(-length // 4) * 4
    if at != len(payload):
        raise ValueError(f"{len(payload)} bytes of {name}, {at} expected")
    return np.concatenate(values), np.concatenate(dropped)


def _piece(name: str, n: int, blocks: int, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    if name == "f32":
        return np.frombuffer(data, "<f4"), np.zeros(n)
    if name == "bf16":
        value = _widened(data)
        return value, np.abs(value.astype(np.float64)) * 2.0**-8
    scales = np.repeat(_widened(data[: 2 * blocks]), BLOCK)[:n]
    levels = np.frombuffer(data[2 * blocks :], np.uint8)
    if name == "int8":
        signed, most = levels.view(np.int8).astype(np.float32), 127
    else:
        halves = levels.reshape(blocks, BLOCK // 2)
        signed = (np.concatenate([halves & 15, halves >> 4], axis=1).reshape(-1)[:n].astype(np.int16) - 8).astype(
            np.float32
        )
        most = 7
    # The error is half a step, and at the ends also that of rounding the scale to eight bits.
    return signed * scales, scales.astype(np.float64) * (0.5 + most * 2.0**-8) + 2.0**-119


def _coded(n: int, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decode an entropy stage with one table: four states in turn, words of 16 bits, one piece of at most 65,536."""
    levels = int.from_bytes(data[4:6], "little")
    if levels == 0:
        return np.zeros(n, np.float32), np.full(n, np.inf)
    centroids = np.frombuffer(data, "<f4", levels, 8)
    frequencies = np.frombuffer(data, "<u2", 2 * levels + 1, 8 + 4 * levels).astype(int)
    symbols = np.repeat(np.arange(2 * levels + 1), frequencies)
    starts = np.concatenate([[0], np.cumsum(frequencies)])
    at = 8 + 4 * levels + -(-2 * frequencies.size // 4) * 4
    assert n <= 1 << 16, "one piece only"
    words = np.frombuffer(data[at + 4 : at + 4 + int.from_bytes(data[at : at + 4], "little")], "<u2").astype(int)
    states, rest = [int(words[2 * i]) | int(words[2 * i + 1]) << 16 for i in range(4)], iter(words[8:].tolist())
    found = np.empty(n, int)
    for i in range(n):
        x = states[i % 4]
        s = found[i] = int(symbols[x % 4096])
        x = int(frequencies[s]) * (x // 4096) + x % 4096 - int(starts[s])
        states[i % 4] = x << 16 | next(rest) if x < 1 << 15 else x
    if states != [1 << 15] * 4 or next(rest, None) is not None:
        raise ValueError("a stream that does not end where it began")
    level = (found + 1) // 2
    magnitudes = np.concatenate([np.zeros(1, np.float32), centroids])[level]
    # A centroid of level k is at least (k − 0.45) steps. A lengthened centroid is longer than the values it stands for.
    used = np.flatnonzero(np.bincount(level, minlength=levels + 1)[1:]) + 1
    step = min(float(centroids[k - 1]) / (k - 0.45) for k in used)
    return np.where(found % 2 == 1, magnitudes, -magnitudes), np.where(
        level > 0, step + magnitudes, 0.55 * step
    ) * 1.001


def _widened(data: bytes) -> np.ndarray:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


# --- isotropic merges -------------------------------------------------------------------------------------------------


def quintics(least: float, count: int) -> list[tuple[float, float, float]]:
    """Return odd quintics a x + b x³ + c x⁵. Each is nearest to 1 on the range of the one before (Remez)."""
    found, low, high = [], least, 1.0
    for _ in range(count):
        points = np.array([low, (2 * low + high) / 3, (low + 2 * high) / 3, high])
        for _ in range(100):
            rows = np.stack([points, points**3, points**5, [1.0, -1.0, 1.0, -1.0]], axis=1)
            a, b, c, off = np.linalg.solve(rows, np.ones(4))
            turns = np.sqrt(np.sort(np.roots([5 * c, 3 * b, a]).real))
            points = np.array([low, *turns, high])
        found.append((float(a), float(b), float(c)))
        low, high = 1.0 - abs(off), 1.0 + abs(off)
    return found


QUINTICS = quintics(0.003, 5)

AMPLIFIED = 2e-3
"""Rounding error of an isotropic Δ, relative to its length: small directions grow 560-fold, and so do their errors."""


def _isotropic(pieces: np.ndarray, shares: np.ndarray, t: "Tensor") -> tuple[np.ndarray, np.ndarray, bool]:
    """Return Δ of one matrix, how far float32 may be from it, and whether its directions cancelled."""
    mean = shares @ pieces
    magnitude, length = float(shares @ np.linalg.norm(pieces, axis=1)), float(np.linalg.norm(mean))
    rounding = (len(pieces) + 3) * EPS * (shares @ np.abs(pieces)) + EPS * np.abs(mean) + 2.0**-149
    if magnitude == 0.0 or length < CANCELLED_BELOW * magnitude:
        return mean, rounding, magnitude > 0.0
    delta = leveled(mean, t, magnitude)
    return delta, np.full_like(delta, AMPLIFIED * magnitude) + rounding, False


def leveled(x: np.ndarray, t: "Tensor", length: float) -> np.ndarray:
    """Return a matrix [n] with equal singular values, block by block, of this length."""
    parts = [-(-side // t.block) if t.block else 1 for side in t.shape]
    rows = np.split(x.reshape(t.shape), [t.shape[0] * i // parts[0] for i in range(1, parts[0])])
    cells = [np.split(row, [t.shape[1] * i // parts[1] for i in range(1, parts[1])], axis=1) for row in rows]
    found = np.block([[_polar(cell) for cell in row] for row in cells]).reshape(-1)
    norm = np.linalg.norm(found)
    return np.asarray(found * (length / norm)) if norm > 0.0 else x


def _polar(d: np.ndarray) -> np.ndarray:
    u, values, v = np.linalg.svd(d, full_matrices=False)
    if not values.any():
        return d
    values = values * (0.999 / np.linalg.norm(values))
    for a, b, c in QUINTICS:
        values = a * values + b * values**3 + c * values**5
    return np.asarray(u * values @ v)


# --- a fragment -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """One update: its outer gradient [n], and its weight."""

    gradient: np.ndarray
    weight: float
    """The weight that the commit records; the checker compares it with the update."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's place in its fragment, and how it is merged."""

    start: int
    stop: int
    merge: str
    shape: tuple[int, ...]
    block: int
    """The longest side of a block that is merged as one matrix; 0: no limit."""


@dataclass
class Point:
    """A fragment at one version. `*_off`: how far the library's float32 values may be from these."""

    published: np.ndarray
    master: np.ndarray
    momentum: np.ndarray
    master_off: np.ndarray
    momentum_off: np.ndarray


@dataclass
class Fragment:
    """One fragment, followed commit by commit."""

    tensors: list[Tensor]
    rate: float
    momentum: float
    codec_down: str
    feedback: bool = True
    """Whether what the codec drops stays in the master."""
    points: dict[int, Point] = field(default_factory=dict)
    """The newest points, by version."""
    lost: bool = False
    """Whether an input could not be read: no value is known from that commit on."""

    def begin(self, values: np.ndarray, version: int = 0) -> None:
        """Start at a version, without momentum."""
        zeros = np.zeros(values.size)
        self.points[version] = Point(values.copy(), values.astype(np.float64), zeros, zeros.copy(), zeros.copy())

    def is_new(self, version: int) -> bool:
        """Return whether nothing was merged into the state that a version follows."""
        return not self.points[version - 1].momentum.any()

    def commit(
        self,
        version: int,
        inputs: list[Given],
        payload: bytes,
        published_digest: bytes,
        cancelled: int,
        *,
        periods: float = 1.0,
    ) -> list[str]:
        """Follow a commit; return what is wrong with its values.

        `periods`: those in its inputs, if they were divided by this number for the sake of the momentum. The step is
        then the whole merged difference.
        """
        before = self.points[version - 1]
        delta, delta_off, found = self._merged(inputs)
        momentum = self.momentum * before.momentum + delta
        momentum_off = (
            self.momentum * before.momentum_off
            + delta_off
            + 3.0 * EPS * (np.abs(momentum) + np.abs(self.momentum * before.momentum))
        )
        rate = periods / (1.0 + self.momentum) if periods > 1.0 else self.rate
        move = rate * (delta + self.momentum * momentum)
        master = before.master - move
        master_off = (
            before.master_off
            + rate * (delta_off + self.momentum * momentum_off)
            + EPS * (np.abs(master) + 4.0 * rate * (np.abs(delta) + np.abs(self.momentum * momentum)))
        )
        said, dropped = decode(self.codec_down, [t.stop - t.start for t in self.tensors], payload)
        published = before.published + said
        wanted = master - before.published
        off = np.abs(wanted - said.astype(np.float64))
        most = dropped + 2.0 * master_off + 2.0 * EPS * np.abs(wanted)
        wrong = []
        if found != cancelled:
            wrong.append(f"says that {cancelled} tensors cancelled, and it is {found}")
        if (off > most).any():
            at = int(np.argmax(off - most))
            wrong.append(
                f"element {at}: the outer step gives a difference of {wanted[at]:.9g} to what was published, and "
                f"{said[at]:.9g} was published (a codec step and rounding are {most[at]:.3g})"
            )
        if blake3(published.tobytes()).digest() != published_digest:
            wrong.append("the difference, decoded and added, does not give the value it names")
        if not self.feedback:
            master, master_off = published.astype(np.float64), np.zeros(published.size)
        self.points[version] = Point(published, master, momentum, master_off, momentum_off)
        self.points.pop(version - VERSIONS_KEPT, None)
        return wrong

    def heal(self, version: int, source: int, payload: bytes, published_digest: bytes) -> list[str]:
        """Start again from the published value of a version; return what is wrong with that."""
        before = self.points.get(source)
        published = np.frombuffer(payload, "<f4")
        wrong = []
        if not self.lost and before is not None and not np.array_equal(published, before.published):
            wrong.append(f"starts again, and not from what was published at version {source}")
        if blake3(payload).digest() != published_digest:
            wrong.append("starts again from another value than it names")
        self.begin(published, version)
        self.lost = False
        return wrong

    def snapshot(self, version: int, payload: bytes) -> list[str]:
        """Return what is wrong with a stored state: published, master, momentum."""
        point = self.points.get(version)
        if self.lost or point is None:
            return []
        arrays = np.frombuffer(payload, "<f4").reshape(-1, point.published.size)
        if len(arrays) == 2 and self.feedback and version > 0 and not np.array_equal(point.master, point.published):
            return ["its master is not kept, and it is not what was published"]
        published, master, momentum = arrays[0], arrays[-2], arrays[-1]  # with two arrays the first is also the master
        wrong = []
        if not np.array_equal(published, point.published):
            wrong.append("its published value is not what was published")
        for name, found, true, off in (
            ("master", master, point.master, point.master_off),
            ("momentum", momentum, point.momentum, point.momentum_off),
        ):
            far = np.abs(found - true) - 2.0 * off
            if (far > 0.0).any():
                at = int(np.argmax(far))
                wrong.append(f"element {at} of its {name} is {found[at]:.9g}, and should be {true[at]:.9g}")
        return wrong

    def _merged(self, inputs: list[Given]) -> tuple[np.ndarray, np.ndarray, int]:
        """Return Δ, how far float32 may be from it, and how many tensors cancelled."""
        size = self.tensors[-1].stop
        delta, off, cancelled = np.zeros(size), np.zeros(size), 0
        weights = np.array([g.weight for g in inputs])
        shares = weights / weights.sum()
        for t in self.tensors:
            at = slice(t.start, t.stop)
            pieces = np.array([g.gradient[at] for g in inputs], np.float64)
            scale, scale_off = 1.0, 0.0
            factors = shares
            if t.merge == "iso" and len(t.shape) == 2:
                delta[at], off[at], far = _isotropic(pieces, shares, t)
                cancelled += far
                continue
            if t.merge != "avg":
                norms = np.linalg.norm(pieces, axis=1)
                factors = np.divide(shares, norms, out=np.zeros_like(shares), where=norms > 0.0)
                magnitude = float(shares @ norms)
                direction = factors @ pieces
                length = float(np.linalg.norm(direction))
                scale = magnitude
                if length >= CANCELLED_BELOW:
                    scale = magnitude / length
                    rounding = (len(inputs) + 2) * EPS * np.linalg.norm(np.abs(factors) @ np.abs(pieces))
                    scale_off = scale * float(rounding) / length
                else:
                    cancelled += magnitude > 0.0
            total = factors @ pieces
            delta[at] = scale * total
            off[at] = (
                scale * (len(inputs) + 3) * EPS * (np.abs(factors) @ np.abs(pieces))
                + scale_off * np.abs(total)
                + EPS * np.abs(delta[at])
                + 2.0**-149
            )
        return delta, off, cancelled
