"""The boundary copies fragments out and in between two steps, and counts the work on each."""

import gc
import math
import weakref
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest

from isthmus.codecs.kernels import F32
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Adoption, Pace
from isthmus.learner import losses
from isthmus.learner.backend import local_array, rounded
from isthmus.learner.boundary import (
    Adopted,
    BaseMerged,
    Boundary,
    CalledFor,
    Captured,
    CopyState,
    NothingToGive,
    Ready,
    SyncerBack,
    ToAgent,
    ToTraining,
    UploadDone,
)

LAYOUT = partition([Spec(f"t{i}", (10,), "float32", TensorClass.DENSE) for i in range(4)], 4)


class Model:
    """Four fragments that grow by one at each step."""

    def __init__(self) -> None:
        self.values = [np.zeros(10, np.float32) for _ in LAYOUT.fragments]

    def read(self, fragment: int, out: F32) -> None:
        out[:] = self.values[fragment]

    def write(self, fragment: int, values: F32) -> None:
        self.values[fragment][:] = values

    def step(self) -> None:
        for v in self.values:
            v += 1


class Loop:
    """A training loop with its boundary; uploads end at once unless told otherwise."""

    def __init__(
        self,
        *,
        adopt: Adoption = Adoption.OVERWRITE,
        sync_every: int = 4,
        base: int = 0,
        staleness: int = 1,
        lead: float | None = None,
        period: float = 0.0,
    ) -> None:
        self.model = Model()
        self.time = 0.0
        self.boundary = Boundary(
            LAYOUT,
            self.model,
            periods=(sync_every, 8 * sync_every),
            pace=Pace(staleness=staleness, lead=lead),
            adopt=adopt,
            versions=[(base, np.zeros(10, np.float32), period) for _ in LAYOUT.fragments],
            step=0,
            tokens_seen=0,
            now=lambda: self.time,
            notify=lambda: None,
        )

    def step(self, count: int = 1, *, tokens: int = 100, finish: bool = True) -> list[ToAgent]:
        said: list[ToAgent] = []
        for _ in range(count):
            self.time += 0.1
            self.model.step()
            self.boundary.after_step(tokens)
            while self.boundary.outbox:
                message = self.boundary.outbox.popleft()
                said.append(message)
                if isinstance(message, Captured) and finish:
                    self.boundary.post(UploadDone(message.fragment))
        return said

    def tell(self, message: ToTraining) -> None:
        self.boundary.post(message)


def captured(said: Iterable[ToAgent], fragment: int | None = None) -> list[Captured]:
    return [m for m in said if isinstance(m, Captured) and fragment in (None, m.fragment)]


def test_fragments_leave_one_after_another_then_every_h_steps() -> None:
    loop = Loop(sync_every=4)
    assert [(m.fragment, m.step) for m in captured(loop.step(4))] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [(m.fragment, m.step) for m in captured(loop.step(4))] == [(0, 5), (1, 6), (2, 7), (3, 8)]


def test_the_last_loss_that_a_loop_reported_is_kept() -> None:
    boundary = Loop().boundary
    boundary.after_step(100, 2.5)
    boundary.after_step(100)
    assert boundary.loss == 2.5


def test_an_update_states_the_mean_loss_since_its_base() -> None:
    loop = Loop(sync_every=4)
    boundary = loop.boundary

    def step(loss: float | None) -> list[Captured]:
        loop.model.step()
        boundary.after_step(100, loss)
        said = [boundary.outbox.popleft() for _ in range(len(boundary.outbox))]
        for one in captured(said):
            loop.tell(UploadDone(one.fragment))
        return captured(said)

    # Fragments are sent at steps 1 to 4, each for all steps since version 0. Steps without a finite loss do not count.
    assert [m.loss for m in step(None)] == [None]
    assert [m.loss for m in step(8.0)] == [8.0]
    assert [m.loss for m in step(math.nan)] == [8.0]
    assert [m.loss for m in step(4.0)] == [6.0]
    # The update after a new version counts from there, and another one on the same base from that base.
    loop.tell(Ready(0, 1, np.ones(10, np.float32)))
    found = [m for loss in (3.0, *[1.0] * 7) for m in step(loss)]
    assert next(m.loss for m in found if (m.fragment, m.base) == (1, 0)) == pytest.approx((8 + 4 + 3 + 1) / 4)
    assert next(m.loss for m in found if (m.fragment, m.base) == (0, 1)) == 1.0


