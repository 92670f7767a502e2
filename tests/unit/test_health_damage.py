"""`status` says which fragments cannot be merged, and what is damaged in the log."""

from isthmus.bus import BusItem
from isthmus.format.records.messages import (
    encode,
    learner_stream,
)
from isthmus.inspect.bus_view import BusView
from isthmus.inspect.health_summary import health
from isthmus.inspect.status import Status
from isthmus.log.holes import GOES_ON
from support.healths import NOW, RUN, alive, beat, left, looked, of


def test_where_no_fragment_can_be_merged_no_learner_is_counted() -> None:
    assert of(beat("a"), alive(broken=(0,))).said.endswith("; 0 of 1 learners merge")


def test_damage_is_said_before_the_advice_to_start_what_fell_silent() -> None:
    hearing = BusView(RUN)
    hearing.take(learner_stream("a"), BusItem("1-0", encode(beat("a"))), None)
    wrong = {0: f"commits/1: {GOES_ON}", 1: "commits/2: no"}
    found = health(Status(hearing, [], "", 0.0, NOW, wrong=wrong), "r", "b")
    order = ["the log of fragment 1", "0 of 1 learners merge; no process is heard", "fragment 0 has a hole"]
    assert [part.said[: len(begin)] for part, begin in zip(found.parts, order, strict=True)] == order


def test_damage_is_said_whether_or_not_the_bus_answers() -> None:
    status = Status(
        BusView(RUN), [], "the bus cannot be reached: refused", 0.0, NOW, wrong={1: "commits/1: is missing"}
    )
    assert (
        "; the log of fragment 1 is damaged: commits/1: is missing; isthmus heal r says"
        in health(status, "r", "b").said
    )


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
