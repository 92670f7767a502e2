"""Bounds limit the influence of one learner: claims far beyond those of the others are cut, honest ones are not."""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from isthmus.format.records.objects import Input, Waited
from isthmus.format.rules import Bounds, Pace, Rules
from isthmus.reasons import FINAL, Clip, Reason
from isthmus.rounds.bounds import (
    FALLS,
    FIRST_RMS,
    MAJORITY,
    REMEMBERED,
    RISES,
    UNTIMED,
    YOUNG,
    Already,
    Believed,
    Claim,
    Influence,
    claim_of,
    first_norm,
)
from isthmus.rounds.events import Action, CallRound, Fetch, Merge, Refused
from isthmus.rounds.live_learners import LiveLearners
from isthmus.rounds.rounds import ABSENT_KNOWN, Phase
from support.commits import committed, given
from support.round_story import Story

BOUNDS = Bounds()
HONEST = [Claim(f"h{i}", 12, 12_000, 0.1 * (1 + i / 10)) for i in range(3)]


def inputs_of(claims: Iterable[Claim], version: int, by: Sequence[Believed] = ()) -> list[Input]:
    """Return the inputs of a commit that merged these claims: each as believed in `by`, or for all that it claims."""
    found = []
    for number, c in enumerate(claims):
        asked = Believed(c.tokens * (c.tokens / c.steps))
        counts = by[number] if by else asked
        found.append(
            msgspec.structs.replace(
                given(c.learner, version - 1, version), steps=c.steps, tokens=c.tokens, norm=c.norm,
                weight=counts.weight, scale=counts.scale, clipped=tuple(counts.clipped), believed=counts.steps,
            )
        )  # fmt: skip
    return found


def seen(*claims: Claim, version: int = 5, bounds: Bounds = BOUNDS) -> Influence:
    """Return the `Influence` after the log has merged these claims."""
    influence = Influence(bounds, Rules())
    inputs = inputs_of(claims, version)
    influence.note(version, inputs, influence.after(inputs))
    return influence


def missing(*learners: str) -> Waited:
    """Return a commit's record of a round that waited in vain for these learners."""
    return msgspec.structs.replace(committed(1).waited, expected=("a", "b", "idle"), missing=learners, waited_s=4.0)


def test_updates_without_a_length_are_taken_while_none_has_one() -> None:
    """As of a fragment whose tensors are not trained yet, or of learners whose rate warms up from zero."""
    still = [Claim(f"h{i}", 12, 12_000, 0.0) for i in range(4)]
    for usual in (Influence(BOUNDS, Rules()), seen(*still)):
        found = usual.judge(still[0], still[1:])
        assert (found.scale, found.clipped, found.refused) == (1.0, (), False)


def test_honest_updates_count_for_what_they_say() -> None:
    usual = seen(*HONEST)
    for claim in (*HONEST, Claim("h3", 3, 3_000, 0.05), Claim("h4", 24, 24_000, 0.25), Claim("h5", 12, 12_000, 0.03)):
        found = usual.judge(claim)
        assert (found.weight, found.scale, found.clipped) == (claim.tokens * (claim.tokens / claim.steps), 1.0, ())
        assert not found.refused


@pytest.mark.parametrize(
    ("claim", "clips"),
    [
        (Claim("evil", 1, 1 << 53, 0.1), {Clip.TOKENS, Clip.WEIGHT}),
        (Claim("evil", 12, 12_000 * 7, 0.1), {Clip.WEIGHT}),
        (Claim("evil", 12, 12_000, 1e-6), {Clip.SHORT}),
        (Claim("evil", 1000, 1_000_000, 0.1, elapsed_s=1.2, step_s=0.1), {Clip.STEPS}),
        (Claim("evil", 12, 12_000, 1.0), {Clip.NORM}),
        (Claim("evil", 1 << 40, 1 << 53, 1e17, elapsed_s=1.0, step_s=0.1), {Clip.STEPS, Clip.TOKENS, Clip.WEIGHT, Clip.NORM}),
    ],
)  # fmt: skip
def test_one_of_four_counts_for_a_few_at_most(claim: Claim, clips: set[Clip]) -> None:
    usual = seen(*HONEST)
    found = usual.judge(claim)
    assert set(found.clipped) == clips
    usually = sorted(c.tokens * (c.tokens / c.steps) for c in HONEST)[1]
    assert 0 < found.weight <= BOUNDS.weight * usually * 1.0001
    # For the steps that are believed, a clipped update is no longer than the longest one that is not clipped.
    longest = BOUNDS.norm * max(c.norm / math.sqrt(c.steps) for c in HONEST)
    assert found.scale * claim.norm / math.sqrt(found.steps or claim.steps) <= longest * 1.0001


