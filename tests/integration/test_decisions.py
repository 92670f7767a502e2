"""What the owners decided is told where it matters: an expelled learner is not "silent", and a proposal is seen."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from advice.lives import training
from isthmus.format.signing import Signer, fingerprint
from isthmus.inspect.decisions import expelled, waiting
from isthmus.inspect.health_summary import health
from isthmus.inspect.status import JOINING_S, Status, read_status
from isthmus.log.expulsions import expulsions
from isthmus.log.membership import Members, following
from isthmus.log.proposals import approve, proposals
from isthmus_services.main import main
from support.boards import a_board, ask
from support.gated import log_of
from support.signed import EU, EVERYBODY, NORTH, RULES, SOUTH, SYNC, US, admit, agree, seed
from support.world import World, in_virtual_time, serving, train, world

FEW = seed(msgspec.structs.replace(RULES, fragments=2))


async def expel(w: World, name: str, signers: Sequence[Signer]) -> str:
    """Let these owners approve that an entry is removed; return the id of their proposal."""
    members = Members(w.run)
    before = await members.refresh(w.store)
    left = [m for m in before.members if m.name != name]
    header = following(members, left, [8, 8], w.runtime.wall(), charter=before.charter)
    for signer in signers:
        await approve(w.store, members, signer, header, 9.0)
    return next((p.id for p in await proposals(w.store, members)), "")


async def test_status_and_the_board_tell_of_a_proposal_and_then_of_the_expulsion(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "status.json"

    async def status() -> tuple[list[str], str]:
        await asyncio.to_thread(main, ["status", str(folder), "--json", str(report)])
        return json.loads(report.read_text())["notes"], capsys.readouterr().out

    def told() -> tuple[dict[str, str], object]:
        """Return the state of each learner, and the ledger of the run."""
        found = json.loads(report.read_text())
        return {row["learner"]: row["state"] for row in found["learners"]}, found["totals"]["ledger"]

    async with world(folder, FEW) as w:
        await admit(w, *EVERYBODY)
        await agree(w)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            enough = lambda: min(k.head for k in syncer.coordinators) >= 2  # noqa: E731
            await asyncio.gather(
                *(train(w.by(key).learner(n), 40, enough=enough) for n, key in (("eu", EU), ("us-1", US)))
            )
        assert (await status())[0] == []
        name = await expel(w, "us-*", (NORTH,))
        proposed = (
            f"a proposal waits: {name} (- learner us-*: {fingerprint(US.author)}), approved by north; it still needs 1 "
            f"more of the owners (south) (isthmus charter show {w.run.url})"
        )
        notes, printed = await status()
        assert notes == [proposed]
        assert f"{proposed}\n" in printed
        states, ledger = told()
        assert states.keys() == {"eu", "us-1"}
        async with a_board(await log_of(w)) as (url, _):
            assert (await ask(url, "state"))["notes"] == [proposed]
        await expel(w, "us-*", (NORTH, SOUTH))
        log = await log_of(w)
        [gone] = expulsions(log.members, ["us-1", "eu", "never"])
        assert (gone.learner, gone.version, gone.at) == ("us-1", 3, log.members.current.written_at)
        notes, printed = await status()
        assert notes == [str(gone)]
        assert f"{gone}\n" in printed
        assert "0 of 1 learners here (and 1 expelled)" in printed
        assert told() == (states | {"us-1": "expelled by membership 3"}, ledger), "what it did stays in the sums"
        (folder / "bus.sqlite").rename(tmp_path / "lost")
        await status()
        assert told()[0] == {"eu": "in the log, not heard here", "us-1": "expelled by membership 3"}
        (tmp_path / "lost").rename(folder / "bus.sqlite")
        async with a_board(log, w) as (url, _):
            assert (await ask(url, "state"))["notes"] == [str(gone)]
            rows = {row["learner"]: row["state"] for row in (await ask(url, "learners"))["learners"]}
        assert rows["us-1"] == "expelled by membership 3"
        assert "expelled" not in rows["eu"]


@pytest.mark.tier("all")
@in_virtual_time
async def test_an_expelled_learner_is_not_called_silent_unheard_or_on_its_way_back(folder: Path) -> None:
    async with world(folder, FEW) as w:
        await admit(w, *EVERYBODY)
        agent = w.by(US).learner("us-1")
        async with serving(w.by(SYNC).syncer("s-1")), training(w.by(EU).learner("eu")), training(agent):
            await asyncio.sleep(5.0)
            log = await log_of(w)
            before = await read_status(log, w.bus, w.runtime, 1.0)
            await admit(w, ("eu", *EVERYBODY[0][1:]), *EVERYBODY[2:])
            await asyncio.sleep(5.0)
            await log.members.refresh(w.store)
            [said] = map(str, expulsions(log.members, ["us-1"]))
            summary = str(agent.summary())
            assert f"; {said}: WHAT WAS NOT MERGED BEFORE THAT IS NOT IN THE MODEL" in summary
            assert "goes on" not in summary
        before.hearing.learners["us-1"].heard_at = None
        assert said_by(before).endswith("1 of 1 learners merge")
        await asyncio.sleep(JOINING_S + 1.0)
        after = await read_status(log, w.bus, w.runtime, 1.0)
        assert "us-1" not in after.unheard
        assert "us-1" not in said_by(after)
    assert expelled(log.members, ["us-1"]) == [said]
    assert await waiting(log) == [], "without a charter nobody proposes"


def said_by(status: Status) -> str:
    return health(status, "run", "bus").said
