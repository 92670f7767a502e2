"""The board's answers, over HTTP and in an exported file, agree with the log and with `isthmus status`."""

import asyncio
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from isthmus.errors import InputError
from isthmus.format.records.messages import Heartbeat, Leave, encode, learner_stream
from isthmus.format.records.objects import MemberSpec
from isthmus.format.rules import MemberRole, Rules
from isthmus.format.signing.keys import new_signer
from isthmus.inspect import whatif
from isthmus.inspect.bus_view import LearnerView
from isthmus.inspect.export import versions_at
from isthmus.inspect.status import read_status
from isthmus.log import evaluations, membership
from isthmus.log.membership import Members
from isthmus_services.board.api import Api
from isthmus_services.board.export import key_of, write
from isthmus_services.board.feed import Feed
from isthmus_services.board.history import time_views
from isthmus_services.board.history.history import BEAT
from support.boards import a_board, a_run, ask, costs
from support.world import all_commits, seed_of, serving, train, until, world


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
            assert totals["bytes_merged"] == sum(i.bytes for h in then for i in h.inputs)
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
            await until(lambda: min(k.head for k in syncer.coordinators) >= 2, "two versions of each")
            await until(lambda: len(feed.live.status().live) == 2, "both are heard")
            before = await ask(url, "state")
            status = await read_status(w.log, w.bus, w.runtime, 0.5)
            await until(lambda: len(feed.history) >= sum(c.version for c in status.heads if c), "the board has read it")
            later = await ask(url, "state")
            versions = [c.version if c else 0 for c in status.heads]
            assert all(a <= v <= b for a, v, b in zip(before["totals"]["versions"], versions, later["totals"]["versions"], strict=True))  # fmt: skip
            assert re.match(
                r"2 of 2 learners train(; rounds open: \d+, and that of fragment \d waits for .*)?\.", later["sentence"]
            ), later["sentence"]
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
            await until(lambda: len(feed.history) == sum(c.version for c in status.heads if c), "it has read the rest")
            state = await ask(url, "state")
            assert state["totals"]["versions"] == [c.version if c else 0 for c in status.heads]
            assert state["sentence"] == "Nobody trains: 2 of 2 learners are done."
            said = {v.name: v.heartbeat for v in status.hearing.learners.values()}
            for row in (await ask(url, "learners"))["learners"]:
                beat = said[row["learner"]]
                assert beat is not None
                assert (row["said"]["step"], row["said"]["bytes_up"], row["said"]["bytes_down"]) == (
                    beat.step, beat.bytes_up - beat.checkpoint_bytes, beat.bytes_down
                )  # fmt: skip
                assert row["said"]["merged"] == beat.ledger.merged
            rejected = {r["reason"]: r["times"] for r in state["reasons"]}
            assert rejected.keys() <= status.rejections.keys()


