"""A round handles messages that come late, that come twice, or of which a learner sends too many."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from isthmus.format.records.objects import LISTED_MAX
from isthmus.format.rules import STALENESS_MAX, Pace
from isthmus.reasons import LOSSLESS, PASSING, Reason
from isthmus.rounds.events import (
    Action,
    Appended,
    CallRound,
    CatchUp,
    ClosedBy,
    Fetch,
    Hold,
    Invalid,
    Merge,
    Refused,
    Tick,
    Unreachable,
)
from isthmus.rounds.rounds import AHEAD_MAX, FINAL_EACH, POINTERS_MAX, Phase
from support.commits import committed, given, rejected
from support.round_story import Story


def fetched(actions: Sequence[Action]) -> set[tuple[str, int]]:
    return {(a.pointer.learner, a.pointer.base) for a in actions if isinstance(a, Fetch)}


def deadline(story: Story) -> float:
    at = story.rounds.deadline(story.now)
    assert at is not None
    return at


def listed(story: Story) -> list[tuple[str, int, str]]:
    return [(r.learner, r.base, r.reason) for r in story.rounds.rejections(lambda at: at)]


# --- announcements ----------------------------------------------------------------------------------------------------


def test_a_base_a_little_ahead_is_kept_and_one_further_ahead_is_made_up() -> None:
    story = Story("a")
    for base in range(1, AHEAD_MAX + 1):
        assert story.announce("a", base) == [CatchUp()]
    assert story.rounds.rejected_total == {}
    assert story.announce("a", AHEAD_MAX + 1) == [CatchUp()]
    assert story.rounds.rejected_total == {"unknown-base": 1}


def test_pointers_that_wait_are_bounded() -> None:
    story = Story()
    story.rounds.on(Hold(False), story.now)
    for i in range(POINTERS_MAX):
        story.announce(f"l{i}")
    assert story.rounds.rejected_total == {}
    story.announce("one-more")
    assert story.rounds.rejected_total == {"oversized": 1}
    story.announce("l0", tokens=2000, name="longer")
    assert story.rounds.rejected_total == {"oversized": 1, "superseded": 1}, "a waiting update may be replaced"


def test_what_the_log_turned_away_for_good_is_not_fetched_again() -> None:
    story = Story("a", "b")
    story.rounds.restored(1, [committed(1, given("b", 0, 1), rejected=(rejected("a", 0, Reason.NON_FINITE, 1),))])
    story.announce("a", 0)
    assert story.rounds.rejected_total == {"duplicate": 1}, "that commit counts the loss"
    story.announce("a", 0, name="another one on the same base")
    assert ("a", 0) in fetched(story.announce("b", 1, due=True))


def test_a_smaller_update_on_a_base_does_not_replace_a_larger_one() -> None:
    story = Story("a", "b")
    story.announce("a", tokens=2000, name="large")
    story.announce("a", tokens=1000, name="small")
    [fetch] = [a for a in story.announce("b", due=True) if isinstance(a, Fetch) and a.pointer.learner == "a"]
    assert fetch.pointer.tokens == 2000
    assert story.rounds.rejected_total == {"superseded": 1}


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_call_is_repeated_once_a_heartbeat_not_at_every_look_at_the_clock() -> None:
    story = Story("a", "b", pace=Pace(quorum=2, heartbeat_s=1.0, silence_s=1000.0), sync_every=10_000)
    story.arrive(story.announce("a", due=True))
    called = [i for i in range(1, 40) if CallRound(1) in story.rounds.on(Tick(), story.now + i / 10)]
    assert called == [10, 20, 30]


def test_grace_that_is_over_is_due_now() -> None:
    story = Story("a", "b", "c")
    story.arrive(story.announce("a", due=True))
    story.arrive(story.announce("c"))
    assert story.rounds.phase is Phase.GRACE
    ends = deadline(story)
    for late_s in (0.0, 0.5, 10.0):
        assert story.rounds.deadline(ends + late_s) == ends + late_s
    assert story.rounds.on(Tick(), ends + 0.5) == [Merge(1, ClosedBy.GRACE)]


def test_a_round_whose_last_update_came_after_grace_was_ended_by_grace() -> None:
    story = Story("a", "b")
    story.arrive(story.announce("a", due=True))
    assert story.rounds.phase is Phase.GRACE
    actions = story.announce("b")
    assert fetched(actions) == {("b", 0)}
    story.now = deadline(story) + 0.05  # no tick came meanwhile
    assert story.arrive(actions) == [Merge(1, ClosedBy.GRACE)]


def test_everybody_in_within_grace_ends_the_round_at_once() -> None:
    story = Story("a", "b")
    story.arrive(story.announce("a", due=True))
    story.now += 0.01
    assert story.arrive(story.announce("b")) == [Merge(1, ClosedBy.EVERYONE)]


def test_how_long_merging_takes_comes_out_of_grace() -> None:
    def granted(close_to_commit_s: float) -> float:
        story = Story("a", "b", "c", pace=Pace(grace=0.5, heartbeat_s=1.0, silence_s=3.0, overlap=4.0), sync_every=4)
        for who in "abc":
            story.beat(who, upload_s=5.0)
        story.arrive(story.announce("a", due=True))
        story.rounds.on(Tick(), deadline(story) + 60.0)
        story.now += 1.0 + close_to_commit_s
        assert story.rounds.round is not None
        closed_at = story.rounds.round.closed_at
        story.rounds.on(Appended(committed(1, given("a", 0, 1))), closed_at + close_to_commit_s)
        for who in "abc":
            story.beat(who, upload_s=5.0)
        story.arrive(story.announce("a", 1, due=True))
        assert story.rounds.round is not None
        return story.rounds.round.grace_s

    assert granted(0.0) - granted(0.1) == pytest.approx(0.5 * 0.1)


@pytest.mark.parametrize(("since", "waits"), [(1, True), (2, True), (3, False)])
def test_whoever_is_in_one_of_the_last_two_commits_is_waited_for_after_a_start(since: int, waits: bool) -> None:
    story = Story()
    story.members.gap(story.now, 0.0)
    log = [committed(1, given("b", 0, 1), given("a", 0, 1))]
    log += [committed(v, given("a", v - 1, v)) for v in range(2, since + 1)]
    story.rounds.restored(since, log)
    story.beat("a")
    closed = story.arrive(story.announce("a", since, due=True))
    assert (closed == []) is waits


# --- commits ----------------------------------------------------------------------------------------------------------


def test_what_a_round_had_taken_when_anothers_commit_came_is_taken_up_again() -> None:
    story = Story("a", "b", "c")
    story.arrive(story.announce("a", due=True))
    story.arrive(story.announce("b"))
    story.commit("a")  # by another syncer, without b's update
    assert fetched(story.announce("a", 1, due=True)) == {("a", 1), ("b", 0)}


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_base_can_be_merged_as_long_as_it_is_not_stale_and_only_once(staleness: int) -> None:
    story = Story("a", "b", pace=Pace(quorum=1, heartbeat_s=1.0, silence_s=3.0, staleness=staleness))
    story.commit("a", "b")
    for version in range(staleness):
        story.announce("a", 0, tokens=9000, name=f"longer {version}")
        assert story.rounds.rejected_total == {"base-merged": version + 1}
        story.commit("b")
    story.announce("a", 0, tokens=9000, name="longer still")
    assert story.rounds.rejected_total == ({"base-merged": staleness} if staleness else {}) | {"stale": 1}


def test_an_update_that_was_merged_is_never_called_stale() -> None:
    """Its learner announces it until it has read the commit: that loses no work, however many versions later it is."""
    story = Story("a", "b", pace=Pace(quorum=1, heartbeat_s=1.0, silence_s=3.0, staleness=1))
    story.commit("a")
    for _ in range(6):
        story.commit("b")
    story.announce("a", 0)
    assert story.rounds.rejected_total == {"duplicate": 1}
    story.announce("a", 0, name="as long")
    assert story.rounds.rejected_total == {"duplicate": 1, "superseded": 1}
    story.announce("a", 0, tokens=9000, name="longer, which was never merged")
    assert story.rounds.rejected_total == {"duplicate": 1, "superseded": 1, "stale": 1}
    for _ in range(STALENESS_MAX):
        story.commit("b")
    assert {who: len(bases) for who, bases in story.rounds._merged.items()} == {"b": 1}, "not remembered for ever"


@pytest.mark.parametrize("staleness", [1, 2])
def test_every_merged_update_that_could_be_merged_again_is_known(staleness: int) -> None:
    story = Story("a", "b", pace=Pace(quorum=1, heartbeat_s=1.0, silence_s=3.0, staleness=staleness))
    for _ in range(staleness + 1):
        story.commit("a")
    for base in range(1, staleness + 1):
        story.announce("a", base)
        assert story.rounds.rejected_total == {"duplicate": base}


# --- whether work is lost ---------------------------------------------------------------------------------------------


def lost(story: Story) -> dict[str, int]:
    return {reason: n for reason, n in story.rounds.rejected_total.items() if n and reason not in LOSSLESS}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("what", ["stale", "base-merged", "overtaken", "non-finite", "malformed"])
def test_work_that_is_lost_is_lost_once_however_often_it_is_announced(what: str, listed: bool) -> None:
    story = Story("a", "b")
    if what == "stale":
        for _ in range(3):
            story.commit("b")
    elif what == "base-merged":
        story.commit("a")
    elif what == "overtaken":
        story.commit("b")
        story.arrive(story.announce("a", 1, due=True))
    for _ in range(3):
        if what == "malformed":
            story.rounds.on(Invalid(story.pointer("a", 0), Reason.MALFORMED), story.now)
            continue
        actions = story.announce("a", 0, tokens=9000, name="lost", due=True)
        for found in actions:
            if isinstance(found, Fetch):
                story.rounds.on(Refused(found.pointer, Reason.NON_FINITE), story.now)
        if listed and (said := story.rounds.rejections(lambda at: at)):
            head = story.rounds.head
            inputs = [given("a", 1, 2)] if (what, head) == ("overtaken", 1) else [given("b", head, head + 1)]
            story.rounds.on(Appended(committed(head + 1, *inputs, rejected=said)), story.now)
    assert lost(story) == {what: 1}
    if not (listed and what == "malformed"):
        assert story.rounds.rejected_total.get("duplicate", 0) == 2


@pytest.mark.parametrize("reason", sorted(PASSING))
@pytest.mark.parametrize("fate", ["merged", "replaced", "never merged", "longer"])
def test_what_is_rejected_for_now_is_lost_only_if_it_is_never_merged(reason: Reason, fate: str) -> None:
    story = Story("a", "b")
    if reason == Reason.UNKNOWN_BASE:
        story.announce("a", AHEAD_MAX + 1)
        for _ in range(AHEAD_MAX + 1):
            story.commit("b")
    elif reason == Reason.OTHER_HISTORY:
        story.rounds.on(Invalid(story.pointer("a", 0), reason), story.now)
    else:
        [fetch] = [a for a in story.announce("a", due=True) if isinstance(a, Fetch)]
        story.rounds.on(Refused(fetch.pointer, reason), story.now)
    assert (story.rounds.rejected_total, lost(story)) == ({reason.value: 1}, {})
    base = story.rounds.head
    if fate == "merged":
        story.announce("a", base)
        story.commit("a", "b")
    elif fate == "replaced":
        story.announce("a", base, tokens=9000, name="longer")
        story.commit("b")
    elif fate == "longer":
        header = committed(base + 1, given("a", base, base + 1, "longer", tokens=9000))
        story.rounds.on(Appended(header), story.now)
    for _ in range(3):
        story.commit("b")
    assert lost(story) == ({"stale": 1} if fate in ("never merged", "replaced") else {})
    assert story.rounds._put_off == {}


def test_an_update_that_is_read_after_all_is_no_loss() -> None:
    """A damaged copy, or one that has not arrived yet: the learner announces it again, and no commit has listed it."""
    story = Story("a", "b")
    for reason in (Reason.MISSING, Reason.MISSING, Reason.DIGEST_MISMATCH):
        [fetch] = [a for a in story.announce("a", due=True) if isinstance(a, Fetch) and a.pointer.learner == "a"]
        story.rounds.on(Refused(fetch.pointer, reason), story.now)
    assert lost(story) == {"missing": 1}, "the same update is not lost twice"
    story.arrive(story.announce("a", due=True))
    assert (lost(story), story.rounds.rejected_total["duplicate"]) == ({}, 3)
    assert listed(story) == [("a", 0, "duplicate")]


def test_an_update_that_cannot_be_read_loses_nothing_where_a_longer_one_waits() -> None:
    story = Story("a", "b")
    [first] = [a for a in story.announce("a", due=True) if isinstance(a, Fetch)]
    story.begin([first])
    story.announce("a", tokens=9000, name="longer")
    story.rounds.on(Refused(first.pointer, Reason.MISSING), story.now)
    assert story.rounds.rejected_total == {"superseded": 1}
    story.commit("a")
    assert lost(story) == {"base-merged": 1}


def test_a_rejection_is_listed_until_a_commit_lists_this_very_update() -> None:
    story = Story("a", "b")
    for name in ("first", "second"):
        story.rounds.on(Invalid(replace(story.pointer("a", 0), digest=name.encode()), Reason.MALFORMED), story.now)
    story.rounds.on(
        Appended(committed(1, given("b", 0, 1), rejected=(rejected("a", 0, Reason.MALFORMED, 1),))), story.now
    )
    assert [r.digest for r in story.rounds.rejections(lambda at: at)] == [b"second"]


# --- what a commit lists ----------------------------------------------------------------------------------------------


def test_rejections_for_good_are_listed_before_what_is_only_counted() -> None:
    story = Story()
    for i in range(LISTED_MAX):
        story.announce(f"l{i}")
        story.announce(f"l{i}")  # a duplicate
    story.rounds.on(Invalid(story.pointer("z"), Reason.MALFORMED), story.now)
    found = listed(story)
    assert found[0] == ("z", 0, "malformed")
    assert len(found) == LISTED_MAX


def test_one_learners_rejections_never_take_the_place_of_anothers() -> None:
    story = Story()
    for base in range(2 * LISTED_MAX):
        story.rounds.on(Invalid(story.pointer("loud", base), Reason.MALFORMED), story.now)
    story.rounds.on(Invalid(story.pointer("quiet"), Reason.TRUNCATED), story.now)
    found = listed(story)
    assert ("quiet", 0, "truncated") in found
    assert len([who for who, _, reason in found if (who, reason) == ("loud", "malformed")]) == FINAL_EACH
    assert story.rounds.rejected_total["malformed"] == 2 * LISTED_MAX, "all are counted"


def test_what_a_commit_has_listed_is_not_listed_again() -> None:
    story = Story("a")
    story.rounds.on(Invalid(story.pointer("a"), Reason.MALFORMED), story.now)
    listed_now = story.rounds.rejections(lambda at: at)
    story.rounds.on(
        Appended(committed(1, given("b", 0, 1), rejected=listed_now, rejected_total={"malformed": 1})), story.now
    )
    assert listed(story) == []
    assert story.rounds.rejected_total["malformed"] == 1


# --- bugs that simulated seeds found ----------------------------------------------------------------------------------


def test_the_oldest_bases_are_fetched_first_whatever_their_learners_are_called() -> None:
    """Without grace a round closes with its first update. Sorted by name, the last learner's work became stale."""
    story = Story("a", "z", pace=Pace(quorum=1, grace=0.0, staleness=2, heartbeat_s=1.0, silence_s=3.0))
    story.announce("z")
    story.commit("a")
    asked = [action.pointer.learner for action in story.announce("a", 1, due=True) if isinstance(action, Fetch)]
    assert asked == ["z", "a"]


@pytest.mark.parametrize("tokens", [1000, 900], ids=["the same", "one that it replaced"])
def test_what_was_due_once_opens_a_round_whoever_repeats_it_without_knowing(tokens: int) -> None:
    """A later incarnation repeats an update of an earlier one, and does not know that the update was due."""
    story = Story("a")
    (call, fetch) = story.announce("a", due=True)
    assert call == CallRound(1)
    assert isinstance(fetch, Fetch)
    story.rounds.on(Unreachable(fetch.pointer), story.now)
    story.now += 1000.0
    story.rounds.on(Tick(), story.now)
    assert story.rounds.phase is Phase.CLOSED, "the round is given up: no update came"
    story.beat("a")
    assert CallRound(1) in story.announce("a", tokens=tokens)