def test_the_losses_of_the_newest_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "STEPS_KEPT", 3)
    kept = losses.Losses()
    for step, loss in enumerate([50.0, 1e30, 1e30, 1e30, -math.inf], 1):
        kept.add(step, loss)
    assert kept.mean_after(0) == pytest.approx(1e30)
    assert kept.mean_after(3) == pytest.approx(1e30)
    assert kept.mean_after(4) is None


def test_an_update_is_the_whole_way_since_its_base() -> None:
    loop = Loop(sync_every=4)
    second = captured(loop.step(5), 0)[-1]
    assert (second.base, second.steps, second.tokens) == (0, 5, 500)
    assert (local_array(second.values) == 5).all()
    assert second.due


def test_a_call_is_answered_at_the_next_boundary_whatever_the_schedule() -> None:
    loop = Loop(sync_every=100)
    loop.step(2)
    loop.tell(CalledFor(3, 1))
    answer = captured(loop.step(1))[0]
    assert (answer.fragment, answer.steps, answer.due) == (3, 3, False)


def test_an_answer_counts_for_the_schedule() -> None:
    loop = Loop(sync_every=8)
    loop.tell(CalledFor(3, 1))
    loop.step(1)
    later = captured(loop.step(12), 3)
    assert [m.step for m in later] == [9]


def test_what_was_sent_on_a_base_answers_the_call() -> None:
    loop = Loop(sync_every=100)
    loop.tell(CalledFor(2, 1))
    loop.step(1)
    loop.tell(CalledFor(2, 1))
    assert not captured(loop.step(3), 2)


