"""Planted bugs: handling of parts that are away or unreadable."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from isthmus.errors import ObjectMissing, Unavailable
from isthmus.format.records.messages import decode
from isthmus.syncer import agent as syncer_agent
from isthmus.syncer.coordinator import FragmentCoordinator
from isthmus.syncer.holders import Holders
from simulation.bugs.planted import planted


@planted(40, "siege", caught_by=6)
def a_silent_syncer_keeps_its_fragments() -> Iterator[None]:
    """A peer that was heard once counts as present forever, unless it says that it leaves."""

    def held(self: Any, now: Any, broken: Any = (), *, able: bool = True) -> Any:
        for peer in self._peers.values():
            peer.heard_at = now
        return original(self, now, broken, able=able)

    original = Holders.held
    with patch.object(Holders, "held", held):
        yield


@planted(20, "siege", caught_by=1)
def what_may_not_be_read_ends_the_syncer() -> Iterator[None]:
    """A 403 for a learner's update is treated like a 403 for the syncer's own requests."""

    async def fetch(self: Any, pointer: Any) -> None:
        with contextlib.suppress(Unavailable, ObjectMissing):
            await self._store.get_range(pointer.key, 0, 1)
        await original(self, pointer)

    original = FragmentCoordinator._fetch
    with patch.object(FragmentCoordinator, "_fetch", fetch):
        yield


@planted(60, "siege", caught_by=5)
def a_body_that_never_ends_holds_all_up() -> Iterator[None]:
    """Updates are fetched one at a time."""
    with patch.object(syncer_agent, "FETCHES_MAX", 1):
        yield


@planted(20, "hostile", caught_by=7)
def a_message_nobody_can_read_ends_the_syncer() -> Iterator[None]:
    """The syncer expects that it can decode every message on the bus."""

    def hear(self: Any, stream: Any, said: Any, old: Any) -> None:
        decode(said.body)
        original(self, stream, said, old)

    original = syncer_agent.Syncer._hear
    with patch.object(syncer_agent.Syncer, "_hear", hear):
        yield


@planted(60, "hostile", caught_by=11)
def an_overwritten_input_ends_the_syncer() -> Iterator[None]:
    """A fragment that cannot be folded ends the syncer, even if another syncer holds the fragment."""

    def break_(self: Any, error: Any) -> None:
        raise error

    with patch.object(FragmentCoordinator, "_break", break_):
        yield
