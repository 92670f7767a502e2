"""The board's history sums up a run's commits, read in any order, and can be saved and loaded again."""

import math
from collections.abc import Iterable
from dataclasses import replace as changed
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from isthmus.format.records.objects import CommitHeader, Healed, Input, Passing, Seen
from isthmus.format.rules import Rules
from isthmus.inspect.losses import LossCurves
from isthmus.log import Commit, Log
from isthmus.log.log_health import STANDS
from isthmus.log.run import Run
from isthmus_services.board import accounts
from isthmus_services.board.history import commit_views, time_views
from isthmus_services.board.history.history import FORMAT, Incarnation, RunHistory, write
from isthmus_services.board.history.time_buckets import MOMENTS, SHORTEST_S, Kept, TimeBuckets
from isthmus_services.board.history.warnings import _stuck, warnings
from isthmus_services.commands.board import _costs
from isthmus_services.settings import declared
from isthmus_services.settings.prices import prices_of
from support import commits
from support.commits import CREATED_AT, ROUND_S, RUN, RecordedLog, committed, given, late, opened_at, rejected

SIZES = (300, 100)


def run_of(digest: bytes = RUN) -> Run:
    """Return the parts of a run that the history reads: two fragments, of which the first is three times as large."""
    fragments = [SimpleNamespace(index=p, size=size) for p, size in enumerate(SIZES)]
    return cast(Run, SimpleNamespace(
        digest=digest, url="memory://run", header=SimpleNamespace(created_at=CREATED_AT), rules=Rules(),
        layout=SimpleNamespace(fragments=fragments), pace=SimpleNamespace(silence_s=5.0),
    ))  # fmt: skip


def waiting(header: CommitHeader, **what: Any) -> CommitHeader:
    return replace(header, waited=replace(header.waited, **what))


def history() -> list[CommitHeader]:
    """Return three versions of each of two fragments: `a` is in all, `b` restarts after the first, `c` comes late.

    Updates of the second fragment are taken half a second, and a step of 100 tokens, before those of the first.
    """
    found = []
    for p in (0, 1):

        def given(learner: str, base: int, version: int, p: int = p, **what: Any) -> Input:
            whole = commits.given(learner, base, version, p=p, **what)
            return replace(
                whole, taken_at=whole.taken_at - 0.5 * p, step=whole.step - p, tokens_seen=whole.tokens_seen - 100 * p
            )

        first = committed(1, given("a", 0, 1, p=p), given("b", 0, 1, p=p, tokens=600, tokens_seen=600), p=p)
        found.append(waiting(first, expected=("a", "b")))
        second = committed(2, given("a", 1, 2, p=p), p=p, late=(late("c", 1, 2),),
                           rejected=(rejected("c", 0, "stale", 2), rejected("a", 0, "duplicate", 2)),
                           rejected_total={"stale": 1, "duplicate": 1}, writer="s2")  # fmt: skip
        found.append(waiting(second, expected=("a", "b"), missing=("b",), closed_by="grace", quorum_missed=True))
        again = given("b", 1, 3, p=p, incarnation=2, tokens=300, tokens_seen=700, weight=3.0)
        third = committed(
            3, given("a", 2, 3, p=p), again, p=p, rejected_total={"stale": 1, "duplicate": 1}, writer="s2"
        )
        found.append(waiting(third, expected=("a", "b")))
    return [replace(h, written_at=h.written_at + 0.001 * h.fragment) for h in found]


def read(headers: Iterable[CommitHeader], run: Run | None = None) -> RunHistory:
    history = RunHistory(run or run_of())
    for h in headers:
        history.take(Commit(h, bytes(31) + bytes([h.version])))
    return history


def after(version: int) -> float:
    """Return a time at which this version of all fragments, and no later one, is in the log."""
    return opened_at(version) + 6.0


def everything(c: RunHistory, at: float) -> list[object]:
    """Return all views from which pages are made."""
    begin, end = time_views.span(c)
    return [
        time_views.totals(c, at), time_views.reasons(c, at), sorted(time_views.learners(c, at), key=lambda r: str(r["learner"])),
        time_views.series(c, begin, end), time_views.losses(c, begin, end), time_views.fragments(c, begin, end, at), time_views.syncers(c, at)["takeovers"],
        sorted(time_views.incarnations(c), key=str), time_views.rounds_open(c, at),
    ]  # fmt: skip


