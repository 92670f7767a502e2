"""What `isthmus promote` and followers say where a version is not promoted, and what comes of their advice."""

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from advice.followed import advises, command_in, isthmus, mine
from advice.rows import row
from isthmus.format.records.keys import promotion_key
from isthmus.format.signing.keys import write_signer
from support.gated import EVB, PRO, commit, gated, number, promotion
from support.signed import EVIL, seed
from support.world import World, world


def keys(folder: Path) -> Path:
    """Write the keys of an evaluator and the promoter beside the run; return where they are."""
    for name, signer in {"evb": EVB, "pro": PRO}.items():
        write_signer(folder.parent / name, signer, name)
    return folder.parent


async def promotes(w: World, key: Path, *more: str) -> tuple[int, str]:
    return await isthmus("promote", w.run.url, "--name", "pro", "--key", str(key / "pro"), *more)


async def measured(w: World, version: int, value: float) -> None:
    for name in ("eva", "evb"):
        await number(w, name, version, value)


@row(
    "promote",
    "not promoted: no version has numbers of … evaluators in the series …: version … has those of …, and … more must "
    "come from …",
    means="Too few of the evaluators that the charter names have measured one and the same version.",
    do="isthmus follow … --version … --exec COMMAND --series … --name NAME stores them",
    like="A number that is stored without `--name`, or of some fragments only (`--fragment`, `--mixed`), does not count.",
    then="Run by each missing evaluator with its own name and key on the version that the others have measured, it "
    "stores the number; `isthmus promote` promotes the version.",
)
async def test_an_evaluator_that_has_not_measured(folder: Path) -> None:
    (here,) = mine(test_an_evaluator_that_has_not_measured)
    async with world(folder, seed()) as w:
        await gated(w)
        at = keys(folder)
        await number(w, "eva", 0, 2.0)
        code, told = await promotes(w, at)
        assert code == 1
        advises(here, told)
        follow = (
            "follow",
            w.run.url,
            "--version",
            "0",
            "--exec",
            "echo 2.0",
            "--series",
            "loss",
            "--name",
            "evb",
            "--key",
            str(at / "evb"),
        )
        command = sys.executable, "-m", "isthmus_services.main", *follow
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        assert await process.wait() == 0
        code, told = await promotes(w, at)
        assert code == 0
        assert "promoted: version 0" in told


@row(
    "promote",
    "not promoted: version … has … of the … numbers that the charter asks for in the series …",
    means="The lines after it name each evaluator of the charter whose number is missing, of other bytes, or worse than at "
    "the last promoted version by more than the tolerance.",
    do="the run goes on, and a later version can pass; if the rule is wrong, the owners change it: isthmus charter propose "
    "… FILE",
    then="`isthmus promote` promotes a later version that enough evaluators have measured and found good enough. Until "
    "then, followers of promoted versions keep the last one.",
)
async def test_a_version_that_is_worse(folder: Path) -> None:
    (here,) = mine(test_a_version_that_is_worse)
    async with world(folder, seed()) as w:
        await gated(w)
        at = keys(folder)
        for version, value in ((0, 2.0), (1, 2.5), (2, 1.9)):
            if version:
                await commit(w, version)
            await measured(w, version, value)
            code, told = await promotes(w, at)
            if version == 1:
                assert code == 1
                advises(here, told)
                assert "evb's number 2.5 is worse than 2, its number at promotion 1" in told
            else:
                assert code == 0
                assert f"promoted: version {version}" in told


