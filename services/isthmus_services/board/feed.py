"""What a board knows of a run: its log in little, kept up to date, and what is said on its bus."""

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
from isthmus.errors import Denied, IsthmusError, Unavailable
from isthmus.format.records.keys import RUN_KEY, commit_key
from isthmus.format.records.messages import PARTS, SYNCER_STREAM
from isthmus.inspect.bus_view import LearnerView
from isthmus.inspect.status import Live
from isthmus.log import Commit, Log
from isthmus.store import EdgeStore, Patience
from isthmus_services.board.history.history import RunHistory, write

logger = logging.getLogger("isthmus.services.board")

TURN_S = 0.5
"""How often what came meanwhile is taken in."""

LOOK_S = 5.0
"""How often the end of the log is looked for where nobody says what is new."""

REMEMBERED = 512
"""Commits that were asked for and are kept."""

FOLDING = Patience(attempts=3, first_s=0.1, longest_s=1.0)

SAVE_S = 60.0
PROBE_S = 5.0
PROBES = 120
"""Round trips to store and bus that are kept."""

_MILLISECONDS = re.compile(r"(\d{13})-\d+")
"""How Redis numbers messages: by its clock."""


class NoBus(Bus):
    """Stands for the bus of a run that has none, or that nobody named."""

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
    """What a learner said it moved, over its lives: each counts from nothing."""

    life: int = 0
    base_up: float = 0.0
    base_down: float = 0.0
    up: float = 0.0
    down: float = 0.0


