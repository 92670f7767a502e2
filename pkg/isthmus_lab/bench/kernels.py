"""Speed of the arithmetic, beside a copy of the same amount of memory, which shows what the memory bus allows."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from isthmus.codecs import codec, kernels, pack, unpack
from isthmus.codecs.packed import keep_dropped, packed
from isthmus.format import digests
from isthmus.format.layout import Fragment, Spec, TensorClass, partition
from isthmus.format.records.objects import Outer
from isthmus.format.rules import MergeRule
from isthmus.log import merge
from isthmus.log.polar import isotropic
from isthmus.runtime.clock import ALONE, ComputePool, cores
from isthmus_lab.bench.measure import Case, Row, Say, counted, in_turns, parted, rates, row

PARAMS = 16 << 20
SIDE = 1024
CODECS = ("int4", "int8", "q1.5")
AIMS = {
    "int4: encode, fed back": 0.4,
    "int8: encode, fed back": 0.4,
    "int4: merge by RDA": 0.35,
    "int4: merge by Avg": 0.5,
    "int4: advance": 0.25,
}
"""Shares of the speed of a copy with as many threads."""


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the speed of every kernel on one thread, and of those with an aim on all threads.

    Each stands beside a copy with as many threads. The last rows have the matrix kernels.
    """
    kernels.warm()
    computes: list[tuple[str, ComputePool]] = [("", ALONE)]
    with ThreadPoolExecutor(cores()) as pool:
        if cores() > 1:
            computes.append((f", {cores()} threads", ComputePool(pool, cores())))
        says = parted(say, len(computes) + 1)
        for (words, compute), part in zip(computes, says, strict=False):
            yield from _vectors(repeats, part, words, compute)
        yield from _matrices(repeats, says[-1])


def _vectors(repeats: int, say: Say, words: str, compute: ComputePool) -> Iterator[Row]:
    fragment = flat(PARAMS)
    draw = np.random.default_rng(0)
    x = (0.02 * draw.standard_normal(PARAMS)).astype(np.float32)
    out = np.empty_like(x)
    run = bytes(32)

    def copy() -> None:
        compute.share(lambda a, b: np.copyto(out[a << 16 : b << 16], x[a << 16 : b << 16]), PARAMS >> 16, 4)

    cases = [Case("copy", copy)]
    state = merge.State(1, x, x.copy(), x.copy())
    for name in CODECS:
        code = codec(name)
        blob = pack(code, fragment, x, compute)
        update = packed(fragment, code, blob, compute)
        rda, avg = (merge.Accumulator(fragment, {r: _outer(rule) for r in TensorClass}, compute) for rule in _RULES)
        for round_ in (rda, avg):
            round_.add(update, 1.0)

        def advance(round_: merge.Accumulator = rda, name: str = name) -> object:
            fresh = merge.State(1, state.published, state.master, state.momentum)
            return merge.advance(fresh, round_, codec(name), run)

        def encode(code: object = code) -> None:
            keep_dropped(fragment, code, pack(code, fragment, x, compute), out, compute)  # type: ignore[arg-type]

        def merged(round_: merge.Accumulator, code: object = code, blob: object = blob) -> None:
            round_.add(packed(fragment, code, blob, compute), 1.0)  # type: ignore[arg-type]

        cases += [
            Case(f"{name}: encode, fed back", encode),
            Case(f"{name}: decode", lambda code=code, blob=blob: unpack(code, fragment, blob, out)),  # type: ignore[misc]
            Case(f"{name}: merge by RDA", lambda rda=rda, merged=merged: merged(rda)),  # type: ignore[misc]
            Case(f"{name}: merge by Avg", lambda avg=avg, update=update: avg.add(update, 1.0)),  # type: ignore[misc]
            Case(f"{name}: advance", advance),
        ]
    cases.append(Case("digest", lambda: digests.digest(x)))
    if compute is not ALONE:
        cases = [case for case in cases if case.name in AIMS or case.name == "copy"]
    took = in_turns(cases, repeats, say)
    amount = 4e-9 * PARAMS
    for case in cases[1:]:
        yield row(
            "kernels",
            case.name + words,
            counted(PARAMS),
            rates(amount, took[case.name]),
            "GB/s of float32",
            limits=rates(amount, took["copy"]),
            aim=AIMS.get(case.name),
        )


def _matrices(repeats: int, say: Say) -> Iterator[Row]:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((SIDE, SIDE)).astype(np.float32)
    out = np.empty_like(x)
    flop = 2.0 * SIDE**3
    cases = [
        Case("BLAS", lambda: np.matmul(x, x, out=out)),
        Case("matrix product", lambda: kernels.matmul(x, x, out, 0, SIDE, False)),
        Case("polar factor", lambda: isotropic(x, 0)),
    ]
    took = in_turns(cases, repeats, say)
    yield row(
        "kernels",
        "matrix product beside BLAS",
        f"{SIDE}²",
        rates(1e-9 * flop, took["matrix product"]),
        "GFLOP/s",
        limits=rates(1e-9 * flop, took["BLAS"]),
    )
    yield row("kernels", "polar factor", f"{SIDE}²", took["polar factor"], "s")


_RULES = (MergeRule.RDA, MergeRule.AVG)


def _outer(rule: MergeRule) -> Outer:
    return Outer(merge=rule, learning_rate=0.5, momentum=0.5, block=0)


def flat(n: int) -> Fragment:
    """Return the only fragment of a layout, one tensor of n parameters."""
    return partition([Spec("w", (n,), "float32", TensorClass.DENSE)], 1).fragments[0]
