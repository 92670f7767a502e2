"""The first line of `status` says which learners are merged, why others are not, and whether a person should act."""

import time
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from isthmus.bus import BusItem, syncer_command
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    Alive,
    FromLearner,
    Heartbeat,
    Leave,
    Tally,
    encode,
    learner_stream,
)
from isthmus.inspect.bus_view import BusView
from isthmus.inspect.health_summary import Health, News, health
from isthmus.inspect.learner_problems import Part
from isthmus.inspect.losses import Point
from isthmus.inspect.restarts import Restarts
from isthmus.inspect.status import Status
from isthmus.log import Commit
from isthmus.log.holes import GOES_ON
from isthmus.reasons import Clip

RUN = bytes(range(32))
NOW = time.mktime((2026, 11, 22, 12, 10, 0, 0, 0, -1))
COMMITTED_AT = NOW - 336.0
"""12:04:24 on the day of `NOW`."""

LEDGER = Tally(processed=10.0, merged=10.0, overwritten=0.0, late=0.0, pending=0.0, rejected=0.0, lost=0.0)


def beat(learner: str, waiting_for: str = "") -> Heartbeat:
    return Heartbeat(
        run=RUN, id="h", learner=learner, incarnation=1, step=3, steps_target=0, tokens_seen=30, loss=None, step_s=0.1,
        upload_s=0.1, sync_s=0.1, versions=(1,), bytes_up=1, bytes_down=1, tokens_lost=0, ledger=LEDGER,
        waiting_for=waiting_for,
    )  # fmt: skip


def alive(**other: object) -> Alive:
    return msgspec.structs.replace(
        Alive(
            run=RUN, id="v", syncer="s", commits=0, heads=(1,), rejected={}, waiting_for="", lag_ms=0.0, held=1,
            fold_s=0.0, broken=(), stopping=False,
        ),
        **other,
    )  # fmt: skip


def left(learner: str, done: bool) -> Leave:
    return Leave(run=RUN, id="l", learner=learner, incarnation=1, step=3, done=done)


def commit(
    written_at: float,
    fragment: int = 0,
    version: int = 0,
    rejected: Sequence[tuple[str, str]] = (),
    healed: object = None,
    **scales: float,
) -> Commit:
    """Return a commit written at this time. `scales`: learners merged, and the share of their updates' length;
    `rejected`: learners whose updates were rejected, and why."""
    turned = [SimpleNamespace(learner=name, reason=reason) for name, reason in rejected]
    inputs = [
        SimpleNamespace(learner=name, scale=scale, weight=1.0, tokens=1, loss=None, norm=0.0, clipped=())
        for name, scale in scales.items()
    ]
    return cast(
        Commit,
        SimpleNamespace(
            header=SimpleNamespace(
                written_at=written_at, fragment=fragment, inputs=inputs, rejected=turned, healed=healed
            ),
            version=version,
        ),
    )


def of(
    *messages: Alive | FromLearner,
    silent: Sequence[Alive | FromLearner] = (),
    bus_error: str = "",
    committed: bool = True,
    expected: int = 0,
) -> Health:
    hearing = BusView(RUN)
    for at, said in [(None, silent), (1.0, messages)]:
        for message in said:
            stream = SYNCER_STREAM if isinstance(message, Alive) else learner_stream(message.learner)
            hearing.take(stream, BusItem("1-0", encode(message)), at)
    head = commit(COMMITTED_AT) if committed else None
    return health(Status(hearing, [head], bus_error, 0.0, NOW), "s3://b/run", "redis://h", expected)


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


def test_where_no_fragment_can_be_merged_no_learner_is_counted() -> None:
    assert of(beat("a"), alive(broken=(0,))).said.endswith("; 0 of 1 learners merge")


def test_of_several_syncers_that_fell_silent_the_newest_two_may_be_frozen() -> None:
    said = of(beat("a"), silent=[alive(syncer=name) for name in ("s1", "s2", "s3")]).said
    assert "if s3 or s2 lives, ps -o stat= -p PID (its first log line has it) says T if it is frozen" in said


