"""Hostile learners: what they send in place of their updates, and the experiment on which merge rules withstand it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from isthmus.codecs.kernels import F32
from isthmus.format.rules import ROBUST
from isthmus.learner.backend import LocalBackend
from isthmus.rounds.bounds import Believed, Claim, Influence
from isthmus_lab.training.experiment import ISO, Experiment, base, named
from isthmus_lab.training.setting import Setting

LEARNERS = 8
COUNTS = (1, 3)
"""Numbers of hostile learners that are tried."""

Shared = dict[tuple[int, int], F32]
"""Arrays that the hostile learners share, by fragment and base."""

Attack = Callable[[F32, tuple[int, int], Shared, np.random.Generator], F32]
"""Returns the difference [n] that is sent, given the honest difference [n], its fragment and base, the arrays that
hostile learners share, and a random generator."""


def _together(x: F32, of: tuple[int, int], shared: Shared, draw: np.random.Generator) -> F32:
    """Return the same difference for all hostile learners: the negated honest difference of the first of them.

    There is one for each fragment and base, so every update has a usual length and is no older than usual.
    """
    return -shared.setdefault(of, x)


def _stale(x: F32, of: tuple[int, int], shared: Shared, draw: np.random.Generator) -> F32:
    """Return the first difference of the fragment, again and again."""
    return shared.setdefault((of[0], 0), x)


JUST_BELOW = 3.8
"""Length of an update in the attack `slow`, in lengths of an honest one: a bound of four times does not cut it."""


def _slow(x: F32, of: tuple[int, int], shared: Shared, draw: np.random.Generator) -> F32:
    """Return a difference in always the same direction, as long as the bound allows.

    This is the attack of an author who wants the model in a certain place and has time.
    """
    way = shared.setdefault((of[0], 0), draw.standard_normal(x.size).astype(np.float32))
    return (JUST_BELOW * np.linalg.norm(x) / max(float(np.linalg.norm(way)), 1e-30) * way).astype(np.float32)


ATTACKS: dict[str, Attack] = {
    "sign": lambda x, *_: -x,
    "ten times": lambda x, *_: 10 * x,
    "sign, ten times": lambda x, *_: -10 * x,
    "noise": lambda x, _, __, draw: (np.linalg.norm(x) / np.sqrt(max(1, x.size)) * draw.standard_normal(x.size)).astype(
        np.float32
    ),
    "stale": _stale,
    "together": _together,
    "slow": _slow,
}


@contextmanager
def hostile(attack: str, count: int) -> Iterator[None]:
    """Let the last `count` of `LEARNERS` learners send what the attack returns, while the context lasts."""
    own = LocalBackend.packed
    names = {f"l{LEARNERS - 1 - number}" for number in range(count)}
    shared: Shared = {}
    draw = np.random.default_rng(0)

    def packed(backend: LocalBackend, header: Any, before: F32, values: F32, feedback: F32 | None) -> Any:
        if header.learner not in names:
            return own(backend, header, before, values, feedback)
        sent = ATTACKS[attack](before - values, (header.fragment, header.base), shared, draw)
        return own(backend, header, before, (before - sent).astype(np.float32), None)

    LocalBackend.packed = packed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        LocalBackend.packed = own  # type: ignore[method-assign]


@contextmanager
def unbounded() -> Iterator[None]:
    """Believe what updates claim, without bounds, while the context lasts."""
    own = Influence.judge

    def judge(self: Influence, claim: Claim, among: Sequence[Claim] = (), **limits: Any) -> Believed:
        return Believed(claim.tokens * (claim.tokens / claim.steps))

    Influence.judge = judge  # type: ignore[method-assign]
    try:
        yield
    finally:
        Influence.judge = own  # type: ignore[method-assign]


@contextmanager
def attacked(attack: str, count: int, bounded: bool) -> Iterator[None]:
    """Let `count` learners attack, and remove the bounds unless `bounded`, while the context lasts."""
    with ExitStack() as stack:
        if count:
            stack.enter_context(hostile(attack, count))
        if not bounded:
            stack.enter_context(unbounded())
        yield


def name_of(attack: str, count: int, bounded: bool) -> str:
    """Return the name of a variant; the library's own arithmetic without hostile learners has the empty name."""
    what = f"{count} hostile: {attack}" if count else ""
    return ", ".join(part for part in (what, "" if bounded else "unbounded") if part)


CASES = [(attack, count, bounded) for bounded in (True, False) for count in COUNTS for attack in ATTACKS]
CASES += [("", 0, False)]

VARIANTS = {name_of(*case): (lambda case=case: attacked(*case)) for case in CASES}
"""Variants by name, for `isthmus_lab.training.variants`."""

MERGES: dict[str, dict[str, object]] = {
    "RDA": {},
    "avg": {"rules_merge": "avg", "rules_outer_lr": 0.7},
    "iso": ISO,
    "trimmed": {"rules_merge": "trimmed", "rules_merge_embeddings": "trimmed"},
    "trimmed 0.375": {"rules_merge": "trimmed", "rules_merge_embeddings": "trimmed", "rules_trim": 0.375},
    "median": {"rules_merge": "median", "rules_merge_embeddings": "median"},
}


def _settings(steps: int) -> list[Setting]:
    eight, found = base(steps, learners=LEARNERS), []
    for bounded in (True, False):
        for merge, rules in MERGES.items():
            if not bounded and rules.get("rules_merge") in ROBUST:
                continue
            at = f"{merge}{'' if bounded else ', unbounded'}: "
            found.append(named(eight, f"{at}nobody", variant=name_of("", 0, bounded), **rules))
            if bounded:
                # Compare with the honest learners alone, without the three hostile ones.
                five = base(steps, learners=LEARNERS - max(COUNTS))
                found.append(named(five, f"{at}five alone", **rules))
            for count in COUNTS:
                for attack in ATTACKS:
                    variant = name_of(attack, count, bounded)
                    found.append(named(eight, f"{at}{count} of {LEARNERS}, {attack}", variant=variant, **rules))
    return found


EXPERIMENTS = (
    Experiment(
        "hostile",
        "Loss where one or three of eight learners are hostile, by merge, with bounds on each and without",
        "none for decoupled rounds; the merges are those of Yin et al. 2018 and of Pillutla et al. 2019",
        _settings,
        quick=(
            "RDA: nobody", "RDA: 3 of 8, sign", "RDA, unbounded: 3 of 8, sign, ten times", "median: nobody",
            "median: 3 of 8, sign", "trimmed: nobody", "trimmed: 3 of 8, sign",
        ),
    ),
)  # fmt: skip
