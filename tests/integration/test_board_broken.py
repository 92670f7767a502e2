"""The board shows as much as it can of an empty, damaged or partly reachable run, with a valid cache or without."""

import asyncio
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from advice.lives import Fault
from isthmus.agent.ports import open_log
from isthmus.bus import IN_STORE, default_bus, open_bus
from isthmus.errors import Denied, Unavailable
from isthmus.format.records.keys import commit_key
from isthmus.format.records.messages import SYNCER_STREAM, Committed, encode
from isthmus.format.rules import Rules
from isthmus.log import gc
from isthmus_services.board.feed import Feed, cache_of, following
from isthmus_services.board.history.history import RunHistory
from isthmus_services.servers import Server, redis_server, s3_server
from support.boards import a_board, a_run, ask
from support.world import QUICK, all_commits, seed_of, serving, train, until, world


async def test_a_run_in_which_nothing_happened_yet_says_so(folder: Path) -> None:
    async with world(folder) as w, a_board(w.log, w) as (url, _):
        state = await ask(url, "state")
        assert state["sentence"] == "Nobody has trained yet."
        assert (state["totals"]["commits"], state["totals"]["versions"]) == (0, [0, 0, 0, 0])
        for question in ("run", "series", "learners", "lanes", "fragments", "commits", "services", "measured", "ledger", "fragment/0"):  # fmt: skip
            await ask(url, question)
        assert (await ask(url, f"state?at={state['begin']:.3f}"))["sentence"] == "Nothing had been merged yet."


async def test_a_log_that_breaks_off_is_shown_up_to_there(folder: Path) -> None:
    async with a_run(folder) as w:
        whole = await all_commits(w.log)
        path = folder / commit_key(1, 2)
        path.write_bytes(path.read_bytes()[:-9])
        async with a_board(w.log) as (url, _):
            state = await ask(url, "state")
            assert state["totals"]["versions"] == [len(whole[0]), 1, len(whole[2])]
            (warning,) = [x for x in state["warnings"] if "cannot be read beyond version 1" in x["said"]]
            assert "isthmus heal" in warning["do"]
            assert (await ask(url, "fragments"))["fragments"][1]["broken"].startswith("commits/00001/")
            assert "not a commit" in (await ask(url, "commit/1/2", 422))["error"]


async def test_of_a_run_that_was_collected_the_log_is_whole_and_old_rounds_cannot_be_asked_what_if(
    folder: Path,
) -> None:
    pace = msgspec.structs.replace(QUICK, snapshot_every=2)
    async with world(folder, seed_of(Rules(fragments=2, sync_every=2), pace)) as w:
        async with serving(w.syncer("s1")) as syncer:
            await train(w.learner("a"), 20, enough=lambda: min(k.head for k in syncer.coordinators) >= 8)
        before = {p: len(commits) for p, commits in (await all_commits(w.log)).items()}
        await gc.apply(w.log, await gc.plan(w.log, keep=2, min_age_s=-60.0))
        async with a_board(w.log, w) as (url, _):
            assert (await ask(url, "state"))["totals"]["versions"] == list(before.values())
            first = await ask(url, "commit/0/1")
            assert first["packed"] is True
            assert "was collected by `isthmus gc`" in (await ask(url, "whatif/0/1?set=merge=avg", 400))["error"]
            newest = await ask(url, f"whatif/0/{before[0]}?set=merge=avg")
            assert newest["recorded"] == ["a"]
            given = first["header"]["inputs"][0]
            assert (await ask(url, f"update/0/{given['learner']}/{given['base']}"))["facts"]["version"] == 1


@pytest.mark.parametrize("harm", ["cut", "empty", "gap"])
async def test_a_newest_commit_that_is_damaged_hides_no_other_fragment(folder: Path, harm: str) -> None:
    async with a_run(folder) as w:
        heads = {p: len(commits) for p, commits in (await all_commits(w.log)).items()}
        path = folder / commit_key(1, heads[1] - (harm == "gap"))
        if harm == "gap":
            path.unlink()
        else:
            path.write_bytes(b"" if harm == "empty" else path.read_bytes()[:-9])
        async with a_board(w.log, w) as (url, feed):
            await until(lambda: 1 in feed.history.broken, "the damage is found")
            state = await ask(url, "state")
            left = heads[1] - 1 - (harm == "gap")
            assert state["totals"]["versions"] == [heads[0], left, heads[2]]
            assert any("fragment 1 cannot be read" in x["said"] for x in state["warnings"])


async def test_a_commit_that_is_damaged_while_it_goes_on_hides_no_other_fragment(folder: Path) -> None:
    async with a_run(folder) as w:
        heads = [len(commits) for commits in (await all_commits(w.log)).values()]
        later = folder / commit_key(2, heads[2])
        blob = later.read_bytes()
        later.unlink()
        async with a_board(w.log, w) as (url, feed):
            bad = folder / commit_key(0, heads[0] + 1)
            bad.write_bytes(b"no commit")
            later.write_bytes(blob)
            for p in (0, 2):
                said = Committed(run=w.run.digest, id="x", syncer="s1", fragment=p, version=heads[p] + (p == 0))
                await w.bus.append(SYNCER_STREAM, encode(said))
            await until(lambda: 0 in feed.history.broken, "the damage is found")
            await until(lambda: feed.history.ends[2].version == heads[2], "another fragment goes on")
            bad.unlink()
            await until(lambda: 0 not in feed.history.broken, "what is mended is not held against it")
            assert (await ask(url, "state"))["totals"]["versions"] == heads