@pytest.mark.parametrize("healed", [None, object()], ids=["merged", "healed"])
def test_a_commit_that_heals_shows_nobody_at_work(healed: object) -> None:
    hearing = BusView(RUN)
    hearing.take(learner_stream("a"), BusItem("1-0", encode(beat("a"))), 1.0)
    said = health(Status(hearing, [commit(NOW - 1.0, healed=healed)], "", 0.0, NOW), "s3://b/run", "redis://h").said
    assert ("is not the bus of its syncers" in said, "start one with: isthmus syncer" in said) == (
        healed is None, healed is not None,
    )  # fmt: skip


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


def test_damage_is_said_before_the_advice_to_start_what_fell_silent() -> None:
    hearing = BusView(RUN)
    hearing.take(learner_stream("a"), BusItem("1-0", encode(beat("a"))), None)
    wrong = {0: f"commits/1: {GOES_ON}", 1: "commits/2: no"}
    found = health(Status(hearing, [], "", 0.0, NOW, wrong=wrong), "r", "b")
    order = ["the log of fragment 1", "0 of 1 learners merge; no process is heard", "fragment 0 has a hole"]
    assert [part.said[: len(begin)] for part, begin in zip(found.parts, order, strict=True)] == order


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
    found = looked(beat("a"), alive(), room=3_000_000)
    assert (found.ok, found.said) == (False, f"{full}; 1 of 1 learners merge")
    hearing = BusView(RUN)
    hearing.take(learner_stream("a"), BusItem("1-0", encode(beat("a"))), None)
    assert health(Status(hearing, [], "", 0.0, NOW, room=3_000_000), "r", "b").said.startswith(f"{full}; 0 of 1")


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
    for version, ok in ((2, False), (3, True)):  # of work on a version that is too old nothing can be merged
        assert looked(*done("eu", 130.0), *done("us", 250.0), period=8.0, version=version).ok is ok


def test_a_quorum_of_more_learners_than_there_are_is_said_and_is_no_failure() -> None:
    found = of(beat("a"), alive(quorum=5), silent=[beat("b")])
    assert found.ok
    assert found.said.endswith(
        "; s has a quorum of 5, and 2 learners were ever heard: its rounds wait for every learner, and until their "
        "deadline for one that stalls; start the other learners, or start the syncer again with --quorum K, where K is "
        "at most 2; 1 of 2 learners merge"
    )
    assert "quorum" not in of(beat("a"), left("b", done=True), alive(quorum=2)).said


def test_a_learner_that_restarts_in_vain_is_named() -> None:
    found = looked(beat("a"), alive(), restarts={"a": Restarts(4, 1822)})
    assert (found.ok, found.said) == (
        False,
        "a has joined 4 times since its last checkpoint and went on after step 1822 each time: "
        "two processes have its name, or it dies before it can store one; its log says which; 1 of 1 learners merge",
    )
    assert "has joined at least 8 times" in looked(beat("a"), alive(), restarts={"a": Restarts(8, 0)}).said


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


def test_damage_is_said_whether_or_not_the_bus_answers() -> None:
    status = Status(
        BusView(RUN), [], "the bus cannot be reached: refused", 0.0, NOW, wrong={1: "commits/1: is missing"}
    )
    assert (
        "; the log of fragment 1 is damaged: commits/1: is missing; isthmus heal r says"
        in health(status, "r", "b").said
    )


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


# --- fragments that cannot be served, and damage in the log -----------------------------------------------------------


def test_what_is_slow_to_read_is_not_said_to_be_damaged() -> None:
    found = of(beat("a"), alive(broken=(5, 6), slow=(5, 6)))
    assert not found.ok
    assert "fragments 5, 6 are slow to be read by s, which leaves them to others" in found.said
    assert "heal" not in found.said


