"""What the alerts say: simulated runs make each one fire, and the advice in its description ends it.

The metrics of the processes are scraped every 30 s of virtual time, and promtool evaluates the alerts on these samples.
"""

import asyncio
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from typing_extensions import override

from advice.followed import commands_in
from advice.lives import Fault
from advice.recorded import Recording, alerts
from advice.rows import A_GAP, row
from isthmus.agent import health as vitals
from isthmus.agent.health import Vitals
from isthmus.bus import Bus, BusItem
from isthmus.errors import Unavailable
from isthmus.format.records.keys import commit_key
from isthmus.format.records.messages import SYNCER_STREAM, Committed, encode
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.health_summary import health
from isthmus.inspect.status import read_status
from isthmus.learner import LearnerAgent
from isthmus.link.leader import Leader
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.metrics import SyncerMetrics
from isthmus.syncer import Syncer
from isthmus_services.main import main
from support import world as worlds
from support.world import NumpyReplica, World, in_virtual_time, newest_commit, seed_of, serving, until, world

F = TypeVar("F", bound=Callable[..., Any])

PACE = Pace(heartbeat_s=3.0, silence_s=9.0, snapshot_every=4096)
RULES = Rules(fragments=2, sync_every=4)
STEP_S = 2.0
MINUTE_S = 60.0


def alarm(name: str, **more: str) -> Callable[[F], F]:
    """Decorate the test of an alert; its row has the alert's own summary and description."""
    said = re.sub(r"\{\{.*?\}\}", "…", alerts()[name]["summary"])
    return row("alert", f"{name}: {said}", do=alerts()[name]["description"], **more)


@dataclass
class Loop:
    """What a learner's training loop does, changed while it runs."""

    speed: float = 0.01
    """How far each parameter moves in a step."""
    step_s: float = STEP_S
    loss: float = 1.0
    hangs: bool = False


@dataclass
class Fleet:
    """The processes of a simulated run, whose metrics are recorded."""

    w: World
    recording: Recording = field(default_factory=Recording)

    @asynccontextmanager
    async def syncer(self, name: str, w: World | None = None, *, killed: bool = False) -> AsyncIterator[Syncer]:
        """Run a syncer during the body."""
        one = (w or self.w).syncer(name)
        async with self._target("syncer", name, one), serving(one, killed=killed):
            yield one

    @asynccontextmanager
    async def learner(
        self, name: str, loop: Loop | None = None, w: World | None = None, **options: Any
    ) -> AsyncIterator[LearnerAgent]:
        """Let a learner train during the body; it is killed at the end."""
        agent = (w or self.w).learner(name, **options)
        loop = loop or Loop()
        await agent.join()
        replica = NumpyReplica(agent.layout)
        boundary = agent.attach(replica)
        link = cast(Leader, SimpleNamespace(_thread=SimpleNamespace(agent=agent, feeder=None), _said_nonfinite=False))
        link.steps_done = 0  # type: ignore[misc]

        async def steps() -> None:
            draw = np.random.default_rng(0)
            while True:
                await asyncio.sleep(loop.step_s)
                if loop.hangs:
                    continue
                for values in replica.values:
                    noise = draw.normal(scale=1e-3, size=values.size).astype(np.float32)
                    values += np.float32(loop.speed) + noise
                boundary.after_step(100, loop.loss)
                Leader._report(link, 100, loop.loss)

        tasks = [asyncio.ensure_future(agent.run()), asyncio.ensure_future(steps())]
        try:
            async with self._target("learner", name, agent):
                yield agent
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def _target(self, job: str, name: str, agent: Syncer | LearnerAgent) -> AsyncIterator[None]:
        self.recording.up[job, name] = agent.metrics
        try:
            yield
        finally:
            del self.recording.up[job, name]

    async def status(self) -> str:
        """Return the first line of `isthmus status`."""
        state = await read_status(self.w.log, self.w.bus, self.w.runtime, 1.5 * PACE.heartbeat_s)
        return health(state, "RUN", "BUS").said


