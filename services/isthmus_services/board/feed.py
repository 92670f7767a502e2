"""The data of a board: a summary of a run's log, kept up to date, and the messages on the run's bus."""

import asyncio
import contextlib
import logging
import math
import os
import re
import statistics
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from isthmus.bus import Bus, BusItem
from isthmus.errors import Denied, IsthmusError, ObjectMissing, Unavailable
from isthmus.format.records.keys import RUN_KEY, commit_key
from isthmus.format.records.messages import PARTS, SYNCER_STREAM
from isthmus.inspect.bus_view import LearnerView
from isthmus.inspect.live import Live
from isthmus.log import Commit, Log
from isthmus.log.holes import Holes
from isthmus.runtime.urls import Place
from isthmus.store import EdgeStore, Patience
from isthmus_services.board.history.history import RunHistory, first_beyond, write
from isthmus_services.board.history.warnings import was_replaced

logger = logging.getLogger("isthmus.services.board")

TURN_S = 0.5
"""Interval at which new commits are read [seconds]."""

LOOK_S = 5.0
"""Interval at which fragments are looked at for commits that no notification brought [seconds].

Without a bus these are all fragments.
"""

REMEMBERED = 512
"""Number of requested commits that are kept in memory."""

FOLDING = Patience(attempts=3, first_s=0.1, longest_s=1.0)

SAVE_S = 60.0
PROBE_S = 5.0
PROBES = 120
"""Number of response times that are kept, each for the store and the bus."""

_MILLISECONDS = re.compile(r"(\d{13})-\d+")
"""Position of a message in Redis: the server's clock in milliseconds, and a number."""


class NoBus(Bus):
    """Takes the place of the bus if the run has none, or none was named."""

    url = ""

    @override
    async def append(self, stream: str, *bodies: bytes) -> None:
        raise Unavailable("there is no bus")

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        raise Unavailable("there is no bus")

    @override
    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        raise Unavailable("there is no bus")

    @override
    async def tail(self, stream: str) -> str:
        raise Unavailable("there is no bus")

    @override
    async def names(self, within_s: float | None = None) -> set[str]:
        raise Unavailable("there is no bus")


@dataclass(slots=True)
class _Bytes:
    """Bytes that a learner reported, over all its incarnations: the count of each incarnation starts at zero."""

    incarnation: int = 0
    base_up: float = 0.0
    base_down: float = 0.0
    base_checkpoints: float = 0.0
    up: float = 0.0
    down: float = 0.0
    checkpoints: float = 0.0


class Remembered(Log):
    """A log that keeps the last requested commits: commits never change, and a page requests the same ones again."""

    def __init__(self, log: Log) -> None:
        super().__init__(log.run, log.store, log.runtime, log.signer, log.members)
        self._known: OrderedDict[tuple[int, int], Commit] = OrderedDict()

    def forget(self) -> None:
        """Forget all commits: the history of a fragment was replaced."""
        self._known.clear()

    async def commit(self, fragment: int, version: int) -> Commit | None:
        """See `Log.commit`."""
        found = self._known.get((fragment, version)) or await super().commit(fragment, version)
        if found is not None:
            self._known[fragment, version] = found
            self._known.move_to_end((fragment, version))
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return found


