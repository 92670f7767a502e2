"""How fast this machine merges, measured in some milliseconds, and whether that suffices for a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from isthmus.codecs import codec, pack
from isthmus.codecs.packed import packed
from isthmus.format.isotropic import flop, taken
from isthmus.format.layout import Fragment, Layout, Spec, TensorClass, partition
from isthmus.format.records import frame
from isthmus.format.rules import MergeRule, Rules
from isthmus.log import polar
from isthmus.log.merge import Accumulator, advance, initial, outers
from isthmus.runtime.clock import ALONE, ComputePool, cores

SIDE, SIZE, REPEATS = 192, 1 << 16, 3
"""What `glance` times: a matrix of this side, a fragment of this many parameters, this many repeats."""

SIDE_GPU = 1024
"""The side of the matrix if a GPU computes it: small ones do not occupy a GPU."""

PART_MAX = 0.5
"""Share of a period that merging all fragments may take. Beyond that, rounds wait for each other and come late."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speed of the syncer's arithmetic on one core: seconds per parameter, and matrix products."""

    add_s: float
    """Per update, without fetching it: verify, decode, accumulate."""
    round_s: float
    """Per round: outer step, encode, digests."""
    flop_s: float = 5e10
    """Floating-point operations a second of the matrix products of isotropic merges. If a GPU computes them, this is a
    core's share: the speed of the GPU, divided by the cores of this machine."""

    def __str__(self) -> str:
        return f"{4e-9 / (self.add_s + self.round_s):.2g} GB/s of float32, {self.flop_s / 1e9:.2g} GFLOP/s"

    def merge_s(self, layout: Layout, rules: Rules, learners: int) -> float:
        """Return the seconds that one core needs for one round of every fragment, with updates of so many learners."""
        seconds = layout.size * (learners * self.add_s + self.round_s)
        if rules.merge == MergeRule.ISO:
            seconds += sum(flop(m, n, rules.iso_block) for m, n in taken(layout.specs)) / self.flop_s
        return seconds


def too_slow(speeds: Speeds, layout: Layout, rules: Rules, *, learners: int, step_s: float, cores: float) -> str | None:
    """Return a warning if merging takes more than `PART_MAX` of a period of H steps; None if it does not.

    `step_s`: duration of a learner's usual step [s]; 0 while unknown, which returns None. `cores`: cores of all syncers
    together, for all fragments.
    """
    takes_s, period_s = speeds.merge_s(layout, rules, max(1, learners)) / cores, rules.sync_every * step_s
    if takes_s <= PART_MAX * period_s or not step_s:
        return None
    return (
        f"merging every fragment once takes {takes_s:.2g} s of {cores:.3g} cores, and learners have a new update for "
        f"each every {period_s:.2g} s ({rules.sync_every} steps): rounds will come late and work will be lost. Give "
        f"syncers more cores or faster ones (this one: {speeds}), or create a run with a longer sync_every"
    )


def glance(now: Callable[[], float], rules: Rules, compute: ComputePool = ALONE) -> Speeds:
    """Measure how fast a core of this machine merges under these rules, and the GPU of `compute`, if it has one.

    It takes about 40 ms once kernels are loaded, longer on a busy machine.
    """
    speeds = measure(now, rules.codec_up, rules.codec_down, SIZE, REPEATS)
    if compute.gpu:
        return replace(speeds, flop_s=products(now, REPEATS, SIDE_GPU, compute) / cores())
    return replace(speeds, flop_s=products(now, REPEATS, SIDE))


def products(now: Callable[[], float], repeats: int = 5, side: int = 1024, compute: ComputePool = ALONE) -> float:
    """Time isotropic merges of a square matrix. Return floating-point operations a second of the fastest repeat."""
    d = np.random.default_rng(0).standard_normal((side, side), dtype=np.float32)
    took = []
    for _ in range(repeats + 1):
        began = now()
        polar.isotropic(d, 0, compute)
        took.append(now() - began)
    return flop(side, side) / min(took[1:])


def measure(now: Callable[[], float], codec_up: str, codec_down: str, size: int = 1 << 20, repeats: int = 5) -> Speeds:
    """Time the syncer's arithmetic on a fragment of `size` parameters; the fastest of a few repeats counts.

    Other work on the machine makes a repeat slower, never faster.
    """
    rules = Rules(codec_up=codec_up, codec_down=codec_down)
    fragment = _fragment(size)
    draw = np.random.default_rng(0)
    values = draw.standard_normal(fragment.size, dtype=np.float32)
    state = initial(values)
    update = pack(codec(codec_up), fragment, values)
    adds, rounds = [], []
    for _ in range(repeats + 1):
        accumulator = Accumulator(fragment, outers(rules))
        began = now()
        frame.digest(update.data)
        accumulator.add(packed(fragment, codec(codec_up), update), 1.0)
        adds.append(now() - began)
        began = now()
        advance(state, accumulator, codec(codec_down), bytes(32), stated=False)
        rounds.append(now() - began)
    # The first repeat includes compiling the kernels.
    return Speeds(add_s=min(adds[1:]) / fragment.size, round_s=min(rounds[1:]) / fragment.size)


def _fragment(size: int) -> Fragment:
    return partition([Spec("weight", (max(1, size // 1024), 1024), "float32", TensorClass.DENSE)], 1).fragments[0]
