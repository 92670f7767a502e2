"""Step 3: a syncer opens a round for a fragment, and decides when to stop waiting for updates."""

from isthmus.rounds.events import CallRound, ClosedBy, Fetch, Merge, Tick
from support.round_story import Story


def test_a_learner_whose_fragment_is_due_opens_the_round_and_all_learners_are_called() -> None:
    """Learners that are not due yet answer the call with the work that they have done. So no learner has to wait until
    the slowest one is due."""
    story = Story("a", "b", "c")
    actions = story.announce("a", due=True)
    assert [type(action) for action in actions] == [CallRound, Fetch]


def test_an_announcement_alone_counts_for_nothing() -> None:
    """An update is in a round once the syncer has read its bytes and checked them."""
    story = Story("a")
    fetch = story.announce("a", due=True)
    assert story.rounds.on(Tick(), story.now) == []
    assert story.arrive(fetch) == [Merge(1, ClosedBy.EVERYONE)]


def test_when_all_learners_have_answered_the_round_closes() -> None:
    story = Story("a", "b")
    story.arrive(story.announce("a", due=True))
    assert story.arrive(story.announce("b")) == [Merge(1, ClosedBy.EVERYONE)]


def test_a_learner_that_does_not_answer_is_waited_for_during_the_grace_period_and_no_longer() -> None:
    """When the quorum has arrived, the grace period starts. It lasts as long as the slowest missing learner usually
    needs to answer, plus a step, if a period of the fastest learner has room for that (`isthmus.rounds.grace`)."""
    story = Story("a", "b", "slow")
    story.arrive(story.announce("a", due=True))
    story.arrive(story.announce("b"))
    ends = story.rounds.deadline(story.now)
    assert ends is not None
    assert story.rounds.on(Tick(), ends - 0.001) == []
    assert story.rounds.on(Tick(), ends) == [Merge(1, ClosedBy.GRACE)]
