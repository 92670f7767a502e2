"""A syncer that is asked for more than it can do opens only the rounds that it can serve, in a fair order."""

import math
import random
from collections import deque
from collections.abc import Callable
from itertools import chain, repeat

import msgspec
import pytest

from isthmus.format.rules import Bounds
from isthmus.rounds.admission import FETCHES_TIMED, PATIENCE, TRIED, WINDOW, WINDOWS_EACH, WINDOWS_KNOWN, Admission
from isthmus.rounds.events import (
    Action,
    Called,
    CallRound,
    ClosedBy,
    Fetch,
    Hold,
    Merge,
    Tick,
    Turn,
)
from isthmus.rounds.rounds import Phase
from support.round_story import PACE, Story

# --- updates that the syncer has still to read ------------------------------------------------------------------------


def ticks_until(story: Story, end: float) -> list[Action]:
    """Advance the clock to `end`, with a tick at each deadline until actions other than calls come; return these."""
    came: list[Action] = []
    for _ in range(1000):
        due = story.rounds.deadline(story.now)
        if came or due is None or due > end:
            break
        story.now = due
        came += [a for a in story.rounds.on(Tick(), story.now) if not isinstance(a, CallRound)]
    story.now = max(story.now, end)
    return came


@pytest.mark.parametrize("first", ["some", "none"])
def test_a_round_is_open_as_long_as_something_of_it_waits_to_be_read(first: str) -> None:
    story = Story("a", "b", "c")
    queued = [*story.announce("a", due=True), *story.announce("b"), *story.announce("c")]
    own = [a for a in queued if isinstance(a, Fetch) and a.pointer.learner == "a"]
    if first == "some":
        assert story.arrive(own) == []
        queued = [a for a in queued if a not in own]
    assert ticks_until(story, story.now + 60.0) == [], "60 s is far beyond grace, H steps and the silence timeout"
    assert story.arrive(queued) == [Merge(1, ClosedBy.GRACE if first == "some" else ClosedBy.EVERYONE)]
    assert story.rounds.round is not None
    assert story.rounds.round.own_until == story.now


def test_without_anything_to_read_nothing_is_kept_open() -> None:
    story = Story("a", "b")
    story.arrive(story.announce("a", due=True))
    assert ticks_until(story, story.now + 60.0) == [Merge(1, ClosedBy.GRACE)]
    assert story.rounds.round is not None
    assert story.rounds.round.own_until == -math.inf


def test_a_fetch_under_way_is_waited_for_as_long_as_two_usual_ones() -> None:
    story = Story("a", "b", admission=Admission(16, 2))
    for seconds in (3.0, 1.0, 500.0):
        read(story.admission, seconds)
    story.begin(story.announce("b", due=True))
    began = story.now
    story.now += 0.5
    assert story.arrive(story.announce("a")) == []
    assert ticks_until(story, began + PATIENCE * 3.0 - 0.01) == []
    assert ticks_until(story, began + PATIENCE * 3.0) == [Merge(1, ClosedBy.GRACE)]
    assert story.rounds.round is not None
    assert story.rounds.round.own_until == began + PATIENCE * 3.0


def test_that_a_round_was_kept_open_is_noted_though_nothing_else_happens_meanwhile() -> None:
    """No call is repeated and no message comes, so only ticks show that the round is overdue, and close it later."""
    pace = msgspec.structs.replace(PACE, heartbeat_s=100.0, silence_s=300.0)
    story = Story("a", "b", admission=Admission(16, 2), pace=pace)
    for seconds in (3.0, 1.0, 500.0):
        read(story.admission, seconds)
    story.begin(story.announce("b", due=True))
    began = story.now
    story.now += 0.5
    assert story.arrive(story.announce("a")) == []
    assert ticks_until(story, began + 50.0) == [Merge(1, ClosedBy.GRACE)]
    assert story.rounds.round is not None
    assert story.rounds.round.closed_at == began + PATIENCE * 3.0
    assert story.rounds.round.own_until == began + PATIENCE * 3.0


