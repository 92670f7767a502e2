"""The state machine of a round turns timed events into actions. Each test tells the story of one round."""

import dataclasses
import math
from collections.abc import Sequence

import msgspec
import pytest

from isthmus.format.rules import Pace
from isthmus.reasons import Reason
from isthmus.rounds import rounds as rounds_module
from isthmus.rounds.events import (
    Abandon,
    Action,
    Announced,
    Appended,
    Arrived,
    Called,
    CallRound,
    CatchUp,
    CaughtUp,
    ClosedBy,
    Fetch,
    Hold,
    Invalid,
    Lost,
    Merge,
    Passed,
    Pointer,
    Refused,
    Tick,
    Unreachable,
)
from isthmus.rounds.grace import Terms, adaptive_grace
from isthmus.rounds.rounds import Phase, Round
from support.round_story import AT_ONCE, PACE, STEP_S, Story, merged


def kinds(actions: Sequence[Action]) -> list[type[Action]]:
    return [type(a) for a in actions]


def under_way(story: Story) -> Round:
    assert story.rounds.round is not None
    return story.rounds.round


def deadline(story: Story) -> float:
    at = story.rounds.deadline(story.now)
    assert at is not None
    return at


def test_a_due_update_opens_a_round_and_calls_everyone() -> None:
    story = Story("a", "b")
    assert kinds(story.announce("a", due=True)) == [CallRound, Fetch]
    assert story.rounds.phase is Phase.OPEN


def test_an_answer_alone_opens_nothing() -> None:
    story = Story("a", "b")
    assert story.announce("a") == []
    assert story.rounds.phase is Phase.CLOSED


def test_announced_is_not_arrived() -> None:
    story = Story("a")
    story.announce("a", due=True)
    assert story.rounds.on(Tick(), story.now) == []
    assert story.rounds.phase is Phase.OPEN


def test_the_round_closes_early_once_all_expected_are_in() -> None:
    story = Story("a", "b")
    assert story.arrive(story.announce("a", due=True)) == []
    assert story.arrive(story.announce("b")) == [Merge(1, ClosedBy.EVERYONE)]


def test_who_passes_is_not_waited_for() -> None:
    story = Story("a", "b")
    story.arrive(story.announce("a", due=True))
    assert story.rounds.on(Passed("b", 1), story.now) == [Merge(1, ClosedBy.EVERYONE)]


def test_a_pass_for_another_version_says_nothing() -> None:
    story = Story("a", "b")
    story.arrive(story.announce("a", due=True))
    assert story.rounds.on(Passed("b", 7), story.now) == []


def test_grace_ends_the_wait_for_a_slow_learner() -> None:
    story = Story("a", "b")
    story.members.heard("b", 1, story.now)
    story.arrive(story.announce("a", due=True))
    story.arrive(story.announce("c"))  # a third learner: two updates are in
    assert story.rounds.phase is Phase.GRACE
    ends = deadline(story)
    assert story.now < ends <= story.now + STEP_S + 0.05
    assert story.rounds.on(Tick(), ends + 1e-6) == [Merge(1, ClosedBy.GRACE)]
    assert under_way(story).missing == {"b"}


def test_grace_is_measured_by_answers_also_by_those_that_came_too_late() -> None:
    """Otherwise a learner that answers more slowly than its stated upload time would always be late."""
    story = Story("a", "b")
    story.members.heard("b", 1, story.now, upload_s=0.1)
    opened = story.now
    story.arrive(story.announce("a", due=True))
    story.rounds.on(Appended(merged(1, "a")), story.now)
    story.now = opened + 4.0
    late = story.announce("b", base=0)
    assert [a.pointer.learner for a in late if isinstance(a, Fetch)] == []
    assert story.members.terms({"a", "b"}, {"b"}).cap_s == pytest.approx(STEP_S + story.now - opened)


