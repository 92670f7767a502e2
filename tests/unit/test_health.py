"""The first line of `status` says which learners are merged, why others are not, and whether a person should act."""

import msgspec
import pytest

from isthmus.bus import BusItem, syncer_command
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    Alive,
    FromLearner,
    Leave,
    encode,
    learner_stream,
)
from isthmus.inspect.bus_view import BusView
from isthmus.inspect.health_summary import News, health
from isthmus.inspect.learner_problems import Part
from isthmus.inspect.status import Status
from isthmus.log.holes import GOES_ON
from isthmus.runtime.disk import Room
from support.healths import COMMITTED_AT, LEDGER, NOW, RUN, alive, beat, commit, left, looked, of


def test_all_merge() -> None:
    found = of(beat("a"), beat("b"), alive())
    assert (found.ok, found.said) == (True, "2 of 2 learners merge")


def test_no_syncer_says_since_when_and_what_to_type() -> None:
    found = of(beat("a"), beat("b"), silent=[alive()])
    assert not found.ok
    assert found.said == (
        "0 of 2 learners merge; no syncer is heard; the last commit is of 12:04:24; if s lives, ps -o stat= -p PID (its first log line has it) says T if it is "
        "frozen (kill -CONT PID wakes it) and D if it waits for a disk; else start one with: isthmus syncer "
        "s3://b/run --bus redis://h"
    )


@pytest.mark.parametrize(("rejected", "named"), [(4.0, False), (6.0, True)])
def test_a_learner_that_left_is_named_if_most_of_its_work_was_rejected(rejected: float, named: bool) -> None:
    ledger = msgspec.structs.replace(LEDGER, merged=10.0 - rejected, rejected=rejected)
    found = of(msgspec.structs.replace(beat("a"), ledger=ledger), left("a", True), beat("b"), left("b", True), alive())
    assert found.ok != named
    assert ("60% of the tokens of a were rejected, and it has left; its log names" in found.said) == named
    assert "tokens of b" not in found.said


@pytest.mark.parametrize("storing", ["a", "b"])
def test_who_stores_and_is_not_heard_is_at_work_elsewhere(storing: str) -> None:
    hearing = BusView(RUN)
    for stream, said in ((learner_stream("a"), beat("a")), (SYNCER_STREAM, alive())):
        hearing.take(stream, BusItem("1-0", encode(said)), 1.0)
    status = Status(hearing, [commit(COMMITTED_AT)], "", 0.0, NOW, unheard={"b"}, storing={storing})
    assert health(status, "s3://b/run", "redis://h").ok == (storing == "a")


def test_of_several_syncers_that_fell_silent_the_newest_two_may_be_frozen() -> None:
    said = of(beat("a"), silent=[alive(syncer=name) for name in ("s1", "s2", "s3")]).said
    assert "if s3 or s2 lives, ps -o stat= -p PID (its first log line has it) says T if it is frozen" in said


@pytest.mark.parametrize("healed", [None, object()], ids=["merged", "healed"])
def test_a_commit_that_heals_shows_nobody_at_work(healed: object) -> None:
    hearing = BusView(RUN)
    hearing.take(learner_stream("a"), BusItem("1-0", encode(beat("a"))), 1.0)
    said = health(Status(hearing, [commit(NOW - 1.0, healed=healed)], "", 0.0, NOW), "s3://b/run", "redis://h").said
    assert ("less than a minute ago: the syncers have another bus" in said) == (healed is None)
    assert "start one with: isthmus syncer" in said


def test_learners_that_hear_no_syncer_either_do_not_repeat_it() -> None:
    same, other = "a merge (no syncer is heard)", "a merge (no syncer is heard, but the run goes on)"
    found = of(beat("a", same), beat("b", same), beat("c", other), silent=[alive()])
    assert found.said.startswith("0 of 3 learners merge; no syncer is heard; the last commit is of ")
    assert [part.said for part in found.parts[1:]] == [f"c: waits for {other}"]
    assert "a: waits for" in of(beat("a", same), alive()).said, "here a syncer is heard"


def test_who_is_not_merged_is_named_with_the_reason_it_gives() -> None:
    why = "a merge (every update is rejected: stale)"
    found = of(beat("a"), beat("b", why), beat("c", "store (12 s)"), alive())
    assert not found.ok
    assert found.said.startswith("b: waits for a merge (every update is rejected: stale): its updates arrive too late")
    assert found.said.endswith(
        "c: waits for store (12 s): it goes on by itself once that is over; isthmus doctor s3://b/run --bus redis://h "
        "--role learner --learner c, beside it, says what is wrong; 1 of 3 learners merge"
    )


