"""A malicious learner that may write only its own stream and prefix can do little harm to three honest learners.

`pytest -s tests/integration/test_one_learner.py` prints one line for each attack.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from isthmus.errors import Unavailable
from isthmus.format.records.messages import Heartbeat, Tally, encode, learner_stream
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.replay import replay
from isthmus.log import fold
from isthmus.syncer import Syncer
from support.strangers import forged, post
from support.world import World, all_commits, in_virtual_time, seed_of, serving, train, world

STEPS, STEP_S, TOKENS, H = 200, 0.02, 100, 12
RULES = Rules(fragments=4, sync_every=H, codec_up="f32", codec_down="f32")
HONEST = ("l0", "l1", "l2")

Attack = Callable[["Evil"], Awaitable[None]]


@dataclass
class Evil:
    """A malicious learner: what it knows of the run, and how it sends forged updates and heartbeats."""

    w: World
    syncer: Syncer
    done: dict[int, Any]
    draw: np.random.Generator

    async def turn(self, fragment: int, values: Any, *, tokens: int = 1200, steps: int = H, **said: Any) -> None:
        """Store an update on the newest version of a fragment and announce it, once for each version."""
        head = self.syncer.coordinators[fragment].head
        size = self.w.run.layout.fragments[fragment].size
        changes: dict[str, Any] = {"base": head, "fragment": fragment, "tokens": tokens, "steps": steps}
        blob = forged(self.w, values=np.full(size, values, np.float32), **changes)
        await post(self.w, "evil", blob, **{"due": False, "step_s": STEP_S} | changes | said)

    async def each(self, values: Any, **said: Any) -> None:
        """Send an update of each fragment that has a new version."""
        for p, coordinator in enumerate(self.syncer.coordinators):
            if self.done.get(p) != coordinator.head:
                self.done[p] = coordinator.head
                await self.turn(p, values() if callable(values) else values, **said)

    def says(self, **changes: Any) -> bytes:
        """Return an encoded heartbeat."""
        nothing = Tally(processed=0, merged=0, overwritten=0, late=0, pending=0, rejected=0, lost=0)
        plausible: dict[str, Any] = {
            "run": self.w.run.digest, "id": "x", "learner": "evil", "incarnation": 1, "step": 1, "steps_target": 0,
            "tokens_seen": 1, "loss": None, "step_s": STEP_S, "upload_s": 0.01, "sync_s": 0.01, "versions": (),
            "bytes_up": 0, "bytes_down": 0, "tokens_lost": 0, "ledger": nothing, "waiting_for": "",
        }  # fmt: skip
        return encode(Heartbeat(**plausible | changes))


async def overflows(evil: Evil) -> None:
    """Wait until an honest update has arrived, then send one that makes their sum overflow float32.

    Send another after each rejection.
    """
    for p, coordinator in enumerate(evil.syncer.coordinators):
        turn = coordinator.head, coordinator.rounds.rejected_total.get("overflow", 0)
        r = coordinator.rounds.round
        if r is not None and any(who != "evil" for who, _ in r.arrived) and evil.done.get(p) != turn:
            evil.done[p] = turn
            await evil.turn(p, 1e15 * (1 + evil.draw.random()), tokens=1 << 53, steps=1)


async def floods(evil: Evil) -> None:
    """Announce updates that are not in the store, based on the newest version and on 19 that do not exist."""
    head = evil.syncer.coordinators[0].head
    for base in range(head, head + 20):
        await post(evil.w, "evil", b"x" * 4000, base=base, put=False)


ATTACKS: dict[str, Attack] = {
    "all the weight": lambda e: e.each(1e3, tokens=1 << 53, steps=1),
    "weight without length": lambda e: e.each(1e-3, tokens=1 << 53, steps=1),
    "tokens without steps": lambda e: e.each(1e-3, tokens=1 << 40, steps=1 << 40),
    "always due, of long ago": lambda e: e.each(1e-6, due=True, age_s=9e8),
    "overflow": overflows,
    "longer than is usual": lambda e: e.each(lambda: 10.0 * e.draw.random()),
    "ten thousand steps": lambda e: e.each(lambda: 10.0 * e.draw.random(), steps=10_000, tokens=1_000_000),
    "denormal": lambda e: e.each(1e-42, due=True),
    "steps that take no time": lambda e: e.each(1e-6, due=True, step_s=1e-9, upload_s=1e9, sync_s=1e9),
    "steps that take for ever": lambda e: e.w.bus.append(
        learner_stream("evil"), e.says(step_s=1e9, upload_s=1e9, sync_s=1e9)
    ),
    "flood": floods,
}


FIRST = ("all the weight", "overflow", "longer than is usual", "ten thousand steps", "flood")
"""The attacks of `make test`, one of each kind: weight, numbers, length, steps, messages."""


@dataclass
class Outcome:
    """The measured result of one run."""

    commits: int
    inputs: int
    merged: float
    """Share of the honest learners' tokens that is in the log."""
    largest: float
    """Largest absolute parameter of the published values."""
    length: float
    """Euclidean length of the published values."""
    away: float
    """Distance from the published values to the target of the honest learners. At the start it is about 65."""
    rejected: dict[str, int]
    clipped: dict[str, int]
    honest_overflow: int
    differ: int