def test_quorum_waits_for_k_fresh_updates() -> None:
    story = Story("a", "b", "c", pace=Pace(quorum=2))
    story.arrive(story.announce("a", due=True))
    alone = story.rounds.phase
    story.arrive(story.announce("b"))
    assert alone is Phase.OPEN
    assert story.rounds.phase is Phase.GRACE


def test_quorum_is_never_more_than_are_expected() -> None:
    story = Story("a", "b", pace=Pace(quorum=8))
    story.arrive(story.announce("a", due=True))
    assert story.arrive(story.announce("b")) == [Merge(1, ClosedBy.EVERYONE)]
    assert not under_way(story).quorum_missed


def test_a_round_of_learners_that_have_not_said_how_long_a_step_takes_is_not_given_up_at_once() -> None:
    story = Story("a", "b", pace=Pace(quorum=2, silence_s=1000.0), step_s=0.0)
    story.arrive(story.announce("a", due=True))
    opened = story.now
    for waited, ends in ((0.9, False), (1.1, True)):
        story.now = opened + waited * 12 * rounds_module.STEP_UNKNOWN_S
        assert (Merge(1, ClosedBy.DEADLINE) in story.rounds.on(Tick(), story.now)) is ends


def test_quorum_falls_when_a_learner_falls_silent() -> None:
    story = Story("a", "b", pace=Pace(quorum=2), sync_every=1000)
    story.arrive(story.announce("a", due=True))
    story.now += 2.0
    story.beat("a")
    assert story.rounds.on(Tick(), story.now) in ([], [CallRound(1)])
    story.now += 1.5
    assert Merge(1, ClosedBy.EVERYONE) in story.rounds.on(Tick(), story.now)


def test_nobody_waits_for_ever() -> None:
    story = Story("a", "b", pace=Pace(quorum=2, heartbeat_s=10.0, silence_s=1000.0))
    story.arrive(story.announce("a", due=True))
    story.now += 12 * STEP_S + 0.01
    assert story.rounds.on(Tick(), story.now) == [Merge(1, ClosedBy.DEADLINE)]
    assert under_way(story).quorum_missed


def test_where_steps_are_quicker_than_the_store_a_round_waits_for_its_first_update() -> None:
    """H steps of a millisecond end before any update arrives. Giving up then would end every round without a merge."""
    story = Story("a", step_s=0.001)
    actions = story.announce("a", due=True)
    story.now += 0.5
    assert story.rounds.on(Tick(), story.now) == []
    assert story.arrive(actions) == [Merge(1, ClosedBy.EVERYONE)]


def test_a_round_to_which_nothing_comes_is_abandoned() -> None:
    story = Story("a", "b")
    actions = story.announce("a", due=True)
    pointer = next(a.pointer for a in actions if isinstance(a, Fetch))
    assert story.rounds.on(Refused(pointer, Reason.NON_FINITE), story.now) == []
    story.now += 100
    assert kinds(story.rounds.on(Tick(), story.now)) == [Abandon]
    assert story.rounds.phase is Phase.CLOSED
    assert story.rounds.rejected_total == {"non-finite": 1}


def test_calls_are_repeated_while_a_round_is_open() -> None:
    story = Story("a", "b", pace=Pace(quorum=2, silence_s=1000.0), sync_every=1000)
    story.arrive(story.announce("a", due=True))
    assert kinds(story.rounds.on(Tick(), story.now + 1.01)) == [CallRound]


def test_one_learner_heard_does_not_mean_there_is_only_one() -> None:
    story = Story()
    story.members.gap(story.now, 0.0)  # the syncer has just started: it had no time to hear the learners
    story.beat("a")
    assert story.arrive(story.announce("a", due=True)) == []
    assert story.rounds.on(Tick(), story.now + 0.5) == []
    assert story.rounds.on(Tick(), story.now + 1.01) == [Merge(1, ClosedBy.EVERYONE)]


