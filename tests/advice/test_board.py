"""What the board warns of, and what comes of its advice. What `isthmus status` says, too, is in test_status*.py."""

import asyncio
import contextlib
import itertools
import math
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from advice.doctors import ACCEPT
from advice.followed import advises, command_in, commands_in, isthmus, mine, says
from advice.lives import FEW, PACE, Fault, command, finished, training
from advice.rows import A_GAP, Row, pattern, row
from advice.test_alerts import Deaf
from isthmus.errors import Denied, Unavailable
from isthmus.format.records.keys import RUN_KEY, commit_key
from isthmus.format.records.messages import encode, learner_stream
from isthmus.format.rules import Rules
from isthmus.inspect import live as live_
from isthmus_services.board import feed
from isthmus_services.board.history import warnings
from isthmus_services.board.history.time_views import loss_curves
from isthmus_services.board.server import STATIC
from isthmus_services.servers import free_ports
from support.boards import a_board, ask
from support.signed import announced
from support.world import World, newest_commit, seed_of, serving, train, until, world


async def state(url: str, until_: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """Ask a board for its state until a condition holds; return it. Raises `AssertionError`."""
    for _ in range(200):
        found: dict[str, Any] = await ask(url, "state")
        if until_(found):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"never: {what}: {found['trouble']} {found['warnings']}")


def warned(here: Row, found: dict[str, Any]) -> str:
    """Return the advice of the warning that has a row's sentence; empty if there is none."""
    (do,) = [w["do"] for w in found["warnings"] if pattern(here.said).match(w["said"])] or [""]
    return str(do)


async def warns(here: Row, url: str) -> str:
    """Wait until a board has the warning of a row, with its advice; return the advice."""
    do = warned(here, await state(url, lambda found: bool(warned(here, found)), here.said))
    advises(here, f"{here.said} {do}")
    return do


async def quiet(here: Row, url: str) -> None:
    """Wait until a board no longer has the warning of a row."""
    await state(url, lambda found: not warned(here, found), f"quiet about {here.said}")


@row(
    "board",
    "… of … learners merge; …",
    means="What `isthmus status` says of the run's processes and its log: the part above has a row for each sentence.",
    do="isthmus syncer … --bus …",
    then="The warning goes away.",
    like="Each problem is a warning of its own, with the command for it.",
    lost="what the row of that sentence says",
)
@row(
    "board",
    "no learner trains: … of … learners stopped; …",
    means="Some learners have left before their last step.",
    do="unless the run is to end here, start what stopped again: each learner goes on from its checkpoint",
    then="With learners that train again, the warning goes away.",
)
async def test_what_status_says(folder: Path) -> None:
    merge, over = mine(test_what_status_says)
    async with world(folder, FEW) as w, a_board(w.log, w) as (url, _):
        async with training(w.learner("a")):
            do = await warns(merge, url)
            async with command(folder.parent, *command_in(do, "syncer")):
                await quiet(merge, url)
        async with serving(w.syncer("s2")):
            await train(w.learner("a"), 10, done=False)
            await warns(over, url)
            async with training(w.learner("a")):
                await quiet(over, url)


@row(
    "board",
    "the log of fragment … cannot be read beyond version …: …",
    means="A commit is damaged or missing. The board shows the fragment up to there, and the others whole. With `its newest "
    "is …` later commits are there: if status says `the run goes on`, only the board and a replay need what is missing.",
    do="isthmus heal … --fragment … says what can be done, isthmus replay … --fragment … what is damaged",
    then="With the object restored from a backup, the board reads on within seconds.",
    lost="without a backup: what `isthmus heal` says, and the board's view of the fragment after that version",
)
async def test_a_commit_that_is_damaged(folder: Path) -> None:
    (here,) = mine(test_a_commit_that_is_damaged)
    async with world(folder, FEW) as w:
        await finished(w)
        path = folder / commit_key(1, 3)
        kept = path.read_bytes()
        path.write_bytes(kept[:-9])
        async with a_board(w.log, w) as (url, _):
            do = await warns(here, url)
            for words in commands_in(do):
                code, told = await isthmus(*words)
                assert (code, commit_key(1, 3) in told) == (1, True), told
            path.write_bytes(kept)
            await quiet(here, url)


