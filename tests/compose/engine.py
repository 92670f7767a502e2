"""A container engine: the one that is there, or Debian's, in namespaces of its own.

Debian's engine runs out of a folder that debootstrap fills with the packages of trixie. It has its own mounts, network,
process numbers and control groups, so that it changes nothing on the machine, and everything it started ends with it.
The folder and the images in it are kept in build/compose, so that a second run starts at once.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from isthmus_services.processes import end, tied

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build/compose"
SUITE = "trixie"
PACKAGES = ("docker.io", "docker-cli", "docker-compose", "docker-buildx", "iptables", "iproute2", "ca-certificates")
COMPOSE_LEAST = (2, 24, 7)
"""The first version of compose that mounts a volume by subpath with variables, as compose.yaml needs it."""

STAND_IN = "isthmus.stand-in"
"""The label of an image that stands in for another one."""

CGROUP = "isthmus-compose-test"
START_S, STOP_S = 60.0, 20.0

_START = f"""
set -eu
tree=$1 root=$2
mount --make-rprivate /
mount --bind "$tree" "$tree"
mkdir -p "$tree$root" "$tree/old"
mount --bind "$root" "$tree$root"
mount -t proc proc "$tree/proc"
mount --rbind /sys "$tree/sys"
mount --rbind /dev "$tree/dev"
mount -t tmpfs tmpfs "$tree/run"
cd "$tree"
pivot_root . old
umount -l /old
ip link set lo up
exec dockerd --cgroup-parent {CGROUP} --exec-opt native.cgroupdriver=cgroupfs
"""
"""Turns a folder into the root of a mount namespace, and runs the engine in it. Containers cannot start in a chroot."""


class NotRun(Exception):
    """There is no engine here, and none can be made."""


@dataclass(frozen=True)
class Engine:
    """An engine that answers."""

    said: str
    """What it is, for the report."""
    enter: Sequence[str] = ()
    """The words before a command that runs it in the engine's namespaces, in the repository."""
    network: Sequence[str] = ()
    """The words before a command that runs it in the engine's network, and else on this machine."""

    def run(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        within_s: float = 600.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, such as `docker ps`. Raises `AssertionError` with its output if it fails and `check` is set."""
        words = [*self.enter, "env", *(f"{name}={value}" for name, value in (environment or {}).items()), *command]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=False)
        assert done.returncode == 0 or not check, f"{' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    def get(self, url: str) -> str:
        """Return what an address in the engine's network answers. Raises `AssertionError` if it does not."""
        code = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"
        words = [*self.network, sys.executable, "-c", code, url]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60.0, check=False)
        assert done.returncode == 0, f"{url}: {done.stderr.splitlines()[-1:]}"
        return done.stdout

    def here(self, image: str) -> str | None:
        """Return what an image that is here stands in for, empty if for nothing; None if the image is not here."""
        label = f'{{{{index .Config.Labels "{STAND_IN}"}}}}'
        done = self.run("docker", "image", "inspect", "--format", label, image, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    def has(self, image: str) -> bool:
        """Return whether an image is here, or can be had from its registry. A stand-in for it does not count."""
        if (stands_for := self.here(image)) is not None:
            return not stands_for
        return self.run("docker", "pull", "-q", image, check=False, within_s=900.0).returncode == 0


@contextmanager
def engine() -> Iterator[Engine]:
    """Yield an engine. Debian's is ended afterwards, with all that it started. Raises `NotRun`."""
    if (there := _there()) is not None:
        yield there
        return
    tree = debian(CACHE / "engine", SUITE, PACKAGES)
    log = (CACHE / "engine.log").open("wb")
    command = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", _START, "sh"]
    process, inside = subprocess.Popen(tied([*command, str(tree), str(ROOT)]), stdout=log, stderr=log), ""
    try:
        inside = _child(process)
        words = ["nsenter", "-t", inside, "-m", "-n", "-p", "env", "-C", str(ROOT)]
        found = Engine(f"Debian {SUITE}'s, in namespaces of its own", words, ["nsenter", "-t", inside, "-n"])
        until = time.monotonic() + START_S
        while found.run("docker", "info", check=False).returncode != 0:
            if process.poll() is not None or time.monotonic() > until:
                raise NotRun(f"the engine does not start here: {_last(CACHE / 'engine.log')}")
            time.sleep(0.5)
        yield Engine(f"{found.said}: {_version(found)}", words, found.network)
    finally:
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):
            os.kill(int(inside), signal.SIGTERM)
            process.wait(STOP_S)
        end(process, STOP_S)
        log.close()
        for group in Path("/sys/fs/cgroup").glob(f"**/{CGROUP}"):
            for path in sorted(group.rglob("*"), reverse=True):
                with suppress(OSError):
                    path.rmdir()
            with suppress(OSError):
                group.rmdir()


def debian(folder: Path, suite: str, packages: Sequence[str]) -> Path:
    """Return a folder with the root of a Debian system that has these packages. One that is there is used again.

    Raises `NotRun` if it cannot be made here.
    """
    made, wanted = folder / ".made", " ".join((suite, *packages))
    if made.exists() and made.read_text() == wanted:
        return folder
    for tool in ("debootstrap", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            raise NotRun(f"there is no container engine, and no {tool} to make one: apt-get install debootstrap")
    if os.geteuid() != 0:
        raise NotRun("there is no container engine, and only root can make one")
    print(f"filling {folder.relative_to(ROOT)} with Debian {suite}: {', '.join(packages)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", suite, str(folder), _mirror()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotRun(f"debootstrap failed: {(done.stdout + done.stderr).splitlines()[-1:]}")
    for path in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
        shutil.rmtree(folder / path, ignore_errors=True)
    made.write_text(wanted)
    return folder


def _mirror() -> str:
    """Return where this machine gets Debian's packages from. Raises `NotRun` if it does not."""
    if shutil.which("apt-get") is not None:
        targets = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)"]
        for line in subprocess.run(targets, capture_output=True, text=True, check=False).stdout.splitlines():
            label, _, address = line.partition(" ")
            if label == "Debian":
                return address
    raise NotRun("there is no container engine, and no source of Debian's packages to make one")


def _there() -> Engine | None:
    """Return the engine that this machine has, if it is new enough."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    ):
        return None
    found = Engine("this machine's")
    said = found.run("docker", "compose", "version", "--short", check=False).stdout
    version = tuple(map(int, re.findall(r"\d+", said)[:3]))
    if version < COMPOSE_LEAST:
        raise NotRun(f"compose {said.strip() or 'is missing'}: {'.'.join(map(str, COMPOSE_LEAST))} or newer is needed")
    return Engine(f"this machine's: {_version(found)}")


def _version(found: Engine) -> str:
    said = json.loads(found.run("docker", "version", "--format", "{{json .Server}}").stdout)
    return f"Docker {said['Version']}, compose {found.run('docker', 'compose', 'version', '--short').stdout.strip()}"


def _child(process: "subprocess.Popen[bytes]") -> str:
    """Return the number of the process that runs in the namespaces. Raises `NotRun` if there is none."""
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError):
            if found := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                return found[0]
        time.sleep(0.05)
    raise NotRun(f"no namespaces can be made here: {_last(CACHE / 'engine.log')}")


def _last(log: Path) -> str:
    return (log.read_text(errors="replace").splitlines() or ["it said nothing"])[-1]
