"""What is printed in a signed run, where commands need keys, and what comes of following it."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from advice.doctors import KEYED
from advice.followed import advises, command_in, commands_in, isthmus, keyed, mine
from advice.heals import spoil_update
from advice.lives import FEW, training
from advice.rows import GAP, row
from advice.test_every_sentence import ROOT, texts
from advice.test_gc import SNAPSHOTS, objects
from isthmus.doctor.advice import IN_AZURE, IN_BUCKET, IN_FOLDER, IN_GOOGLE, Advice, freeing
from isthmus.errors import StoreFull
from isthmus.format.records import frame
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import commit_key
from isthmus.format.signing import Signer
from isthmus.format.signing.keys import write_signer
from isthmus.log import log_health
from isthmus.log.holes import ask_heal
from isthmus_services.commands import create
from support.signed import EU, OWNER, SYNC, US, C, L, S, admit
from support.world import World, newest_commit, serving, train, until, world

FILES = {"syncer": SYNC, "collector": US, "learner": EU, "owner": OWNER}


def files_of(folder: Path) -> dict[str, Path]:
    """Write the key of each role into a file; return the files, by role."""
    for role, signer in FILES.items():
        write_signer(folder / role, signer, role)
    return {role: folder / role for role in FILES}


async def merged(w: World, versions: int) -> None:
    """Train as members until each fragment has this many versions; then the only syncer is killed."""
    await admit(w, ("a", L, EU), ("s0", S, SYNC), ("gc", C, US))
    async with serving(w.by(SYNC).syncer("s0"), killed=True) as syncer:
        await train(w.by(EU).learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= versions)


@row(
    "heal",
    "dry run: nothing was written; use --apply --key",
    means="The same in a signed run: whoever restarts a fragment signs that as a syncer.",
    do="use --apply --key SYNCER_KEY_FILE, as a syncer, to restart the fragments as described above",
    then="`… healed` in the last line.",
)
async def test_healing_a_signed_run(folder: Path, tmp_path: Path) -> None:
    (dry,) = mine(test_healing_a_signed_run)
    files = files_of(tmp_path)
    async with world(folder, replace(FEW, signer=OWNER)) as w:
        await merged(w, 4)
        (await spoil_update(w, folder)).unlink()
        _, told = await isthmus("status", w.run.url, "--bus", w.bus.url)
        assert "with --apply --key SYNCER_KEY_FILE as a syncer" in told
        words = command_in(told, "heal")
        code, told = await isthmus(*words)
        assert code == 1
        advises(dry, told)
        flags = re.search(r"use (--apply --key \w+),", told)
        assert flags is not None
        code, told = await isthmus(*words, *keyed(flags[1].split(), files))
        assert (code, "healed: version" in told) == (0, True), told


@row(
    "status",
    "the log of fragment … is damaged: commits/…: not a syncer's commit: …",
    means="In a signed run: an object lies under the key of a commit, and no syncer of this run's members has signed it.",
    do="isthmus heal … says what can be done",
    then="Once the object is gone, `isthmus heal` calls the fragment sound, and it moves again.",
    lost="nothing, if it was put there by a stranger; if a commit was overwritten: what that one merged",
)
@row(
    "heal",
    "fragment … cannot be healed: an object that is no commit is in the place of the next one: commits/…: not a syncer's commit: …",
    means="In a signed run: what lies under the key of the fragment's next commit was signed by no syncer of its members.",
    do="If it was a commit, restore it from a backup. If it was not, or there is no backup, stop all syncers, delete … with "
    "the credentials of the store's administrator (no participant may delete it), and start them again: they go on from "
    "version …; start learners that ended meanwhile, too",
    then="`isthmus heal` calls the fragment sound, and it moves again. Whoever could write there has a syncer's rights to the "
    "store: replace that role's credentials.",
    lost="if it was the last commit: what that one merged",
)
@pytest.mark.parametrize("forger", [EU, None], ids=["signed by a learner", "unsigned"])
async def test_a_commit_that_no_syncer_signed(folder: Path, forger: Signer | None) -> None:
    noticed, here = mine(test_a_commit_that_no_syncer_signed)
    async with world(folder, replace(FEW, signer=OWNER)) as w:
        await merged(w, 4)
        newest = await newest_commit(w, 0)
        body = frame.draft(
            Kind.COMMIT, msgspec.structs.replace(newest.header, version=newest.version + 1, previous=newest.digest)
        ).blob
        frame.seal(body, forger)
        await w.store.create(commit_key(0, newest.version + 1), body)
        _, told = await isthmus("status", w.run.url, "--bus", w.bus.url)
        advises(noticed, told)
        code, told = await isthmus(*command_in(told, "heal"))
        assert code == 1
        advises(here, told)
        found = re.search(r"delete (\S+) with .* they go on from version (\d+)", " ".join(told.split()))
        assert found is not None
        assert int(found[2]) == newest.version
        Path(found[1]).unlink()
        async with serving(w.by(SYNC).syncer("s0")) as syncer, training(w.by(EU).learner("a")):
            await until(lambda: syncer.coordinators[0].head > newest.version, "the fragment moves")
        assert (await isthmus("heal", w.run.url))[0] == 0


@row(
    "gc",
    "dry run: nothing was deleted; use --apply --key",
    means="The same in a signed run: whoever collects must be a member with the role collector.",
    do="use --apply --key COLLECTOR_KEY_FILE to delete",
    then="`done`, and the objects are gone.",
)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(IN_BUCKET, id="bucket"),
        pytest.param(IN_GOOGLE, id="google", marks=pytest.mark.tier("all")),
        pytest.param(IN_AZURE, id="azure", marks=pytest.mark.tier("all")),
        pytest.param(IN_FOLDER, id="folder"),
    ],
)
async def test_making_room_in_a_signed_run(folder: Path, tmp_path: Path, kind: Advice) -> None:
    (dry,) = mine(test_making_room_in_a_signed_run)
    files = files_of(tmp_path)
    full = freeing(kind.full, str(folder), signed=True)
    chain = [words for words in commands_in(full) if words[0] == "gc"]
    assert len(chain) == 3
    async with world(folder, replace(SNAPSHOTS, signer=OWNER)) as w:
        await merged(w, 20)
        before = objects(folder)
        code, told = await isthmus("gc", w.run.url, "--keep", "1", "--min-age", "0")
        assert code == 0
        advises(dry, told)
        for words in chain:
            assert (await isthmus(*words))[0] == 2, "the word for the key's file is no file"
            code, told = await isthmus(*keyed(words, files))
            assert code == 0, told
        assert objects(folder) < before


def test_what_is_printed_of_a_full_store() -> None:
    """The error knows nothing of the run: it says which key a signed one needs."""
    assert "(in a signed run with --key COLLECTOR_KEY_FILE)" in str(StoreFull("s3://b/r", "s3://b/r", "quota"))
    words = freeing(IN_FOLDER.full, "/r", signed=True)
    assert re.search(".+?".join(map(re.escape, KEYED.split(GAP))), words)
    assert "--key" not in freeing(IN_FOLDER.full, "/r", signed=False)
    assert "--key" not in ask_heal("/r", signed=False)
    assert "--apply --key COLLECTOR_KEY_FILE --every 3600" in log_health.collects("/r", 99, signed=True)


@pytest.mark.parametrize("path", sorted([*(ROOT / "pkg/isthmus").rglob("*.py"), *(ROOT / "services").rglob("*.py")]))
def test_every_printed_command_has_room_for_a_key(path: Path) -> None:
    """A command that writes, or the doctor for a member, is followed by a gap, which has the key, or by the key."""
    writes = re.compile(r"isthmus (?:gc|heal) [^;,]*?--apply(?!\{key\}|…|%s| --key)")
    doctor = re.compile(r"isthmus doctor [^;,]*?--role (?:syncer|collector|learner)(?! --key|…| --learner …)")
    known = set(create.COMMANDS.values())  # their folders' environment names the key
    bare = [text for text in texts(path) - known if writes.search(text) or doctor.search(text)]
    assert not [text for text in bare if "`" not in text], "add wording.key_flag"
    for text in texts(path):
        assert not re.search(r"--key (?:FILE|OWNER|KEY)\b(?!_)", text), "say whose key: wording.key_file"


async def test_a_signed_run_that_is_not_on_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`isthmus create` names the commands that make one in a folder, as docs/deploy.md does; they work as printed."""
    monkeypatch.chdir(tmp_path)
    place = str(tmp_path / "run")
    code, told = await isthmus("create", place, "--learner", "eu-1")
    assert code == 2, told
    told = " ".join(told.split())
    each = (
        re.match(r"keys new [\w-]+ --folder \.|init \S+ --key \w+|members add .*? --key owner", after)
        for after in told.split("isthmus ")
    )
    commands = [found[0] for found in each if found]
    assert [words.split()[0] for words in commands] == [*3 * ["keys"], "init", "members", "members"], told
    for words in commands:
        code, said = await isthmus(*words.split())
        assert code == 0, (words, said)
    for name, role in (("syncer", "syncer"), ("eu-1", "learner")):
        flags = ("--role", role, "--key", name, "--size", "0.02", *(("--learner", name) if role == "learner" else ()))
        assert f"is a member: {name} ({role})" in (await isthmus("doctor", place, *flags))[1]
