"""Refusals that pass. A token expires, a policy is rolled out: what worked before counts as an outage for a while.

An agent that ended at the first 403 would turn seconds of an operator's work into the end of a run, and all agents
would end at once. One that never ended would hide a revoked right. So a refusal is ridden out like any outage, loudly,
and ends the agent once it has lasted.
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
"""A refusal of what worked before is ridden out for this long."""

LATELY_S = 15.0
"""A refusal longer ago says nothing of now: whoever holds off because of it would never find out."""

REMIND_S = 30.0
"""How often it is said meanwhile."""


class Tolerance:
    """Turns refusals of what worked before into `Unavailable`, for a while. One kind of request does not vouch for
    another: where writing is refused, reading may well go on."""

    def __init__(self, runtime: Runtime, limit_s: float = REFUSED_S) -> None:
        self._runtime = runtime
        self._limit_s = limit_s
        self._worked = {kind("read", RUN_KEY)}  # or nobody would be here
        self._since: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._said_at = float("-inf")

    @property
    def refused_s(self) -> float:
        """For how long something that worked before has been refused, in seconds; 0 where nothing is.

        What has not been asked for lately is not known to be refused still.
        """
        now = self._runtime.now()
        lately = [since for kind, since in self._since.items() if now - self._last[kind] <= LATELY_S]
        return now - min(lately, default=now)

    async def of(self, kind: str, request: Awaitable[T], *, vouched: bool = False) -> T:
        """Await a request of a kind. Raises `Denied` where it never worked, or has been refused for too long.

        `vouched`: whoever asks knows that this should work, whether it ever did or not.
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
                logger.warning("refused (%s), which should work: ends this process in %.0f s: %s", kind, left, error)
            raise Unavailable(f"refused for {now - since:.0f} s: {error}") from None
        self._good(kind)
        return result

    def _good(self, kind: str) -> None:
        self._worked.add(kind)
        if self._since.pop(kind, None) is not None:
            logger.warning("no longer refused (%s)", kind)


class TolerantStore(Layer):
    """A store of which refusals are ridden out, by what is done below which of a run's folders.

    But for reading updates: what a learner stored may be refused for its own sake, so that says nothing of the rest.
    """

    def __init__(self, store: Store, tolerance: Tolerance) -> None:
        super().__init__(store)
        self._tolerance = tolerance
        self._vouched = False

    def vouch(self) -> None:
        """From now on what never worked is ridden out too: whoever has come this far was let in."""
        self._vouched = True

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if operation == "get" and key.startswith(UPDATES):
            return await send()
        return await self._tolerance.of(kind(_VERBS.get(operation, operation), key), send(), vouched=self._vouched)


class TolerantBus(Bus):
    """A bus of which refusals are ridden out."""

    def __init__(self, bus: Bus, tolerance: Tolerance) -> None:
        self.url = bus.url
        self._bus = bus
        self._tolerance = tolerance

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
    """Return the kind of a request: what is done below which of a run's folders."""
    return f"{what} {key.split('/', maxsplit=1)[0]}/"
