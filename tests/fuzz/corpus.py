"""Makes the corpus: small objects and messages of a real signed run, and packed fragments of every codec.

`python -m fuzz.corpus` with `tests` on the path. Keys are made anew each time, so the corpus is always of one run.
"""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from fuzz.targets import CODECS, CORPUS, FRAGMENT
from isthmus.codecs import codec, pack
from isthmus.format.records import frame, keys, tree
from isthmus.format.records.charter import Charter, Owner, PromotionRule, Terms
from isthmus.format.records.frame import Kind
from isthmus.format.records.messages import learner_stream
from isthmus.format.records.objects import Evidence, MemberSpec, PartHeader, PromotionHeader
from isthmus.format.rules import MemberRole, Rules
from isthmus.format.signing import Signer
from isthmus.format.signing.keys import new_signer, public_line
from isthmus.learner.manifest import statement
from isthmus.learner.ranks import protocol
from isthmus.log import evaluations, gc
from isthmus.log.membership import Members, following, write
from isthmus.log.proposals import approve
from support.world import QUICK, World, seed_of, serving, train, world

EACH = 3
"""How many objects of each kind are kept."""


async def objects(folder: Path) -> None:
    """Write the objects of a run into the corpus."""
    owner, learner, syncer, collector, follower = (new_signer() for _ in range(5))
    seed = replace(
        seed_of(Rules(fragments=2, sync_every=4), msgspec.structs.replace(QUICK, snapshot_every=2)), signer=owner
    )
    async with world(folder, seed) as w:
        entries = [
            MemberSpec(name, role, key.author)
            for name, role, key in (
                ("col", MemberRole.COLLECTOR, collector), ("eu", MemberRole.LEARNER, learner),
                ("fol", MemberRole.FOLLOWER, follower), ("s-*", MemberRole.SYNCER, syncer),
            )
        ]  # fmt: skip
        members = Members(w.run)
        await write(w.store, members, owner, entries, [0, 0], w.runtime.wall())
        async with serving(w.by(syncer).syncer("s-1")) as serves:
            web = {"name": "web", "description": "pages"}
            stated = statement({"code": "v1", "hardware": "one CPU", "source": [web], "more": {"by": "us"}})
            agent = w.by(learner).learner("eu", checkpoint_s=0.2, manifest=stated)
            await train(agent, 60, enough=lambda: min(k.head for k in serves.coordinators) >= 8)
        await evaluations.note(w.by(learner).log, "loss", 1, 0.5)
        await promote(w.by(follower))
        await agree(w, members, owner)
        log = w.by(learner).log
        header = PartHeader(
            schema=1, run=w.run.digest, learner="eu", incarnation=1, step=1, rank=0,
            pieces=(),
        )  # fmt: skip
        part = frame.gathered(Kind.PART, header, [])
        log.seal(part)
        await w.store.put("learners/eu/000001/checkpoints/parts/x", bytes(part))
        keep = [await w.store.get(e.key) for e in await w.store.list("")]
        collecting = w.by(collector).log
        await collecting.members.refresh(w.store)
        await gc.apply(collecting, await gc.plan(collecting, keep=2, min_age_s=0.0), lambda _: None)
        keep += [await w.store.get(e.key) for prefix in ("segments/", "commits/") for e in await w.store.list(prefix)]
        by_kind: dict[str, list[bytes]] = {}
        for blob in sorted((bytes(blob) for blob in keep if bytes(blob[:8]) == frame.MAGIC), key=len):
            by_kind.setdefault(Kind(frame.kind_of(blob)).name.lower(), []).append(blob)
        for kind, blobs in by_kind.items():
            for number, blob in enumerate(dict.fromkeys(blobs[:EACH])):
                name = "object" if kind in ("run", "members") and number == 0 else f"{number}"
                put(kind, name, blob)
        said = [s.body for s in (await w.bus.read({learner_stream("eu"): ""}, 0.0))[learner_stream("eu")] if s.body]
        for number, body in enumerate(sorted(set(said), key=len)[:: max(1, len(said) // 4)][:4]):
            put("messages", f"{number}", body)


async def promote(w: World) -> None:
    """Store a promotion that rests on the run's measurement."""
    (measured,) = await w.store.list(keys.EVALUATIONS)
    header = PromotionHeader(
        schema=1, run=w.run.digest, number=1, previous=w.run.digest, members=1, versions=(1, 1), published=bytes(32),
        evidence=(Evidence(measured.key, frame.digest(await w.store.get(measured.key))),), by="fol", written_at=1.8e9,
    )  # fmt: skip
    blob = frame.draft(Kind.PROMOTION, header).blob
    w.log.seal(blob)
    await w.store.create(keys.promotion_key(1), blob)


async def agree(w: World, members: Members, owner: Signer) -> None:
    """Write a second membership, with a charter that has all parts."""
    gate = PromotionRule(series="loss", better="lower", evaluators=("fol",), least=1, promoters=("fol",))
    terms = Terms(member="eu", factor=0.5, cap=2.0, sources=("web",), institution="north")
    charter = Charter(
        purpose="a corpus", owners=(Owner("founder", owner.author),), amend=1, admit=1, expel=1, terms=(terms,),
        manifests=True, gate=gate,
    )  # fmt: skip
    await approve(
        w.store, members, owner, following(members, members.current.members, [8, 8], 1.8e9, charter=charter), 9.0
    )


def payloads() -> None:
    """Write packed fragments of every codec into the corpus."""
    draw = np.random.default_rng(0)
    x = (0.02 * draw.standard_normal(FRAGMENT.size)).astype(np.float32)
    for name in CODECS:
        put(f"codec-{name}", "gauss", bytes(pack(codec(name), FRAGMENT, x)))
        put(f"codec-{name}", "zero", bytes(pack(codec(name), FRAGMENT, np.zeros_like(x))))


def others() -> None:
    """Write inputs that are not objects into the corpus."""
    put("tree", "0", tree.packed({"a": [1, 2.5, "x"], "b": np.arange(6, dtype=np.float32)}, "x", lambda _: None))

    class Said:
        def __init__(self) -> None:
            self.data = b""

        def write(self, data: bytes) -> None:
            self.data += data

    said = Said()
    protocol.write(said, 1, protocol.Hello(1, b"secret"), b"body")  # type: ignore[arg-type]
    put("wire", "0", said.data)
    with tempfile.TemporaryDirectory() as folder:
        save({"model.w": torch.zeros(2, 3), "step": 7}, checkpoint_id=folder, no_dist=True)
        put("dcp-metadata", "0", (Path(folder) / ".metadata").read_bytes())
    put("words", "0", public_line(new_signer().author).encode())
    put("words", "1", b"rediss://user:pass%40word@host.example:6379/0?x=y")


def put(folder: str, name: str, data: bytes) -> None:
    """Write one input into a folder of the corpus."""
    (CORPUS / folder).mkdir(parents=True, exist_ok=True)
    (CORPUS / folder / name).write_bytes(data)


def main() -> None:
    """Make the corpus anew, but keep earlier findings."""
    for path in CORPUS.glob("*/*"):
        if not path.name.startswith("found-"):
            path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(objects(Path(folder) / "run"))
    payloads()
    others()


if __name__ == "__main__":
    main()
