"""Figures and their limits, measured in turns, so that other load on the machine affects both."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

Say = Callable[[float], None]
"""Reports progress: called with the share that is done, 0 to 1."""

MIN_REPEATS = 7


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a benchmark."""

    bench: str
    case: str
    size: str
    """The size of the case: parameters, bytes, learners."""
    value: float
    """The median of the repeats."""
    unit: str
    limit: float | None
    """The median of what the machine allows, or of what a peer does, in the same unit."""
    ratio: float | None
    """The median of the repeats' value / limit."""
    aim: float | None
    """The aim for the ratio if there is a limit, else for the value."""
    at_most: bool
    """Whether the aim is an upper bound."""
    reached: bool | None
    spread: float
    """(largest − smallest) / median of the ratios if there is a limit, else of the values."""
    repeats: int


@dataclass(frozen=True)
class Case:
    """One operation to time."""

    name: str
    work: Callable[[], object]
    before: Callable[[], object] | None = None
    """Called before each run of `work`, and not timed."""


@dataclass(frozen=True)
class Bench:
    """A benchmark: its name, one line about what it measures, and `run`, which yields rows as they are measured."""

    name: str
    says: str
    run: Callable[[int, Say], Iterator[Row]]


def in_turns(cases: Sequence[Case], repeats: int, say: Say = lambda share: None) -> dict[str, list[float]]:
    """Return the seconds of each case in every repeat, by its name.

    Every repeat runs each case once. One more repeat comes first, which does not count.
    """
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    done = 0
    for number in range(repeats + 1):
        for case in cases:
            if case.before is not None:
                case.before()
            gc.collect()
            began = time.perf_counter()
            case.work()
            took = time.perf_counter() - began
            if number:
                found[case.name].append(took)
            done += 1
            say(done / ((repeats + 1) * len(cases)))
    return found


def row(
    bench: str,
    case: str,
    size: str,
    values: Sequence[float],
    unit: str,
    *,
    limits: Sequence[float] | None = None,
    aim: float | None = None,
    at_most: bool = False,
) -> Row:
    """Return a figure from the values of all repeats, and from the limits that were measured in the same repeats."""
    ratios = None if limits is None else [a / b for a, b in zip(values, limits, strict=True)]
    judged = values if ratios is None else ratios
    middle = statistics.median(judged)
    reached = None if aim is None else (middle <= aim if at_most else middle >= aim)
    return Row(
        bench=bench,
        case=case,
        size=size,
        value=statistics.median(values),
        unit=unit,
        limit=None if limits is None else statistics.median(limits),
        ratio=None if ratios is None else middle,
        aim=aim,
        at_most=at_most,
        reached=reached,
        spread=(max(judged) - min(judged)) / middle if middle else 0.0,
        repeats=len(values),
    )


def rates(amount: float, seconds: Sequence[float]) -> list[float]:
    """Return the amount per second of each repeat, given its seconds."""
    return [amount / took for took in seconds]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that at least this share of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def load() -> float:
    """Return the machine's load: the mean number of processes that wanted a processor in the last minute."""
    return os.getloadavg()[0]


def parted(say: Say, parts: int) -> list[Say]:
    """Return a progress function for each of `parts` equal parts; each takes the share done of its own part."""

    def within(start: float, stop: float) -> Say:
        return lambda share: say(start + share * (stop - start))

    return [within(a, b) for a, b in pairwise([i / parts for i in range(parts + 1)])]


def counted(n: float) -> str:
    """Return a number with a unit prefix: 16M, 836.7k."""
    for unit, of in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= of:
            return f"{n / of:.4g}{unit}"
    return f"{n:g}"


def sized(n: int) -> str:
    """Return a number of bytes in KiB or MiB."""
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"
