"""Invalid updates and messages are rejected with their reason and counted, and the run goes on."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from isthmus.format.records import frame
from isthmus.format.records.keys import update_key
from isthmus.format.records.messages import Announce, decode, encode, learner_stream
from isthmus.format.rules import Rules
from support.strangers import announcement, forged, post
from support.world import QUICK, World, all_commits, check_log, in_virtual_time, seed_of, serving, train, until, world


async def _other_bytes(w: World) -> None:
    blob = forged(w)
    await w.store.put(update_key(0, "evil", 0, frame.digest(blob)), forged(w, tokens=501))
    await post(w, "evil", blob, put=False)


CASES: dict[str, Callable[[World], Awaitable[None]]] = {
    "non-finite": lambda w: post(
        w, "evil", forged(w, values=np.full(w.run.layout.fragments[0].size, np.nan, np.float32))
    ),
    "overflow": lambda w: post(w, "evil", forged(w, values=np.full(w.run.layout.fragments[0].size, 1e30, np.float32))),
    "wrong-run": lambda w: post(w, "evil", forged(w, run=bytes(32))),
    "wrong-layout": lambda w: post(w, "evil", forged(w, fragment=1), fragment=0, put=True),
    "wrong-author": lambda w: post(w, "evil", forged(w, learner="l0")),
    "malformed": lambda w: post(w, "evil", forged(w)[:10] + b"\xff" + forged(w)[11:]),
    "digest-mismatch": _other_bytes,
    "truncated": lambda w: post(w, "evil", forged(w)[:-64], size=len(forged(w))),
    "oversized": lambda w: post(w, "evil", forged(w) + bytes(64), size=len(forged(w))),
    "missing": lambda w: post(w, "evil", forged(w), put=False),
    "unknown-base": lambda w: post(w, "evil", forged(w, base=77), base=77),
}


@pytest.mark.parametrize("reason", CASES)
@in_virtual_time
async def test_a_bad_update_is_turned_away_by_name_and_the_run_goes_on(folder: Path, reason: str) -> None:
    rules = Rules(fragments=4, sync_every=4, codec_up="f32", codec_down="f32")
    async with world(folder, seed_of(rules, QUICK)) as w, serving(w.syncer()) as syncer:
        await CASES[reason](w)
        coordinator = syncer.coordinators[0]
        await until(lambda: coordinator.rounds.rejected_total.get(reason, 0) >= 1, f"rejected as {reason}")
        await train(w.learner("l0"), 60, enough=lambda: coordinator.head >= 2)
        commits = (await all_commits(w.log))[0]
        assert commits
        assert all(i.learner == "l0" for c in commits for i in c.header.inputs)
        # The rejection is in the log, where status and explain find it.
        assert commits[-1].header.rejected_total[reason] >= 1
        assert any(r.learner == "evil" and r.reason == reason for c in commits for r in c.header.rejected)
    async with world(folder, seed_of(rules, QUICK)) as w:
        await check_log(w)


def _announce_by_syncer(w: World) -> bytes:
    from isthmus.format.records.messages import Alive

    return encode(
        Alive(
            run=w.run.digest,
            id="1",
            syncer="s9",
            commits=0,
            heads=(),
            rejected={},
            waiting_for="",
            lag_ms=0.0,
            held=0,
            fold_s=0.0,
            broken=(),
            stopping=False,
        )
    )


@pytest.mark.parametrize(
    ("body_of", "reason"),
    [
        (lambda _: b"\x00", "truncated"),
        (lambda _: b"\x80" * 500, "malformed"),
        (_announce_by_syncer, "wrong-author"),
        (lambda w: encode(announcement(w, learner="l9")), "wrong-author"),
        (lambda w: encode(announcement(w, run=bytes(32))), "wrong-run"),
        (lambda w: encode(announcement(w, fragment=99)), "wrong-layout"),
    ],
)
@in_virtual_time
async def test_a_message_that_belongs_to_no_fragment_is_counted_by_its_syncer(
    folder: Path, body_of: Callable[[World], bytes], reason: str
) -> None:
    async with world(folder) as w, serving(w.syncer()) as syncer:
        await w.bus.append(learner_stream("evil"), body_of(w))
        await until(lambda: syncer.tallies.rejected.get(reason) == 1, f"counted as {reason}")


@in_virtual_time
async def test_an_old_announcement_played_again_is_turned_away(folder: Path) -> None:
    async with world(folder) as w, serving(w.syncer()) as syncer:
        await train(w.learner("l0"), 40)
        said = (await w.bus.read({learner_stream("l0"): ""}, 0.0))[learner_stream("l0")]
        first = next(s.body for s in said if s.body and isinstance(decode(s.body)[0], Announce))
        (again,) = decode(first)
        assert isinstance(again, Announce)
        coordinator = syncer.coordinators[again.fragment]
        before: dict[str, int] | None = None
        while before != (before := dict(coordinator.rounds.rejected_total)):  # noqa: ASYNC110 (nothing says that no more comes)
            await asyncio.sleep(0.3)  # first, l0's own late announcements are counted
        await w.bus.append(learner_stream("l0"), first)
        await until(
            lambda: (
                sum(coordinator.rounds.rejected_total.get(r, 0) - before.get(r, 0) for r in ("stale", "duplicate")) == 1
            ),
            "the replay is counted",
        )
    async with world(folder) as w:
        await check_log(w)


@in_virtual_time
async def test_an_absurd_age_never_makes_a_commit_that_nobody_can_read(folder: Path) -> None:
    async with world(folder) as w, serving(w.syncer()) as syncer:
        await post(w, "evil", forged(w), due=True, age_s=1e9, step_s=1e9, upload_s=1e9, sync_s=1e9)
        await until(lambda: syncer.coordinators[0].head == 1, "merged all the same: the update itself is good")
        assert await check_log(w) == 1
