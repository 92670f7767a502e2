"""A signed run whose charter has a gate: its members, commits without training, measurements and promotions."""

from collections.abc import Sequence
from typing import Any

import msgspec

from isthmus.codecs.kernels import ARITHMETIC
from isthmus.format.records import frame
from isthmus.format.records.charter import Charter, Owner, PromotionRule
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import commit_key, promotion_key, value_key
from isthmus.format.records.objects import SCHEMA, EvaluationHeader, Evidence, PromotionHeader
from isthmus.format.signing import Signer
from isthmus.format.signing.keys import new_signer
from isthmus.log import Log, merge
from isthmus.log.membership import Members, Membership, following
from isthmus.log.promotions import Promotions, cut_in_log
from isthmus.log.proposals import approve
from isthmus.log.verify import _KEYS
from support.commits import committed, digest_of, given
from support.signed import EU, EVERYBODY, OWNER, SYNC, F, admit
from support.world import World

NORTH, SOUTH, EVA, EVB, EVC, PRO = (new_signer() for _ in range(6))
EVALUATORS = {"eva": EVA, "evb": EVB, "evc": EVC}
SIGNERS = EVALUATORS | {"pro": PRO, "eu": EU}
ENTRIES = (*EVERYBODY, *((name, F, key) for name, key in EVALUATORS.items()), ("pro", F, PRO))
RULE = PromotionRule(
    series="loss", better="lower", tolerance=0.1, evaluators=("eva", "evb", "evc"), least=2, promoters=("pro",)
)


async def agree(w: World, gate: PromotionRule | None = RULE, heads: Sequence[int] | None = None) -> None:
    """Put a charter of two owners with this gate into force."""
    members = Members(w.run)
    before = await members.refresh(w.store)
    heads = heads or [0] * len(w.run.layout.fragments)
    owners = Owner("north", NORTH.author), Owner("south", SOUTH.author)
    charter = Charter(owners=owners, amend=2, admit=2, expel=2, gate=gate)
    header = following(members, before.members, heads, w.runtime.wall(), charter=charter)
    for signer in (NORTH, SOUTH) if before.charter else (OWNER, NORTH, SOUTH):
        found = await approve(w.store, members, signer, header, 9.0)
    assert isinstance(found, Membership)


async def log_of(w: World, signer: Signer | None = None) -> Log:
    """Return the log as a new process opens it: it knows all versions of the membership."""
    log = w.by(signer).log
    await log.members.refresh(w.store)
    return log


async def gated(w: World, gate: PromotionRule | None = RULE) -> None:
    """Admit the members, and put a charter with a gate into force as membership 2."""
    await admit(w, *ENTRIES)
    await agree(w, gate)


async def commit(w: World, version: int, members: int = 2) -> None:
    """Store a commit of every fragment. They can be read one by one; they name values that are not there."""
    outer = merge.outers(w.run.rules)
    for f in w.run.layout.fragments:
        merged = given("eu", version - 1, version, p=f.index, weight=merge.weight(1200, 12))
        header = committed(
            version, merged, p=f.index, run=w.run.digest, arithmetic=ARITHMETIC, members=members, writer="s-1",
            dense=outer["dense"], embedding=outer["embedding"], codec_down=w.run.rules.codec_down,
            value_key=value_key(f.index, version, bytes(32)), published_digest=digest_of(f"{f.index} at {version}"),
        )  # fmt: skip
        blob = frame.draft(Kind.COMMIT, header).blob
        frame.seal(blob, SYNC)
        assert await w.store.create(commit_key(f.index, version), blob)


async def number(
    w: World, by: str | None, version: int, value: float, signer: Signer | None = None, **changed: Any
) -> Evidence:
    """Store a measurement of a version; return it as evidence. `signer`: by default the evaluator's own key."""
    cut = await cut_in_log(await log_of(w), version)
    header = EvaluationHeader(
        schema=SCHEMA, run=w.run.digest, series="loss", cut=version, value=value, written_at=1.8e9, by=by,
        published=cut.published if cut else None,
    )  # fmt: skip
    blob = frame.draft(Kind.EVALUATION, msgspec.structs.replace(header, **changed)).blob
    frame.seal(blob, signer or SIGNERS[str(by)])
    digest = frame.digest(blob)
    key = _KEYS[EvaluationHeader](msgspec.structs.replace(header, **changed), digest)
    await w.store.create(key, blob)
    return Evidence(key, digest)


async def promotion(
    w: World, version: int, evidence: Sequence[Evidence], signer: Signer = PRO, key: str = "", **changed: Any
) -> Promotions:
    """Store the next promotion; return all of them as a new reader finds them. `changed`: fields that it has instead."""
    known = await promotions(w)
    cut = await cut_in_log(known.log, version)
    header = PromotionHeader(
        schema=SCHEMA, run=w.run.digest, number=known.free,
        previous=known.last.digest if known.last else w.run.digest,
        members=known.log.members.current.version, versions=(version,) * len(w.run.layout.fragments),
        published=cut.published if cut else bytes(32), evidence=tuple(evidence), by="pro", written_at=1.8e9,
    )  # fmt: skip
    header = msgspec.structs.replace(header, **changed)
    blob = frame.draft(Kind.PROMOTION, header).blob
    frame.seal(blob, signer)
    assert await w.store.create(key or promotion_key(header.number), blob)
    return await promotions(w)


async def promotions(w: World) -> Promotions:
    """Return all promotions as a new reader finds them."""
    known = Promotions(await log_of(w))
    await known.refresh()
    return known
