"""Learners state what they train: updates and commits name it, charters ask for it, replay and explain tell it."""

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

import isthmus
from isthmus.errors import InputError, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.charter import Terms
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import MANIFESTS, manifest_key, manifests_prefix, update_key
from isthmus.format.records.objects import ManifestHeader, MemberSpec
from isthmus.format.rules import MemberRole
from isthmus.inspect.explain import explain
from isthmus.inspect.replay import replay
from isthmus.learner import LearnerAgent
from isthmus.learner import manifest as manifests
from isthmus.learner.manifest import statement
from isthmus.log import gc
from isthmus.log import manifests as judged
from isthmus.log.membership import Members, write
from isthmus.reasons import Reason
from isthmus.syncer.recorder import Recorder
from support.signed import (
    COLLECTOR,
    EU,
    EVERYBODY,
    EVIL,
    OWNER,
    RULES,
    SYNC,
    US,
    admit,
    agree,
    an_update,
    differences,
    seed,
)
from support.world import World, all_commits, in_virtual_time, serving, train, world

WEB: Mapping[str, Any] = {
    "code": "v1", "hardware": "one CPU", "source": [{"name": "web", "description": "pages of 2024"}]
}  # fmt: skip
BOOKS = {**WEB, "code": "v2", "source": [{"name": "books", "description": "out of copyright"}]}
FEW = msgspec.structs.replace(RULES, fragments=2)


async def trained(w: World, versions: int, eu: Mapping[str, Any] | None, us: Mapping[str, Any] | None = WEB) -> None:
    """Let two learners train, each with its manifest, until fragment 0 has so many more versions."""
    async with serving(w.by(SYNC).syncer("s-1")) as syncer:
        until = syncer.coordinators[0].head + versions
        agents = [
            w.by(key).learner(name, manifest=None if given is None else statement(given))
            for name, key, given in (("eu", EU, eu), ("us-1", US, us))
        ]
        enough = lambda: syncer.coordinators[0].head >= until  # noqa: E731
        await asyncio.gather(*(train(agent, 1, enough=enough) for agent in agents))


async def merged(w: World, learner: str = "eu") -> list[tuple[int, bytes | None]]:
    """Return the versions of fragment 0 that merge a learner, and the manifest that each names."""
    await w.log.members.refresh(w.store)
    commits = (await all_commits(w.log))[0]
    return [(c.version, i.manifest) for c in commits for i in c.header.inputs if i.learner == learner]


async def rejected(w: World, learner: str = "eu") -> set[str]:
    """Return the reasons for which a learner's updates were rejected because of their manifests."""
    commits = await all_commits(w.log)
    found = {r.reason for cs in commits.values() for c in cs for r in c.header.rejected if r.learner == learner}
    return found & {Reason.NO_MANIFEST, Reason.UNREAD_MANIFEST, Reason.SOURCE_NOT_ALLOWED}


async def stored(w: World, learner: str = "eu") -> list[str]:
    return [entry.key for entry in await w.store.list(manifests_prefix(learner))]


@in_virtual_time
async def test_updates_and_commits_name_the_manifest_and_the_same_one_is_stored_once(folder: Path) -> None:
    async with world(folder, seed(FEW)) as w:
        await admit(w, *EVERYBODY)
        await trained(w, 2, WEB, us=None)
        (key,) = await stored(w)
        assert await stored(w, "us-1") == []
        digests = {digest for _, digest in await merged(w)}
        assert [d and d.hex()[:16] for d in digests] == [key.rpartition("/")[2]]
        assert {digest for _, digest in await merged(w, "us-1")} == {None}
        (update, *_) = await w.store.list("updates/00000/us-1/")
        assert b"manifest" not in bytes(await w.store.get(update.key))[:2048], "without a manifest nothing changes"
        await trained(w, 2, dict(WEB))
        assert await stored(w) == [key], "the same statement again"
        await trained(w, 2, BOOKS)
        assert len(await stored(w)) == 2
        await trained(w, 2, WEB)
        assert len(await stored(w)) == 2, "back to the first"
        header, _ = frame.parse(await w.store.get(key), Kind.MANIFEST, ManifestHeader)
        assert (header.learner, header.run, header.model) == ("eu", w.run.digest, judged.model_digest(w.run.layout))
        assert b"pages" not in bytes(await w.store.get(key))
        assert await differences(w.log) == []