@row(
    "promote",
    "promotions/… does not hold, and its version is not given out: …; isthmus promote … --list names its author",
    means="Something lies among the promotions that is no promotion by the charter's rule; the reason follows. It has no "
    "effect. A follower of promoted versions logs this once; `isthmus promote --list` shows it, too.",
    do="isthmus promote … --list names its author",
    like="Evidence that is missing or damaged makes a promotion not hold, too: restore the object that the reason names.",
    then="The next promotion follows the last that holds. The owners can expel the author, if one has signed it.",
)
async def test_a_promotion_that_does_not_hold(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_promotion_that_does_not_hold)
    async with world(folder, seed()) as w:
        await gated(w)
        at = keys(folder)
        await measured(w, 0, 2.0)
        await promotion(w, 0, [await number(w, "eva", 0, 2.0)], signer=EVIL)
        assert (await promotes(w, at))[0] == 0
        await promotion(w, 0, [await number(w, "eva", 0, 2.0)])
        with caplog.at_level(logging.WARNING):
            code, _ = await isthmus(
                "follow", w.run.url, "--promoted", "--into", str(folder.parent / "c"), "--cuts", "1"
            )
        assert code == 0, "the version promoted before is followed"
        [said] = [record.getMessage() for record in caplog.records if "does not hold" in record.getMessage()][-1:]
        advises(here, said)
        _, told = await isthmus(*command_in(said, "promote"))
        assert "it rests on the numbers of 1" in " ".join(told.split())
        code, told = await promotes(w, at, "--version", "0")
        assert code == 0, "the gate is not blocked"


@row(
    "promote",
    "promotion … rests on …'s number … for version …; … has stored other numbers for it, too: …; ask … which is right",
    means="An evaluator stored several numbers for one version. The promotion holds with the number that it names. The times "
    "in the numbers are the evaluator's own words, so nothing proves which was first.",
    do="ask … which is right",
    like="Before a promotion, `isthmus promote` counts none of an evaluator's different numbers for a version, and says so.",
    then="If the promoted number was wrong, the evaluator measures a later version, and `isthmus promote` promotes that if it "
    "is good enough. A promotion is never taken back.",
)
async def test_an_evaluator_with_two_numbers(folder: Path) -> None:
    (here,) = mine(test_an_evaluator_with_two_numbers)
    async with world(folder, seed()) as w:
        await gated(w)
        at = keys(folder)
        await measured(w, 0, 2.0)
        await number(w, "evb", 0, 3.5)
        code, told = await promotes(w, at)
        assert code == 1
        assert "evb has stored different numbers for it (2.0, 3.5), and nothing proves which was first" in told
        await number(w, "evc", 0, 2.0)
        assert (await promotes(w, at))[0] == 0, "the numbers of the other evaluators suffice"
        await number(w, "evc", 0, 1.0)
        _, told = await isthmus("promote", w.run.url, "--list")
        advises(here, told)
        assert "promotion 1 rests on evc's number 2 for version 0" in told
        assert "other numbers for it, too: 1.0;" in told
        _, told = await isthmus("export", w.run.url, "--promoted", "-o", str(folder.parent / "model"))
        advises(here, told)
        await commit(w, 1)
        await measured(w, 1, 2.0)
        code, told = await promotes(w, at)
        assert code == 0
        assert "promoted: version 1" in told


@row(
    "promote",
    "promotions/… is missing, so promotions … after it are not read: restore it from a backup",
    means="The store has lost a promotion. Later ones name it, so they cannot be judged.",
    do="restore it from a backup",
    then="All promotions are listed again, and followers go on with the newest. Without a backup, promote the newest version "
    "again: that takes the number that is free.",
    lost="who promoted the versions in between, and when; the model and the numbers are there",
)
async def test_a_missing_promotion(folder: Path) -> None:
    (here,) = mine(test_a_missing_promotion)
    async with world(folder, seed()) as w:
        await gated(w)
        at = keys(folder)
        for version in range(3):
            if version:
                await commit(w, version)
            await measured(w, version, 2.0)
            assert (await promotes(w, at))[0] == 0
        lost = folder / promotion_key(2)
        kept = lost.read_bytes()
        lost.unlink()
        _, told = await isthmus("promote", w.run.url, "--list")
        advises(here, told)
        assert "the newest promoted version is: version 0" in told
        lost.write_bytes(kept)
        _, told = await isthmus("promote", w.run.url, "--list")
        assert "the newest promoted version is: version 2 (promotion 3)" in told
        lost.unlink()
        code, told = await promotes(w, at, "--version", "2")
        assert code == 0
        assert "promoted: version 2" in told
