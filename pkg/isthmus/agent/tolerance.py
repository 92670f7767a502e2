"""Temporary denials, as when a token expires or a policy is rolled out, count as an outage for a while.

If an agent ended at the first 403, a policy that is wrong for seconds would end the run, since all agents would end at
once. If it never ended, a revoked permission would stay hidden. So an agent waits and logs warnings when a kind of
request that worked before is denied, and ends if this lasts.
"""

import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from typing_extensions import override

from isthmus.bus.base import Bus, BusItem
from isthmus.errors import Denied, ObjectMissing, Unavailable
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

REMIND_S = 30.0
"""Time between two warnings while requests are denied."""


class Tolerance:
    """Turns denials of requests that worked before into `Unavailable`, for a while.

    Each kind of request is judged by itself: writing may be denied while reading still works.
    """

    def __init__(self, runtime: Runtime, limit_s: float = REFUSED_S) -> None:
        self._runtime = runtime
        self._limit_s = limit_s
        self._worked = {kind("read", RUN_KEY)}  # the run object was read before this was made
        self._since: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._said_at = float("-inf")

    @property
    def refused_s(self) -> float:
        """Seconds for which some kind of request has been denied; 0 if none is.

        A kind that was not denied within the last `LATELY_S` seconds does not count: it may work again.
        """
        now = self._runtime.now()
        lately = [since for kind, since in self._since.items() if now - self._last[kind] <= LATELY_S]
        return now - min(lately, default=now)

    async def of(self, kind: str, request: Awaitable[T], *, vouched: bool = False) -> T:
        """Await a request of a kind. Raises `Denied` if this kind never worked or has been denied for too long.

        Until then a denial raises `Unavailable`. `vouched`: the kind should work even if it never has, so a denial
        counts as temporary.
        """
        try:
            result = await request
        except ObjectMissing:
            self._good(kind)
            raise
        except Denied as error:
            now = self._runtime.now()
            since = self._since.setdefault(kind, now)
            self._last[kind] = now
            if not (vouched or kind in self._worked) or now - since >= self._limit_s:
                raise
            left = self._limit_s - (now - since)
            if now - self._said_at >= REMIND_S:
                self._said_at = now
                logger.warning(
                    "a request that worked before is refused (%s): this process ends in %.0f s: %s", kind, left, error
                )
            raise Unavailable(f"refused for {now - since:.0f} s: {error}") from None
        self._good(kind)
        return result

    def _good(self, kind: str) -> None:
        self._worked.add(kind)
        if self._since.pop(kind, None) is not None:
            logger.warning("requests are no longer refused (%s)", kind)


class TolerantStore(Layer):
    """A store whose denials are tolerated for a while, by operation and by folder of the run.

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
        await self._tolerance.of("say", self._bus.append(stream, *bodies))

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        return await self._tolerance.of("hear", self._bus.read(positions, timeout_s))

    @override
    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        return await self._tolerance.of("hear", self._bus.ago(streams, seconds))

    @override
    async def tail(self, stream: str) -> str:
        return await self._tolerance.of("hear", self._bus.tail(stream))

    @override
    async def names(self, within_s: float | None = None) -> set[str]:
        return await self._tolerance.of("find streams", self._bus.names(within_s))


_VERBS = {"get": "read", "put": "write"}


def kind(what: str, key: str) -> str:
    """Return the kind of a request: the operation and the run's folder."""
    return f"{what} {key.split('/', maxsplit=1)[0]}/"
