"""A Slurm of two nodes on loopback: munged, slurmctld and a slurmd for each node, as processes of this user.

It has its own state, ports, keys and logs. It tracks processes by their parents, without cgroups. A node's GPU is an
entry in a file. A job that is requeued may start after six seconds, not after Slurm's usual two minutes.
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from isthmus_services.servers import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
START_S = 30.0

CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
GresTypes=gpu
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=8 RealMemory=65536 Gres=gpu:1
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=8 RealMemory=65536 Gres=gpu:1
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE
"""


def missing() -> list[str]:
    """Return the programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]


def search_path() -> str:
    """Return the PATH for programs of this environment and for daemons."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass
class Slurm:
    """A running Slurm."""

    folder: Path
    environment: Mapping[str, str]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def tell(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command of Slurm; return its output. Raises `AssertionError` if it fails."""
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}{self.said()}"
        return done.stdout.strip()

    def said(self) -> str:
        """Return the ends of the daemons' logs."""
        return "".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        words = self.tell("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def processes(self, job: str) -> list[int]:
        """Return the processes of a job's step, without the script."""
        # Another Slurm may have a job of the same id.
        wanted = {
            f"SLURM_CONF={self.environment['SLURM_CONF']}".encode(),
            f"SLURM_JOB_ID={self.job(job)['JobId']}".encode(),
            b"SLURM_STEP_ID=0",
        }
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted <= set(place.read_bytes().split(b"\0")):
                    found.append(int(place.parent.name))
        return found

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < end, f"{what} did not come up\n{self.said()}"
            assert all(d.poll() is None for d in self.daemons), f"a daemon has ended\n{self.said()}"
            time.sleep(0.05)

    def _answers(self) -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%T %D"], env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() == "idle 2"


@contextmanager
def slurm(folder: Path, environment: Mapping[str, str]) -> Iterator[Slurm]:
    """Start a Slurm; at the end, cancel all jobs and stop it."""
    user = pwd.getpwuid(os.getuid()).pw_name
    (folder / "state").mkdir(parents=True)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname(), ports=free_ports(3), user=user, folder=folder))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/zero\n")
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    made = Slurm(folder, {**os.environ, **environment, "PATH": search_path(), "SLURM_CONF": str(config)})
    munge = [f"--{what}={folder / name}" for what, name in MUNGE.items()]
    with ExitStack() as stack:

        def start(name: str, *command: str) -> None:
            log = stack.enter_context(open(folder / f"{name}.log", "ab"))
            process = subprocess.Popen(command, env=made.environment, stdout=log, stderr=subprocess.STDOUT)
            made.daemons.append(process)
            stack.callback(stop, process)

        # munged needs --force, because other users may not enter the tests' folders.
        start("munged", "munged", "--foreground", "--force", *munge)
        made._until((folder / "munge.socket").exists, "munged")
        start("slurmctld", "slurmctld", "-D")
        for node in ("n1", "n2"):
            start(node, "slurmd", "-D", "-N", node)
        made._until(made._answers, "Slurm")
        try:
            yield made
        finally:
            made.tell("scancel", "--user", user)
            made._until(made._answers, "an end of all jobs")


MUNGE = {
    "key-file": "munge.key",
    "socket": "munge.socket",
    "pid-file": "munge.pid",
    "log-file": "munge.log",
    "seed-file": "munge.seed",
}


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process; kill it if it does not end."""
    process.terminate()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
