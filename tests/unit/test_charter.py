"""A charter: owners decide together, as many as it asks for, and every reader checks that they have."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.doctor.findings import Finding, Role, RoleKind
from isthmus.doctor.trust import judge_key
from isthmus.errors import InputError, LogCorrupt, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.charter import Charter, Owner, PromotionRule, Terms
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import members_key, proposal_key
from isthmus.format.records.objects import MembersHeader, MemberSpec
from isthmus.format.rules import MemberRole
from isthmus.format.signing import Signer, public_line
from isthmus.format.signing.keys import new_signer
from isthmus.format.signing.points import SMALL_ORDER
from isthmus.inspect.charter_words import in_force, in_words, until
from isthmus.log.charter import approval, change_of
from isthmus.log.membership import AS_RUN, GRACE_VERSIONS, Members, Membership, create, following, opened, write
from isthmus.log.proposals import Proposal, approve, needs, proposals, require
from isthmus.log.trust import Trust
from isthmus.reasons import Reason
from isthmus_services.commands.charter import APPROVING_VERSIONS, require_timely
from isthmus_services.commands.charter import proposed as charter_proposed
from isthmus_services.commands.charter.agreement import Agreement, read_agreement, require_expected
from support.signed import OWNER, L, S, seed
from support.world import World, world

NORTH, SOUTH, EAST, WEST, EU, US, SYNC, EVIL = (new_signer() for _ in range(8))
OWNERS = (Owner("north", NORTH.author), Owner("south", SOUTH.author), Owner("east", EAST.author))


def agreed(**changes: Any) -> Charter:
    return msgspec.structs.replace(Charter(owners=OWNERS, amend=2, admit=1, expel=3), **changes)


def entry(name: str, signer: Signer, role: MemberRole = L) -> MemberSpec:
    return MemberSpec(name, role, signer.author)


MEMBERS = (entry("eu", EU), entry("s", SYNC, S))


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    """A signed run with two members and the charter of three owners."""
    async with world(tmp_path / "r", seed()) as made:
        members = Members(made.run)
        await write(made.store, members, OWNER, MEMBERS, heads(made), 1.0)
        await approve(made.store, members, OWNER, following(members, MEMBERS, heads(made), 2.0, charter=agreed()), 9.0)
        (waiting,) = await proposals(made.store, members)
        await approve(made.store, members, NORTH, waiting.header, 9.0)
        found = await approve(made.store, members, EAST, waiting.header, 9.0)
        assert isinstance(found, Membership)
        yield made


def heads(w: World) -> list[int]:
    return [3] * len(w.run.layout.fragments)


async def known(w: World) -> Members:
    members = Members(w.run)
    await members.refresh(w.store)
    return members


async def proposed(w: World, entries: Sequence[MemberSpec] = MEMBERS, charter: Charter | None = None) -> MembersHeader:
    return following(await known(w), entries, heads(w), 5.0, charter=charter)


CHANGES: dict[str, tuple[Sequence[MemberSpec], Charter | None, int]] = {
    "admit": ((*MEMBERS, entry("us", US)), None, 1),
    "rotate": ((entry("eu", US), MEMBERS[1]), None, 1),
    "expel": (MEMBERS[:1], None, 3),
    "admit and expel": ((MEMBERS[0], entry("us", US)), None, 3),
    "amend": (MEMBERS, agreed(purpose="another one"), 2),
    "amend and expel": (MEMBERS[:1], agreed(purpose="another one"), 3),
    "fewer must agree": (MEMBERS, agreed(amend=1, expel=1), 2),
    "nothing": (MEMBERS, None, 2),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_takes_as_many_owners_as_the_charter_says(w: World, change: str) -> None:
    entries, charter, least = CHANGES[change]
    header = await proposed(w, entries, charter)
    for number, owner in enumerate((SOUTH, EAST, NORTH)[:least], 1):
        found = await approve(w.store, await known(w), owner, header, 9.0)
        assert isinstance(found, Membership) == (number == least)
    now = (await known(w)).current
    assert (now.version, now.members, len(now.approvals)) == (3, tuple(entries), least)
    assert now.charter == (charter or agreed())


async def test_new_owners_must_accept_as_many_as_they_ask_for(w: World) -> None:
    """Those before agree as well, so neither side can be taken by the other."""
    theirs = (Owner("west", WEST.author), Owner("us", US.author), Owner("north", NORTH.author))
    header = await proposed(w, MEMBERS, agreed(owners=theirs, amend=3))
    for owner in (NORTH, SOUTH, WEST):
        found = await approve(w.store, await known(w), owner, header, 9.0)
        assert isinstance(found, Proposal)
    assert isinstance(found, Proposal)
    assert found.lacks((await known(w)).current) == "1 more of the owners that the new charter names (us)"
    assert isinstance(await approve(w.store, await known(w), US, header, 9.0), Membership)
    after = await proposed(w, (*MEMBERS, entry("us", US)))
    with pytest.raises(InputError, match="is no owner's"):
        await approve(w.store, await known(w), SOUTH, after, 9.0)


async def test_the_founder_alone_can_do_nothing_any_more(w: World) -> None:
    members = await known(w)
    with pytest.raises(InputError, match="this run has a charter"):
        await write(w.store, members, OWNER, MEMBERS[:1], heads(w), 9.0)
    with pytest.raises(InputError, match="is no owner's"):
        await approve(w.store, members, OWNER, await proposed(w, MEMBERS[:1]), 9.0)
    for kind_role in (L, S, MemberRole.COLLECTOR):
        assert not members.current.permits(OWNER.author, (kind_role,), None)
        assert members.versions[1].permits(OWNER.author, (kind_role,), None)


def sealed(header: MembersHeader, signer: Signer) -> bytes:
    blob = frame.draft(Kind.MEMBERS, header).blob
    frame.seal(blob, signer)
    return bytes(blob)


FORGED: dict[str, tuple[str, str]] = {
    "unapproved": ("who has not approved it", Reason.NOT_A_MEMBER),
    "one of two": ("it lacks approvals: 1 more of the owners", Reason.NOT_A_MEMBER),
    "approved twice": ("approves it twice", Reason.MALFORMED),
    "of another change": ("has not approved this change", Reason.BAD_SIGNATURE),
    "by a stranger": ("which is no owner's key", Reason.NOT_A_MEMBER),
    "signed by a stranger": ("who has not approved it", Reason.NOT_A_MEMBER),
    "without the charter": ("the charter is gone", Reason.MALFORMED),
    "under a new single owner": ("another single owner", Reason.MALFORMED),
    "an invalid charter": ("the charter is invalid: amend needs 9 owners", Reason.MALFORMED),
}


@pytest.mark.parametrize("forgery", FORGED)
async def test_what_owners_have_not_agreed_on_is_refused(w: World, forgery: str) -> None:
    said, reason = FORGED[forgery]
    members = await known(w)
    header = following(members, MEMBERS, heads(w), 5.0, charter=agreed(purpose="mine"))
    other = msgspec.structs.replace(header, written_at=6.0)
    if forgery == "without the charter":
        header = msgspec.structs.replace(header, charter=None)
    if forgery == "under a new single owner":
        header = msgspec.structs.replace(header, owner=EVIL.author)
    if forgery == "an invalid charter":
        header = msgspec.structs.replace(header, charter=agreed(amend=9))
    by, author = [approval(header, NORTH), approval(header, EAST)], NORTH
    if forgery == "unapproved":
        by = []
    if forgery == "one of two":
        by = by[:1]
    if forgery == "approved twice":
        by = [by[0], by[0]]
    if forgery == "of another change":
        by[1] = approval(other, EAST)
    if forgery == "by a stranger":
        by.append(approval(header, EVIL))
    if forgery == "signed by a stranger":
        author = EVIL
    blob = sealed(msgspec.structs.replace(header, approvals=tuple(by)), author)
    with pytest.raises(RecordInvalid, match=said) as refused:
        opened(blob, members.current, w.run)
    assert refused.value.reason == reason
    await w.store.create(members_key(3), blob)
    with pytest.raises(LogCorrupt, match=said):
        await (await known(w)).refresh(w.store)


async def test_nobody_becomes_an_owner_without_accepting(tmp_path: Path) -> None:
    async with world(tmp_path / "r", seed()) as w:
        members = Members(w.run)
        header = following(members, (), heads(w), 2.0, charter=agreed())
        found = await approve(w.store, members, OWNER, header, 9.0)
        assert isinstance(found, Proposal)
        assert found.lacks(members.current) == "2 more of the owners that the new charter names (north, south, east)"
        alone = msgspec.structs.replace(header, approvals=(approval(header, OWNER),))
        with pytest.raises(InputError, match="it lacks approvals"):
            await create(w.store, members, OWNER, alone)
        for owner in (NORTH, SOUTH):
            found = await approve(w.store, members, owner, header, 9.0)
        assert isinstance(found, Membership), "the founder's approval was there already"
        without = msgspec.structs.replace(header, approvals=(approval(header, NORTH), approval(header, SOUTH)))
        with pytest.raises(RecordInvalid, match="that of the run's owner"):
            opened(sealed(without, NORTH), Members(w.run).current, w.run)


async def test_a_proposal_is_named_by_its_id_and_ends_with_the_next_version(w: World) -> None:
    members = await known(w)
    one, other = await proposed(w, MEMBERS[:1]), await proposed(w, (*MEMBERS, entry("us", US)))
    found = await approve(w.store, members, NORTH, one, 9.0)
    assert isinstance(found, Proposal)
    assert (await require(w.store, members, found.id)).header == one
    with pytest.raises(InputError, match=f"those that wait for approvals: {found.id}"):
        await require(w.store, members, "0000" if not found.id.startswith("0000") else "1111")
    await approve(w.store, members, SOUTH, other, 9.0)
    assert await proposals(w.store, members) == [], "it would follow another version"
    with pytest.raises(InputError, match="changed meanwhile"):
        await approve(w.store, members, EAST, one, 9.0)


async def test_what_others_leave_among_the_proposals_is_passed_over(w: World) -> None:
    members = await known(w)
    header = await proposed(w, MEMBERS[:1])
    found = await approve(w.store, members, NORTH, header, 9.0)
    assert isinstance(found, Proposal)
    folder = f"proposals/{header.version:012d}/{found.change[:8].hex()}"
    await w.store.put(f"{folder}/0000", b"rubbish")
    forged = msgspec.structs.replace(header, approvals=(approval(header, EAST),))
    await w.store.put(f"{folder}/{EVIL.author[:8].hex()}", sealed(forged, EVIL))
    await w.store.put(f"{folder}/{SOUTH.author[:8].hex()}", sealed(forged, SOUTH))
    theirs = msgspec.structs.replace(header, written_at=7.0)
    stray = msgspec.structs.replace(header, previous=bytes(32))
    for number, (change, signer) in enumerate(((theirs, EVIL), (stray, NORTH), (theirs, NORTH))):
        key = proposal_key(header.version, change_of(change), signer.author)
        await w.store.put(f"{key[:-1]}x" if number == 2 else key, sealed(change, signer))
    (waiting,) = await proposals(w.store, members)
    assert waiting.header == header, (
        "others are a stranger's, do not follow this membership, or lie under no key of theirs"
    )
    assert set(waiting.approvals) == {NORTH.author}, "an owner's consent comes under its own signature"


async def test_a_charter_that_is_too_large_is_refused_before_anything_is_stored(w: World) -> None:
    members = await known(w)
    before = [entry.key for entry in await w.store.list("proposals/")]
    sources = tuple(f"source-{number:03d}-{'x' * 50}" for number in range(256))
    huge = agreed(terms=tuple(Terms(member=f"m-{number}", sources=sources) for number in range(80)))
    with pytest.raises(InputError, match=r"the charter is invalid: a members header of .* bytes is over its limit"):
        await approve(w.store, members, NORTH, await proposed(w, charter=huge), 9.0)
    assert [entry.key for entry in await w.store.list("proposals/")] == before


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"expel": 4}, "expel needs 4 owners, and there are 3"),
        ({"owners": (*OWNERS, Owner("north", WEST.author))}, "owner north stands there twice"),
        ({"owners": (*OWNERS, Owner("west", NORTH.author))}, "key "),
        ({"owners": (*OWNERS, Owner("west", sorted(SMALL_ORDER)[0]))}, "an owner's key is of small order"),
        ({"terms": (Terms(member="a"), Terms(member="a"))}, "member a stands there twice"),
        (
            {"gate": PromotionRule(series="l", better="lower", evaluators=("a",), least=2, promoters=("a",))},
            "the gate needs 2 evaluators, and names 1",
        ),
        (
            {"gate": PromotionRule(series="l", better="lower", evaluators=("a", "a"), least=2, promoters=("a",))},
            "evaluator a stands there twice",
        ),
    ],
)
def test_a_charter_that_cannot_work_says_why(changes: dict[str, Any], fault: str) -> None:
    assert agreed().fault() == ""
    gate = PromotionRule(series="l", better="lower", evaluators=("a", "b"), least=2, promoters=("a",))
    assert (agreed(gate=gate).fault(), gate.tolerance) == ("", 0.0)
    assert agreed(**changes).fault().startswith(fault)


def test_terms_are_found_as_members_are() -> None:
    terms = (Terms(member="eu-*", factor=0.5), Terms(member="eu-1", factor=2.0), Terms(member="eu-gpu-*", cap=1.0))
    now = Membership(1, OWNER.author, charter=agreed(terms=terms))
    assert [now.terms(who) for who in ("eu-7", "eu-1", "eu-gpu-3", "us")] == [*terms, AS_RUN]
    assert Membership(1, OWNER.author).terms("eu-1") is AS_RUN


def test_members_of_one_institution_are_found_as_terms_are(tmp_path: Path) -> None:
    terms = Terms(member="eu-*", institution="north"), Terms(member="us", factor=0.5)
    now = Membership(1, OWNER.author, charter=agreed(terms=terms))
    assert [now.institution(entry) for entry in ("eu-*", "eu-1", "us", "asia-*")] == ["north", "north", "us", "asia-*"]
    assert "member eu-*: of the institution north" in in_words(now.charter)
    (file := tmp_path / "charter.toml").write_text(
        f'amend = 1\nadmit = 1\nexpel = 1\n[[owner]]\nname = "north"\nkey = "{public_line(NORTH.author)}"\n'
        '[[member]]\nname = "eu-*"\ninstitution = "north"\n[[member]]\nname = "us"\nfactor = 0.5\n'
    )
    assert read_agreement(str(file)).charter.terms == terms


STATED = """amend = 1
admit = 1
expel = 1
[[owner]]
name = "north"
key = "{north}"
[[member]]
name = "eu"
key = "{eu}"
[[member]]
name = "s"
role = "syncer"
key = "{sync}"
bucket = "s3://south/run"
[[member]]
name = "us-*"
factor = 0.5
"""


def stated(tmp_path: Path, eu: Signer = EU, sync: Signer = SYNC, more: str = "") -> Agreement:
    keys = {"north": NORTH, "eu": eu, "sync": sync}
    text = STATED.format(**{name: public_line(signer.author) for name, signer in keys.items()})
    (tmp_path / "charter.toml").write_text(text + more)
    return read_agreement(str(tmp_path / "charter.toml"))


def test_a_charters_file_adds_the_members_whose_keys_it_states(tmp_path: Path) -> None:
    agreement = stated(tmp_path)
    syncer = MemberSpec("s", S, SYNC.author, "s3://south/run")
    us = MemberSpec("us-*", L, US.author, vouched=(bytes(64),))
    assert agreement.members(()) == [entry("eu", EU), syncer]
    gate = '[gate]\nseries = "loss"\nbetter = "lower"\nevaluators = ["e"]\nleast = 1\npromoters = ["e"]\n'
    assert "worse by 0 at most than what was promoted last; 1 of e" in in_words(stated(tmp_path, more=gate).charter)[-1]
    limited = stated(tmp_path, more=f"{gate}limit = 5.5\n").charter
    assert "worse by 0 at most than what was promoted last, and not beyond 5.5; 1 of e" in in_words(limited)[-1]
    assert agreement.members((us,)) == [entry("eu", EU), syncer, us], "of us-* it states no key"
    kept = MemberSpec("eu", L, EU.author, "s3://eu/run", vouched=(bytes(64),))
    assert agreement.members((kept,)) == [kept, syncer], "its key and role are as the file has them"
    rotated = MemberSpec("eu", L, US.author, "s3://eu/run", vouched=(bytes(64),))
    assert agreement.members((rotated,)) == [MemberSpec("eu", L, EU.author, "s3://eu/run"), syncer]
    with pytest.raises(InputError, match="eu and s have one key"):
        stated(tmp_path, EU, EU).members(())
    assert not agreement.charter.manifests, "unless the file asks for them"
    collector = f'[[member]]\nname = "col"\nrole = "collector"\nkey = "{public_line(SYNC.author)}"\n'
    both = stated(tmp_path, more=collector).members(())
    assert [m.name for m in both] == ["col", "eu", "s"], "a syncer may be the collector, too"
    shared = agreement.members((entry("eu-too", EU),))
    assert [m.name for m in shared] == ["eu", "eu-too", "s"], "what was admitted before is not judged here"
    for more in ('role = "syncer"', 'bucket = "s3://b/run"'):
        with pytest.raises(InputError, match="member asia has a role or a bucket here, and no key"):
            stated(tmp_path, more=f'[[member]]\nname = "asia"\n{more}\n')
    with pytest.raises(InputError, match=r"Invalid enum value 'boss' - at `\$.member\[3\].role`"):
        stated(tmp_path, more='[[member]]\nname = "asia"\nrole = "boss"\n')


EXPECTED: dict[str, tuple[list[MemberSpec], str]] = {
    "another member": ([entry("evil", EVIL)], "+ learner evil: "),
    "another key": ([entry("eu", EVIL)], "+ learner eu: "),
    "another role": ([entry("eu", EU, S)], "+ syncer eu: "),
    "another bucket": ([MemberSpec("eu", L, EU.author, "s3://evil/run")], "bucket s3://evil/run"),
    "an earlier key's checkpoint": (
        [MemberSpec("eu", L, EU.author, vouched=(bytes(64),))], "may resume from what an earlier key signed (1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("difference", EXPECTED)
async def test_the_first_charter_has_only_the_members_that_ones_own_file_states(
    tmp_path: Path, difference: str
) -> None:
    """Whoever created the run has added members alone: a file with their keys is what the others agreed on."""
    agreement = stated(tmp_path)
    async with world(tmp_path / "r", seed()) as made:
        members = Members(made.run)
        header = following(members, agreement.members(()), heads(made), 1.0, charter=agreement.charter)
        require_expected(header, members.current, agreement)
        entries, words = EXPECTED[difference]
        names = {m.name for m in entries}
        others = [m for m in header.members if m.name not in names]
        with pytest.raises(InputError, match="the proposal has this charter, but other members") as raised:
            require_expected(
                msgspec.structs.replace(header, members=tuple(sorted([*others, *entries], key=lambda m: m.name))),
                members.current, agreement,
            )  # fmt: skip
        assert words in str(raised.value)
        assert "syncer s: " not in str(raised.value), "only what differs is printed"


async def test_members_agreed_on_before_need_not_stand_in_the_file_of_another_charter(w: World, tmp_path: Path) -> None:
    agreement, now = stated(tmp_path), (await known(w)).current
    entries = agreement.members((*MEMBERS, entry("us-*", US)))
    agreed_on = msgspec.structs.replace(await proposed(w, entries), charter=agreement.charter)
    with_us = Membership(now.version, now.owner, (*MEMBERS, entry("us-*", US)), charter=now.charter)
    require_expected(agreed_on, with_us, agreement)
    with pytest.raises(InputError, match=r"\+ learner us-\*: "):
        require_expected(agreed_on, now, agreement)


async def test_a_later_change_may_leave_less_room_to_the_membership_before(w: World) -> None:
    """An owner who asks for a day first can still expel a syncer within the hour."""
    for room, versions in ((1000, 3), (64, 4)):
        members = await known(w)
        entries = MEMBERS if versions == 3 else MEMBERS[:1]
        header = following(members, entries, heads(w), 5.0, room=room)
        for owner in (NORTH, SOUTH, EAST):
            if (await known(w)).current.version < versions:
                await approve(w.store, await known(w), owner, header, 9.0)
    members = await known(w)
    assert [members.in_force(0, 3 + beyond) for beyond in (64, 65, 1001)] == [0, 4, 4]


async def test_an_approval_leaves_room_for_what_syncers_commit_meanwhile(w: World) -> None:
    log = w.log
    members = log.members
    await members.refresh(w.store)
    for room in (APPROVING_VERSIONS - 1, APPROVING_VERSIONS):
        header = following(members, MEMBERS[:1], [0] * len(w.run.layout.fragments), 5.0, room=room)
        if room < APPROVING_VERSIONS:
            with pytest.raises(InputError, match="fragment 0 is at version 0, and no version after 15 may be"):
                await require_timely(log, header)
        else:
            await require_timely(log, header)


async def test_an_owner_agrees_to_no_more_versions_than_said(w: World) -> None:
    log = w.log
    await log.members.refresh(w.store)
    for room in (GRACE_VERSIONS, GRACE_VERSIONS + 1):
        header = following(log.members, MEMBERS[:1], [0] * len(w.run.layout.fragments), 5.0, room=room)
        if room > GRACE_VERSIONS:
            with pytest.raises(InputError, match="leaves the next 65 versions to the membership before it"):
                await require_timely(log, header)
        else:
            await require_timely(log, header)


async def test_a_change_is_in_force_from_its_last_approval_on(w: World) -> None:
    """Not from its proposal on: who proposes an expulsion early dates nothing back."""
    header = await proposed(w, MEMBERS[:1])
    for owner, now in ((NORTH, 6.0), (SOUTH, 8.0), (EAST, 7.0)):
        found = await approve(w.store, await known(w), owner, header, now)
    assert isinstance(found, Membership)
    assert (found.proposed_at, found.written_at) == (5.0, 7.0)
    assert in_force(found) == "in force since 1970-01-01 00:00:07 UTC (proposed 1970-01-01 00:00:05 UTC)"
    assert (await require(w.store, await known(w), change_of(header).hex())).is_in_force
    later = await proposed(w, MEMBERS[:1], agreed(purpose="two"))
    for owner in (NORTH, SOUTH):
        found = await approve(w.store, await known(w), owner, later, 1.0)
    assert isinstance(found, Membership)
    assert found.written_at == found.proposed_at == 5.0, "this owner's clock is behind that of the proposer"


async def test_no_change_is_decided_before_it_is_proposed(w: World) -> None:
    members = await known(w)
    header = following(members, MEMBERS, heads(w), 5.0, charter=agreed(purpose="x"))
    given = tuple(sorted((approval(header, who) for who in (NORTH, SOUTH)), key=lambda a: a.owner))
    for at, fine in ((5.0, True), (4.0, False)):
        decided = msgspec.structs.replace(header, approvals=given, decided_at=at)
        blob = sealed(decided, NORTH)
        if fine:
            assert opened(blob, members.current, w.run).written_at == at
        else:
            with pytest.raises(RecordInvalid, match="decided before it was proposed"):
                opened(blob, members.current, w.run)


@pytest.mark.parametrize(("at", "fine"), [(-290.0, True), (-310.0, False), (+290.0, True), (+310.0, False)])
async def test_an_owner_approves_no_false_date(w: World, at: float, fine: bool) -> None:
    """A proposal that is dated far ahead would hide for how long an expelled syncer went on."""
    log = w.log
    members = log.members
    await members.refresh(w.store)
    near = members.current.proposed_at if at < 0 else w.log.runtime.wall()
    header = following(members, MEMBERS[:1], [0] * len(w.run.layout.fragments), near + at)
    if fine:
        await require_timely(log, header)
    else:
        with pytest.raises(InputError, match="look at the clocks, and let its owner propose it again"):
            await require_timely(log, header)


async def test_no_commit_is_left_to_the_time_before_the_first_charter(tmp_path: Path) -> None:
    """Whoever created the run could make commits in any member's name then, and show them only afterwards."""
    async with world(tmp_path / "r", seed()) as w:
        header = await charter_proposed(w.log, MEMBERS, agreed(), 24.0)
        assert set(header.until) == {0}
        await require_timely(w.log, header)
        with pytest.raises(InputError, match="leaves 64 versions to the time before the charter"):
            await require_timely(w.log, msgspec.structs.replace(header, until=(64,) * len(header.until)))
        members = Members(w.run)
        for owner in (OWNER, NORTH, SOUTH):
            await approve(w.store, members, owner, header, 9.0)
        await members.refresh(w.store)
        assert members.in_force(0, 1) == 1


