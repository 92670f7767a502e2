"""Temporary denials, as when a token expires or a policy is rolled out, count as an outage for a while.

If an agent ended at the first 403, a policy that is wrong for seconds would end the run, since all agents would end at
once. If it never ended, a revoked permission would stay hidden. So an agent waits and logs warnings when a kind of
request that worked before is denied, and ends if this lasts.
"""

import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from typing_extensions import override

from isthmus.bus.base import Bus, BusItem, Refusing
from isthmus.errors import Denied, ObjectMissing, Unavailable, told
from isthmus.format.records.keys import RUN_KEY, UPDATES
from isthmus.runtime.clock import Runtime
from isthmus.store.base import Store
from isthmus.store.layer import Layer, Send

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFUSED_S = 300.0
"""How long a kind of request that worked before may be denied before `Denied` is raised."""

LATELY_S = 15.0
"""A denial longer ago says nothing about now: a syncer that stays idle because of it would never find out."""

APART_S = 3600.0
"""Two denials of a kind of request that are further apart are two troubles, even if no request worked in between."""

REMIND_S = 30.0
"""Time between two warnings while requests are denied."""


@dataclass(slots=True)
class _Refusal:
    """Denials of one kind of request, none of which worked in between."""

    since: float
    last: float
    why: str = ""
    """What the last of them said."""
    tolerated: bool = True
    """Whether the last of them counted as an outage."""


class Tolerance:
    """Turns denials of requests that worked before into `Unavailable`, for a while.

    Each kind of request is judged by itself: writing may be denied while reading still works, and writing in one folder
    while it works in the folder beside it.
    """

    def __init__(self, runtime: Runtime, limit_s: float = REFUSED_S, lately_s: float = LATELY_S) -> None:
        """`lately_s`: for how long a denial shows that this kind of request is denied now, unless it works meanwhile.

        Longer for an agent that goes on whatever is denied, and asks again only when its work needs it.
        """
        self._runtime = runtime
        self._limit_s = limit_s
        self._lately_s = lately_s
        self._worked = {_vouching(kind("read", RUN_KEY))}  # the run object was read before this was made
        self._refusals: dict[str, _Refusal] = {}
        self._said_at = float("-inf")

    @property
    def refused_s(self) -> float:
        """Seconds for which some kind of request has been denied; 0 if none is.

        A kind that was not denied within the last `lately_s` seconds does not count: it may work again.
        """
        first = self._first
        return self._runtime.now() - self._refusals[first].since if first else 0.0

    @property
    def refused(self) -> str:
        """The kind of request that has been denied for longest, for how long, and when this process ends; or empty."""
        return f"{self._first} for {self.refused_s:.0f} s; it ends after {self._limit_s:.0f} s" if self._first else ""

    @property
    def why(self) -> str:
        """What the last denial of that kind of request said; empty if none is denied."""
        return self._refusals[self._first].why if self._first else ""

    @property
    def _first(self) -> str:
        oldest = self._runtime.now() - self._lately_s
        lately = [kind for kind, found in self._refusals.items() if found.tolerated and found.last >= oldest]
        return min(lately, key=lambda kind: self._refusals[kind].since, default="")

    async def of(self, kind: str, request: Awaitable[T], *, vouched: bool = False) -> T:
        """Await a request of a kind. Raises `Denied` if this kind has been denied for too long, or never worked.

        Until then a denial raises `Unavailable`. A kind counts as having worked if it did in any folder below the same
        first one. `vouched`: the kind should work even if it never has, so a denial counts as temporary.
        """
        try:
            result = await request
        except ObjectMissing:
            self._good(kind)
            raise
        except Denied as error:
            if not (vouched or _vouching(kind) in self._worked):
                raise
            now = self._runtime.now()
            found = self._refusals.get(kind)
            if found is None or now - found.last > APART_S:
                found = self._refusals[kind] = _Refusal(now, now)
            found.last, found.why, for_s = now, told(error), now - found.since
            found.tolerated = for_s < self._limit_s
            if not found.tolerated:
                raise
            if now - self._said_at >= REMIND_S:
                self._said_at = now
                logger.warning(
                    "a request that worked before is refused (%s): if it still is in %.0f s, this process ends: %s",
                    kind, self._limit_s - for_s, error,
                )  # fmt: skip
            raise Unavailable(f"refused for {for_s:.0f} s: {error}") from None
        self._good(kind)
        return result

    def _good(self, kind: str) -> None:
        self._worked.add(_vouching(kind))
        if self._refusals.pop(kind, None) is not None:
            logger.warning("requests are no longer refused (%s)", kind)


class TolerantStore(Layer):
    """A store whose denials are tolerated for a while, by operation and by folder.

    Reading updates is the exception: the store may deny one learner's object because of how it was stored, which says
    nothing about other requests.
    """

    def __init__(self, store: Store, tolerance: Tolerance) -> None:
        super().__init__(store)
        self._tolerance = tolerance
        self._vouched = False

    def vouch(self) -> None:
        """Tolerate denials of all kinds from now on: an agent that has started had the permissions it needs."""
        self._vouched = True

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if operation == "get" and key.startswith(UPDATES):
            return await send()
        return await self._tolerance.of(kind(_VERBS.get(operation, operation), key), send(), vouched=self._vouched)


class TolerantBus(Bus):
    """A bus whose denials are tolerated for a while."""

    def __init__(self, bus: Bus, tolerance: Tolerance) -> None:
        self.url, self.polled = bus.url, bus.polled
        self._bus = bus
        self._tolerance = tolerance

    @override
    def hurry(self) -> None:
        self._bus.hurry()

    @override
    async def append(self, stream: str, *bodies: bytes) -> None:
        await self._tolerance.of("append to the bus", self._bus.append(stream, *bodies))

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        return await self._tolerance.of("read the bus", self._bus.read(positions, timeout_s))

    @override
    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        return await self._tolerance.of("read the bus", self._bus.ago(streams, seconds))

    @override
    async def tail(self, stream: str) -> str:
        return await self._tolerance.of("read the bus", self._bus.tail(stream))

    @override
    async def names(self, within_s: float | None = None) -> set[str]:
        return await self._tolerance.of("list the bus", self._bus.names(within_s))

    @override
    async def refusing(self) -> Refusing | None:
        return await self._bus.refusing()


_VERBS = {"get": "read", "put": "write"}


def kind(what: str, key: str) -> str:
    """Return the kind of a request: the operation and the folder of its key, or its prefix."""
    return f"{what} {key.rpartition('/')[0] or key}/"


def _vouching(kind: str) -> str:
    """Return what a request of a kind that works vouches for: its operation, below the first folder of its key."""
    return kind.partition("/")[0]