def test_those_in_the_last_commits_are_expected_after_a_restart() -> None:
    story = Story()
    story.members.gap(story.now, 0.0)
    story.rounds.restored(1, [merged(1, "a", "b")])
    story.beat("a")
    story.arrive(story.announce("a", base=1, due=True))
    assert story.rounds.on(Tick(), story.now + 0.1) == []
    assert story.arrive(story.announce("b", base=1)) == [Merge(2, ClosedBy.EVERYONE)]


def test_the_end_of_grace_waits_until_every_learner_had_the_time_to_be_heard() -> None:
    story = Story("a", "b", "c", sync_every=1000)
    story.members.gap(story.now, 0.0)
    assert story.arrive(story.announce("a", due=True) + story.announce("b")) == []
    grace_s, until = under_way(story).grace_s, story.now + PACE.heartbeat_s
    assert 0.0 < grace_s < 0.9 * PACE.heartbeat_s
    assert story.rounds.on(Tick(), until - 0.05) == []
    assert deadline(story) == until
    assert story.rounds.on(Tick(), until) == [Merge(1, ClosedBy.GRACE)]


# --- after an outage of the bus or the store -------------------------------------------------------------------------------------


def back(story: Story, away_s: float = 45.0) -> None:
    """Let an outage of the bus end, and the learners be heard."""
    story.now += away_s
    story.members.gap(story.now, away_s)
    for learner in ("a", "b"):
        story.beat(learner)


def asks_afresh(actions: Sequence[Action]) -> bool:
    (call,) = [a for a in actions if isinstance(a, CallRound)]
    return call.afresh


def reads(actions: Sequence[Action]) -> list[tuple[str, int]]:
    return [(a.pointer.learner, a.pointer.tokens) for a in actions if isinstance(a, Fetch)]


@pytest.mark.parametrize(
    ("held_s", "upload_s", "idle_s", "over"),
    [
        (19.0, 0.02, 20.0, True),
        (5.1, 0.02, 20.0, True),
        (4.9, 0.02, 20.0, False),
        (19.0, 4.5, 20.0, True),
        (19.0, 4.7, 20.0, False),  # over its link, updates take as long
        (19.0, 0.02, 5.1, True),
        (19.0, 0.02, 4.9, False),  # others were merged meanwhile
    ],
)
def test_an_update_that_was_held_up_shows_that_an_outage_of_the_store_is_over(
    held_s: float, upload_s: float, idle_s: float, over: bool
) -> None:
    story = Story("a", "b")
    story.commit("a", "b")
    story.now += 20.0
    story.members.committed_at = story.now - idle_s  # of any fragment
    story.beat("a", upload_s=upload_s)
    story.beat("b")
    pointer = dataclasses.replace(story.pointer("a", 1, due=True), boundary_at=story.now - held_s)
    actions = story.rounds.on(Announced(pointer), story.now)
    assert asks_afresh(actions) == over
    assert story.members.back_at == (story.now if over else -math.inf)
    if over:
        story.now += 1.0  # another one that was captured before, and one that was not
        late = dataclasses.replace(story.pointer("b", 1), boundary_at=story.now - 19.0)
        assert reads(story.rounds.on(Announced(late), story.now)) == []
        assert story.members.back_at == story.now - 1.0, "this outage is known"
        assert reads(story.announce("b", 1, tokens=5000)) == [("b", 5000)]


def test_only_a_new_update_on_the_newest_version_shows_that_an_outage_is_over() -> None:
    story = Story("a", "b", "c")
    story.commit("a", "b")
    assert story.members.committed_at == story.now
    story.announce("a", 1)
    known = story.pointer("a", 1)
    story.now += 20.0
    for pointer in (known, story.pointer("c", 0), dataclasses.replace(story.pointer("b", 1), old=True)):
        held_up = dataclasses.replace(pointer, boundary_at=story.now - 20.0)
        story.rounds.on(Announced(held_up), story.now)
        assert story.members.back_at == -math.inf