@row(
    "board",
    "the history of fragment … was replaced: the store has other commits than were read before",
    means="The store has another commit where the board had read one (`another history`). The board's log says it once, its "
    "page for ten minutes, and the board reads the log anew.",
    do="nothing, if a commit was deleted as isthmus heal advises, or a backup was restored: the board shows the new history. "
    "Else somebody rewrites the log: SECURITY.md says how two histories are found",
    then="The board goes on with the new history.",
    lost="what the deleted commits had merged",
)
@row(
    "heal",
    "fragment …, at version …, cannot be folded beyond version …: commits/…: follows commit …, the commit before it is …: another "
    "history",
    means="Commits of two histories stand in one log: one was deleted and made anew, and then a backup of the old one restored.",
    do="--apply restarts it from version … as published",
    then="`healed: version … restarts from version … as published`. Or put the newer commit back, and nothing is lost.",
    lost="the fragment's momentum; a replay cannot verify the versions in between",
)
async def test_a_history_that_was_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, mixed = mine(test_a_history_that_was_replaced)
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s0"), killed=True) as syncer:
            await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= 4)
        async with a_board(w.log, w) as (url, feed):
            end = feed.history.ends[0].version
            path = folder / commit_key(0, end)
            old = path.read_bytes()
            path.write_bytes(b"no commit")
            code, told = await isthmus("heal", w.run.url)
            assert (code, f"delete {path}" in " ".join(told.split())) == (1, True), told
            path.unlink()
            async with serving(w.syncer("s9"), killed=True) as syncer, training(w.learner("z")):
                await until(lambda: feed.history.ends[0].version > end + 2, "the board goes on")
                await warns(here, url)
                assert "another history" not in str(await ask(url, "state"))
            assert caplog.text.count("the log is read anew") == 1
        path.write_bytes(old)
        code, told = await isthmus("heal", w.run.url)
        assert code == 1
        advises(mixed, told)
        assert (await isthmus("heal", w.run.url, "--apply"))[0] == 0