def test_what_may_not_be_read_is_not_said_to_be_damaged() -> None:
    found = of(beat("a"), alive(broken=(2,), refused=(2,)))
    assert not found.ok
    assert "fragment 2 may not be read by s: give it a syncer's rights (isthmus doctor s3://b/run" in found.said
    assert "heal" not in found.said


def test_only_what_is_damaged_is_to_be_healed() -> None:
    found = of(beat("a"), alive(broken=(1, 2, 3), slow=(1,), refused=(2,)))
    assert "fragment 3 cannot be folded: isthmus heal s3://b/run says what can be done (run it" in found.said


def test_a_hole_in_the_log_of_what_is_served_is_said() -> None:
    found = of(beat("a"), alive(holed=(4,)))
    assert (found.ok, found.said) == (
        False,
        "fragment 4 has a hole in its history (the run goes on): isthmus heal s3://b/run names what is missing; "
        "1 of 1 learners merge",
    )


def looked(*messages: Alive | FromLearner, version: int = 0, **found: Any) -> Health:
    hearing = BusView(RUN)
    for message in messages:
        stream = SYNCER_STREAM if isinstance(message, Alive) else learner_stream(message.learner)
        hearing.take(stream, BusItem("1-0", encode(message)), 1.0)
    return health(Status(hearing, [commit(COMMITTED_AT, 0, version)], "", 0.0, NOW, **found), "r", "b")


def test_damage_is_said_once_whoever_finds_it() -> None:
    found = looked(beat("a"), alive(broken=(1,), holed=(2,)), wrong={1: "commits/1: is missing", 2: "commits/2: no"})
    assert not found.ok
    heal = "  → isthmus heal r says what can be done (run it as the reader, and with --apply as a syncer)"
    assert found.lines == [
        "the log of fragment 1 is damaged: commits/1: is missing",
        heal,
        "the log of fragment 2 is damaged: commits/2: no",
        heal,
        "1 of 1 learners merge",
    ]


def test_a_finished_run_that_is_damaged_or_stands_is_not_well() -> None:
    assert looked(left("a", done=True)).ok
    damaged = looked(left("a", done=True), wrong={p: f"of {p}" for p in range(5)})
    assert not damaged.ok
    assert "the logs of 2 more fragments are damaged, too" in damaged.said
    stands = looked(left("a", done=True), standing=(3,))
    assert not stands.ok
    assert "fragment 3 stands still: most others were merged at least 8 times since then; " in stands.said
    assert "fragments 3, 4 stand still: " in looked(left("a", done=True), standing=(3, 4)).said


def test_a_damaged_fragment_is_not_said_to_stand_as_well() -> None:
    assert "stands still" not in looked(beat("a"), alive(), wrong={3: "no"}, standing=(3,)).said


def test_a_rising_loss_is_named_while_it_lasts() -> None:
    low, high = [Point(float(k), 2.0) for k in range(16)], [Point(16.0 + k, 3.0) for k in range(8)]
    found = looked(beat("a"), alive(), losses={"a": [*low, *high], "b": low})
    assert not found.ok
    assert found.said == (
        "the loss of a rises: 3 or more in its newest updates, 2 at its lowest; look at its data, or start it again "
        "with a lower learning rate (hyperparameters='passed'); isthmus replay r draws all losses; 1 of 1 learners merge"
    )
    # A learner that left long ago is not reported for its last losses.
    assert looked(beat("a"), alive(), losses={"a": [*low, *high], "b": [*low, Point(99.0, 2.0)]}).ok
    assert looked(beat("b"), left("a", done=False), alive(), losses={"a": [*low, *high]}).ok
    # Once all have left, what they ended with is what there is.
    ended = looked(left("a", done=True), losses={"a": [*low, *high]})
    assert (ended.ok, ended.said.split(":")[0]) == (False, "the loss of a rose to its end")
    assert looked(losses={"a": [*low, *high]}).said.count("rises") == 1, "of a learner on another bus nothing is known"