@asynccontextmanager
async def fleet(rules: Rules = RULES, pace: Pace = PACE) -> AsyncIterator[Fleet]:
    """Create a run in the simulated store, and record during the body."""
    async with world(Path(), seed_of(rules, pace)) as w:
        made = Fleet(w)
        async with made.recording.running():
            yield made


async def minutes(count: float) -> None:
    """Let minutes of virtual time pass."""
    await asyncio.sleep(count * MINUTE_S)


@contextmanager
def folder_of_the_run(place: Path) -> Any:
    """Copy the simulated objects into a folder for the body, and afterwards what is new or changed there back."""
    assert worlds._simulated is not None
    objects = worlds._simulated.objects
    for key, (blob, _) in objects.blobs.items():
        path = place / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob)
    yield str(place)
    for path in place.rglob("*"):
        key = str(path.relative_to(place))
        if path.is_file() and not key.startswith((".", "bus.")) and "/." not in key:
            blob = path.read_bytes()
            if objects.blobs.get(key, (b"", 0.0))[0] != blob:
                objects.put(key, blob, 0.0)


def follow(name: str, run: str, command: str, capsys: pytest.CaptureFixture[str], **words: str) -> tuple[int, str]:
    """Run the first command of this name in an alert's description; return its exit code and what it printed.

    `words`: what stands for the description's placeholders, beside RUN and BUS.
    """
    text = alerts()[name]["description"]
    for placeholder, given in {"RUN": run, "BUS": f"sqlite://{run}.bus", **words}.items():
        text = re.sub(rf" {placeholder}(?=[ `])", f" {given}", text)
    (found, *_) = [w for w in commands_in(text) if w[0] == command and len(w) > 1]
    code = _apart(found)
    return code, capsys.readouterr().out


def assert_reaches(told: str) -> None:
    """Assert that a doctor reached the store. (The simulated bus is not on this machine, and the doctor says so.)"""
    assert "ok      store: access" in told, told
    assert "ok      store: may write" in told, told


def _apart(words: Sequence[str]) -> int:
    """Run a command in a thread, since it has an event loop of its own; virtual time stands still meanwhile."""
    codes = list[int]()
    thread = threading.Thread(target=lambda: codes.append(main(list(words))))
    thread.start()
    thread.join()
    return codes[0]


def ends(recording: Recording, folder: Path, *names: str) -> None:
    """Assert that each of these alerts fired, and that none does at the end."""
    fired = recording.firing(folder)
    assert set(names) <= set().union(*fired), [sorted(f) for f in fired]
    assert not fired[-1] & set(names), [sorted(f) for f in fired]