async def test_a_proposal_is_named_by_enough_of_its_digest(w: World) -> None:
    """Of 8 digits, somebody finds two changes with the same ones within seconds."""
    header = await proposed(w, MEMBERS[:1])
    await approve(w.store, await known(w), NORTH, header, 9.0)
    whole = change_of(header).hex()
    (waiting,) = await proposals(w.store, await known(w))
    assert waiting.id == whole[:32]
    for name in (whole[:32], whole[:40], whole):
        assert (await require(w.store, await known(w), name)).change.hex() == whole
    for name in (whole[:31], whole[:8], whole[:32][::-1]):
        with pytest.raises(InputError, match="no proposal has this id, of 32 digits"):
            await require(w.store, await known(w), name)


async def test_a_version_that_is_gone_is_told_from_one_that_waits(w: World) -> None:
    header = await proposed(w, (*MEMBERS, entry("us", US)))
    await approve(w.store, await known(w), NORTH, header, 9.0)
    await w.store.delete(members_key(3))
    members = await known(w)
    (found,) = await proposals(w.store, members)
    assert needs(found, members.current).startswith("it has all approvals, and its version is not there")


def test_a_purpose_hides_nothing_from_who_approves_it() -> None:
    def said(purpose: str) -> str:
        return in_words(agreed(purpose=purpose))[0]

    assert said("für alle") == said("fu\u0308r alle") == "purpose: für alle"
    assert said("a\u2060b\u034fc\u00ad") == "purpose: a\\u2060b\\u034fc\\u00ad"
    assert said("a" + 90 * " " + "+ gate: none") == "purpose: a + gate: none"