def test_updates_from_before_an_outage_are_not_read_while_newer_ones_may_come() -> None:
    story = Story("a", "b")
    story.announce("b")
    back(story)
    opened = story.announce("a", due=True, tokens=5000)  # captured just before the bus was back
    assert (asks_afresh(opened), reads(opened)) == (True, [])
    assert reads(story.announce("b", tokens=5000)) == []
    story.now += 0.2
    assert reads(story.announce("a", tokens=5100)) == [("a", 5100)]
    assert reads(story.announce("b", tokens=5100)) == [("b", 5100)]


def test_an_update_from_before_an_outage_is_read_if_its_learner_has_no_newer_one() -> None:
    story = Story("a", "b")
    back(story)
    story.announce("a", due=True)
    assert reads(story.rounds.on(Passed("a", 1), story.now)) == [("a", 1000)]


def test_updates_from_before_an_outage_are_read_at_the_end_if_no_newer_ones_come() -> None:
    story = Story("a", "b")
    back(story)
    story.announce("a", due=True)
    story.now = story.members.all_heard_at
    assert reads(story.rounds.on(Tick(), story.now)) == [("a", 1000)]


def test_a_gap_that_is_no_longer_than_an_upload_outdates_nothing() -> None:
    story = Story("a", "b")
    lead_s = story.members.lead_s()
    back(story, 2 * lead_s)
    opened = story.announce("a", due=True)
    assert (asks_afresh(opened), reads(opened)) == (False, [("a", 1000)])


def test_an_update_on_an_older_version_is_read_after_an_outage_too() -> None:
    """Its learner has adopted a newer version since, so no more work on the old one will come."""
    story = Story("a", "b")
    story.commit("a", "b")
    story.announce("b", base=0, tokens=2000, name="kept")
    story.commit("a")
    story.announce("b", base=1)
    back(story)
    opened = story.announce("a", base=2, due=True)
    assert reads(opened) == [("b", 1000)]


# --- what is rejected ----------------------------------------------------------------------------------------------


def test_more_tokens_on_a_base_replace_fewer() -> None:
    story = Story("a", "b")
    story.announce("a", tokens=1000)
    story.announce("a", tokens=2000)
    fetches = [a for a in story.announce("b", due=True) if isinstance(a, Fetch)]
    assert {(f.pointer.learner, f.pointer.tokens) for f in fetches} == {("a", 2000), ("b", 1000)}
    story.announce("a", tokens=1500)
    assert story.rounds.rejected_total == {"superseded": 2}


def test_an_update_replaced_before_it_is_read_is_not_read() -> None:
    story = Story("a", "b")
    first = next(a for a in story.announce("a", due=True) if isinstance(a, Fetch))
    story.announce("a", tokens=9000)
    (read,) = story.begin([first])
    assert read.tokens == 9000
    assert story.rounds.take_fetched(read)
    assert story.rounds.rejected_total == {"superseded": 1}


def test_an_update_that_is_being_read_is_not_read_again_for_a_longer_one() -> None:
    story = Story("a", "b")
    first = next(a for a in story.announce("a", due=True) if isinstance(a, Fetch))
    (read,) = story.begin([first])
    story.announce("a", tokens=8000)
    story.announce("a", tokens=8000)
    story.announce("a", tokens=9000)
    assert story.rounds.fetches() == []
    story.arrive([first])
    assert story.rounds.round is not None
    assert list(story.rounds.round.arrived.values()) == [read]
    assert story.rounds.fetches() == []
    assert story.rounds.rejected_total == {"duplicate": 1, "superseded": 1}
    story.commit("a")
    assert story.rounds.rejected_total == {"duplicate": 1, "superseded": 1, "base-merged": 1}


