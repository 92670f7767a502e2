"""What `isthmus doctor` says of a run's log, its owner and members, and of a bus that is not the run's."""

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from advice.doctors import ACCEPT, HEAL, Doctor, does, printed, small_run
from advice.followed import advises, mine, says
from advice.rows import A_GAP, row
from integration.test_full_store import IN_A_DISK_OF_ITS_OWN, own_mounts  # noqa: F401  (a fixture)
from isthmus.agent.speed import Speeds
from isthmus.codecs import kernels
from isthmus.doctor import log as doctor_log
from isthmus.doctor import trust
from isthmus.format.records import frame
from isthmus.format.records.keys import commit_key, members_key, version_in
from isthmus.format.rules import Pace, Rules
from isthmus.log import log_health
from isthmus.log.heal import newest_starts
from isthmus.log.log_health import STANDS
from isthmus.runtime.clock import Runtime, single_threaded
from isthmus_services.main import main
from isthmus_services.processes import isthmus_command
from isthmus_services.servers import Server
from support.world import World, newest_commit, seed_of, serving, train, world

PACE = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4096)


async def grown(w: World, versions: int, name: str = "s1") -> None:
    """Train until every fragment has so many versions more."""
    async with serving(w.syncer(name)) as syncer:
        until = min(k.head for k in syncer.coordinators) + versions
        learner = w.learner(f"l-{w.runtime.new_id()}")
        await train(learner, 4, enough=lambda: min(k.head for k in syncer.coordinators) >= until)


@asynccontextmanager
async def a_run(
    place: Path, fragments: int = 2, runtime: Runtime | None = None, pace: Pace = PACE
) -> AsyncIterator[World]:
    async with world(place, seed_of(Rules(fragments=fragments, sync_every=4), pace), runtime=runtime) as w:
        yield w


async def prints(doctor: Doctor, what: str, *words: str) -> str:
    """Run the doctor on a thread: the loop of the test goes on."""
    text: str = await asyncio.to_thread(getattr(doctor, what), *words)
    return text


# --- which run, and whose ---------------------------------------------------------------------------------------------


@dataclass
class Keys:
    """Files of keys, by name, and a signed run whose members are eu-1 (a learner) and s-1 (a syncer)."""

    folder: Path
    run: str
    unsigned: str

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    made = Keys(folder, str(folder / "run"), small_run(folder / "unsigned"))
    for name in ("owner", "eu-1", "s-1", "stranger", "other", "heir"):
        assert main(["keys", "new", name, "--folder", str(folder)]) == 0
    assert main(["init", made.run, "--key", made["owner"]]) == 0
    for name, role in (("eu-1", "learner"), ("s-1", "syncer")):
        words = ("members", "add", made.run, name, "--as", role, "--public-key", f"{made[name]}.pub")
        assert main([*words, "--key", made["owner"]]) == 0
    return made


EU = ("--role", "learner", "--learner", "eu-1")


@row(
    "doctor", "run: key: key …: No such file or directory: `isthmus keys new NAME` makes one",
    means="The file that --key or ISTHMUS_KEY names is not there.",
    do="correct --key (ISTHMUS_KEY) as this says", then="`ok run: key`, with the names of the key",
)  # fmt: skip
@row(
    "doctor", "run: key: key …: this is a public key; name the private key, the file without .pub",
    means="A public key signs nothing.",
    do="correct --key (ISTHMUS_KEY) as this says", then="`ok run: key`, with the names of the key",
)  # fmt: skip
@row(
    "doctor", "run: key: key …: others may read it (mode …): chmod 600 …",
    means="Other users of this machine could sign with the key, so no command takes it.",
    do="correct --key (ISTHMUS_KEY) as this says", then="`ok run: key`, with the names of the key",
)  # fmt: skip
def test_a_key_that_cannot_be_used(doctor: Doctor, keys: Keys, tmp_path: Path) -> None:
    key = tmp_path / "key"
    doctor.only("run: key: key …: No").finds(keys.run, *EU, "--key", str(key))
    key.write_bytes(Path(keys["eu-1"]).read_bytes())
    key.chmod(0o644)
    text = doctor.only("run: key: key …: others").finds(keys.run, *EU, "--key", str(key))
    mode, path = re.findall(r"chmod (\d+) (\S+)", text)[0]
    Path(path).chmod(int(mode, 8))
    text = doctor.only("run: key: key …: this").finds(keys.run, *EU, "--key", f"{keys['eu-1']}.pub")
    assert "ok      run: key" in doctor.finds_no_more(keys.run, *EU, "--key", str(key))