async def test_only_a_syncer_that_goes_can_go_on(w: World) -> None:
    now = (await known(w)).current
    assert until(now, await proposed(w, MEMBERS[:1])).endswith(
        "up to version 67: so long s could go on, with the right to write to the store"
    )
    assert until(now, await proposed(w, MEMBERS[1:])).endswith("up to version 67")
    assert "so long s could" in until(now, await proposed(w, (MEMBERS[0], entry("s", US, S)))), "its key is another"


def test_terms_without_an_institution_are_signed_as_before_there_were_any() -> None:
    """Approvals of earlier charters stay valid, since what was approved has the same bytes."""
    assert msgspec.to_builtins(Terms(member="eu")) == {"member": "eu", "factor": 1.0, "cap": None, "sources": ()}


async def test_the_doctor_knows_the_owners_of_a_charter(w: World) -> None:
    def found(signer: Signer) -> Finding:
        judged = judge_key(members, Role(RoleKind.OWNER), Trust(signer))
        assert judged is not None
        return judged

    members = await known(w)
    assert (found(SOUTH).outcome, found(SOUTH).said.endswith("is the key of the owner south")) == ("ok", True)
    assert found(OWNER).outcome == "failure"
    assert "is no owner's key; the charter names north: SHA256:" in found(OWNER).said
    learner = judge_key(members, Role(RoleKind.LEARNER, "eu"), Trust(SOUTH))
    assert learner is not None
    assert learner.outcome == "failure", "an owner's key is no learner's"
