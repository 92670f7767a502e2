"""What `isthmus doctor` says of the machine that it runs on."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from advice.doctors import FREES, Doctor, small_run
from advice.rows import A_GAP, row
from integration.test_full_store import IN_A_DISK_OF_ITS_OWN, own_mounts  # noqa: F401  (a fixture)
from isthmus.codecs.kernels import ARITHMETIC
from isthmus.doctor import machine
from isthmus_services.processes import isthmus_command

ISTHMUS = " ".join(isthmus_command())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the place of a small run in a folder."""
    return small_run(tmp_path_factory.mktemp("run") / "run")


@row(
    "doctor", "machine: disk: … free below …",
    means="The disk of the run's folder is nearly full: a warning below 2 GiB, a failure below 100 MiB.",
    do=f"make room: {FREES}", then="`ok machine: disk`",
)  # fmt: skip
@row(
    "doctor", "store: may write: … is full (No space left on device): give it more space, or free what the run does not "
    "need any more: isthmus gc … lists what can be deleted, and --apply deletes it (in a signed run "
    "with --key COLLECTOR_KEY_FILE)",
    means="The store takes no more objects. Learners train on; no round goes on.",
    do=f"make room: {FREES}. Until then nothing is merged; learners train on",
    then="`ok store: may write`",
    lost=A_GAP,
)  # fmt: skip
@pytest.mark.tier("all")  # integration/test_full_store.py covers the main case
@pytest.mark.usefixtures("own_mounts")
def test_a_disk_without_room(doctor: Doctor, run: str, tmp_path: Path) -> None:
    """A file system of 64 MB is filled. The command of the advice runs there, and the disk grows, up to 4 GB."""
    disk, out = tmp_path / "disk", tmp_path
    disk.mkdir()
    script = f"""
        mount -t tmpfs -o size=64m tmpfs {disk} && cp -r {run} {disk}/run || exit 99
        {ISTHMUS} doctor {disk}/run --size 100 > {out}/large
        head -c 100M /dev/zero > {disk}/ballast 2> /dev/null
        {ISTHMUS} doctor {disk}/run --size 0.02 > {out}/full; echo $? >> {out}/full
        isthmus=$(sed -n 's/.*isthmus \\(gc .* --min-age 0\\) keeps.*/\\1/p' {out}/full | head -1)
        {ISTHMUS} $isthmus > {out}/gc 2>&1; echo $? >> {out}/gc
        mount -o remount,size=1g {disk}; {ISTHMUS} doctor {disk}/run --size 0.02 > {out}/low
        mount -o remount,size=4g {disk}; {ISTHMUS} doctor {disk}/run --size 0.02 > {out}/roomy
    """
    done = subprocess.run([*IN_A_DISK_OF_ITS_OWN, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = {name: (out / name).read_text() for name in ("full", "gc", "low", "roomy")}
    assert said["full"].splitlines()[-1] == "1"
    assert said["gc"].splitlines()[-1] == "0", said["gc"]
    told = doctor.of(said)
    told.finds("full")
    told.only("machine").finds("low")
    assert re.search(r"^failure machine: disk", said["full"], re.MULTILINE)
    assert re.search(r"^warning machine: disk", said["low"], re.MULTILINE)
    told.finds_no_more("roomy")
    large = re.search(r"^failure store: bandwidth: .* is full .*\n +→ (.*)$", (out / "large").read_text(), re.MULTILINE)
    assert large is not None, "an object that is larger than the room"
    assert large[1].startswith("make room: ")


@row(
    "doctor", "machine: disk: … and room for … (inodes: df -i) free below …",
    means="The file system of the run's folder can hold few more files, whatever the bytes that are left: a warning below "
    "100,000, a failure below 1,000.",
    do=f"make room: {FREES}", then="`ok machine: disk`",
)  # fmt: skip
@row(
    "doctor", "store: may write: … is full (it can hold no more files: df -i): give it more inodes, or free what the run does "
    "not need any more: isthmus gc … lists what can be deleted, and --apply deletes it (in a signed run with --key "
    "COLLECTOR_KEY_FILE)",
    means="The store takes no more objects: a run is thousands of files, and this file system has as many as it can.",
    do=f"make room: {FREES}. Until then nothing is merged; learners train on",
    then="`ok store: may write`",
    lost=A_GAP,
)  # fmt: skip
@pytest.mark.tier("all")
@pytest.mark.usefixtures("own_mounts")
def test_a_disk_without_inodes(doctor: Doctor, run: str, tmp_path: Path) -> None:
    """It is enlarged while processes run, as the advice has it. (A `tmpfs` can be; others need a new file system.)"""
    disk, out = tmp_path / "disk", tmp_path
    disk.mkdir()
    files = 2 + sum(1 for _ in Path(run).rglob("*"))
    script = f"""
        mount -t tmpfs -o size=4g,nr_inodes={files + 2000} tmpfs {disk} && cp -r {run} {disk}/run || exit 99
        {ISTHMUS} doctor {disk}/run --size 0.02 > {out}/low
        n=0; while touch {disk}/$n 2> /dev/null; do n=$((n + 1)); done
        {ISTHMUS} doctor {disk}/run --size 0.02 > {out}/full
        {ISTHMUS} status {disk}/run > {out}/status
        mount -o remount,nr_inodes=200000 {disk}; {ISTHMUS} doctor {disk}/run --size 0.02 > {out}/roomy
        {ISTHMUS} status {disk}/run > {out}/status.roomy
    """
    done = subprocess.run([*IN_A_DISK_OF_ITS_OWN, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = {path.name: path.read_text() for path in out.iterdir() if path.is_file()}
    told = doctor.of(said)
    told.finds("full")
    told.only("machine").finds("low")
    assert re.search(r"^failure machine: disk: .* room for 0 more files", said["full"], re.MULTILINE)
    assert re.search(r"^warning machine: disk: .* room for [\d,]+ more files", said["low"], re.MULTILINE)
    told.finds_no_more("roomy")
    assert re.search(r"the disk of .* is full: .* and room for 0 more files \(inodes: df -i\) are left", said["status"])
    assert " is full: " not in said["status.roomy"]


@row(
    "doctor", "store: rights: … is on a file system that is mounted read-only, as the kernel does after an error of the disk "
    "(dmesg names it): `sudo mount -o remount,rw …` allows it (and … more are like that)",
    means="No process can write to the run's folder, whatever its rights. Learners train on, and wait for the store.",
    do="run that command, and the doctor again until this is ok; the processes then go on by themselves",
    then="`ok store: rights`",
    lost=A_GAP,
)  # fmt: skip
@row(
    "doctor", "store: rights: … is on a file system that is mounted read-only: `sudo mount -o remount,bind,rw …` allows it "
    "(and … more are like that)",
    means="No process here can write to the run's folder: it is mounted read-only at this place (a bind mount, or a volume of a "
    "container), and its disk is whole.",
    like="In a container, the volume was given with `ro`: start the container without it.",
    do="run that command, and the doctor again until this is ok; the processes then go on by themselves",
    then="`ok store: rights`",
    lost=A_GAP,
)  # fmt: skip
@pytest.mark.tier("all")
@pytest.mark.usefixtures("own_mounts")
@pytest.mark.parametrize("bound", [False, True], ids=["disk", "bind mount"])
def test_a_disk_that_is_mounted_read_only(doctor: Doctor, run: str, tmp_path: Path, bound: bool) -> None:
    disk, out = tmp_path / "disk", tmp_path
    disk.mkdir()
    doctor = doctor.only("store: rights: … is on a file system that is mounted read-only" + (":" if bound else ","))
    closed = (
        f"mount --bind {disk} {disk} && mount -o remount,bind,ro {disk}" if bound else f"mount -o remount,ro {disk}"
    )
    script = f"""
        mount -t tmpfs -o size=4g tmpfs {disk} && cp -r {run} {disk}/run && {closed} || exit 99
        {ISTHMUS} doctor {disk}/run --size 0.02 --role syncer > {out}/denied
        {ISTHMUS} init {disk}/another > {out}/refused 2>&1
        $(sed -n 's|.*`sudo \\(mount [^`]*\\)`.*|\\1|p' {out}/denied | head -1)
        {ISTHMUS} doctor {disk}/run --size 0.02 --role syncer > {out}/allowed
        true
    """
    done = subprocess.run([*IN_A_DISK_OF_ITS_OWN, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = doctor.of({name: (out / name).read_text() for name in ("denied", "allowed")})
    told.finds("denied")
    told.finds_no_more("allowed")
    (command,) = set(re.findall(r"`sudo mount [^`]*`", (out / "denied").read_text()))
    assert f"mounted read-only{'' if bound else ', as the kernel'}" in (out / "refused").read_text()
    assert f"{command} allows it" in (out / "refused").read_text()


@row(
    "doctor", "machine: kernels: the kernels compute the bits of arithmetic …; ready after … s on …, … cores",
    means="The kernels were compiled, not read from a file. So it is at each start, if nothing keeps the files.",
    do="set NUMBA_CACHE_DIR to a folder that is kept between starts", then="`ok machine: kernels` from the second start on",
)  # fmt: skip
@pytest.mark.tier("all")
@pytest.mark.timeout(600)
def test_kernels_that_are_compiled_at_each_start(doctor: Doctor, run: str, tmp_path: Path) -> None:
    for what, folder in (("finds", "a"), ("finds", "b"), ("finds_no_more", "b")):
        command = [*isthmus_command(), "doctor", run, "--size", "0.02"]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        getattr(doctor.of({run: done.stdout}), what)(run)


@row(
    "doctor", "machine: kernels: the kernels do not compute the bits of arithmetic … on …",
    means="This machine would merge to other bits than the others, and all would refuse its commits.",
    do="merge on another machine, or install other releases of numba and llvmlite (those of constraints.txt)",
    then="`ok machine: kernels`",
)  # fmt: skip
def test_kernels_that_give_other_bits(doctor: Doctor, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.fingerprint() == machine.BITS[ARITHMETIC]
    monkeypatch.setattr(machine, "fingerprint", lambda: "0" * 64)  # no machine is known that gives other bits
    doctor.finds(run, "--role", "syncer")
    monkeypatch.undo()
    assert "ok      machine: kernels" in doctor.finds_no_more(run, "--role", "syncer")


@row(
    "doctor", "machine: torch: not installed",
    means="Learners need torch; nothing else does. It is a failure for `--role learner`, and else a warning.",
    do="pip install '.[torch]' in a clone of Isthmus, where learners run", then="`ok machine: torch`, with the GPUs",
)  # fmt: skip
def test_no_torch(doctor: Doctor, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "warning machine: torch" in doctor.finds(run)
    assert "failure machine: torch" in doctor.finds(run, "--role", "learner")
    assert "machine: torch" not in doctor.prints(run, "--role", "syncer"), "a syncer needs no torch"
    monkeypatch.undo()
    assert "ok      machine: torch" in doctor.finds_no_more(run, "--role", "learner")


@row(
    "doctor", "machine: GLOO_SOCKET_IFNAME: GLOO_SOCKET_IFNAME=…: there is no … here, but …",
    means="The variable names a network interface that this machine does not have. Ranks of one learner use it.",
    do="name an existing interface, or ranks will not find each other", then="no more word of it",
)  # fmt: skip
@row(
    "doctor", "machine: NCCL_SOCKET_IFNAME: NCCL_SOCKET_IFNAME=…: there is no … here, but …",
    means="The variable names a network interface that this machine does not have. Ranks of one learner use it.",
    do="name an existing interface, or ranks will not find each other", then="no more word of it",
)  # fmt: skip
def test_an_interface_that_is_not_there(doctor: Doctor, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "none-such0")
    text = doctor.finds(run, "--role", "learner")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, re.findall(r"here, but ([^,\n]+)", text)[0])
    doctor.finds_no_more(run, "--role", "learner")


@row(
    "doctor", "machine: own name: this machine's own name, …, resolves to …: ranks on other machines would get that "
    "address",
    means="Ranks tell each other their addresses. This one would tell an address that leads the others to themselves.",
    do="if a learner's ranks are on several machines, set GLOO_SOCKET_IFNAME=INTERFACE, or put the name into /etc/hosts",
    then="no more word of it",
)  # fmt: skip
def test_a_machine_that_calls_itself_loopback(doctor: Doctor, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    variable = re.findall(r"set (\w+)=INTERFACE", doctor.finds(run, "--role", "learner"))[0]
    monkeypatch.setenv(variable, socket.if_nameindex()[0][1])
    doctor.finds_no_more(run, "--role", "learner")