async def test_a_fragment_behind_a_hole_is_not_called_stuck(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The board cannot read past the hole. Both fragments would be stuck, if no time without a merge was allowed."""
    monkeypatch.setattr(warnings, "STUCK_LEAST_S", 0.0)
    monkeypatch.setattr(warnings, "STUCK_PERIODS", 0.0)
    async with world(folder, FEW) as w:
        await finished(w)
        (folder / commit_key(1, 3)).unlink()
        async with serving(w.syncer("s2")), training(w.learner("a")), a_board(w.log, w) as (url, _):
            found = await state(url, lambda found: "was not merged" in str(found["warnings"]), "a fragment is stuck")
            said = [w["said"] for w in found["warnings"]]
            assert [words.partition(" was not")[0] for words in said if "was not merged" in words] == ["fragment 0"]
            assert any("fragment 1 cannot be read beyond version 2 (its newest is " in words for words in said)


@row(
    "board",
    "… has a hole in its history (the run goes on): …",
    means="A commit or a value from before the newest snapshot is missing or damaged, as `isthmus status` says it. The board "
    "looks once a minute, also for damage of what it has read before.",
    do=ACCEPT,
    then="With the object restored from a backup, the warning goes away within a minute or two.",
    lost="without a backup: the proof of the versions before the snapshot, and nothing of the model",
)
@pytest.mark.parametrize("heard", [True, False], ids=["with its bus", "without"])
async def test_damage_of_older_commits_that_were_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    (here,) = mine(test_damage_of_older_commits_that_were_read)
    monkeypatch.setattr(live_, "INSPECT_EVERY_S", 0.2)
    async with world(folder, FEW) as w:
        await finished(w)
        async with a_board(w.log, w if heard else None) as (url, _):
            await state(url, lambda found: not found["warnings"], "it has read all")
            path = folder / commit_key(1, 3)
            kept = path.read_bytes()
            path.unlink()
            code, told = await isthmus(*command_in(await warns(here, url), "heal"))
            assert (code, commit_key(1, 3) in told) == (1, True), told
            path.write_bytes(kept)
            await quiet(here, url)


@pytest.mark.parametrize("gone", [True, False], ids=["missing", "damaged"])
async def test_a_hole_that_is_accepted_is_passed_over(folder: Path, gone: bool) -> None:
    """The board that heal advises shows the fragment to its end, also from its cache, and warns of nothing."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    url = f"http://{address}"
    async with world(folder, FEW) as w:
        await finished(w)
        head = (await newest_commit(w, 0)).version
        (path := folder / commit_key(0, 3)).unlink()
        if not gone:
            path.write_bytes(b"garbage")
        words = command_in((await isthmus("heal", w.run.url))[1], "board")
        assert words[-2:] == ["--accept-hole", "0/3"]
        for _ in range(2):
            async with command(folder.parent, *words, "--bus", w.bus.url, "--http", address):
                await answers(url)
                found = await state(url, lambda found: found["totals"]["versions"][0] == head, "all of it is shown")
                assert (found["warnings"], found["totals"]["commits"]) == ([], sum(found["totals"]["versions"]) - 1)
        (folder / commit_key(0, 4)).unlink()
        async with command(folder.parent, *words, "--bus", w.bus.url, "--http", address, "--cache", f"{folder}/new"):
            await answers(url)
            another = commit_key(0, 4)
            await state(url, lambda found: any(another in w["said"] for w in found["warnings"]), "it is said")


async def answers(url: str) -> None:
    """Wait until a board in a process of its own answers."""
    for _ in range(100):
        with contextlib.suppress(aiohttp.ClientError):
            await ask(url, "state")
            return
        await asyncio.sleep(0.1)
    raise AssertionError("no answer")


@row(
    "board",
    "… of the last … rounds missed their quorum and merged what was in",
    means="Most rounds closed with fewer learners than `--quorum` asks for, after waiting as long as they may.",
    do="the learners' page says which learners are missing: start them again, or start the syncers again with --quorum K, "
    "where K is at most the number of learners",
    then="New rounds meet the quorum; the warning goes away once they are the half of the last fifty.",
    lost="nothing of what was sent in time; rounds take longer",
)
async def test_rounds_without_their_quorum(folder: Path) -> None:
    (here,) = mine(test_rounds_without_their_quorum)
    pace = msgspec.structs.replace(PACE, quorum=2)
    async with (
        world(folder, seed_of(Rules(fragments=2, sync_every=4), pace)) as w,
        training(w.learner("a")),
        training(w.learner("slow"), step_s=5.0),
        a_board(w.log, w) as (url, _),
    ):
        async with serving(w.syncer("s1")):
            await warns(here, url)
        async with serving(w.syncer("s1", msgspec.structs.replace(pace, quorum=1))):
            await quiet(here, url)


@row(
    "board",
    "… updates were rejected in the last … rounds, by reason: …",
    means="In the last fifty rounds, more than half as many updates were rejected. The reasons are in the sentence.",
    do="their work is lost. The list of these rounds is linked, and isthmus explain … FRAGMENT/VERSION explains the "
    "rejections of each; the learners' page shows whose they are",
    then="`isthmus explain` names the learner and explains the reason. Once the cause has gone, the warning ends after fifty "
    "rounds.",
    lost="the work in these updates",
)
@row(
    "board",
    "…: … updates were rejected, … merged",
    means="Almost a third of this learner's updates or more were rejected since the run began.",
    do="its page lists its updates, each with the reason: its log says what to do about it",
    then="The learner's page counts its rejections by reason. The warning stays, since it counts from the start.",
    lost="the work in these updates",
)
async def test_updates_that_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, learner = mine(test_updates_that_are_rejected)
    monkeypatch.setattr(warnings, "RECENT", 10)

    async def announce(w: World) -> None:
        """Announce updates under keys that are none, as another program would."""
        for base in itertools.count():
            said = announced(w, "wild", f"updates/00000/wild/{base}", f"{base}".encode())
            await w.bus.append(learner_stream("wild"), encode(said))
            await asyncio.sleep(0.02)

    async with (
        world(folder, FEW) as w, serving(w.syncer("s1")), a_board(w.log, w) as (url, _), training(w.learner("a")),
    ):  # fmt: skip
        strange = asyncio.ensure_future(announce(w))
        do = await warns(rounds, url)
        assert f"isthmus explain {w.run.url} FRAGMENT/VERSION" in do
        told = ""
        for one in (await ask(url, "commits?only=rejected"))["commits"]:
            if "rejected: wild" not in told:
                code, told = await isthmus("explain", w.run.url, f"{one['fragment']}/{one['version']}")
                assert code == 0, told
        assert "rejected: wild" in told
        assert "malformed" in told
        await warns(learner, url)
        assert "malformed" in str(await ask(url, "learner/wild"))
        strange.cancel()
        await quiet(rounds, url)


@row(
    "board",
    "… not merged for over … s (usual: … s)",
    means="Learners train, and this fragment had no commit for ten times as long as usual, and at least half a minute.",
    do="the fragment's page shows which learners its round waits for. isthmus status … says whether a syncer serves it",
    then="Its commits go on.",
    lost="what learners train of the fragment meanwhile",
)
@row(
    "board",
    "… stands still: most others were merged at least 8 times since then",
    means="The same, when no learner trains any more: this fragment was left behind when the run ended.",
    do="the syncers' logs say why, and isthmus heal … says whether the log is sound; if they say nothing, no learner lives for a "
    "period (the table of fragments has it, in steps), after which it sends a fragment",
    then="`isthmus heal` calls it sound, or names what is damaged. Once learners train again and the cause has gone, it moves.",
    lost="what learners trained of the fragment",
)
async def test_a_fragment_that_is_not_merged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, stands = mine(test_a_fragment_that_is_not_merged)
    monkeypatch.setattr(warnings, "STUCK_LEAST_S", 1.0)
    monkeypatch.setattr(warnings, "STUCK_PERIODS", 2.0)
    # Where most fragments are stuck, none is left behind by most others.
    fault = Fault(
        Unavailable("503 SlowDown"), ("values/00000/", "values/00001/", "values/00002/"), ("put",), mended=True
    )
    async with (
        world(folder, seed_of(Rules(fragments=4, sync_every=4), PACE)) as w,
        serving(fault.of(w).syncer("s1")) as syncer,
        a_board(w.log, w) as (url, _),
    ):
        async with training(w.learner("a")) as done:
            await until(lambda: min(k.head for k in syncer.coordinators) >= 2, "all fragments move")
            fault.mended = False
            do = await warns(stuck, url)
            assert "syncer s1: alive" in (await isthmus(*command_in(do, "status")))[1]
            fault.prefix = "values/00000/"
            await until(
                lambda: min(k.head for k in syncer.coordinators[1:]) > syncer.coordinators[0].head + 16, "one stands"
            )
            done.set()
        do = await warns(stands, url)
        code, told = await isthmus(*command_in(do, "heal"))
        assert (code, "4 sound" in told) == (0, True), told
        fault.mended = True
        async with training(w.learner("a")):
            await quiet(stuck, url)
            await quiet(stands, url)


@row(
    "board",
    "the store has not answered for … s",
    means="This machine gets no answer from the store. The page shows what was known before.",
    do="check that … is reachable from here",
    then="The line goes away, and the page goes on.",
    lost="nothing, if only this machine is cut off; else " + A_GAP,
)
@row(
    "board",
    "the bus has not answered for … s",
    means="This machine gets no answer from the bus: who is there now is not known. The log is still read.",
    do="check that … is reachable from here",
    then="The line goes away, and the page shows who is there.",
    lost="nothing, if only this machine is cut off; else " + A_GAP,
)
@row(
    "board",
    "reading the log is denied: …",
    means="The board's credentials have expired, or lack the right to read.",
    do="renew the credentials, or grant the role reader: `isthmus doctor RUN --role reader` names what is missing",
    then="The line goes away by itself.",
)
async def test_store_and_bus_that_are_away(folder: Path) -> None:
    store, bus, denied = mine(test_store_and_bus_that_are_away)
    away, refused = Fault(Unavailable("refused"), mended=True), Fault(Denied("403: the token has expired"), mended=True)
    async with world(folder, FEW) as w:
        deaf = Deaf(w.bus)
        seen = replace(refused.of(away.of(w)), bus=deaf)
        async with serving(w.syncer("s1")), training(w.learner("a")), a_board(seen.log, seen) as (url, _):

            async def trouble(here: Row) -> None:
                found = await state(url, lambda found: says(here, found["trouble"]), here.said)
                if here is not denied:
                    advises(here, found["trouble"])
                assert not [w for w in found["warnings"] if "is unknown" in w["said"]], "the trouble is said once"
                assert found["trouble"].count("check that") == (here is not denied)

            deaf.mended = False
            await trouble(bus)
            deaf.mended = True
            await state(url, lambda found: found["trouble"] == "", "the bus is back")
            away.mended = False
            await trouble(store)
            away.mended = True
            await state(url, lambda found: found["trouble"] == "", "store and bus are back")
            refused.mended = False
            await trouble(denied)
            code, told = await isthmus("doctor", w.run.url, "--role", "reader")
            assert code == 0, told
            refused.mended = True
            await state(url, lambda found: found["trouble"] == "", "the credentials are renewed")


@row(
    "board",
    "the run object … is gone",
    means="The object `run` of this run is not in the store any more: it was deleted, or the bucket was emptied.",
    do="end no syncer, as one that runs writes it again within a minute (in a signed run few may, and its log says so); else run the same `isthmus create` again if that made the run, or restore it from a backup: no process "
    "can start without it",
    then="The line goes away.",
    lost="without a backup or a syncer that may write it: the run, except what `isthmus follow` or an export brought elsewhere",
)
async def test_a_run_object_that_is_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here,) = mine(test_a_run_object_that_is_gone)
    monkeypatch.setattr(feed, "PROBE_S", 0.2)
    async with world(folder, FEW) as w, a_board(w.log, w) as (url, _):
        (folder / RUN_KEY).rename(folder / "backup")
        advises(here, (await state(url, lambda found: says(here, found["trouble"]), here.said))["trouble"])
        (folder / "backup").rename(folder / RUN_KEY)
        await state(url, lambda found: found["trouble"] == "", "it is back")


