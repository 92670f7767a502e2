"""Who holds which fragment: a rendezvous hash over the syncers heard from lately. Pure; no lease, no election.

Everybody computes it alone, from what it hears, and may be wrong for a moment: two syncers that both believe they hold
a fragment cost one round done twice, since the conditional commit decides. A standby is just another one of them.
"""

import functools
import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field

from isthmus.format.rules import Pace

BEATS_PER_INTERVAL = 4
"""Signs of life of a syncer per heartbeat interval: a dead one is to be noticed sooner than a dead learner."""

SILENT_BEATS = 3
"""Missed in a row, after which a syncer is taken for dead. One that was merely late loses nothing by it, see above."""


def preference(syncer: str, fragment: int) -> bytes:
    """Return what is compared: of the living, the one with the highest holds the fragment."""
    return hashlib.blake2b(f"{fragment}/{syncer}".encode(), digest_size=16).digest()


@dataclass(slots=True)
class _Peer:
    heard_at: float
    broken: frozenset[int] = frozenset()
    able: bool = True


@dataclass(slots=True)
class Holders:
    """The syncers heard of, as one of them sees it."""

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
        """Note a sign of life of another syncer, the fragments it cannot fold, and whether it can serve at all."""
        if syncer != self.name:
            self._peers[syncer] = _Peer(now, frozenset(broken), able)

    def left(self, syncer: str) -> None:
        """Note that another syncer stopped on purpose."""
        self._peers.pop(syncer, None)

    def gap(self, now: float) -> None:
        """Note that the bus was away until now: silence until here says nothing."""
        for peer in self._peers.values():
            peer.heard_at = now

    def silent_in_s(self, now: float) -> float:
        """Return how soon another syncer will be taken for dead unless it is heard, in seconds."""
        return min((peer.heard_at for peer in self._peers.values()), default=now) + self.silent_s - now

    def held(self, now: float, broken: Collection[int] = (), *, able: bool = True) -> set[int]:
        """Return the fragments this syncer holds now; `broken` are those it cannot fold itself.

        One that is not `able` leaves everything to those who are; with nobody there it keeps what it has, for the
        moment its outage ends.
        """
        silent = now - self.silent_s
        self._peers = {name: peer for name, peer in self._peers.items() if peer.heard_at >= silent}
        if now < self.started_at + 1.5 * self.beat_s:
            return set()  # whoever is there has not had the chance to be heard
        there = {name: peer for name, peer in self._peers.items() if peer.able}
        if there and not able:
            broken = range(self.fragments)
        living = tuple(sorted((name, tuple(sorted(peer.broken))) for name, peer in there.items()))
        return set(_fragments_of(self.name, frozenset(broken), living, self.fragments))


@functools.lru_cache(maxsize=16)
def _fragments_of(
    name: str, broken: frozenset[int], others: tuple[tuple[str, tuple[int, ...]], ...], fragments: int
) -> frozenset[int]:
    """Return the fragments of `name` among these syncers; asked many times a second, changed seldom."""
    mine = set()
    for p in range(fragments):
        able = [other for other, unable in others if p not in unable]
        if p not in broken and preference(name, p) > max((preference(n, p) for n in able), default=b""):
            mine.add(p)
    return frozenset(mine)