@in_virtual_time
async def outcome(attack: Attack | None) -> Outcome:
    """Train three honest learners during an attack."""
    seed = seed_of(RULES, Pace(heartbeat_s=0.5, silence_s=1.5))
    async with world("", seed) as w, serving(w.syncer()) as syncer:
        async with attacking(w, syncer, attack):
            draw = np.random.default_rng(1)
            target = [draw.standard_normal(f.size).astype(np.float32) for f in w.run.layout.fragments]
            honest = [
                train(w.learner(n), STEPS, step_s=STEP_S, seed=i, tokens=TOKENS, toward=target)
                for i, n in enumerate(HONEST)
            ]
            await asyncio.gather(*honest)
        commits = [c.header for cs in (await all_commits(w.log)).values() for c in cs]
        inputs = [i for c in commits for i in c.inputs]
        merged = sum(i.tokens for i in inputs if i.learner != "evil")
        last = [(await fold.fold(w.log, p, fold.PublishedValue(w.log))).carried for p in range(RULES.fragments)]
        total: dict[str, int] = {}
        clipped: dict[str, int] = {}
        for coordinator in syncer.coordinators:
            for counts, into in (
                (coordinator.rounds.rejected_total, total),
                (coordinator.rounds.clipped_total, clipped),
            ):
                for reason, n in counts.items():
                    into[reason] = into.get(reason, 0) + n
        refused = sum(r.count for c in commits for r in c.rejected if r.learner != "evil" and r.reason == "overflow")
        values = np.concatenate(last)
        away = float(np.linalg.norm(values - np.concatenate(target)))
        differ = sum(one.difference is not None for one in await replay(w.log))
        return Outcome(
            len(commits), len(inputs), merged / (RULES.fragments * len(HONEST) * STEPS * TOKENS), float(np.abs(values).max()),
            float(np.linalg.norm(values)), away, total, clipped, refused, differ,
        )  # fmt: skip


@asynccontextmanager
async def attacking(w: World, syncer: Syncer, attack: Attack | None) -> AsyncIterator[None]:
    async def on_and_on(attack: Attack) -> None:
        evil = Evil(w, syncer, {}, np.random.default_rng(0))
        while True:
            try:
                await attack(evil)
            except Unavailable:
                pass
            await asyncio.sleep(0.005)

    task = asyncio.ensure_future(on_and_on(attack)) if attack else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    found = outcome(None)
    print(f"\nnothing: {found}")
    return found


def test_of_honest_learners_little_is_cut_and_nothing_refused(undisturbed: Outcome) -> None:
    # First and last updates contain only a step or two. They weigh less and are shorter than usual updates, so usual
    # updates beside them are clipped.
    assert sum(undisturbed.clipped.values()) <= 0.1 * undisturbed.inputs
    assert undisturbed.rejected.keys() <= {"duplicate", "superseded", "overtaken", "base-merged", "stale"}
    assert undisturbed.differ == 0


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.tier("all")) for name in ATTACKS]
)
def test_one_learner_can_do_little(name: str, undisturbed: Outcome) -> None:
    found = outcome(ATTACKS[name])
    print(f"\n{name}: {found}")
    assert found.merged >= 0.7 * undisturbed.merged
    for of in ("largest", "length"):
        here, there = getattr(found, of), getattr(undisturbed, of)
        assert there / 2 <= here <= 2 * there, of
    assert found.honest_overflow == 0
    assert found.differ == 0, "replay must reproduce clipped updates"