def test_of_many_only_a_few_are_named() -> None:
    found = of(*(beat(f"l{i}", "bus") for i in range(9)), alive())
    assert found.said.startswith("l0: waits for bus: ")
    assert "l2: waits for bus: " in found.said
    assert found.said.endswith(
        "6 more learners have such trouble: the table of learners names all; 0 of 9 learners merge"
    )


def test_fewer_than_expected_are_something_to_see_to_unless_all_are_done() -> None:
    found = of(beat("a"), alive(), expected=3)
    assert (found.ok, found.said) == (
        False,
        "3 learners expected, 1 heard: start the others, or expect fewer; 1 of 1 learners merge",
    )
    assert of(beat("a"), beat("b"), beat("c"), alive(), expected=3).ok
    assert of(beat("a"), left("a", done=True), alive(), expected=3).ok


def test_who_fell_silent_is_named_and_ends_no_check_as_long_as_others_merge() -> None:
    found = of(beat("a"), alive(), silent=[beat("spot-1")])
    assert found.ok
    assert found.said.startswith("no messages come from spot-1: it was killed or is cut off, or has another bus than ")
    assert not of(alive(), silent=[beat("spot-1")]).ok
    assert [len(of(beat("a"), alive(), silent=s).parts) for s in ([], [beat("b")])] == [0, 1]


def test_if_nobody_is_heard_nothing_is_to_be_started_before_the_bus_was_tried() -> None:
    found = of(silent=[beat("a"), beat("b"), alive()])
    assert not found.ok
    assert found.said == (
        "0 of 2 learners merge; no process is heard, and none has left (the last commit is of 12:04:24): all were killed "
        "or are cut off, or the bus refuses their messages; look first whether they live, on each of their machines: "
        "pgrep -af isthmus (for a training loop of your own, the name of its script in place of isthmus). Beside those "
        "that live, isthmus doctor s3://b/run --bus redis://h --role syncer says what keeps them from the bus; start the "
        "others again by their old commands"
    )


def test_of_the_silent_those_are_named_first_that_were_heard_last() -> None:
    old, new = (msgspec.structs.replace(beat(name), versions=(at, at)) for name, at in (("a", 3), ("z", 90)))
    assert of(beat("b"), alive(), silent=[old, new]).said.startswith("no messages come from z, a: they were killed")


def test_a_learner_that_is_heard_elsewhere_is_told_to_come_only_where_a_syncer_is() -> None:
    for messages, advice in (([alive()], "start it again with this one"), ([], "the one that the syncers' commands")):
        hearing = BusView(RUN)
        for message in messages:
            hearing.take(SYNCER_STREAM, BusItem("1-0", encode(message)), 1.0)
        hearing.take(learner_stream("a"), BusItem("1-0", encode(beat("a"))), 1.0)
        found = health(Status(hearing, [commit(NOW)], "", 0.0, NOW, unheard={"b"}), "r", "sim://other")
        (part,) = [part for part in found.parts if "joined in the store" in part.said]
        assert advice in part.do


def test_a_full_disk_is_said_whether_or_not_processes_are_heard() -> None:
    full = (
        "the disk of r is full: 3 MB are left; enlarge it while they run, or make room on it: isthmus gc r --apply frees "
        "what the run does not need and is over an hour old, which is little in a young or small run; if that is not "
        "enough, stop all processes of the run (what learners have trained since their last checkpoints is lost then: "
        "none can be stored), wait until they have ended, delete the rest by isthmus gc r --apply --keep 8 --min-age 0 "
        "and start them again"
    )
    found = looked(beat("a"), alive(), room=Room(3_000_000, None))
    assert (found.ok, found.said) == (False, f"{full}; 1 of 1 learners merge")
    hearing = BusView(RUN)
    hearing.take(learner_stream("a"), BusItem("1-0", encode(beat("a"))), None)
    assert health(Status(hearing, [], "", 0.0, NOW, room=Room(3_000_000, None)), "r", "b").said.startswith(
        f"{full}; 0 of 1"
    )
    few = "the disk of r is full: 5.0 GB and room for 1 more file (inodes: df -i) are left; enlarge it"
    assert looked(beat("a"), alive(), room=Room(5_000_000_000, 1)).said.startswith(few)
    many = "the disk of r is full: 3 MB are left; enlarge it"
    assert looked(beat("a"), alive(), room=Room(3_000_000, 200_000)).said.startswith(many)