def test_what_is_far_too_long_is_none_and_a_zero_is_not_long() -> None:
    usual = seen(*HONEST)
    assert usual.judge(Claim("evil", 12, 12_000, 0.12 * BOUNDS.refused * 1.1)).refused
    assert not usual.judge(Claim("evil", 12, 12_000, 0.1 * BOUNDS.refused * 0.9)).refused
    assert Reason.TOO_LONG.value in FINAL
    assert seen(*(c._replace(norm=0.0) for c in HONEST)).judge(HONEST[0]._replace(norm=0.0)).clipped == ()


@pytest.mark.parametrize(("version", "refused"), [(0, False), (YOUNG - 1, False), (YOUNG, True)])
def test_while_rates_are_warmed_up_what_is_far_too_long_is_cut_and_not_refused(version: int, refused: bool) -> None:
    """Of honest learners, one that trained 12 steps is then compared with those that trained one."""
    usual = seen(*HONEST, version=version) if version else Influence(BOUNDS, Rules())
    found = usual.judge(Claim("late", 12, 12_000, 100.0 * BOUNDS.refused), HONEST)
    assert (found.refused, Clip.NORM in found.clipped) == (refused, True)
    longest = BOUNDS.norm * max(c.norm / math.sqrt(c.steps) for c in HONEST)
    assert found.scale * 100.0 * BOUNDS.refused / math.sqrt(12) <= longest * 1.0001


def test_where_most_change_what_is_usual_changes_with_them_and_nobody_is_kept_out() -> None:
    usual = seen(*HONEST)
    longer = [c._replace(norm=c.norm * 1e4) for c in HONEST]
    assert usual.judge(longer[0]).refused
    assert [usual.judge(c, longer[:n]).refused for n, c in enumerate(longer)] == [True, False, False]
    assert [usual.judge(c, longer).clipped for c in longer] == [(), (), ()]


def test_a_learner_cannot_grow_by_leaps_either() -> None:
    usual = seen(*HONEST, Claim("evil", 12, 12_000, 0.1))
    rate = 1000.0
    for _ in range(4):
        found = usual.judge(Claim("evil", 12, int(12 * rate * 7), 0.1))
        assert Clip.TOKENS in found.clipped
        assert found.weight <= 12 * (BOUNDS.jump * rate) ** 2


def test_several_updates_in_a_round_weigh_no_more_than_one_may() -> None:
    usual = seen(*HONEST)
    claim = Claim("h1", 12, 12_000, 0.1)
    one = usual.judge(claim)
    assert usual.judge(claim, already=Already(one.weight)).clipped == (), "twice the usual weight is allowed"
    third = usual.judge(claim, already=Already(BOUNDS.weight * one.weight))
    assert Clip.WEIGHT in third.clipped
    assert 0.0 < third.weight < 1e-3 * one.weight


def test_what_is_left_for_the_last_of_several_says_nothing_of_a_learner() -> None:
    usual = seen(*HONEST)
    # The learner is twice as fast as usual and sends on two bases, so little weight is left for the second update.
    weights = (12 * 2000.0**2, 1.0)
    twice = Claim("h1", 12, 24_000, 0.1)
    usual.note(6, inputs_of([twice, twice], 6, [Believed(w) for w in weights]), usual.length)
    assert Clip.TOKENS not in usual.judge(Claim("h1", 12, 24_000, 0.1)).clipped


