"""A learner's last line gives steps, versions, what became of its work and where the model is; failures stand out."""

import math
from dataclasses import replace

import pytest
from msgspec.structs import replace as replaced

from isthmus.format.records.messages import Tally
from isthmus.learner.summary import REJECTED, Summary
from isthmus.reasons import REMEDIES, Reason

LEDGER = Tally(processed=1000.0, merged=800.0, overwritten=150.0, late=0.0, pending=50.0, rejected=0.0, lost=0.0)
NOTHING = Tally(processed=1000.0, merged=0.0, overwritten=0.0, late=0.0, pending=1000.0, rejected=0.0, lost=0.0)
FOUND = Summary(
    learner="eu-1",
    run="s3://b/run",
    steps=600,
    steps_done=600,
    seconds=90.0,
    versions=(12, 14),
    ledger=LEDGER,
    loss=1.5,
    trouble="",
)


def test_it_is_one_line_of_what_came_of_the_stay() -> None:
    assert str(FOUND) == (
        "eu-1: 600 steps in 90 s; its model is at versions 12 to 14; of its 1,000 tokens 80% merged, 15% overwritten, "
        "5% trained since it was last sent: that goes on when this learner comes back (if the others have merged newer "
        "versions by then, it is overwritten); the model: isthmus export s3://b/run -o model.safetensors"
    )
    assert not FOUND.never_merged
    assert "back" not in str(replace(FOUND, ledger=replaced(LEDGER, merged=850.0, pending=0.0)))


def test_a_loss_that_rose_is_said_and_stands_out() -> None:
    found = replace(FOUND, risen=(5.5, 65.3))
    assert found.stands_out
    assert not FOUND.stands_out
    assert "; THE LOSS ROSE from 5.5 to 65.3, and" in str(found)
    assert "THE LOSS ROSE" not in str(replace(found, loss=math.nan)), "that it is no number says more"


def test_what_stays_out_is_said_with_its_reason() -> None:
    said = str(replace(FOUND, unanswered=30.0))
    assert "3% sent and not answered (its rounds were open), 2% trained since it was last sent: that goes on" in said
    said = str(replace(FOUND, unanswered=50.0, trouble="no syncer is heard; start one"))
    assert "5% sent and not answered (no syncer is heard; start one): that goes on" in said


def test_much_work_without_an_answer_is_a_warning_with_what_to_do() -> None:
    assert not replace(FOUND, unanswered=30.0).much_unanswered
    assert not replace(FOUND, unanswered=30.0, processed_before=690.0).much_unanswered, "of 310 tokens"
    assert replace(FOUND, unanswered=30.0, processed_before=710.0).much_unanswered, "of 290 tokens"
    found = replace(FOUND, unanswered=300.0, ledger=replaced(LEDGER, merged=550.0, pending=300.0))
    assert found.much_unanswered
    assert "WHAT WAS NOT ANSWERED IS NOT IN THE MODEL: start this learner and the others again soon" in str(found)
    assert "goes on when this learner comes back" not in str(found)
    assert (
        "for at most four times the usual length, however many steps it holds (`isthmus explain s3://b/run FRAGMENT/VERSION`"
        in str(found)
    )


def test_work_without_an_answer_and_without_a_checkpoint_is_not_called_kept() -> None:
    ledger = replaced(LEDGER, merged=150.0, overwritten=50.0, pending=800.0)
    said = str(replace(FOUND, unanswered=280.0, kept_to=0, ledger=ledger))
    assert "ALL AFTER STEP 0 IS LOST: no checkpoint of later steps was stored; WHAT WAS NOT ANSWERED IS NOT IN" in said


def test_much_overwritten_work_is_shown_with_what_to_change() -> None:
    assert "adopt" not in str(replace(FOUND, ledger=replaced(LEDGER, merged=570.0, overwritten=380.0)))
    found = replace(FOUND, ledger=replaced(LEDGER, merged=350.0, overwritten=600.0))
    assert "60% overwritten, 5% trained" in str(found)
    assert "keep it with join(adopt='carry') or --adopt carry, or create the next run with a larger" in str(found)


def test_a_run_of_few_versions_is_not_to_be_judged_yet() -> None:
    assert "so few versions" not in str(replace(FOUND, versions=(9, 10)))
    said = str(replace(FOUND, versions=(0, 9)))
    assert (
        "; so few versions say little about merging (the first ones overshoot): judge the run's model once its" in said
    )


def test_earlier_lives_and_longer_stays_are_told_too() -> None:
    said = str(replace(FOUND, steps_done=4600, seconds=8000.0, versions=(3, 3)))
    assert "600 steps in 2.2 h, 4,600 over all its incarnations; its model is at version 3" in said
    assert "of its 1,000 tokens (of all its incarnations) 80% merged" in str(replace(FOUND, processed_before=400.0))
    assert "in 50 min" in str(replace(FOUND, seconds=3000.0))