def test_of_learners_whose_work_was_not_answered_those_with_less_are_named_too() -> None:
    def done(name: str, pending: float) -> list[FromLearner]:
        tally = msgspec.structs.replace(LEDGER, processed=1000.0, pending=pending)
        told = msgspec.structs.replace(beat(name), step=100, tokens_seen=1000, ledger=tally)
        return [told, left(name, done=True)]

    found = looked(*done("eu", 130.0), *done("us", 250.0), *done("ap", 20.0), period=8.0)
    assert (
        "; eu (13%), us (25%) left with tokens that no syncer answered, which are not in the model; bring" in found.said
    )
    assert looked(*done("eu", 130.0), *done("us", 200.0), period=8.0).ok, "as after any run"
    for written_at, others in ((0.5, "eu (13%), us (25%)"), (2.0, "eu (13%)")):  # after it was heard, or before
        recent = [commit(written_at, us=0.1)]
        assert f"; {others} left with" in looked(*done("eu", 130.0), *done("us", 250.0), recent=recent, period=4.0).said
    for version, ok in ((2, False), (3, True)):  # of work on a version that is too old nothing can be merged
        found = looked(*done("eu", 130.0), *done("us", 250.0), period=8.0, version=version)
        assert found.ok is ok
        assert found.said.endswith("; eu (13%), us (25%) left with tokens that are too old by now to be merged") == ok


def test_a_quorum_of_more_learners_than_there_are_is_said_and_is_no_failure() -> None:
    found = of(beat("a"), alive(quorum=5), silent=[beat("b")])
    assert found.ok
    assert found.said.endswith(
        "; s has a quorum of 5, and 2 learners were ever heard: its rounds wait for every learner, and until their "
        "deadline for one that stalls; start the other learners, or start the syncer again with --quorum K, where K is "
        "at most 2; 1 of 2 learners merge"
    )
    assert "quorum" not in of(beat("a"), left("b", done=True), alive(quorum=2)).said


def test_a_bus_that_is_away_is_all_that_can_be_said() -> None:
    found = of(bus_error="the bus cannot be reached: refused")
    assert not found.ok
    assert found.said.startswith(
        "the bus cannot be reached: refused: it is unknown which processes are live; the last commit is of"
    )
    assert found.said.endswith(
        "; give --bus the URL that the run's syncers have; if it is this one, start the server that should answer there: "
        "nothing that was in it has to be restored, and an empty Redis will do"
    )


def test_a_bus_in_the_store_is_sought_at_the_address_of_the_run() -> None:
    status = Status(BusView(RUN), [], "the bus cannot be reached: refused", 0.0, NOW)
    assert health(status, "s3://b/run", "store:").said.endswith("; check that s3://b/run is reachable")


@pytest.mark.parametrize("bus", ["store:", "redis://h", "sqlite:///folder/run/bus.sqlite"])
def test_commands_always_name_the_bus(bus: str) -> None:
    """The shell that they are copied to may have another one in ISTHMUS_BUS."""
    run = "s3://b/run"
    assert syncer_command(run, bus, " --quorum 2", signed=False) == f"isthmus syncer {run} --bus {bus} --quorum 2"
    signed = syncer_command(run, bus, " --quorum 2", signed=True)
    assert signed.startswith(". syncer/env && isthmus syncer --quorum 2 (")
    assert signed.endswith(f" isthmus syncer {run} --bus {bus} --quorum 2 --key SYNCER_KEY_FILE)")


def test_the_advice_for_a_bus_that_is_away_is_given_once() -> None:
    found = of(bus_error="the bus has not answered for 9 s: check that redis://h is reachable from here.")
    assert found.said == (
        "the bus has not answered for 9 s: check that redis://h is reachable from here: it is unknown which processes "
        "are live; the last commit is of 12:04:24; give --bus the URL that the run's syncers have; if it is this one, start "
        "the server that should answer there: nothing that was in it has to be restored, and an empty Redis will do"
    )


@pytest.mark.parametrize(
    ("syncer", "said"),
    [
        (alive(able=False), "0 of 1 syncers can serve"),
        (alive(broken=(0,)), "fragment 0 cannot be folded: isthmus heal"),
    ],
)
def test_a_syncer_that_is_there_and_does_not_serve_is_told(syncer: Alive, said: str) -> None:
    found = of(beat("a"), syncer)
    assert not found.ok
    assert said in found.said


@pytest.mark.parametrize(
    ("learners", "ok", "said"),
    [
        ([left("a", True), left("b", True)], True, "no learner trains: 2 of 2 learners are done; the last commit"),
        ([left("a", True), left("b", False)], False, "1 of 2 learners are done, 1 stopped before"),
        (
            [left("a", False)],
            False,
            "no learner trains: 1 of 1 learners stopped; the last commit is of 12:04:24; a left",
        ),
        ([], False, "no learner trains, and none was ever heard"),
    ],
)
def test_a_run_that_nobody_trains_is_done_or_was_left(learners: list[Leave], ok: bool, said: str) -> None:
    found = of(*learners, alive())
    assert found.ok is ok
    assert said in found.said


