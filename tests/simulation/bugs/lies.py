"""Planted bugs: lies that are believed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from isthmus.errors import LogCorrupt
from isthmus.inspect import replay
from isthmus.learner import downlink
from isthmus.log.verify import Verifier
from isthmus.reasons import Clip
from isthmus.rounds.bounds import Influence
from simulation.bugs.planted import planted


@planted(20, "liars", caught_by=3)
def a_length_is_as_it_is_found() -> Iterator[None]:
    """No update is shortened or rejected, however long it is."""

    def judge(self: Any, *a: Any, **k: Any) -> Any:
        found = original(self, *a, **k)
        return replace(found, scale=1.0, clipped=tuple(c for c in found.clipped if c != Clip.NORM), refused=False)

    original = Influence.judge
    with patch.object(Influence, "judge", judge):
        yield


@planted(20, "liars", caught_by=3)
def steps_are_as_they_are_said() -> Iterator[None]:
    """A learner that claims 2^40 steps may send an update as long as these steps allow."""
    with patch.object(Influence, "timed", lambda self, claim, among=(): claim._replace(believed=claim.steps)):
        yield


@planted(20, "liars")
def a_lie_is_merged_onto() -> Iterator[None]:
    """A commit is not compared with the run's rules and the round."""
    with patch.object(Verifier, "why_not", lambda *_: ""):
        yield


@planted(20, "liars", caught_by=2)
def replay_believes_what_updates_count_for() -> Iterator[None]:
    """Replay takes a log that folds for a log that was made by the rules."""
    with patch.object(replay._Judge, "odd", lambda *_: []):
        yield


@planted(40, "liars", caught_by=1)
def what_is_sound_before_a_lie_is_not_told() -> Iterator[None]:
    """If a fragment's log ends in a lie, a learner that is behind does not get the sound versions before it."""

    async def tell_of(self: Any, p: Any) -> None:
        if p not in self.__dict__.setdefault("torn", set()):
            await original(self, p)

    async def leap(self: Any, p: Any, until: Any) -> None:
        try:
            await leap_original(self, p, until)
        except LogCorrupt:
            self.__dict__.setdefault("torn", set()).add(p)
            raise

    original, leap_original = downlink.Downlink._tell_of, downlink.Downlink._leap
    with patch.object(downlink.Downlink, "_tell_of", tell_of), patch.object(downlink.Downlink, "_leap", leap):
        yield
