"""Which syncer holds which fragment: a rendezvous hash over the syncers heard from lately. Pure; no lease, no election.

Each syncer computes this alone, from the messages it hears, and may be wrong for a moment. If two syncers both believe
that they hold a fragment, one round is done twice, and the conditional create of the commit decides. A standby is just
another syncer.
"""

import functools
import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field

from isthmus.format.rules import Pace

BEATS_PER_INTERVAL = 4
"""Signs of life of a syncer per heartbeat interval: a dead syncer must be noticed sooner than a dead learner."""

SILENT_BEATS = 3
"""Signs of life missed in a row after which a syncer is taken for dead. If the syncer was merely late, one round may be
done twice."""


def preference(syncer: str, fragment: int) -> bytes:
    """Return the rendezvous hash of a syncer and a fragment: the live syncer with the highest holds the fragment."""
    return hashlib.blake2b(f"{fragment}/{syncer}".encode(), digest_size=16).digest()


@dataclass(slots=True)
class _Peer:
    heard_at: float
    broken: frozenset[int] = frozenset()
    able: bool = True


@dataclass(slots=True)
class Holders:
    """The syncers that one syncer has heard of, and the fragments that it holds among them."""

    name: str
    pace: Pace
    fragments: int
    started_at: float
    _peers: dict[str, _Peer] = field(default_factory=dict)

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life."""
        return self.pace.heartbeat_s / BEATS_PER_INTERVAL

    @property
    def silent_s(self) -> float:
        """Seconds without a sign of life after which a syncer is taken for dead."""
        return SILENT_BEATS * self.beat_s

    def heard(self, syncer: str, now: float, broken: Collection[int] = (), *, able: bool = True) -> None:
        """Note a sign of life of another syncer: the fragments that it cannot serve, and whether it can serve at
        all."""
        if syncer != self.name:
            self._peers[syncer] = _Peer(now, frozenset(broken), able)

    def left(self, syncer: str) -> None:
        """Note that another syncer stopped on purpose."""
        self._peers.pop(syncer, None)

    def gap(self, now: float) -> None:
        """Note that the bus was away until now: earlier silence of a syncer proves nothing."""
        for peer in self._peers.values():
            peer.heard_at = now

    def silent_in_s(self, now: float) -> float:
        """Return how soon the next of the other syncers will be taken for dead unless it is heard, in seconds."""
        return min((peer.heard_at for peer in self._peers.values()), default=now) + self.silent_s - now

    def held(self, now: float, broken: Collection[int] = (), *, able: bool = True) -> set[int]:
        """Return the fragments that this syncer holds now; `broken` are those that it cannot serve itself.

        A syncer that is not `able` leaves all fragments to the able ones. If there are none it keeps its fragments, to
        go on when its outage ends.
        """
        silent = now - self.silent_s
        self._peers = {name: peer for name, peer in self._peers.items() if peer.heard_at >= silent}
        if now < self.started_at + 1.5 * self.beat_s:
            return set()  # the other syncers have not had the time to be heard
        there = {name: peer for name, peer in self._peers.items() if peer.able}
        if there and not able:
            broken = range(self.fragments)
        living = tuple(sorted((name, tuple(sorted(peer.broken))) for name, peer in there.items()))
        return set(_fragments_of(self.name, frozenset(broken), living, self.fragments))


@functools.lru_cache(maxsize=16)
def _fragments_of(
    name: str, broken: frozenset[int], others: tuple[tuple[str, tuple[int, ...]], ...], fragments: int
) -> frozenset[int]:
    """Return the fragments that `name` holds among these syncers. Cached, since it is called often and seldom
    changes."""
    mine = set()
    for p in range(fragments):
        able = [other for other, unable in others if p not in unable]
        if p not in broken and preference(name, p) > max((preference(n, p) for n in able), default=b""):
            mine.add(p)
    return frozenset(mine)