@pytest.fixture(autouse=True)
def _ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes look at their loops once a second: ten times a second is most of the work in virtual time."""
    monkeypatch.setattr(vitals, "TICK_S", 1.0)


# --- processes --------------------------------------------------------------------------------------------------------


@alarm(
    "IsthmusNoSyncer",
    means="Learners are scraped, and no syncer is: nothing is merged.",
    like="Prometheus does not find the syncers: `isthmus status` then lists them as alive.",
    then="`isthmus status` has `… of … learners merge`, and the alert ends.",
    lost=A_GAP,
)
@alarm(
    "IsthmusNoStandby",
    means="One syncer runs. Nothing is wrong yet.",
    then="The two share the fragments, and either takes over those of the other.",
)
def test_syncers_that_die(tmp_path: Path) -> None:
    @in_virtual_time
    async def told() -> Recording:
        async with fleet() as f, f.learner("a"):
            async with f.syncer("s1", killed=True):
                async with f.syncer("s2"):
                    await minutes(3)
                await minutes(7)
            await minutes(3)
            assert "start one with: isthmus syncer RUN --bus BUS" in await f.status()
            async with f.syncer("s1"), f.syncer("s2"):
                await minutes(2)
                assert (await f.status()).startswith("1 of 1 learners merge")
        return f.recording

    for name in ("IsthmusNoSyncer", "IsthmusNoStandby"):
        assert ["syncer", "RUN/", "--bus", "BUS"] in commands_in(alerts()[name]["description"].replace("RUN", "RUN/"))
    recording = told()
    ends(recording, tmp_path, "IsthmusNoSyncer", "IsthmusNoStandby")


@alarm(
    "IsthmusNotAnswering",
    means="A process that was scraped in the last hour does not answer any more.",
    like="A process that was taken off the targets on purpose: no alert.",
    then="It is scraped again.",
    lost="of a learner: what it trained since its last checkpoint and was not merged",
)
@in_virtual_time
async def test_a_process_that_is_gone(tmp_path: Path) -> None:
    async with fleet() as f, f.syncer("s1"), f.learner("a"):
        async with f.learner("b"):
            await minutes(2)
        f.recording.up["learner", "b"] = None
        await minutes(4)
        async with f.learner("b") as again:
            await minutes(2)
            assert again.incarnation == 2
            ends(f.recording, tmp_path, "IsthmusNotAnswering")


@alarm(
    "IsthmusEventLoopSlow",
    means="The process gets too little CPU, or something in it holds its event loop.",
    then="With more CPU the delays end. `/healthz` answers 200.",
    lost="what comes too late for its round and is overwritten",
)
@pytest.mark.tier("all")
async def test_a_process_without_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real event loop is held up; its samples are played as if there were 30 s between two."""
    monkeypatch.setattr(vitals, "TICK_S", 0.02)
    never: Any = SimpleNamespace(answered_at=None, down_since=None)
    store: Any = SimpleNamespace(outage=never)
    metrics = SyncerMetrics()
    watching = asyncio.ensure_future(Vitals(single_threaded(0), store, never, never, metrics).watch())
    recording = Recording({("syncer", "s1"): metrics})
    for held_s in (*[0.55] * 13, *[0.0] * 22):
        await asyncio.sleep(0.1)
        time.sleep(held_s)  # noqa: ASYNC251
        await asyncio.sleep(0.05)
        recording.scrape()
    watching.cancel()
    ends(recording, tmp_path, "IsthmusEventLoopSlow")


# --- store and bus ----------------------------------------------------------------------------------------------------


class Deaf(Bus):
    """A bus that does not answer until it is mended."""

    def __init__(self, bus: Bus) -> None:
        self.url, self._bus, self.mended = bus.url, bus, True

    def _require(self) -> None:
        if not self.mended:
            raise Unavailable("connection refused")

    @override
    async def append(self, stream: str, *bodies: bytes) -> None:
        self._require()
        await self._bus.append(stream, *bodies)

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        self._require()
        return await self._bus.read(positions, timeout_s)

    @override
    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        self._require()
        return await self._bus.ago(streams, seconds)

    @override
    async def tail(self, stream: str) -> str:
        self._require()
        return await self._bus.tail(stream)

    @override
    async def names(self, within_s: float | None = None) -> set[str]:
        self._require()
        return await self._bus.names(within_s)


