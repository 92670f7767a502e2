"""The board's answers over HTTP: what the fold and `status` say, to whom they are given, and of runs that are not whole."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from isthmus.bus import default_bus
from isthmus.errors import Denied, InputError
from isthmus.forecast.prices import Prices
from isthmus.log import Log, evaluations, gc, membership
from isthmus.log.membership import Members
from isthmus.ports import open_log
from isthmus.readers import whatif
from isthmus.readers.chronicle import Chronicle
from isthmus.readers.export import versions_at
from isthmus.readers.status import read_status
from isthmus.records.keys import commit_key
from isthmus.records.messages import SYNCER_STREAM, Committed, Leave, encode, learner_stream
from isthmus.records.objects import MemberSpec
from isthmus.rules import MemberRole, Rules
from isthmus.signing.keys import new_signer
from isthmus_services.board.accounts import Costs
from isthmus_services.board.api import Api
from isthmus_services.board.export import key_of, write
from isthmus_services.board.feed import Feed, cache_of, following
from isthmus_services.board.server import COOKIE, HEADERS, served
from isthmus_services.servers import Server, redis_server, s3_server
from isthmus_services.settings.prices import prices_of
from tests_helpers import QUICK, World, all_commits, seed_of, serving, train, until, world

HOSTILE = "x'y&lt;img_src=x_onerror=alert(1)&gt;"
ONE = "127.0.0.1:0"


def costs() -> Costs:
    prices: Prices = prices_of(None, None, [])
    return Costs(prices, 8.0, "")


@asynccontextmanager
async def a_board(
    log: Log, w: World | None = None, cache: Path | None = None, token: str | None = None, follow: bool = True
) -> AsyncIterator[tuple[str, Feed]]:
    """Serve the board of a run; with a world, listen to its bus."""
    feed = Feed(log, log.store, w.bus if w else None, cache)  # type: ignore[arg-type]
    await feed.begin()
    async with served(feed, Api(feed, costs()), ONE, token) as url:
        base = url.split("?")[0].rstrip("/")
        if not follow:
            yield base, feed
            return
        async with following(feed):
            await until(lambda: not feed.reading, "the log was read")
            yield base, feed


@asynccontextmanager
async def a_run(
    place: Path | str, learners: tuple[str, ...] = ("a", "b"), steps: int = 30, bus: str | None = None
) -> AsyncIterator[World]:
    """A run whose learners are done."""
    async with world(place, seed_of(Rules(fragments=3, sync_every=3)), bus) as w:
        async with serving(w.syncer("s1")) as syncer:
            await asyncio.gather(
                *(train(w.learner(n), steps, enough=lambda: min(k.head for k in syncer.keepers) >= 4) for n in learners)
            )
        yield w


async def ask(url: str, question: str, status: int = 200, **more: Any) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/api/{question}", **more) as answer:
        body = await answer.json()
        assert answer.status == status, body
        return body


# --- what it says -----------------------------------------------------------------------------------------------------


async def test_totals_are_those_of_the_log_at_any_time(folder: Path) -> None:
    async with a_run(folder) as w, a_board(w.log) as (url, _):
        headers = sorted(
            (c.header for of in (await all_commits(w.log)).values() for c in of), key=lambda h: h.written_at
        )
        times = [h.written_at for h in headers[:: max(1, len(headers) // 7)]] + [headers[-1].written_at + 1.0]
        for at in times:
            state = await ask(url, f"state?at={at:.6f}")
            then = [h for h in headers if h.written_at <= round(at, 6)]
            totals = state["totals"]
            assert totals["commits"] == len(then)
            assert totals["updates"] == sum(len(h.inputs) for h in then)
            assert totals["bytes_up"] == sum(i.bytes for h in then for i in h.inputs)
            assert totals["versions"] == await versions_at(w.log, time=round(at, 6))
            shares = [f.size / w.run.layout.size for f in w.run.layout.fragments]
            tokens = sum(i.tokens * shares[h.fragment] for h in then for i in h.inputs)
            assert totals["tokens"] == pytest.approx(tokens, abs=1.0)
            assert state["past"] is True
            assert totals["closed_by"] == {
                k: n for k in sorted({h.waited.closed_by for h in headers})
                if (n := sum(h.waited.closed_by == k for h in then))
            }  # fmt: skip


async def test_of_a_live_run_it_says_what_status_says(folder: Path) -> None:
    async with world(folder, seed_of(Rules(fragments=3, sync_every=3))) as w, serving(w.syncer("s1")) as syncer:
        done = False
        trainings = [asyncio.ensure_future(train(w.learner(n), 1, enough=lambda: done)) for n in ("a", "b")]
        async with a_board(w.log, w) as (url, feed):
            await until(lambda: min(k.head for k in syncer.keepers) >= 2, "two versions of each")
            await until(lambda: len(feed.live.status().live) == 2, "both are heard")
            before = await ask(url, "state")
            status = await read_status(w.log, w.bus, w.runtime, 0.5)
            await until(
                lambda: len(feed.chronicle) >= sum(c.version for c in status.heads if c), "the board has read it"
            )
            later = await ask(url, "state")
            versions = [c.version if c else 0 for c in status.heads]
            assert all(a <= v <= b for a, v, b in zip(before["totals"]["versions"], versions, later["totals"]["versions"], strict=True))  # fmt: skip
            assert re.match(r"2 of 2 learners train(, fragment \d waits for .*)?\.", later["sentence"]), later[
                "sentence"
            ]
            rows = {r["learner"]: r for r in (await ask(url, "learners"))["learners"]}
            assert rows.keys() == {"a", "b"}
            assert all(re.fullmatch(r"training|\d+ versions behind, fetching", r["state"]) for r in rows.values())
            assert all(r["said"]["loss"] == 1.0 for r in rows.values())
            (alive,) = (await ask(url, "services"))["alive"]
            assert (alive["syncer"], alive["live"]) == ("s1", True)
            done = True
            await asyncio.gather(*trainings)
            await until(lambda: not feed.live.status().live, "both have left")
            status = await read_status(w.log, w.bus, w.runtime, 0.5)
            await until(
                lambda: len(feed.chronicle) == sum(c.version for c in status.heads if c), "it has read the rest"
            )
            state = await ask(url, "state")
            assert state["totals"]["versions"] == [c.version if c else 0 for c in status.heads]
            assert state["sentence"] == "Nobody trains: 2 of 2 learners are done."
            said = {v.name: v.heartbeat for v in status.hearing.learners.values()}
            for row in (await ask(url, "learners"))["learners"]:
                beat = said[row["learner"]]
                assert beat is not None
                assert (row["said"]["step"], row["said"]["bytes_up"], row["said"]["bytes_down"]) == (
                    beat.step, beat.bytes_up, beat.bytes_down
                )  # fmt: skip
                assert row["said"]["merged"] == beat.ledger.merged
            rejected = {r["reason"]: r["times"] for r in state["reasons"]}
            assert rejected.keys() <= status.rejected.keys()


async def test_one_round_under_other_rules_is_what_the_fold_says(folder: Path) -> None:
    async with a_run(folder) as w, a_board(w.log) as (url, _):
        same = await ask(url, "whatif/1/1?set=quorum=1")
        assert same["recorded"] == same["other"]
        assert same["difference"] == 0.0
        other = await ask(url, "whatif/1/1?set=merge=avg&set=outer.lr=0.1")
        whole = await whatif.what_if(w.log, whatif.parse(["merge=avg", "outer.lr=0.1"]), fragments=[1], last=1)
        (row,) = whole.rows
        assert other["difference"] == pytest.approx(row.difference, rel=1e-12)
        assert other["step"] == pytest.approx(row.way, rel=1e-12)
        assert other["cosine"] == pytest.approx(row.cosine, rel=1e-9)
        assert other["difference"] > 0.0
        alone = await ask(url, "whatif/1/2?set=grace=0&set=quorum=1")
        assert set(alone["other"]) <= set(alone["recorded"])
        for question, said in (
            ("whatif/1/2?set=codec=int8", "cannot be changed afterwards"), ("whatif/1/999?set=quorum=1", "no commit 1/999"),
            ("whatif/7/1?set=quorum=1", "no fragment 7"), ("whatif/1/2?set=quorum=0", "quorum"),
        ):  # fmt: skip
            assert said in (await ask(url, question, 400))["error"]


async def test_a_commit_and_its_updates_link_to_each_other(folder: Path) -> None:
    async with a_run(folder) as w, a_board(w.log) as (url, _):
        commit = await ask(url, "commit/2/2")
        assert commit["lines"][0].startswith("commits/00002/000000000002: version 2 of fragment 2, by s1")
        given = commit["header"]["inputs"][0]
        update = await ask(url, f"update/2/{given['learner']}/{given['base']}")
        assert update["facts"]["version"] == 2
        marks = [m["what"] for m in commit["round"]["marks"]]
        assert marks[0] == "boundary"
        assert {"opened", "closed", "merged", "written"} <= set(marks)
        story = await ask(url, f"learner/{given['learner']}")
        assert any((x["fragment"], x["version"], x["fate"]) == (2, 2, "merged") for x in story["story"])
        listed = await ask(url, "commits?fragment=2")
        assert listed["total"] == len((await all_commits(w.log))[2])
        assert (await ask(url, "fragment/2"))["total"] == listed["total"]


async def test_lines_and_lanes_add_up_to_the_totals(folder: Path) -> None:
    async with a_run(folder) as w, a_board(w.log) as (url, _):
        totals = (await ask(url, "state"))["totals"]
        lines = (await ask(url, "series"))["log"]
        assert sum(lines["commits"]) == totals["commits"]
        assert sum(lines["updates"]) == totals["updates"]
        assert sum(lines["tokens_per_s"]) * lines["seconds"] == pytest.approx(totals["tokens"], abs=1.0)
        lanes = await ask(url, "lanes")
        assert sum(sum(lane["merged"]) for lane in lanes["learners"]) == totals["updates"]
        assert sum(p["what"] == "merged" for p in lanes["pieces"]) == totals["updates"]
        heat = await ask(url, "fragments")
        assert [sum(f["made"]) for f in heat["fragments"]] == [f["version"] for f in heat["fragments"]]
        assert sum(sum(f["inputs"]) for f in heat["fragments"]) == totals["updates"]


async def test_what_followers_measured_and_where_tokens_went_is_there(folder: Path) -> None:
    async with a_run(folder) as w:
        await evaluations.note(w.log, "held_out", 3, 2.25)
        async with a_board(w.log) as (url, _):
            measured = await ask(url, "measured")
            assert [p[1:] for p in measured["series"]["held_out"]] == [[3, 2.25]]
            assert (await ask(url, "ledger"))["why"] == ""
            cost = (await ask(url, "state"))["cost"]
            assert cost["usd"] == pytest.approx(sum(cost["parts"].values()))
            assert cost["parts"]["gpus"] == pytest.approx(cost["learner_hours"] * 8 * 2.5)
            moved = (await ask(url, "state"))["bytes"]
            assert moved["merged_planned"] <= moved["merged"] < 2 * moved["merged_planned"] + 1e6


async def test_the_reference_names_every_question_and_every_field(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "board.md").read_text().partition("| question | answer |")[2]
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, re.M))
    async with a_run(folder) as w, a_board(w.log, w) as (url, feed):
        api = Api(feed, costs())
        given = (await ask(url, "commit/0/1"))["header"]["inputs"][0]
        asked = {
            "learner/NAME": f"learner/{given['learner']}", "fragment/P": "fragment/0", "commit/P/V": "commit/0/1",
            "update/P/LEARNER/BASE": f"update/0/{given['learner']}/{given['base']}",
            "whatif/P/V": "whatif/0/1?set=quorum=1", **{name: name for name in api.questions},
        }  # fmt: skip
        assert rows.keys() == asked.keys() | {"events"}
        for name, question in asked.items():
            words = set(re.findall(r"`([^`]+)`", rows[name]))
            answer = await ask(url, question)
            found = set(answer)
            for key, value in answer.items():
                # Rows of a list, and what is in groups, where the reference says it of this question.
                if isinstance(value, list) and value and isinstance(value[0], dict) and f"`{key}` [" in rows[name]:
                    found |= set(value[0])
                elif isinstance(value, dict) and f"`{key}` (" in rows[name]:
                    found |= set(value)
            found -= {"closed_by"} if name == "state" else set()
            assert found <= words | {"format"}, (name, sorted(found - words))


async def test_a_signed_run_is_shown_and_what_nobody_may_say_is_not(folder: Path) -> None:
    owner, sync, eu, evil = (new_signer() for _ in range(4))
    async with world(folder, replace(seed_of(Rules(fragments=2, sync_every=2)), signer=owner)) as w:
        members = [MemberSpec("eu", MemberRole.LEARNER, eu.author), MemberSpec("s1", MemberRole.SYNCER, sync.author)]
        await membership.write(w.store, Members(w.run), owner, members, [0, 0], w.runtime.wall())
        async with serving(w.by(sync).syncer("s1")) as syncer:
            await train(w.by(eu).learner("eu"), 20, enough=lambda: min(k.head for k in syncer.keepers) >= 3)
        lie = Leave(run=w.run.digest, id="x", learner="nobody", incarnation=1, step=7, done=True)
        await w.bus.append(learner_stream("nobody"), encode(lie, signer=evil))
        log = w.log
        await log.members.refresh(w.store)
        async with a_board(log, w) as (url, _):
            assert (await ask(url, "run"))["signed"] is True
            assert [r["learner"] for r in (await ask(url, "learners"))["learners"]] == ["eu"]
            assert (await ask(url, "state"))["sentence"] == "Nobody trains: 1 of 1 learners are done."
            assert "signed by s1's key" in " ".join((await ask(url, "commit/0/1"))["lines"])


# --- streams ----------------------------------------------------------------------------------------------------------


async def events(url: str, count: int, last: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return the first events of a stream: id and state."""
    found: list[tuple[str, dict[str, Any]]] = []
    headers = {"Last-Event-ID": last} if last else {}
    async with aiohttp.ClientSession() as session, session.get(f"{url}/api/events", headers=headers) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        number = ""
        async for line in answer.content:
            if line.startswith(b"id: "):
                number = line[4:].decode().strip()
            elif line.startswith(b"data: "):
                found.append((number, json.loads(line[6:])))
                if len(found) == count:
                    return found
    return found


