"""What the world does to a process's requests: latency, bandwidth and faults, drawn from a seed."""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """A fault of a request, of a process, or of the world."""

    # To requests.
    ERROR = "error answered"  # a 5xx: the request has no effect
    LOST_REQUEST = "request lost"  # a timeout: the request has no effect
    LOST_REPLY = "reply lost"  # a timeout: the request has taken effect
    LANDS_LATE = "landed after its timeout"  # a timeout: the request takes effect much later
    CORRUPTED = "body corrupted"
    SLOW = "slow body"
    SWALLOWED = "announcement swallowed"  # the bus confirms the message and forgets it
    CUT_OFF = "partition"
    HALF_CUT = "half a partition"  # only reads get through, or only writes
    DENIED = "access denied"  # a 403: an expired token, or an object that another key encrypts
    ENDLESS = "body without end"
    THROTTLED = "prefix throttled"  # the store asks to slow down, for some keys
    GATEWAY = "404 of a gateway"  # or its page with status 200, which some clients take for an empty listing
    SILENT = "store silent"  # no answer, and no timeout either
    DEAF = "bus deaf"  # reads are empty, without an error; appended messages arrive
    # To processes and the world.
    PAUSED = "process paused"
    KILLED = "process killed"
    TWIN = "two processes of one name"
    SKEWED = "wall clock set"
    WIPED = "bus wiped"
    COLLECTED = "garbage collected"
    STRAY = "snapshot of a history that lost"
    STOPPED = "process stopped in order"
    STALLED = "loop stalled"
    RESTS = "no step for a while"  # an evaluation, a long compile
    DEMOTED = "bus failed over"  # open connections now lead to a replica
    UNMOUNTED = "mount lost"  # the folder is another one, without the run
    FALSE_WORD = "version said that does not exist"
    # To listings of a bus in the store.
    LISTED_LATE = "listing of earlier"
    LISTED_TWICE = "listing with repetitions, in no order"


UNHEARD = frozenset({Fault.CUT_OFF, Fault.HALF_CUT, Fault.LOST_REQUEST, Fault.SILENT})
"""A request that meets one of these faults has no effect and gets no reply."""


@dataclass(slots=True)
class Conditions:
    """What the requests of one process to one port meet. It may change while requests are made."""

    latency_s: float = 0.0
    """Median latency one way, of a request or of a reply."""
    spread: float = 0.0
    """Standard deviation of the logarithm of the latency."""
    up_bytes_s: float = math.inf
    down_bytes_s: float = math.inf
    payload_scale: float = 1.0
    """Bytes on this wire per byte of the objects' payloads. So a small model can stand for a large one, whose headers
    and commits are no larger."""
    timeout_s: float = 5.0
    """A request that gets no reply fails after this many seconds."""
    late_s: float = 60.0
    """A request that lands after its timeout lands up to this many seconds after it."""
    chances: dict[Fault, float] = field(default_factory=dict)
    cut_off: bool = False
    """Whether nothing gets through."""
    cut_reads: bool = False
    cut_writes: bool = False
    """Whether no read, or no write, gets through."""
    denies_reads: bool = False
    denies_writes: bool = False
    """Whether every read, or every write, is answered with a 403."""
    unreadable: frozenset[str] = frozenset()
    """Prefixes of keys whose reads are answered with a 403."""
    endless: frozenset[str] = frozenset()
    """Prefixes of keys whose reads begin a body that never ends."""
    throttled: frozenset[str] = frozenset()
    """Prefixes of keys whose reads and writes are answered with a 503."""
    gateway: bool = False
    """Whether a gateway in between answers every request, and knows no objects."""
    lists_nothing: bool = False
    """Whether such a gateway answers listings only."""
    silent: bool = False
    """Whether requests get no reply, and no timeout either."""
    deaf: bool = False
    """Whether reads of the bus find no messages, though the bus answers."""
    unmounted: bool = False
    """Whether another folder is in place of the store's."""
    seen: Counter[Fault] = field(default_factory=Counter)
    """How often each fault struck."""
    told: Callable[[Fault, str], None] = lambda _, __: None
    """Called with each fault and the request that it struck."""

    def delay(self, draw: random.Random) -> float:
        """Return the seconds that a message takes one way."""
        if self.latency_s == 0.0:
            return 0.0
        return self.latency_s * math.exp(self.spread * draw.gauss(0.0, 1.0)) if self.spread else self.latency_s

    @property
    def blocked(self) -> bool:
        """Whether some requests meet the same fault each time they are made."""
        return (
            self.cut_off or self.cut_reads or self.cut_writes or self.denies_reads or self.denies_writes
            or self.gateway or self.lists_nothing or self.silent or self.deaf or self.unmounted
            or bool(self.unreadable or self.endless or self.throttled)
        )  # fmt: skip

    def clear(self) -> None:
        """Let every request through from now on. Latency and bandwidth stay as they are."""
        self.chances.clear()
        self.cut_off = self.cut_reads = self.cut_writes = self.denies_reads = self.denies_writes = False
        self.gateway = self.lists_nothing = self.silent = self.deaf = self.unmounted = False
        self.unreadable = self.endless = self.throttled = frozenset()

    def strikes(
        self, draw: random.Random, request: str, *faults: Fault, key: str = "", writes: bool = False
    ) -> Fault | None:
        """Return the fault that strikes a request, if any.

        A condition that blocks the request comes first. Otherwise one of `faults` may strike by chance.
        """
        if self.blocked and (fault := self._blocks(request, key, writes)) is not None:
            return self.strike(fault, request)
        if not self.chances:
            return None
        at = draw.random()
        for fault in faults:
            at -= self.chances.get(fault, 0.0)
            if at < 0.0:
                return self.strike(fault, request)
        return None

    def _blocks(self, request: str, key: str, writes: bool) -> Fault | None:
        if self.cut_off:
            return Fault.CUT_OFF
        if self.silent:
            return Fault.SILENT
        if self.gateway or (self.lists_nothing and request.startswith("list ")):
            return Fault.GATEWAY
        if self.cut_writes if writes else self.cut_reads:
            return Fault.HALF_CUT
        if self.denies_writes if writes else self.denies_reads:
            return Fault.DENIED
        if any(map(key.startswith, self.throttled)):
            return Fault.THROTTLED
        if writes or not key:
            return None
        if any(map(key.startswith, self.unreadable)):
            return Fault.DENIED
        return Fault.ENDLESS if any(map(key.startswith, self.endless)) else None

    def strike(self, fault: Fault, request: str) -> Fault:
        """Count a fault that strikes a request, report it, and return it."""
        self.seen[fault] += 1
        self.told(fault, request)
        return fault


class Wire:
    """One direction of a process's link. Bodies go through it one after another."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def through(self, now: float, size: float, bytes_s: float) -> float:
        """Return the seconds from `now` until a body of this size is through.

        A request without a body does not wait, because its few packets slip between those of a body under way.
        """
        if math.isinf(bytes_s) or size == 0.0:
            return 0.0
        self._free_at = max(self._free_at, now) + size / bytes_s
        return self._free_at - now