def test_whoever_wants_no_grace_does_not_wait_for_what_is_to_be_read() -> None:
    story = Story("a", "b", pace=msgspec.structs.replace(PACE, grace=0.0))
    queued = [*story.announce("a", due=True), *story.announce("b")]
    (own,) = (a for a in queued if isinstance(a, Fetch) and a.pointer.learner == "a")
    assert story.arrive([own]) == [Merge(1, ClosedBy.GRACE)]


def read(admission: Admission, *seconds: float) -> None:
    """Let one update after another be read, in these durations."""
    for each in seconds:
        admission.fetch_begins(0.0)
        admission.fetch_ends(0.0, each)


# --- admission --------------------------------------------------------------------------------------------------------


def test_a_round_that_is_due_waits_for_the_gate_and_opens_when_it_is_its_turn() -> None:
    admission = Admission(1, 1)
    first, second = (Story("a", "b", admission=admission, fragment=p) for p in range(2))
    read(admission, 5.0)
    theirs = first.announce("a", due=True)
    assert CallRound(1) in theirs
    assert second.announce("a", due=True) == [], "two updates are owed, one can be read at once: the other takes 5 s"
    assert second.rounds.phase is Phase.CLOSED
    assert admission.waiting == 1
    first.arrive(theirs)
    assert second.turns == 1
    assert CallRound(1) in second.rounds.on(Turn(), second.now)
    assert admission.waiting == 0


def test_a_round_opens_once_the_first_fetches_show_how_long_one_takes() -> None:
    """Nobody tells the fragment: it asks again at every look at the clock."""
    admission = Admission(1, 1)
    story = Story("a", "b", admission=admission)
    admission.owes(9, 5)
    assert story.announce("a", due=True) == [], "how long five fetches take is not known"
    assert story.rounds.on(Tick(), story.now) == []
    read(admission, 0.001)
    assert CallRound(1) in story.rounds.on(Tick(), story.now)


def test_what_waits_for_the_gate_is_not_overdue_for_another_whose_learner_has_to_wait() -> None:
    """The next deadline must not lie in the past.

    It once did if one learner's round waited for admission and another learner could not open a round yet. Ticks were
    then due again and again, and the clock never advanced.
    """
    admission = Admission(1, 1)
    story = Story("a", "b", admission=admission, bounds=Bounds(opening=1.0))
    for version, opener in enumerate(("b", "a")):
        story.arrive(story.announce(opener, base=version, due=True))
        story.commit(opener)
        story.now += 1.0  # H steps are 1.2 s
    read(admission, 5.0)
    admission.owes(9, 5)
    assert story.announce("b", base=2, due=True) == []
    assert admission.waiting == 1
    assert story.announce("a", base=2, due=True) == [], "a may open a round only in a moment"
    at = story.rounds.deadline(story.now)
    assert at is None or at > story.now
    admission.owes(9, None)
    assert CallRound(3) in story.rounds.on(Turn(), story.now)
    assert story.rounds.round is not None
    assert story.rounds.round.called_by == "b"


def test_where_nobodys_turn_is_near_the_fragment_leaves_the_line() -> None:
    admission = Admission(1, 1)
    story = Story("a", "b", admission=admission, bounds=Bounds(opening=1.0))
    story.arrive(story.announce("a", due=True))
    story.commit("a")
    read(admission, 5.0)
    admission.owes(9, 5)
    assert story.announce("a", base=1, due=True) == []
    assert admission.waiting == 0
    opens_at = story.rounds.deadline(story.now)
    assert opens_at is not None
    story.now = opens_at
    assert story.rounds.on(Tick(), story.now) == []
    assert admission.waiting == 1, "now a may open a round"


def test_due_once_is_due_when_the_gate_has_room() -> None:
    admission = Admission(1, 1)
    story = Story("a", "b", admission=admission)
    read(admission, 5.0)
    admission.owes(9, 5)
    assert story.announce("a") == []
    assert story.announce("a", due=True) == [], "the update is announced again, now as due"
    assert admission.waiting == 1
    assert story.announce("a", tokens=9000) == []
    admission.owes(9, None)
    assert CallRound(1) in story.rounds.on(Turn(), story.now)