def test_a_learner_with_the_weight_but_not_the_work_is_named() -> None:
    def of_inputs(*heads: Sequence[tuple[str, float, int]], short: Collection[str] = ()) -> Health:
        hearing = BusView(RUN)
        for said in (beat("a"), beat("b"), alive()):
            stream = SYNCER_STREAM if isinstance(said, Alive) else learner_stream(said.learner)
            hearing.take(stream, BusItem("1-0", encode(said)), 1.0)
        commits = []
        for p, of in enumerate(heads):
            cut = dict.fromkeys(short, (Clip.SHORT,))
            inputs = [
                SimpleNamespace(learner=n, scale=1.0, weight=w, tokens=t, loss=None, norm=0.0, clipped=cut.get(n, ()))
                for n, w, t in of
            ]
            header = SimpleNamespace(written_at=COMMITTED_AT, fragment=p, inputs=inputs, rejected=(), healed=None)
            commits.append(SimpleNamespace(header=header, version=0))
        return health(Status(hearing, cast("list[Commit | None]", commits), "", 0.0, NOW), "r", "b")

    found = of_inputs(
        [("a", 96.0, 100), ("b", 4.0, 100)], [("a", 5.0, 70), ("a", 7.0, 30), ("b", 1.0, 50)], [("b", 1.0, 1)]
    )
    assert not found.ok
    assert found.said == (
        "a has 94% of the weight of the newest rounds, with 58% of their tokens: the others "
        "hardly count; isthmus explain r 1/0 shows the weights of a round and why; stop or expel a if it should not "
        "count for so much; 2 of 2 learners merge"
    )
    few = [("a", 96.0, 50), ("b", 2.0, 25), ("c", 2.0, 25)]
    assert of_inputs(few, short="bc").said.startswith(
        "b, c hardly move: 4% of the weight of the newest rounds, with 50%"
    )
    assert of_inputs(few, short="b").said.startswith("a has 96% of the weight")
    assert of_inputs(few[:2], few[:2], short="b").said.startswith("b hardly moves: 2% of the weight")
    assert of_inputs([("a", 96.0, 76), ("b", 4.0, 24)]).ok  # it is faster
    assert of_inputs([("a", 90.0, 50), ("b", 10.0, 50)]).ok
    assert of_inputs([("a", 1.0, 1)], [("a", 1.0, 1)]).ok


def test_learners_that_are_rejected_for_their_manifest_are_named() -> None:
    """Of learners that train, and of those that have left without anything being merged."""
    away = {"b": "no-manifest", "c": "no-manifest", "d": "source-not-allowed"}
    hearing = BusView(RUN)
    for said in (beat("a"), beat("b", "a merge (every update is rejected: no-manifest)"), alive(turned_away=away)):
        stream = SYNCER_STREAM if isinstance(said, Alive) else learner_stream(said.learner)
        hearing.take(stream, BusItem("1-0", encode(said)), 1.0)
    status = Status(hearing, [None], "", 0.0, NOW)
    found = health(status, "r", "b")
    assert (found.ok, found.count) == (False, "1 of 2 learners merge")
    (one, other) = found.parts
    assert str(one).startswith("updates of b, c are rejected for their manifest (no-manifest); the charter asks for a")
    assert str(other).startswith("updates of d are rejected for their manifest (source-not-allowed); ")
    for name in ("a", "b"):
        hearing.take(learner_stream(name), BusItem("2-0", encode(left(name, True))), 2.0)
    over = health(status, "r", "b")
    assert not over.ok
    assert "updates of b, c are rejected for their manifest (no-manifest)" in over.said
    assert status.as_json()["syncers"][0]["turned_away"] == away  # type: ignore[index]


