"""The audit: each figure is computed again here from the raw objects; what it says of a run that went through much."""

import asyncio
import html
import itertools
import json
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import msgspec
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ConsoleMessage

from isthmus.agent.ports import open_log
from isthmus.codecs import codec, pack
from isthmus.errors import Denied, InputError
from isthmus.format.permissions import CREATE, LIST, READ, Participant, may
from isthmus.format.records import frame
from isthmus.format.records.charter import Terms
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.keys import claim_key, commit_key, members_key, update_key
from isthmus.format.records.messages import PARTS, encode, learner_stream
from isthmus.format.records.objects import CommitHeader, UpdateHeader
from isthmus.format.rules import STALENESS_MAX
from isthmus.format.signing import Signer, fingerprint
from isthmus.format.signing.keys import write_signer
from isthmus.inspect.audit import audit
from isthmus.inspect.audit_report import Gap, MembershipChange, PromotionRow, Signature, Unfinished, Waiting
from isthmus.inspect.audit_sums import Sums
from isthmus.learner.manifest import statement
from isthmus.log import Commit, gc, heal
from isthmus.log.membership import Members, Membership, following
from isthmus.log.proposals import approve
from isthmus.log.replaced import AFTER_S
from isthmus.log.trust import Trust
from isthmus.reasons import Clip, Reason
from isthmus.store import Layer
from isthmus.store.layer import Send
from isthmus_services.main import main
from isthmus_services.output.audit_page import Check, page, spread
from support import gated as owners_of_gated
from support.browsers import chromium
from support.commits import committed
from support.gated import gated, log_of, number, promotion
from support.signed import (
    COLLECTOR,
    EU,
    EVERYBODY,
    NORTH,
    OWNER,
    RULES,
    SOUTH,
    SYNC,
    US,
    C,
    L,
    admit,
    agree,
    announced,
    seed,
)  # fmt: skip
from support.world import World, all_commits, in_virtual_time, seed_of, serving, train, world

T = TypeVar("T")

MARKUP = "<script>alert(1)</script> & more"
SEED = seed(msgspec.structs.replace(RULES, fragments=2), snapshot_every=4096)
LEARNERS = {"eu": EU, "us-1": US}
STEP_S = 0.2
MEMBER = {"eu": "eu", "us-1": "us-*"}
LOSSLESS = {"unknown-base", "unreadable", "not-a-member", "other-history", "unread-manifest", "superseded", "duplicate"}


# --- a run that goes through much -------------------------------------------------------------------------------------


async def trained(w: World, names: Sequence[str], more: int, *, killed: bool = True) -> None:
    """Let learners train until each fragment has so many more versions; then kill the syncer, or stop it in order."""
    made = statement({"code": MARKUP, "hardware": "one CPU", "source": [{"name": "web", "description": "pages"}]})
    async with serving(w.by(SYNC).syncer("s-1"), killed=killed) as syncer:
        wanted = [k.head + more for k in syncer.coordinators]

        def enough() -> bool:
            return all(k.head >= head for k, head in zip(syncer.coordinators, wanted, strict=True))

        agents = [w.by(LEARNERS[n]).learner(n, manifest=made if n == "eu" else None) for n in names]
        await asyncio.gather(*(train(agent, 1, step_s=STEP_S, seed=n, enough=enough) for n, agent in enumerate(agents)))


def update(w: World, learner: str, signer: Signer, p: int, base: int, value: float) -> tuple[str, Body]:
    """Return an update of equal numbers, and its key."""
    cut, code = w.run.layout.fragments[p], codec(w.run.rules.codec_up)
    header = UpdateHeader(
        schema=1, run=w.run.digest, fragment=p, learner=learner, incarnation=1, base=base, codec=code.name,
        steps=5, tokens=500, step=5, tokens_seen=500, train_s=1.0,
    )  # fmt: skip
    blob = frame.written(Kind.UPDATE, header, pack(code, cut, np.full(cut.size, value, np.float32)))
    frame.seal(blob, signer)
    return update_key(p, learner, base, frame.digest(blob)), blob


async def refused(w: World) -> None:
    """Announce an update that is not finite; the next commit lists its rejection."""
    async with serving(w.by(SYNC).syncer("s-1"), killed=True) as syncer:
        base = syncer.coordinators[0].head
        key, blob = update(w, "us-1", US, 0, base, float("nan"))
        await w.store.put(key, blob)
        await w.bus.append(learner_stream("us-1"), encode(announced(w, "us-1", key, blob, base), signer=US))
        await train(w.by(EU).learner("eu"), 1, step_s=STEP_S, enough=lambda: syncer.coordinators[0].head >= base + 2)


async def healed(w: World) -> None:
    """Lose an update of version 2 of fragment 0, and heal the fragment."""
    log = w.by(SYNC).log
    await log.members.refresh(w.store)
    commit = await log.commit(0, 2)
    assert commit is not None
    await w.store.put(commit.header.inputs[0].key, b"gone")
    assert await heal.heal(log, (await heal.diagnose(log))[0]) is not None


async def expelled(w: World, owners: Sequence[Signer] = (NORTH, SOUTH)) -> None:
    """Let both owners remove us-*."""
    members = Members(w.run)
    before = await members.refresh(w.store)
    left = [entry for entry in before.members if entry.name != "us-*"]
    header = following(members, left, await heads(w), w.runtime.wall(), charter=before.charter)
    for signer in owners:
        found = await approve(w.store, members, signer, header, 9.0)
    assert isinstance(found, Membership)