def test_with_no_history_what_is_usual_is_the_round_whoever_was_first() -> None:
    evil = Claim("evil", 1, 1 << 53, 1e6)
    for order in ([evil, *HONEST], [*HONEST, evil]):
        fresh = Influence(BOUNDS, Rules())
        assert not fresh.known
        found = {c.learner: fresh.judge(c, order) for c in order}
        assert all(found[c.learner].clipped == () for c in HONEST)
        assert found["evil"].weight <= BOUNDS.weight * found["h1"].weight * 1.01
        assert found["evil"].scale * 1e6 <= BOUNDS.norm * 0.15


def test_what_is_not_clipped_weighs_to_the_last_bit_what_it_asks_for() -> None:
    """The verifier rejects a commit in which the two differ."""
    for steps in (3, 7, 11):
        claim = Claim("h1", steps, 1000 * steps + 1, 0.1)
        found = seen(*HONEST).judge(claim)
        assert found.clipped == ()
        assert found.weight == claim.tokens * (claim.tokens / claim.steps)


@pytest.mark.parametrize("claim", [*HONEST, Claim("h", 1, 1, 0.0)])
def test_nobody_counts_for_more_than_was_asked(claim: Claim) -> None:
    """A learner that claims to be enormous moves the median. It must not raise the weights of others."""
    usual = seen(Claim("evil", 1, 1 << 53, 0.1), Claim("worse", 1, 1 << 53, 0.1))
    assert usual.judge(claim).weight <= claim.tokens * (claim.tokens / claim.steps)


def test_what_was_long_ago_is_forgotten() -> None:
    usual = seen(*HONEST, version=1)
    usual.note(1 + REMEMBERED, [], usual.length)
    assert not usual.known


def test_who_is_heard_and_never_comes_is_not_waited_for() -> None:
    story = Story("a", "b", "idle", bounds=BOUNDS)

    def another(*also: str) -> list[Action]:
        """Ten seconds later, let updates of a, of the learners `also` and of b arrive; return the actions after b's."""
        story.now += 10.0
        for learner in ("a", "b", "idle"):
            story.beat(learner)
        base = story.rounds.head
        for learner in ("a", *also):
            story.arrive(story.announce(learner, base=base, due=learner == "a"))
        return story.arrive(story.announce("b", base=base))

    def waits_for_it(rounds: int) -> None:
        for number in range(rounds):
            another()
            assert story.rounds.round is not None
            assert story.rounds.round.missing == {"idle"}, f"after {number} rounds"
            story.commit("a", "b", waited=missing("idle"))
        assert [type(a) for a in another()] == [Merge], "every learner that sends updates is in"
        story.commit("a", "b", waited=missing())

    waits_for_it(BOUNDS.absent)
    another("idle")
    story.commit("a", "b", "idle", waited=missing())
    waits_for_it(ABSENT_KNOWN * BOUNDS.absent)


@pytest.mark.parametrize(("reason", "answered"), [(Reason.TOO_LONG, True), (Reason.UNREADABLE, False)])
def test_who_was_turned_away_for_good_has_answered(reason: Reason, answered: bool) -> None:
    """Otherwise the others would wait in every round for a learner that explodes and whose updates cannot be merged."""
    story = Story("a", "b", "evil", bounds=BOUNDS)
    story.commit("a", "b", "evil")
    story.now += 10.0
    for learner in ("a", "b", "evil"):
        story.beat(learner)
    story.arrive(story.announce("a", base=1, due=True))
    [fetch] = story.announce("evil", base=1)
    assert isinstance(fetch, Fetch)
    story.rounds.on(Refused(fetch.pointer, reason), story.now)
    assert any(isinstance(a, Merge) for a in story.arrive(story.announce("b", base=1))) == answered