@pytest.mark.parametrize("how", ["called by another", "left", "committed by another"])
def test_whoever_needs_the_gate_no_more_leaves_the_line(how: str) -> None:
    admission = Admission(1, 1)
    first, second, third = (Story("a", "b", admission=admission, fragment=p) for p in range(3))
    read(admission, 5.0)
    first.announce("a", due=True)
    second.announce("a", due=True)
    third.announce("a", due=True)
    assert admission.waiting == 2
    if how == "called by another":
        second.rounds.on(Called(1, "s2"), second.now)
    elif how == "left":
        second.rounds.on(Hold(False), second.now)
    else:
        second.commit("a")
    assert admission.waiting == 1
    assert second.rounds.phase is (Phase.OPEN if how == "called by another" else Phase.CLOSED)


def test_the_fragment_whose_last_round_is_longest_ago_is_let_in_first() -> None:
    admission = Admission(1, 1)
    stories = [Story("a", "b", admission=admission, fragment=p) for p in range(3)]
    read(admission, 5.0)
    for p, story in enumerate(stories):
        story.now += 1.0 - 0.3 * p
        story.commit("a")
    theirs = stories[0].announce("a", base=1, due=True)
    for story in stories[1:]:
        assert story.announce("a", base=1, due=True) == []
    stories[0].arrive(theirs)
    assert [story.turns for story in stories] == [0, 0, 1]


class Line:
    """Fragments that wait to be admitted; `told` lists those that were told that their rounds may open."""

    def __init__(self, fetches: int = 4, merges: int = 2) -> None:
        self.admission = Admission(fetches, merges)
        self.told: list[int] = []

    def asks(self, fragment: int, since: float = 0.0, lead_s: float = 1.0) -> bool:
        return self.admission.admits(fragment, since, lead_s, lambda: self.told.append(fragment))


def test_as_many_updates_as_can_be_read_at_once_are_let_in_and_as_many_more_as_are_read_within_the_lead() -> None:
    line = Line(fetches=4)
    read(line.admission, 2.0)
    line.admission.owes(0, 4)
    assert line.asks(1)
    line.admission.owes(1, 3)
    assert not line.asks(2), "three updates wait and 4 are read in 2 s, so the wait is 1.5 s"
    assert line.told == []
    line.admission.owes(1, 2)
    assert line.told == [2]
    assert line.asks(2)


def test_before_anything_was_read_as_much_is_let_in_as_can_be_read_at_once() -> None:
    line = Line(fetches=4)
    line.admission.owes(0, 4)
    assert line.asks(1)
    line.admission.owes(1, 1)
    assert not line.asks(2)
    read(line.admission, 0.001)
    line.admission.owes(1, 1)
    assert line.told == [2]


def test_one_round_gathers_while_all_threads_merge_and_more_where_merges_are_quick() -> None:
    line = Line(merges=2)
    for _ in range(2):
        line.admission.merge_begins()
    line.admission.merge_ends(4.0)
    line.admission.merge_begins()
    assert line.asks(0), "two rounds merge, on two threads: one more may gather its updates"
    line.admission.owes(0, 0)
    assert not line.asks(1, lead_s=1.9)
    assert line.asks(1, lead_s=2.0), "one round too many waits for 4 s on two threads"
    line.admission.owes(1, 0)
    assert not line.asks(2, lead_s=2.0)
    line.admission.merge_ends(4.0)
    assert line.told == [2]


def test_a_merge_that_failed_says_nothing_of_how_long_one_takes() -> None:
    line = Line()
    line.admission.merge_begins()
    line.admission.merge_ends(None)
    assert line.admission.merge_s == 0.0
    line.admission.merge_begins()
    line.admission.merge_ends(3.0)
    assert line.admission.merge_s == 3.0


def test_whoever_is_told_is_told_once_until_it_asks_again() -> None:
    line = Line(fetches=1)
    read(line.admission, 5.0)
    line.admission.owes(0, 9)
    assert not line.asks(1, since=2.0)
    assert not line.asks(2, since=1.0)
    line.admission.owes(0, None)
    line.admission.owes(3, None)
    assert line.told == [2], "fragment 2 has waited longest"
    line.admission.owes(0, 9)
    assert not line.asks(2, since=1.0)
    line.admission.owes(0, None)
    assert line.told == [2, 2]
    line.admission.leaves(2)
    assert line.told == [2, 2, 1], "fragment 1 comes next"
    line.admission.leaves(2)
    assert line.asks(1, since=2.0)


