"""How fast this machine does a syncer's arithmetic."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.codecs import codec, pack, packed_size, unpack
from isthmus.layout import DENSE, Fragment, Spec, partition
from isthmus.merge import Accumulator, advance, initial, outers
from isthmus.records import frame
from isthmus.rules import Rules


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Seconds per parameter of the syncer's arithmetic, one core."""

    add_s: float
    """Fetching aside, per update: verify, decode, accumulate."""
    round_s: float
    """Per round: outer step, encode, digests."""


def measure(now: Callable[[], float], codec_up: str, codec_down: str, size: int = 1 << 20, repeats: int = 5) -> Speeds:
    """Time the syncer's arithmetic on this machine, on a fragment of so many parameters: medians of a few repeats."""
    rules = Rules(codec_up=codec_up, codec_down=codec_down)
    fragment = _fragment(size)
    draw = np.random.default_rng(0)
    values = draw.standard_normal(fragment.size, dtype=np.float32)
    state = initial(values)
    update = np.frombuffer(_packed(codec_up, fragment, values), np.uint8)
    adds, rounds = [], []
    for _ in range(repeats + 1):
        accumulator = Accumulator(fragment, outers(rules))
        began = now()
        frame.digest(update.data)
        out = np.empty(fragment.size, np.float32)
        unpack(codec(codec_up), fragment, update, out)
        accumulator.add(out, 1.0)
        adds.append(now() - began)
        began = now()
        advance(state, accumulator, codec(codec_down), bytes(32))
        rounds.append(now() - began)
    # The first of each compiles.
    return Speeds(
        add_s=statistics.median(adds[1:]) / fragment.size, round_s=statistics.median(rounds[1:]) / fragment.size
    )


def _fragment(size: int) -> Fragment:
    return partition([Spec("weight", (max(1, size // 1024), 1024), "float32", DENSE)], 1).fragments[0]


def _packed(name: str, fragment: Fragment, values: "np.ndarray[Any, np.dtype[np.float32]]") -> bytearray:
    out = bytearray(packed_size(codec(name), fragment))
    pack(codec(name), fragment, values, np.frombuffer(out, np.uint8))
    return out