def test_bounds_can_be_taken_away() -> None:
    free = Bounds(weight=1e9, norm=1e9, refused=1e9, rate=1e9, jump=1e9)
    claim = Claim("x", 1, 1 << 20, 1e4)
    assert seen(*HONEST, bounds=free).judge(claim).clipped == ()


LEARNERS = [f"l{n}" for n in range(5)]


def said(*durations: float) -> LiveLearners:
    """Return learners each of which states one duration [s] for its step, its upload and its sync."""
    members = LiveLearners(Pace(), 0.0)
    for learner, seconds in zip(LEARNERS, durations, strict=True):
        members.heard(learner, 1, 0.0, step_s=seconds, upload_s=seconds, sync_s=seconds)
    return members


def believed(members: LiveLearners) -> tuple[float, ...]:
    terms = members.terms(LEARNERS, ["l4"])
    return terms.fastest_step_s, terms.slowest_step_s, terms.sync_s, terms.cap_s


def test_durations_are_within_a_factor_of_their_median() -> None:
    members = said(1.0, 1.1, 0.9, 1e-9, 1e9)
    members.came("l4", math.inf)
    assert believed(members) == (1 / 4, 16.0, 16.0, 32.0)
    assert believed(said(1.0, 1.1, 0.9, 0.8, 1.2)) == (0.8, 1.2, 1.2, 2.4)
    assert believed(said(0.0, 0.0, 0.0, 0.0, 0.0)) == (0.0, 0.0, 0.0, 0.0)


def test_of_whom_nothing_has_come_is_believed_less() -> None:
    assert believed(said(1.0, 1.1, 0.9, 1e-9, 1e9)) == (1 / 4, 4.0, 4.0, 8.0)


def test_a_step_takes_no_longer_than_those_of_what_came() -> None:
    members = said(1.0, 1.1, 0.9, 1.0, 1e9)
    members.came("l4", 1.5)
    assert members.terms(LEARNERS, []).slowest_step_s == 4 * 1.5
    assert members.believed_step_s("l4") == 4 * 1.5
    members.came("l4", 30.0)
    assert members.believed_step_s("l4") == 16.0
    # Nothing has come of the new incarnation yet.
    members.heard("l4", 2, 0.0, step_s=1e9)
    assert members.believed_step_s("l4") == 4.0


# --- opening rounds ---------------------------------------------------------------------------------------------------


def test_one_that_is_always_due_opens_no_more_rounds_than_its_steps_allow() -> None:
    story = Story("a", "b", "evil", bounds=BOUNDS, step_s=0.1)
    story.beat("evil", step_s=1e-9)
    story.arrive(story.announce("evil", due=True))
    story.commit("evil")
    story.now += 0.01
    assert not any(isinstance(a, CallRound) for a in story.announce("evil", base=1, due=True))
    assert story.rounds.phase is Phase.CLOSED
    # Four fifths of the time of H = 12 steps of median duration.
    at = story.rounds.deadline(story.now)
    assert at == pytest.approx(100.0 + 0.8 * 12 * 0.1)
    # Other learners may open a round as soon as they are due.
    assert any(isinstance(a, CallRound) for a in story.announce("a", base=1, due=True))


def test_what_waits_for_its_turn_opens_when_that_comes() -> None:
    from isthmus.rounds.events import Tick

    story = Story("a", "evil", bounds=BOUNDS, step_s=0.1)
    story.arrive(story.announce("evil", due=True))
    story.commit("evil")
    story.announce("evil", base=1, due=True)
    assert story.rounds.on(Tick(), story.now) == []
    at = story.rounds.deadline(story.now)
    assert at is not None
    story.now = at
    assert any(isinstance(a, CallRound) for a in story.rounds.on(Tick(), story.now))


def test_an_age_is_at_most_that_of_the_version_it_is_based_on() -> None:
    from dataclasses import replace

    from isthmus.rounds.events import Announced

    story = Story("a", "b", bounds=BOUNDS)
    story.arrive(story.announce("a", due=True))
    story.commit("a")
    committed_at = story.now
    story.now += 2.0
    story.rounds.on(Announced(replace(story.pointer("b", base=1, due=True), boundary_at=-9e8)), story.now)
    assert story.rounds.round is not None
    assert story.rounds.round.boundary_at == committed_at


