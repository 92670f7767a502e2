"""Follow the state of a run from its store and bus alone, for `isthmus status --watch`, the board and the demo."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress

from isthmus.bus import Bus, default_bus, in_store
from isthmus.bus.base import BusItem, Refusing
from isthmus.errors import RUN_BACK, Denied, LogCorrupt, Unavailable
from isthmus.format.records.keys import commit_in, commits_prefix
from isthmus.inspect.bursts import Bursts
from isthmus.inspect.bus_view import BusView
from isthmus.inspect.losses import LossCurves, sampled
from isthmus.inspect.restarts import Restarts, in_vain
from isthmus.inspect.status import OLDER, OTHERS_S, Status, Stored, ahead_of, listener_of, period_of, room_of, stored_in
from isthmus.log import Commit, Log
from isthmus.log.holes import Holes
from isthmus.log.log_health import RECENT, STANDS, is_most, look
from isthmus.runtime.clock import Runtime
from isthmus.runtime.disk import Room
from isthmus.runtime.urls import redacted
from isthmus.store import EdgeStore

logger = logging.getLogger(__name__)

FOLLOW_EVERY_S = 0.25

INSPECT_EVERY_S = 60.0
"""Seconds between two looks at the condition of the log: its older commits, and the objects that they name."""

INSPECT_PAUSE = 20.0
"""The least pause between two such looks, in multiples of the time that the last one took."""

SUSPECTS = 16
"""The most commits of a fragment, once found damaged, that each such look reads again."""

PROBE_EVERY_S = 5.0
"""Seconds between two looks at the log while the bus is away and announces no commits."""


class Live:
    """Follows a run until it is cancelled: the messages on its bus, and the newest commit of each fragment.

    If the store or the bus goes away, the last known state stays, and `trouble` tells for how long.
    """

    def __init__(
        self,
        log: Log,
        store: EdgeStore,
        bus: Bus,
        runtime: Runtime,
        accepted: Holes | None = None,
    ) -> None:
        """`accepted`: holes that are not reported if the run goes on without them."""
        self._accepted = accepted or {}
        self._bus = bus
        self.on_said: Callable[[BusItem], None] = lambda _: None
        """Called with each batch of messages."""
        self.on_commit: Callable[[Commit], None] = lambda _: None
        """Called with each commit that is read. Only the newest are: commits in between may be skipped."""
        self.hearing = BusView(log.run.digest, log.members)
        self.commits: dict[int, Commit] = {}
        self.refused = ""
        """Why reading the log is denied, or empty."""
        self.run_is_gone = False
        """Whether the run object was missing when it was last looked for. Only the owner of this object looks."""
        self._damaged: dict[int, str] = {}  # by fragment, why its newest commit cannot be read
        self._wrong: Mapping[int, str] = {}  # by fragment, what the last look at the log's condition found
        self._suspects: dict[int, list[int]] = {}  # by fragment, versions whose commits were damaged at some time
        self._losses, self._bursts = LossCurves(), Bursts()
        self._recent = deque[Commit](maxlen=max(RECENT, 4 * len(log.run.layout.fragments)))
        self._joined: dict[str, tuple[int, Restarts | None]] = {}  # by learner: the incarnation at its last look
        self._stored = Stored()
        self._membership = ""
        self._ahead: Mapping[int, tuple[int, Sequence[str]]] = {}
        self._lacking: dict[int, int] = {}  # by fragment that was lacking a version at the last look: its head
        self._room: Room | None = None
        self._refusing: Refusing | None = None
        self._intruders: Sequence[str] = ()
        self._others: dict[int, dict[int, int]] = {}  # by fragment, all fragments' versions when it was last merged
        self._log = log
        self._runtime = runtime
        self._store = store
        self._bus_url = bus.url
        self._listener = listener_of(log, bus, runtime)

    async def begin(self, known: Sequence[int] = ()) -> None:
        """Read the messages kept on the bus, and the end of the log. Raises `Unavailable` if the store is away.

        `known`: a version of each fragment that exists. The search for the end of the log begins there.
        """
        try:
            async for stream, said in self._listener.backlog():
                self.hearing.take(stream, said, None)
                self.on_said(said)
        except Unavailable:
            self._listener.down_since = self._runtime.now()
        for p, version in enumerate(known):
            self.hearing.heads[p] = max(version, self.hearing.heads.get(p, 0))
        await self._newest()
        self._losses = await sampled(self._log, self.commits.values())
        self._others = {f.index: self._versions() for f in self._log.run.layout.fragments}

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._follow())
            tasks.create_task(self._inspect())

    @property
    def trouble(self) -> str:
        """Whether the run object is gone, store or bus do not answer, or reading the log is denied; else empty."""
        down = []
        if self.run_is_gone:
            down.append(
                f"the run object {redacted(self._store.url)}/run is gone: end no syncer, as one that runs writes it "
                f"again within a minute (in a signed run few may, and its log says so); else {RUN_BACK}: no process "
                "can start without it"
            )
        if self.refused:
            down.append(f"reading the log is denied: {self.refused}")
        in_both = in_store(self._bus_url) and self.bus_trouble
        if self._store.outage.down_s and not in_both:
            down.append(
                f"the store has not answered for {self._store.outage.down_s:.0f} s: "
                f"check that {redacted(self._store.url)} is reachable from here"
            )
        if self.bus_trouble:
            down.append(self.bus_trouble)
        return ", ".join(down)

    @property
    def bus_trouble(self) -> str:
        """For how long the bus, or the store that it is in, has not answered, with what to do; empty if it answers."""
        if self._listener.down_since is None:
            return ""
        what, where = ("store", self._store.url) if in_store(self._bus_url) else ("bus", self._bus_url)
        return (
            f"the {what} has not answered for {self._runtime.now() - self._listener.down_since:.0f} s: "
            f"check that {redacted(where)} is reachable from here"
        )

    def status(self) -> Status:
        """Return the present state of the run."""
        heads = [self.commits.get(f.index) for f in self._log.run.layout.fragments]
        since = self._runtime.now() - self._log.run.pace.silence_s
        still = [p for p, then in self._others.items() if self._stands(p, then)]
        return Status(
            self.hearing, heads, self.bus_trouble, since, self._runtime.wall(),
            wrong=dict(sorted({**self._wrong, **self._damaged}.items())), **self._stored._asdict(),
            standing=still, period=period_of(self._log, heads), losses=self._losses.points(),
            recent=tuple(self._recent),
            restarts={name: found for name, (_, found) in self._joined.items() if found is not None}, room=self._room,
            bus_refusing=self._refusing, intruders=self._intruders,
            accepted=self._accepted, pace=self._log.run.pace, bursts=self._bursts.found(),
            ahead=self._ahead, membership=self._membership,
        )  # fmt: skip

    def _stands(self, p: int, then: dict[int, int]) -> bool:
        return is_most(self._version(q) - then.get(q, 0) >= STANDS for q in self._others if q != p)

    async def _listen(self) -> None:
        async for stream, said in self._listener.live(lambda _: None):
            self.hearing.take(stream, said, self._runtime.now())
            self.on_said(said)

    async def _follow(self) -> None:
        looked = self._runtime.now()
        while True:
            await asyncio.sleep(FOLLOW_EVERY_S)
            again = self._runtime.now() - looked >= PROBE_EVERY_S
            try:
                for p, version in list(self.hearing.heads.items()):
                    # Read only the newest commit. Readers that need those in between find them in the log.
                    known = p < len(self._log.run.layout.fragments) and version > self._version(p)
                    if known and (again or p not in self._damaged):
                        self._hold(await self._readable(p, self._said(p, version)))
                        if p not in self._damaged:
                            self.hearing.heads[p] = self._version(p)
                if again:
                    looked = self._runtime.now()
                    await self._look()
                    if self._listener.down_since is not None:
                        await self._newest()
                self.refused = ""
            except Unavailable as error:
                logger.warning("the log cannot be read for now: %s", error)
            except Denied as error:
                if not self.refused:
                    logger.warning("reading the log is denied: %s", error)
                self.refused = str(error)

    async def _look(self) -> None:
        """Look at the room of the run's disk, and at the claims of learners that joined or lately joined in vain."""
        self._room = await room_of(self._log)
        if self._bus_url == default_bus(self._log.run.url):
            with suppress(Unavailable):
                self._intruders = await self._bus.other_runs(OTHERS_S)
        if not self.status().live:
            with suppress(Unavailable):  # `bus_trouble` says so
                self._refusing = await self._bus.refusing()
        else:
            self._refusing = None
        live = self.hearing.live(self._runtime.now() - self._log.run.pace.silence_s)
        found = ahead_of(self.hearing, live, [self.commits.get(f.index) for f in self._log.run.layout.fragments])
        # A commit may be announced before it is read here.
        self._ahead = {p: one for p, one in found.items() if self._lacking.get(p) == self._version(p)}
        self._lacking = {p: self._version(p) for p in found}
        if not self.status().live:
            self._stored = await stored_in(self._log, self.hearing)  # whether learners are on their way
        for name in self.hearing.live(self._runtime.now() - self._log.run.pace.silence_s):
            incarnation = self.hearing.learners[name].incarnation
            known = self._joined.get(name)
            if known is None or known[0] != incarnation or known[1] is not None:
                self._joined[name] = incarnation, await in_vain(self._log, name, incarnation)

    async def _inspect(self) -> None:
        """Look at the condition of the log again and again, and remember the damage that is found."""
        while True:
            began = self._runtime.now()
            hints, objects = {p: commit.version for p, commit in self.commits.items()}, not self.status().syncers_live
            asked = dict(self._suspects)
            try:
                self._stored = await stored_in(self._log, self.hearing)
                self._membership = await self._log.members.damage(self._store)
                state = await look(
                    self._log, hints, objects=objects, suspects=asked, older=OLDER, accepted=self._accepted
                )
                self._wrong = state.wrong
            except (Unavailable, Denied):
                pass  # following the newest commits fails in the same way, and `trouble` tells so
            else:
                for p in asked.keys() - self._wrong.keys():
                    self._suspects[p] = [version for version in self._suspects[p] if version not in asked[p]]
                for p, why in self._wrong.items():
                    self._suspect(p, why)
            await asyncio.sleep(max(INSPECT_EVERY_S, INSPECT_PAUSE * (self._runtime.now() - began)))

    def _suspect(self, p: int, why: str) -> None:
        """Remember which commit is damaged: it is still read when it is no longer among the newest ones."""
        version = commit_in(why.partition(": ")[0]) if why.startswith(commits_prefix(p)) else 0
        if version and version not in (known := self._suspects.setdefault(p, [])):
            self._suspects[p] = [*known, version][-SUSPECTS:]

    async def _newest(self) -> None:
        if self._log.members.withheld is not None:
            await self._log.members.refresh(self._store)  # the version may not be withheld, but only new

        async def end(p: int) -> Commit | None:
            hint = max(self.hearing.heads.get(p, 0), self._version(p))
            return await self._readable(p, self._log.newest(p, hint))

        for commit in await asyncio.gather(*(end(f.index) for f in self._log.run.layout.fragments)):
            self._hold(commit)

    async def _said(self, p: int, version: int) -> Commit | None:
        # If an announced commit does not exist, look for the end of the log, and believe that.
        return await self._log.commit(p, version) or await self._log.newest(p, self._version(p))

    async def _readable(self, p: int, reading: Coroutine[None, None, Commit | None]) -> Commit | None:
        """Return the commit that `reading` gives; None if it is damaged, so that other fragments are still read."""
        try:
            found = await reading
        except LogCorrupt as error:
            if p not in self._damaged:
                logger.warning("the log of fragment %d cannot be read to its end: %s", p, error)
            self._damaged[p] = str(error)
            self._suspect(p, str(error))
            return None
        self._damaged.pop(p, None)
        return found

    def _hold(self, commit: Commit | None) -> None:
        if commit is not None and commit.version > self._version(commit.header.fragment):
            self.commits[commit.header.fragment] = commit
            self._others[commit.header.fragment] = self._versions()
            self._losses.take([commit])
            self._bursts.take(commit.header)
            self._recent.append(commit)
            self.on_commit(commit)

    def _version(self, p: int) -> int:
        return self.commits[p].version if p in self.commits else 0

    def _versions(self) -> dict[int, int]:
        return {f.index: self._version(f.index) for f in self._log.run.layout.fragments}
