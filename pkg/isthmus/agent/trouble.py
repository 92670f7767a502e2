"""Warnings about what keeps an agent from its work: soon, then ever less often, and once when it is over.

A training loop whose updates are never merged looks healthy: its loss falls and nothing fails. A syncer that receives
nothing looks like one whose learners are idle. So each logs what it waits for and what to do about it.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from isthmus.agent.tolerance import Tolerance
from isthmus.bus import in_store
from isthmus.bus.endpoints import Listener, Speaker
from isthmus.bus.sqlite import remade
from isthmus.errors import legible
from isthmus.reasons import WRITING
from isthmus.runtime.clock import Runtime
from isthmus.runtime.descriptors import NONE_LEFT, any_left, raise_limit
from isthmus.runtime.urls import Place, without_passwords
from isthmus.store import EdgeStore

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Trouble shorter than this, or than twice the pace's `silence_s`, is not logged."""

REMIND_S = 60.0
REMIND_S_MAX = 3600.0

SAID_MOST = 350
"""The most characters of an error in a heartbeat: a store and a permission may be named there (`WAITING_MAX`)."""

Trouble = tuple[float, str, str]
"""How many seconds the trouble has lasted, what it is, and what to do about it."""


class Connectivity:
    """Whether an agent can reach its store and its bus now, and whether it is denied."""

    def __init__(
        self,
        runtime: Runtime,
        store: EdgeStore,
        tolerance: Tolerance,
        listener: Listener,
        speaker: Speaker,
        bus_url: str,
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._tolerance = tolerance
        self._listener = listener
        self._speaker = speaker
        self._bus_url = bus_url

    @property
    def store_down_s(self) -> float:
        """Seconds since the first request that failed after the last answer; 0 while the store answers."""
        return max(self._store.outage.down_s, self._messages_down_s)

    @property
    def _messages_down_s(self) -> float:
        """Seconds for which messages could not be read from the store or not be written there, if the bus is in it."""
        return self.bus_down_s if in_store(self._bus_url) and not (self.refused_s or self._speaker.refused) else 0.0

    @property
    def _unwritten_s(self) -> float:
        """Seconds for which the store has taken no writes, and has denied none: it is full, or read-only."""
        return 0.0 if self._tolerance.refused else self._store.outage.unwritten_s

    @property
    def refused_s(self) -> float:
        """Seconds for which requests that worked before have been denied; 0 if none is."""
        return self._tolerance.refused_s

    @property
    def bus_down_s(self) -> float:
        """Seconds for which the agent could not read from the bus or not write to it; 0 while both work."""
        since = (self._listener.down_since, self._speaker.down_since)
        return self._runtime.now() - min((at for at in since if at is not None), default=self._runtime.now())

    @property
    def bus_is_down(self) -> bool:
        """Whether the agent cannot read from the bus or cannot write to it, even if only since this moment."""
        return self._listener.down_since is not None or self._speaker.down_since is not None

    @property
    def waiting_for(self) -> list[str]:
        """What does not answer now, in the words that heartbeats carry, with what was said as far as it is known."""
        waiting, outage = [], self._store.outage
        if self.store_down_s:
            waiting.append(f"store ({self.store_down_s:.0f} s){_saying(outage.why if outage.down_s else '')}")
        elif self._unwritten_s:
            waiting.append(f"{WRITING} ({outage.unwritten_s:.0f} s){_saying(outage.why)}")
        if refused := self._tolerance.refused:
            waiting.append(f"permission ({refused}){_saying(self._tolerance.why)}")
        if self.bus_is_down and not self._messages_down_s:
            waiting.append("bus")
        return waiting

    def troubles(self) -> list[Trouble]:
        """Return the possible troubles with their durations and remedies, the root cause first.

        One that lasts 0 s is not present.
        """
        folder = Place.of(self._store.url).folder is not None and not in_store(self._bus_url)
        own = "; a run in a folder has a bus of its own: leave --bus, bus= and ISTHMUS_BUS out to use it"
        # A bus that has answered before is the right one.
        wrong = folder and Place.of(self._bus_url).scheme in ("redis", "rediss") and self._listener.answered_at is None
        place = Place.of(self._bus_url)
        remedy = f"check that {self._bus_url} is reachable{own if wrong else ''}"
        if place.scheme == "sqlite":
            remedy = f"see whether its folder is there; if its file is damaged, {remade(Path(place.path))}"
        bus = ("the bus does not answer", remedy)
        if self._speaker.refused:
            bus = ("the bus refuses messages", self._speaker.refused)
        down_s = max(self.store_down_s, self.bus_down_s)
        return [
            (down_s if down_s and not any_left() else 0.0, NONE_LEFT, raise_limit()),
            (self.store_down_s, "the store does not answer", f"check that {self._store.url} is reachable"),
            (self._unwritten_s, "the store takes no writes", self._store.outage.why),
            (self.refused_s, "requests that worked before are refused", "check credentials and policies"),
            (0.0 if self._messages_down_s else self.bus_down_s, *bus),
        ]


def _saying(why: str) -> str:
    """Return what an error said, to be added to a heartbeat, without passwords and not longer than it holds."""
    text = legible(without_passwords(why))
    return f", which says: {text if len(text) <= SAID_MOST else text[: SAID_MOST - 1] + '…'}" if text else ""


class TroubleLog:
    """Logs the trouble of one agent."""

    def __init__(self, name: str, silence_s: float, meanwhile: str) -> None:
        """`meanwhile`: what the trouble means for the agent while it lasts."""
        self._name = name
        self._meanwhile = meanwhile
        self._patience_s = max(PATIENCE_S, 2.0 * silence_s)
        self._say_at = 0.0
        self._pause_s = REMIND_S
        self.said = ""
        """The trouble that was logged last and is not over; empty if there is none."""
        self._open: list[str] = []
        """All troubles that were logged and are not over."""

    def look(self, now: float, troubles: Sequence[Trouble]) -> None:
        """Log the first of `troubles` that lasts long enough, and which of those logged before are over.

        `troubles`: the root cause first.
        """
        lasting = [(for_s, what, remedy) for for_s, what, remedy in troubles if for_s >= self._patience_s]
        # A trouble that is not among `troubles`, or comes after the first one that lasts, may be hidden by that one.
        above = [what for _, what, _ in troubles[: troubles.index(lasting[0])]] if lasting else self._open
        for gone in [what for what in self._open if what in above]:
            self._open.remove(gone)
            logger.info("%s: %s: over", self._name, gone)
        if not lasting:
            self.said, self._pause_s = "", REMIND_S
            return
        for_s, what, remedy = lasting[0]
        if what == self.said and now < self._say_at:
            return
        self._pause_s = min(REMIND_S_MAX, 2.0 * self._pause_s) if what == self.said else REMIND_S
        self.said, self._say_at = what, now + self._pause_s
        self._open = [*(known for known in self._open if not what.startswith(known)), what]
        logger.warning("%s: %s (for %.0f s): %s; %s", self._name, what, for_s, self._meanwhile, remedy)