async def test_a_stream_goes_on_where_it_was_cut_off(folder: Path) -> None:
    async with a_run(folder) as w, a_board(w.log, w) as (url, feed):
        ((first, state),) = await events(url, 1)
        assert state["totals"]["commits"] == len(feed.chronicle)
        resumed = asyncio.ensure_future(events(url, 1, first))
        await asyncio.sleep(0.5)
        # Nothing has changed since: it is quiet until something does.
        turn = feed.turn
        if not resumed.done():
            assert turn == int(first.rpartition("-")[2])
        async with serving(w.syncer("s2")):
            await train(w.learner("c"), 12)
        ((second, later),) = await asyncio.wait_for(resumed, 30)
        assert second != first
        assert later["turn"] > state["turn"]
        # An id of another server, or nonsense, is answered with the whole state at once.
        for strange in ("0000-7", "x", "-", f"{first}9999999999999999999"):
            assert len(await asyncio.wait_for(events(url, 1, strange), 10)) == 1


# --- to whom ----------------------------------------------------------------------------------------------------------


async def test_only_this_machine_is_answered_and_only_to_its_own_name(folder: Path) -> None:
    async with a_run(folder, ("a",)) as w, a_board(w.log) as (url, _), aiohttp.ClientSession() as session:
        async with session.get(f"{url}/", headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403
            assert "is not this machine" in await answer.text()
        for host in ("localhost:1", "127.0.0.1:8470", "[::1]:8470", "localhost"):
            async with session.get(f"{url}/api/run", headers={"Host": host}) as answer:
                assert answer.status == 200, host
        for host in ("localhost]evil.example", "[::1]evil.example", "127.0.0.1.evil.example", "", "evil.example:127"):
            async with session.get(f"{url}/api/run", headers={"Host": host}) as answer:
                assert answer.status in (400, 403), host
        for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 403), ("same-site", 403)):
            async with session.get(f"{url}/api/run", headers={"Sec-Fetch-Site": site}) as answer:
                assert answer.status == status, site
        for method in ("post", "put", "delete", "patch", "options"):
            async with getattr(session, method)(f"{url}/api/run") as answer:
                assert answer.status == 405, method