@row(
    "board",
    "the loss of … rises: … or more in its newest updates, … at its lowest",
    means="Up to the moment shown, or the end of a run without a bus, the learner's newest merged updates stated losses "
    "well above the lowest level that it had reached.",
    like="A learner whose data or schedule changed on purpose, as at the start of another stage of training.",
    do="the chart of losses shows since when: look at its data of that time, or start it again with a lower learning rate. "
    "isthmus replay … draws all losses, too",
    then="`isthmus replay` has a curve of each learner's loss. The warning goes away once some of its newest updates are "
    "low again.",
)
async def test_a_loss_that_rose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here,) = mine(test_a_loss_that_rose)
    monkeypatch.setattr(feed, "LOOK_S", 0.2)
    async with world(folder, FEW) as w, serving(w.syncer("s1")), a_board(w.log) as (url, fed):
        steps = iter(range(10**9))
        now: float | None = None
        async with training(w.learner("a"), loss=lambda: 1.0 + 9.0 / (1 + next(steps)) if now is None else now):
            await until(lambda: len(loss_curves(fed.history, math.inf).get("a", ())) > 20, "it learns")
            now = 4.0
            (command_,) = commands_in(await warns(here, url))
            code, told = await isthmus(*command_)
            assert (code, "rises" in told) == (0, True), told
            now = 0.9
            await quiet(here, url)


