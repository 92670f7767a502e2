"""Bits and lost energy of a difference with each codec, and the link that the paper's setup needs with the codec.

The effect on the training loss takes hours to measure: `isthmus simulate training bits`, docs/experiments.md.
"""

import math
from collections.abc import Iterator

import numpy as np

from isthmus.codecs import codec, kernels, pack, unpack
from isthmus.format.rules import Pace, Rules
from isthmus_lab.bench.kernels import flat
from isthmus_lab.bench.measure import Row, Say, counted, row
from isthmus_lab.forecast import traffic
from isthmus_lab.forecast.bandwidth import DECOUPLED, Setup, required

PARAMS = 1 << 20
CODECS = ("int8", "int4", "q4", "q3", "q2", "q1.5", "q1", "q0.75", "q0.5")
PAPER = Setup(params=2.9e9)
"""The paper's setup: one second a step, P = H = 24. Its links: 1.7 Gbit/s with bf16, 0.43 Gbit/s with int4."""
PAPER_GBIT_S, AIM_GBIT_S = 0.43, 0.17
UTILIZATION = 0.9


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield for each codec the bits and lost energy of normally distributed differences, and the link in Gbit/s.

    The last row has the bits that scales of blocks could save.
    """
    fragment = flat(PARAMS)
    draws = [
        np.random.default_rng(seed).standard_normal(PARAMS).astype(np.float32) * np.float32(1e-3)
        for seed in range(repeats)
    ]
    out = np.empty(PARAMS, np.float32)
    cost = traffic.measure(
        Rules(fragments=PAPER.fragments, sync_every=PAPER.sync_every), Pace(), traffic.LEARNERS_MAX
    ).learner
    for at, name in enumerate(CODECS):
        code, bits, lost = codec(name), [], []
        for x in draws:
            packed = pack(code, fragment, x)
            unpack(code, fragment, packed, out)
            bits.append(8.0 * packed.size / PARAMS)
            lost.append((kernels.norm(x - out) / kernels.norm(x)) ** 2)
        yield row("bytes", f"{name}: bits a parameter", counted(PARAMS), bits, "bits")
        yield row("bytes", f"{name}: energy of a normal difference that is lost", counted(PARAMS), lost, "")
        yield row(
            "bytes",
            f"{name} both ways: link for {UTILIZATION:.0%}, beside the paper's with int4",
            counted(PAPER.params),
            [required(DECOUPLED, PAPER, traffic.own_codec(PAPER, name, name, cost), UTILIZATION)],
            "Gbit/s",
            limits=[PAPER_GBIT_S],
            aim=AIM_GBIT_S / PAPER_GBIT_S if name == "q1.5" else None,
            at_most=True,
        )
        say((at + 1) / len(CODECS))
    spread = [np.square(x).reshape(-1, kernels.BLOCK).mean(1) for x in draws]
    yield row(
        "bytes",
        f"what scales of blocks of {kernels.BLOCK} could save of a normal difference",
        counted(PARAMS),
        [0.5 * (math.log2(s.mean()) - float(np.log2(s).mean())) for s in spread],
        "bits",
    )