def test_work_of_which_nothing_was_merged_cannot_be_missed() -> None:
    found = replace(FOUND, ledger=NOTHING, trouble="no syncer is heard")
    assert found.never_merged
    assert "NONE OF ITS WORK WAS MERGED before it left: no syncer is heard. What it learnt is not in the run" in str(
        found
    )
    assert "isthmus status s3://b/run" in str(found)


def test_work_that_came_too_late_is_not_to_be_brought_again() -> None:
    late = replaced(NOTHING, processed=100.0, late=94.0, pending=6.0)
    said = str(replace(FOUND, ledger=late))
    assert "NONE OF ITS WORK WAS MERGED: 94% of its tokens came after the run had gone on without it" in said
    assert "wait=600" not in said
    assert "wait=600" in str(replace(FOUND, ledger=replaced(late, late=40.0, pending=60.0)))


def test_who_has_trained_nothing_has_lost_nothing() -> None:
    idle = replace(FOUND, steps=0, steps_done=0, ledger=replaced(NOTHING, processed=0.0, pending=0.0))
    assert not idle.never_merged


def test_work_that_no_checkpoint_has_is_not_promised() -> None:
    assert "that goes on when" in str(replace(FOUND, kept_to=600))
    assert not replace(FOUND, kept_to=600).stands_out
    found = replace(FOUND, kept_to=500)
    assert found.stands_out
    said = str(found)
    assert "that goes on" not in said
    assert "5% trained since it was last sent; OF WHAT WAS NOT MERGED, ALL AFTER STEP 500 IS LOST" in said
    all_in = replace(found, ledger=replaced(LEDGER, merged=850.0, pending=0.0))
    assert not all_in.stands_out
    assert "LOST" not in str(all_in)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_cannot_be_missed(loss: float) -> None:
    found = replace(FOUND, loss=loss)
    assert "(hyperparameters='passed', or it goes on with that of its checkpoint): it goes on after step 400" in str(
        replace(found, kept_to=400)
    )
    assert found.diverged
    assert f"ITS LAST LOSS IS {loss}" in str(found)
    assert not FOUND.diverged
    assert not replace(FOUND, loss=None).diverged


def test_an_expelled_learner_is_told_so_and_that_its_work_stays_out() -> None:
    expelled = "eu-1 was expelled by membership 8, at 2026-11-28 14:03:00 UTC"
    assert not replace(FOUND, unanswered=30.0, processed_before=690.0).much_unanswered, "of 310 tokens"
    assert replace(FOUND, unanswered=30.0, processed_before=710.0).much_unanswered, "of 290 tokens"
    found = replace(FOUND, unanswered=300.0, ledger=replaced(LEDGER, merged=550.0, pending=300.0), expelled=expelled)
    assert (
        f"; {expelled}: WHAT WAS NOT MERGED BEFORE THAT IS NOT IN THE MODEL, and is not merged later; the model: "
        in str(found)
    )
    assert "goes on" not in str(found)
    assert "start this learner" not in str(found)
    never = str(replace(FOUND, ledger=NOTHING, expelled=expelled))
    assert never.endswith(f"; NONE OF ITS WORK WAS MERGED, nor will it be: {expelled}")


@pytest.mark.parametrize(("rejected", "told"), [(49.0, "5% rejected"), (50.0, f"5% rejected ({REJECTED})")])
def test_a_summary_says_what_it_calls_rejected(rejected: float, told: str) -> None:
    tally = replaced(LEDGER, rejected=rejected, merged=800.0 - rejected)
    assert f", {told}, 5% trained since" in str(replace(FOUND, ledger=tally))


def test_a_summary_says_why_the_newest_update_was_rejected_and_what_to_do() -> None:
    why = f"its newest update was rejected (too-long: {Reason.TOO_LONG.means}); {REMEDIES[Reason.TOO_LONG]}"
    some = replace(FOUND, rejected_for="too-long", ledger=replaced(LEDGER, rejected=100.0, merged=700.0))
    assert some.stands_out
    assert f"; {why}; the model: " in str(some)
    few = replace(some, ledger=replaced(LEDGER, rejected=99.0, merged=701.0))
    assert not few.stands_out
    assert why not in str(few)
    merged_since = replace(some, rejected_for="")
    assert not merged_since.stands_out
    assert "newest update" not in str(merged_since)
    never = replace(some, ledger=replaced(NOTHING, rejected=900.0, pending=100.0))
    assert str(never).endswith(f"; NONE OF ITS WORK WAS MERGED: {why}")


def test_a_loop_that_ends_before_its_first_update_is_told_so() -> None:
    brief = replace(
        FOUND, ledger=NOTHING, steps=10, steps_done=10, first_after=12, trouble="no syncer is heard; start one"
    )
    assert str(brief).endswith(
        "; NONE OF ITS WORK WAS MERGED: its first update would have been sent after 12 steps: train longer, or create a run "
        "of a smaller --sync-every (sync_every)"
    )
    assert "no syncer is heard" in str(replace(brief, steps_done=12)), "then an update was due"
    assert "no syncer is heard" in str(replace(brief, first_after=0)), "then one was sent"