@row(
    "doctor", "run: owner: …: … name a .pub file, or give its line in quotes",
    means="--owner or ISTHMUS_OWNER is neither a fingerprint nor a file with a public key.",
    do="correct --owner (ISTHMUS_OWNER) as this says", then="`ok run: signatures`, with the owner",
)  # fmt: skip
@row(
    "doctor", "run: run-digest: run digest …: 32 to 64 hexadecimal digits, as `isthmus init` prints them",
    means="--run-digest or ISTHMUS_RUN_DIGEST is no digest.",
    do="correct --run-digest (ISTHMUS_RUN_DIGEST) as this says", then="no more word of it",
)  # fmt: skip
def test_an_owner_and_a_digest_that_cannot_be_read(
    doctor: Doctor, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    text = doctor.finds(keys.run, "--owner", f"{keys['owner']}.bup", "--run-digest", "xyz")
    digest = re.findall(r"run: run ([0-9a-f]+)", text)[0]
    assert len(digest) == 16, "the doctor prints less than what is asked for"
    assert main(["init", keys.run, "--key", keys["owner"]]) == 0
    digest = re.findall(r"[0-9a-f]{64}", capsys.readouterr().out)[0]
    doctor.finds_no_more(keys.run, "--owner", f"{keys['owner']}.pub", "--run-digest", digest)


@row(
    "doctor", "run: owner: …: this run's owner is SHA256:…, and must be SHA256:…: this is another run (under a charter, too, "
    "--owner names the key that created the run)",
    means="The run belongs to another key than this process demands. Processes with this demand do not start.",
    do="correct the URL; or, if this is the run you trust, pass --owner SHA256:…",
    then="`ok run: signatures`, with the owner",
)  # fmt: skip
@row(
    "doctor", "run: digest: …: this is another run than …",
    means="The run is not the one that this process demands.",
    do="correct the URL; or, if this is the run you trust, pass --run-digest …", then="no more word of it",
)  # fmt: skip
def test_another_owner_and_another_digest(doctor: Doctor, keys: Keys) -> None:
    text = doctor.finds(keys.run, "--owner", f"{keys['stranger']}.pub", "--run-digest", "0" * 32)
    owner, digest = re.findall(r"pass (--owner \S+)", text)[0], re.findall(r"pass (--run-digest \S+)", text)[0]
    doctor.finds_no_more(keys.run, *owner.split(), *digest.split())


@row(
    "doctor", "run: owner: …: this run's owner is nobody: nothing in it is signed, and must be SHA256:…: this is "
    "another run",
    means="An owner is demanded, and the run has none.",
    do="correct the URL; or, if this is the run you trust, pass no --owner (ISTHMUS_OWNER)", then="no more word of it",
)  # fmt: skip
@row(
    "doctor", "run: key: nothing in this run is signed, since it was created without an owner's key",
    means="A key is given for a run without signatures. Learners and syncers with a key do not start there.",
    do="leave --key out, and unset ISTHMUS_KEY", then="no more word of the key",
)  # fmt: skip
def test_a_key_and_an_owner_for_a_run_without(doctor: Doctor, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_KEY", keys["eu-1"])
    monkeypatch.setenv("ISTHMUS_OWNER", f"{keys['owner']}.pub")
    text = doctor.finds(keys.unsigned, *EU)
    for name in set(re.findall(r"(?:unset |no --owner \()(ISTHMUS_\w+)", text)):
        monkeypatch.delenv(name)
    doctor.finds_no_more(keys.unsigned, *EU)


@row(
    "doctor", "run: key: everything in this run is signed, and no key is given: … cannot take part",
    means="The role signs what it writes, and this process has no key.",
    do="pass the key of the … (--key …_KEY_FILE, or ISTHMUS_KEY)", then="`ok run: key`, with the names of the key",
)  # fmt: skip
def test_no_key(doctor: Doctor, keys: Keys) -> None:
    for role, key in (("learner", "eu-1"), ("syncer", "s-1"), ("owner", "owner")):
        text = doctor.finds(keys.run, "--role", role)
        assert f"pass the key of the {role} (" in text
        assert "ok      run: key" in doctor.finds_no_more(keys.run, "--role", role, "--key", keys[key])
    for role in ("operator", "reader", "follower"):
        assert "run: key" not in doctor.finds_no_more(keys.run, "--role", role), "nothing that they do is signed"


@row(
    "doctor", "run: key: SHA256:… is no member of this run",
    means="The membership names this key nowhere, so nobody takes what it signs.",
    do="the owner admits it: isthmus members add … --as … --public-key FILE.pub --key OWNER_KEY_FILE",
    then="`ok run: key`, with the names of the key",
)  # fmt: skip
@row(
    "doctor", "run: key: … was expelled by membership …, and the key is SHA256:…",
    means="The owner removed the member. What it signs from the stated commit on is not taken.",
    do="the owner admits it again: isthmus members add … --as … --public-key FILE.pub --key OWNER_KEY_FILE",
    then="`ok run: key`, with the names of the key",
)  # fmt: skip
def test_a_key_that_is_no_member(doctor: Doctor, keys: Keys) -> None:
    words = (keys.run, "--role", "learner", "--learner", "us-9", "--key", keys["stranger"])
    instead = {"FILE.pub": f"{keys['stranger']}.pub", "OWNER_KEY_FILE": keys["owner"]}
    text = doctor.only("run: key: SHA256").finds(*words)
    assert does(text, "members add", **instead) == 0
    assert "is a member: us-9 (learner)" in doctor.finds_no_more(*words)
    assert main(["members", "remove", keys.run, "us-9", "--key", keys["owner"]]) == 0
    text = doctor.only("run: key: …").finds(*words)
    assert does(text, "members add", **instead) == 0
    assert "is a member: us-9 (learner)" in doctor.finds_no_more(*words)


@row(
    "doctor", "run: key: SHA256:… is the key of …, and not of … (learner)",
    means="The key is a member's, under another name or in another role than it is used here.",
    do="pass the name and role of this key (--learner, --role), or the key of this …",
    then="`ok run: key`, with the names of the key",
)  # fmt: skip
@row(
    "doctor", "run: key: SHA256:… is the key of …, and not of …",
    means="The key is a member's, in another role than it is used here.",
    do="pass the name and role of this key (--learner, --role), or the key of this …",
    then="`ok run: key`, with the names of the key",
)  # fmt: skip
def test_a_key_of_another_name_or_role(doctor: Doctor, keys: Keys) -> None:
    for number, words in enumerate((("--learner", "us-1"), ())):
        text = replace(doctor, rows=[doctor.rows[number]]).finds(
            keys.run, "--role", "learner", *words, "--key", keys["s-1"]
        )
        name, role = re.findall(r"is the key of (\S+) \((\w+)\)", text)[0]
        assert name == "s-1"
        assert "ok      run: key" in doctor.finds_no_more(keys.run, "--role", role, "--key", keys["s-1"])
    first = replace(doctor, rows=[doctor.rows[0]])
    assert "members rotate" not in first.finds(keys.run, *EU, "--key", keys["s-1"])


@row(
    "doctor", "run: key: … has another key, SHA256:…, and not SHA256:…",
    means="The owner has given this name another key, or the key was made anew and the owner does not know it yet.",
    do="pass that key; or the owner gives … this one: isthmus members rotate … --member … --public-key FILE.pub --key "
    "OWNER_KEY_FILE",
    then="`ok run: key`, with the names of the key",
)  # fmt: skip
def test_a_name_with_another_key(doctor: Doctor, keys: Keys) -> None:
    words = (keys.run, *EU, "--key", keys["other"])
    text = doctor.finds(*words)
    doctor.finds_no_more(keys.run, *EU, "--key", keys["eu-1"])
    assert does(text, "members rotate", **{"FILE.pub": f"{keys['other']}.pub", "OWNER_KEY_FILE": keys["owner"]}) == 0
    doctor.finds_no_more(*words)
    doctor.finds(keys.run, *EU, "--key", keys["eu-1"])
    rotate = printed(text, "members rotate")
    assert main([{"FILE.pub": f"{keys['eu-1']}.pub", "OWNER_KEY_FILE": keys["owner"]}.get(w, w) for w in rotate]) == 0


@row(
    "doctor", "run: key: SHA256:… is not the owner's key; this is SHA256:…",
    means="The membership can be changed by another key only.",
    do="pass that key; or the owner hands over: isthmus members rotate … --successor NEW_OWNER_KEY_FILE --key OWNER_KEY_FILE",
    then="`ok run: key: … is the owner's key`",
)  # fmt: skip
def test_another_key_than_the_owners(doctor: Doctor, keys: Keys) -> None:
    words = (keys.run, "--role", "owner", "--key")
    text = doctor.finds(*words, keys["heir"])
    doctor.finds_no_more(*words, keys["owner"])
    assert does(text, "members rotate", NEW_OWNER_KEY_FILE=keys["heir"], OWNER_KEY_FILE=keys["owner"]) == 0
    assert "is the owner's key" in doctor.finds_no_more(*words, keys["heir"])
    assert does(text, "members rotate", NEW_OWNER_KEY_FILE=keys["owner"], OWNER_KEY_FILE=keys["heir"]) == 0


@row(
    "doctor", "run: key: SHA256:… is no owner's key; the charter names …",
    means="The run has a charter, and only the owners that it names change the membership, together.",
    do="pass one of these keys; or the owners agree on another charter",
    then="`ok run: key: … is the key of the owner …`",
)  # fmt: skip
def test_a_key_of_no_owner_in_the_charter(doctor: Doctor, keys: Keys, tmp_path: Path) -> None:
    run, file = str(tmp_path / "chartered"), tmp_path / "charter.toml"
    owners = [f'[[owner]]\nname = "{name}"\nkey = "{keys[name]}.pub"\n' for name in ("owner", "heir")]
    file.write_text("\n".join(["amend = 1\nadmit = 1\nexpel = 1", *owners]))
    assert main(["init", run, "--key", keys["owner"]]) == 0
    assert main(["charter", "propose", run, str(file), "--key", keys["owner"]]) == 0
    words = (run, "--role", "owner", "--key")
    doctor.finds(*words, keys["other"])
    assert "is the key of the owner heir" in doctor.finds_no_more(*words, keys["heir"])
    owners.append(f'[[owner]]\nname = "other"\nkey = "{keys["other"]}.pub"\n')
    file.write_text("\n".join(["amend = 1\nadmit = 1\nexpel = 1", *owners]))
    known = ("--owner", f"{keys['owner']}.pub")  # its first approval in this run
    assert main(["charter", "propose", run, str(file), "--key", keys["heir"], *known]) == 0
    doctor.finds_no_more(*words, keys["other"])


@row(
    "doctor", "run: signatures: nothing in this run is signed: anyone who can write to its store or bus can act as any "
    "participant",
    means="The store or the bus is not on this machine, and the run has no owner.",
    do="create runs with a key: isthmus init --key OWNER_KEY_FILE (SECURITY.md)", then="`ok run: signatures`",
)  # fmt: skip
def test_an_unsigned_run_elsewhere(doctor: Doctor, keys: Keys, redis: Server, folder: Path) -> None:
    elsewhere = ("--bus", redis.url.replace("127.0.0.1", "0.0.0.0"))  # not known to be this machine
    text = doctor.finds(keys.unsigned, *elsewhere)
    words = re.findall(r"isthmus (init --key) OWNER_KEY_FILE", text)[0].split()
    assert main([*words, keys["owner"], str(folder)]) == 0
    doctor.finds_no_more(str(folder), *elsewhere)


# --- the bus of the run -----------------------------------------------------------------------------------------------


@row(
    "doctor", "run: bus: nothing was committed yet, and no syncer is heard here: this may be the bus of its syncers, or another one",
    means="A new run: whether this is the bus of its syncers shows once one runs.",
    like="A wrong bus, while a syncer runs on another one and no learner has reached it.",
    do="start a syncer; or, if one runs, give --bus the URL that it has: redis://…; store: for the run's own store; or, for the "
    "bus.sqlite of a run in a folder, no --bus and no ISTHMUS_BUS",
    then="`ok run: bus: the run's syncers are heard here`",
)  # fmt: skip
async def test_the_bus_of_a_run_that_nobody_serves_yet(doctor: Doctor, folder: Path, redis: Server) -> None:
    async with a_run(folder) as w:
        text = await prints(doctor, "finds", str(folder), "--role", "learner", "--bus", redis.url)
        assert "note    run: bus" in text
        async with serving(w.syncer("s1")):
            assert "ok      run: bus" in await prints(doctor, "finds_no_more", str(folder), "--role", "learner")


@row(
    "doctor", "run: bus: the run was committed to … s ago, and none of its syncers is heard on this bus",
    means="Syncers commit, and they announce it elsewhere. Learners here would train on and never be merged.",
    like="A bus that was emptied just now: then the next check finds the syncers, a heartbeat later.",
    do="if one lives, this is not its bus: give --bus the URL that it has: redis://…; store: for the run's own store; or, for the "
    "bus.sqlite of a run in a folder, no --bus and no ISTHMUS_BUS; if none does, they have ended, and this bus was emptied: start "
    "one by its old command",
    then="`ok run: bus: the run's syncers are heard here`",
    lost="what learners trained on the other bus, but for a part of their newest updates",
)  # fmt: skip
async def test_the_bus_of_another_run(doctor: Doctor, folder: Path, redis: Server) -> None:
    async with a_run(folder) as w:
        assert "note    run: bus" in await prints(doctor, "finds_no_more", str(folder), "--bus", redis.url)
        await grown(w, 2)
        async with serving(w.syncer("s2")):
            for role in (("--role", "syncer"), ("--role", "learner")):
                await prints(doctor, "finds", str(folder), *role, "--bus", redis.url)
            assert "ok      run: bus" in await prints(doctor, "finds_no_more", str(folder))


@row(
    "doctor", "run: bus: no syncer is heard on this bus (none runs, or it has another), and the last commit is … old",
    means="The run stands still, so nothing shows whether this is its bus. It is a warning for `--role learner`: no learner "
    "is merged without a syncer.",
    do="unless the run is over, start a syncer; or, if one runs, give --bus the URL that it has: redis://…; store: for the run's "
    "own store; or, for the bus.sqlite of a run in a folder, no --bus and no ISTHMUS_BUS",
    then="`ok run: bus: the run's syncers are heard here`",
)  # fmt: skip
async def test_the_bus_of_another_run_while_the_run_stands_still(
    doctor: Doctor, folder: Path, redis: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "RECENT_S", 0.1)
    async with a_run(folder) as w:
        await grown(w, 2)
        async with serving(w.syncer("s2")):
            text = await prints(doctor, "finds", str(folder), "--role", "learner", "--bus", redis.url)
            assert "warning run: bus" in text
            assert "note    run: bus" in await prints(doctor, "finds", str(folder), "--bus", redis.url)
            assert "ok      run: bus" in await prints(doctor, "finds_no_more", str(folder), "--role", "learner")


@row(
    "doctor", "run: bus: syncers were heard here, and the last word of one is … to … s old; the last commit is … s old",
    means="All syncers have ended, or are cut off from this bus. Learners train on, and nothing is merged. It is a warning for "
    "`--role syncer`, where they stopped in order, and after a minute without a commit, since the run may be over.",
    do="unless the run is over: if a syncer lives (pgrep -af isthmus on its machine), ps -o stat= -p PID (its first log line has "
    "it) says T if it is frozen (kill -CONT PID wakes it) and D if it waits for a disk; else start one again by its old "
    "command; its log says why it ended (nothing, "
    "if it was killed: its machine or container engine may know)",
    then="`ok run: bus: the run's syncers are heard here`",
    lost=A_GAP,
)  # fmt: skip
async def test_syncers_that_have_ended(doctor: Doctor, folder: Path) -> None:
    async with a_run(folder) as w:
        await grown(w, 2)
        await asyncio.sleep(4 * w.run.pace.heartbeat_s)
        await prints(doctor, "finds", str(folder), "--role", "learner")
        async with serving(w.syncer("s2")):
            assert "ok      run: bus" in await prints(doctor, "finds_no_more", str(folder), "--role", "learner")


@row(
    "doctor", "run: bus: syncers were heard here, and the last word of one is … to … s old; the last commit is … s old; the "
    "store is full",
    means="The store takes no more objects, so that syncers cannot speak, or have ended.",
    do="make room first, as `store: may write` says. A syncer that still runs then goes on by itself; one that has ended is to "
    "be started again by its old command, unless the run is over",
    then="`ok store: may write`; without a syncer that runs, the finding stays, and says nothing of the store.",
    lost=A_GAP,
)  # fmt: skip
@pytest.mark.tier("all")
@pytest.mark.usefixtures("own_mounts")
async def test_syncers_on_a_full_disk(folder: Path, tmp_path: Path) -> None:
    (full,) = mine(test_syncers_on_a_full_disk)
    (ended,) = mine(test_syncers_that_have_ended)
    async with a_run(folder) as w:
        await grown(w, 2)
    disk, isthmus_ = tmp_path / "disk", " ".join(isthmus_command())
    disk.mkdir()
    examine = f"{isthmus_} doctor {disk}/run --role learner --size 0.02 --bus sqlite://{tmp_path}/bus.sqlite"
    script = f"""
        mount -t tmpfs -o size=64m tmpfs {disk} && cp -r {folder} {disk}/run && mv {disk}/run/bus.sqlite* {tmp_path}/ || exit 99
        dd if=/dev/zero of={disk}/filled bs=64k 2> /dev/null
        {examine} > {tmp_path}/full
        rm {disk}/filled
        {examine} > {tmp_path}/roomy
        true
    """
    command = [*IN_A_DISK_OF_ITS_OWN, "sh", "-c", script]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, after = (tmp_path / "full").read_text(), (tmp_path / "roomy").read_text()
    advises(full, said)
    assert (ended.do in said, "store: may write" in said) == (False, True), said
    advises(ended, after)
    assert not says(full, after)


# --- the log ----------------------------------------------------------------------------------------------------------


@row(
    "doctor", "log: clock: the syncer … dates its commits … s too early",
    means="The clock of the syncer's machine is wrong. `status`, the board and `export --at` show wrong times.",
    do="run an NTP client (chrony) on the machine of …", then="no more word of it, once the syncer commits again",
)  # fmt: skip
@row(
    "doctor", "log: clock: the syncer … dates its commits … s in the future",
    means="The clock of the syncer's machine is wrong. `status`, the board and `export --at` show wrong times.",
    do="run an NTP client (chrony) on the machine of …", then="no more word of it, once the syncer commits again",
)  # fmt: skip
async def test_a_syncer_with_a_wrong_clock(doctor: Doctor, folder: Path) -> None:
    r = single_threaded(0)
    for number, (off_s, words) in enumerate([(-3600.0, "too early"), (7200.0, "in the future")]):
        off = Runtime(r.now, lambda off_s=off_s: r.wall() + off_s, r.random, r.offload, r.new_id)  # type: ignore[misc]
        place = folder / str(number)
        async with a_run(place, runtime=off) as w:
            await grown(w, 2, "far-syncer")
            d = Doctor([one for one in doctor.rows if one.said.endswith(words)], doctor.capsys)
            assert "machine of far-syncer" in await prints(d, "finds", str(place))
        async with a_run(place, runtime=r) as w:  # NTP has set the clock
            await grown(w, 6, "far-syncer")
            if words == "too early":
                await prints(d, "finds_no_more", str(place))
    async with a_run(folder / "2") as w:
        await grown(w, 2)
        await prints(doctor, "finds_no_more", str(folder / "2"))


async def test_a_copy_of_a_run_shows_no_wrong_clock(doctor: Doctor, folder: Path) -> None:
    doctor = replace(doctor, rows=[one for one in mine(test_a_syncer_with_a_wrong_clock) if one.said.endswith("early")])
    assert doctor.rows
    r = single_threaded(0)
    ago = Runtime(r.now, lambda: r.wall() - 300.0, r.random, r.offload, r.new_id)
    async with a_run(folder, runtime=ago) as w:
        await grown(w, 2, "s")
        await asyncio.sleep(doctor_log.COPIED_S)
        await grown(w, 4, "s")
    await prints(doctor, "finds", str(folder))  # these dates are as far apart as the commits: the clock is wrong
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy, copy_function=shutil.copy)
    await prints(doctor, "finds_no_more", str(copy))


@row(
    "doctor", "log: commits: fragment … has a hole in its history (the run goes on): …: is missing, and version … is there…",
    means="An object of the log was lost that syncers and learners do not need: a newer snapshot is there.",
    do=ACCEPT, then="`ok log: commits` once the object is restored from a backup",
)  # fmt: skip
@row(
    "doctor", "log: commits: … more fragments have such a hole, too",
    means="The doctor names eight holes in the history, and counts the others.",
    do=ACCEPT, then="`ok log: commits`",
)  # fmt: skip
@row(
    "doctor", "log: commits: … more fragments are damaged",
    means="More fragments have such damage than are named.",
    do=HEAL, then="`ok log: commits`",
)  # fmt: skip
async def test_holes_in_the_log(doctor: Doctor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_run(folder, fragments=8) as w:
        await grown(w, 6)
        kept = {key: await w.store.get(key) for key in (*(commit_key(p, 2) for p in range(7)), commit_key(7, 1))}
        for key in kept:
            await w.store.delete(key)
        await w.store.put(commit_key(7, 1), b"nonsense")
        monkeypatch.setattr(doctor_log, "NAMED_MAX", 4)
        monkeypatch.setattr(doctor_log, "SAMPLED", 1000)  # as if the doctor ran often enough
        hole, more_holes, more_damage = (
            doctor.only(f"log: commits: {said}") for said in ("fra", "… more fragments h", "… more fragments a")
        )
        text = await prints(hole, "finds", str(folder))
        await prints(more_holes, "finds", str(folder))
        assert re.findall(r"^warning log: commits: (?:fragment )?(\d)", text, re.MULTILINE) == [*"0123", "4"]
        newest = {p: commit_key(p, (await newest_commit(w, p)).version) for p in range(6)}
        whole = {key: await w.store.get(key) for key in newest.values()}
        for key in whole:
            await w.store.put(key, b"nonsense")
        text = await prints(more_damage, "finds", str(folder))
        assert re.findall(r"^failure log: commits: (?:fragment )?(\d)", text, re.MULTILINE) == 2 * [*"0123", "2"]
        for key, blob in whole.items():
            await w.store.put(key, bytes(blob))
        text = await prints(hole, "finds", str(folder))
        doctor.capsys.readouterr()
        code = await asyncio.to_thread(does, text, "heal")
        said = doctor.capsys.readouterr().out
        assert code == 1
        for key, blob in kept.items():
            assert key in " ".join(said.split()), "heal names what to restore"
            await w.store.put(key, bytes(blob))
        assert "ok      log: commits" in await prints(doctor, "finds_no_more", str(folder))


@row(
    "doctor", "log: commits: fragment … has a hole in its history (the run goes on): …: not a commit: …",
    means="A commit was overwritten. The doctor reads the newest commits and 32 others at random, so that it may find an old "
    "one only when it runs again. Since the run goes on without it, this is a warning, after all that is a failure.",
    do=ACCEPT, then="`ok log: commits` once the object is restored from a backup",
)  # fmt: skip
@row(
    "doctor",
    "log: commits: fragment … has a hole in its history (the run goes on): …: is not the commit that … names as the one before "
    "it: restore it from a backup: `isthmus replay` needs it, and a learner with an older checkpoint may",
    means="A commit was overwritten by another one, which is whole in itself.",
    do=ACCEPT, then="`ok log: commits` once the object is restored from a backup",
)  # fmt: skip
async def test_old_commits_that_were_overwritten(doctor: Doctor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_run(folder, fragments=8) as w:
        await grown(w, 6)
        kept = {commit_key(p, 1): await w.store.get(commit_key(p, 1)) for p in (3, 5)}
        await w.store.put(commit_key(3, 1), b"nonsense")
        commit = await w.log.commit(5, 1)
        assert commit is not None
        other = msgspec.structs.replace(commit.header, attempt="another")
        await w.store.put(commit_key(5, 1), bytes(frame.draft(frame.Kind.COMMIT, other).blob))
        monkeypatch.setattr(doctor_log, "SAMPLED", 1000)  # as if the doctor ran often enough
        text = await prints(doctor, "finds", str(folder))
        doctor.capsys.readouterr()
        assert await asyncio.to_thread(does, text, "heal") == 1
        said = " ".join(doctor.capsys.readouterr().out.split())
        assert commit_key(3, 1) in said, "heal names what to restore"
        assert f"{commit_key(5, 2)}: follows commit " in said, "heal cannot tell which of the two is the other one"
        for key, blob in kept.items():
            await w.store.put(key, bytes(blob))
        text = await prints(doctor, "finds_no_more", str(folder))
        assert "is missing, by their names; the newest and " in text


@row(
    "doctor", "log: fold: no syncer can start with fragment …: …",
    means="An update or a snapshot that a new syncer reads is missing or damaged. A syncer that runs may still have the state.",
    do=HEAL, then="`ok log: fold`, once heal has restarted the fragment, or once the object is restored from a backup",
    lost="what `isthmus heal` then says",
)  # fmt: skip
@row(
    "doctor", "log: fold: … of … fragments were folded to their ends; the others were not read: the doctor reads … MiB for this",
    means="The doctor reads 64 MiB to find fragments that cannot be folded. The rest is large.",
    do="isthmus heal … says it of all of them", then="heal's diagnosis of each fragment",
)  # fmt: skip
async def test_a_fragment_that_cannot_be_folded(doctor: Doctor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_run(folder) as w:
        async with serving(w.syncer("s0"), killed=True) as syncer:  # it writes no snapshot
            await train(w.learner("a"), 4, enough=lambda: min(k.head for k in syncer.coordinators) >= 4)
        large, most = doctor.only("log: fold: …"), doctor_log.FOLDED_MOST
        monkeypatch.setattr(doctor_log, "FOLDED_MOST", 1)
        text = await prints(large, "finds", str(folder))
        assert await asyncio.to_thread(does, text, "heal") == 0
        monkeypatch.setattr(doctor_log, "FOLDED_MOST", most)
        assert "ok      log: fold" in await prints(doctor, "finds_no_more", str(folder))
        commit = await w.log.commit(0, 3)
        assert commit is not None
        key = commit.header.inputs[0].key
        kept = bytes(await w.store.get(key))
        await w.store.put(key, bytes(len(kept)))
        text = await prints(doctor.only("log: fold: no"), "finds", str(folder))
        assert re.search(r"failures?, to look at first:\nfailure log: fold: ", text)
        doctor.capsys.readouterr()
        assert await asyncio.to_thread(does, text, "heal") == 1
        assert "--apply restarts it" in " ".join(doctor.capsys.readouterr().out.split())
        await w.store.put(key, kept)
        assert "ok      log: fold" in await prints(doctor, "finds_no_more", str(folder))


@row(
    "doctor", "log: holes: accepted as lost: …, where the run goes on without them",
    means="`--accept-hole` (ISTHMUS_ACCEPT_HOLE) names these versions. Other damage of these fragments is still a failure.",
    do="without --accept-hole the doctor looks for them again", then="a warning of `log: commits` names what is lost",
)  # fmt: skip
@pytest.mark.parametrize("gone", [True, False], ids=["missing", "damaged"])
async def test_a_hole_that_is_accepted(
    doctor: Doctor, folder: Path, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_log, "SAMPLED", 1000)  # the commits before and after the hole are read, too
    async with a_run(folder) as w:
        await grown(w, 20)
        await (w.store.delete(commit_key(0, 2)) if gone else w.store.put(commit_key(0, 2), b"nonsense"))
        accept = ("--accept-hole", "0/2")
        text = await prints(doctor, "finds_no_more", str(folder))
        assert "warning log: commits: fragment 0 has a hole" in text, text
        text = await prints(doctor, "finds", str(folder), *accept)
        assert "failure" not in text.replace("0 failures", "")
        assert "note    log: holes: accepted as lost: 0/2" in text
        await w.store.delete(commit_key(0, 3))
        text = await prints(doctor, "finds", str(folder), *accept)
        assert re.search(rf"warning log: commits: .*{commit_key(0, 3)}", text), text
        newest = await newest_commit(w, 1)
        await w.store.put(commit_key(1, newest.version), b"nonsense")
        text = await prints(doctor, "finds", str(folder), *accept)
        real, hole, note = (text.index(f"{of} log: ") for of in ("failure", "warning", "note   "))
        assert real < hole < note, "what must be mended comes first"
        assert text.count("has a hole") == 1, "among the failures to look at first is no hole"


async def test_the_doctor_reads_other_old_commits_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_log, "SAMPLED", 4)
    async with a_run(folder) as w:
        await grown(w, 8)
        found = await log_health.look(w.log)
        drawn = [doctor_log._sample(found, w.runtime) for _ in range(64)]
        heads = [head.version for head in found.heads if head is not None]
    assert all(len(set(one)) == 4 for one in drawn)
    assert {one for sample in drawn for one in sample} == {(p, v) for p in (0, 1) for v in range(1, heads[p])}


@row(
    "doctor", "log: commits: … version … of fragment …, and its log ends at version …: no update on that version can be merged",
    means="The last commit of a fragment is gone. Only what learners have of it shows that it was there.",
    do="restore commits/… and what follows it from a backup. Without one, stop all learners and syncers, "
    "delete the checkpoints that isthmus heal … then names, since they know the lost version (a learner "
    "that is started names its own, too), and start them again: the fragment goes on from version …; a "
    "learner that has no older checkpoint goes on with the run's model alone, from its first step",
    then="no more word of it",
    lost="without a backup: what the commit merged, and what learners trained since; of a learner whose checkpoints all know "
    "it also its optimizer state, its step and its place in the data",
)  # fmt: skip
@row(
    "doctor", "log: commits: … more fragments lack versions that learners have",
    means="The same of so many others.",
    do=HEAL,
    then="no more word of it",
)  # fmt: skip
async def test_a_lost_newest_commit_that_a_checkpoint_knows(
    doctor: Doctor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_log, "NAMED_MAX", 2)
    async with a_run(folder, fragments=4) as w:
        async with serving(w.syncer("s1"), killed=True) as syncer:
            await train(
                w.learner("l0", checkpoint_s=0.1), 40, enough=lambda: min(k.head for k in syncer.coordinators) >= 2
            )
        ((_, seen),) = (await newest_starts(w.log)).seen
        for p, settled_to in enumerate(seen):
            for path in (folder / "updates" / f"{p:05d}" / "l0").iterdir():
                if version_in(str(path)) >= settled_to:
                    path.unlink()
        lost = [p for p in (folder / "commits").rglob("*") if p.is_file() and int(p.name) >= seen[int(p.parent.name)]]
        kept = {path: path.read_bytes() for path in lost}
        for path in lost:
            path.unlink()
        text = await prints(doctor, "finds", str(folder))
        assert text.count("failure log: commits: l0 has") == 2 * 2, "so many are named, in the list and at its end"
        assert "2 more fragments lack versions that learners have" in text
        assert "none of" not in text, "nobody calls this log whole"
        for path, blob in kept.items():
            path.write_bytes(blob)
        await prints(doctor, "finds_no_more", str(folder))


@row(
    "doctor", "log: progress: fragment … stands still: most others were merged at least 8 times since then",
    means="One part of the model is not merged any more. Learners go on with what they have of it.",
    do=f"the syncers' logs say why; {HEAL}",
    then="no more word of it, once the fragment is merged again",
    lost="what learners trained of this fragment meanwhile, beyond their newest update",
)  # fmt: skip
async def test_a_fragment_that_stands(doctor: Doctor, folder: Path) -> None:
    async with a_run(folder, fragments=3) as w:
        async with serving(w.syncer("s1")) as syncer:
            await w.store.put(commit_key(0, 4), b"nonsense")
            moved = syncer.coordinators[1:]
            await train(w.learner("l0"), 40, enough=lambda: min(k.head for k in moved) >= 4 + STANDS)
        text = await prints(doctor, "finds", str(folder))
        doctor.capsys.readouterr()
        await asyncio.to_thread(does, text, "heal")
        said = " ".join(doctor.capsys.readouterr().out.split())
        assert commit_key(0, 4) in said, "heal names the object to delete"
        await w.store.delete(commit_key(0, 4))
        await grown(w, 2 * STANDS)
        await prints(doctor, "finds_no_more", str(folder))


@row(
    "doctor", "log: size: nothing was collected in … versions: the run grows until its store is full",
    means="Nobody deletes what the run does not need any more.",
    do="isthmus gc … lists what can be deleted, --apply deletes it, and --apply --every 3600 repeats this hourly",
    then="no more word of it",
)  # fmt: skip
async def test_a_run_that_nobody_collects(doctor: Doctor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_health, "GROWN", 6)
    async with a_run(folder, pace=msgspec.structs.replace(PACE, snapshot_every=3)) as w:
        await grown(w, 8)
    os.utime(min((folder / "values/00000").iterdir()), (time.time() - log_health.LEFT_S - 60.0,) * 2)
    text = await prints(doctor, "finds", str(folder))
    young = ("--keep", "2", "--min-age", "0")
    assert await asyncio.to_thread(main, [*printed(text, "gc"), "--apply", *young]) == 0
    await prints(doctor, "finds_no_more", str(folder))


SLOW = Speeds(add_s=1.0, round_s=4.0, flop_s=1e3)


@row(
    "doctor", "machine: merging: merging every fragment once takes … s of … cores, and learners have a new update for "
    "each every … s (… steps): rounds will come late and work will be lost",
    means="Syncers like this machine cannot keep up with the learners.",
    do="Give syncers more cores or faster ones (this one: …), or create a run with a longer sync_every",
    then="`ok machine: merging`",
    lost="updates that come while a round is merged are replaced by later ones, which contain their work",
)  # fmt: skip
async def test_a_machine_that_merges_too_slowly(doctor: Doctor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_run(folder) as w:
        await grown(w, 2)
    monkeypatch.setattr(doctor_log, "glance", lambda *_: SLOW)
    await prints(doctor, "finds", str(folder))
    monkeypatch.undo()  # a faster machine
    assert "ok      machine: merging" in await prints(doctor, "finds_no_more", str(folder))


@row(
    "doctor", "log: commits: the log cannot be read: members/…: is no membership: …",
    means="The list of members is damaged. Nobody can start.",
    do="restore members/… from a backup: nobody can tell without it who may write to this run",
    then="`ok log: commits`",
)  # fmt: skip
def test_a_membership_that_is_damaged(doctor: Doctor, keys: Keys) -> None:
    path = Path(keys.run) / members_key(1)
    kept = path.read_bytes()
    path.write_bytes(kept[:-9])
    text = doctor.finds(keys.run)
    assert f"restore {members_key(1)} from" in text
    path.write_bytes(kept)
    doctor.finds_no_more(keys.run)


@row(
    "doctor", "store: run: …: this run uses arithmetic …, this release has …: use the release that created the run",
    means="The run was created by a release whose merges give other bits than this one's.",
    do="install the release of Isthmus that created the run", then="`ok store: run`",
)  # fmt: skip
def test_another_arithmetic(doctor: Doctor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ARITHMETIC", kernels.ARITHMETIC + 1)  # stands for another release
    small_run(folder)
    monkeypatch.undo()
    doctor.finds(str(folder))
    monkeypatch.setattr(kernels, "ARITHMETIC", kernels.ARITHMETIC + 1)
    doctor.finds_no_more(str(folder))


@row(
    "doctor", "store: run: …/run: not a run object of this release: …",
    means="The object that describes the run is damaged, or of a release that this one cannot read.",
    do="if another release created the run, use that one; else end no syncer: move this object away, and one that runs writes it "
    "again within a minute (in a signed run few may, and its log says so); if none runs, restore it from a backup",
    then="`ok store: run`, with the run's digest",
)  # fmt: skip
def test_a_run_object_that_is_damaged(doctor: Doctor, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = (Path(small_run(folder)) / "run").read_bytes()
    (folder / "run").write_bytes(kept[: len(kept) // 2])
    doctor.finds(str(folder))
    assert main(["status", str(folder)]) == 1
    assert capsys.readouterr().err.count("; if none runs, restore it from a backup") == 1
    (folder / "run").write_bytes(kept)
    doctor.finds_no_more(str(folder))


@row(
    "doctor", "store: run: the run object … is gone, and … lie beside it (processes that run go on, and none can start): "
    "end no syncer, as one that runs writes it again within a minute (in a signed run few may, and its log says so); else run the same `isthmus create` again if that made the run, or restore it from a backup, or choose another "
    "location; do not create a run here",
    means="The run object was deleted, and the log is still there. Status, learners and syncers say the same. Processes "
    "that run already go on; none can start. A new run at this place would make the log worthless. Syncers know the bytes, and "
    "look for the object once a minute.",
    do="restore …/run from a backup, unless a syncer runs", then="`ok store: run`, with the run's digest",
    lost="without a backup or a syncer that may write it: the run, except what `isthmus follow` or an export brought elsewhere",
)  # fmt: skip
def test_a_run_object_that_is_gone(doctor: Doctor, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(_one_commit(folder))
    kept = (folder / "run").read_bytes()
    (folder / "run").unlink()
    (place,) = set(re.findall(r"→ restore (\S+) from a backup, unless", doctor.finds(str(folder))))
    assert main(["init", str(folder)]) == 2, "init creates no run beside the log of another one"
    assert not (folder / "run").exists()
    assert main(["status", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("do not create a run here") == 2
    assert "`isthmus init" not in said
    Path(place).write_bytes(kept)
    doctor.finds_no_more(str(folder))


async def _one_commit(folder: Path) -> None:
    async with a_run(folder) as w:
        await grown(w, 1)


@row(
    "doctor", "store: run: …: no run here; did you mean …?",
    means="The run is in a folder `run` below the given place, as a demo makes it.",
    do="name …", then="`ok store: run`",
)  # fmt: skip
def test_a_folder_around_a_run(doctor: Doctor, folder: Path) -> None:
    small_run(folder)
    named = re.findall(r"→ name (\S+)", doctor.finds(str(folder.parent)))
    assert named == [str(folder)]
    doctor.finds_no_more(*named)