class Remembered(Log):
    """A log whose newest asked-for commits are kept: they never change, and a page asks for the same ones again."""

    def __init__(self, log: Log) -> None:
        super().__init__(log.run, log.store, log.runtime, log.signer, log.members)
        self._known: OrderedDict[tuple[int, int], Commit] = OrderedDict()

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
    """Follows a run for as long as it is wanted. It writes nothing but its own cache."""

    def __init__(self, log: Log, store: EdgeStore, bus: Bus | None, cache: Path | None) -> None:
        """`bus`: None where there is none; `cache`: the file that keeps what was read, None: none does."""
        self.log = log
        self.asked = Remembered(log.through(store.at_start))
        """The same log for who waits for an answer: that a store is away is said within seconds."""
        self.folded = log.through(store.with_patience(FOLDING))
        """And for who waits for a fold, which reads large objects."""
        self.store = store
        self.bus: Bus = bus or NoBus()
        self.has_bus = bus is not None
        self.runtime = log.runtime
        self.history = RunHistory(log.run)
        self.live = Live(log, store, self.bus, log.runtime)
        self.live.on_commit, self.live.on_said = self._committed, self._said
        self.store_ms: deque[float] = deque(maxlen=PROBES)
        self.bus_ms: deque[float] = deque(maxlen=PROBES)
        self.reading = True
        """Whether the log is being read for the first time."""
        self.turn = 0
        """Counts what has changed."""
        self._cache = cache
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
        """Seconds since 1970, now."""
        return self.runtime.wall()

    @property
    def listened_s(self) -> float:
        """For how long it has listened to the bus."""
        return self.runtime.now() - self._began

    async def begin(self) -> None:
        """Take what the cache holds, and what is kept on the bus. Raises `Unavailable` of the store."""
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
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.live.run())
            tasks.create_task(self._read())
            tasks.create_task(self._note())
            tasks.create_task(self._probe())
            if self._cache is not None:
                tasks.create_task(self._keep())

    async def changed(self, after: int, timeout_s: float) -> int:
        """Return the number of the newest change once it is above this one, or after a while."""
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
        """Write the cache; where that cannot be done, say so once and go on without."""
        if self._cache is None or len(self.history) == 0:
            return
        # A copy: the log may go on while it is written.
        arrays, count = self.history.arrays(), len(self.history)
        try:
            await self.runtime.offload(write, self._cache, arrays)
            self._saved = count
        except OSError as error:
            logger.warning("%s cannot be written (%s): the log is read again the next time", self._cache, error)
            self._cache = None

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _committed(self, commit: Commit) -> None:
        self._moved.add(commit.header.fragment)

    def _said(self, said: BusItem) -> None:
        found = _MILLISECONDS.fullmatch(said.position)
        if found is None and not self._listening:
            return  # kept on the bus, and nobody knows since when: only the last words count
        at = int(found[1]) / 1e3 if found else self.wall
        for view in self.live.hearing.learners.values():
            self._beat(view, min(at, self.wall))

    def _beat(self, view: LearnerView, at: float) -> None:
        """Note a learner's last words, if they are new."""
        beat, word = view.heartbeat, (view.heartbeat, view.left)
        known = self._words.get(view.name, (None, None))
        if beat is None or (word[0] is known[0] and word[1] is known[1]):
            return
        self._words[view.name] = word
        moved = self._bytes.setdefault(view.name, _Bytes())
        if beat.incarnation < moved.life:
            return  # kept on the bus, and of a life that the cache knows the end of
        self._beats += 1
        number = self.history.learner(view.name)
        if beat.incarnation > moved.life:
            moved.base_up, moved.base_down, moved.life = moved.up, moved.down, beat.incarnation
        moved.up, moved.down = moved.base_up + beat.bytes_up, moved.base_down + beat.bytes_down
        self.history.beats.one(
            at, number, life=beat.incarnation, step=view.step, target=beat.steps_target, tokens=beat.tokens_seen,
            loss=math.nan if beat.loss is None else beat.loss, step_s=beat.step_s, upload_s=beat.upload_s,
            sync_s=beat.sync_s, bytes_up=moved.up, bytes_down=moved.down, checkpoint_bytes=beat.checkpoint_bytes,
            left=0 if view.left is None else 1 + view.left.done, base_up=moved.base_up, base_down=moved.base_down,
            **{part: getattr(beat.ledger, part) for part in ("processed", *PARTS)},
        )  # fmt: skip

    def _remember(self) -> None:
        """Take up again what the cache knows of bytes."""
        beats = self.history.beats
        for number, row in enumerate(beats.until(math.inf)[: len(self.history.learners.known)].tolist()):
            last = dict(zip(beats.fields, row, strict=True))
            if not math.isnan(last["life"]):
                self._bytes[self.history.learners.known[number]] = _Bytes(
                    int(last["life"]), last["base_up"], last["base_down"], last["bytes_up"], last["bytes_down"]
                )

    def _last_known(self) -> float:
        """Return when what is kept on the bus was said, at the latest, as far as one knows: by the last commit."""
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
        """Return the fragments that are said to be further than was read, or could not be read further."""
        ends, said = self.history.ends, self.live.hearing.heads
        return {p for p, end in enumerate(ends) if end.broken or said.get(p, 0) > end.version}

    async def _follow(self, moved: set[int]) -> None:
        there = {p: c.version for p, c in self.live.commits.items()}
        try:
            await self.history.follow(self.log, moved, self._tell)
            for p in moved:
                end = self.history.ends[p]
                if there.get(p, 0) > end.version and not end.broken:
                    end.broken = f"{commit_key(p, end.version + 1)}: is missing, and there is version {there[p]}"
        except BaseException:
            self._moved |= moved
            raise

    async def _note(self) -> None:
        """Let those who wait know of what has changed, not more often than a turn."""
        seen: object = None
        while True:
            hearing = self.live.hearing
            rounds = {p: (r.version, len(r.answered), len(r.passed)) for p, r in hearing.rounds.items()}
            now = (
                len(self.history), self.reading, self._beats, rounds,
                [id(alive) for alive in hearing.syncers.values()], self._away(), self.live.status().live,
                dict(self.history.broken),
            )  # fmt: skip
            if now != seen:
                seen = now
                self._tell()
            await asyncio.sleep(2 * TURN_S)

    def _away(self) -> tuple[int, ...]:
        """Return for how many turns of looking store and bus have been away."""
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
        """Measure how long store and bus take to answer the smallest of questions."""
        while True:
            for kept, ask in (
                (self.store_ms, lambda: self.asked.store.get_range(RUN_KEY, 0, 1)),
                (self.bus_ms, lambda: self.bus.tail(SYNCER_STREAM)),
            ):
                if kept is self.bus_ms and not self.has_bus:
                    continue
                started = self.runtime.now()
                with contextlib.suppress(IsthmusError):
                    await ask()
                    kept.append(1e3 * (self.runtime.now() - started))
            await asyncio.sleep(PROBE_S)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the largest of what was measured; null where nothing was."""
    return {"median": statistics.median(values) if values else None, "largest": max(values, default=None)}


def cache_of(run: str, digest: bytes, chosen: str | None) -> Path:
    """Return the file that keeps what was read of a run: beside the log of one in a folder where that can be written
    to, else among this user's caches. `chosen`: a folder for it."""
    name = f"{digest[:8].hex()}.npz"
    if chosen:
        return Path(chosen).expanduser() / name
    folder = Path(run.removeprefix("file://")).expanduser()
    if folder.is_dir() and os.access(folder, os.W_OK):
        return folder / ".board" / name
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "isthmus" / "board" / name


@asynccontextmanager
async def following(feed: Feed) -> AsyncIterator["asyncio.Future[None]"]:
    """Let a feed follow its run while the body runs; keep what it read. Gives what ends only where it fails."""
    running = asyncio.ensure_future(feed.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if not feed.reading:
            await feed.save()