@pytest.mark.parametrize("what", ["refused", "unreachable", "too late"])
def test_the_longer_one_takes_the_place_of_one_that_came_to_nothing(what: str) -> None:
    story = Story("a", "b", pace=msgspec.structs.replace(PACE, staleness=2))
    first = next(a for a in story.announce("a", due=True) if isinstance(a, Fetch))
    (read,) = story.begin([first])
    story.announce("a", tokens=9000)
    if what == "refused":
        actions = story.rounds.on(Refused(read, Reason.MISSING), story.now)
    elif what == "unreachable":
        story.rounds.on(Unreachable(read), story.now)
        actions = story.rounds.fetches()
    else:
        story.commit("b")
        assert not story.rounds.take_fetched(read)
        actions = story.announce("b", base=1, due=True)
    assert {a.pointer.tokens for a in actions if isinstance(a, Fetch) and a.pointer.learner == "a"} == {9000}


def test_saying_it_again_changes_nothing() -> None:
    story = Story("a", "b")
    story.arrive(story.announce("a", due=True))
    assert story.announce("a", due=True) == []
    assert story.rounds.rejected_total == {"duplicate": 1}


def test_a_base_is_merged_once() -> None:
    story = Story("a", "b")
    story.arrive(story.announce("a", due=True))
    story.arrive(story.announce("b"))
    story.commit("a", "b")
    story.announce("a", base=0, tokens=5000)
    assert story.rounds.rejected_total == {"base-merged": 1}


def test_late_work_joins_the_next_round_and_opens_none_at_once() -> None:
    story = Story("a", "b")
    story.arrive(story.announce("a", due=True))
    story.commit("a")
    assert story.announce("b", base=0, due=True) == []
    assert story.rounds.phase is Phase.CLOSED
    fetched = [a.pointer for a in story.announce("a", base=1, due=True) if isinstance(a, Fetch)]
    assert {(p.learner, p.base) for p in fetched} == {("a", 1), ("b", 0)}


USUAL_S = 12 * STEP_S + STEP_S + 0.02 + 0.01
"""How long a learner of `Story` needs until it opens a round: a period, a step, an upload, and adopting a version."""


def late_in(story: Story) -> None:
    """Let an update of learner b come too late for the round that learner a opened."""
    story.arrive(story.announce("a", due=True))
    story.commit("a")
    story.now += 1.0
    assert story.announce("b", base=0) == []


@pytest.mark.parametrize("silence_s", [1.5, 3.0])
def test_late_work_opens_a_round_once_newer_work_would_have_opened_one(silence_s: float) -> None:
    """Otherwise work of a learner that is done stays outside the model if no other learner trains."""
    story = Story("a", "b", pace=msgspec.structs.replace(PACE, silence_s=silence_s))
    late_in(story)
    after = deadline(story) - story.now
    assert after == pytest.approx(max(silence_s, 2 * USUAL_S))
    story.now += after - 1e-6
    assert story.rounds.on(Tick(), story.now) == []
    story.now += 2e-6
    story.beat("a")
    story.beat("b")
    actions = story.rounds.on(Tick(), story.now)
    assert kinds(actions) == [CallRound, Fetch]
    opened = under_way(story)
    assert (opened.opened_at, opened.boundary_at, opened.called_by) == (story.now, story.now, "b")
    assert opened.due_at == pytest.approx(story.now)
    assert story.arrive(actions) == []
    assert story.rounds.on(Passed("b", 2), story.now) == []
    assert story.rounds.on(Passed("a", 2), story.now) == [Merge(2, ClosedBy.EVERYONE)]


def test_a_round_that_comes_to_nothing_is_opened_again_as_late() -> None:
    story = Story("a", "b")
    late_in(story)
    story.now = deadline(story)
    assert kinds(story.rounds.on(Tick(), story.now)) == [CallRound, Fetch]
    story.rounds.on(Lost(), story.now)
    assert deadline(story) - story.now == pytest.approx(max(PACE.silence_s, 2 * USUAL_S))


def test_an_answer_that_nobody_takes_opens_a_round_as_late_work_does() -> None:
    story = Story("a", "b")
    story.announce("a")
    story.now = deadline(story)
    assert kinds(story.rounds.on(Tick(), story.now)) == [CallRound, Fetch]


