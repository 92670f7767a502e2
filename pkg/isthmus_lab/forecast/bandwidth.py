"""Bandwidth for a utilisation, and utilisation for a bandwidth, of four ways to train one model in several places.

Every learner computes a step in T seconds; the forward pass takes a third of that. Every learner has one link, as fast
up as down. The four methods differ in what they send over the link and in when the learner needs the result:

- data parallel: gradients leave in buckets while the backward pass computes them; the next step needs all of them;
- DiLoCo (arXiv 2311.08105): every H steps the whole model; all learners stop until it has been exchanged;
- Streaming DiLoCo (arXiv 2501.18512): every H / P steps one of P fragments, needed τ steps later;
- Decoupled DiLoCo (arXiv 2604.21428): the same, but up to a syncer and down again; the two directions do not share
  bandwidth.

An all-reduce over M learners moves 2 (1 − 1/M) times the data over each link, and waits for two latencies, as if every
learner sent to every other at once: the least there is, in favour of the first three. `simulate` plays steps and
transfers one by one. `exact` is the closed form of the same model. Utilisation is compute / (compute + stall).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.errors import InputError
from isthmus_lab.forecast.island import LATENCY_MAX_S

DATA_PARALLEL, DILOCO, STREAMING, DECOUPLED = "data-parallel", "diloco", "streaming", "decoupled"
METHODS = (DATA_PARALLEL, DILOCO, STREAMING, DECOUPLED)

GRADIENT_BUCKETS = 128
"""Number of buckets in which gradients leave during the backward pass."""

FORWARD_SHARE = 1.0 / 3.0
"""Share of a step that the forward pass takes; no gradient is ready before its end."""

PARAMS_MAX = 1e14
"""Most parameters that are accepted: a hundred times the largest models that exist."""

FASTEST_GBIT_S = 1e9
"""Highest bandwidth that `required` tries, in Gbit/s."""


@dataclass(frozen=True, kw_only=True)
class OnTheWire:
    """What a fragment costs on the wire: bits per parameter, and bytes besides."""

    name: str
    up_bits: float
    """Bits per parameter sent to the other learners, or to the syncer."""
    down_bits: float
    """Bits per parameter received from the syncer; all-reduces ignore this."""
    up_bytes: float = 0.0
    """Bytes of headers and messages per fragment that is sent."""
    down_bytes: float = 0.0
    """Bytes of headers and messages per fragment that is received."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, its learners and their connections, except the bandwidth."""

    params: float
    step_s: float = 1.0
    learners: int = 8
    sync_every: int = 24
    """H."""
    fragments: int = 24
    """P."""
    overlap: float = 2.0
    """τ, in steps."""
    latency_s: float = 0.0
    """Seconds, one way."""
    syncer_s: float = 0.0
    """Seconds from the last update of a round to the new version: grace, merge and publishing."""

    def check(self) -> "Setup":
        """Return self. Raises `InputError` that names the parameter that is out of range."""
        for name in ("params", "step_s", "learners", "sync_every", "fragments"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} must be more than 0, not {value:g}")
        for name in ("overlap", "latency_s", "syncer_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} must not be negative, but is {value:g}")
        if self.params > PARAMS_MAX:
            raise InputError(f"{self.params:g} parameters cannot be: at most {PARAMS_MAX:g}; 2.9 billion are 2.9e9")
        if self.latency_s > LATENCY_MAX_S:
            raise InputError(
                f"latency_s {self.latency_s:g} cannot be (at most {LATENCY_MAX_S:g}): it is in seconds, one way; "
                "50 ms are 0.05"
            )
        if self.sync_every < self.fragments:
            raise InputError(
                f"{self.fragments} fragments within {self.sync_every} steps: at most one leaves per step; "
                "let sync_every be at least fragments"
            )
        return self

    @property
    def gap(self) -> float:
        """Steps between two fragments: g = H / P."""
        return self.sync_every / self.fragments

    @property
    def volume(self) -> float:
        """Amount of data that an all-reduce moves over each link, as a multiple of the data reduced."""
        return 2.0 * (1.0 - 1.0 / self.learners)


def _fragment_s(link: Setup, bits: float, extra_bytes: float, bit_s: float) -> float:
    return (link.params / link.fragments * bits + 8.0 * extra_bytes) / bit_s


# --- simulated --------------------------------------------------------------------------------------------------------


def simulate(method: str, link: Setup, codec: OnTheWire, gbit_s: float) -> float:
    """Return the utilisation at a bandwidth by playing every transfer. Raises `InputError` for an unknown method."""
    bit_s = _bandwidth(link, gbit_s)
    if method == DATA_PARALLEL:
        return _play_data_parallel(link, codec, bit_s)
    if method == DILOCO:
        return _play_diloco(link, codec, bit_s)
    if method in (STREAMING, DECOUPLED):
        return _play_fragments(method, link, codec, bit_s)
    raise InputError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")


def _bandwidth(link: Setup, gbit_s: float) -> float:
    link.check()
    if not (math.isfinite(gbit_s) and gbit_s > 0.0):
        raise InputError(f"a bandwidth must be more than 0 Gbit/s, not {gbit_s:g}")
    return gbit_s * 1e9


