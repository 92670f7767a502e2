"""`isthmus explain` tells the story of a commit, of an update, and of all updates of a learner on one base."""

import re
from typing import cast

import msgspec
import pytest

from isthmus.errors import InputError
from isthmus.format.records.keys import update_key
from isthmus.inspect import explain
from isthmus.log import Log
from isthmus.reasons import Reason
from support.commits import RecordedLog, committed, digest_of, given, late, rejected


def key(learner: str, base: int, name: str) -> str:
    return update_key(0, learner, base, digest_of(name))


async def story(log: RecordedLog, what: str) -> explain.Explanation:
    return await explain.explain(cast(Log, log), what)


# --- an update --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longer", ["first", "second"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "collected"])
async def test_a_name_that_stands_for_two_tells_both_the_merged_one_first(longer: str, stored: bool) -> None:
    """A learner announced a second update on its base after the first was merged, so the second was rejected."""
    log = RecordedLog(
        [
            committed(5, given("a", 4, 5, "first"), given("b", 4, 5)),
            committed(6, given("b", 5, 6), rejected=(rejected("a", 4, Reason.BASE_MERGED, 6, "second"),)),
        ]
    )
    if stored:
        for name in ("first", "second"):
            log.upload("a", 4, name, tokens=2400 if name == longer else 1200)
    facts = (await story(log, "0/a/4")).facts
    assert (facts["key"], facts["fate"], facts["version"]) == (key("a", 4, "first"), "merged", 5)
    assert facts["others"] == [{"key": key("a", 4, "second"), "fate": "base-merged", "reason": "base-merged"}]
    text = "\n".join((await story(log, "0/a/4")).lines)
    assert text.index("merged into version 5") < text.index("another one of a on version 4:")
    assert "rejected before version 6, 1 times: base-merged" in text


async def test_two_that_were_both_turned_away_are_both_told_the_longer_first() -> None:
    log = RecordedLog(
        [
            committed(5, given("b", 4, 5), rejected=(rejected("a", 4, Reason.SUPERSEDED, 5, "short"),)),
            committed(6, given("b", 5, 6), rejected=(rejected("a", 4, Reason.NON_FINITE, 6, "long"),)),
        ]
    )
    log.upload("a", 4, "short", tokens=100)
    log.upload("a", 4, "long", tokens=200)
    facts = (await story(log, "0/a/4")).facts
    assert (facts["key"], facts["fate"], facts["reason"]) == (key("a", 4, "long"), "rejected", "non-finite")
    assert facts["others"] == [{"key": key("a", 4, "short"), "fate": "rejected", "reason": "superseded"}]


async def test_a_key_stands_for_one_update_alone() -> None:
    log = RecordedLog(
        [committed(5, given("a", 4, 5, "first"), rejected=(rejected("a", 4, "superseded", 5, "second"),))]
    )
    first, second = await story(log, key("a", 4, "first")), await story(log, key("a", 4, "second"))
    assert (first.facts["fate"], first.facts["others"]) == ("merged", [])
    assert (second.facts["fate"], second.facts["instead"]) == ("base-merged", key("a", 4, "first"))
    assert second.facts["reason"] == "superseded"
    assert second.facts["others"] == []


async def test_what_is_merged_is_not_told_as_turned_away_because_it_was_said_again() -> None:
    log = RecordedLog(
        [
            committed(5, given("a", 4, 5)),
            committed(6, given("b", 5, 6), rejected=(rejected("a", 4, Reason.BASE_MERGED, 6),)),
        ]
    )
    found = await story(log, "0/a/4")
    assert (found.facts["fate"], found.facts["others"]) == ("merged", [])
    assert "rejected" not in "\n".join(found.lines)


async def test_an_update_that_came_too_late_for_one_round_and_joined_the_next() -> None:
    log = RecordedLog([committed(5, given("b", 4, 5), late=(late("a", 4, 5),)), committed(6, given("a", 4, 6))])
    found = await story(log, "0/a/4")
    assert (found.facts["fate"], found.facts["version"], found.facts["others"]) == ("merged", 6, [])
    # The missed round closed 4 s after it opened. The next round opened 10 s after the missed one, and the update
    # arrived 3 s later.
    assert found.facts["missed_s"] == pytest.approx(10.0 + 3.0 - 4.0)


@pytest.mark.parametrize("what", ["0/a/4", "0/a/9", "0/nobody/4", "1/a/4"])
async def test_what_nobody_knows_of_is_refused(what: str) -> None:
    with pytest.raises(InputError) as caught:
        await story(RecordedLog([committed(5, given("b", 4, 5))]), what)
    assert str(caught.value).endswith("; its newest version, 5, merges b") == what.startswith("0")


