"""Real processes under supervision, all of which can be killed: an S3 server behind fault proxies, Redis, syncers and
learners."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from chaos.proxy import FaultProxy
from isthmus_services.servers import Server, free_ports, redis_server, s3_server
from support import forking

TESTS = Path(__file__).parents[1]
STOP_S = 30.0
RESTART_AFTER_S = 0.1
RUN = "s3://chaos/run"
ISTHMUS = (sys.executable, "-m", "isthmus_services.main")


@dataclass
class Child:
    """One supervised process. A syncer gets a new name at each start, so that the log tells its processes apart."""

    name: str
    kind: str
    arguments: list[str]
    log: Path
    environment: dict[str, str]
    forked: bool = False
    """Whether its processes are forked after the imports, for runs that do not measure how long a start takes."""
    process: "subprocess.Popen[bytes] | forking.Forked | None" = None
    lives: int = 0
    ended_at: float = 0.0
    exits: list[int] = field(default_factory=list)

    @property
    def life(self) -> str:
        """The name of the current process."""
        return f"{self.name}-{self.lives}" if self.kind == "syncer" else self.name

    def start(self, *more: str) -> None:
        """Start another process, with more arguments."""
        self.lives += 1
        arguments = [*self.arguments, *more, *(("--name", self.life) if self.kind == "syncer" else ())]
        if self.forked:
            self.process = forking.nursery().start(arguments, self.environment, self.log, self.log)
            return
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [*ISTHMUS, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment,
            )

    def kill(self) -> float:
        """Send SIGKILL; return the time."""
        assert self.process is not None, "there is no process to kill"
        at = time.time()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return at

    def twin(self) -> "subprocess.Popen[bytes] | forking.Forked":
        """Start a second process of this name and supervise it. Return the older one, which must stop by itself."""
        older = self.process
        assert older is not None, "there is no older process"
        self.start("--takeover")
        return older


class Cluster:
    """Everything one chaos run consists of."""

    def __init__(
        self, folder: Path, syncers: int, learners: int, pace: tuple[str, ...] = (), *, forked: bool = False
    ) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.s3_port, self.redis_port = free_ports(2)
        self.bus = f"redis://127.0.0.1:{self.redis_port}"
        self.proxy: FaultProxy
        """The proxy before the store for all processes but the first syncer."""
        self.first: FaultProxy
        """The proxy of the first syncer, so that this syncer alone can be cut off."""
        self._s3: AbstractContextManager[Server] | None = None
        self._redis: AbstractContextManager[Server] | None = None
        self._counts = syncers, learners
        self._pace = pace
        self._forked = forked
        self.direct: dict[str, str] = {}
        """Environment that leads to the S3 server without a proxy."""
        self.syncers: list[Child] = []
        self.learners: list[Child] = []
        self.crashes: list[str] = []

    # --- servers ------------------------------------------------------------------------------------------------------

    def start_s3(self) -> Server:
        """Start the S3 server on its port, with the objects that it had stored."""
        self._s3 = s3_server(self.folder / "s3", port=self.s3_port)
        return self._s3.__enter__()

    def start_redis(self, *, keep: bool) -> Server:
        """Start Redis on its port, empty or with what its last SAVE wrote."""
        dump = self.folder / "redis" / "dump.rdb"
        if not keep:
            dump.unlink(missing_ok=True)
        self._redis = redis_server(
            self.folder / "redis", port=self.redis_port, arguments=("--save", "", "--appendonly", "no")
        )
        return self._redis.__enter__()

    def kill_s3(self) -> None:
        """Kill the S3 server and wait for its end."""
        assert self._s3 is not None
        self.s3.kill()
        self._s3.__exit__(None, None, None)

    def kill_redis(self) -> None:
        """Kill Redis and wait for its end."""
        assert self._redis is not None
        self.redis.kill()
        self._redis.__exit__(None, None, None)

    # --- the whole ----------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator["Cluster"]:
        """Start all servers and processes; end them at the end."""
        self.s3 = self.start_s3()
        try:
            self.redis = self.start_redis(keep=False)
            with FaultProxy(self.s3_port) as self.proxy, FaultProxy(self.s3_port, seed=1) as self.first:
                self.direct = dict(self.s3.environment)
                self.environment = {
                    **{k: v for k, v in os.environ.items() if not k.startswith("AWS_")},
                    **self.direct,
                    "AWS_ENDPOINT_URL": self.proxy.url,
                    "AWS_EC2_METADATA_DISABLED": "true",
                    "PYTHONPATH": str(TESTS),
                    "OMP_NUM_THREADS": "1",
                    "MKL_NUM_THREADS": "1",
                }
                self._init()
                try:
                    for child in self.children:
                        child.start()
                    yield self
                finally:
                    self.stop()
        finally:
            for server in (self._redis, self._s3):
                if server is not None:
                    server.__exit__(None, None, None)

    def _init(self) -> None:
        rules = ("--model", "support.paced:small", "--fragments", "4", "--sync-every", "96", "--snapshot-every", "4")
        made = self.command("init", RUN, "--create-bucket", *rules, *self._pace)
        assert made.returncode == 0, made.stderr
        count_s, count_l = self._counts
        self.syncers = [self._child(f"s{i}", "syncer", "syncer", RUN, "--bus", self.bus) for i in range(count_s)]
        self.syncers[0].environment = {**self.environment, "AWS_ENDPOINT_URL": self.first.url}
        self.learners = [
            self._child(
                f"l{i}", "learner", "learner", RUN, "--bus", self.bus, "--learner", f"l{i}",
                "--shard", f"{i}/{count_l}", "--steps", "10000000", "--checkpoint", "2", "--train", "support.paced:train", "--model", "support.paced:small",
            )
            for i in range(count_l)
        ]  # fmt: skip

    def _child(self, name: str, kind: str, *arguments: str) -> Child:
        return Child(name, kind, [*arguments], self.logs / f"{name}.log", self.environment, self._forked)

    @property
    def children(self) -> list[Child]:
        """All supervised processes."""
        return [*self.syncers, *self.learners]

    def command(self, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run an `isthmus` command without a proxy before the store."""
        environment = {**self.environment, **self.direct}
        if self._forked:
            return forking.isthmus(*arguments, environment=environment, timeout=timeout)
        return subprocess.run(
            [*ISTHMUS, *arguments], capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )

    def tend(self) -> None:
        """Restart processes that have ended, a moment later, as a supervisor does."""
        now = time.monotonic()
        for child in self.children:
            if child.process is None or (code := child.process.poll()) is None:
                continue
            if not child.ended_at:
                child.ended_at = now
                child.exits.append(code)
                if code not in (-signal.SIGKILL, 0, 2):
                    self.crashes.append(f"{child.life} ended with {code}: see {child.log}")
            if now - child.ended_at >= RESTART_AFTER_S:
                child.ended_at = 0.0
                child.start()

    def wait(self, seconds: float) -> None:
        """Let time pass under supervision."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.tend()
            time.sleep(0.05)

    def stop(self) -> None:
        """End learners first, so that their last updates and messages are handled; then end the syncers."""
        for group in (self.learners, self.syncers):
            for child in group:
                if child.process is not None and child.process.poll() is None:
                    child.process.send_signal(signal.SIGCONT)
                    child.process.terminate()
            for child in group:
                if child.process is None:
                    continue
                try:
                    child.process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    self.crashes.append(f"{child.life} did not end within {STOP_S:g} s of SIGTERM: see {child.log}")
                    child.process.kill()
                    child.process.wait()


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that no process that it started is left."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