def test_nobody_passes_another_that_waits_longer() -> None:
    line = Line(fetches=1)
    read(line.admission, 5.0)
    line.admission.owes(0, 9)
    assert not line.asks(1, since=1.0)
    line.admission.owes(0, None)
    assert not line.asks(2, since=2.0)
    assert line.asks(1, since=1.0)
    line.admission.owes(1, 0)
    assert line.told == [1, 2]


def test_what_a_fetch_takes_is_the_median_of_the_last_ones() -> None:
    admission = Admission()
    for seconds in (1.0, 900.0, 2.0):
        read(admission, seconds)
    assert admission.fetch_s == 2.0
    assert admission.patience_s == PATIENCE * 2.0
    for _ in range(FETCHES_TIMED):
        read(admission, 7.0)
    assert admission.fetch_s == 7.0


# --- how many at once -------------------------------------------------------------------------------------------------


class Link:
    """A store that takes `alone_s` for each answer, behind a link that carries one update in `shared_s`."""

    def __init__(self, admission: Admission, alone_s: float, shared_s: float) -> None:
        self.admission = admission
        self.alone_s, self.shared_s = alone_s, shared_s
        self.now = 0.0

    def all_at_once(self, count: int, draw: Callable[[], float] = lambda: 1.0) -> None:
        """Let a window of updates be read, `count` at once, which share the link equally."""
        for _ in range(-(-WINDOW // count)):
            for _ in range(count):
                self.admission.fetch_begins(self.now)
            began, took = self.now, sorted((self.alone_s + self.shared_s * count) * draw() for _ in range(count))
            for seconds in took:
                self.now = began + seconds
                self.admission.fetch_ends(self.now, seconds)

    def in_turn(self, count: int, slow_every: int = 0) -> None:
        """Let four windows of updates be read, `count` under way at a time, which the link carries one after the other.

        `slow_every`: after every so many updates, begin one more that takes ten times as long and uses another link; 0:
        none.
        """
        begun = deque[float]()
        slow = deque[float]()
        for number in range(4 * WINDOW):
            if slow_every and number % slow_every == 0:
                slow.append(self.now)
                self.admission.fetch_begins(self.now)
            if slow and self.now - slow[0] >= 10 * count * self.shared_s:
                self.admission.fetch_ends(self.now, self.now - slow.popleft())
            while len(begun) < count:
                begun.append(self.now)
                self.admission.fetch_begins(self.now)
            self.now += self.shared_s
            self.admission.fetch_ends(self.now, self.alone_s + self.now - begun.popleft())
        for since in begun:
            self.now += self.shared_s
            self.admission.fetch_ends(self.now, self.alone_s + self.now - since)


@pytest.mark.parametrize(
    ("alone_s", "shared_s", "useful"),
    [
        (2.0, 0.0, 16.0),  # a store that is far away: the more at once, the better
        (0.0, 0.4, 1.0),  # a link that one fetch fills
        (1.2, 0.4, 4.0),
        (60.0, 0.4, 16.0),
    ],
)
def test_a_link_that_they_share_is_told_from_a_store_that_is_far_away(
    alone_s: float, shared_s: float, useful: float
) -> None:
    line = Line(16, 2)
    link = Link(line.admission, alone_s, shared_s)
    for count in (4, 1, 2, 8, 16, 2):
        link.all_at_once(count)
    # With a lead of 0, a round is admitted only if no owed update has to wait for another.
    line.admission.owes(0, int(useful))
    assert line.asks(1, lead_s=0.0)
    line.admission.owes(0, int(useful) + 1)
    assert not line.asks(2, lead_s=0.0)
    # One owed update too many waits for as long as one more fetch takes.
    each_s = max(shared_s, (alone_s + shared_s) / 16)
    assert not line.asks(2, lead_s=0.9 * each_s)
    assert line.asks(2, lead_s=1.1 * each_s)


def test_a_link_that_carries_one_after_the_other_is_shared_too() -> None:
    line = Line(16, 2)
    link = Link(line.admission, 0.0, 0.4)
    for count in (4, 1, 16, 8):
        link.in_turn(count)
    line.admission.owes(0, 2)
    assert not line.asks(1, lead_s=0.0)
    line.admission.owes(0, 1)
    assert line.asks(1, lead_s=0.0)


def test_fetches_that_differ_by_chance_share_no_link() -> None:
    line, draw = Line(16, 2), random.Random(1)
    link = Link(line.admission, 2.0, 0.0)
    for _ in range(40):
        link.all_at_once(draw.randint(1, 16), lambda: draw.uniform(0.5, 1.5))
    line.admission.owes(0, 16)
    assert line.asks(1, lead_s=0.0)


def test_one_body_that_took_for_ever_says_nothing_of_the_link() -> None:
    line = Line(16, 2)
    link = Link(line.admission, 2.0, 0.0)
    for count in (1, 1, 8, 16):
        slow = chain([500.0] if count == 16 else [], repeat(1.0))
        link.all_at_once(count, slow.__next__)
    line.admission.owes(0, 16)
    assert line.asks(1, lead_s=0.0)


def test_a_link_is_known_though_one_body_in_ten_takes_for_ever() -> None:
    """A learner that is far away has a link of its own."""
    line = Line(16, 2)
    link = Link(line.admission, 0.0, 0.4)
    for count in (4, 2, 8, 4):
        link.in_turn(count, slow_every=10)
    line.admission.owes(0, 3)
    assert not line.asks(1, lead_s=0.0)


def test_on_a_link_that_is_always_busy_what_was_known_holds() -> None:
    line = Line(16, 2)
    link = Link(line.admission, 0.0, 0.4)
    for count in (4, 1, 2):
        link.all_at_once(count)
    for _ in range(WINDOWS_KNOWN - 3):
        link.all_at_once(16)
    line.admission.owes(0, 2)
    assert not line.asks(1, lead_s=0.0)


def test_where_nothing_tells_what_fewer_fetches_take_fewer_are_tried() -> None:
    """With all fetches always under way, a link that one fetch fills looks like a store that is far away."""
    line = Line(16, 2)
    link = Link(line.admission, 0.0, 0.4)
    for _ in range(WINDOWS_KNOWN):
        link.all_at_once(16)
    tried = int(TRIED * 16)
    line.admission.owes(0, tried + 1)
    assert not line.asks(1, lead_s=0.0)
    line.admission.owes(0, tried)
    assert line.asks(1, lead_s=0.0)
    link.all_at_once(tried)  # this window shows that the link is the limit
    line.admission.owes(0, 2)
    assert not line.asks(1, lead_s=0.0)


def test_where_fewer_fetches_are_slower_all_run_again() -> None:
    line = Line(16, 2)
    link = Link(line.admission, 6.4, 0.0)
    for count in (16, 16, int(TRIED * 16)):
        link.all_at_once(count)
    line.admission.owes(0, 16)
    assert line.asks(1, lead_s=0.0)


def test_what_a_link_was_long_ago_says_nothing_of_it_now() -> None:
    """The link carried one update at a time. Now it is wide, and the store is far away."""
    line = Line(16, 2)
    Link(line.admission, 0.0, 0.4).all_at_once(1)
    far = Link(line.admission, 6.4, 0.0)
    for count in [16] * WINDOWS_EACH + [8] * WINDOWS_KNOWN:
        far.all_at_once(count)
    line.admission.owes(0, int(TRIED * 16) + 1)
    assert not line.asks(1, lead_s=0.0), "how long fewer fetches take is not known"
    far.all_at_once(2)
    line.admission.owes(0, 16)
    assert line.asks(1, lead_s=0.0)


def test_a_fetch_that_failed_is_over_and_says_nothing() -> None:
    line = Line(16, 2)
    for _ in range(3):
        line.admission.fetch_begins(0.0)
    line.admission.fetch_ends(7.0, None)
    line.admission.fetch_ends(7.0, None)
    assert line.admission.fetch_s == 0.0
    # One of the three is still under way, so fetches made one after the other count as two at once.
    for now in range(WINDOW):
        line.admission.fetch_begins(7.0 + now)
        line.admission.fetch_ends(8.0 + now, 1.0)
    link = Link(line.admission, 0.0, 1.0)
    link.now = 7.0 + WINDOW
    for _ in range(4):
        link.all_at_once(7)
    line.admission.owes(0, 3)
    assert not line.asks(1, lead_s=0.0)
