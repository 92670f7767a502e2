"""Large objects over a long link that loses packets: this library beside as many curls at once.

Needs root, `ip`, curl and /dev/net/tun. `wire` connects two network namespaces: the store runs in the far one, its
clients in the near one.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from isthmus.agent.ports import open_place
from isthmus.errors import InputError
from isthmus.store.base import PART_BYTES, RANGE_BYTES
from isthmus.store.bucket import PARTS_AT_ONCE, RANGES_AT_ONCE
from isthmus_lab.bench.measure import Row, Say, rates, row, sized
from isthmus_lab.bench.servers import bucket
from isthmus_lab.bench.wire import ADDRESSES, DELAY_S, LOSS, RATE, ip
from isthmus_services.servers import ACCESS_KEY, SECRET_KEY, s3_server

NAMESPACES = "isthmus-near", "isthmus-far"
PORT = 9000
AIM = 0.8
READ_BYTES = RANGES_AT_ONCE * RANGE_BYTES
WRITTEN_BYTES = PARTS_AT_ONCE * PART_BYTES
READY_S = 60.0

Found = dict[str, dict[str, list[float]]]
"""Seconds of each repeat, by operation (PUT, GET) and client (isthmus, curl)."""


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield Mbit/s of this library beside those of the curls, for PUT and for GET. Raises `InputError`."""
    missing = [name for name in ("ip", "curl") if shutil.which(name) is None]
    if os.geteuid() or missing or not Path("/dev/net/tun").exists():
        raise InputError("bench links makes network namespaces: it needs root, `ip`, `curl` and /dev/net/tun")
    with tempfile.TemporaryDirectory() as folder, _far_store(Path(folder)):
        near = ["ip", "netns", "exec", NAMESPACES[0], sys.executable, "-m", __name__, "ask", folder, str(repeats)]
        with subprocess.Popen(near, stdout=subprocess.PIPE, text=True) as asking:
            assert asking.stdout is not None
            found: Found = {}
            for line in asking.stdout:
                said = json.loads(line)
                if isinstance(said, dict):
                    found = said
                else:
                    say(said)
        if asking.returncode or not found:
            raise RuntimeError(f"asking over the link ended with {asking.returncode}")
    size = {"GET": READ_BYTES, "PUT": WRITTEN_BYTES}
    link = f"{RATE * 8e-6:.0f} Mbit/s, {2e3 * DELAY_S:.0f} ms, {LOSS:.2%} lost"
    for what, took in found.items():
        ours, theirs = (rates(size[what] * 8e-6, took[who]) for who in ("isthmus", "curl"))
        case = f"{what} over {link}, beside as many curls at once"
        yield row("links", case, sized(size[what]), ours, "Mbit/s", limits=theirs, aim=AIM)


@contextmanager
def _far_store(folder: Path) -> Iterator[None]:
    """Run a store in the far namespace, at the other end of the wire."""
    with ExitStack() as stack:
        for namespace in NAMESPACES:
            subprocess.run(["ip", "netns", "del", namespace], check=False, stderr=subprocess.DEVNULL)
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
        _until(stack, [sys.executable, "-m", "isthmus_lab.bench.wire", *NAMESPACES], "ready")
        for namespace in NAMESPACES:
            _take_losses_for_congestion(namespace)
        far = ["ip", "netns", "exec", NAMESPACES[1], sys.executable, "-m", __name__, "serve", str(folder)]
        _until(stack, far, "ready")
        yield


def _take_losses_for_congestion(namespace: str) -> None:
    """Choose a TCP congestion control that takes losses for congestion: CUBIC, as on most machines, or else Reno.

    Raises `InputError` if the machine has neither.
    """
    for control in ("cubic", "reno"):
        setting = f"net.ipv4.tcp_congestion_control={control}"
        command = ["ip", "netns", "exec", namespace, "sysctl", "-q", "-w", setting]
        if subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0:
            return
    raise InputError("bench links: neither CUBIC nor Reno can be chosen in a network namespace of this machine")


def _until(stack: ExitStack, command: list[str], word: str) -> None:
    """Start a process that ends with the stack; return once it has printed `word`. Raises `RuntimeError`."""
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(process.terminate)
    assert process.stdout is not None
    if process.stdout.readline().strip() != word:
        raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}")


# --- at the far end ---------------------------------------------------------------------------------------------------


def _serve(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # exit in order, which ends the store
    with s3_server(folder / "s3") as server:
        port = int(server.url.rpartition(":")[2])
        asyncio.run(_relay(port))


async def _relay(port: int) -> None:
    """Pass connections from the wire on to the store, which listens on loopback only."""

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while chunk := await source.read(1 << 18):
                sink.write(chunk)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store_reader, store_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, store_writer), copy(store_reader, writer))

    server = await asyncio.start_server(serve, ADDRESSES[1], PORT)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


# --- at the near end --------------------------------------------------------------------------------------------------


def _ask(folder: Path, repeats: int) -> None:
    endpoint = f"http://{ADDRESSES[1]}:{PORT}"
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_REGION="us-east-1",
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
    )
    found: Found = {what: {who: [] for who in ("isthmus", "curl")} for what in ("PUT", "GET")}
    name = bucket()
    part = folder / "part"
    data = secrets.token_bytes(WRITTEN_BYTES)
    part.write_bytes(data[:PART_BYTES])
    _isthmus(name, "read", data[:READ_BYTES])
    for number in range(repeats + 1):
        key = f"written-{number}"
        puts = [["-T", str(part), f"{endpoint}/{name}/curl/{number}-{i}"] for i in range(PARTS_AT_ONCE)]
        ranges = [f"{i * RANGE_BYTES}-{(i + 1) * RANGE_BYTES - 1}" for i in range(RANGES_AT_ONCE)]
        gets = [["-o", "/dev/null", "-r", some, f"{endpoint}/{name}/isthmus/read"] for some in ranges]
        took = {
            "PUT": {"isthmus": _isthmus(name, key, data), "curl": _curls(puts)},
            "GET": {"isthmus": _isthmus(name, "read"), "curl": _curls(gets)},
        }
        if number:
            for what, by in took.items():
                for who, seconds in by.items():
                    found[what][who].append(seconds)
        print(json.dumps((number + 1) / (repeats + 1)), flush=True)
    print(json.dumps(found), flush=True)


def _isthmus(name: str, key: str, data: bytes | None = None) -> float:
    """Return how many seconds writing `data` to an object took, or reading the object if there is no `data`.

    Each call opens a new client, as each curl does.
    """

    async def once() -> float:
        async with open_place(f"s3://{name}/isthmus", make=True) as store:
            began = time.perf_counter()
            if data is None:
                await store.get(key)
            else:
                await store.put(key, data)
            return time.perf_counter() - began

    return asyncio.run(once())


def _curls(requests: list[list[str]]) -> float:
    """Return how many seconds these curls took, all at once, a process each. Raises `RuntimeError` if one fails."""
    signed = ["curl", "-sSf", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", f"{ACCESS_KEY}:{SECRET_KEY}"]
    began = time.perf_counter()
    curls = [
        subprocess.Popen([*signed, "-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD", *words], stdout=subprocess.DEVNULL)
        for words in requests
    ]
    failed = [curl.returncode for curl in curls if curl.wait()]
    took = time.perf_counter() - began
    if failed:
        raise RuntimeError(f"curl ended with {failed}")
    return took


if __name__ == "__main__":
    role, place = sys.argv[1], Path(sys.argv[2])
    if role == "serve":
        _serve(place)
    else:
        _ask(place, int(sys.argv[3]))