async def test_an_update_of_which_no_commit_speaks_is_told_as_it_lies_there() -> None:
    log = RecordedLog([committed(5, given("b", 4, 5))])
    log.upload("a", 4)
    found = await story(log, "0/a/4")
    assert found.facts["fate"] == "unknown"
    assert "no commit up to version 5 settles it: it was never announced" in found.lines[-1]


# --- how late ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "behind"), [(6, None), (5, 1), (4, 2), (0, 6)])
async def test_an_input_is_as_late_as_versions_came_between_its_base_and_its_commit(
    base: int, behind: int | None
) -> None:
    """Version 7 merges work on version 6, so work on version 5 is one version late."""
    log = RecordedLog([committed(v, given("b", v - 1, v)) for v in range(1, 7)] + [committed(7, given("a", base, 7))])
    for lines in ((await story(log, "0/7")).lines, (await story(log, f"0/a/{base}")).lines):
        said = [int(n) for line in lines for n in re.findall(r"(\d+) version\(s\) late", line)]
        assert said == ([] if behind is None else [behind])


# --- a commit that merged nothing -------------------------------------------------------------------------------------


async def test_a_commit_without_inputs_has_a_story_too() -> None:
    log = RecordedLog([committed(1, given("a", 0, 1)), committed(2), committed(3, given("a", 2, 3))])
    found = await story(log, "0/2")
    assert found.facts["inputs"] == []
    assert "  it merged no update" in found.lines


async def test_an_update_passes_by_a_commit_without_inputs() -> None:
    log = RecordedLog([committed(1), committed(2, given("a", 0, 2))])
    assert (await story(log, "0/a/0")).facts["version"] == 2
    log = RecordedLog([committed(1)])
    log.upload("a", 0)
    assert (await story(log, "0/a/0")).facts["fate"] == "unknown"


async def test_what_was_cut_says_by_how_much_and_why() -> None:
    whole = given("a", 4, 5)
    asked = whole.tokens * (whole.tokens / whole.steps)
    cut = msgspec.structs.replace(given("b", 4, 5), weight=0.25 * asked, scale=0.5, clipped=("weight", "norm"))
    log = RecordedLog([committed(4), committed(5, whole, cut, members=3)])
    said = "\n".join((await story(log, "0/5")).lines)
    assert "made under version 3 of the membership" in said
    assert said.count("cut to") == 1
    assert f" tokens, length {whole.norm:.3g}, " in said
    assert "cut to 0.25 of the weight that it asked for, and to 0.5 of its length (weight, norm)" in said


async def test_what_the_charter_changed_says_so() -> None:
    whole = given("a", 4, 5)
    asked = whole.tokens * (whole.tokens / whole.steps)
    half = msgspec.structs.replace(given("b", 4, 5), weight=0.5 * asked, factor=0.5)
    capped = msgspec.structs.replace(given("c", 4, 5), weight=0.1 * asked, factor=0.5, clipped=("charter",))
    said = "\n".join((await story(RecordedLog([committed(5, whole, half, capped)]), "0/5")).lines)
    assert said.count("the charter's factor for") == 2
    assert "of the weight, weight 0.5 of usual: the charter's factor for b;" in said
    assert "cut to 0.2 of the weight that it asked for (charter: its cap for c), weight 0.5 of usual" in said


async def test_a_short_update_is_said_to_be_usual_of_who_has_converged() -> None:
    cut = msgspec.structs.replace(given("b", 4, 5), weight=0.1, clipped=("short",))
    said = "\n".join((await story(RecordedLog([committed(5, cut)]), "0/5")).lines)
    assert (
        "that it asked for (short, usual while a learning rate falls, and of a learner that has all but converged)"
        in said
    )


@pytest.mark.parametrize(("version", "young"), [(3, True), (4, False)])
async def test_an_update_that_is_cut_while_there_is_no_history_says_so(version: int, young: bool) -> None:
    cut = msgspec.structs.replace(given("b", version - 1, version), scale=0.04, clipped=("norm",))
    said = "\n".join((await story(RecordedLog([committed(version, cut)]), f"0/{version}")).lines)
    assert "to 0.04 of its length (norm" in said
    assert ("the fragment has no history yet" in said) == young


# --- a commit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "said"),
    [
        (0.0, "period from here on: {least} steps"),
        (30.2, "period from here on: 31 steps (the rules ask for {least}; rounds take long)"),
    ],
)
async def test_a_commit_tells_the_period_from_there_on(period: float, said: str) -> None:
    log = RecordedLog([committed(5, given("a", 4, 5), period=period)])
    told = await story(log, "0/5")
    least = log.run.rules.sync_every
    assert said.format(least=least) in told.lines
    assert told.facts["period"] == (period or least)