def test_a_learner_that_explodes_is_named() -> None:
    def of_commits(*heads: Commit | None, waits: str = "") -> Health:
        hearing = BusView(RUN)
        for said in (beat("a"), beat("b", waits), alive()):
            stream = SYNCER_STREAM if isinstance(said, Alive) else learner_stream(said.learner)
            hearing.take(stream, BusItem("1-0", encode(said)), 1.0)
        return health(Status(hearing, list(heads), "", 0.0, NOW), "r", "b")

    found = of_commits(
        commit(COMMITTED_AT, 0, a=1.0, b=1e-3), commit(COMMITTED_AT, 1, a=0.4, b=2e-3), commit(COMMITTED_AT, 2, a=1.0, b=1.0), None
    )  # fmt: skip
    assert not found.ok
    advice = (
        "; stop it by SIGTERM, so that it leaves (a loop of your own leaves if it closes its link then), lower the learning rate or "
        "clip gradients, and start it under a new name (in a signed run an owner adds that: isthmus create once more, with "
        "--learner NAME, or isthmus members add), so that it begins with the run's model instead of its own checkpoint; the owner can expel it"
    )
    assert found.said == (
        "b explodes: of its 3 newest updates, 2 cut to less than a quarter of their length (the "
        "shortest to 0.001); the table of learners shows its loss, isthmus explain r 0/0 such a "
        f"round{advice}; 1 of 2 learners merge"
    )
    # Nothing else is said of it while a part of its updates is rejected, merged or cut.
    mixed = [commit(COMMITTED_AT, p, 7, [("b", "too-long")] if p < 2 else (), a=1.0, b=0.5) for p in range(4)]
    found = of_commits(*mixed, waits="a merge (every update is rejected: too-long)")
    assert found.said == (
        "b explodes: of its 6 newest updates, 2 rejected (too-long); the table of learners shows its loss, isthmus explain r 0/7 such a round"
        f"{advice}; 1 of 2 learners merge"
    )
    assert of_commits(commit(COMMITTED_AT, 0, 0, [("b", "stale"), ("b", "stale")], a=1.0)).ok
    # A learner that is cut a little, as first and last updates are, is not reported.
    assert of_commits(commit(COMMITTED_AT, 0, a=0.4), commit(COMMITTED_AT, 1, a=1.0)).ok
    assert of_commits(commit(COMMITTED_AT, 0, a=0.6, b=1.0)).ok
    assert of_commits(commit(COMMITTED_AT, 0, a=0.2, b=1.0)).ok
    # While learning rates are warmed up, first updates are compared with far shorter ones.
    young = [commit(COMMITTED_AT, p, 1 + p, a=0.044, b=1.0) for p in range(3)]
    assert of_commits(*young).ok
    assert not of_commits(*young, commit(COMMITTED_AT, 3, 4, a=0.044, b=1.0)).ok
    # Nor is one that trained on alone after a restart.
    assert of_commits(commit(COMMITTED_AT, 0, a=0.29, b=1.0), commit(COMMITTED_AT, 1, a=0.3, b=1.0)).ok
    assert not of_commits(commit(COMMITTED_AT, 0, a=0.05, b=1.0)).ok
    # Nor one with long rounds beside the short updates of others, or beside none.
    for norm, well in ((15.0, True), (60.0, False)):
        beside = [commit(COMMITTED_AT, 0, 8, a=1.0), commit(COMMITTED_AT, 0, 9, b=0.083)]
        for one, length, steps in zip(beside, (1.0, norm), (5, 27), strict=True):
            vars(one.header.inputs[0]).update(norm=length, steps=steps)
        assert of_commits(*beside).ok == well
        assert of_commits(beside[1]).ok
    # What it sent itself does not show that its other updates are usual.
    mild = [commit(COMMITTED_AT, 0, 8 + n, a=1.0, b=scale) for n, scale in enumerate((0.1, 0.3, 0.2, 0.24))]
    for one in mild:
        for given, length in zip(one.header.inputs, (1.0, 30.0), strict=True):
            vars(given).update(norm=length, steps=5)
    assert "b explodes: of its 4 newest updates, 3 cut" in of_commits(*mild).said
    # What explodes on and on is cut by less, since its own updates count as usual, too. A few such cuts are none.
    for many, well in ((7, True), (8, False)):
        mild = [commit(COMMITTED_AT, 0, 8 + n, a=1.0, b=0.34 if n else 1.0) for n in range(many)]
        for one in mild:
            for given, length in zip(one.header.inputs, (1.0, 12.0), strict=True):
                vars(given).update(norm=length, steps=5)
        found = of_commits(*mild)
        assert found.ok == well
    assert (
        "b explodes: of its 8 newest updates, 7 cut to less than half of their length (the shortest to 0.34)"
        in found.said
    )
    # A learner that is gone is no longer to be stopped.
    assert of_commits(commit(COMMITTED_AT, 0, a=1.0, c=0.05)).ok


