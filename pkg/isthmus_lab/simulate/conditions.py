"""How the world treats a process's requests: latency, bandwidth, and what goes wrong, drawn from its seed."""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """What can happen to a request, or to a process."""

    # To requests.
    ERROR = "error answered"  # a 5xx: nothing happened
    LOST_REQUEST = "request lost"  # a timeout: nothing happened
    LOST_REPLY = "reply lost"  # a timeout: it happened
    LANDS_LATE = "landed after its timeout"  # a timeout: it happens much later
    CORRUPTED = "body corrupted"
    SLOW = "slow body"
    SWALLOWED = "announcement swallowed"  # the bus says yes and forgets
    CUT_OFF = "partition"
    HALF_CUT = "half a partition"  # what is read gets through, or what is written
    DENIED = "access denied"  # a 403: an expired token, an object under another key
    ENDLESS = "body without end"
    THROTTLED = "prefix throttled"  # a store that asks to slow down, for some keys
    GATEWAY = "404 of a gateway"  # or a page of it with status 200, which some clients take for an empty listing
    SILENT = "store silent"  # no answer, and no timeout either
    DEAF = "bus deaf"  # what is read is empty, without an error; what is said arrives
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
    DEMOTED = "bus failed over"  # connections that are open lead to a replica now
    UNMOUNTED = "mount lost"  # a folder is another one, without the run
    FALSE_WORD = "version said that does not exist"


UNHEARD = frozenset({Fault.CUT_OFF, Fault.HALF_CUT, Fault.LOST_REQUEST, Fault.SILENT})
"""Of a request that meets one of these nothing is ever heard again, and it never happened."""


@dataclass(slots=True)
class Conditions:
    """What one process's requests to one port meet. May be changed while they are made."""

    latency_s: float = 0.0
    """Median of one way, request or reply."""
    spread: float = 0.0
    """Standard deviation of the latency's logarithm."""
    up_bytes_s: float = math.inf
    down_bytes_s: float = math.inf
    payload_scale: float = 1.0
    """Bytes on this wire per byte of the objects' payloads: a small model may stand for a large one, whose headers and
    commits are no larger."""
    timeout_s: float = 5.0
    """After this long without an answer a request counts as not answered."""
    late_s: float = 60.0
    """What lands after its timeout lands up to this much later."""
    chances: dict[Fault, float] = field(default_factory=dict)
    cut_off: bool = False
    """Whether nothing gets through."""
    cut_reads: bool = False
    cut_writes: bool = False
    """Whether only the one or the other gets through."""
    denies_reads: bool = False
    denies_writes: bool = False
    """Whether everything of this kind is answered with a 403."""
    unreadable: frozenset[str] = frozenset()
    """Prefixes of keys whose reading is answered with a 403."""
    endless: frozenset[str] = frozenset()
    """Prefixes of keys whose bodies begin and never end."""
    throttled: frozenset[str] = frozenset()
    """Prefixes of keys of which every request is answered with a 503."""
    gateway: bool = False
    """Whether something in between answers everything, and knows of no objects."""
    lists_nothing: bool = False
    """Whether it answers listings only."""
    silent: bool = False
    """Whether nothing is answered, and nothing timed out either."""
    deaf: bool = False
    """Whether nothing that is said on the bus is heard, though it answers."""
    unmounted: bool = False
    """Whether the store's folder is another one."""
    seen: Counter[Fault] = field(default_factory=Counter)
    """How often each fault struck."""
    told: Callable[[Fault, str], None] = lambda _, __: None
    """Told of each fault and the request it struck."""

    def delay(self, draw: random.Random) -> float:
        """Return how long a message takes one way."""
        if self.latency_s == 0.0:
            return 0.0
        return self.latency_s * math.exp(self.spread * draw.gauss(0.0, 1.0)) if self.spread else self.latency_s

    @property
    def blocked(self) -> bool:
        """Whether some requests meet the same end each time they are made."""
        return (
            self.cut_off or self.cut_reads or self.cut_writes or self.denies_reads or self.denies_writes
            or self.gateway or self.lists_nothing or self.silent or self.deaf or self.unmounted
            or bool(self.unreadable or self.endless or self.throttled)
        )  # fmt: skip

    def clear(self) -> None:
        """Let everything through from here on; links stay as thin as they are."""
        self.chances.clear()
        self.cut_off = self.cut_reads = self.cut_writes = self.denies_reads = self.denies_writes = False
        self.gateway = self.lists_nothing = self.silent = self.deaf = self.unmounted = False
        self.unreadable = self.endless = self.throttled = frozenset()

    def strikes(
        self, draw: random.Random, request: str, *faults: Fault, key: str = "", writes: bool = False
    ) -> Fault | None:
        """Return which of these faults strikes a request, if any; what blocks it comes before chance."""
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
        """Note that a fault has struck a request."""
        self.seen[fault] += 1
        self.told(fault, request)
        return fault


class Wire:
    """One direction of a process's link: bodies go through it one after another."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def through(self, now: float, size: float, bytes_s: float) -> float:
        """Return the seconds from now until a body of this size is through.

        A request without a body waits for nothing: its few packets slip between those of a body under way.
        """
        if math.isinf(bytes_s) or size == 0.0:
            return 0.0
        self._free_at = max(self._free_at, now) + size / bytes_s
        return self._free_at - now