async def test_a_learner_that_was_killed_is_named_while_others_merge(folder: Path) -> None:
    async with (
        world(folder, FEW) as w, serving(w.syncer("s1")), training(w.learner("a")), a_board(w.log, w) as (url, _),
    ):  # fmt: skip
        async with training(w.learner("b")):
            await state(url, lambda found: found["sentence"].startswith("2 of 2"), "both train")
        said = "no messages come from b: it was killed or is cut off"
        found = await state(url, lambda found: any(said in w["said"] for w in found["warnings"]), "b is named")
        (do,) = [w["do"] for w in found["warnings"] if said in w["said"]]
        assert "start it again under its name" in do


@row(
    "board",
    "no bus is read: who is there now, and what learners say of themselves, is not known",
    means="The board was started without a bus, and there is none beside the run.",
    do="isthmus board RUN --bus URL",
    then="The page shows who is there.",
)
@row(
    "board",
    "the board does not answer: is `isthmus board` still running?",
    means="The browser gets no answer from the board: it was ended, or its machine is away.",
    like="With `the board has not answered since …` the page still shows what it had, and tries again.",
    do="start `isthmus board` again, at the same address (--http), and reload the page",
    then="The page is back.",
)
async def test_a_board_that_is_gone(folder: Path, tmp_path: Path) -> None:
    unheard, gone = mine(test_a_board_that_is_gone)
    assert says(gone, (STATIC / "api.js").read_text())
    address = f"127.0.0.1:{free_ports(1)[0]}"

    def page() -> str:
        with urllib.request.urlopen(f"http://{address}/api/state", timeout=5.0) as answer:
            return str(answer.read())

    async def shown() -> str:
        for _ in range(100):
            try:
                return await asyncio.to_thread(page)
            except OSError:
                await asyncio.sleep(0.1)
        raise AssertionError("never shown")

    async with world(folder, FEW) as w:
        await finished(w, 2)
    (bus := folder / "bus.sqlite").rename(tmp_path / "bus.sqlite")
    async with command(tmp_path, "board", str(folder), "--http", address):
        assert says(unheard, await shown())
    with pytest.raises(urllib.error.URLError):
        page()
    async with command(tmp_path, "board", str(folder), "--bus", f"sqlite://{tmp_path}/bus.sqlite", "--http", address):
        assert not says(unheard, await shown())
    assert not bus.exists()