def test_due_work_opens_a_round_before_late_work() -> None:
    story = Story("a", "b", bounds=msgspec.structs.replace(AT_ONCE, opening=0.8))
    late_in(story)
    story.rounds.on(Hold(False), story.now)
    story.announce("c", base=1, due=True)
    story.now += 10.0
    story.beat("a")
    assert kinds(story.rounds.on(Hold(True), story.now)) == [CallRound, Fetch, Fetch]
    assert under_way(story).called_by == "c"


def test_a_base_that_is_not_known_here_opens_nothing_however_long_it_waits() -> None:
    story = Story("a")
    story.announce("a", base=1)
    assert story.rounds.deadline(story.now) is None
    story.now += 100.0
    assert story.rounds.on(Tick(), story.now) == []


def test_late_work_does_not_count_towards_the_quorum() -> None:
    story = Story("a", "b", "c", pace=Pace(quorum=2))
    story.commit("a")
    story.announce("b", base=0)
    story.arrive(story.announce("a", base=1, due=True))
    assert len(under_way(story).arrived) == 2
    assert story.rounds.phase is Phase.OPEN


@pytest.mark.parametrize(("staleness", "reason"), [(0, "stale"), (1, None), (2, None)])
def test_staleness_is_a_bound_on_bases(staleness: int, reason: str | None) -> None:
    story = Story("a", "b", pace=Pace(staleness=staleness))
    story.commit("a")
    story.announce("b", base=0)
    assert story.rounds.rejected_total == ({reason: 1} if reason else {})


def test_two_bases_of_one_learner_come_oldest_first() -> None:
    story = Story("a", "b")
    story.commit("a")
    story.announce("b", base=0)
    story.announce("b", base=1)
    actions = story.announce("a", base=1, due=True)
    mine = [a.pointer.base for a in actions if isinstance(a, Fetch) and a.pointer.learner == "b"]
    assert mine == [0]
    following = [f for f in story.rounds.on(Arrived(_accept(story, actions, "b")), story.now) if isinstance(f, Fetch)]
    assert [f.pointer.base for f in following] == [1]


def _accept(story: Story, actions: Sequence[Action], learner: str) -> Pointer:
    pointer = next(a.pointer for a in actions if isinstance(a, Fetch) and a.pointer.learner == learner)
    assert story.rounds.take_fetched(pointer)
    return pointer


def test_an_older_base_behind_a_newer_one_is_overtaken() -> None:
    story = Story("a", "b", "c")
    story.commit("c")
    story.arrive(story.announce("a", base=1, due=True))
    story.announce("a", base=0)
    assert story.rounds.rejected_total == {"overtaken": 1}


def test_a_made_up_base_is_turned_away_and_a_newer_one_means_reading_the_log() -> None:
    story = Story("a")
    assert kinds(story.announce("a", base=1)) == [CatchUp]
    assert kinds(story.announce("a", base=50)) == [CatchUp]
    assert story.rounds.rejected_total == {"unknown-base": 1}


def test_an_update_on_a_version_that_another_syncer_made_opens_once_it_is_read() -> None:
    story = Story("a", "b")
    assert kinds(story.announce("a", base=1, due=True)) == [CatchUp]
    assert kinds(story.commit("b")) == [CallRound, Fetch]


# --- losing and spoiling ----------------------------------------------------------------------------------------------


def test_what_a_lost_commit_left_over_is_taken_up_again() -> None:
    story = Story("a", "b")
    story.arrive(story.announce("a", due=True))
    story.arrive(story.announce("b"))
    story.rounds.on(Lost(), story.now)
    story.commit("a")  # the commit that won merged only a
    fetched = [a.pointer for a in story.announce("a", base=1, due=True) if isinstance(a, Fetch)]
    assert ("b", 0) in {(p.learner, p.base) for p in fetched}


def test_a_spoiled_round_turns_its_updates_away() -> None:
    story = Story("a")
    story.arrive(story.announce("a", due=True))
    story.spoil()
    assert story.rounds.rejected_total == {"overflow": 1}
    assert story.rounds.phase is Phase.CLOSED