async def test_credentials_that_end_are_said_and_what_fails_for_good_ends_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_run(folder) as w, a_board(w.log, w) as (url, feed):

        async def denied(*_: object) -> None:
            raise Denied("403: the token has expired")

        feed.live.hearing.heads[0] += 1
        with monkeypatch.context() as patch:
            patch.setattr(feed.live._log, "commit", denied)
            await until(lambda: "expired" in feed.live.trouble, "it is noticed")
            assert "reading the log is denied" in (await ask(url, "state"))["trouble"]
        await until(lambda: feed.live.trouble == "", "they are renewed")
        other = Feed(w.log, w.store, w.bus, None)
        await other.begin()
        monkeypatch.setattr(other, "_probe", failing)
        async with following(other) as running:
            await asyncio.wait([running], timeout=20)
            with pytest.raises(ExceptionGroup, match="unhandled"):
                running.result()


async def failing() -> None:
    raise OSError("nobody expected this")


async def test_without_a_bus_it_says_what_is_not_known(folder: Path, tmp_path: Path) -> None:
    async with a_run(folder) as w:
        count = len([c for of in (await all_commits(w.log)).values() for c in of])
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("bus.sqlite*"))
    async with open_log(str(copied)) as log, a_board(log) as (url, _):
        state = await ask(url, "state")
        assert state["sentence"] == f"By its log: {count} commits with {state['totals']['updates']} updates of 2 learners. Who trains now is not known."  # fmt: skip
        assert "no bus is read" in state["trouble"]
        assert all("state" not in r for r in (await ask(url, "learners"))["learners"])
        assert not (copied / "bus.sqlite").exists(), "the board must not create a bus"
    assert default_bus(str(copied)) is not None


async def test_a_store_or_a_bus_that_is_killed_leaves_what_was_known(
    tmp_path: Path, use: Callable[[Server], None]
) -> None:
    with ExitStack() as stack:
        s3 = stack.enter_context(s3_server(tmp_path / "s3"))
        redis = stack.enter_context(redis_server(tmp_path / "redis"))
        ports = [int(server.url.rpartition(":")[2]) for server in (s3, redis)]
        use(s3)
        async with a_run("s3://board/run", bus=redis.url) as w, a_board(w.log, w) as (url, feed):
            before = (await ask(url, "state"))["totals"]
            assert before["commits"] > 0
            s3.kill()
            await until(lambda: "store" in feed.live.trouble, "that the store is away is noticed")
            state = await ask(url, "state")
            assert state["totals"] == {**before, "at": state["totals"]["at"]}
            assert "the store has not answered for" in state["trouble"]
            assert (await ask(url, "commit/0/1", 503))["error"]
            assert (await ask(url, f"state?at={state['end']:.3f}"))["totals"]["updates"] <= before["updates"]
            redis.kill()
            await until(lambda: "bus" in feed.live.trouble, "that the bus is away is noticed")
            assert (await ask(url, "state"))["sentence"].startswith("By its log:")
            stack.enter_context(s3_server(tmp_path / "s3", port=ports[0]))
            stack.enter_context(redis_server(tmp_path / "redis", port=ports[1]))
            await until(lambda: feed.live.trouble == "", "both are back")
            assert (await ask(url, "commit/0/1"))["version"] == 1


async def test_an_outage_of_a_store_that_has_the_bus_is_told_once(folder: Path) -> None:
    away = Fault(Unavailable("refused"), mended=True)
    async with a_run(folder) as w:
        seen = away.of(w)
        async with open_bus(IN_STORE, w.run.digest, seen.store) as bus, a_board(seen.log, replace(seen, bus=bus)) as on:
            url, feed = on
            away.mended = False
            await until(lambda: bool(feed.live.bus_trouble and seen.store.outage.down_s), "both are known to be away")
            told = (await ask(url, "state"))["trouble"]
            said = rf"the store has not answered for \d+ s: check that {folder} is reachable from here"
            assert re.fullmatch(said, told), told
            away.mended = True
            await until(lambda: feed.live.trouble == "", "it is back")


async def test_what_was_read_is_kept_and_only_believed_where_it_fits(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "kept.npz"
    async with a_run(folder) as w:
        async with a_board(w.log, w, cache) as (url, feed):
            first = await ask(url, "state")
        assert cache.exists()
        again = Feed(w.log, w.store, w.bus, cache)
        await again.begin()
        assert len(again.history) == len(feed.history), "the whole history must come from the cache"
        # This log of the same run has another history, so the cache does not belong to it.
        shutil.rmtree(folder / "commits" / "00001")
        other = Feed(w.log, w.store, w.bus, cache)
        await other.begin()
        assert len(other.history) == 0
        cache.write_bytes(b"nonsense")
        async with a_board(w.log, w, cache) as (url, _):
            state = await ask(url, "state")
            assert state["totals"]["versions"][0] == first["totals"]["versions"][0]
    assert isinstance(RunHistory.load(w.run, cache), RunHistory), "the cache must be written anew"


async def test_a_cache_that_cannot_be_written_stops_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with a_run(folder, ("a",)) as w, a_board(w.log, None, tmp_path / "file" / "kept.npz") as (url, _):
        assert (await ask(url, "state"))["totals"]["commits"] > 0


def test_the_cache_is_beside_a_run_in_a_folder_and_else_among_this_users(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    digest = bytes(range(32))
    folder.mkdir()
    assert cache_of(str(folder), digest, None) == folder / ".board" / "0001020304050607.npz"
    assert cache_of("s3://bucket/run", digest, None) == tmp_path / "xdg" / "isthmus" / "board" / "0001020304050607.npz"
    assert cache_of(str(folder), digest, str(tmp_path)) == tmp_path / "0001020304050607.npz"