async def test_bytes_of_a_learner_are_counted_over_its_incarnations(folder: Path, tmp_path: Path) -> None:
    """Each incarnation counts from zero. A board that starts again goes on from its cache."""
    cache = tmp_path / "kept.npz"
    async with a_run(folder) as w:
        async with a_board(w.log, w, cache) as (_, feed):
            said = structs.asdict(feed.live.hearing.learners["a"].heartbeat)  # type: ignore[arg-type]
        sent = ("bytes_up", "bytes_down", "checkpoint_bytes")

        def heard(feed: Feed, incarnation: int, *counts: int) -> list[float]:
            beat = Heartbeat(**said | {"incarnation": incarnation} | dict(zip(sent, counts, strict=True)))
            feed._beat(LearnerView("a", incarnation, heartbeat=beat), feed.wall)
            row = feed.history.beats.until(math.inf)[feed.history.learner("a")]
            return [row[BEAT.index(name)] for name in sent]

        assert heard(feed, 7, 100, 10, 40)[1:] != [10.0, 40.0], "the bytes of the first incarnation must be included"
        before = heard(feed, 7, 100, 10, 40)
        assert heard(feed, 8, 15, 6, 7) == [before[0] + 8, before[1] + 6, before[2] + 7], "up has no checkpoints"
        assert heard(feed, 8, 150, 60, 70) == [before[0] + 80, before[1] + 60, before[2] + 70]
        feed.history.save(cache)
        again = Feed(w.log, w.store, w.bus, cache)
        await again.begin()
        assert heard(again, 8, 152, 61, 71) == [before[0] + 81, before[1] + 61, before[2] + 71]
        assert heard(again, 9, 3, 1, 1) == [before[0] + 83, before[1] + 62, before[2] + 72]


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
            assert measured["contested"] == {"held_out": []}
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
                # Include the fields of rows and of groups, if the reference lists them for this question.
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
            await train(w.by(eu).learner("eu"), 20, enough=lambda: min(k.head for k in syncer.coordinators) >= 3)
        lie = Leave(run=w.run.digest, id="x", learner="nobody", incarnation=1, step=7, done=True)
        await w.bus.append(learner_stream("nobody"), encode(lie, signer=evil))
        log = w.log
        await log.members.refresh(w.store)
        async with a_board(log, w) as (url, _):
            assert (await ask(url, "run"))["signed"] is True
            assert [r["learner"] for r in (await ask(url, "learners"))["learners"]] == ["eu"]
            assert (await ask(url, "state"))["sentence"] == "Nobody trains: 1 of 1 learners are done."
            assert "signed by s1's key" in " ".join((await ask(url, "commit/0/1"))["lines"])


async def test_asking_of_a_far_future_changes_nothing_of_what_was_read(folder: Path) -> None:
    async with a_run(folder) as w, a_board(w.log, follow=False) as (url, feed):
        await feed.read_all()
        buckets, last = feed.history.by_learner, time_views.span(feed.history)[1]
        # Sums count once their bucket has ended, which must not happen between the two looks.
        await until(lambda: buckets.whole(feed.wall) > buckets.place(last), "the last bucket has ended")
        before = [await ask(url, q) for q in ("lanes", "learners", "series")]
        width = feed.history.by_learner.width
        for question in ("learner/a", "learners", "state", "lanes?", "fragments", "services", "commits", "series?"):
            await ask(url, f"{question}{'&to' if '?' in question else '?at'}=99999999999")
        assert feed.history.by_learner.width == width
        after = [await ask(url, q) for q in ("lanes", "learners", "series")]
        for old, new in zip(before, after, strict=True):
            assert {k: v for k, v in old.items() if k not in ("at", "as_of")} == {
                k: v for k, v in new.items() if k not in ("at", "as_of")
            }


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
    assert key_of("state", {"at": 1795660321.0}) == "state?at=1795660321", "a browser writes the number like this"
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", page.split('id="recorded"')[0])
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="(?!data:)', page), "the page must fetch nothing"
    assert "sha256-" in page


async def test_a_place_that_cannot_be_written_is_said(folder: Path, tmp_path: Path) -> None:
    async with a_run(folder, ("a",)) as w, a_board(w.log, follow=False) as (_, feed):
        await feed.read_all()
        with pytest.raises(InputError, match="--export"):
            await write(tmp_path / "no" / "page.html", Api(feed, costs()), lambda _: None)


async def test_how_many_learners_train_is_said_of_now_and_where_a_bus_tells_it(folder: Path) -> None:
    """The page tells by it whether an update that missed its round may be merged still."""
    async with world(folder, seed_of(Rules(fragments=3, sync_every=3))) as w:
        async with serving(w.syncer("s1")) as syncer, a_board(w.log, w) as (url, _):
            assert (await ask(url, "state"))["training"] == 0
            seen = set[int]()
            training = asyncio.ensure_future(
                train(
                    w.learner("a"), 10,
                    enough=lambda: 1 in seen and min(k.head for k in syncer.coordinators) >= 4,
                )
            )  # fmt: skip
            while not training.done() or (await ask(url, "state"))["training"] != 0:
                seen.add((await ask(url, "state"))["training"])
                await asyncio.sleep(0.05)
            await training
            assert 1 in seen
            begin = (await ask(url, "state"))["begin"]
            assert (await ask(url, f"state?at={begin}"))["training"] is None
        async with a_board(w.log) as (url, _):
            assert (await ask(url, "state"))["training"] is None