def test_what_was_read_comes_to_what_the_commits_say() -> None:
    c = read(history())
    totals = time_views.totals(c, after(2))
    assert (totals["commits"], totals["versions"], totals["updates"], totals["fresh"]) == (4, [2, 2], 6, 6)
    assert (totals["missed_round"], totals["updates_rejected"], totals["rejected_without_loss"]) == (2, 2, 2)
    assert (totals["quorum_missed"], totals["closed_by"]) == (2, {"all": 2, "grace": 2})
    # Each fragment counts by its share of the model, 0.75 or 0.25, so the sum is the learners' own count.
    assert totals["tokens"] == 1200 + 600 + 1200
    assert totals["participation"] == (8 - 2) / 8
    assert time_views.totals(c, after(3))["commits"] == 6
    assert time_views.totals(c, CREATED_AT)["commits"] == 0
    assert [r["reason"] for r in time_views.reasons(c, after(2))] == ["stale", "duplicate"]


def test_an_update_on_an_old_base_is_not_fresh() -> None:
    c = read([committed(1, given("a", 0, 1)), committed(2, given("b", 0, 2), given("a", 1, 2))])
    assert [(r["learner"], r["merged"], r["fresh"]) for r in time_views.learners(c, after(9))] == [
        ("a", 2, 2), ("l0", 0, 0), ("b", 1, 0),
    ]  # fmt: skip
    assert time_views.totals(c, after(9))["fresh"] == 2


def test_a_commit_counts_from_the_moment_at_which_it_was_written() -> None:
    c = read([committed(1, given("a", 0, 1))])
    at = opened_at(1) + 5.0
    assert time_views.totals(c, at)["commits"] == 1
    assert time_views.totals(c, at - 1e-3)["commits"] == 0


def test_a_commit_that_is_read_late_is_in_its_place_also_where_sums_were_asked_for() -> None:
    first, second, third = history()[:3]
    c = read([first, second])
    assert time_views.totals(c, after(2))["updates"] == 3
    c.take(Commit(replace(first, fragment=1), bytes(32)))
    c.take(Commit(third, bytes(32)))
    assert [time_views.totals(c, after(v))["updates"] for v in (1, 2, 3)] == [4, 5, 7]
    assert [time_views.totals(c, after(v))["versions"] for v in (1, 2, 3)] == [[1, 1], [2, 1], [3, 1]]


def test_a_later_version_counts_also_where_its_clock_is_behind() -> None:
    first, second = (committed(v, given("a", v - 1, v)) for v in (1, 2))
    c = read([replace(first, written_at=CREATED_AT + 100.0), replace(second, written_at=CREATED_AT + 40.0)])
    assert [time_views.heads(c, CREATED_AT + s) for s in (30, 50, 110)] == [[0, 0], [2, 0], [2, 0]]
    assert time_views.ages(c, CREATED_AT + 110.0) == [70.0, None]
    assert time_views.ages(c, math.inf, CREATED_AT + 45.0) == [5.0, None]


def test_time_begins_before_the_first_commit_where_the_runs_clock_was_ahead() -> None:
    early = replace(committed(1, given("a", 0, 1)), written_at=CREATED_AT - 3600.0)
    c = read([early])
    begin, end = time_views.span(c)
    assert begin <= CREATED_AT - 3600.0 <= end
    assert time_views.totals(c, CREATED_AT)["learners"] == 1
    assert (
        sum(x or 0 for x in time_views.series(c, begin, end)["commits"]) + time_views.totals(c, begin)["commits"] == 1
    )


def test_the_past_knows_nothing_of_what_came_after() -> None:
    c = read(history())
    for _ in range(6):
        c.by_learner._double()  # buckets of 16 s: the bucket of the second version begins before it
    at = opened_at(2) + 2.0
    assert c.by_learner.whole(at) * c.by_learner.width < at - CREATED_AT
    said = time_views.sentence(c, at, [])
    assert "2 of 2 learners" in said or "just begun" in said
    early = time_views.sentence(c, opened_at(1) + 5.5, [])
    assert early == "The run has just begun: 2 commits so far."


def test_very_many_learners_take_no_more_room_than_many() -> None:
    moments = TimeBuckets(0.0, ("n",), Kept.SUM)
    moments.room(1)
    moments.one(1.0, 0, n=3.0)
    moments.room(4000)
    moments.one(400.0, 3999, n=1.0)
    assert moments.values.shape[0] * moments.values.shape[1] <= 2 * MOMENTS * 256
    assert (moments.until(1e9)[0, 0], moments.until(1e9)[3999, 0]) == (3.0, 1.0)
    again = TimeBuckets(0.0, ("n",), Kept.SUM)
    again.restored("x", moments.arrays("x"))
    assert again.values.shape == moments.values.shape
    again.one(1e6, 3999, n=1.0)
    assert again.until(1e9)[3999, 0] == 2.0


