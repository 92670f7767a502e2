"""Drive the rounds of one fragment event by event, with chosen learners and a clock that the test sets."""

from collections.abc import Iterable
from typing import Any

from isthmus.format.records.objects import CommitHeader
from isthmus.format.rules import Bounds, Pace
from isthmus.rounds.admission import Admission
from isthmus.rounds.events import Action, Announced, Appended, Arrived, Begun, CaughtUp, Fetch, Pointer, Spoiled
from isthmus.rounds.live_learners import LiveLearners
from isthmus.rounds.rounds import Rounds
from support.commits import committed, digest_of, given

PACE = Pace(quorum=1, heartbeat_s=1.0, silence_s=3.0)
STEP_S = 0.1
AT_ONCE = Bounds(opening=0.0)
"""Bounds under which a learner may open one round right after another, so that stories are short."""


class Story:
    """Rounds of one fragment at a syncer that knows these learners. The test sets the clock."""

    def __init__(
        self, *learners: str, pace: Pace = PACE, sync_every: int = 12, step_s: float = STEP_S, bounds: Bounds = AT_ONCE,
        admission: Admission | None = None, fragment: int = 0,
    ) -> None:  # fmt: skip
        self.now = 100.0
        self.step_s = step_s
        self.members = LiveLearners(pace, 0.0)
        self.admission = admission or Admission()
        self.turns = 0
        """How often the admission gave this fragment its turn."""
        self.rounds = Rounds(
            pace, (sync_every, 8 * sync_every), self.members, bounds, self.admission, fragment, self._turn
        )
        for learner in learners:
            self.beat(learner)

    def _turn(self) -> None:
        self.turns += 1

    def beat(self, learner: str, **durations: float) -> None:
        self.members.heard(
            learner, 1, self.now, **{"step_s": self.step_s, "upload_s": 0.02, "sync_s": 0.01} | durations
        )

    def pointer(self, learner: str, base: int = 0, *, due: bool = False, tokens: int = 1000, name: str = "") -> Pointer:
        return Pointer(
            learner=learner,
            incarnation=1,
            base=base,
            digest=digest_of((name or f"{learner}/{base}") + ("" if tokens == 1000 else f" {tokens}")),
            key="k",
            size=10,
            steps=10,
            tokens=tokens,
            step=10,
            tokens_seen=tokens,
            due=due,
            boundary_at=self.now - 0.02,
            heard_at=self.now,
        )

    def announce(self, learner: str, base: int = 0, **options: Any) -> list[Action]:
        """Announce an update; return the actions that follow."""
        return self.rounds.on(Announced(self.pointer(learner, base, **options)), self.now)

    def arrive(self, actions: Iterable[Action]) -> list[Action]:
        """Let every requested fetch succeed; return the actions that follow."""
        following: list[Action] = []
        for action in actions:
            if isinstance(action, Fetch) and self.rounds.take_fetched(action.pointer):
                following += self.rounds.on(Arrived(action.pointer), self.now)
        return following

    def begin(self, actions: Iterable[Action]) -> list[Pointer]:
        """Let every requested fetch begin; return the updates that are read."""
        read = [self.rounds.newest(action.pointer) for action in actions if isinstance(action, Fetch)]
        for pointer in read:
            assert self.rounds.on(Begun(pointer), self.now) == []
        return read

    def spoil(self, *digests: bytes) -> list[Action]:
        """Report that these updates, by default all of the round, make its sum not finite."""
        assert self.rounds.round is not None, "no round to spoil"
        by = digests or [p.digest for p in self.rounds.round.arrived.values()]
        return self.rounds.on(Spoiled(frozenset(by)), self.now)

    def commit(self, *learners: str, base: int | None = None, **changed: Any) -> list[Action]:
        """Append the next commit, which merges these learners' updates on a base (by default the head)."""
        version = self.rounds.head + 1
        self.rounds.on(Appended(merged(version, *learners, base=base, **changed)), self.now)
        return self.rounds.on(CaughtUp(), self.now)


def merged(version: int, *learners: str, base: int | None = None, **changed: Any) -> CommitHeader:
    """Return a commit that merges these learners' updates on a base (by default the version before)."""
    on = version - 1 if base is None else base
    return committed(version, *(given(who, on, version) for who in learners), **changed)
