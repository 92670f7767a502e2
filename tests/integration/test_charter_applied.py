"""A charter in force: syncers weigh each member's work by it, commits name it, replay judges by it."""

import asyncio
import json
from pathlib import Path

import pytest

from isthmus.format.records.charter import Terms
from isthmus.format.records.objects import MemberSpec
from isthmus.format.rules import MemberRole
from isthmus.format.signing import fingerprint, public_line
from isthmus.format.signing.keys import write_signer
from isthmus.inspect.replay import replay
from isthmus.log import merge
from isthmus.log.membership import Members, Membership, write
from isthmus_services.main import main
from support.signed import EU, EVERYBODY, NORTH, OWNER, SOUTH, SYNC, US, admit, agree, differences, seed
from support.world import World, all_commits, in_virtual_time, serving, train, world


async def trained(w: World, steps: int, versions: int) -> None:
    """Let two members' learners train until each fragment has so many versions."""
    async with serving(w.by(SYNC).syncer("s-1")) as syncer:
        eu, us = w.by(EU).learner("eu"), w.by(US).learner("us-1")

        def enough() -> bool:
            return min(k.head for k in syncer.coordinators) >= versions

        await asyncio.gather(train(eu, steps, enough=enough), train(us, steps, enough=enough))


@in_virtual_time
async def test_a_members_factor_and_cap_change_what_its_updates_count_for(folder: Path) -> None:
    terms = (Terms(member="us-*", factor=0.25), Terms(member="eu", cap=0.5))
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        await trained(w, 40, 3)
        await agree(w, terms=terms)
        await trained(w, 120, 9)
        await w.log.members.refresh(w.store)
        merged = [c.header for cs in (await all_commits(w.log)).values() for c in cs]
        plain, judged = [h for h in merged if h.members == 1], [h for h in merged if h.members == 2]
        assert plain
        assert judged
        assert {i.factor for h in plain for i in h.inputs} == {1.0}
        for h in judged:
            for i in h.inputs:
                asked = merge.weight(i.tokens, i.steps)
                if i.learner == "us-1":
                    assert i.factor == 0.25
                    assert i.clipped or i.weight == 0.25 * asked
                else:
                    assert i.factor == 1.0
        capped = [i for h in judged for i in h.inputs if "charter" in i.clipped]
        assert {i.learner for i in capped} == {"eu"}
        assert all(i.weight < merge.weight(i.tokens, i.steps) for i in capped)
        assert await differences(w.log) == []