def test_of_each_learner_it_says_what_became_of_it() -> None:
    rows = {r["learner"]: r for r in time_views.learners(read(history()), after(3) + 60.0)}
    assert {k: rows["b"][k] for k in ("expected", "merged", "missing", "missed_round", "updates_rejected", "incarnation")} == {
        "expected": 6, "merged": 4, "missing": 2, "missed_round": 0, "updates_rejected": 0, "incarnation": 2,
    }  # fmt: skip
    assert (rows["c"]["missed_round"], rows["c"]["updates_rejected"], rows["c"]["merged"]) == (2, 2, 0)
    assert (rows["a"]["rejected_without_loss"], rows["a"]["updates_rejected"], rows["a"]["tokens"]) == (2, 0, 3600)
    assert rows["b"]["weight_a_round"] == pytest.approx((0.5 + 0.75) / 2)
    assert rows["a"]["train_s"] == 5.0
    assert (rows["a"]["fresh"], rows["a"]["step"], rows["a"]["processed"]) == (6, 36, 3600)


def test_a_life_that_trains_again_has_processed_that_too() -> None:
    c = read(history())
    # `b` has come to token 700. An update of its second incarnation begins at token 300, and one of its first ended at
    # token 600. So it has trained 300 tokens again, as far as merged updates tell.
    assert time_views.totals(c, after(3) + 60.0)["processed"] == 3600 + 700 + 300
    kept = time_views.series(c, CREATED_AT, after(3) + 60.0)["kept"]
    assert kept[-1] == pytest.approx((3600 + 600 + 300) / (3600 + 700 + 300))
    # By its claim, it trained to token 750 before it was killed, and resumed at token 300.
    c.incarnations[c.learners.number("b"), 2].again = 450
    assert time_views.totals(c, after(3) + 60.0)["processed"] == 3600 + 700 + 450
    assert time_views.totals(c, after(2))["processed"] == 2400 + 600, "before the kill"
    assert c.incarnations[c.learners.number("b"), 2].tokens == (300, 700)
    away = [one["away_s"] for one in time_views.incarnations(c) if one["learner"] == "b"]
    assert away == [None, (opened_at(3) - 6.5) - (opened_at(1) - 1.0)]


@pytest.mark.parametrize("at", [after(0), after(1), after(2), after(3) + 60.0])
def test_the_order_in_which_fragments_are_read_does_not_matter(at: float) -> None:
    by_fragment = history()
    by_time = sorted(by_fragment, key=lambda h: h.written_at)
    last_first = sorted(by_fragment, key=lambda h: (-h.fragment, h.version))
    assert everything(read(by_fragment), at) == everything(read(by_time), at) == everything(read(last_first), at)


