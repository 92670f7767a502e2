"""A signed run of four participants: its keys and members, and the objects and messages of its tests."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from isthmus.codecs import codec, pack
from isthmus.format.records import frame
from isthmus.format.records.charter import Charter, Owner
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.messages import (
    Announce,
)
from isthmus.format.records.objects import MemberSpec, UpdateHeader
from isthmus.format.rules import MemberRole, Rules
from isthmus.format.signing import Signer
from isthmus.format.signing.keys import new_signer
from isthmus.inspect.replay import replay
from isthmus.log import Log
from isthmus.log.creation import Seed
from isthmus.log.membership import Members, Membership, following, write
from isthmus.log.proposals import approve
from support.world import QUICK, World, all_commits, seed_of

OWNER, NORTH, SOUTH, SYNC, EU, US, COLLECTOR, EVIL = (new_signer() for _ in range(8))
L, S, C, F = MemberRole.LEARNER, MemberRole.SYNCER, MemberRole.COLLECTOR, MemberRole.FOLLOWER
RULES = Rules(fragments=4, sync_every=4, codec_up="f32", codec_down="f32")


def seed(rules: Rules = RULES, **pace: Any) -> Seed:
    return replace(seed_of(rules, msgspec.structs.replace(QUICK, **pace)), signer=OWNER)


async def admit(w: World, *members: tuple[str, MemberRole, Signer]) -> None:
    """Write a membership of these members, in force from the log's current versions on."""
    known = Members(w.run)
    heads = [len(commits) for commits in (await all_commits(w.log)).values()]
    await write(w.store, known, OWNER, [MemberSpec(n, r, k.author) for n, r, k in members], heads, w.runtime.wall())


async def agree(w: World, **changes: Any) -> None:
    """Put a charter of two owners into force."""
    charter = msgspec.structs.replace(
        Charter(owners=(Owner("north", NORTH.author), Owner("south", SOUTH.author)), amend=2, admit=2, expel=2),
        **changes,
    )
    members = Members(w.run)
    before = await members.refresh(w.store)
    heads = [len(commits) for commits in (await all_commits(w.log)).values()]
    header = following(members, before.members, heads, w.runtime.wall(), charter=charter)
    for signer in (NORTH, SOUTH) if before.charter else (OWNER, NORTH, SOUTH):
        found = await approve(w.store, members, signer, header, 9.0)
    assert isinstance(found, Membership)


EVERYBODY = (("eu", L, EU), ("us-*", L, US), ("s-*", S, SYNC), ("col", C, COLLECTOR))


async def differences(log: Log) -> list[str]:
    """Replay the whole log; return the differences."""
    await log.members.refresh(log.store)
    found = await replay(log)
    assert sum(one.compared for one in found) > 0
    return [str(one.difference) for one in found if one.difference is not None]


def announced(w: World, learner: str, key: str, blob: Body | bytes, base: int = 0, **more: Any) -> Announce:
    return Announce(
        run=w.run.digest, id="x", learner=learner, incarnation=1, fragment=0, base=base, key=key,
        digest=frame.digest(blob), size=len(blob), steps=5, tokens=500, step=5, tokens_seen=500, due=True, age_s=0.0,
        step_s=0.01, upload_s=0.01, sync_s=0.01, **more,
    )  # fmt: skip


def an_update(w: World, learner: str, signer: Signer | None, base: int = 0) -> Body:
    cut, code = w.run.layout.fragments[0], codec(w.run.rules.codec_up)
    header = UpdateHeader(
        schema=1, run=w.run.digest, fragment=0, learner=learner, incarnation=1, base=base,
        codec=w.run.rules.codec_up, steps=5, tokens=500, step=5, tokens_seen=500, train_s=1.0,
    )  # fmt: skip
    blob = frame.written(Kind.UPDATE, header, pack(code, cut, np.full(cut.size, 1e-3, np.float32)))
    frame.seal(blob, signer)
    return blob