def test_work_that_no_round_merges_is_sent_again_more_and_more_seldom() -> None:
    loop = Loop(sync_every=4)
    sent = [m.step for m in loop.step(2000) if isinstance(m, Captured) and m.fragment == 0]
    assert sent[:5] == [1, 5, 9, 13, 17], "each period while there is little work"
    apart = [b - a for a, b in pairwise(sent)]
    assert apart == [max(4, step // 8) for step in sent[:-1]]
    assert len(sent) < 45


def test_a_syncer_that_is_back_is_sent_what_has_grown_by_a_period() -> None:
    loop = Loop(sync_every=4)
    sent = [m.step for m in loop.step(200) if isinstance(m, Captured) and m.fragment == 0]
    assert sent[-1] + 4 < loop.boundary.step < sent[-1] + sent[-1] // 8
    loop.tell(SyncerBack())
    assert {m.fragment for m in loop.step(2) if isinstance(m, Captured)} == {0, 1, 2, 3}
    loop.tell(SyncerBack())
    assert not [m for m in loop.step(2) if isinstance(m, Captured)], (
        "an update sent within the last period is new enough"
    )


def test_a_call_for_history_is_ignored() -> None:
    loop = Loop(base=5, sync_every=100)
    loop.tell(CalledFor(0, 5))
    assert not loop.step(1)


def test_a_learner_too_far_behind_passes() -> None:
    loop = Loop(sync_every=100)
    loop.tell(CalledFor(0, 3))
    assert NothingToGive(0, 3) in loop.step(1)


def test_a_learner_whose_base_is_merged_passes() -> None:
    loop = Loop(sync_every=100)
    loop.tell(BaseMerged(0, 0))
    loop.tell(CalledFor(0, 2))
    assert NothingToGive(0, 2) in loop.step(1)


def test_overwrite_discards_what_came_after_the_upload() -> None:
    loop = Loop(sync_every=100)
    loop.tell(CalledFor(0, 1))
    loop.step(1)
    loop.step(2)
    loop.tell(Ready(0, 1, np.full(10, 40, np.float32)))
    said = loop.step(1)
    assert said == [Adopted(0, 1, overwritten=300, base=0, sent=100)]
    assert (loop.model.values[0] == 40).all()
    loop.tell(CalledFor(0, 2))
    assert (captured(loop.step(1))[0].base, loop.boundary.slots[0].origin_step) == (1, 4)


def test_carry_keeps_what_came_after_the_upload() -> None:
    loop = Loop(adopt=Adoption.CARRY, sync_every=100)
    loop.tell(CalledFor(0, 1))
    loop.step(1)
    loop.step(2)
    loop.tell(Ready(0, 1, np.full(10, 40, np.float32)))
    assert loop.step(1) == [Adopted(0, 1, overwritten=0, base=0, sent=100)]
    assert (loop.model.values[0] == 43).all()  # three steps after the upload
    loop.tell(CalledFor(0, 2))
    answer = captured(loop.step(1))[0]
    assert (answer.base, answer.steps, answer.tokens) == (1, 4, 400)


def test_blend_mixes_half_and_half() -> None:
    loop = Loop(adopt=Adoption.BLEND, sync_every=100)
    loop.tell(CalledFor(0, 1))
    loop.step(1)
    loop.tell(Ready(0, 1, np.full(10, 40, np.float32)))
    loop.step(1)
    assert (loop.model.values[0] == 21).all()  # half of 2 and half of 40


def test_work_that_no_upload_holds_is_sent_before_it_is_replaced() -> None:
    loop = Loop(sync_every=100)
    loop.step(3)
    loop.tell(Ready(3, 1, np.zeros(10, np.float32)))
    sent, adopted = loop.step(1)
    assert isinstance(sent, Captured)
    assert (sent.base, sent.steps, sent.due) == (0, 4, False)
    assert adopted == Adopted(3, 1, overwritten=0, base=0, sent=400)


def test_work_too_old_to_be_merged_is_not_sent() -> None:
    loop = Loop(sync_every=100, staleness=1)
    loop.step(3)
    loop.tell(Ready(3, 2, np.zeros(10, np.float32)))
    assert loop.step(1) == [Adopted(3, 2, overwritten=400, base=0, sent=0)]


def test_the_newest_version_wins() -> None:
    loop = Loop(sync_every=100)
    loop.tell(Ready(0, 1, np.full(10, 1, np.float32)))
    loop.tell(Ready(0, 2, np.full(10, 2, np.float32)))
    loop.tell(Ready(0, 1, np.full(10, 1, np.float32)))
    loop.step(2)
    assert loop.boundary.slots[0].base == 2


def test_uploads_under_way_are_bounded() -> None:
    loop = Loop(sync_every=1)
    said = [m for _ in range(6) for m in loop.step(finish=False)]
    assert len(captured(said)) == 4
    for p in range(4):
        loop.tell(UploadDone(p))
    assert captured(loop.step())


def test_a_boundary_moves_few_fragments() -> None:
    loop = Loop(sync_every=100)
    for p in range(4):
        loop.tell(Ready(p, 1, np.zeros(10, np.float32)))
        loop.tell(CalledFor(p, 1))
    assert len(captured(loop.step(1))) <= loop.boundary.moves == 2


def test_a_newcomer_to_a_run_in_flight_waits_a_period_before_it_opens_rounds() -> None:
    assert not captured(Loop(base=7, sync_every=4).step(4))


@pytest.mark.parametrize(("dtype", "kept"), [("float32", 1 + 2**-20), ("bfloat16", 1.0), ("float16", 1.0)])
def test_what_a_parameter_cannot_hold_is_no_local_progress(dtype: str, kept: float) -> None:
    tensors = partition([Spec("w", (3,), dtype, TensorClass.DENSE)], 1).fragments[0].tensors
    assert (rounded(np.full(3, 1 + 2**-20, np.float32), tensors) == np.float32(kept)).all()


def test_with_a_lead_a_learner_waits_for_what_is_under_way() -> None:
    loop = Loop(sync_every=4, lead=1.0)  # added to an overlap of two steps
    loop.step(1)
    sent_at = loop.boundary.slots[0].sent_step
    assert sent_at == 1
    loop.step(2)
    assert not loop.boundary.overdue()
    loop.step(1)
    assert loop.boundary.step - sent_at == 3
    assert loop.boundary.overdue()
    heard = []
    loop.boundary.news = lambda: heard.append(loop.boundary.step)
    loop.boundary.post(Ready(0, 1, np.full(10, 7, np.float32)))
    assert heard == [4]
    loop.boundary.wait_on()
    assert loop.boundary.step == 4
    assert loop.boundary.slots[0].base == 1
    assert not loop.boundary.overdue()


def test_a_learner_that_would_wait_adopts_all_that_is_here_first() -> None:
    """While it waits, only news wakes the learner, and a version that is already here brings none.

    Without this, the learner would wait for ever for the third of three versions, as one boundary moves two.
    """
    loop = Loop(sync_every=4, lead=0.0)
    assert loop.boundary.moves == 2
    loop.step(4)
    for fragment in (1, 2, 3):
        loop.tell(Ready(fragment, 1, np.zeros(10, np.float32)))
    loop.boundary.slots[0].sent_step = None
    loop.boundary.slots[3].sent_step = 1
    assert loop.boundary.overdue()
    loop.boundary.wait_on()
    assert [slot.base for slot in loop.boundary.slots] == [0, 1, 1, 1]
    assert not loop.boundary.overdue()


def test_a_learner_that_leaves_waits_for_nothing() -> None:
    loop = Loop(sync_every=4, lead=0.0)
    loop.step(3)
    assert loop.boundary.overdue()
    loop.boundary.let_go()
    assert not loop.boundary.overdue()


def test_a_learner_that_waits_passes_where_it_has_not_taken_a_step() -> None:
    loop = Loop(sync_every=4, lead=0.0)
    loop.step(3)
    loop.tell(Ready(0, 1, np.zeros(10, np.float32)))
    loop.boundary.wait_on()
    loop.boundary.outbox.clear()
    loop.tell(CalledFor(0, 2))
    loop.boundary.wait_on()
    assert list(loop.boundary.outbox) == [NothingToGive(0, 2)]
    said = loop.step(1)
    assert not captured(said, 0)


def test_without_a_lead_nobody_waits() -> None:
    loop = Loop(sync_every=4)
    loop.step(50)
    assert not loop.boundary.overdue()


def test_the_fragment_held_longest_is_replaced_first() -> None:
    """If more versions are ready than one boundary moves, no fragment may wait for ever behind the others."""
    loop = Loop(sync_every=4)
    assert loop.boundary.moves == 2
    for version in range(1, 30):
        for fragment in range(3):
            # Fragment 2 always has the newest version. In the order of versions it would always come last.
            loop.tell(Ready(fragment, version + (fragment == 2), np.zeros(10, np.float32)))
        loop.step(1)
    bases = [slot.base for slot in loop.boundary.slots[:3]]
    assert max(bases) - min(bases) <= 3, bases


def test_a_pause_of_any_length_costs_one_version_a_fragment() -> None:
    loop = Loop(sync_every=4)
    loop.step(4)
    offered = []
    for version in range(1, 200):
        for fragment in range(4):
            values = np.full(10, version, np.float32)
            offered.append(weakref.ref(values))
            loop.tell(Ready(fragment, version, values))
            loop.tell(CalledFor(fragment, version + 1))
            loop.tell(BaseMerged(fragment, version - 1))
        loop.tell(CopyState())
    del values
    gc.collect()
    assert sum(values() is not None for values in offered) == 4
    words = [word for word in loop.boundary.inbox.take() if not isinstance(word, UploadDone)]
    newest = [BaseMerged(p, 198) for p in range(4)] + [CalledFor(p, 200) for p in range(4)]
    assert words == [*newest, CopyState()]
    assert len(loop.boundary.inbox) == 0
    loop.step(4)
    assert [slot.base for slot in loop.boundary.slots] == [199] * 4


def test_an_older_word_takes_the_place_of_no_newer_one() -> None:
    loop = Loop(sync_every=100)
    loop.step(1)
    for version in (7, 3):
        loop.tell(Ready(1, version, np.full(10, version, np.float32)))
        loop.tell(BaseMerged(2, version))
        loop.tell(CalledFor(3, version))
    loop.step(1)
    assert loop.boundary.slots[1].base == 7
    assert loop.boundary.slots[2].merged
    assert loop.boundary.slots[3].heard_call[0] == 7
    loop.tell(Ready(1, 7, np.zeros(10, np.float32)))
    assert loop.boundary.slots[1].ready is None, "version 7 is in the model already"


def test_a_version_that_comes_while_another_is_written_is_not_lost() -> None:
    loop = Loop(sync_every=100)
    write = loop.model.write

    def late(fragment: int, values: F32) -> None:
        loop.tell(Ready(0, 2, np.full(10, 2, np.float32)))
        write(fragment, values)

    loop.step(1)
    loop.tell(Ready(0, 1, np.zeros(10, np.float32)))
    loop.model.write = late  # type: ignore[method-assign]
    loop.step(1)
    loop.model.write = write  # type: ignore[method-assign]
    assert loop.boundary.slots[0].base in (1, 2)
    loop.step(1)
    assert loop.boundary.slots[0].base == 2


def test_what_a_learner_waits_for_is_due_since_nothing_after_it_will_be() -> None:
    loop = Loop(sync_every=100, lead=1.0)
    loop.boundary.post(CalledFor(0, 1))
    loop.step()
    assert not loop.boundary.is_last(0, 0), "sent to answer a call: the learner trains on, and may send more"
    while not loop.boundary.overdue():
        loop.step()
    assert loop.boundary.is_last(0, 0)
    assert not loop.boundary.is_last(1, 0), "fragment 1 was not sent"
    assert not loop.boundary.is_last(0, 7), "the learner is not on base 7"


def test_beside_what_an_earlier_life_sent_nothing_more_comes_and_it_is_due_at_the_usual_step() -> None:
    loop = Loop(sync_every=4)
    slot = loop.boundary.slots[0]
    slot.merged, slot.due_at = True, 4
    assert not loop.boundary.is_last(0, 0)
    loop.step(4)
    assert loop.boundary.is_last(0, 0)


# --- the period -------------------------------------------------------------------------------------------------------


def sent_at(loop: Loop, steps: int) -> list[int]:
    return [m.step for m in captured(loop.step(steps), 0)]


def version(number: int, period: float) -> Ready:
    return Ready(0, number, np.zeros(10, np.float32), period)


def test_a_commit_says_when_the_next_update_is_due() -> None:
    loop = Loop(sync_every=4)
    assert sent_at(loop, 2) == [1]
    loop.tell(version(1, 9.2))
    assert sent_at(loop, 12) == [11], "9.2 steps after the last one, rounded up"
    loop.tell(version(2, 5.0))
    assert sent_at(loop, 6) == [16]
    assert loop.boundary.longest_period == 5


@pytest.mark.parametrize(("said", "is_"), [(0.0, 4), (1.0, 4), (7.0, 7), (32.0, 32), (1e6, 32)])
def test_the_rules_bound_what_a_commit_says(said: float, is_: int) -> None:
    loop = Loop(sync_every=4)
    loop.step(1)
    loop.tell(version(1, said))
    loop.step(1)
    assert loop.boundary.slots[0].period == is_
    assert loop.boundary.slots[1].period == 4, "each fragment has its own period"


def test_a_newcomer_has_the_period_of_the_newest_commit() -> None:
    loop = Loop(sync_every=4, base=3, period=20.0)
    assert [m.step for m in captured(loop.step(60))] == [21, 26, 31, 36, 41, 46, 51, 56]


def test_a_syncer_that_is_back_is_sent_what_has_grown_by_the_period_in_force() -> None:
    loop = Loop(sync_every=4, period=10.0)
    sent = [m.step for m in loop.step(200) if isinstance(m, Captured) and m.fragment == 0]
    assert sent[1] - sent[0] == 10
    loop.tell(SyncerBack())
    due = sent[-1] + 10
    assert sent_at(loop, max(1, due - 200)) == [max(201, due)]


def test_whoever_has_sent_is_asked_afresh_and_answers_once() -> None:
    loop = Loop(sync_every=100)
    first = captured(loop.step(1), 0)
    loop.step(5)
    loop.tell(CalledFor(0, 1))
    assert not captured(loop.step(1), 0), "the update that was sent is enough"
    loop.tell(CalledFor(0, 1, afresh=True))
    (again,) = captured(loop.step(1), 0)
    assert (again.base, again.step, again.tokens) == (0, 8, 800)
    assert again.tokens > first[0].tokens
    loop.tell(CalledFor(0, 1, afresh=True))
    assert not captured(loop.step(3), 0), "a repeated call is answered once"


def test_an_answer_to_a_call_is_not_asked_for_again() -> None:
    loop = Loop(sync_every=100)
    loop.tell(CalledFor(3, 1, afresh=True))
    assert len(captured(loop.step(1), 3)) == 1
    loop.tell(CalledFor(3, 1, afresh=True))
    assert not captured(loop.step(2), 3)


def test_whoever_waits_at_the_boundary_at_which_it_sent_has_nothing_newer() -> None:
    loop = Loop(sync_every=100, lead=0.0)
    loop.step(1)
    loop.boundary.outbox.clear()
    loop.tell(CalledFor(0, 1, afresh=True))
    loop.boundary.wait_on()
    assert list(loop.boundary.outbox) == [NothingToGive(0, 1)]


def test_what_is_merged_already_is_not_sent_afresh() -> None:
    loop = Loop(sync_every=100)
    loop.step(3)
    loop.tell(BaseMerged(0, 0))
    loop.tell(CalledFor(0, 1, afresh=True))
    said = loop.step(1)
    assert NothingToGive(0, 1) in said
    assert not captured(said, 0)