def test_what_a_learner_moved_counts_over_its_restarts() -> None:
    hearing = BusView(RUN)
    for life, up in [(1, 70), (1, 100), (2, 5), (1, 101)]:
        said = msgspec.structs.replace(beat("a"), incarnation=life, bytes_up=up)
        hearing.take(learner_stream("a"), BusItem("1-0", encode(said)), 1.0)
    assert hearing.learners["a"].traffic == (105, 2, 0)


# --- the order of problems, and what is new ---------------------------------------------------------------------------


def test_the_worst_problem_is_said_first() -> None:
    lost = [commit(COMMITTED_AT, p, 7, [("b", "too-long")], a=1.0) for p in range(3)]
    hearing = BusView(RUN)
    for at, said in [(None, beat("d")), (1.0, beat("a")), (1.0, beat("b")), (1.0, beat("c", "store (4 s)"))]:
        hearing.take(learner_stream(said.learner), BusItem("1-0", encode(said)), at)
    hearing.take(SYNCER_STREAM, BusItem("1-0", encode(alive(quorum=9))), 1.0)
    wrong = {1: f"commits/1: {GOES_ON}", 2: "commits/2: no"}
    found = health(Status(hearing, list(lost), "", 0.0, NOW, wrong=wrong, room=0, joining={"z": 1}), "r", "b")
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


LOW, HIGH = [Point(float(t), 2.0) for t in range(40)], [Point(float(t), 2.0 / (1 + t)) for t in range(40)]


def long_steps(
    *updates: tuple[int, str, float, int],
    losses: Mapping[str, Sequence[Point]] | None = None,
    scale: float = 1.0,
    weight: float = 1.0,
    ended: bool = False,
) -> Health:
    """Return the health of a run whose newest commits have these inputs: fragment, learner, length, steps.

    `scale`, `weight`: of a's updates. Of the learners only z is away. `ended`: all of them have left.
    """
    names = sorted({name for _, name, _, _ in updates} - {"z"})
    commits = []
    for version, (fragment, name, norm, steps) in enumerate(updates, 20):
        merged = commit(COMMITTED_AT, fragment, version, (), None, **{name: scale if name == "a" else 1.0})
        vars(merged.header.inputs[0]).update(norm=norm, steps=steps)
        commits.append(merged)
    hearing = BusView(RUN)
    hearing.take(SYNCER_STREAM, BusItem("1-0", encode(alive())), 1.0)
    for name in names:
        hearing.take(learner_stream(name), BusItem("1-0", encode(left(name, True) if ended else beat(name))), 1.0)
    head = commit(COMMITTED_AT, 0, 0, (), None, **dict.fromkeys(names, 1.0))
    for given in head.header.inputs:
        vars(given).update(weight=weight if given.learner == "a" else 1.0)
    return health(Status(hearing, [head], "", 0.0, NOW, losses=losses or {}, recent=commits), "r", "b")


@pytest.mark.parametrize(
    ("count", "norm", "steps", "named"),
    [
        (8, 6.0, 4, True),
        (7, 6.0, 4, False),  # too few to judge by
        (8, 5.0, 4, False),
        (8, 6.0, 8, False),  # twice the steps explain half of it
        (8, 6.0, 3, True),  # fewer steps explain nothing
    ],
)
def test_updates_that_are_much_longer_than_the_others_are_named(
    count: int, norm: float, steps: int, named: bool
) -> None:
    found = long_steps(*[(0, "a", norm, steps)] * count, (0, "b", 1.0, 4), (0, "b", 0.1, 4), (0, "b", 1.5, 4))
    assert found.ok
    assert found.said.startswith("the newest updates of a are 6 times as long as the others', for as many steps") == (
        named and steps == 4
    )
    assert ("updates of a are" in found.said) == named
    assert "isthmus explain r 0/" in found.said or not named
    assert "of b" not in found.said