def test_a_sum_that_is_not_finite_turns_away_only_who_made_it_so() -> None:
    story = Story("a", "evil")
    story.arrive(story.announce("a", due=True))
    story.arrive(story.announce("evil"))
    evil = story.pointer("evil").digest
    actions = story.spoil(evil)
    assert story.rounds.rejected_total == {"overflow": 1}
    assert any(isinstance(a, CallRound) for a in actions), "a round for the other updates is called at once"
    story.arrive(actions)
    assert story.rounds.round is not None
    assert [who for who, _ in story.rounds.round.arrived] == ["a"]
    story.announce("evil")
    assert story.rounds.rejected_total == {"overflow": 1, "duplicate": 1}, "the update is rejected again"


# --- one or two learners ----------------------------------------------------------------------------------------------


class Merged:
    """Rounds of a fragment, one after another; each update is merged for what it is believed to be."""

    def __init__(self) -> None:
        self.usual = Influence(BOUNDS, Rules())
        self.version = 0

    def round(self, *claims: Claim, first: float = math.inf) -> list[Believed]:
        """Merge a round; return what each update counts for, rejected updates included."""
        self.version += 1
        known, among, by = self.usual.known, list(claims), []
        for number, claim in enumerate(claims):
            by.append(self.usual.judge(claim, among[:number] if known else among, first=first))
        merged = [(c, b) for c, b in zip(claims, by, strict=True) if not b.refused]
        inputs = inputs_of([c for c, _ in merged], self.version, [b for _, b in merged])
        self.usual.note(self.version, inputs, self.usual.after(inputs))
        return by


def test_one_of_two_that_explodes_is_as_long_as_four_of_the_other_for_ever() -> None:
    story, honest = Merged(), Claim("a", 12, 1200, 1.0)
    story.round(honest, honest._replace(learner="b"))
    for times in range(1, 120):
        evil = Claim("b", 12, min(1 << 53, 1200 * 4**times), min(1e17, 4.0**times))
        fair, cut = story.round(honest, evil)
        assert (fair.clipped, fair.scale) == ((), 1.0)
        assert cut.scale * evil.norm <= BOUNDS.norm * honest.norm * 1.0001
        assert not cut.refused, "of two learners, either could be the honest one"


def test_one_of_two_that_is_hardly_there_holds_the_other_back_only_slowly() -> None:
    story, honest = Merged(), Claim("a", 12, 1200, 1.0)
    story.round(honest, honest._replace(learner="b"))
    counted = [story.round(honest, Claim("b", 12, 1200, 1e-9))[0].scale for _ in range(60)]
    assert counted[:27] == [1.0] * 27
    assert all(FALLS - 1e-9 <= b / a <= 1.0 for a, b in pairwise(counted))
    # Once that learner is gone, it is forgotten, and the other's updates are not cut any more.
    for _ in range(REMEMBERED):
        story.round(honest)
    assert [story.round(honest)[0].scale for _ in range(5)][-1] == 1.0


def test_one_alone_grows_no_faster_than_twice_a_version() -> None:
    story = Merged()
    story.round(Claim("a", 12, 1200, 1.0))
    lengths = []
    for _ in range(6):
        [found] = story.round(Claim("a", 12, 1200, 1e6))
        lengths.append(found.scale * 1e6)
        assert not found.refused, "a single learner must not be kept out for ever"
    assert lengths == pytest.approx([BOUNDS.norm * RISES**n for n in range(1, 7)])


