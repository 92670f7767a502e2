"""The bus port: append to a named stream, read several streams from positions of one's own. Everything may be lost."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

RETAINED_MESSAGES = 1024
"""Messages kept per stream (about): what is older is dropped silently, and pointers in it are said again."""

READ_MAX = 256
"""Messages returned per stream and read."""

VALUE_MAX = 1 << 20
"""Bytes a server that is shared should take as one value: the least that Redis's proto-max-bulk-len can be set to, and
16 of our longest messages. With its default, 512 MiB, one value fills the server, and every reader loads it whole.
"""

NAMES_MAX = 1 << 14
"""Streams that are found at most: those that were written to last."""

START = ""
"""The position before everything that is kept."""


class BusItem(NamedTuple):
    """One message and the position behind it."""

    position: str
    body: bytes


class Bus(Protocol):
    """Named streams of small messages, at least once, in order per stream while nothing is lost.

    No groups, no acknowledgements, no pending entries. Every method may raise `Unavailable` and `Denied`. Of messages
    whose append raised all, none or the first few may have landed. A reader whose position lies behind the end of a
    stream (the bus lost its tail, or everything) starts again from what is kept, so reading twice must be harmless. An
    empty body is nobody's message: it shows that a stream can be written, and listeners pass over it.
    """

    url: str

    async def append(self, stream: str, *bodies: bytes) -> None:
        """Add messages to the end of a stream, in this order, in one round trip."""
        ...

    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        """Return what came after each stream's position, waiting up to `timeout_s` for the first; {} if nothing did."""
        ...

    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        """Return, per stream, a position before what was said in the last `seconds`, by the bus's own clock."""
        ...

    async def tail(self, stream: str) -> str:
        """Return the position behind the newest message."""
        ...

    async def names(self, within_s: float | None = None) -> set[str]:
        """Return the streams there are, at most `NAMES_MAX`, or those written to within the last seconds.

        The work depends on how many are returned, not on what else the server holds, or once held of this run.
        """
        ...