def test_updates_are_compared_with_those_of_the_same_fragment() -> None:
    long = [(0, "a", 9.0, 4)] * 9
    assert "times as long" not in long_steps(*long, (1, "b", 1.0, 4)).said
    assert "of a are 9 times as long" in long_steps(*long, (0, "b", 1.0, 4), (1, "b", 9.0, 4)).said
    assert "times as long" not in long_steps(*long, (0, "b", 8.0, 4)).said
    # The usual one is in the middle by length per step, of those that state a length, of learners that train.
    others = [(0, "b", 4.0, 40), (0, "b", 1.0, 4), (0, "b", 3.0, 4)]
    assert "of a are 9 times as long" in long_steps(*long, *others, *[(0, "b", 0.0, 4)] * 3).said
    assert "of a are 9 times as long" in long_steps(*long, *others, *[(0, "z", 9.0, 4)] * 9).said
    assert "of z" not in long_steps((0, "a", 1.0, 4), (0, "b", 1.0, 4), *[(0, "z", 9.0, 4)] * 9).said


def test_long_updates_are_a_failure_if_no_loss_has_fallen() -> None:
    updates = [*[(0, "a", 9.0, 4)] * 9, (0, "b", 1.0, 4)]
    failed = long_steps(*updates, losses={"a": LOW, "b": LOW})
    assert not failed.ok
    assert "for as many steps, and no loss has fallen: 2 at first, 2 in the newest updates" in failed.said
    for losses in ({"a": LOW, "b": HIGH}, {"a": HIGH, "b": LOW}, {"a": LOW[:3], "b": LOW}, {}):
        found = long_steps(*updates, losses=losses)
        assert (found.ok, "of a are 9 times as long" in found.said, "no loss" in found.said) == (True, True, False)
    assert failed.said.count("times as long") == 1
    high = [Point(point.at, 3.0) for point in LOW]
    assert "fallen: 2 at first, 2 in" in long_steps(*updates, losses={"a": high, "b": LOW}).said
    assert "times as long" not in long_steps(*updates, losses={"a": LOW, "b": LOW}, scale=0.01).said, "it explodes"
    heavy = long_steps(*updates, losses={"a": LOW, "b": LOW}, weight=99.0).said
    assert ("the others hardly count" in heavy, "times as long" in heavy) == (True, False)
    for losses, ok in (({"a": LOW, "b": LOW}, False), ({"a": LOW, "b": HIGH}, True)):
        over = long_steps(*updates, losses=losses, ended=True)
        assert (over.ok, "times as long" in over.said) == (ok, not ok), over.said


def test_a_hole_hides_no_fragment_that_cannot_be_folded() -> None:
    hole = f"commits/00001/000000000047: is missing: {GOES_ON}"
    found = looked(beat("a"), alive(broken=(1,), holed=(1,)), wrong={1: hole, 2: "commits/2: is missing"})
    assert not found.ok
    assert "fragment 1 cannot be folded: isthmus heal" in found.said
    assert "00047" not in found.said, "its history is the lesser trouble, and heal has both"
    assert "the log of fragment 2 is damaged" in found.said
    assert "fragment 2 cannot be folded" not in looked(alive(broken=(2,)), beat("a"), wrong={2: "no"}).said
    assert "hole" not in looked(beat("a"), alive(broken=(1,), holed=(1,))).said
    assert "00047" in looked(beat("a"), alive(holed=(1,)), wrong={1: hole}).said
    assert "00047" in looked(beat("a"), alive(broken=(1,), slow=(1,)), wrong={1: hole}).said, "it is only slow"


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