@pytest.mark.parametrize("many", [1, 2, 3])
def test_a_first_update_of_few_is_no_longer_than_the_fragment(many: int) -> None:
    first = first_norm(2.0, 100)
    claims = [Claim(f"l{n}", 12, 1200, 1e6) for n in range(many)]
    found = Merged().round(*claims, first=first)
    longest = 2.0 if many < MAJORITY else 1e6
    assert [b.scale * 1e6 for b in found] == pytest.approx([longest] * many)
    assert first_norm(0.0, 100) == pytest.approx(10 * FIRST_RMS)


@pytest.mark.parametrize(("steps", "periods"), [(48, 1.0), (49, 49 / 12), (480, 40.0), (12_000, 1000.0)])
@pytest.mark.parametrize("many", [1, 2, 3])
def test_first_work_of_many_periods_is_divided_by_them_and_may_be_longer(many: int, steps: int, periods: float) -> None:
    """The others of the round, with fewer steps, do not decide, and are divided by the same number."""
    story = Merged()
    claims = [Claim(f"l{n}", steps, 100 * steps, 1e6) for n in range(many)]
    found = story.round(*claims, first=2.0)
    longest = 2.0 * math.sqrt(min(periods, 64.0)) if many < MAJORITY else 1e6
    assert [b.scale * 1e6 for b in found] == pytest.approx([longest / periods] * many)
    assert {Clip.PERIODS in b.clipped for b in found} == {periods > 1.0}
    assert not any(Clip.PERIODS in b.clipped for b in story.round(*claims)), "only first work is merged so"
    if many == MAJORITY:
        mixed = Merged().round(*claims, Claim("late", 12, 1200, 1e6))
        assert [b.scale for b in mixed[:-1]] == pytest.approx([1.0 / periods] * many)
        assert Clip.PERIODS in mixed[-1].clipped or periods == 1.0


# --- bounds for any claim ---------------------------------------------------------------------------------------------


def any_claim(draw: np.random.Generator) -> Claim:
    """Return a random claim of steps, tokens, length and age, of any size that a header can hold."""
    return Claim(
        "evil",
        min(1 << 40, int(10 ** draw.uniform(0, 13))),
        min(1 << 53, int(10 ** draw.uniform(0, 16))),
        float(10 ** draw.uniform(-12, 17)),
        float(10 ** draw.uniform(-3, 6)) if draw.random() < 0.7 else math.inf,
        0.02 if draw.random() < 0.7 else 0.0,
    )


def test_length_times_weight_is_bounded_whatever_is_claimed() -> None:
    """Whatever steps, tokens, norm and age it claims, a learner counts for at most a few times the usual."""
    draw = np.random.default_rng(0)
    worst = dict.fromkeys((3, 4, 7, 16), 0.0)
    for _ in range(4000):
        count = int(draw.choice(list(worst)))
        honest = [
            Claim(f"h{n}", 12, 12_000, float(draw.uniform(0.5, 2.0)), float(draw.uniform(1.0, 3.0)), 0.02)
            for n in range(count - 1)
        ]
        usual = seen(*honest)
        evil = any_claim(draw)
        by = usual.judge(evil, honest)
        if by.refused:
            continue
        steps = by.steps or evil.steps
        time = evil.elapsed_s / 0.02 + 1 if math.isfinite(evil.elapsed_s) and evil.step_s else UNTIMED * 12
        assert steps <= max(1.0, time)
        weight = statistics.median(c.tokens * (c.tokens / c.steps) for c in honest)
        length = statistics.median(c.norm / math.sqrt(c.steps) for c in honest)
        assert by.weight <= BOUNDS.weight * weight * 1.0001
        # The length is that of the steps there was time for: an honest update of as many steps could be as long.
        assert by.scale * evil.norm / math.sqrt(steps) <= 2.0 * BOUNDS.norm * length
        assert by.weight <= evil.tokens * (evil.tokens / evil.steps)
        worst[count] = max(worst[count], by.weight * by.scale * evil.norm / math.sqrt(steps) / (weight * length))
    assert all(BOUNDS.weight < times <= 2.0 * BOUNDS.weight * BOUNDS.norm for times in worst.values()), worst