async def test_elsewhere_one_must_know_the_token(folder: Path) -> None:
    async with (
        a_run(folder, ("a",)) as w,
        a_board(w.log, token="s3cret") as (url, _),
        aiohttp.ClientSession() as session,
    ):
        for path in ("/", "/api/run", "/api/events", "/static/board.js", "/at/1/learners"):
            async with session.get(url + path) as answer:
                assert answer.status == 401, path
                assert "token" in await answer.text()
        async with session.get(f"{url}/?token=wrong") as answer:
            assert answer.status == 401
        async with session.get(f"{url}/api/run", headers={"Authorization": "Bearer s3cret"}) as answer:
            assert answer.status == 200
        async with session.get(f"{url}/learners?token=s3cret&from=1", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/learners?from=1")
            (cookie,) = answer.cookies.values()
            assert cookie.key.startswith(COOKIE)
            assert cookie["httponly"]
            assert cookie["samesite"] == "Strict"
        # Not to another host, whatever the path looks like; and a wrong token is none, whatever the cookie says.
        for path in ("//evil.example/x", "/%2fevil.example/x", "/%5cevil.example"):
            async with session.get(f"{url}{path}?token=s3cret", allow_redirects=False) as answer:
                assert re.match(r"/[^/\\]", answer.headers["Location"]), path
        async with session.get(f"{url}/?token=zzz", cookies={cookie.key: "s3cret"}, allow_redirects=False) as answer:
            assert answer.status == 401
        async with session.get(f"{url}/api/run", headers={"Authorization": "Bearer \xff"}) as answer:
            assert answer.status == 401
        async with session.get(f"{url}/api/run", cookies={cookie.key: "s3cret"}) as answer:
            assert answer.status == 200


async def test_every_answer_carries_its_policy(folder: Path) -> None:
    async with a_run(folder, ("a",)) as w, a_board(w.log) as (url, _), aiohttp.ClientSession() as session:
        for path in ("/", "/learners/a", "/api/run", "/api/nothing", "/static/board.js", "/static/vendor/../server.py", "/static/no"):  # fmt: skip
            async with session.get(url + path) as answer:
                for name, value in HEADERS.items():
                    assert answer.headers[name] == value, (path, name)
                policy = answer.headers["Content-Security-Policy"]
                assert "unsafe" not in policy
                assert "default-src 'none'" in policy
        async with session.get(f"{url}/static/../server.py") as answer:
            assert "import" not in await answer.text()


@pytest.mark.parametrize(
    ("question", "status", "said"),
    [
        ("nothing", 404, "there is no /api/nothing"), ("commit/0/9999", 404, "no commit 0/9999"),
        ("commit/99/1", 400, "no fragment 99"), ("commit/x/1", 400, "'x' is no whole number"),
        ("learner/nobody", 404, "no learner 'nobody'"), ("state?at=yesterday", 400, "seconds since 1970"),
        ("series?from=20&to=10", 400, "is after"), ("commits?only=good", 400, "there are missed"),
        ("update/0/a%2Fb/1", 404, "no /api"), ("update/0/a/77", 400, "knows nothing"), ("state?at=nan", 400, "seconds"),
        ("fragment/" + "9" * 30, 400, "no whole number"), ("whatif/0/1?set=x", 400, "NAME=VALUE"),
    ],
)  # fmt: skip
async def test_a_bad_question_gets_a_clear_answer(folder: Path, question: str, status: int, said: str) -> None:
    async with a_run(folder, ("a",)) as w, a_board(w.log) as (url, _):
        assert said in (await ask(url, question, status))["error"]


# --- runs that are not whole ------------------------------------------------------------------------------------------


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
            await train(w.learner("a"), 20, enough=lambda: min(k.head for k in syncer.keepers) >= 8)
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


async def test_asking_of_a_far_future_changes_nothing_of_what_was_read(folder: Path) -> None:
    async with a_run(folder) as w, a_board(w.log) as (url, feed):
        before = [await ask(url, q) for q in ("lanes", "learners", "series")]
        width = feed.chronicle.by_learner.width
        for question in ("learner/a", "learners", "state", "lanes?", "fragments", "services", "commits", "series?"):
            await ask(url, f"{question}{'&to' if '?' in question else '?at'}=99999999999")
        assert feed.chronicle.by_learner.width == width
        after = [await ask(url, q) for q in ("lanes", "learners", "series")]
        for old, new in zip(before, after, strict=True):
            assert {k: v for k, v in old.items() if k not in ("at", "as_of")} == {
                k: v for k, v in new.items() if k not in ("at", "as_of")
            }


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
            await until(lambda: 1 in feed.chronicle.broken, "the damage is found")
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
            await until(lambda: 0 in feed.chronicle.broken, "the damage is found")
            await until(lambda: feed.chronicle.ends[2].version == heads[2], "another fragment goes on")
            bad.unlink()
            await until(lambda: 0 not in feed.chronicle.broken, "what is mended is not held against it")
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
            assert "may not be read" in (await ask(url, "state"))["trouble"]
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
        assert not (copied / "bus.sqlite").exists(), "it makes none"
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


async def test_what_was_read_is_kept_and_only_believed_where_it_fits(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "kept.npz"
    async with a_run(folder) as w:
        async with a_board(w.log, w, cache) as (url, feed):
            first = await ask(url, "state")
        assert cache.exists()
        again = Feed(w.log, w.store, w.bus, cache)
        await again.begin()
        assert len(again.chronicle) == len(feed.chronicle), "all of it is there before anything is read"
        # A log of the same run with another history: what is kept does not belong to it.
        shutil.rmtree(folder / "commits" / "00001")
        other = Feed(w.log, w.store, w.bus, cache)
        await other.begin()
        assert len(other.chronicle) == 0
        cache.write_bytes(b"nonsense")
        async with a_board(w.log, w, cache) as (url, _):
            state = await ask(url, "state")
            assert state["totals"]["versions"][0] == first["totals"]["versions"][0]
    assert isinstance(Chronicle.load(w.run, cache), Chronicle), "and it is written anew"


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


# --- one file ---------------------------------------------------------------------------------------------------------


async def test_the_file_holds_the_answers_and_no_markup_of_anybody(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    async with a_run(folder) as w, a_board(w.log, follow=False) as (_, feed):
        await feed.read_all()
        shares: list[float] = []
        size = await write(out, Api(feed, costs()), shares.append)
    assert shares[-1] == 1.0
    page = out.read_text()
    assert size == out.stat().st_size
    found = re.search(r'<script type="application/json" id="recorded">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert "<" not in found[1]
    recorded = json.loads(found[1])
    answers = recorded["answers"]
    assert answers["state"]["totals"]["commits"] == sum(answers["state"]["totals"]["versions"])
    assert all(key_of("state", {"at": moment}) in answers for moment in recorded["moments"])
    assert key_of("state", {"at": 1795660321.0}) == "state?at=1795660321", "as a browser writes it"
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", page.split('id="recorded"')[0])
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="(?!data:)', page), "nothing is fetched"
    assert "sha256-" in page


async def test_a_place_that_cannot_be_written_is_said(folder: Path, tmp_path: Path) -> None:
    async with a_run(folder, ("a",)) as w, a_board(w.log, follow=False) as (_, feed):
        await feed.read_all()
        with pytest.raises(InputError, match="--export"):
            await write(tmp_path / "no" / "page.html", Api(feed, costs()), lambda _: None)


async def test_an_address_that_is_taken_is_said(folder: Path) -> None:
    async with a_run(folder, ("a",)) as w, a_board(w.log) as (url, feed):
        with pytest.raises(InputError, match="--http"):
            async with served(feed, Api(feed, costs()), url.removeprefix("http://"), None):
                pytest.fail("it listens twice")


async def test_names_of_a_run_stay_data(folder: Path) -> None:
    """A learner may be called anything that a name may be; what else is hostile comes as a model's or a tensor's name."""
    name = "a.b-c_d"
    async with a_run(folder, (name,)) as w, a_board(w.log) as (url, _):
        assert (await ask(url, f"learner/{name}"))["row"]["learner"] == name
        async with aiohttp.ClientSession() as session, session.get(f"{url}/learners/{HOSTILE}") as answer:
            assert HOSTILE not in await answer.text(), "no page is made of an address"
        assert "no learner" in (await ask(url, f"learner/{HOSTILE.replace('/', '')}", 404))["error"]