async def heads(w: World) -> list[int]:
    log = w.log
    await log.members.refresh(w.store)
    return [len(commits) for commits in (await all_commits(log)).values()]


@in_virtual_time
async def lived(folder: Path) -> None:
    """Write the objects of the run below a folder."""
    async with world(folder, SEED) as w:
        await admit(w, *EVERYBODY)
        await trained(w, ("eu", "us-1"), 3)
        eu = Terms(member="eu", cap=0.5, institution="coast")
        await agree(w, terms=(Terms(member="us-*", factor=0.5, institution="coast"), eu), purpose=MARKUP)
        await trained(w, ("eu", "us-1"), 4)
        await refused(w)
        await healed(w)
        await trained(w, ("eu", "us-1"), 3)
        await expelled(w)
        await trained(w, ("eu",), 2, killed=False)
        newest = (await heads(w))[1]
        for name, signer, base in (("eu", EU, newest), ("us-1", US, newest), ("us-1", US, newest - 1)):
            key, blob = update(w, name, signer, 1, base, 0.0)
            await w.store.put(key, blob)
        await written(w, folder)


async def written(w: World, folder: Path) -> None:
    """Write the objects of a simulated store below a folder."""
    for entry in await w.store.list(""):
        path = folder / entry.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(await w.store.get(entry.key)))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "run"
    lived(folder)
    for name, signer in {"north": NORTH, "eu": EU}.items():
        write_signer(folder.parent / name, signer, name)
    return folder


@pytest.fixture(scope="module")
def audited(recorded: Path) -> dict[str, Any]:
    """Audit the run by the command; return the JSON. The folder beside the run has all files."""
    out = recorded.parent
    files = "--html", str(out / "a.html"), "--json", str(out / "a.json"), "--sign", str(out / "north")
    assert main(["audit", str(recorded), *files, "--influence", "us-*", "--influence", "eu,coast", "--last", "0"]) == 0
    found: dict[str, Any] = json.loads((out / "a.json").read_text())
    return found


# --- every figure again, from the raw objects -------------------------------------------------------------------------