@in_virtual_time
async def test_replay_finds_weights_that_the_charter_does_not_give(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A syncer that weighs a member by other terms: its commits are refused, or named by replay."""
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        await agree(w, terms=(Terms(member="eu", cap=0.5),))
        with monkeypatch.context() as lying:
            lying.setattr(Membership, "terms", lambda self, learner: Terms(member="*"))
            await trained(w, 60, 4)
        await w.log.members.refresh(w.store)
        found = [result.difference for result in await replay(w.log)]
        assert any(d is not None and "by the run's bounds it is" in " ".join(d.lines()) for d in found)


def test_owners_agree_by_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three people with a key each: propose, look, approve; then expel, which takes all of them."""
    keys = {"founder": OWNER, "north": NORTH, "south": SOUTH, "us": US}
    for name, signer in keys.items():
        write_signer(tmp_path / name, signer, name)
    run = str(tmp_path / "run")

    async def made() -> None:
        async with world(tmp_path / "run", seed()) as w:
            await write(
                w.store, Members(w.run), OWNER, [MemberSpec(n, r, k.author) for n, r, k in EVERYBODY],
                [0] * len(w.run.layout.fragments), 1.0,
            )  # fmt: skip

    asyncio.run(made())
    file = tmp_path / "charter.toml"
    file.write_text(
        f"""
purpose = "one model, three hospitals"
amend = 2
admit = 1
expel = 2

[[owner]]
name = "north"
key = "{tmp_path / "north.pub"}"

[[owner]]
name = "south"
key = "{public_line(SOUTH.author)}"

[[member]]
name = "us-*"
factor = 0.5
cap = 2.0
sources = ["notes"]
"""
    )

    def said(*argv: str, code: int = 0) -> str:
        assert main(["charter", *argv] if argv[0] != "members" else list(argv)) == code
        return "".join(capsys.readouterr())

    assert "no charter: its owner decides alone" in said("show", run)
    out = said("propose", run, str(file), "--key", str(tmp_path / "founder"))
    assert (
        "+ member us-*: its updates' weight times 0.5; at most 2 usual updates of weight in a round; may train on notes"
        in out
    )
    assert "still needs 2 more of the owners that the new charter names (north, south)" in out
    name = out.split("proposal ")[1].split()[0]
    stranger = said("approve", run, name, "--key", str(tmp_path / "north"), code=2)
    assert "nothing here says that it is the run that you mean" in stranger
    created_by = stranger.split("was created by ")[1].split()[0]
    monkeypatch.setenv("ISTHMUS_OWNER", created_by)
    assert "is no owner's" in said("approve", run, name, "--key", str(tmp_path / "us"), code=2)
    assert "1 more" in said("approve", run, name, "--key", str(tmp_path / "north"))
    again = said("approve", run, name, "--key", str(tmp_path / "north"))
    assert "north has approved this proposal before" in again
    assert "it still needs 1 more of the owners that the new charter names (south)" in again
    ours, south = tmp_path / "ours.toml", ("--key", str(tmp_path / "south"))
    assert f"those that wait for approvals: {name}" in said("approve", run, "00000000", *south, code=2)
    ours.write_text(file.read_text().replace("factor = 0.5", "factor = 0.5000001"))
    other = said("approve", run, name, "--expect", str(ours), *south, code=2)
    assert "the proposal has another charter" in other
    assert "- member us-*: its updates' weight times 0.5000001;" in other
    assert "+ member us-*: its updates' weight times 0.5;" in other
    void = said("propose", run, str(ours), "--key", str(tmp_path / "founder")).split("proposal ")[1].split()[0]
    waiting = said("show", run)
    assert f"proposal {name} (the run's owner): approved by" in waiting
    unsaid = said("approve", run, name, "--expect", str(file), *south, code=2)
    assert "the proposal has this charter, but other members" in unsaid
    assert f"+ learner us-*: {fingerprint(US.author)}" in unsaid, "the file states no key of it"
    out = said("approve", run, name, *south)
    assert f"= learner us-*: {fingerprint(US.author)}\n" in out, "whoever approves the charter approves its members"
    assert f"= syncer s-*: {fingerprint(SYNC.author)}; the charter says nothing of it\n" in out
    assert "membership 2 is in force, approved by 3" in out
    monkeypatch.delenv("ISTHMUS_OWNER")  # their keys have signed for this run now
    assert out.index("+ owner north") < out.index("membership 2 is in force")
    assert f"proposal {name} is in force by membership 2" in said("approve", run, name, *south)
    assert f"proposal {void} is void: membership 2, another change, came before it" in said(
        "approve", run, void, *south, code=2
    )
    assert f"proposal {void} is void" in said("show", run)
    file.write_text(file.read_text().replace("amend = 2", "amend  =  2 # two"))
    assert "changes nothing" in said("propose", run, str(file), *south, code=2)
    shown = said("show", run, "--json", str(tmp_path / "c.json"))
    assert "the removal of a member: 2 of 2 owners approve" in shown
    assert f"\nlearner us-*: {fingerprint(US.author)}\n" in shown
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["charter"]["terms"][0]["factor"] == 0.5
    rules, fixed = report["run"]["rules"], shown.partition("fixed when the run was created: ")[2]
    assert f"H {rules['sync_every']}, {rules['merge']}, {rules['codec_up']} up" in fixed
    assert report["run"]["digest"] in fixed
    out = said(
        "members", "remove", run, "us-*", "--hours", "1", "--key", str(tmp_path / "north"), "--json",
        str(tmp_path / "removal.json"),
    )  # fmt: skip
    assert "- learner us-*" in out
    assert "! us-* is no member" not in out, "the charter is as it was"
    assert "count up to version 64" in out, "nothing was committed lately, so there is no rate to go by"
    assert "count up to version 64" in said("show", run)
    name = out.split("proposal ")[1].split()[0]
    assert json.loads((tmp_path / "removal.json").read_text()) == {
        "membership": None, "proposal": name, "still_needs": "1 more of the owners (south)",
    }  # fmt: skip
    assert f"isthmus charter approve {run} {name} --key OWNER_KEY_FILE" in out
    assert "the proposal has this charter, but other members" in said(
        "approve", run, name, "--expect", str(file), *south, code=2
    )
    assert "membership 3 is in force" in said("approve", run, name, "--key", str(tmp_path / "south"))
    absent = "us-* is no member since membership 3; the charter's terms for it apply to nobody"
    assert absent in said("show", run)
    assert absent in said("members", "list", run)
    asked = said("members", "list", run, "--owner", str(tmp_path / "south.pub"), code=2)
    assert "under a charter, too, --owner names the key that created the run" in asked
    out = said(
        "members", "add", run, "us-*", "--public-key", str(tmp_path / "us.pub"), "--key", str(tmp_path / "south")
    )
    assert "says nothing of it" not in out
    assert "! us-* comes back: membership 3 removed it\n" in out
    out = said(
        "members",
        "add",
        run,
        "asia",
        "--public-key",
        str(tmp_path / "us.pub"),
        "--shared-key",
        "--key",
        str(tmp_path / "south"),
    )
    assert "the charter says nothing of it: it counts in full, and may train on anything" in out
    file.write_text(file.read_text().replace('name = "us-*"', 'name = "us*"'))
    assert "! us* is no member: its terms apply to nobody yet" in said(
        "propose", run, str(file), "--key", str(tmp_path / "south")
    )
    assert "us-*" in said("members", "list", run)


def test_a_copy_of_the_charter_agrees_to_no_earlier_commits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor to a change that leaves years to the members before it."""
    members = [("eu", EU, "learner"), ("s-1", SYNC, "syncer"), ("us-1", US, "learner")]
    for name, signer in {"founder": OWNER, "north": NORTH, "south": SOUTH}.items():
        write_signer(tmp_path / name, signer, name)
    run, file = str(tmp_path / "run"), tmp_path / "charter.toml"
    owners = [f'[[owner]]\nname = "{n}"\nkey = "{public_line(k.author)}"' for n, k in (("n", NORTH), ("s", SOUTH))]
    entries = [f'[[member]]\nname = "{n}"\nkey = "{public_line(k.author)}"\nrole = "{r}"' for n, k, r in members]
    file.write_text("\n".join(["amend = 2\nadmit = 1\nexpel = 2", *owners, *entries]))

    async def made() -> int:
        async with world(tmp_path / "run", seed()) as w:
            await admit(w, *((n, MemberRole(r), k) for n, k, r in members))
            await trained(w, 40, 3)
            return max(len(commits) for commits in (await all_commits(w.log)).values())

    head = asyncio.run(made())

    def said(*argv: str, code: int = 0) -> str:
        assert main(["charter", *argv]) == code
        return "".join(capsys.readouterr())

    founder = ("--key", str(tmp_path / "founder"))
    name = said("propose", run, str(file), *founder).split("proposal ")[1].split()[0]
    north = ("--owner", str(tmp_path / "founder.pub"), "--key", str(tmp_path / "north"))
    refused = said("approve", run, name, "--expect", str(file), *north, code=2)
    assert f"the run has versions up to {head} already, made without a charter" in refused
    assert "still needs 1 more" in said("approve", run, name, "--expect", str(file), "--with-earlier", *north)
    later = said("propose", run, str(file), "--hours", "1e6", *founder).split("proposal ")[1].split()[0]
    refused = said("approve", run, later, *north, code=2)
    assert "you would agree to 24 hours: let its owner propose it again with fewer --hours" in refused
    assert "(2e+06 hours at the run's pace)" not in refused
    assert "(1e+06 hours at the run's pace)" in refused
    assert "still needs 1 more" in said("approve", run, later, "--hours", "1e6", *north)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("amend = 1", "Object missing required field"),
        ("amend = 1\nadmit = 1\nexpel = 1\nowner = []", "Expected `array` of length >= 1 - at `$.owners`"),
        ("amend = 1\nadmit = 1\nexpel = 1\nown = []", "unknown field `own`"),
        ("amend = ", "Invalid value"),
        (
            'amend = 2\nadmit = 1\nexpel = 1\n[[owner]]\nname = "n"\nkey = "{key}"',
            "amend needs 2 owners, and there are 1",
        ),
        ('amend = 1\nadmit = 1\nexpel = 1\n[[owner]]\nname = "n"\nkey = "/nowhere.pub"', "name a .pub file"),
    ],
)
def test_a_charter_file_that_is_wrong_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = tmp_path / "charter.toml"
    file.write_text(text.replace("{key}", public_line(NORTH.author)))
    assert main(["charter", "propose", str(tmp_path / "run"), str(file), "--key", "k"]) == 2
    assert words in capsys.readouterr().err