def test_what_was_committed_on_another_day_has_its_date() -> None:
    head = commit(NOW - 2 * 86400.0)
    found = health(Status(BusView(RUN), [head], "", 0.0, NOW), "r", "b")
    assert "the last commit is of 2026-11-20 12:10" in found.said
    assert "nothing was ever committed" in of(alive(), committed=False).said


def test_a_run_whose_learners_are_done_and_were_never_merged_is_not_well() -> None:
    found = of(left("a", True), alive(), committed=False)
    assert not found.ok
    assert "what they learnt is not in the run" in found.said
    assert "isthmus syncer s3://b/run --bus redis://h" in found.said


def test_the_worst_problem_is_said_first() -> None:
    lost = [commit(COMMITTED_AT, p, 7, [("b", "too-long")], a=1.0) for p in range(3)]
    hearing = BusView(RUN)
    for at, said in [(None, beat("d")), (1.0, beat("a")), (1.0, beat("b")), (1.0, beat("c", "store (4 s)"))]:
        hearing.take(learner_stream(said.learner), BusItem("1-0", encode(said)), at)
    hearing.take(SYNCER_STREAM, BusItem("1-0", encode(alive(quorum=9))), 1.0)
    wrong = {1: f"commits/1: {GOES_ON}", 2: "commits/2: no"}
    found = health(
        Status(hearing, list(lost), "", 0.0, NOW, wrong=wrong, room=Room(0, None), joining={"z": 1}), "r", "b"
    )
    order = ["the disk of r", "the log of fragment 2", "b explodes", "c: waits for store"]
    order += ["fragment 1 has a hole in its history"]  # the last that makes --check fail
    order += ["no messages come from d", "s has a quorum", "z joined within the last minute"]
    assert [part.said[: len(begin)] for part, begin in zip(found.parts, order, strict=True)] == order
    assert found.count == "1 of 4 learners merge"


def test_a_problem_that_lasts_is_told_once() -> None:
    def waits(name: str, seconds: int) -> Part:
        return Part(f"{name}: waits for store ({seconds} s)", "wait")

    news, stands = News(), [Part(f"fragment {p} stands still: {p} times") for p in (1, 2)]
    assert news.of([waits("us-1", 3), *stands]) == [
        "us-1: waits for store (3 s)",
        "  → wait",
        *(s.said for s in stands),
    ]
    assert news.of([waits("us-1", 8), *stands]) == []
    assert news.of([waits("us-2", 9), stands[0]]) == [
        "us-2: waits for store (9 s)", "  → wait", "over: us-1: waits for store (8 s)", f"over: {stands[1].said}",
    ]  # fmt: skip
    assert news.of([waits("us-1", 1)])[0] == "us-1: waits for store (1 s)"


def test_one_that_fell_silent_before_the_others_left_did_not_end_the_run() -> None:
    found = of(left("a", True), left("b", True), silent=[beat("c"), alive()])
    assert found.said.startswith("no messages come from c: it was killed or is cut off")
    assert "no learner trains: 2 of 2 learners are done" in found.said
    assert "none has left" not in found.said
    assert found.ok, "it may have been taken away on purpose"
    assert "none has left" in of(silent=[beat("c"), alive()]).said
    assert "no learner trains" not in of(left("a", True), alive(), silent=[beat("c")]).said, "a syncer still serves c"


def test_syncers_that_stopped_are_not_said_to_be_killed() -> None:
    stopped, other = alive(stopping=True), alive(syncer="t", id="w")
    assert "all were killed" in of(silent=[beat("c")]).said, "no syncer was ever heard"
    assert "all were killed" in of(silent=[beat("c"), stopped, other]).said
    assert "the syncers have stopped, and no learner has left" in of(silent=[beat("c"), stopped]).said


def test_a_newest_commit_of_the_future_shows_a_wrong_clock_without_an_announcement() -> None:
    def said(fragment_0: float, fragment_1: float) -> list[str]:
        heads = [commit(NOW + ahead, p, 3, a=1.0) for p, ahead in enumerate((fragment_0, fragment_1))]
        for head, name in zip(heads, ("s", "t"), strict=True):
            vars(head.header).update(writer=name)
        hearing = BusView(RUN)
        hearing.take(SYNCER_STREAM, BusItem("1-0", encode(alive())), 1.0)
        hearing.take(learner_stream("a"), BusItem("1-0", encode(beat("a"))), 1.0)
        older = commit(NOW + 999.0, 0, 2, a=1.0)
        vars(older.header).update(writer="u")
        found = health(Status(hearing, list(heads), "", 0.0, NOW, recent=[older, *heads]), "r", "b")
        return [part.said for part in found.parts if "clock" in part.said]

    assert said(-300.0, 60.0) == []
    assert said(-300.0, 61.0) == ["the clock of t is 61 s ahead of this machine's"]