def test_what_is_kept_is_read_back_and_read_on_from(tmp_path: Path) -> None:
    headers = sorted(history(), key=lambda h: h.written_at)
    whole, half = read(headers), read(headers[:4])
    number = half.learner("a")
    half.beats.one(after(1), number, step=7.0, loss=2.5)
    half.save(tmp_path / "kept.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["kept.npz"]
    again = RunHistory.load(run_of(), tmp_path / "kept.npz")
    assert again is not None
    assert everything(again, after(2)) == everything(half, after(2))
    assert [(e.version, e.digest) for e in again.ends] == [(2, bytes(31) + b"\x02")] * 2
    for h in headers[4:]:
        again.take(Commit(h, bytes(31) + bytes([h.version])))
    said = [r.pop("said") for r in time_views.learners(again, after(3))]
    assert [s["loss"] for s in said if s] == [2.5]
    whole.learner("a")
    assert time_views.totals(again, after(3)) == time_views.totals(whole, after(3))
    assert again.incarnations == whole.incarnations


def test_what_is_kept_is_what_was_read_when_it_was_asked_for(tmp_path: Path) -> None:
    headers = sorted(history(), key=lambda h: h.written_at)
    c = read(headers[:4])
    before = everything(c, after(2))
    arrays = c.arrays()
    for h in headers[4:]:
        c.take(Commit(h, bytes(31) + bytes([h.version])))
    write(tmp_path / "kept.npz", arrays)
    again = RunHistory.load(run_of(), tmp_path / "kept.npz")
    assert again is not None
    assert everything(again, after(2)) == before


@pytest.mark.parametrize("harm", [
    "another run", "another format", "cut off", "no zip", "a row short", "not there", "other columns",
])  # fmt: skip
def test_what_cannot_be_used_is_left_alone(harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = tmp_path / "kept.npz", run_of()
    c = read(history())
    if harm == "another format":
        monkeypatch.setattr("isthmus_services.board.history.history.FORMAT", FORMAT + 1)
    if harm == "a row short":
        c.ends[0].version -= 1
    if harm == "other columns":
        c.rows._columns["bytes"] = c.rows._columns["bytes"].astype(np.float32)
    c.save(path)
    monkeypatch.undo()
    if harm == "another run":
        run = run_of(bytes(32))
    elif harm == "cut off":
        path.write_bytes(path.read_bytes()[:-200])
    elif harm == "no zip":
        path.write_bytes(b"a page of a run")
    elif harm == "not there":
        path.unlink()
    assert RunHistory.load(run, path) is None


def test_no_pickle_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kept.npz"
    with open(path, "wb") as file:
        np.savez(file, meta=np.array([{"a": 1}], dtype=object))
    assert RunHistory.load(run_of(), path) is None


def test_a_commit_that_does_not_follow_is_a_mistake_of_the_reader() -> None:
    with pytest.raises(AssertionError, match="after version 0"):
        read([committed(2, given("a", 1, 2))])


# --- time buckets -----------------------------------------------------------------------------------------------------


def test_moments_grow_longer_and_lose_no_sum() -> None:
    moments = TimeBuckets(1000.0, ("n", "x"), Kept.SUM)
    moments.room(2)
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(1000.0, 1000.0 + 20 * MOMENTS * SHORTEST_S, 500))
    for at in times:
        moments.add(float(at), [0, 1, 0], np.array([[1.0, 2.0], [1.0, 0.5], [0.0, 1.0]]))
    assert moments.width == 32 * SHORTEST_S
    assert moments.values.sum(axis=(0, 1)).tolist() == [1000.0, 500 * 3.5]
    for at in rng.uniform(1000.0, times[-1], 20):
        as_of = moments.end(moments.whole(float(at)) - 1)
        assert as_of <= at
        assert moments.until(float(at))[0, 0] == np.count_nonzero(times < as_of)


def test_a_time_just_behind_the_last_moment_finds_room() -> None:
    moments = TimeBuckets(0.0, ("x",), Kept.LAST)
    moments.room(1)
    moments.one(0.1, 0, x=1.0)
    moments.one(0.1 + SHORTEST_S, 0, x=2.0)
    moments.one(MOMENTS * SHORTEST_S, 0, x=3.0)
    assert moments.width == 2 * SHORTEST_S
    assert moments.values[0, 0, 0] == 2.0, "of two buckets that became one, the later value stays"
    assert moments.values[MOMENTS // 2, 0, 0] == 3.0


def test_of_last_words_the_last_stays() -> None:
    moments = TimeBuckets(0.0, ("x",), Kept.LAST)
    moments.room(1)
    for at, x in ((0.1, 1.0), (0.2, 2.0), (3.0, 3.0)):
        moments.one(at, 0, x=x)
    assert math.isnan(moments.until(0.2)[0, 0])  # no bucket has ended yet
    assert [moments.until(t)[0, 0] for t in (0.25, 2.9, 3.3)] == [2.0, 2.0, 3.0]
    moments.place(MOMENTS * SHORTEST_S * 3)
    assert moments.until(1e9)[0, 0] == 3.0
    edges, found = moments.spans(0.0, 4.0, 4)
    assert found[:, 0, 0][0] == 2.0
    assert np.all(np.diff(edges) > 0)


def test_what_was_before_the_beginning_belongs_to_the_first_moment() -> None:
    moments = TimeBuckets(100.0, ("n",), Kept.SUM)
    moments.room(1)
    moments.one(3.0, 0, n=1.0)
    assert moments.values[0, 0, 0] == 1.0


# --- views of the past ------------------------------------------------------------------------------------------------


async def test_a_round_that_was_open_says_whom_it_waited_for_then() -> None:
    header = waiting(
        committed(1, given("a", 0, 1, arrived_at=opened_at(1) + 1.0), given("b", 0, 1, arrived_at=opened_at(1) + 3.0)),
        expected=("a", "b", "d"), missing=("d",), passed=(Passing(learner="e", at=opened_at(1) + 2.0),),
        seen=(Seen(1.5, "here", "d"), Seen(2.5, "gone", "e")),
    )  # fmt: skip
    c = read([header, replace(header, fragment=1, written_at=header.written_at + 50.0,
                              waited=replace(header.waited, opened_at=opened_at(1) + 50.0, closed_at=opened_at(1) + 54.0))])  # fmt: skip
    log = cast(Log, RecordedLog([header]))

    async def waited_for(seconds: float) -> list[str] | None:
        found = await commit_views.waits(log, c, opened_at(1) + seconds)
        assert [(x["fragment"], x["version"]) for x in found] == [(0, 1)]
        names: list[str] | None = found[0]["waits_for"]
        return names

    assert await waited_for(0.5) == ["a", "b", "e"]
    assert await waited_for(1.2) == ["b", "e"]
    assert await waited_for(1.7) == ["b", "d", "e"]
    assert await waited_for(3.5) == ["d"]
    assert await commit_views.waits(log, c, opened_at(1) + 4.5) == [], "the round had closed"
    assert await commit_views.waits(log, c, opened_at(1) - 0.5) == [], "the round was not open yet"


async def test_the_past_is_told_in_a_sentence() -> None:
    headers = history()
    c, log = read(headers), cast(Log, RecordedLog(headers))
    at = opened_at(3) + 2.0
    said = time_views.sentence(c, at, await commit_views.waits(log, c, at))
    assert said == (
        "2 of 2 learners had something merged in the 32 s before, fragment 0 waited for a, b; fragment 1 waited for a, b."
    )
    assert time_views.sentence(c, CREATED_AT, []) == "Nothing had been merged yet."


async def test_a_stretch_of_time_is_told_update_by_update() -> None:
    headers = history()
    c, log = read(headers), cast(Log, RecordedLog(headers))
    found = await commit_views.pieces(log, c, opened_at(2) - 20.0, opened_at(2) + 7.0)
    assert found is not None
    whats = {(x["learner"], x["what"]) for x in found}
    assert {
        ("a", "train"),
        ("a", "merged"),
        ("b", "merged"),
        ("c", "missed_round"),
        ("c", "rejected"),
        ("a", "repeated"),
    } <= whats
    assert all(x["from"] <= opened_at(2) + 7.0 for x in found)
    story = await commit_views.story(log, c, "c", after(3))
    assert [(x["fragment"], x["version"], x["fate"]) for x in story][:2] == [(1, 2, "missed_round"), (1, 2, "rejected")]


def test_takeovers_say_how_long_fragments_stood_still() -> None:
    found = time_views.syncers(read(history()), after(3))
    (takeover,) = found["takeovers"]
    assert (takeover["from"], takeover["to"]) == ("s1", "s2")
    assert sorted(f["fragment"] for f in takeover["fragments"]) == [0, 1]
    assert takeover["stood_s"]["largest"] == pytest.approx(ROUND_S)
    assert {s["syncer"]: s["keeps"] for s in found["syncers"]} == {"s1": [], "s2": [0, 1]}
    assert time_views.syncers(read(history()), after(1))["takeovers"] == []


def test_commits_are_found_by_what_happened_in_them() -> None:
    c = read(history())

    def found(**what: Any) -> list[tuple[int, int]]:
        return [(x["fragment"], x["version"]) for x in time_views.commits(c, math.inf, **what)["commits"]]

    assert found() == [(1, 3), (0, 3), (1, 2), (0, 2), (1, 1), (0, 1)]
    assert found(only="missed") == found(only="missed_round") == found(only="rejected") == [(1, 2), (0, 2)]
    assert found(fragment=1, closed_by="all") == [(1, 3), (1, 1)]
    assert found(closed_by="never") == []
    assert found(only="healed") == []
    assert found(before=2) == [(1, 1), (0, 1)]


def test_a_commit_that_heals_counts_as_no_round() -> None:
    healed = replace(
        committed(4, p=0), healed=Healed(source=3, broken_at=4, key="values/x", why="gone"), rejected_total={}
    )
    c = read([*history()[:3], healed])
    totals = time_views.totals(c, after(4))
    assert (totals["healed"], sum(totals["closed_by"].values())) == (1, 3)
    assert commit_views.round_picture(healed)["healed"] is True


@pytest.mark.tier("test")
def test_no_answer_is_longer_than_a_browser_can_draw() -> None:
    fragments = 96
    run = cast(Run, SimpleNamespace(**vars(run_of()) | {"layout": SimpleNamespace(
        fragments=[SimpleNamespace(index=p, size=10) for p in range(fragments)])}))  # fmt: skip
    c = RunHistory(run)
    for version in range(1, 41):
        for p in range(fragments):  # more learners than a page shows come now and then
            count = 100 if version % 8 == 0 else 10
            header = committed(version, *(given(f"l{n}", version - 1, version, p=p) for n in range(count)), p=p)
            c.take(Commit(header, bytes(32)))
    begin, end = time_views.span(c)

    def numbers(value: object) -> int:
        if isinstance(value, dict):
            return sum(map(numbers, value.values()))
        return sum(map(numbers, value)) if isinstance(value, list) else isinstance(value, int | float)

    for answer in (
        time_views.series(c, begin, end), time_views.heard(c, begin, end), time_views.fragments(c, begin, end, end),
        time_views.lanes(c, begin, end), time_views.commits(c, end), time_views.losses(c, begin, end),
    ):  # fmt: skip
        assert numbers(answer) < 40_000
    assert len(time_views.series(c, begin, end)["at"]) <= time_views.POINTS_MAX


def test_a_learner_that_is_in_twice_is_drawn_twice() -> None:
    header = committed(2, given("a", 0, 2), given("a", 1, 2), given("b", 1, 2))
    rows = commit_views.round_picture(waiting(header, expected=("a", "b", "c"), missing=("c",)))["learners"]
    assert [(r["learner"], r.get("base"), r["fate"]) for r in rows] == [
        ("a", 0, "merged next round"), ("a", 1, "merged"), ("b", 1, "merged"), ("c", None, "missing"),
    ]  # fmt: skip


def test_a_round_is_a_picture_in_seconds_since_it_opened() -> None:
    header = waiting(history()[1], boundary_s=1.0, passed=(Passing(learner="b", at=opened_at(2) + 1.0),))
    picture = commit_views.round_picture(header)
    marks = {m["what"]: m["at"] for m in picture["marks"]}
    assert marks == {"boundary": -1.0, "opened": 0.0, "closed": 4.0, "merged": 4.5, "published": 5.0, "written": 5.0}, (
        "there is no mark for the quorum, which was missed"
    )
    met = commit_views.round_picture(waiting(history()[0], boundary_s=1.0))
    assert {m["what"]: m["at"] for m in met["marks"]}["quorum"] == 1.0
    rows = {r["learner"]: r for r in picture["learners"]}
    assert (rows["a"]["fate"], rows["b"]["fate"], rows["c"]["fate"]) == ("merged", "passed", "missed_round")
    assert (rows["a"]["taken"], rows["a"]["heard"], rows["a"]["arrived"]) == (-1.0, 1.0, 3.0)


# --- warnings ---------------------------------------------------------------------------------------------------------


def told(c: RunHistory, at: float) -> list[str]:
    return [w["said"] for w in warnings(c, at, None, "memory://run", "", 0.0)]


def test_what_somebody_should_see_to_is_said_with_what_to_do() -> None:
    headers = []
    for version in range(1, 60):
        h = committed(version, given("a", version - 1, version), rejected=(rejected("b", version - 1, "stale", version),),
                      rejected_total={"stale": version})  # fmt: skip
        headers.append(waiting(h, quorum_missed=True))
    c = read(headers)
    found = told(c, math.inf)
    assert any("missed their quorum" in said for said in found)
    assert any("rejected" in said and "stale" in said for said in found)
    assert all(w["do"] for w in warnings(c, math.inf, None, "memory://run", "", 0.0))
    assert told(read(history()), math.inf) == []
    c.ends[1].broken = "commits/1: is missing"
    assert any("fragment 1 cannot be read" in said for said in told(c, math.inf))


def test_a_fragment_that_was_not_merged_for_long_is_said_with_what_to_do() -> None:
    rounds = [committed(v, given("a", v - 1, v, p=p), p=p) for v in range(1, 101) for p in range(2) if p or v < 4]
    (stuck,) = _stuck(read(rounds), after(100), "memory://run", ())
    assert stuck.said.startswith("fragment 0 was not merged for over ")
    assert stuck.do.startswith("the fragment's page shows which learners")
    assert stuck.link == "fragments/0"


def of_losses(first: list[float | None], second: list[float | None]) -> RunHistory:
    """Return a history of learners `a` and `b`, whose updates of each version have these losses."""
    return read(
        committed(v, given("a", v - 1, v, loss=one, steps=10), given("b", v - 1, v, loss=other, steps=30), p=p)
        for v, (one, other) in enumerate(zip(first, second, strict=True), 1)
        for p in (0, 1)
    )


def test_losses_of_a_whole_life_come_from_the_log() -> None:
    c = of_losses([4.0, 3.0, None], [None, None, None])
    a = [loss for loss in time_views.losses(c, *time_views.span(c))["learners"]["a"] if loss is not None]
    assert a == [4.0, 3.0]
    assert set(time_views.losses(c, *time_views.span(c))["learners"]["b"]) == {None}
    rows = {r["learner"]: r["loss"] for r in time_views.learners(c, after(2))}
    assert (rows["a"], rows["b"]) == (3.0, None)
    stateless = {r["learner"]: r["loss"] for r in time_views.learners(c, after(3))}
    assert stateless["a"] == 3.0, "the newest one that states a loss"
    # Heartbeats state the loss of the last step, which is another quantity.
    c.beats.one(after(2), c.learner("b"), step=7.0, loss=9.0)
    assert set(time_views.losses(c, *time_views.span(c))["learners"]["b"]) == {None}


def late_behind_newer(width: int = 1) -> RunHistory:
    """Return versions of which the last merges an update that was captured before the one of the version before it."""
    newer = given("a", 1, 2, step=24, loss=2.0, taken_at=opened_at(2))
    older = given("a", 0, 3, step=12, loss=3.0, taken_at=opened_at(1))
    c = read([committed(1, given("b", 0, 1)), committed(2, newer), committed(3, older)])
    while c.reached.width < width * ROUND_S:  # later buckets, and pairs of buckets
        for buckets in (c.reached, c.losses, c.by_learner, c.beats):
            buckets._double()
    return c


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_newest_update_is_the_one_captured_last_not_the_one_committed_last(width: int) -> None:
    c = late_behind_newer(width)
    row = next(r for r in time_views.learners(c, math.inf) if r["learner"] == "a")
    assert (row["step"], row["loss"], row["taken_at"]) == (24.0, 2.0, opened_at(2))


def test_a_learner_goes_no_steps_back_when_an_older_update_is_merged() -> None:
    c = late_behind_newer()
    steps = [
        row["step"] or 0.0
        for at in np.arange(CREATED_AT, after(4), 0.5).tolist()
        for row in time_views.learners(c, at)
        if row["learner"] == "a"
    ]
    assert steps == sorted(steps)
    assert {0.0, 24.0} == set(steps)
    trained = time_views.series(c, *time_views.span(c), 30)
    assert sum(trained["processed_per_s"]) * trained["seconds"] == pytest.approx(
        time_views.totals(c, math.inf)["processed"]
    )


def test_a_step_is_the_newest_of_the_log_and_of_what_was_heard() -> None:
    c = late_behind_newer()

    def step() -> object:
        return next(r["step"] for r in time_views.learners(c, math.inf) if r["learner"] == "a")

    number = c.learner("a")
    c.beats.one(after(1), number, incarnation=1.0, step=20.0)
    assert step() == 24.0, "the board did not listen since"
    c.beats.one(after(3), number, incarnation=1.0, step=30.0)
    assert step() == 30.0
    c.beats.one(after(3), number, incarnation=2.0, step=10.0)
    assert step() == 10.0, "a later incarnation goes on from its checkpoint"


def test_of_updates_captured_at_once_the_largest_loss_counts_in_any_order() -> None:
    both = [committed(1, given("a", 0, 1, p=p, loss=loss), p=p) for p, loss in enumerate((3.0, 2.0))]
    for headers in (both, both[::-1]):
        c = read(headers)
        assert next(r["loss"] for r in time_views.learners(c, math.inf) if r["learner"] == "a") == 3.0
    curves = LossCurves()
    curves.take(Commit(h, bytes(32)) for h in both)
    assert curves.points()["a"][-1].loss == 3.0


def test_a_stretch_of_several_updates_has_the_mean_over_their_steps() -> None:
    mixed = [given("a", 0, 1, loss=2.0, steps=10), given("a", 0, 1, "other", loss=4.0, steps=30)]
    c = read([committed(1, *mixed)])
    assert [x for x in time_views.losses(c, *time_views.span(c))["learners"]["a"] if x is not None] == [3.5]


def test_tokens_that_were_processed_come_from_the_log() -> None:
    c = read(history())
    lines = time_views.series(c, *time_views.span(c), 30)
    assert sum(lines["processed_per_s"]) * lines["seconds"] == pytest.approx(
        time_views.totals(c, math.inf)["processed"]
    )


@pytest.mark.parametrize("loss", [1e308, -1e308])
def test_a_loss_too_large_to_sum_is_not_known(loss: float) -> None:
    c = of_losses([loss] * 4, [1.0] * 4)
    assert set(time_views.losses(c, *time_views.span(c))["learners"]["a"]) == {None}
    assert told(c, math.inf) == []


def test_a_loss_that_rose_is_said_of_finished_runs_and_of_past_moments() -> None:
    fell = [2.0 + 8.0 / version for version in range(1, 31)]
    c = of_losses([*fell, *[6.0] * 10], [*fell, *[2.0] * 10])
    said = "the loss of a rises: 6 or more in its newest updates, 2.289 at its lowest"
    assert [line.replace("2.302", "2.3") for line in told(c, math.inf)] == [said]
    assert told(c, after(30)) == [], "it had not risen yet"
    assert len(told(c, after(40))) == 1


def test_lives_are_what_inputs_say_in_any_order() -> None:
    c = read(history()[:1])
    life = c.incarnations[c.learners.number("a"), 1]
    assert changed(life) == Incarnation(opened_at(1) - 6.0, 0, opened_at(1) - 1.0, (0, 1200))


def test_a_fragment_that_stands_while_others_are_merged_is_said_also_when_nobody_trains() -> None:
    others = range(1, len(read([]).ends))
    stopped = [committed(version, given("a", version - 1, version)) for version in range(1, 4)]

    def up_to(newest: int) -> RunHistory:
        went_on = [
            committed(v, given("a", v - 1, v, p=p), p=p) for p in others for v in range(1, newest + 1)
        ]  # fmt: skip
        return read(sorted([*stopped, *went_on], key=lambda h: (h.written_at, h.fragment)))

    assert told(up_to(3 + STANDS - 1), math.inf) == []
    c = up_to(3 + STANDS)
    assert told(c, math.inf) == ["fragment 0 stands still: most others were merged at least 8 times since then"]
    skewed = [
        committed(v, given("a", v - 1, v, p=p), p=p, writer="s2", written_at=opened_at(v) + 600.0)
        for p in others for v in range(1, 4 + STANDS)
    ]  # fmt: skip
    ahead = read(sorted([*stopped, *skewed], key=lambda h: (h.written_at, h.fragment)))
    assert not any("stands" in said for said in told(ahead, math.inf)), "another syncer's clock may be ahead"
    assert told(c, after(3 + STANDS - 1)) == [], "at that time it did not stand still yet"
    c.ends[0].broken = "commits/0: is missing"
    assert not any("stands" in said for said in told(c, math.inf))


@pytest.mark.parametrize(
    ("reason", "warns"),
    [("base-merged", False), ("overtaken", False), ("duplicate", False), ("stale", True), ("unreadable", True)],
)
def test_only_rejections_that_show_a_problem_are_warned_of(reason: str, warns: bool) -> None:
    """Every run has work that comes after an older update on its base was merged; nothing is wrong there."""
    c = read(
        committed(v, given("a", v - 1, v), rejected=(rejected("b", v - 1, reason, v),), rejected_total={reason: v})
        for v in range(1, 60)
    )
    said = [line for line in told(c, math.inf) if "were rejected" in line]
    assert len(said) == (2 if warns else 0)
    row = next(r for r in time_views.learners(c, math.inf) if r["learner"] == "b")
    assert row["faults"] == (59 if warns else 0)
    listed = time_views.commits(c, math.inf, only="rejected")["total"]
    assert listed == (0 if reason == "duplicate" else 59)


def test_a_cost_that_is_not_known_is_null_and_said() -> None:
    c = read(history())
    totals = time_views.totals(c, math.inf)
    sent = {"merged": 8e9, "up": 10e9, "checkpoints": 5e9, "down": 20e9, "down_planned": 1e9}
    prices = prices_of(None, None, [])
    at = after(3)
    unknown = accounts.cost(c, accounts.Costs(prices, None, ""), at, totals, sent)
    known = accounts.cost(c, accounts.Costs(prices, 8.0, ""), at, totals, sent)
    assert unknown["parts"]["gpus"] is None
    assert unknown["usd"] == pytest.approx(sum(part for part in unknown["parts"].values() if part is not None))
    assert known["usd"] - unknown["usd"] == pytest.approx(known["parts"]["gpus"])
    assert known["parts"]["gpus"] > 0.0
    # What learners sent leaves their region, checkpoints too; where nobody listened, what was merged.
    assert known["parts"]["egress"] == pytest.approx((10 + 5 + 20) * prices.egress_gb)
    silent = accounts.cost(c, accounts.Costs(prices, 8.0, ""), at, totals, sent | {"up": None, "checkpoints": None})
    assert silent["parts"]["egress"] == pytest.approx((8 + 20) * prices.egress_gb)
    said = _costs(declared.Board(run="memory://run"))
    assert said.gpus is None
    assert said.assumed.split("; ") == [
        "the cost of GPUs is not known (--learner-gpus N)",
        "all learners are outside the store's region, for egress (egress_gb in a file, --prices)",
    ]
    assert "GPUs" not in _costs(declared.Board(run="memory://run", learner_gpus=8, gpu_hour=2.0)).assumed