def test_another_syncers_call_opens_the_same_round() -> None:
    story = Story("a", "b")
    story.rounds.on(Called(1, "s2"), story.now)
    assert story.rounds.phase is Phase.OPEN
    assert kinds(story.rounds.on(Called(5, "s2"), story.now)) == [CatchUp]
    assert kinds(story.announce("a", due=True)) == [Fetch]  # no second call


def test_rejections_are_listed_in_the_commit_and_totals_survive_it() -> None:
    story = Story("a", "b")
    story.rounds.on(Invalid(story.pointer("a"), Reason.MALFORMED), story.now)
    assert [r.reason for r in story.rounds.rejections(lambda at: at)] == ["malformed"]
    header = merged(1, "a")
    header = msgspec.structs.replace(
        header, rejected=story.rounds.rejections(lambda at: at), rejected_total={"malformed": 1}
    )
    story.rounds.on(Appended(header), story.now)
    assert story.rounds.rejections(lambda at: at) == ()
    assert story.rounds.rejected_total == {"malformed": 1}


# --- grace ------------------------------------------------------------------------------------------------------------


def test_grace_is_a_share_of_the_slack() -> None:
    granted = adaptive_grace(Pace(grace=0.5, overlap=4.0), 12, Terms(1.0, 1.0, 0.5, 10.0), quorum_s=0.5)
    # τ is raised until the cap fits, but at most to the period of 12. Grace is half of the slack of 12 − 1.
    assert granted.overlap_steps == 12.0
    assert granted.seconds == pytest.approx(5.5)


def test_a_longer_period_waits_for_more_learners() -> None:
    assert adaptive_grace(Pace(grace=0.8), 12, Terms(1.0, 1.0, 11.0, 2.0), quorum_s=1.0).seconds == 0.0
    assert adaptive_grace(Pace(grace=0.8), 36, Terms(1.0, 1.0, 11.0, 2.0), quorum_s=1.0).seconds == pytest.approx(2.0)


def test_grace_is_never_more_than_the_cap() -> None:
    assert adaptive_grace(Pace(grace=0.8, overlap=100.0), 12, Terms(1.0, 1.0, 0.1, 1.2), 0.1).seconds == 1.2


def test_without_slack_nobody_is_waited_for() -> None:
    assert adaptive_grace(Pace(grace=0.8), 12, Terms(1.0, 1.0, 0.1, 1.0), quorum_s=50.0).seconds == 0.0


def test_grace_can_be_turned_off() -> None:
    assert adaptive_grace(Pace(grace=0.0), 12, Terms(1.0, 1.0, 0.0, 1.0), 0.0).seconds == 0.0


# --- catching up ------------------------------------------------------------------------------------------------------


def test_after_several_commits_at_once_a_learner_is_still_fetched() -> None:
    """A due update on an intermediate version must not open a round for a version that exists already."""
    story = Story("a", "b")
    story.announce("a", base=1, due=True)
    for learners in (("b",), ("b",)):
        story.rounds.on(Appended(merged(story.rounds.head + 1, *learners)), story.now)
    assert story.rounds.on(CaughtUp(), story.now) == []
    opened = story.announce("a", base=2, due=True)
    assert CallRound(3) in opened
    assert [a.pointer.base for a in opened if isinstance(a, Fetch)] == [1], "the older base first, as always"


def test_a_fragment_taken_over_opens_what_waited_and_one_left_opens_nothing() -> None:
    story = Story("a")
    story.rounds.on(Hold(False), story.now)
    assert not any(isinstance(a, CallRound | Fetch) for a in story.announce("a", due=True))
    assert CallRound(1) in story.rounds.on(Hold(True), story.now)
    # If the syncer leaves the fragment in mid-round, that round goes on, and another syncer opens the next.
    story.rounds.on(Hold(False), story.now)
    assert story.rounds.round is not None
    story.commit("a")
    assert story.rounds.phase is Phase.CLOSED
    assert story.announce("a", base=1, due=True) == []


