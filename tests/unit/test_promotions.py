"""A promotion holds if named evaluators have signed numbers for its cut that satisfy the charter's rule, or not at all."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.errors import InputError
from isthmus.format.records.keys import promotion_key
from isthmus.format.records.objects import Evidence
from isthmus.log import promotions as module
from isthmus.log.promotions import (
    Promotions,
    candidate,
    chosen,
    cut_in_log,
    measured,
    others,
    promote,
    require,
    shortfall,
    stored,
)
from support.gated import (
    ENTRIES,
    EVA,
    EVC,
    PRO,
    RULE,
    agree,
    commit,
    gated,
    log_of,
    number,
    promotion,
    promotions,
)
from support.signed import EVERYBODY, EVIL, F, admit, seed
from support.world import World, in_virtual_time, world

Numbers = list[Evidence]


async def numbers(w: World, version: int, **values: float) -> Numbers:
    return [await number(w, name, version, value) for name, value in values.items()]


async def begun(w: World) -> None:
    """Put the charter into force, make two versions, and promote the first."""
    await gated(w)
    await commit(w, 1)
    await commit(w, 2)
    known = await promotion(w, 1, await numbers(w, 1, eva=2.0, evb=2.2))
    assert (known.sound[0].version, known.unsound) == (1, [])


# --- what holds -------------------------------------------------------------------------------------------------------

GOOD: dict[str, dict[str, float]] = {
    "better": {"eva": 1.9, "evb": 2.1},
    "equal": {"eva": 2.0, "evb": 2.2},
    "worse within the tolerance": {"eva": 2.09, "evb": 2.29},
    "an evaluator with no number before, against the median": {"eva": 2.0, "evc": 2.19},
    "more than are needed": {"eva": 2.0, "evb": 2.2, "evc": 2.1},
}


@pytest.mark.parametrize("case", GOOD)
@in_virtual_time
async def test_numbers_that_satisfy_the_rule_promote(folder: Path, case: str) -> None:
    async with world(folder, seed()) as w:
        await begun(w)
        known = await promotion(w, 2, await numbers(w, 2, **GOOD[case]))
        assert [(p.number, p.version, p.fault) for p in known.sound] == [(1, 1, ""), (2, 2, "")]
        assert known.last is not None
        assert known.last.values == GOOD[case]


@in_virtual_time
async def test_higher_can_be_better(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await gated(w, msgspec.structs.replace(RULE, better="higher"))
        await commit(w, 1)
        await commit(w, 2)
        await promotion(w, 1, await numbers(w, 1, eva=0.7, evb=0.5))
        known = await promotion(w, 2, await numbers(w, 2, eva=0.61, evb=0.39))
        assert "evb's number 0.39 is worse than 0.5, its number at promotion 1" in known.unsound[0].fault
        known = await promotion(w, 2, await numbers(w, 2, eva=0.61, evb=0.41))
        assert known.last is not None
        assert known.last.number == 3


@pytest.mark.parametrize(("better", "limit", "value", "fine"), [
    ("lower", 2.0, 2.0, True), ("lower", 2.0, 2.001, False), ("higher", 0.5, 0.5, True), ("higher", 0.5, 0.499, False),
])  # fmt: skip
def test_a_limit_holds_for_the_first_promotion_too(better: str, limit: float, value: float, fine: bool) -> None:
    """Otherwise the first may have any number, and each further one may be a little worse."""
    rule = msgspec.structs.replace(RULE, better=better, limit=limit)
    words = "" if fine else f"eva's number {value:g} is beyond the limit of {limit:g} ({better} is better)"
    assert shortfall(rule, "eva", value, None) == words


@in_virtual_time
async def test_version_0_and_the_same_version_again_can_be_promoted(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await gated(w)
        for _ in range(2):
            known = await promotion(w, 0, await numbers(w, 0, eva=3.0, evb=3.0))
        assert [p.version for p in known.sound] == [0, 0]


@in_virtual_time
async def test_another_series_begins_anew(folder: Path) -> None:
    """Owners change the series: its numbers cannot be compared with those before."""
    async with world(folder, seed()) as w:
        await begun(w)
        await agree(w, msgspec.structs.replace(RULE, series="perplexity"))
        await commit(w, 3, members=3)
        evidence = [await number(w, name, 3, 9.0, series="perplexity") for name in ("eva", "evb")]
        known = await promotion(w, 3, evidence)
        assert [p.version for p in known.sound] == [1, 3]


@in_virtual_time
async def test_a_promotion_holds_after_its_promoter_and_evaluators_have_left(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await begun(w)
        gate = msgspec.structs.replace(RULE, evaluators=("evc",), least=1, promoters=("eva",))
        await agree(w, gate)
        assert [p.version for p in (await promotions(w)).sound] == [1]


# --- what does not hold -----------------------------------------------------------------------------------------------

Case = Callable[[World], Awaitable[Promotions]]


async def _forged_author(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), signer=EVIL)


async def _under_anothers_name(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), signer=EVA)


async def _no_promoter(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), signer=EVA, by="eva")


async def _no_evaluator(w: World) -> Promotions:
    return await promotion(w, 2, [*await numbers(w, 2, eva=2.0), await number(w, "pro", 2, 2.0)])


async def _nameless(w: World) -> Promotions:
    return await promotion(w, 2, [*await numbers(w, 2, eva=2.0), await number(w, None, 2, 2.0, signer=EVC)])


async def _evaluator_twice(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0) + await numbers(w, 2, eva=1.9))


async def _number_in_anothers_name(w: World) -> Promotions:
    return await promotion(w, 2, [*await numbers(w, 2, eva=2.0), await number(w, "evb", 2, 2.0, signer=EVIL)])


async def _another_cut(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0) + await numbers(w, 1, evc=2.0))


async def _other_bytes(w: World) -> Promotions:
    evidence = [*await numbers(w, 2, eva=2.0), await number(w, "evb", 2, 2.0, published=bytes(32))]
    return await promotion(w, 2, evidence)


async def _other_series(w: World) -> Promotions:
    return await promotion(w, 2, [*await numbers(w, 2, eva=2.0), await number(w, "evb", 2, 2.0, series="other")])


async def _too_bad(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.31))


async def _too_bad_for_the_median(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evc=2.21))


async def _too_few(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0))


async def _missing_number(w: World) -> Promotions:
    found = await promotion(w, 2, evidence := await numbers(w, 2, eva=2.0, evb=2.2))
    assert found.last is not None
    assert found.last.version == 2
    await w.store.delete(evidence[1].key)
    return await promotions(w)


async def _another_number_in_its_place(w: World) -> Promotions:
    evidence = await numbers(w, 2, eva=2.0, evb=2.2)
    return await promotion(w, 2, [evidence[0], Evidence(evidence[1].key, bytes(32))])


async def _evidence_elsewhere(w: World) -> Promotions:
    evidence = await numbers(w, 2, eva=2.0)
    return await promotion(w, 2, [*evidence, Evidence("learners/eu/000001/claim", bytes(32))])


async def _second_number_for_a_promoted_version(w: World) -> Promotions:
    """Bit by bit, the numbers of a version would become worse, and with them what later versions are compared with."""
    await promotion(w, 1, await numbers(w, 1, evb=2.2, evc=2.0))
    return await promotion(w, 1, await numbers(w, 1, eva=2.05, evb=2.2))


async def _older_version(w: World) -> Promotions:
    await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2))
    return await promotion(w, 1, await numbers(w, 1, eva=2.0, evb=2.2))


async def _other_digest(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), published=bytes(32))


async def _not_in_the_log(w: World) -> Promotions:
    return await promotion(w, 7, [await number(w, name, 7, 2.0, published=bytes(32)) for name in ("eva", "evb")])


async def _mixed_versions(w: World) -> Promotions:
    versions = (2, 1, 2, 2)
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), versions=versions)


async def _too_few_fragments(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), versions=(2,))


async def _fork(w: World) -> Promotions:
    """It follows the run, as promotion 1 does."""
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), previous=w.run.digest)


async def _under_its_number(w: World) -> Promotions:
    """The number in it is not the one in its key."""
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), number=3, key=promotion_key(2))


async def _older_charter(w: World) -> Promotions:
    """Owners have made the rule stricter; a cut of that time is promoted by the rule before."""
    await agree(w, msgspec.structs.replace(RULE, least=3))
    await commit(w, 3, members=3)
    return await promotion(w, 3, await numbers(w, 3, eva=2.0, evb=2.2), members=2)


async def _older_charter_than_the_last(w: World) -> Promotions:
    await agree(w, msgspec.structs.replace(RULE, tolerance=0.0))
    await promotion(w, 1, await numbers(w, 1, eva=2.0, evb=2.2))
    return await promotion(w, 2, await numbers(w, 2, eva=2.05, evb=2.25), members=2)


async def _unknown_charter(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), members=9)


async def _before_the_charter(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), members=1)


async def _charter_without_gate(w: World) -> Promotions:
    await agree(w, None)
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2))


async def _other_run(w: World) -> Promotions:
    return await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2), run=bytes(32))


FALSE: dict[str, tuple[Case, str]] = {
    "forged author": (_forged_author, "has no follower with the key"),
    "under another's name": (_under_anothers_name, "has no follower pro with the key"),
    "by no promoter": (_no_promoter, "eva is no promoter in the charter of membership 2"),
    "by no evaluator": (_no_evaluator, "is by pro, who is no evaluator in the charter"),
    "a number of nobody's": (_nameless, "is by no named member, who is no evaluator"),
    "one evaluator twice": (_evaluator_twice, "eva, or the same key under another name, has measured already"),
    "a number in another's name": (_number_in_anothers_name, "with the key"),
    "a number of another cut": (_another_cut, "is the number of another cut"),
    "a number of other bytes": (_other_bytes, "is the number of another cut"),
    "a number of another series": (_other_series, "is no measurement of the gate's series"),
    "above the tolerance": (_too_bad, "evb's number 2.31 is worse than 2.2, its number at promotion 1 (version 1)"),
    "above the median": (_too_bad_for_the_median, "evc's number 2.21 is worse than 2.1, the median at promotion 1"),
    "too few": (_too_few, "it rests on the numbers of 1 evaluators, and the charter asks for 2"),
    "a number that is gone": (_missing_number, "is missing"),
    "a number that was replaced": (_another_number_in_its_place, "was named"),
    "evidence elsewhere": (_evidence_elsewhere, "learners/eu/000001/claim is no measurement"),
    "another number for the same version": (
        _second_number_for_a_promoted_version,
        "eva's number for this version is 2, by promotion 1: no other replaces it",
    ),
    "an older version": (_older_version, "version 1 is older than version 2, which promotion 2 promoted"),
    "another digest": (_other_digest, "it names 0000000000000000"),
    "a version that is not there": (_not_in_the_log, "version 7 is not in the log"),
    "mixed versions": (_mixed_versions, "it is of no cut"),
    "too few fragments": (_too_few_fragments, "it is of no cut"),
    "a fork": (_fork, "and not promotion 1, the last before it that holds"),
    "another number": (_under_its_number, "it lies under"),
    "an older charter": (_older_charter, "made under membership 2, when membership 3 was in force"),
    "an older charter than the last": (_older_charter_than_the_last, "when membership 3 was in force"),
    "a charter that is not there": (_unknown_charter, "membership 9, under which it was made, is not known here"),
    "before the charter": (_before_the_charter, "membership 1, under which it was made, has no charter with a gate"),
    "a charter without a gate": (_charter_without_gate, "membership 3, under which it was made, has no charter with a"),
    "of another run": (_other_run, "belongs to another run"),
}


@pytest.mark.parametrize("case", FALSE)
@in_virtual_time
async def test_a_false_promotion_is_named_and_has_no_effect(folder: Path, case: str) -> None:
    make, said = FALSE[case]
    async with world(folder, seed()) as w:
        await begun(w)
        known = await make(w)
        assert said in known.unsound[-1].fault
        assert known.last is not None
        assert known.last.number < known.unsound[-1].number
        # The gate is not blocked: the next promotion follows the last one that holds.
        if case != "a charter without a gate":
            await commit(w, 4, members=known.log.members.current.version)
            found = await promotion(w, 4, await numbers(w, 4, eva=1.0, evb=1.0, evc=1.0))
            assert found.last is not None
            assert found.last.version == 4


@in_virtual_time
async def test_one_key_counts_once_under_two_names(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY, ("ev*", F, EVA), ("pro", F, PRO))
        await agree(w)
        await commit(w, 1)
        known = await promotion(w, 1, [await number(w, name, 1, 2.0, signer=EVA) for name in ("eva", "evb")])
        assert "the same key under another name" in known.unsound[0].fault


@in_virtual_time
async def test_nothing_after_a_missing_number_is_read(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await begun(w)
        for _ in range(2):
            known = await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=2.2))
        assert [p.version for p in known.sound] == [1, 2, 2]
        await w.store.delete(promotion_key(2))
        known = await promotions(w)
        assert [p.version for p in known.sound] == [1]
        assert await known.beyond() == [3]


@in_virtual_time
async def test_a_promotion_that_lacked_a_number_holds_once_it_is_restored(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await begun(w)
        evidence = await numbers(w, 2, eva=2.0, evb=2.2)
        blob = await w.store.get(evidence[0].key)
        await w.store.delete(evidence[0].key)
        known = await promotion(w, 2, evidence)
        assert [p.number for p in known.unsound] == [2]
        await w.store.create(evidence[0].key, blob)
        last = await known.refresh()
        assert last is not None
        assert (last.version, known.unsound) == (2, [])


# --- promoting --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_the_newest_cut_with_enough_numbers_is_promoted_by_those_that_are_good_enough(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await begun(w)
        log = await log_of(w, PRO)
        known = Promotions(log)
        assert await known.refresh() is not None
        assert candidate(RULE, await measured(log, RULE), 1) is None
        await numbers(w, 2, eva=2.0)
        assert candidate(RULE, await measured(log, RULE), 1) is None
        await numbers(w, 2, evb=9.0)
        await number(w, "evc", 2, 2.0, published=bytes(32))
        by = (await measured(log, RULE))[2]
        cut = await cut_in_log(log, 2)
        assert cut is not None
        good, why = chosen(RULE, by, cut, known.last)
        assert [one.header.by for one in good] == ["eva"]
        assert "evb's number 9 is worse" in why[0]
        assert "evc's number is of other bytes" in why[1]
        await number(w, "evb", 2, 2.1, written_at=1.9e9)
        good, why = chosen(RULE, (await measured(log, RULE))[2], cut, known.last)
        assert [one.header.by for one in good] == ["eva"]
        assert "evb has stored different numbers for it (2.1, 9.0)" in why[0], (
            "a better number does not replace a bad one"
        )
        await number(w, "evc", 2, 2.1)
        good, why = chosen(RULE, (await measured(log, RULE))[2], cut, known.last)
        assert [one.header.by for one in good] == ["eva", "evc"], "a number of other bytes is not in its way"
        with pytest.raises(InputError, match="the promotion would not hold: eva is no promoter"):
            await promote(Promotions(await log_of(w, EVA), known.sound, free=known.free), "eva", 2, cut, good)
        found = await promote(known, "pro", 2, cut, good)
        assert (found.number, found.fault) == (2, "")
        assert (await require(log, 2)).digest == found.digest
        with pytest.raises(InputError, match="created by another promoter at the same time"):
            await promote(known, "pro", 2, cut, good[::-1])


SECOND: dict[str, dict[str, Any]] = {
    "later": {"written_at": 1.9e9},
    "dated back": {"written_at": 1.0},
    "at the same time": {},
}


@pytest.mark.parametrize("when", SECOND)
@in_virtual_time
async def test_of_different_numbers_stored_before_a_promotion_none_counts(folder: Path, when: str) -> None:
    """An evaluator writes the object itself and says any time in it. So nothing proves which number was first."""
    async with world(folder, seed()) as w:
        await begun(w)
        log = await log_of(w, PRO)
        await numbers(w, 2, eva=2.0, evb=2.2)
        await number(w, "eva", 2, 2.0, written_at=1.85e9)  # the same number again changes nothing
        cut = await cut_in_log(log, 2)
        assert cut is not None
        good, why = chosen(RULE, (await measured(log, RULE))[2], cut, None)
        assert ([one.header.by for one in good], why) == (["eva", "evb"], ["evc has no number for it"])
        await number(w, "evb", 2, 1.1, **SECOND[when])
        good, why = chosen(RULE, (await measured(log, RULE))[2], cut, None)
        assert [one.header.by for one in good] == ["eva"]
        assert "evb has stored different numbers for it" in why[0]
        assert "2.2" in why[0]
        assert "1.1" in why[0]


@pytest.mark.parametrize("when", SECOND)
@in_virtual_time
async def test_a_number_stored_after_a_promotion_replaces_none(folder: Path, when: str) -> None:
    """The promotion holds with the number that it names, later versions are compared with that, and readers see both."""
    async with world(folder, seed()) as w:
        await begun(w)
        await number(w, "evb", 1, 9.0, **SECOND[when])
        await number(w, "evb", 1, 2.2, written_at=1.9e9)  # the same number again is no other one
        await number(w, "evb", 1, 7.0, published=bytes(32))  # of other bytes
        await number(w, "evc", 1, 8.0)  # not in the promotion
        known = await promotions(w)
        assert [(p.values["evb"], p.fault) for p in known.sound] == [(2.2, "")]
        assert others(known.sound[0], await stored(known.log)) == {"evb": [9.0]}
        known = await promotion(w, 2, await numbers(w, 2, eva=2.0, evb=8.0))
        assert "evb's number 8 is worse than 2.2, its number at promotion 1" in known.unsound[0].fault
        known = await promotion(w, 2, await numbers(w, 2, eva=2.0, evc=2.1))
        await agree(w, None)
        assert len(await stored(await log_of(w))) == 9, "the numbers for a gate that is gone are told, too"


@in_virtual_time
async def test_a_run_without_a_gate_reads_no_promotions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *ENTRIES)

        async def refresh(self: Promotions) -> Any:
            raise AssertionError("it reads")

        monkeypatch.setattr(module.Promotions, "refresh", refresh)
        assert await module.newest(await log_of(w)) is None


@in_virtual_time
async def test_only_promoted_versions_are_required(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await gated(w)
        with pytest.raises(InputError, match="no version has been promoted yet"):
            await require(await log_of(w))
        await commit(w, 1)
        await commit(w, 2)
        await promotion(w, 1, await numbers(w, 1, eva=2.0))
        with pytest.raises(InputError, match="promotion 1 does not hold: it rests on the numbers of 1"):
            await require(await log_of(w))
        await promotion(w, 1, await numbers(w, 1, eva=2.0, evb=2.0))
        assert (await require(await log_of(w))).version == 1
        with pytest.raises(InputError, match="version 2 is not promoted; the newest promoted versions are: 1"):
            await require(await log_of(w), 2)