def raw(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the payload of an object, by the layout that frame.py draws."""
    blob = path.read_bytes()
    header, payload = int.from_bytes(blob[12:16], "little"), int.from_bytes(blob[16:24], "little")
    return msgpack.unpackb(blob[128 : 128 + header]), blob[len(blob) - payload :]


def length(path: Path) -> float:
    """Return the Euclidean norm of an object's payload of float32."""
    return float(np.linalg.norm(np.frombuffer(raw(path)[1], "<f4").astype(np.float64)))


class ByHand:
    """The figures of a run, summed from its raw commits. A key is a member, and a period or None for the whole run."""

    def __init__(self, run: Path) -> None:
        self.commits = [raw(path)[0] for path in sorted(run.glob("commits/*/*"))]
        layout = msgpack.unpackb(raw(run / "run")[1])
        sizes = Counter[int]()
        for tensor in layout["tensors"]:
            sizes[tensor["fragment"]] += int(np.prod(tensor["shape"]))
        self.begin = raw(run / "run")[0]["created_at"]
        self.end = max(c["written_at"] for c in self.commits)
        self.gap = self._gap()
        self.sums: dict[tuple[str, int | None], Counter[str]] = defaultdict(Counter)
        self.whole: dict[int | None, Counter[str]] = defaultdict(Counter)
        self.shares: dict[int | None, list[float]] = defaultdict(list)
        for c in self.commits:
            for when in (min(23, int((c["written_at"] - self.begin) / (self.end - self.begin) * 24)), None):
                self._take(run, c, when, sizes[c["fragment"]] / sizes.total())

    def _gap(self) -> set[tuple[int, int]]:
        (mark,) = [c for c in self.commits if c["healed"]]
        return {(mark["fragment"], v) for v in range(mark["healed"]["broken_at"], mark["version"])}

    def _take(self, run: Path, c: Mapping[str, Any], when: int | None, share: float) -> None:
        sound = (c["fragment"], c["version"]) not in self.gap
        there, expected = {i["learner"] for i in c["inputs"]}, set(c["waited"]["expected"])
        self.whole[when]["commits"] += 1
        if c["inputs"]:
            self.shares[when].append(len(there) / len(there | expected))
        for learner in expected:
            self.sums[MEMBER[learner], when]["expected"] += 1
            self.sums[MEMBER[learner], when]["there"] += learner in there
        for member in {MEMBER[learner] for learner in there}:
            self.sums[member, when]["in_commits"] += 1
        for r in c["rejected"]:
            own = self.sums[MEMBER[r["learner"]], when]
            own[f"rejected {r['reason']}"] += r["count"]
            own["updates_rejected"] += r["count"] * (r["reason"] not in LOSSLESS)
        moved = length(run / c["value_key"]) if sound and c["inputs"] else 0.0
        pulls = [i["weight"] * i.get("scale", 1.0) * (length(run / i["key"]) if sound else 0.0) for i in c["inputs"]]
        for i, pull in zip(c["inputs"], pulls, strict=True):
            for sums in (self.sums[MEMBER[i["learner"]], when], self.whole[when]):
                sums["updates"] += 1
                sums["tokens"] += i["tokens"] * share
                sums["weight"] += i["weight"]
                sums["movement"] += moved * pull / sum(pulls) if sound else 0.0  # type: ignore[assignment]
                sums["cut"] += bool(i.get("clipped"))
                sums["verified"] += sound
                sums.update(f"clipped {reason}" for reason in i.get("clipped", ()))


def about(value: float) -> Any:
    """Return what a sum must be close to: values are float32 on the way."""
    return pytest.approx(value, rel=1e-5, abs=1e-12)


def counts(sums: Counter[str], what: str) -> dict[str, int]:
    return {name.removeprefix(f"{what} "): n for name, n in sums.items() if name.startswith(f"{what} ")}


def test_every_figure_is_that_of_the_raw_objects(recorded: Path, audited: dict[str, Any]) -> None:
    hand = ByHand(recorded)
    assert len(audited["periods"]) == 24
    assert audited["periods"][0]["begin"] == hand.begin
    assert audited["periods"][-1]["end"] == about(hand.end)
    for n, period in enumerate(audited["periods"]):
        whole, shares = hand.whole[n], hand.shares[n]
        assert {k: period[k] for k in ("commits", "updates")} == {k: whole[k] for k in ("commits", "updates")}
        assert [period[k] for k in ("tokens", "weight", "movement")] == [
            about(whole[k]) for k in ("tokens", "weight", "movement")
        ]
        assert period["participation"] == (about(sum(shares) / len(shares)) if shares else None)
    assert audited["participation"] == about(sum(hand.shares[None]) / len(hand.shares[None]))
    members = {m["name"]: m for m in audited["members"]}
    assert members.keys() == {"eu", "us-*", "s-*", "col"}
    for name, when in itertools.product(("eu", "us-*"), (None, *range(24))):
        own, whole = hand.sums[name, when], hand.whole[when]
        found = members[name]["total"] if when is None else members[name]["periods"][when]
        for what in ("updates", "expected", "there", "in_commits", "updates_rejected", "cut", "verified"):
            assert found[what] == own[what], (name, when, what)
        for what in ("tokens", "weight", "movement"):
            assert found[what] == about(own[what]), (name, when, what)
        for what in ("weight", "movement"):
            assert found[f"{what}_share"] == (about(own[what] / whole[what]) if whole[what] else None)
        assert found["participation"] == (about(own["there"] / own["expected"]) if own["expected"] else None)
        assert found["clipped"] == counts(own, "clipped")
        assert found["rejections"] == counts(own, "rejected")
    # The run went through what the figures are to show.
    eu, us = members["eu"]["total"], members["us-*"]["total"]
    assert eu["clipped"]["charter"] > 0
    assert us["rejections"]["non-finite"] == 1
    assert us["updates_rejected"] > 0
    assert us["verified"] < us["updates"]
    assert members["s-*"]["commits"] == len(hand.commits) - 1
    listed = sum((Counter(counts(hand.sums[n, None], "rejected")) for n in ("eu", "us-*")), Counter[str]())
    last = {c["fragment"]: Counter(c["rejected_total"]) for c in hand.commits}
    assert Counter(audited["rejections_unlisted"]) == sum(last.values(), Counter[str]()) - listed


def test_the_page_says_who_signed_it_and_explains_figures_and_reasons(recorded: Path, audited: dict[str, Any]) -> None:
    text = html.unescape((recorded.parent / "a.html").read_text())
    assert "and north signed it: the last section says how to check that." in text
    for figure in (
        "updates",
        "tokens",
        "weight",
        "movement",
        "participation",
        "clipped",
        "rejections",
        "updates_rejected",
        "institution",
    ):
        assert audited["definitions"][figure] in text
    totals = [m["total"] for m in audited["members"]]
    for kind, named in ((Clip, "clipped"), (Reason, "rejections")):
        there = {kind(reason) for total in totals for reason in total[named]}
        assert there
        assert all(reason.means in text for reason in there)


SUMMED = ("updates", "tokens", "weight", "movement", "expected", "there", "cut", "updates_rejected", "verified")


def test_an_institution_has_the_sums_of_its_members(recorded: Path, audited: dict[str, Any]) -> None:
    """The membership without us-* does not change that it was of the same institution as eu."""
    members = {m["name"]: m for m in audited["members"]}
    assert {name: m["institution"] for name, m in members.items()} == {
        "eu": "coast", "us-*": "coast", "s-*": "s-*", "col": "col"
    }  # fmt: skip
    found = {i["name"]: i for i in audited["institutions"]}
    assert {name: i["members"] for name, i in found.items()} == {
        "coast": ["eu", "us-*"], "s-*": ["s-*"], "col": ["col"]
    }  # fmt: skip
    assert found["s-*"]["commits"] == members["s-*"]["commits"]
    for when in (None, *range(24)):
        of = [(one["total"] if when is None else one["periods"][when]) for one in (found["coast"], *members.values())]
        coast, eu, us = of[0], *(one for one, name in zip(of[1:], members, strict=True) if name in ("eu", "us-*"))
        assert {what: coast[what] for what in SUMMED} == {what: about(eu[what] + us[what]) for what in SUMMED}
        assert coast["participation"] == (about(coast["there"] / coast["expected"]) if coast["expected"] else None)
        for what in ("clipped", "rejections"):
            assert Counter(coast[what]) == Counter(eu[what]) + Counter(us[what])
    assert found["coast"]["total"]["weight_share"] == found["coast"]["total"]["movement_share"] == about(1.0)
    assert "eu, us-*" in (recorded.parent / "a.html").read_text()


def test_members_and_changes_of_the_charter_with_those_who_signed(recorded: Path, audited: dict[str, Any]) -> None:
    admitted, agreed, removed = audited["memberships"]
    assert admitted["signed_by"] == {"name": "the run's owner", "key": fingerprint(OWNER.author)}
    assert {a["name"] for a in agreed["approvals"]} == {"the run's owner", "north", "south"}
    assert f"+ purpose: {MARKUP}" in agreed["changes"]
    assert removed["changes"] == [f"- learner us-*: {fingerprint(US.author)}"]
    assert {a["key"] for a in removed["approvals"]} == {fingerprint(k.author) for k in (NORTH, SOUTH)}
    us = next(m for m in audited["members"] if m["name"] == "us-*")
    assert (us["since"], us["gone"], us["factor"]) == (1, 3, 0.5)
    assert sum(v["commits"] for v in audited["memberships"]) == audited["replay"]["commits"]
    headers = [raw(path)[0] for path in recorded.glob("commits/*/*")]
    for version in audited["memberships"]:
        times = [h["written_at"] for h in headers if h["members"] == version["version"]]
        assert version["first_commit_at"] == min(times, default=None)
    early = sum(h["members"] < agreed["version"] for h in headers)
    assert early > 0
    assert f"; {early} commits were made before the first charter; BUT " in audited["headline"]["said"]
    assert "membership 2 states" not in audited["headline"]["said"]


def test_manifests_restarts_heals_and_what_is_not_verified(recorded: Path, audited: dict[str, Any]) -> None:
    (manifest,) = audited["manifests"]
    inputs = [i for path in recorded.glob("commits/*/*") for i in raw(path)[0]["inputs"]]
    assert manifest["updates"] == sum("manifest" in i for i in inputs)
    assert (manifest["learner"], manifest["missing"]) == ("eu", "")
    assert any(MARKUP in line for line in manifest["says"])
    claims = [raw(path)[0] for path in recorded.glob("learners/*/*/claim")]
    assert sorted((r["learner"], r["incarnation"], r["tokens_trained_again"]) for r in audited["restarts"]) == sorted(
        (c["learner"], c["incarnation"], c["tokens_lost"]) for c in claims
    )
    assert max(r["incarnation"] for r in audited["restarts"]) > 1
    (mark,) = audited["heals"]
    (gap,) = audited["replay"]["unverified"]
    assert (gap["fragment"], gap["first"], gap["last"]) == (0, mark["broken_at"], mark["version"] - 1)
    assert mark["broken_at"] == 2
    replay = audited["replay"]
    assert replay["commits"] - replay["verified"] == gap["last"] - gap["first"] + 1
    assert replay["differences"] == []


def test_what_became_of_the_work(recorded: Path, audited: dict[str, Any]) -> None:
    sizes = ByHand(recorded)
    commits = [i | {"fragment": c["fragment"]} for c in sizes.commits for i in c["inputs"]]
    for found in audited["work"]:
        own = [i for i in commits if i["learner"] == found["learner"]]
        newest = max(own, key=lambda i: (i["incarnation"], i["step"]))
        claim = raw(recorded / claim_key(found["learner"], newest["incarnation"]))[0]
        assert found["processed"] == newest["tokens_seen"] + claim["tokens_lost"]
        assert found["merged"] == about(sizes.sums[MEMBER[found["learner"]], None]["tokens"])
    eu, us = audited["work"]
    assert (eu["learner"], us["learner"]) == ("eu", "us-1")
    assert eu["held"] > 0.0, "the update that nobody merged"
    assert us["held"] == 0.0, "nobody merges the work of an expelled member"
    page = html.unescape((recorded.parent / "a.html").read_text())
    section = page.partition("<h2>What became of the work</h2>")[2].partition("<h2>")[0]
    assert f'<td data-name="in no commit yet"><span>{eu["held"]:,.0f}</span></td>' in section
    assert "a commit names a rejected update without its tokens" in section
    assert section.count("was removed by membership") == 1
    assert "<p>us-1 was removed by membership 3: what it sent after that counts as late.</p>" in section


def test_an_expelled_member_is_counted_beside_the_others(recorded: Path, audited: dict[str, Any]) -> None:
    page = (recorded.parent / "a.html").read_text()
    assert "<div><dt>members</dt><dd>3, 1 removed</dd></div>" in page
    us = next(m for m in audited["members"] if m["name"] == "us-*")["total"]
    share = us["in_commits"] / audited["replay"]["commits"]
    assert f'<td data-name="in commits"><span>{share:.1%}</span></td>' in page


def test_audits_of_one_log_agree_in_every_digit(recorded: Path, audited: dict[str, Any], tmp_path: Path) -> None:
    """The figures do not depend on the order in which commits are read."""
    again = tmp_path / "b.json"
    wanted = "--influence", "us-*", "--influence", "eu,coast", "--last", "0"
    assert main(["audit", str(recorded), "--json", str(again), *wanted, "--threads", "1"]) == 0
    found = json.loads(again.read_text())

    def kept(report: dict[str, Any]) -> dict[str, Any]:
        whole = {key: value for key, value in report.items() if key not in report["differs"]}
        costs = {name.partition(".")[2] for name in report["differs"] if name.startswith("influence.")}
        return whole | {"influence": [{k: v for k, v in i.items() if k not in costs} for i in report["influence"]]}

    assert kept(found) == kept(audited)
    figures = [m["total"] for m in found["members"]] + [p for m in found["members"] for p in m["periods"]]
    for name in ("tokens", "weight", "weight_share", "movement", "movement_share", "participation"):
        assert all(one[name] in (None, float(f"{one[name] or 0.0:.9g}")) for one in figures), name


def test_the_contributions_to_a_round_that_nobody_finished(recorded: Path, audited: dict[str, Any]) -> None:
    newest = max(int(path.name) for path in recorded.glob("commits/00001/*"))
    (of,) = [u for u in audited["unfinished"] if u["fragment"] == 1]
    assert of["version"] == newest + 1
    ours = [u for u in of["updates"] if u["base"] == newest and u["tokens"] == 500]
    assert [(u["learner"], u["member"], u["fault"]) for u in ours] == [("eu", "eu", "")]
    assert (recorded / ours[0]["key"]).is_file()
    (theirs,) = [u for u in of["updates"] if u["base"] == newest and u["learner"] == "us-1"]
    assert "membership 3 has no learner" in theirs["fault"], "nobody merges the work of an expelled member"
    settled = {i["key"] for path in recorded.glob("commits/00001/*") for i in raw(path)[0]["inputs"]}
    assert not settled & {u["key"] for u in of["updates"]}


def test_an_unfinished_round_has_a_row_for_each_learner() -> None:
    def at(learner: str, base: int, fault: str = "") -> Waiting:
        return Waiting(learner, learner, base, f"{learner}{base}", 1, 5, 0.0, None, fault)

    of = Unfinished(0, 8, 0.0, [at("eu", 5), at("eu", 7, "no"), at("eu", 6), at("us", 7, "no")])
    assert [[w.base for w in row] for row in of.by_learner] == [[6, 5, 7], [7]], "the newest valid one stands first"


def test_the_page_has_unfinished_updates_by_learner(recorded: Path, audited: dict[str, Any]) -> None:
    text = (recorded.parent / "a.html").read_text().partition("<h2>Unfinished rounds</h2>")[2].partition("<h2>")[0]
    learners = {(u["fragment"], w["learner"]) for u in audited["unfinished"] for w in u["updates"]}
    assert text.count("<tr>") == 1 + len(learners) < 1 + sum(len(u["updates"]) for u in audited["unfinished"])


def test_influence_states_its_cost(audited: dict[str, Any]) -> None:
    us, eu, both = audited["influence"]
    assert (us["name"], us["members"], us["learners"], us["fault"]) == ("us-*", ["us-*"], ["us-1"], "")
    assert (both["name"], both["members"], both["learners"]) == ("coast", ["eu", "us-*"], ["eu", "us-1"])
    assert both["fault"] == ""
    assert both["left_out"] == eu["left_out"] + us["left_out"]
    assert us["folds"] == sum(us["heads"]) - sum(us["starts"]) > 0
    assert us["starts"][0] > 2, "fragment 0 begins after its heal"
    assert us["starts"][1] == 0
    assert us["relative"] == pytest.approx(us["distance"] / us["movement"])
    assert us["relative"] > 0.0
    assert us["left_out"] > 0
    assert us["bytes_read"] > 0


# --- the files --------------------------------------------------------------------------------------------------------


def test_openssh_verifies_the_signature_with_the_owners_keys(recorded: Path, audited: dict[str, Any]) -> None:
    folder = recorded.parent
    assert audited["run"]["owners"][0]["key"] == fingerprint(NORTH.author)

    def verified(name: str, data: bytes) -> bool:
        command = [
            "ssh-keygen", "-Y", "verify", "-f", "allowed_signers", "-I", "north", "-n", "isthmus-audit", "-s",
            f"{name}.sig",
        ]  # fmt: skip
        return subprocess.run(command, check=False, cwd=folder, input=data, capture_output=True).returncode == 0

    for name in ("a.json", "a.html"):
        data = (folder / name).read_bytes()
        assert verified(name, data)
        assert not verified(name, data.replace(b"eu", b"us", 1))
    assert "-s a.html.sig &lt; a.html" in (folder / "a.html").read_text()


def test_what_participants_wrote_stays_text(recorded: Path, audited: dict[str, Any]) -> None:
    text = (recorded.parent / "a.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; more") >= 3, "title, charter, manifest"
    assert "src=" not in text
    assert "href=" not in text


@pytest.mark.tier("all")
def test_the_page_reads_well_offline_on_a_desk_and_on_a_phone(recorded: Path, audited: dict[str, Any]) -> None:
    assert audited["heals"]
    said = list[str]()

    def heard(message: ConsoleMessage) -> None:
        said.append(message.text)

    with chromium() as browser:
        for width in (1440, 390):
            context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
            tab = context.new_page()
            tab.on("console", heard)
            tab.goto((recorded.parent / "a.html").as_uri())
            assert said == []
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            assert "<script>alert(1)</script> & more" in tab.locator("main").inner_text()
            cut = "[...document.querySelectorAll('td')].filter((x) => x.scrollWidth > x.clientWidth + 1).length"
            assert tab.evaluate(cut) == 0
            tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            assert tab.evaluate("document.documentElement.scrollWidth") == width
        checked = browser.new_context(bypass_csp=True).new_page()
        checked.goto((recorded.parent / "a.html").as_uri())
        found = Axe().run(checked)
        assert found.violations_count == 0, found.generate_report()


def test_a_false_commit_ends_the_command_with_1(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    newest = sorted(run.glob("commits/00001/*"))[-1]
    header, _ = frame.parse(newest.read_bytes(), Kind.COMMIT, CommitHeader)
    blob = frame.draft(Kind.COMMIT, msgspec.structs.replace(header, state_digest=bytes(32))).blob
    frame.seal(blob, SYNC)
    newest.write_bytes(bytes(blob))
    assert main(["audit", str(run), "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]) == 1
    found = json.loads((tmp_path / "a.json").read_text())
    assert [(d["fragment"], d["version"]) for d in found["replay"]["differences"]] == [(1, header.version)]
    assert found["replay"]["commits"] == len(list(run.glob("commits/*/*"))), "it is not verified, and it is counted"
    assert capsys.readouterr().out.startswith("1 commit differs from what replay computes; ")
    assert found["headline"]["level"] == "bad"
    assert 'class="bad"' in (tmp_path / "a.html").read_text()


def test_commits_after_a_missing_one_still_count_and_are_not_verified(recorded: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    missing = run / "commits" / "00001" / "000000000005"
    missing.unlink()
    assert main(["audit", str(run), "--json", str(tmp_path / "a.json")]) == 1
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["replay"]["commits"] == len(list(run.glob("commits/*/*")))
    unread = [(g["fragment"], g["first"], g["last"], g["detail"]) for g in found["replay"]["unverified"]]
    assert (1, 5, 5, "is missing") in unread
    inputs = [i for path in run.glob("commits/*/*") for i in raw(path)[0]["inputs"]]
    assert sum(m["total"]["updates"] for m in found["members"]) == len(inputs)


def test_damaged_commits_are_named_and_the_others_count(recorded: Path, tmp_path: Path) -> None:
    """The newest commit of a fragment among them, at which the search for the run's end stops."""
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    newest = max(run.glob("commits/00000/*"))
    damaged = {(0, int(newest.name)), (1, 5)}
    for p, version in damaged:
        (run / commit_key(p, version)).write_bytes(b"junk")
    assert main(["audit", str(run), "--json", str(tmp_path / "a.json")]) == 1
    found = json.loads((tmp_path / "a.json").read_text())
    unread = [g for g in found["replay"]["unverified"] if "cannot be read" in g["why"]]
    assert {(g["fragment"], g["first"], g["key"]) for g in unread} == {(p, v, commit_key(p, v)) for p, v in damaged}
    assert all("not a syncer's commit" in g["detail"] or "not a commit" in g["detail"] for g in unread)
    assert found["replay"]["commits"] == len(list(run.glob("commits/*/*"))) - len(damaged)


def test_collected_rounds_still_count_and_are_not_verified(recorded: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    before = len(list(run.glob("commits/*/*")))

    async def collected() -> None:
        async with open_log(str(run), Trust(signer=COLLECTOR)) as log:
            # The run's time is a simulated one, in the future.
            await gc.apply(log, await gc.plan(log, keep=1, min_age_s=-1e9))

    asyncio.run(collected())
    assert main(["audit", str(run), "--json", str(tmp_path / "a.json")]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["replay"]["commits"] == before
    assert any("collected" in gap["why"] for gap in found["replay"]["unverified"])
    assert all(gap["first"] <= gap["last"] for gap in found["replay"]["unverified"])
    first = run / commit_key(1, 1)
    header, _ = frame.parse((recorded / commit_key(1, 1)).read_bytes(), Kind.COMMIT, CommitHeader)
    blob = frame.draft(Kind.COMMIT, msgspec.structs.replace(header, previous=bytes(32))).blob
    frame.seal(blob, SYNC)
    first.write_bytes(bytes(blob))
    main(["audit", str(run), "--json", str(tmp_path / "a.json")])
    unread = [g for g in json.loads((tmp_path / "a.json").read_text())["replay"]["unverified"] if g["key"]]
    assert (1, 1, 1) in [(g["fragment"], g["first"], g["last"]) for g in unread], "it does not follow the run object"


def test_bad_settings_are_refused(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = "--html", str(tmp_path / "a.html")

    def said(*argv: str) -> str:
        assert main(["audit", str(recorded), *argv]) == 2
        return capsys.readouterr().err

    assert "is no owner's" in said(*file, "--sign", str(recorded.parent / "eu"))
    assert "add --html FILE" in said("--sign", str(recorded.parent / "north"))
    assert "no participant has this name; participants are col, eu, s-*, us-*; institutions are coast" in said(
        "--influence", "asia"
    )
    assert "add --influence MEMBER" in said("--exec", "true")
    assert "choose longer ones" in said("--period", "1e-9")


def test_a_command_evaluates_the_model_without_a_member(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that isthmus follow runs for a cut serves here, too."""
    script = tmp_path / "loss.sh"
    seen = tmp_path / "seen"
    script.write_text(f'echo cut >> {seen}; sha256sum "$ISTHMUS_CUT_DIR"/*.safetensors | tr -dc 1-9 | head -c 12\n')
    out = str(tmp_path / "a.json")
    assert main(["audit", str(recorded), "--json", out, "--influence", "us-*,eu", "--exec", f"sh {script}"]) == 0
    us, eu = json.loads(Path(out).read_text())["influence"]
    assert us["loss"] is not None
    assert us["loss"] != us["loss_without"]
    assert eu["loss"] == us["loss"]
    assert seen.read_text().count("cut") == 3, "the recorded model is evaluated once, and the others once each"
    rounds = spread(us["foldable"])
    assert (
        f"influence over all {rounds} rounds of each fragment that can be folded: without us-*, "
        in capsys.readouterr().out
    )
    for name, told in (("eu", "without eu, "), ("us-*", "without us-*: none of its updates is merged in these rounds")):
        assert main(["audit", str(recorded), "--influence", name, "--last", "2"]) == 0
        said = f"influence over the newest 2 of {rounds} rounds of each fragment that can be folded (--last 0: all): {told}"
        assert said in capsys.readouterr().out


# --- other runs -------------------------------------------------------------------------------------------------------


class AsReader(Layer):
    """A store that gives what the table of permissions gives a reader."""

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        kind = LIST if operation == "list" else READ if operation == "get" else CREATE
        if not may(Participant.READER, kind, key):
            raise Denied(f"a reader may not {operation} {key}")
        return await super()._through(operation, key, send)


@in_virtual_time
async def test_a_readers_rights_suffice_and_promotions_are_told(folder: Path) -> None:
    async with world(folder, SEED) as w:
        await gated(w)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            agents = [w.by(key).learner(name, checkpoint_s=0.1) for name, key in LEARNERS.items()]
            enough = lambda: min(k.head for k in syncer.coordinators) >= 2  # noqa: E731
            await asyncio.gather(*(train(agent, 1, step_s=STEP_S, enough=enough) for agent in agents))
        await promotion(w, 1, [await number(w, by, 1, 3.0) for by in ("eva", "evb")])
        await promotion(w, 2, [await number(w, "eva", 2, 2.0)])
        await number(w, "evb", 1, 9.0, written_at=1.0)
        await number(w, "evc", 1, 6.0)
        found = await audit(await log_of(w.through(AsReader)), leave_out=("eu", "pro"))
        assert w.runtime.now() > 1.0
        await expelled(w, (owners_of_gated.NORTH, owners_of_gated.SOUTH))
        assert (await audit(await log_of(w))).work == found.work, "of an expelled learner, too"
    assert [one.learner for one in found.work] == ["eu", "us-1"]
    for stated in (one.stated for one in found.work):
        assert stated is not None
        assert stated.overwritten > 0.0
        assert stated.processed == about(sum(getattr(stated, part) for part in PARTS))
    assert found.not_read == []
    good, bad = found.promotions
    assert (good.number, good.version, good.by, good.values, good.fault) == (1, 1, "pro", {"eva": 3.0, "evb": 3.0}, "")
    assert "rests on the numbers of 1 evaluators" in bad.fault
    assert (good.others, bad.others) == ({"evb": [9.0]}, {})
    assert (good.left_out, bad.left_out) == ({"evc": [6.0]}, {})
    assert [(n.version, n.by, n.value, n.promotions) for n in found.numbers] == [
        (1, "eva", 3.0, [1]), (1, "evb", 9.0, []), (1, "evb", 3.0, [1]), (1, "evc", 6.0, []), (2, "eva", 2.0, [])
    ]  # fmt: skip
    text = page(found, Check([], "", ""))
    assert "Promotion 1 rests on evb’s number 3 for version 1. evb has stored other numbers for it, too: 9.0." in text
    assert "All 5 numbers that evaluators have stored" in text
    assert "eva 3, evb 3; not on evc 6" in text
    assert "The charter names no institutions, so each member counts for itself." in text
    assert found.replay.differences == []
    eu, pro = found.influence
    assert (eu.fault, eu.seconds < 1.0) == ("", True), "reading takes no time here"
    assert pro.fault == "none of its updates is merged in these rounds"
    assert (pro.folds, pro.left_out, pro.distance, pro.relative, pro.cosine) == (0, 0, None, None, None)


@in_virtual_time
async def gone_on(folder: Path) -> None:
    """Write the objects of a run below a folder whose expelled syncer went on with a copy without the membership."""
    async with world(folder, SEED) as w:
        await admit(w, *EVERYBODY)
        await trained(w, ("eu",), 2)
        await admit(w, ("eu", L, EU), ("us-*", L, US), ("col", C, COLLECTOR))
        hidden = await w.store.get(members_key(2))
        await w.store.delete(members_key(2))
        await asyncio.sleep(2 * AFTER_S)
        for _ in range(2):  # each ends with a snapshot, so that the versions before the first can be collected
            await trained(w, ("eu",), 1, killed=False)
        await w.store.put(members_key(2), hidden)
        await written(w, folder)


def test_the_headline_is_not_green_if_a_section_below_names_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commits of an expelled syncer are valid, and replay verifies them."""
    run, out = tmp_path / "run", tmp_path / "a.json"
    gone_on(run)

    def audited() -> tuple[dict[str, Any], str]:
        assert main(["audit", str(run), "--json", str(out), "--html", str(tmp_path / "a.html")]) == 0
        return json.loads(out.read_text()), capsys.readouterr().out

    found, said = audited()
    headers = [raw(path)[0] for path in run.glob("commits/*/*")]
    late = sum(h["written_at"] > found["memberships"][1]["at"] for h in headers)
    what = f"s-1 made {late} commits of fragments 0, 1 under membership 1, which membership 2 had replaced"
    headline = f"eplay verified all {len(headers)} commits; BUT {what}"
    assert found["headline"] == {"level": "amber", "said": f"r{headline}", "remarks": [what]}
    assert said.startswith(f"r{headline}\n  {late} commits of fragments 0, 1: s-1 wrote this under membership 1, ")
    text = html.unescape((tmp_path / "a.html").read_text())
    assert f'<p class="amber">R{headline}. See below.</p>' in text
    assert text.count("<p>Outdated: ") == 1, "of all fragments together"
    assert 'class="good"' not in text
    assert main(["replay", str(run)]) == 0
    assert capsys.readouterr().out.endswith(f" commits, 0 differ, {late} were made under a replaced membership\n")

    async def collected() -> None:
        async with open_log(str(run), Trust(signer=COLLECTOR)) as log:
            await gc.apply(log, await gc.plan(log, keep=1, min_age_s=-1e9))

    asyncio.run(collected())
    first, second = audited()[0]["headline"]["remarks"]
    assert first == what, "commits whose updates were collected are judged, too"
    assert second.startswith("not verified: ")


async def test_a_headline_names_each_fault(folder: Path) -> None:
    async with world(folder, SEED) as w:
        found = await audit(await log_of(w))
    assert (found.headline.level, found.headline.said) == ("good", "there is no commit yet")
    r = replace(
        found.replay, unproven=3, unproven_in=[0, 1], unverified=[Gap(1, 2, 4, ""), Gap(1, 4, 4, "")], untimely=1,
        untimely_in=[0], ignored=["x"], unstated=["y", "z"],
    )  # fmt: skip
    good = PromotionRow(1, "", 1, "", 0.0, "", "", "", {}, {}, {})
    promotions = [good, replace(good, number=2, others={"eva": [1.0]}), replace(good, number=3, fault="no")]
    by = Signature("", "")
    states = [
        MembershipChange(n, at, at, by, [], [], 7, first, charter)
        for n, at, first, charter in (
            (1, 900.0, None, False), (2, 4000.0, 3600.0, True), (3, 4000.0, 3700.0, True), (4, 1e4, 1e4, True),
        )
    ]  # fmt: skip
    found = replace(
        found, replay=r, promotions=promotions, promotions_beyond=[5, 6], not_read=["a"], memberships=states
    )
    assert found.headline.level == "amber"
    assert found.headline.remarks == [
        "membership 2 states that it came into force at 1970-01-01 01:06:40 UTC, 6.67 minutes after the first commit "
        "under it",
        "the weights in 3 commits of fragments 0, 1 are not verified", "not verified: 3 versions of fragment 1",
        "more steps than there was time for: 1 update of fragment 0", "ignored: 1 snapshot",
        "not readable: 2 manifests that commits name", "promotion 2 rests on one of several numbers of an evaluator",
        "promotion 3 does not hold", "promotion 5, 6 comes after one that is missing",
        "not readable for this reader: 1 object",
    ]  # fmt: skip


@in_virtual_time
async def test_the_sums_of_a_long_run_keep_only_its_newest_commits(folder: Path) -> None:
    async with world(folder, SEED) as w:
        sums = Sums(await log_of(w), [0.0, 1.0])
        for version in range(1, 10 * STALENESS_MAX):
            sums.take(Commit(committed(version, run=w.run.digest), b""), None, False)
        assert len(sums.newest[0]) <= 4 * STALENESS_MAX
        assert {*range(9 * STALENESS_MAX, 10 * STALENESS_MAX)} <= sums.newest[0].keys()
        assert len(sums.seen[0]) == 10 * STALENESS_MAX - 1


@in_virtual_time
async def test_a_name_of_a_member_and_of_an_institution_stands_for_both(folder: Path) -> None:
    async with world(folder, SEED) as w:
        await admit(w, *EVERYBODY)
        await agree(w, terms=(Terms(member="us-*", institution="eu"),))
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            agents = w.by(EU).learner("eu"), w.by(US).learner("us-1")
            enough = lambda: min(k.head for k in syncer.coordinators) >= 2  # noqa: E731
            await asyncio.gather(*(train(agent, 1, step_s=STEP_S, enough=enough) for agent in agents))
        found = await audit(await log_of(w), leave_out=("eu", "eu"))
    assert [(i.name, i.members) for i in found.influence] == [("eu", ["eu"]), ("eu", ["eu", "us-*"])]
    assert found.influence[0].left_out < found.influence[1].left_out


@in_virtual_time
async def test_of_an_unsigned_run_each_learner_is_a_member(folder: Path) -> None:
    async with world(folder, seed_of(SEED.rules)) as w:
        with pytest.raises(InputError, match="participants are "):
            await audit(w.log, leave_out=("a",))
        async with serving(w.syncer("s")) as syncer:
            enough = lambda: syncer.coordinators[0].head >= 2  # noqa: E731
            await asyncio.gather(*(train(w.learner(n), 1, step_s=STEP_S, enough=enough) for n in ("a", "b")))
        found = await audit(w.log, period_s=1.0, leave_out=("a",))
    assert [(m.name, m.roles, m.since) for m in found.members] == [("a", ["learner"], 0), ("b", ["learner"], 0)]
    assert found.memberships == []
    shown = page(found, Check([], "", ""))
    assert "<h2>Learners</h2>" in shown
    assert "<dt>learners</dt><dd>2</dd>" in shown
    assert "<dt>members</dt>" not in shown
    assert "A member is a key" not in shown
    assert all(p.end - p.begin == pytest.approx(1.0) for p in found.periods)
    assert sum(p.commits for p in found.periods) == found.replay.commits == found.replay.verified
    assert found.influence[0].learners == ["a"]