def _play_data_parallel(link: Setup, codec: OnTheWire, bit_s: float) -> float:
    bucket_s = link.volume * link.params * codec.up_bits / GRADIENT_BUCKETS / bit_s
    t = free = 0.0
    steps = 3
    for _ in range(steps):
        arrived = 0.0
        for n in range(GRADIENT_BUCKETS):
            made = t + link.step_s * (FORWARD_SHARE + (1.0 - FORWARD_SHARE) * (n + 1) / GRADIENT_BUCKETS)
            free = max(free, made) + bucket_s
            arrived = free + 2.0 * link.latency_s
        t = max(t + link.step_s, arrived if link.learners > 1 else 0.0)
    return steps * link.step_s / t


def _play_diloco(link: Setup, codec: OnTheWire, bit_s: float) -> float:
    t = link.sync_every * link.step_s
    if link.learners > 1:
        t += link.volume * link.params * codec.up_bits / bit_s + 2.0 * link.latency_s
    return link.sync_every * link.step_s / t


def _play_fragments(method: str, link: Setup, codec: OnTheWire, bit_s: float) -> float:
    """Return the utilisation where fragments leave and come back.

    A learner waits at the step boundary τ steps after a fragment left if the fragment has not come back by then.
    """
    if method == STREAMING:
        up_s = link.volume * _fragment_s(link, codec.up_bits, codec.up_bytes, bit_s)
        down_s, between_s = 0.0, 2.0 * link.latency_s
        if link.learners == 1:
            return 1.0
    else:
        up_s = _fragment_s(link, codec.up_bits, codec.up_bytes, bit_s)
        down_s = _fragment_s(link, codec.down_bits, codec.down_bytes, bit_s)
        between_s = 2.0 * link.latency_s + link.syncer_s
    t = up_free = down_free = 0.0
    due: dict[int, float] = {}
    sent = 0
    late = math.ceil(link.overlap)
    begun = 0.0
    # Measure over two whole periods, after enough periods for the transfers to reach a steady state.
    warm = link.sync_every * (2 + math.ceil(4 * (late + 1) / link.sync_every))
    steps = warm + 2 * link.sync_every
    for n in range(steps + 1):
        while sent * link.gap <= n:
            up_free = max(t, up_free) + up_s
            down_free = max(down_free, up_free + between_s) + down_s
            at = math.ceil(sent * link.gap) + late
            due[at] = max(due.get(at, 0.0), down_free)
            sent += 1
        t = max(t, due.pop(n, 0.0))
        if n == warm:
            begun = t
        if n < steps:
            t += link.step_s
    return (steps - warm) * link.step_s / (t - begun)


# --- closed forms -----------------------------------------------------------------------------------------------------


def exact(method: str, link: Setup, codec: OnTheWire, gbit_s: float) -> float:
    """Return the utilisation at a bandwidth in closed form; with fragments, this needs a whole number H / P.

    A fragment leaves every g = H / P steps. It takes d seconds on the slower direction and D seconds in all. The stall
    s per fragment has two lower bounds. The first is the time that the link lacks: s ≥ d − gT. The second is the time
    still missing after τ steps, to which the stalls of the fragments in between contribute: D ≤ τT + (⌊τ/g⌋ + 1) s.
    """
    bit_s = _bandwidth(link, gbit_s)
    compute = link.step_s
    if link.learners == 1 and method != DECOUPLED:
        return 1.0
    if method == DATA_PARALLEL:
        bucket_s = link.volume * link.params * codec.up_bits / GRADIENT_BUCKETS / bit_s
        first = compute * (FORWARD_SHARE + (1.0 - FORWARD_SHARE) / GRADIENT_BUCKETS)
        end = max(compute + bucket_s, first + GRADIENT_BUCKETS * bucket_s) + 2.0 * link.latency_s
        return compute / max(compute, end)
    if method == DILOCO:
        compute *= link.sync_every
        stall = link.volume * link.params * codec.up_bits / bit_s + 2.0 * link.latency_s
        return compute / (compute + stall)
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    up_s = _fragment_s(link, codec.up_bits, codec.up_bytes, bit_s)
    if method == STREAMING:
        slower = whole = link.volume * up_s
        whole += 2.0 * link.latency_s
    else:
        down_s = _fragment_s(link, codec.down_bits, codec.down_bytes, bit_s)
        slower = max(up_s, down_s)
        whole = up_s + down_s + 2.0 * link.latency_s + link.syncer_s
    compute *= link.gap
    late = math.ceil(link.overlap)
    missing = (whole - late * link.step_s) / (math.floor(late / link.gap) + 1)
    return compute / (compute + max(0.0, slower - compute, missing))


# --- the other way round ----------------------------------------------------------------------------------------------


def required(
    method: str, link: Setup, codec: OnTheWire, utilization: float, at: Callable[..., float] = simulate
) -> float:
    """Return the bandwidth in Gbit/s that a utilisation needs. Raises `InputError` if no bandwidth suffices."""
    if not 0.0 < utilization < 1.0:
        raise InputError(f"a utilisation lies between 0 and 1, and is not {utilization:g}")
    if at(method, link, codec, FASTEST_GBIT_S) < utilization:
        best = at(method, link, codec, FASTEST_GBIT_S)
        raise InputError(
            f"{method}: no bandwidth gives {utilization:.0%} with {link.latency_s:g} s of latency: at most {best:.1%}; "
            "ask for less, or let steps be longer"
        )
    low, high = math.log(1e-12), math.log(FASTEST_GBIT_S)
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (low, middle) if at(method, link, codec, math.exp(middle)) >= utilization else (middle, high)
    return math.exp(high)