@in_virtual_time
async def test_a_learner_with_a_manifest_is_told_that_there_is_no_charter(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The creator of a run can make another one without a charter: who comes with a manifest expects one."""
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        await w.by(EU).learner("eu", manifest=statement(WEB)).join()
        assert "has no charter: its owner alone decides what is merged" in caplog.text
        caplog.clear()
        await agree(w)
        await w.by(US).learner("us-1", manifest=statement(WEB)).join()
        await w.by(US).learner("us-2").join()
        assert "has no charter" not in caplog.text


@in_virtual_time
async def test_a_new_key_signs_its_manifest_anew(folder: Path) -> None:
    async with world(folder, seed(FEW)) as w:
        await admit(w, *EVERYBODY)
        first = await manifests.store(w.by(EU).log, "eu", statement(WEB))
        assert await manifests.store(w.by(EU).log, "eu", statement(WEB)) == first
        members = Members(w.run)
        await members.refresh(w.store)
        rotated = [MemberSpec("eu", MemberRole.LEARNER, US.author)]
        await write(w.store, members, OWNER, rotated, [0] * len(w.run.layout.fragments), w.runtime.wall())
        other = w.by(US).log
        await other.members.refresh(w.store)
        assert await manifests.store(other, "eu", statement(WEB)) != first


ASKED: dict[str, tuple[Mapping[str, Any] | None, Reason]] = {
    "none": (None, Reason.NO_MANIFEST),
    "another source": (BOOKS, Reason.SOURCE_NOT_ALLOWED),
}


@pytest.mark.parametrize("case", ASKED)
@in_virtual_time
async def test_under_a_charter_that_asks_for_manifests_others_are_rejected(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, reason = ASKED[case]
    async with world(folder, seed(FEW)) as w:
        await admit(w, *EVERYBODY)
        await trained(w, 2, given)
        before = [version for version, _ in await merged(w)]
        assert before, "without a charter nobody asks"
        await agree(w, manifests=True, terms=(Terms(member="eu", sources=("web", "notes")),))
        with pytest.raises(InputError, match=r"eu (has none|declares the source books, .* it web, notes only)"):
            await w.by(EU).learner("eu", manifest=given and statement(given)).join()
        with monkeypatch.context() as unasked:
            unasked.setattr(manifests, "objection", lambda *_: "")
            await trained(w, 3, given)
        assert [version for version, _ in await merged(w)] == before
        assert await rejected(w) == {reason}
        assert not await rejected(w, "us-1"), "it has a manifest, and may train on anything"
        await trained(w, 3, WEB)
        assert len(await merged(w)) > len(before)
        assert await differences(w.log) == []


@in_virtual_time
async def test_rejections_that_no_commit_can_list_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All learners joined before the charter asked for manifests, and nothing was merged yet."""
    async with world(folder, seed(FEW)) as w:
        await admit(w, *EVERYBODY)
        eu, us = w.by(EU).learner("eu"), w.by(US).learner("us-1", manifest=statement(WEB))
        await eu.join()
        await us.join()
        await agree(w, manifests=True, terms=(Terms(member="us-*", sources=("notes",)),))
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            away = syncer.tallies.turned_away
            told = lambda: all((len(away) == 2, eu.uplink.unmerged.rejected_for, us.uplink.unmerged.rejected_for))  # noqa: E731
            await asyncio.gather(*(train(_joined(agent), 1, enough=told) for agent in (eu, us)))
            assert away == {"eu": Reason.NO_MANIFEST, "us-1": Reason.SOURCE_NOT_ALLOWED}
            assert syncer.coordinators[0].head == 0
        assert us.uplink.unmerged.rejected_for == Reason.SOURCE_NOT_ALLOWED
        for name in ("eu", "us-1"):
            assert caplog.text.count(f"updates of {name} are rejected for their manifest") == 1
        assert caplog.text.count("asks for a manifest, and eu has none") == 1
        assert caplog.text.count("the manifest of us-1 declares the source web") == 1
        await w.log.members.refresh(w.store)
        more = an_update(w, "eu", EU)
        await w.store.put(update_key(0, "eu", 0, frame.digest(more)), more)
        lines = "\n".join((await explain(w.log, "0")).lines)
        assert lines.count("no-manifest") == 1, "each learner is told once"
        assert " more of eu: syncers reject it" in lines
        assert "syncers reject it (no-manifest): it names no manifest" in lines
        assert "syncers reject it (source-not-allowed): its manifest declares web" in lines
        assert "syncers reject it (no-manifest)" in "\n".join((await explain(w.log, "0/eu/0")).lines)


@in_virtual_time
async def test_a_lost_manifest_keeps_updates_out_until_it_is_back(folder: Path) -> None:
    async with world(folder, seed(FEW)) as w:
        await admit(w, *EVERYBODY)
        await agree(w, manifests=True)
        await trained(w, 2, WEB)
        (key,) = await stored(w)
        blob, before = bytes(await w.store.get(key)), len(await merged(w))
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            eu, us = (
                w.by(signer).learner(name, manifest=statement(WEB)) for name, signer in (("eu", EU), ("us-1", US))
            )
            await eu.join()
            await w.store.delete(key)
            until = syncer.coordinators[0].head + 2
            enough = lambda: syncer.coordinators[0].head >= until  # noqa: E731
            running = [asyncio.ensure_future(train(a, 1, enough=enough)) for a in (_joined(eu), us)]
            await asyncio.gather(*running)
        assert len(await merged(w)) == before
        assert await rejected(w) == {Reason.UNREAD_MANIFEST}
        (found, *_) = await replay(w.log)
        assert found.unstated == [f"{key} is missing"]
        assert found.difference is None, "what is lost is no difference"
        await w.store.put(key, blob)
        await trained(w, 2, WEB)
        assert len(await merged(w)) > before
        assert [r.unstated for r in await replay(w.log)] == [[], []]


def _joined(agent: LearnerAgent) -> LearnerAgent:
    """Return an agent whose `join` does nothing, since it has joined."""

    async def nothing() -> None:
        return

    agent.join = nothing  # type: ignore[method-assign]
    return agent


@in_virtual_time
async def test_an_update_is_judged_again_by_the_membership_of_its_round(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been fetched before the charter came into force."""
    async with world(folder, seed(FEW)) as w:
        await admit(w, *EVERYBODY)
        await agree(w, manifests=True)
        monkeypatch.setattr("isthmus.syncer.fetcher.require", lambda *_: None)
        monkeypatch.setattr(manifests, "objection", lambda *_: "")
        await trained(w, 2, None)
        assert await merged(w) == []
        assert await rejected(w) == {Reason.NO_MANIFEST}


LIES: dict[str, tuple[Mapping[str, Any] | None, str]] = {
    "no manifest": (None, "it names no manifest, and the charter asks for one"),
    "another source": (BOOKS, "its manifest declares books, which the charter does not allow eu"),
}


@pytest.mark.parametrize("lie", LIES)
@in_virtual_time
async def test_replay_names_inputs_that_a_syncer_merged_against_the_charter(
    lie: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, words = LIES[lie]
    async with world(folder, seed(FEW)) as w:
        await admit(w, *EVERYBODY)
        await agree(w, manifests=True, terms=(Terms(member="eu", sources=("web",)),))
        with monkeypatch.context() as lying:
            lying.setattr(manifests, "objection", lambda *_: "")
            for place in ("isthmus.syncer.fetcher.require", "isthmus.log.manifests.require"):
                lying.setattr(place, lambda *_: None)
            await trained(w, 2, given)
        assert await merged(w)
        (found, *_) = await replay(w.log)
        assert found.difference is not None
        assert words in " ".join(found.difference.lines())


@in_virtual_time
async def test_replay_names_a_manifest_that_the_update_does_not_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Recorder.given
    async with world(folder, seed(FEW)) as w:
        await admit(w, *EVERYBODY)
        with monkeypatch.context() as lying:
            lying.setattr(Recorder, "given", lambda self, *a: msgspec.structs.replace(own(self, *a), manifest=None))
            await trained(w, 2, WEB)
        (found, *_) = await replay(w.log)
        assert found.difference is not None
        (key,) = await stored(w)
        assert f"its manifest is {key.rpartition('/')[2]}, the commit merged it with none" in " ".join(
            found.difference.lines()
        )


@in_virtual_time
async def test_explain_tells_what_a_manifest_states_and_what_changed(folder: Path) -> None:
    async with world(folder, seed(FEW)) as w:
        await admit(w, *EVERYBODY)
        for given in (WEB, WEB, BOOKS, None):
            await trained(w, 2, given)
        by_version = await merged(w)
        changed = [v for (_, before), (v, after) in pairwise(by_version) if before != after]
        assert len(changed) == 2
        log, commits = w.log, (await all_commits(w.log))[0]
        await log.members.refresh(w.store)

        async def told(version: int) -> list[str]:
            *_, given = (i for i in commits[version - 1].header.inputs if i.learner == "eu")  # it may be in it twice
            return (await explain(log, given.key)).lines

        first = await told(by_version[0][0])
        assert any("  code v1; configuration not stated; hardware one CPU" in line for line in first)
        assert any(line.startswith("  sources: web (") for line in first)
        same = await told(by_version[1][0])
        assert not any("changed" in line for line in [*first, *same])
        lines = await told(changed[0])
        at = next(n for n, line in enumerate(lines) if line.startswith("its manifest changed since the learner's"))
        assert lines[at + 1] == "  code was v1, and is v2"
        assert lines[at + 2].startswith("  source books is new: ")
        assert lines[at + 3].startswith("  source web is gone, and was ")
        assert (await told(changed[1]))[-1] == "  that update named one, this update names none"
        for key in await stored(w):
            await w.store.delete(key)
        lines = await told(changed[0])
        assert sum("is not in the store, or is damaged" in line for line in lines) == 1
        assert lines[-1] == "  one of the two manifests cannot be read"


@in_virtual_time
async def test_a_manifest_of_another_is_none_and_no_collector_takes_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder, seed(FEW, snapshot_every=2)) as w:
        await admit(w, *EVERYBODY)
        await agree(w, manifests=True)
        digest = await manifests.store(w.by(EVIL).log, "eu", statement(WEB))
        log = w.log
        await log.members.refresh(w.store)
        assert await judged_as(log, "eu", digest) is Reason.NO_MANIFEST
        own = await manifests.store(w.by(EU).log, "eu", statement(WEB))
        assert own != digest, "what a stranger has put there is not used again"
        with monkeypatch.context() as strange:
            strange.setattr(manifests, "model_digest", lambda _: bytes(32))
            other = await manifests.store(w.by(EU).log, "eu", statement(WEB))
        assert await judged_as(log, "eu", other) is Reason.NO_MANIFEST, "it is of another model"
        assert await judged_as(log, "us-1", own) is Reason.UNREAD_MANIFEST, "it lies under another's name"
        await trained(w, 6, WEB)
        kept = await w.store.list(MANIFESTS)
        collecting = w.by(COLLECTOR).log
        await collecting.members.refresh(w.store)
        plan = await gc.plan(collecting, keep=2, min_age_s=0.0)
        assert plan.doomed
        await gc.apply(collecting, plan, lambda _: None)
        assert await w.store.list(MANIFESTS) == kept


@in_virtual_time
async def test_damage_to_a_manifest_is_no_final_reason(folder: Path) -> None:
    """What was named can be restored, so the update waits, whatever else lies under the key."""
    async with world(folder, seed(FEW)) as w:
        await admit(w, *EVERYBODY)
        digest, other = [await manifests.store(w.by(EU).log, "eu", statement(of)) for of in (WEB, BOOKS)]
        log, key = w.log, manifest_key("eu", digest)
        await log.members.refresh(w.store)
        whole, another = await w.store.get(key), await w.store.get(manifest_key("eu", other))
        for bad in (another, bytes(whole)[:-1], b"", bytes(whole) + b"x", bytes(1 << 20)):
            await w.store.put(key, bad)
            assert await judged_as(log, "eu", digest) is Reason.UNREAD_MANIFEST
        await w.store.put(key, whole)
        assert await judged_as(log, "eu", digest) is None


async def judged_as(log: Any, learner: str, digest: bytes) -> Reason | None:
    try:
        await judged.read(log, learner, digest)
    except RecordInvalid as error:
        return error.reason
    return None


def test_a_wrong_file_ends_a_join_before_it_begins(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="there is no field codes"):
        isthmus.join(str(tmp_path), model, optimizer, learner="a", manifest={"codes": "1"})