@alarm(
    "IsthmusStoreSilent",
    means="No request of this process to the store was answered for half a minute and longer.",
    like="If all processes report it, it is the store; if one does, its way there.",
    then="The process goes on by itself, and the doctor finds nothing.",
    lost=A_GAP + "; and what learners trained on the old version of a fragment that was merged right before the outage",
)
@alarm(
    "IsthmusBusSilent",
    means="The process cannot read from the bus, or not write to it, for half a minute and longer.",
    like="If all processes report it, it is Redis; if one does, its way there or its user. With the bus in the store "
    "(`--bus store:`), an outage rings IsthmusStoreSilent alone.",
    then="The process goes on by itself: every message is sent again.",
    lost=A_GAP,
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_store_and_bus_that_do_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with fleet() as f, f.syncer("s1"), f.learner("a"):
        store, bus = Fault(Unavailable("connection refused"), mended=True, after_s=5.0), Deaf(f.w.bus)
        async with f.learner("b", w=store.of(f.w)), f.learner("c", w=replace(f.w, bus=bus)):
            await minutes(2)
            store.mended = bus.mended = False
            await minutes(4)
            said = await f.status()
            assert "b: waits for store" in said
            with folder_of_the_run(tmp_path / "run") as run:
                for name in ("IsthmusStoreSilent", "IsthmusBusSilent"):
                    assert_reaches(follow(name, run, "doctor", capsys)[1])
            store.mended = bus.mended = True
            await minutes(2)
            assert (await f.status()).startswith("3 of 3 learners merge")
            ends(f.recording, tmp_path, "IsthmusStoreSilent", "IsthmusBusSilent")


@alarm(
    "IsthmusNoCommits",
    means="Learners are expected or train, and some fragments had no commit for over five minutes.",
    like="A run whose H steps take minutes.",
    then="Once what they wait for is there, every fragment has a commit within H steps.",
    lost=A_GAP,
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_nothing_is_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with fleet() as f:
        fault = Fault(Unavailable("503"), mended=True, after_s=5.0)
        async with f.syncer("s1", fault.of(f.w)), f.learner("a"):
            await minutes(2)
            fault.mended = False
            await minutes(9)
            assert "0 of 1 syncers can serve for now" in (said := await f.status())
            assert "s1: waits for store" in said
            with folder_of_the_run(tmp_path / "run") as run:
                assert_reaches(follow("IsthmusNoCommits", run, "doctor", capsys)[1])
            fault.mended = True
            await minutes(3)
            assert (await f.status()).startswith("1 of 1 learners merge")
            ends(f.recording, tmp_path, "IsthmusNoCommits", "IsthmusStoreSilent")


# --- the log ----------------------------------------------------------------------------------------------------------


@alarm(
    "IsthmusFragmentsBroken",
    means="A syncer cannot start with fragments: an object of their log is damaged, missing or denied to it.",
    like="If it may not read the object, heal finds nothing wrong and `isthmus status` says `may not be read by`.",
    then="Syncers take the fragments up within a minute.",
    lost="with `--apply`: the fragment's momentum",
)
@in_virtual_time
async def test_a_fragment_that_no_syncer_can_fold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "IsthmusFragmentsBroken"
    async with fleet() as f, f.learner("a"):
        async with f.syncer("s0", killed=True) as first:
            await until(lambda: min(k.head for k in first.coordinators) >= 4, "there are commits")
        given = (await newest_commit(f.w, 0)).header.inputs[0].key
        await f.w.store.put(given, b"gone")
        async with f.syncer("s1") as syncer:
            await minutes(3)
            with folder_of_the_run(tmp_path / "run") as run:
                code, told = follow(name, run, "heal", capsys)
                assert (code, given in told) == (1, True), told
                words = [w for w in commands_in(alerts()[name]["description"].replace("RUN", run)) if "--apply" in w]
                assert _apart(words[0]) == 0
            head = syncer.coordinators[0].head
            await minutes(2)
            assert syncer.coordinators[0].head > head
            ends(f.recording, tmp_path, name)


@alarm(
    "IsthmusCommitMissing",
    means="A commit from before the newest snapshot is gone.",
    then="Ten minutes later the syncers have looked again, and the alert ends.",
    lost="without a backup: the proof of the versions before the snapshot, and nothing of the model",
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_a_commit_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "IsthmusCommitMissing"
    async with fleet(pace=Pace(heartbeat_s=3.0, silence_s=9.0, snapshot_every=8)) as f, f.syncer("s1"), f.learner("a"):
        await minutes(3)
        kept = await f.w.store.get(commit_key(0, 2))
        await f.w.store.delete(commit_key(0, 2))
        await minutes(14)
        assert "isthmus heal RUN" in await f.status()
        with folder_of_the_run(tmp_path / "run") as run:
            for command in ("heal", "replay"):
                code, told = follow(name, run, command, capsys)
                assert (code, commit_key(0, 2) in told) == (1, True), told
        await f.w.store.put(commit_key(0, 2), kept)
        await minutes(13)
        ends(f.recording, tmp_path, name)


@alarm(
    "IsthmusFragmentStands",
    means="Something keeps one fragment from being merged: the store does not take its objects, its log is damaged, or "
    "its syncer hangs.",
    then="Its commits go on.",
    lost="what learners train of the fragment meanwhile",
)
@in_virtual_time
async def test_a_fragment_that_stands_still(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = "IsthmusFragmentStands"
    async with fleet(Rules(fragments=4, sync_every=4)) as f:
        fault = Fault(Unavailable("503 SlowDown"), "values/00000/", ("put",), mended=True, after_s=5.0)
        async with f.syncer("s1", fault.of(f.w)), f.learner("a"):
            await minutes(2)
            fault.mended = False
            await minutes(9)
            with folder_of_the_run(tmp_path / "run") as run:
                code, told = follow(name, run, "heal", capsys)
            assert (code, "4 sound" in told) == (0, True), told
            assert "503 SlowDown" in caplog.text
            fault.mended = True
            await minutes(2)
            ends(f.recording, tmp_path, name)


@alarm(
    "IsthmusTwoHistories",
    means="Two processes read different bytes under the key of a commit.",
    like="A process that lies about what it read.",
    then="No further difference is logged. The alert ends after 15 minutes.",
    lost="what was merged into the history that is given up",
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_two_histories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as f, f.learner("a"):
        async with f.syncer("s1") as syncer:
            await minutes(2)
            head = syncer.coordinators[0].head
            other = Committed(
                run=f.w.run.digest, id="x", syncer="s2", fragment=0, version=head, digest=bytes(range(32))
            )
            await f.w.bus.append(SYNCER_STREAM, encode(other))
            await minutes(3)
            assert f"{commit_key(0, head)} is commit" in caplog.text
            assert "and s2 says that it read" in caplog.text
        async with f.syncer("s1"):
            await minutes(17)
            ends(f.recording, tmp_path, "IsthmusTwoHistories")


# --- learners ---------------------------------------------------------------------------------------------------------


@alarm(
    "IsthmusParticipationLow",
    means="Rounds close without more than half of the learners that they expect.",
    like="Learners that are killed often.",
    then="After 15 minutes at the new speeds the alert ends.",
    lost="what the learners that came too late trained, as far as it was overwritten",
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_learners_that_are_too_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "IsthmusParticipationLow"
    async with fleet() as f, f.syncer("s1"), f.learner("a"):
        slow = [Loop(step_s=60.0) for _ in range(3)]
        async with f.learner("b", slow[0]), f.learner("c", slow[1]), f.learner("d", slow[2]):
            await minutes(25)
            with folder_of_the_run(tmp_path / "run") as run:
                newest = max(int(path.name) for path in Path(run, "commits/00000").iterdir())
                code, told = follow(name, run, "explain", capsys, **{"P/VERSION": f"0/{newest}"})
                assert code == 0, told
                assert re.search(r"(missing|late): ", told), told
        for loop in slow:
            loop.step_s = STEP_S
        async with f.learner("b", slow[0]), f.learner("c", slow[1]), f.learner("d", slow[2]):
            await minutes(22)
            ends(f.recording, tmp_path, name)


@alarm(
    "IsthmusUpdatesRejected",
    means="More than a hundredth of the updates and messages are rejected for this reason (a tenth for `stale`), and more "
    "than ten in 15 minutes.",
    like="duplicate, superseded, base-merged, overtaken and unknown-base are usual and do not count.",
    then="15 minutes after the cause has gone, the alert ends.",
    lost="the work in these updates",
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_updates_that_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = "IsthmusUpdatesRejected"
    async with fleet() as f, f.syncer("s1"), f.learner("a"), f.learner("b"):
        async with f.learner("wild", Loop(speed=1e4)):
            await minutes(6)
            commit = await newest_commit(f.w, 0)
            first = next(r for r in commit.header.rejected if r.learner == "wild")
            assert first.reason == "too-long"
            assert "wild" in caplog.text
            with folder_of_the_run(tmp_path / "run") as run:
                words = {"P/LEARNER/BASE": f"0/wild/{first.base}"}
                code, told = follow(name, run, "explain", capsys, **words)
            assert code == 0, told
            assert "over a hundred times as long as recent updates are" in told
        await minutes(17)
        ends(f.recording, tmp_path, name)


@alarm(
    "IsthmusUpdatesCut",
    means="Over 15 minutes, more than a fifth of the merged updates were cut because they are far longer than usual.",
    like="A learning rate that was raised for all learners: it passes by itself.",
    then="15 minutes after the learner was stopped, the alert ends.",
    lost="most of what that learner trained",
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_updates_that_are_cut(tmp_path: Path) -> None:
    async with fleet() as f, f.syncer("s1"), f.learner("a"), f.learner("b"):
        await minutes(1)
        async with f.learner("wild", Loop(speed=0.3)):
            await minutes(20)
            assert "wild explodes" in await f.status()
        await minutes(17)
        assert "explodes" not in await f.status()
        ends(f.recording, tmp_path, "IsthmusUpdatesCut")


@alarm(
    "IsthmusLearnerTooHeavy",
    means="One learner decides what the model becomes, although the others do much of the work.",
    like="A learner that is much faster than the others, and has most of the tokens, too: no alert.",
    then="15 minutes after the learner was stopped, the alert ends.",
    lost="most of what the others train meanwhile",
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_a_learner_that_is_too_heavy(tmp_path: Path) -> None:
    # Where long updates are usual, those of a learner that hardly moves count for little.
    async with fleet() as f, f.syncer("s1"):
        async with f.learner("heavy", Loop(0.3, step_s=30.0)):
            await minutes(60)
            async with f.learner("a", Loop(0.0, step_s=30.0)):
                await minutes(30)
                assert "a hardly moves" in await f.status()
        async with f.learner("a", Loop(0.0, step_s=30.0)):
            await minutes(17)
            assert "hardly" not in await f.status()
            ends(f.recording, tmp_path, "IsthmusLearnerTooHeavy")


@alarm(
    "IsthmusLearnerRestarts",
    means="A learner's process ends and is started again, over and over: it dies early, or two processes have its name.",
    like="Spot machines that are taken away often.",
    then="15 minutes after its last restart the alert ends.",
    lost="what each life trained since the last checkpoint and had not merged",
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_a_learner_that_restarts_again_and_again(tmp_path: Path) -> None:
    async with fleet() as f, f.syncer("s1"), f.learner("b"):
        for _ in range(4):
            async with f.learner("a"):
                await minutes(1.5)
        async with f.learner("a", checkpoint_s=30.0):
            await minutes(0.3)
            assert "a has joined 5 times since its last checkpoint" in await f.status()
            await minutes(17)
            assert "a has joined" not in await f.status()
            ends(f.recording, tmp_path, "IsthmusLearnerRestarts")


@alarm(
    "IsthmusLossRises",
    means="A learner's mean loss of a quarter of an hour is well above the lowest of twelve hours.",
    like="A learner whose data or schedule changed on purpose: the alert ends after twelve hours.",
    then="Its loss falls again, and a quarter of an hour later the alert ends.",
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_a_loss_that_rises(tmp_path: Path) -> None:
    loop = Loop(loss=3.0)
    async with fleet() as f, f.syncer("s1"), f.learner("a"), f.learner("b", loop):
        for level, long in ((3.0, 5), (2.0, 5), (1.0, 20), (2.0, 50), (0.9, 20)):
            loop.loss = level
            await minutes(long)
            assert ("the loss of b rises" in await f.status()) == ((level, long) == (2.0, 50))
        ends(f.recording, tmp_path, "IsthmusLossRises")


@alarm(
    "IsthmusLearnerStalled",
    means="The process answers, and its training loop has made no step for five minutes.",
    like="A long evaluation or compilation.",
    then="Its steps go on.",
    lost="what it trained since its last checkpoint and was not merged",
)
@alarm(
    "IsthmusLossNotANumber",
    means="The training loop has reported losses that are NaN or infinite for five minutes.",
    like="A single bad batch: no alert.",
    then="Its loss is a number again. The others were never touched.",
    lost="what it trained since the last checkpoint before",
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_training_loops_that_fail(tmp_path: Path) -> None:
    hangs, diverges = Loop(), Loop()
    async with fleet() as f, f.syncer("s1"), f.learner("a"):
        async with f.learner("b", hangs, checkpoint_s=30.0), f.learner("c", diverges, checkpoint_s=30.0):
            await minutes(2)
            hangs.hangs, diverges.loss, diverges.speed = True, math.nan, math.nan
            await minutes(12)
        async with (
            f.learner("b", checkpoint_s=30.0) as b,
            f.learner("c", checkpoint_s=30.0) as c,
        ):
            assert b.history.step > 0
            assert c.history.step > 0
            await minutes(7)
            assert c.boundary is not None
            assert math.isfinite(c.boundary.loss or math.nan)
            ends(f.recording, tmp_path, "IsthmusLearnerStalled", "IsthmusLossNotANumber")


@alarm(
    "IsthmusCheckpointOld",
    means="No checkpoint of this learner was stored for a quarter of an hour.",
    like="A learner that is told to write checkpoints more rarely: raise the threshold.",
    then="Its next checkpoint is stored.",
)
@pytest.mark.tier("all")
@in_virtual_time
async def test_checkpoints_that_are_not_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = "IsthmusCheckpointOld"
    fault = Fault(Unavailable("413 EntityTooLarge"), "learners/b/", ("put",), mended=True, after_s=5.0)
    async with fleet() as f, f.syncer("s1"), f.learner("b", w=fault.of(f.w), checkpoint_s=60.0):
        await minutes(3)
        fault.mended = False
        await minutes(18)
        assert "413 EntityTooLarge" in caplog.text
        with folder_of_the_run(tmp_path / "run") as run:
            assert_reaches(follow(name, run, "doctor", capsys)[1])
        fault.mended = True
        await minutes(3)
        ends(f.recording, tmp_path, name)


# --- a healthy run ----------------------------------------------------------------------------------------------------


@pytest.mark.tier("all")
@in_virtual_time
async def test_no_alarm_while_learners_and_syncers_are_killed_and_come_back(tmp_path: Path) -> None:
    async with fleet(Rules(fragments=4, sync_every=4)) as f:

        async def lives(job: str, name: str, every: float) -> None:
            while True:
                async with f.syncer(name, killed=True) if job == "syncer" else f.learner(name, checkpoint_s=30.0):
                    await minutes(every)
                f.recording.up[job, name] = None
                await asyncio.sleep(20.0)

        tasks = [
            asyncio.ensure_future(lives("syncer" if name[0] == "s" else "learner", name, every))
            # Of a learner that restarts three times in 15 minutes, IsthmusLearnerRestarts rings with reason.
            for name, every in {"s1": 7.0, "s2": 11.0, "a": 8.0, "b": 9.0, "c": 12.0, "d": 60.0}.items()
        ]
        await minutes(40)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        fired = set().union(*f.recording.firing(tmp_path))
        assert not fired
