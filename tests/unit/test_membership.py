"""The chain of memberships decides which keys may take part in a run, and what each key may do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.doctor import examine_trust
from isthmus.errors import InputError, LogCorrupt, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import RUN_KEY, members_key
from isthmus.format.records.objects import MembersHeader, MemberSpec
from isthmus.format.rules import MemberRole
from isthmus.format.signing import Signer, fingerprint, public_line
from isthmus.format.signing.keys import new_signer, write_signer
from isthmus.format.signing.points import SMALL_ORDER
from isthmus.log.creation import create_run
from isthmus.log.fork_detection import AUTHORS_MAX, KEPT_EACH, UNSAID, ForkDetection
from isthmus.log.membership import (
    GRACE_VERSIONS,
    ROLE,
    SUCCESSION,
    Members,
    changed,
    opened,
    require_may,
    succession,
    write,
)
from isthmus.log.run import Run, read_run
from isthmus.log.trust import Trust, is_near, trust_of
from isthmus.reasons import Reason
from support.world import World, seed_of, world

OWNER = new_signer()
EU, US, OTHER = new_signer(), new_signer(), new_signer()
L, S = MemberRole.LEARNER, MemberRole.SYNCER


def entry(name: str, signer: Signer, role: MemberRole = L) -> MemberSpec:
    return MemberSpec(name, role, signer.author)


def signed_seed() -> Any:
    seed = seed_of()
    return replace(seed, signer=OWNER)


async def put(w: World, *entries: MemberSpec, signer: Signer = OWNER, successor: Signer | None = None) -> Members:
    members = Members(w.run)
    await write(w.store, members, signer, entries, [3] * len(w.run.layout.fragments), 1.0, successor=successor)
    return members


async def stored(w: World, version: int) -> bytearray:
    return bytearray(await w.store.get(members_key(version)))


async def test_versions_follow_one_another_and_any_process_reads_them(tmp_path: Path) -> None:
    async with world(tmp_path / "r", signed_seed()) as w:
        await put(w, entry("eu", EU))
        await put(w, entry("eu", EU), entry("s", US, S))
        members = Members(w.run)
        assert members.current.version == 0
        await members.refresh(w.store)
        assert [m.version for m in members.versions] == [0, 1, 2]
        assert members.current.until == tuple([3 + GRACE_VERSIONS] * len(w.run.layout.fragments))
        assert (members.current.permits(EU.author, (L,), "eu"), members.versions[0].permits(EU.author, (L,), "eu")) == (
            True,
            False,
        )
        with pytest.raises(LogCorrupt, match="is missing, and version 9 was named"):
            await members.reach(9, w.store)


async def test_a_commit_of_an_unsigned_run_is_judged_by_version_0_whatever_it_names(tmp_path: Path) -> None:
    async with world(tmp_path / "r", seed_of()) as w:
        members = Members(w.run)
        assert members.judging(7) is members.versions[0]


def test_names_and_patterns_say_who_may_speak_as_whom() -> None:
    async def body() -> None: ...

    from isthmus.log.membership import Membership

    m = Membership(
        1, OWNER.author, (entry("acme-*", EU), entry("acme-1", US), entry("acme-gpu-*", OTHER), entry("s", US, S))
    )
    assert m.permits(EU.author, (L,), "acme-7")
    assert not m.permits(EU.author, (L,), "acme-1"), "an entry for the exact name counts before any pattern"
    assert m.permits(US.author, (L,), "acme-1")
    assert not m.permits(EU.author, (L,), "acme-gpu-1"), "the longest pattern counts"
    assert m.permits(OTHER.author, (L,), "acme-gpu-1")
    assert not m.permits(EU.author, (L,), "other")
    assert not m.permits(US.author, (L,), "s"), "a syncer is no learner"
    assert m.permits(US.author, (S,), None)
    assert not m.permits(EU.author, (S,), None)
    assert m.permits(OWNER.author, (S,), "anybody"), "the owner may do everything"
    assert m.names_of(US.author, S) == ["s"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": bytes(32)}, Reason.WRONG_RUN),
        ({"version": 2}, Reason.MALFORMED),
        ({"previous": bytes(32)}, Reason.MALFORMED),
        ({"until": (1,)}, Reason.WRONG_LAYOUT),
        ({"owner": OTHER.author}, Reason.MALFORMED),
        ({"accepted": bytes(64)}, Reason.MALFORMED),
        ({"members": (entry("a", EU), entry("a", US))}, Reason.MALFORMED),
        ({"members": (MemberSpec("a", L, sorted(SMALL_ORDER)[0]),)}, Reason.MALFORMED),
        ({"owner": OTHER.author, "accepted": EU.sign(SUCCESSION, b"")}, Reason.BAD_SIGNATURE),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
async def test_what_breaks_a_rule_is_no_membership(tmp_path: Path, change: dict[str, Any], reason: Reason) -> None:
    async with world(tmp_path / "r", signed_seed()) as w:
        await put(w, entry("eu", EU))
        header, _ = frame.parse(await stored(w, 1), Kind.MEMBERS, MembersHeader)
        blob = frame.draft(Kind.MEMBERS, msgspec.structs.replace(header, **change)).blob
        frame.seal(blob, OWNER)
        with pytest.raises(RecordInvalid) as error:
            opened(blob, Members(w.run).current, w.run)
        assert error.value.reason == reason


async def test_only_the_owner_in_force_changes_it(tmp_path: Path) -> None:
    async with world(tmp_path / "r", signed_seed()) as w:
        with pytest.raises(InputError, match="is not the owner's"):
            await put(w, entry("eu", EU), signer=EU)
        await put(w, entry("eu", EU))
        blob = await stored(w, 1)
        frame.seal(blob, EU)
        await w.store.put(members_key(1), blob)
        with pytest.raises(LogCorrupt, match="not by the owner's key in force"):
            await Members(w.run).refresh(w.store)


async def test_the_owner_changes_where_both_keys_say_so(tmp_path: Path) -> None:
    async with world(tmp_path / "r", signed_seed()) as w:
        await put(w, entry("eu", EU), successor=OTHER)
        with pytest.raises(InputError, match="is not the owner's"):
            await put(w, signer=OWNER)
        members = await put(w, entry("us", US), signer=OTHER)
        assert [m.owner for m in members.versions] == [OWNER.author, OTHER.author, OTHER.author]
        # The next owner's signature is valid only for this run, version and history.
        accepted = OTHER.sign(SUCCESSION, succession(w.run, members.versions[0], OTHER.author))
        header, _ = frame.parse(await stored(w, 2), Kind.MEMBERS, MembersHeader)
        again = msgspec.structs.replace(header, owner=OTHER.author, accepted=accepted)
        blob = frame.draft(Kind.MEMBERS, again).blob
        frame.seal(blob, OTHER)
        with pytest.raises(RecordInvalid, match="an acceptance of none"):
            opened(blob, members.versions[1], w.run)


@pytest.mark.tier("test")
async def test_not_one_flipped_bit_of_a_membership_or_a_run_is_accepted(tmp_path: Path) -> None:
    async with world(tmp_path / "r", signed_seed()) as w:
        await put(w, entry("eu", EU), entry("s", US, S))
        for key in (members_key(1), RUN_KEY):
            good = bytes(await w.store.get(key))
            for bit in range(0, 8 * len(good), 1 if len(good) < 600 else 7):
                bad = bytearray(good)
                bad[bit // 8] ^= 1 << bit % 8
                await w.store.put(key, bad)
                with pytest.raises(LogCorrupt):
                    await (read_run(w.store) if key == RUN_KEY else Members(w.run).refresh(w.store))
            await w.store.put(key, good)
        assert (await read_run(w.store)).digest == w.run.digest


async def test_two_who_change_it_at_once_do_not_undo_each_other(tmp_path: Path) -> None:
    async with world(tmp_path / "r", signed_seed()) as w:
        one, two = Members(w.run), Members(w.run)
        heads = [0] * len(w.run.layout.fragments)
        await write(w.store, one, OWNER, [entry("eu", EU)], heads, 1.0)

        class Late(type(w.store)):  # type: ignore[misc]
            async def get_range(self, key: str, start: int, stop: int) -> Any:
                found = await super().get_range(key, start, stop)
                if key == members_key(1) and two.current.version == 0:
                    await write(w.store, one, OWNER, [entry("us", US)], heads, 2.0)
                return found

        late = Late.__new__(Late)
        late.__dict__.update(vars(w.store))
        await write(late, two, OWNER, [entry("third", OTHER)], heads, 3.0)
        members = Members(w.run)
        await members.refresh(w.store)
        assert [[m.name for m in v.members] for v in members.versions] == [[], ["eu"], ["us"], ["third"]]


async def test_who_may_take_part_is_said_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROLE, raising=False)
    async with world(tmp_path / "r", signed_seed()) as w:
        members = await put(w, entry("eu", EU))
        require_may(members, EU, L, "eu")
        require_may(members, OWNER, S, "s")
        with pytest.raises(InputError, match=r"ISTHMUS_KEY"):
            require_may(members, None, L, "eu")
        with pytest.raises(InputError, match=r"members add .* us --as learner"):
            require_may(members, US, L, "us")
        with pytest.raises(InputError, match=r"the key of learner eu: use the folder, or the key, of a syncer$"):
            require_may(members, EU, S, "s-1")
        with pytest.raises(
            InputError, match=r"the key of learner eu: use that name, or .* adds fr, with a key of its own: .* fr --as "
        ):
            require_may(members, EU, L, "fr")
        members = await put(w, entry("eu", EU), entry("us", US), entry("s", OTHER, S))
        with pytest.raises(InputError, match=r"the key of learner us: use the folder, or the key, of eu$"):
            require_may(members, US, L, "eu")
        with pytest.raises(InputError, match=r"eu is a learner with the key .* members rotate .* --member eu "):
            require_may(members, new_signer(), L, "eu")
        with pytest.raises(
            InputError, match=r"eu is a learner with the key SHA256:\S+: use that key, or another name$"
        ):
            require_may(members, new_signer(), S, "eu")
        with pytest.raises(InputError, match=r"the key of syncer s: .*; or .* members add .* NAME --as collector"):
            require_may(members, OTHER, MemberRole.COLLECTOR)
        monkeypatch.setenv(ROLE, "reader")
        with pytest.raises(InputError, match=r"ISTHMUS_ROLE is reader, .* use the env of the learner's$"):
            require_may(members, None, L, "eu")
        Trust(owner=fingerprint(OWNER.author)).judge(w.run)
        with pytest.raises(InputError, match="this is another run"):
            Trust(owner=fingerprint(EU.author)).judge(w.run)
    async with world(tmp_path / "plain") as w:
        with pytest.raises(InputError, match="nothing in this run is signed"):
            require_may(Members(w.run), EU, L, "eu")
        with pytest.raises(InputError, match="must be SHA256"):
            Trust(owner=fingerprint(EU.author)).judge(w.run)
        with pytest.raises(InputError, match="nothing in it is signed, and a key is given"):
            await create_run(w.store, w.runtime, signed_seed())


def test_what_is_brought_comes_from_arguments_or_the_environment(tmp_path: Path) -> None:
    write_signer(tmp_path / "k", EU, "k")
    line = public_line(OWNER.author)
    found = trust_of(environment={"ISTHMUS_KEY": str(tmp_path / "k"), "ISTHMUS_OWNER": line, "ISTHMUS_INSECURE": "1"})
    assert found == Trust(EU, fingerprint(OWNER.author), True)
    assert trust_of(str(tmp_path / "k"), environment={}) == Trust(EU, "", False)
    assert trust_of(US, fingerprint(OWNER.author), environment={"ISTHMUS_KEY": "nowhere"}).signer == US


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("/tmp/run", True), ("file:///tmp/run", True), ("sqlite:///tmp/b", True), ("unix:///run/redis.sock", True),
        ("redis://localhost:6379", True), ("redis://127.0.0.9:1", True), ("rediss://u:p@[::1]:6379", True),
        ("redis://redis:6379", False), ("rediss://10.0.0.7:6379", False), ("gs://bucket/run", False),
        ("redis://localhost.evil.example:1", False),
    ],
)  # fmt: skip
def test_what_is_on_this_machine(url: str, near: bool) -> None:
    assert is_near(url) == near


@pytest.mark.parametrize(
    ("endpoint", "near"), [("http://127.0.0.1:9000", True), ("http://minio:9000", False), (None, False)]
)
def test_a_bucket_is_where_its_endpoint_is(monkeypatch: pytest.MonkeyPatch, endpoint: str | None, near: bool) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    if endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert is_near("s3://bucket/run") == near
    assert not is_near("s3://bucket/run?endpoint=https://far.example")
    assert is_near("s3://bucket/run?endpoint=http://127.0.0.1:9000")


async def test_an_unsigned_run_elsewhere_wants_to_be_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path / "r") as w:
        members = Members(w.run)
        Trust().take_part(w.run, members, "redis://localhost:1", L, "eu")
        with pytest.raises(InputError, match=r"redis://far:1: not on this machine.*--insecure"):
            Trust().take_part(w.run, members, "redis://u:secret@far:1", L, "eu")
        assert "INSECURE" not in caplog.text
        Trust(insecure=True).take_part(w.run, members, "redis://u:secret@far:1", L, "eu")
        assert "INSECURE" in caplog.text
        assert "secret" not in caplog.text


async def test_the_doctor_says_who_can_be_anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio.example:9000")
    async with world(tmp_path / "signed", signed_seed()) as w:
        signed = w.run
    async with world(tmp_path / "plain") as w:
        plain = w.run

    def told(url: str, bus: str, run: Run) -> dict[str, tuple[str, str]]:
        return {f.check: (f.outcome.value, f.said) for f in examine_trust(url, bus, run, Trust())}

    assert told("s3://bucket/run", "redis://u:secret@far:6379", plain)["run: signatures"][0] == "warning"
    good = told("s3://bucket/run", "rediss://far:6379", signed)
    assert good["run: signatures"][0] == "ok"
    assert fingerprint(OWNER.author) in good["run: signatures"][1]
    near = told(str(tmp_path / "plain"), f"sqlite://{tmp_path}/b", plain)
    assert near == {"run: signatures": ("ok", "nothing is signed, in a folder or on loopback")}


def test_members_are_replaced_by_name() -> None:
    before = [entry("b", EU), entry("c", US)]
    assert [m.name for m in changed(before, added=entry("a", OTHER))] == ["a", "b", "c"]
    assert [m.key for m in changed(before, added=entry("b", OTHER))] == [OTHER.author, US.author]
    assert [m.name for m in changed(before, without="b")] == ["c"]


def test_two_histories_are_told_once_and_only_where_they_differ(caplog: pytest.LogCaptureFixture) -> None:
    found: list[int] = []
    h = ForkDetection(3, lambda: found.append(1))
    a, b = b"a" * 32, b"b" * 32
    h.know(1, a)
    assert not h.contradicts(1, a, "eu")
    assert not h.contradicts(1, UNSAID, "eu")
    assert h.contradicts(1, b, "eu")
    assert h.contradicts(1, b, "us"), "any author's report of another commit counts; it is logged once"
    assert (len(found), caplog.text.count("shows two histories")) == (1, 1)
    assert not h.contradicts(2, b, "eu"), "version 2 has not been read here yet"
    h.know(2, a)
    assert len(found) == 2
    assert "commits/00003/000000000002" in caplog.text
    for version in range(3, 500):
        h.know(version, a)
        h.contradicts(version + 1, a, "eu")
    assert not h.contradicts(1, b, "eu"), "version 1 has been forgotten"
    assert len(h._here) <= 64
    assert sum(map(len, h._said.values())) <= 64
    assert len(found) == 2


def test_nobodys_words_push_out_anothers() -> None:
    found: list[int] = []
    h = ForkDetection(0, lambda: found.append(1))
    a, b = b"a" * 32, b"b" * 32
    h.know(1, a)
    for version in range(2, 2 + KEPT_EACH):
        assert not h.contradicts(version, b, "honest")
    for version in range(1000, 1000 + 10 * KEPT_EACH):
        h.contradicts(version, b, "evil")
    for n in range(AUTHORS_MAX + 5):
        h.contradicts(2000, b, f"evil-{n}")
    assert len(h._said) == AUTHORS_MAX
    for version in range(2, 2 + KEPT_EACH):
        h.know(version, a)
    assert len(found) == KEPT_EACH
