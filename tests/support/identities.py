"""Imitations of the services that issue AWS credentials, and a gate before a store that checks them.

Credentials are valid for seconds here. Like S3, the gate rejects every request that is signed with other credentials.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from botocore.credentials import SSOProvider

GRACE_S = 3.0
"""Credentials are still accepted for this long after they expired: on a busy machine a request may be under way."""


@dataclass(frozen=True)
class Request:
    """A request of a client."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    raw: bytes
    """The head of the request, as it came."""


Answer = tuple[int, bytes]
Handler = Callable[[Request], Awaitable[Answer | None]]
"""Returns a status and a body; None if it has answered by itself."""


@asynccontextmanager
async def serving(handler: "Callable[[Request, asyncio.StreamWriter], Awaitable[Answer | None]]") -> AsyncIterator[str]:
    """Serve HTTP on loopback; yield the URL."""

    open_now: dict[asyncio.Task[None], socket.socket] = {}

    async def one(connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            while True:
                raw = await reader.readuntil(b"\r\n\r\n")
                first, *lines = raw.decode("latin-1").split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
                if "expect" in headers:
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                answer = await handler(Request(method, path, headers, body, raw), writer)
                if answer is None:
                    return
                status, content = answer
                writer.write(b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            await _closed(writer)

    def accept() -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = listening.accept()
            task = asyncio.create_task(one(connection))
            open_now[task] = connection
            task.add_done_callback(open_now.pop)

    # asyncio's own server leaks a connection that it accepted just before it is closed.
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    loop = asyncio.get_running_loop()
    loop.add_reader(listening, accept)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        loop.remove_reader(listening)
        left = dict(open_now)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for closed in (listening, *left.values()):
            closed.close()


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@dataclass
class Issuer:
    """Issues credentials that are valid for `life_s` seconds."""

    life_s: float = 3.0
    refuses: bool = False
    """Whether it fails: it then answers 500."""
    issued: dict[str, float] = field(default_factory=dict)
    """By access key: when the key expires."""
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def issue(self, life_s: float | None = None) -> dict[str, str]:
        """Return new credentials in the format of a metadata service."""
        key = f"ASIA{next(self._numbers):012d}"
        self.issued[key] = ends = time.time() + (self.life_s if life_s is None else life_s)
        return {
            "AccessKeyId": key,
            "SecretAccessKey": f"secret of {key}",
            "Token": f"token of {key}",
            "Expiration": datetime.fromtimestamp(ends, UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        }

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request is signed with credentials that have not expired."""
        found = re.search(r"Credential=([^/]+)/", headers.get("authorization", ""))
        if found is None or time.time() > self.issued.get(found[1], 0.0) + GRACE_S:
            return False
        return headers.get("x-amz-security-token", "") == f"token of {found[1]}"

    async def answer(self, request: Request, _: object = None) -> Answer:
        """Answer as a container's endpoint, EC2's metadata service, STS and SSO at once."""
        if self.refuses:
            return 500, b""
        path = request.path.partition("?")[0]
        if path == "/latest/api/token":
            return 200, b"session"
        if path == "/latest/meta-data/iam/security-credentials/":
            return (200, b"role") if request.headers.get("x-aws-ec2-metadata-token") == "session" else (401, b"")
        if path == "/latest/meta-data/iam/security-credentials/role":
            said = {"Code": "Success", "LastUpdated": "2026-01-01T00:00:00Z", "Type": "AWS-HMAC", **self.issue()}
            return 200, json.dumps(said).encode()
        if path == "/container":
            authorised = request.headers.get("authorization") == "from the file"
            return (200, json.dumps(self.issue()).encode()) if authorised else (403, b"{}")
        if path == "/process":
            said = self.issue()
            said["SessionToken"] = said.pop("Token")
            return 200, json.dumps({"Version": 1, **said}).encode()
        if path == "/federation/credentials":
            said = self.issue()
            role = {
                "accessKeyId": said["AccessKeyId"],
                "secretAccessKey": said["SecretAccessKey"],
                "sessionToken": said["Token"],
                "expiration": int(self.issued[said["AccessKeyId"]] * 1000),
            }
            return 200, json.dumps({"roleCredentials": role}).encode()
        action = parse_qs(request.body.decode())["Action"][0]
        said = self.issue()
        inner = "".join(
            f"<{name}>{said[of]}</{name}>"
            for name, of in (
                ("AccessKeyId", "AccessKeyId"),
                ("SecretAccessKey", "SecretAccessKey"),
                ("SessionToken", "Token"),
                ("Expiration", "Expiration"),
            )
        )
        return 200, (
            f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result>'
            f"<Credentials>{inner}</Credentials></{action}Result></{action}Response>"
        ).encode()


@dataclass
class Gate:
    """Passes requests on to a store if the issuer knows their credentials."""

    issuer: Issuer
    port: int
    """The port of the store."""
    refused: int = 0
    used: set[str] = field(default_factory=set)
    """Access keys that signed the requests passed on."""

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> Answer | None:
        """Pass a request on, or reject it."""
        if not self.issuer.knows(request.headers):
            self.refused += 1
            return 400, b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        found = re.search(r"Credential=([^/]+)/", request.headers["authorization"])
        assert found is not None, "the issuer knows it"
        self.used.add(found[1])
        reader, onward = await asyncio.open_connection("127.0.0.1", self.port)
        lines = [
            line for line in request.raw.split(b"\r\n") if not line.lower().startswith((b"connection:", b"expect:"))
        ]
        onward.write(b"\r\n".join([lines[0], b"Connection: close", *lines[1:]]) + request.body)
        try:
            await onward.drain()
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            await _closed(onward)
        return None


# --- machines with credentials ----------------------------------------------------------------------------------------


@dataclass
class Machine:
    """An environment and a home folder with one way to credentials."""

    home: Path
    url: str
    """The URL of the issuer."""
    issuer: Issuer
    environment: dict[str, str] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None

    def set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give this process the environment of that machine."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        # botocore read the home folder when it was imported.
        monkeypatch.setattr(SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(self.home / ".aws/sso/cache"))

    def write(self, name: str, text: str) -> Path:
        """Write a file below the home folder."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


def _environment(m: Machine) -> None:
    said = m.issuer.issue(life_s=600.0)
    m.environment |= {
        "AWS_ACCESS_KEY_ID": said["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": said["SecretAccessKey"],
        "AWS_SESSION_TOKEN": said["Token"],
    }


def _file(m: Machine) -> None:
    def renew() -> None:
        said = m.issuer.issue()
        m.write(
            "credentials.new",
            f"[default]\naws_access_key_id = {said['AccessKeyId']}\naws_secret_access_key = {said['SecretAccessKey']}\n"
            f"aws_session_token = {said['Token']}\n",
        ).replace(m.home / "credentials")

    async def go_on() -> None:
        while True:
            await asyncio.sleep(m.issuer.life_s / 2)
            renew()

    renew()
    m.task = asyncio.ensure_future(go_on())
    m.environment["AWS_SHARED_CREDENTIALS_FILE"] = str(m.home / "credentials")


def _process(m: Machine) -> None:
    port = m.url.rpartition(":")[2]
    program = m.write(
        "credentials.py",
        f"import http.client\nc = http.client.HTTPConnection('127.0.0.1', {port})\nc.request('GET', '/process')\n"
        "print(c.getresponse().read().decode())\n",
    )
    config = m.write("config", f"[default]\ncredential_process = {sys.executable} -S -E {program}\n")
    m.environment["AWS_CONFIG_FILE"] = str(config)


def _assumed_role(m: Machine) -> None:
    m.write("credentials", "[base]\naws_access_key_id = base\naws_secret_access_key = secret\n")
    config = m.write(
        "config", "[profile job]\nrole_arn = arn:aws:iam::123456789012:role/job\nsource_profile = base\n"
        "role_session_name = job\n"
    )  # fmt: skip
    m.environment |= {
        "AWS_CONFIG_FILE": str(config),
        "AWS_SHARED_CREDENTIALS_FILE": str(m.home / "credentials"),
        "AWS_PROFILE": "job",
        "AWS_ENDPOINT_URL_STS": m.url,
    }


def _sso(m: Machine) -> None:
    start = "https://start.example/start"
    token = {"startUrl": start, "region": "eu-west-1", "accessToken": "t", "expiresAt": "2099-01-01T00:00:00Z"}
    m.write(f".aws/sso/cache/{hashlib.sha1(start.encode()).hexdigest()}.json", json.dumps(token))
    config = m.write(
        "config", f"[profile lab]\nsso_start_url = {start}\nsso_region = eu-west-1\nsso_account_id = 123456789012\n"
        "sso_role_name = lab\n"
    )  # fmt: skip
    m.environment |= {"AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "lab", "AWS_ENDPOINT_URL_SSO": m.url}


def _web_identity(m: Machine) -> None:
    m.environment |= {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(m.write("token", "a token of the cluster")),
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/pod",
        "AWS_ENDPOINT_URL_STS": m.url,
    }


def _container(m: Machine) -> None:
    m.environment |= {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{m.url}/container",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(m.write("token", "from the file")),
    }


def _ecs(m: Machine) -> None:
    m.environment |= {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{m.url}/container",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": "from the file",
    }


def _instance(m: Machine) -> None:
    m.environment["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = m.url
    m.environment["AWS_EC2_METADATA_DISABLED"] = "false"


WAYS: Mapping[str, Callable[[Machine], None]] = {
    "environment": _environment,
    "shared file": _file,
    "credential_process": _process,
    "assumed role": _assumed_role,
    "SSO": _sso,
    "web identity (IRSA)": _web_identity,
    "container (EKS)": _container,
    "container (ECS)": _ecs,
    "instance (EC2)": _instance,
}


@asynccontextmanager
async def machine(way: str, home: Path, issuer: Issuer, port: int) -> AsyncIterator[tuple[Machine, Gate]]:
    """Set up a machine that gets its credentials in one way, and a gate before the store at a port."""
    gate = Gate(issuer, port)
    async with serving(issuer.answer) as url, serving(gate.answer) as store:
        made = Machine(home, url, issuer)
        made.environment |= {"HOME": str(home), "AWS_ENDPOINT_URL_S3": store, "AWS_REGION": "us-east-1"}
        WAYS[way](made)
        try:
            yield made, gate
        finally:
            if made.task is not None:
                made.task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await made.task
