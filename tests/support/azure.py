"""Azurite, Microsoft's emulator of Azure Blob Storage, and the one request that obstore cannot send: make a container."""

import base64
import hashlib
import hmac
import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

from isthmus_services.servers import Server, answers, free_ports, running, until

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account of every Azurite and its key, which Microsoft publishes."""

CONTAINER = "conformance"


@contextmanager
def azure_server(program: str, folder: Path) -> Iterator[Server]:
    """Run an Azurite that keeps blobs in memory, with one container, `CONTAINER`."""
    port = free_ports(1)[0]
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    log = folder / "azurite.log"
    with running(command, log, {}) as process:
        until(lambda: answers(port), process, "Azurite", log)
        url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        make_container(port, CONTAINER)
        named = {"ACCOUNT_NAME": ACCOUNT, "ACCOUNT_KEY": KEY, "ENDPOINT": url}
        yield Server(url, process, {f"AZURE_STORAGE_{name}": value for name, value in named.items()})


def make_container(port: int, name: str) -> None:
    """Create a container, by a request signed with the account's key."""
    path = f"/{ACCOUNT}/{name}"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "PUT" + "\n" * 12 + "".join(f"{key}:{value}\n" for key, value in headers.items())
    signed += f"/{ACCOUNT}{path}\nrestype:container"
    mac = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("PUT", f"{path}?restype=container", headers=headers | {"Content-Length": "0"})
    status = connection.getresponse().status
    connection.close()
    assert status == http.client.CREATED, status