class Feed:
    """Follows a run and keeps a summary of it. It writes nothing but its own cache."""

    def __init__(
        self, log: Log, store: EdgeStore, bus: Bus | None, cache: Path | None, accepted: Holes | None = None
    ) -> None:
        """`bus`: None if there is none; `cache`: the file that keeps what was read, or None to keep nothing.

        `accepted`: holes in the log that are passed over, and not reported if the run goes on without them.
        """
        self.log = log
        self.asked = Remembered(log.through(store.at_start))
        """The same log for requests that a reader waits for: an unavailable store is reported within seconds."""
        self.folded = log.through(store.with_patience(FOLDING))
        """The same log for folds, which read large objects."""
        self.store = store
        self.bus: Bus = bus or NoBus()
        self.has_bus = bus is not None
        self.runtime = log.runtime
        self.history = RunHistory(log.run)
        self.live = Live(log, store, self.bus, log.runtime, accepted)
        self.live.on_commit, self.live.on_said = self._committed, self._said
        self.store_ms: deque[float] = deque(maxlen=PROBES)
        self.bus_ms: deque[float] = deque(maxlen=PROBES)
        self.reading = True
        """Whether the log is being read for the first time."""
        self.turn = 0
        """Number of the newest change."""
        self.replaced: Sequence[int] = ()
        """Fragments whose history was replaced by another one since it was read."""
        self.replaced_at = -math.inf
        self._cache, self._accepted = cache, accepted
        self._began = log.runtime.now()
        self._listening = False
        self._saved = 0
        self._moved: set[int] = set(range(len(log.run.layout.fragments)))
        self._words: dict[str, tuple[object, object]] = {}
        self._bytes: dict[str, _Bytes] = {}
        self._beats = 0
        self._changed = asyncio.Event()

    @property
    def wall(self) -> float:
        """The present time [seconds since 1970]."""
        return self.runtime.wall()

    @property
    def listened_s(self) -> float:
        """How long the feed has listened to the bus [seconds]."""
        return self.runtime.now() - self._began

    async def begin(self) -> None:
        """Load the cache, then read the messages kept on the bus and the end of the log.

        Raises `Unavailable` if the store does not answer.
        """
        if self._cache is not None and self._cache.exists():
            found = await self.runtime.offload(RunHistory.load, self.log.run, self._cache)
            if found is not None and await found.belongs(self.log):
                self.history, self._saved = found, len(found)
            else:
                logger.warning("%s is of another log or another release: the log is read anew", self._cache)
        self._remember()
        await self.live.begin([end.version for end in self.history.ends])
        for view in self.live.hearing.learners.values():
            self._beat(view, self._last_known())
        self._listening = True
        self._began = self.runtime.now()

    async def run(self) -> None:
        """Follow the run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.live.run())
            tasks.create_task(self._read())
            tasks.create_task(self._note())
            tasks.create_task(self._probe())
            if self._cache is not None:
                tasks.create_task(self._keep())

    async def changed(self, after: int, timeout_s: float) -> int:
        """Return the number of the newest change once it is above `after`, or after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.turn <= after:
                    self._changed.clear()
                    await self._changed.wait()
        return self.turn

    async def read_all(self) -> None:
        """Read the log to its end, once."""
        self._lengths()
        moved, self._moved = self._moved, set()
        await self._follow(moved)
        self.reading = False

    async def save(self) -> None:
        """Write the cache. If that fails, log a warning once and continue without a cache."""
        if self._cache is None or len(self.history) == 0:
            return
        # `arrays` returns a copy, so that the log can be read further while the cache is written.
        arrays, count = self.history.arrays(), len(self.history)
        try:
            await self.runtime.offload(write, self._cache, arrays)
            self._saved = count
        except OSError as error:
            logger.warning("%s cannot be written (%s): the log is read again the next time", self._cache, error)
            self._cache = None

    # --- incoming commits and messages --------------------------------------------------------------------------------

    def _committed(self, commit: Commit) -> None:
        self._moved.add(commit.header.fragment)

    def _said(self, said: BusItem) -> None:
        found = _MILLISECONDS.fullmatch(said.position)
        if found is None and not self._listening:
            # The message was kept on the bus and its time is unknown. `begin` records each learner's last heartbeat.
            return
        at = int(found[1]) / 1e3 if found else self.wall
        for view in self.live.hearing.learners.values():
            self._beat(view, min(at, self.wall))

    def _beat(self, view: LearnerView, at: float) -> None:
        """Record a learner's newest heartbeat or leave message, if it is new. `at`: seconds since 1970."""
        beat, word = view.heartbeat, (view.heartbeat, view.left)
        known = self._words.get(view.name, (None, None))
        if beat is None or (word[0] is known[0] and word[1] is known[1]):
            return
        self._words[view.name] = word
        moved = self._bytes.setdefault(view.name, _Bytes())
        if beat.incarnation < moved.incarnation:
            # A heartbeat that was kept on the bus can be of an older incarnation than the last one in the cache.
            return
        self._beats += 1
        number = self.history.learner(view.name)
        if beat.incarnation > moved.incarnation:
            # Messages that were kept on the bus may tell of earlier incarnations, of which no beat was recorded here.
            moved.incarnation, moved.base_up = beat.incarnation, max(moved.up, view.earlier.up)
            moved.base_down = max(moved.down, view.earlier.down)
            moved.base_checkpoints = max(moved.checkpoints, view.earlier.checkpoints)
        moved.up = moved.base_up + beat.bytes_up - beat.checkpoint_bytes
        moved.down = moved.base_down + beat.bytes_down
        moved.checkpoints = moved.base_checkpoints + beat.checkpoint_bytes
        self.history.beats.one(
            at, number, incarnation=beat.incarnation, step=view.step, target=beat.steps_target, tokens=beat.tokens_seen,
            loss=math.nan if beat.loss is None else beat.loss, step_s=beat.step_s, upload_s=beat.upload_s,
            sync_s=beat.sync_s, bytes_up=moved.up, bytes_down=moved.down, checkpoint_bytes=moved.checkpoints,
            left=0 if view.left is None else 1 + view.left.done, base_up=moved.base_up, base_down=moved.base_down,
            base_checkpoints=moved.base_checkpoints,
            **{part: getattr(beat.ledger, part) for part in ("processed", *PARTS)},
        )  # fmt: skip

    def _remember(self) -> None:
        """Restore the byte counts of the learners from the cache."""
        beats = self.history.beats
        for number, row in enumerate(beats.until(math.inf)[: len(self.history.learners.known)].tolist()):
            last = dict(zip(beats.fields, row, strict=True))
            if not math.isnan(last["incarnation"]):
                self._bytes[self.history.learners.known[number]] = _Bytes(
                    int(last["incarnation"]),
                    last["base_up"],
                    last["base_down"],
                    last["base_checkpoints"],
                    last["bytes_up"],
                    last["bytes_down"],
                    last["checkpoint_bytes"],
                )

    def _last_known(self) -> float:
        """Return the assumed time of messages kept on the bus: that of the newest commit [seconds since 1970]."""
        written = [c.header.written_at for c in self.live.commits.values()]
        return min(self.wall, max([self.log.run.header.created_at, *written]))

    def _lengths(self) -> None:
        heads = [self.live.commits.get(f.index) for f in self.log.run.layout.fragments]
        self.history.heads = [c.version if c else 0 for c in heads]

    async def _read(self) -> None:
        looked = -math.inf
        while True:
            try:
                if not self.reading and self.runtime.now() - looked >= LOOK_S:
                    looked = self.runtime.now()
                    self._moved |= set(range(len(self.history.ends))) if not self.has_bus else self._behind()
                moved, self._moved = self._moved, set()
                self._lengths()
                if moved:
                    await self._follow(moved)
                    if self.reading:
                        self.reading = False
                        await self.save()
            except (Unavailable, Denied) as error:
                logger.warning("the log cannot be read for now: %s", error)
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(TURN_S)

    def _behind(self) -> set[int]:
        """Return the fragments that could not be read further, and those with an announced version that is unread."""
        ends, said = self.history.ends, self.live.hearing.heads
        return {p for p, end in enumerate(ends) if end.broken or said.get(p, 0) > end.version}

    async def _follow(self, moved: set[int]) -> None:
        there = {p: c.version for p, c in self.live.commits.items()}
        try:
            await self.history.follow(self.log, moved, self._tell, self._accepted)
            if replaced := await self.history.replaced(self.log):
                moved = self._start_again(replaced)
                there = {}
                await self.history.follow(self.log, moved, self._tell, self._accepted)
            for p in moved:
                end = self.history.ends[p]
                if there.get(p, 0) > end.version and not end.broken:
                    first = first_beyond(end.version, (self._accepted or {}).get(p, ()))
                    end.broken = f"{commit_key(p, first)}: is missing, and there is version {there[p]}"
        except BaseException:
            self._moved |= moved
            raise

    def _start_again(self, replaced: Sequence[int]) -> set[int]:
        """Forget what was read of the log, since the history of these fragments is another one now; return what to
        read."""
        self.replaced, self.replaced_at = replaced, self.runtime.now()
        logger.warning("%s: the log is read anew", was_replaced(replaced))
        self.history, self._saved = self.history.again(), 0
        self.asked.forget()
        for p in replaced:
            self.live.commits.pop(p, None)
        return set(range(len(self.history.ends)))

    async def _note(self) -> None:
        """Wake the callers of `changed` when something has changed, at most once in `2 * TURN_S` seconds."""
        seen: object = None
        while True:
            hearing = self.live.hearing
            rounds = {p: (r.version, len(r.answered), len(r.passed)) for p, r in hearing.rounds.items()}
            status = self.live.status()
            now = (
                len(self.history), self.reading, self._beats, rounds,
                [id(alive) for alive in hearing.syncers.values()], self._away(), status.live,
                self.live.run_is_gone, dict(self.history.broken), status.wrong,
            )  # fmt: skip
            if now != seen:
                seen = now
                self._tell()
            await asyncio.sleep(2 * TURN_S)

    def _away(self) -> tuple[int, ...]:
        """Return how long store and bus have been away [seconds], leaving out durations between multiples of `LOOK_S`.

        So an outage does not count as a new change every second.
        """
        return tuple(int(x) for x in re.findall(r"for (\d+) s", self.live.trouble) if int(x) % LOOK_S < 1)

    def _tell(self) -> None:
        self.turn += 1
        self._changed.set()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            if not self.reading and len(self.history) > self._saved:
                await self.save()

    async def _probe(self) -> None:
        """Measure how long store and bus take to answer a minimal request [milliseconds]."""
        while True:
            for kept, ask in (
                (self.store_ms, lambda: self.asked.store.get_range(RUN_KEY, 0, 1)),
                (self.bus_ms, lambda: self.bus.tail(SYNCER_STREAM)),
            ):
                if kept is self.bus_ms and not self.has_bus:
                    continue
                started = self.runtime.now()
                try:
                    await ask()
                    kept.append(1e3 * (self.runtime.now() - started))
                    if kept is self.store_ms:
                        self.live.run_is_gone = False
                except ObjectMissing:
                    self.live.run_is_gone = True
                except IsthmusError:
                    pass  # `Live.trouble` says for how long store and bus have been away
            await asyncio.sleep(PROBE_S)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the largest of the values; None for both if there are none."""
    return {"median": statistics.median(values) if values else None, "largest": max(values, default=None)}


def cache_of(run: str, digest: bytes, chosen: str | None) -> Path:
    """Return the file that keeps what was read of a run.

    If the run is in a folder that can be written to, the file is beside the log. Otherwise it is among this user's
    caches. `chosen`: a folder to use instead.
    """
    name = f"{digest[:8].hex()}.npz"
    if chosen:
        return Path(chosen).expanduser() / name
    folder = Place.of(run).folder
    if folder is not None and folder.is_dir() and os.access(folder, os.W_OK):
        return folder / ".board" / name
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "isthmus" / "board" / name


@asynccontextmanager
async def following(feed: Feed) -> AsyncIterator["asyncio.Future[None]"]:
    """Let a feed follow its run while the body runs, then save its cache. Yields a future that ends only on failure."""
    running = asyncio.ensure_future(feed.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if not feed.reading:
            await feed.save()