def test_what_one_that_has_left_announced_is_waited_for_while_it_is_fetched() -> None:
    story = Story("a", "b")
    theirs = story.announce("b", due=True)
    story.members.left("b", 1)
    both = theirs + story.announce("a")
    own = [action for action in both if isinstance(action, Fetch) and action.pointer.learner == "a"]
    assert story.arrive(own) == [], "b's update is still being fetched"
    assert story.arrive([a for a in theirs if isinstance(a, Fetch)]) == [Merge(1, ClosedBy.EVERYONE)]


def test_what_one_that_has_left_announced_holds_nobody_up_once_it_cannot_be_fetched() -> None:
    story = Story("a", "b")
    theirs = story.announce("b", due=True)
    story.members.left("b", 1)
    assert story.arrive(story.announce("a")) == []
    (fetch,) = [action for action in theirs if isinstance(action, Fetch)]
    story.rounds.on(Unreachable(fetch.pointer), story.now)
    assert story.rounds.on(Tick(), story.now) == [Merge(1, ClosedBy.EVERYONE)]


def test_what_one_that_has_left_announced_is_waited_for_no_longer_than_grace() -> None:
    story = Story("a", "b")
    story.begin(story.announce("b", due=True))
    story.members.left("b", 1)
    assert story.arrive(story.announce("a")) == []
    story.now = deadline(story)
    assert story.rounds.on(Tick(), story.now) == [Merge(1, ClosedBy.GRACE)]


def test_what_is_due_is_done_whatever_sums_round_to() -> None:
    """8191.833… + 1 − 8191.833… is less than 1. So a call was due, was not made, and was due again without end."""
    story = Story("a", "b", pace=Pace(quorum=2, heartbeat_s=1.0, silence_s=1000.0), sync_every=1000)
    story.now = 8191.833214953706
    story.beat("a")
    story.beat("b")
    story.arrive(story.announce("a", due=True))
    story.now = deadline(story)
    assert story.now - 8191.833214953706 < 1.0
    assert kinds(story.rounds.on(Tick(), story.now)) == [CallRound]


def test_a_round_that_is_full_before_its_quorum_states_no_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "INPUTS_MAX", 2)
    story = Story("a", "b", "c", pace=Pace(quorum=3))
    story.arrive(story.announce("a", due=True))
    assert story.arrive(story.announce("b")) == [Merge(1, ClosedBy.FULL)]
    assert dataclasses.astuple(under_way(story).terms) == (0.0, 0.0, 0.0, 0.0)


def test_a_round_closes_when_its_commit_can_name_no_more_and_the_others_are_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds_module, "INPUTS_MAX", 2)
    story = Story("a", "b", "c", "d")
    actions = story.announce("a", due=True)
    for learner in ("b", "c", "d"):
        actions += story.announce(learner, due=True)
    fetched = [a.pointer.learner for a in actions if isinstance(a, Fetch)]
    assert fetched == ["a", "b"], "no more updates are fetched than fit"
    # An update that cannot be read makes room for another.
    (first, second) = [a.pointer for a in actions if isinstance(a, Fetch)]
    third = story.rounds.on(Refused(first, Reason.MISSING), story.now)
    assert [a.pointer.learner for a in third if isinstance(a, Fetch)] == ["c"]
    assert story.arrive([Fetch(second), *third]) == [Merge(1, ClosedBy.FULL)]
    actions = story.commit("b", "c")
    assert [a.pointer.learner for a in actions if isinstance(a, Fetch)] == [], (
        "d's update is on version 0: it opens no round"
    )
    actions = story.announce("a", 1, due=True)
    assert [a.pointer.learner for a in actions if isinstance(a, Fetch)] == ["d", "a"]
    assert story.arrive(actions) == [Merge(2, ClosedBy.FULL)]
    assert sum(story.rounds.rejected_total.values()) == 1, "only the missing update is rejected"