def test_who_is_fast_is_no_longer_for_it_and_who_is_long_is_no_heavier() -> None:
    """One of four learners claims sixteen times the usual steps, for which there was time, and is far too long."""
    usual = seen(*HONEST)
    evil = Claim("evil", 190, 190_000, 3.0, elapsed_s=100.0, step_s=0.02)
    by = usual.judge(evil)
    assert by.steps == 0, "there was time for all of its steps"
    # The median of four is the mean of the middle two; the learner's own claim is one of the four.
    assert by.scale * evil.norm == pytest.approx(BOUNDS.norm * (HONEST[1].norm + HONEST[2].norm) / 2)
    assert by.weight == 12 * 1000.0**2
    assert set(by.clipped) == {Clip.WEIGHT, Clip.NORM}
    # An honest learner that is four times as fast, and moves straight ahead, is not cut in length. Its weight is at the
    # bound.
    fast = usual.judge(Claim("fast", 48, 48_000, 4 * 0.11))
    assert (fast.scale, fast.clipped) == (1.0, (Clip.WEIGHT,))
    assert fast.weight == pytest.approx(BOUNDS.weight * 12 * 1000.0**2)


def test_what_one_of_two_counts_for_is_bounded_by_the_other_whatever_is_claimed() -> None:
    """Its length is cut. Its weight is that of the steps it had time for, at up to eight times the other's rate."""
    draw = np.random.default_rng(2)
    honest = Claim("h", 12, 12_000, 1.0, 3.0, 0.02)
    for _ in range(2000):
        evil = any_claim(draw)
        by = seen(honest).judge(evil, [honest])
        steps = by.steps or evil.steps
        assert by.weight <= steps * (BOUNDS.rate * 1000.0) ** 2 * 1.0001
        assert by.scale * evil.norm <= BOUNDS.norm * math.sqrt(steps / 12) * 1.0001
        # The other learner counts in full, or for at least 64 times as much in each step.
        least = min(1000.0, BOUNDS.rate * evil.tokens / evil.steps)
        assert seen(honest, evil._replace(believed=1)).judge(honest).weight >= 12 * least**2 * 0.9999


def test_what_is_judged_again_from_the_log_is_the_same() -> None:
    """A replay knows only what commits say; it has no clock."""
    draw = np.random.default_rng(1)
    live, again = Influence(BOUNDS, Rules()), Influence(BOUNDS, Rules())
    log: list[tuple[int, list[Input], float]] = []
    for version in range(1, 80):
        claims = [
            Claim(
                f"l{n}",
                int(draw.integers(1, 40)),
                int(draw.integers(1, 50_000)),
                float(10 ** draw.uniform(-2, 2)),
                0.3,
                0.02,
            )
            for n in range(int(draw.integers(1, 6)))
        ]
        claims = [live.timed(c, claims) for c in claims]
        known = live.known
        by = [live.judge(c, claims[:n] if known else claims, first=3.0) for n, c in enumerate(claims)]
        merged = [(c, b) for c, b in zip(claims, by, strict=True) if not b.refused]
        if len(merged) < len(claims):
            continue  # rejected updates are not in the log
        inputs = inputs_of(claims, version, by)
        said = [claim_of(i) for i in inputs]
        assert again.known == known
        assert [again.judge(c, said[:n] if known else said, first=3.0) for n, c in enumerate(said)] == by
        length = live.after(inputs)
        assert again.after(inputs) == length
        log.append((version, inputs, length))
        live.note(*log[-1])
        again.note(*log[-1])
        if version % 17 == 0:  # a syncer that takes over has read only the newest commits
            again = Influence(BOUNDS, Rules())
            for commit in log:
                if version - commit[0] < REMEMBERED:
                    again.note(*commit)


def test_the_glossary_says_what_each_reason_to_clip_means() -> None:
    glossary = (Path(__file__).parents[2] / "docs/glossary.md").read_text()
    (row,) = [line for line in glossary.splitlines() if line.startswith("| clipped |")]
    assert all(f"`{clip}` (" in row for clip in Clip)
