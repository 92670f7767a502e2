"""The bus port: append to a named stream, read several streams from given positions. Any message may be lost."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from isthmus.errors import Unavailable

RETAINED_MESSAGES = 1024
"""Messages kept per stream (about). Older ones are dropped silently; pointers in them are announced again."""

READ_MAX = 256
"""Messages that one read returns per stream at most."""

VALUE_MAX = 1 << 20
"""Largest value that a shared server should accept [bytes].

It is the lowest possible setting of Redis's proto-max-bulk-len, and 16 times our longest message. With the default of
512 MiB one value fills the server, and every reader loads it whole.
"""

NAMES_MAX = 1 << 14
"""Streams that `names` returns at most: those written to last."""

START = ""
"""The position before every message that is kept."""


class BusItem(NamedTuple):
    """One message and the position after it."""

    position: str
    body: bytes


class Refusing(NamedTuple):
    """Why a bus takes no messages although it can be read, and what to do."""

    why: str
    remedy: str


class Refused(Unavailable):
    """The bus answers, and refuses requests for now: its memory or disk is full, for example."""


class Bus(Protocol):
    """Named streams of small messages, delivered at least once, in order per stream while nothing is lost.

    There are no groups, acknowledgements or pending entries. Every method may raise `Unavailable` and `Denied`. If an
    append raised, all, none or the first few of its messages may have been stored. If a reader's position lies beyond
    the end of a stream (the bus lost the newest messages, or all), the reader starts again with the oldest message that
    is kept. So reading a message twice must be harmless. An empty body carries no message: it only tests that a stream
    can be written, and listeners skip it.
    """

    url: str
    polled: bool = False
    """Whether each look for messages is a request of its own, which costs money: say only what is needed."""

    def hurry(self) -> None:
        """Note that answers are due soon. A bus that is `polled` looks more often for a while."""
        return

    async def append(self, stream: str, *bodies: bytes) -> None:
        """Add messages to the end of a stream, in this order, in one round trip."""
        ...

    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        """Return the messages after each stream's position, waiting up to `timeout_s` for one; {} if none came."""
        ...

    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        """Return, per stream, a position before all messages of the last `seconds`, by the bus's own clock."""
        ...

    async def tail(self, stream: str) -> str:
        """Return the position after the newest message."""
        ...

    async def refusing(self) -> "Refusing | None":
        """Return why the bus takes no messages; None if it takes them, or does not say."""
        return None

    async def other_runs(self, within_s: float) -> list[str]:
        """Return the digests, as they were given to `open_bus`, of other runs whose processes have written to this bus
        in the last so many seconds; none of a server, which many runs may share."""
        return []

    async def names(self, within_s: float | None = None) -> set[str]:
        """Return the names of the streams, at most `NAMES_MAX`.

        `within_s`: only those written to in the last so many seconds. The cost depends on the number of names returned,
        not on other data of the server, nor on earlier streams of this run.
        """
        ...
