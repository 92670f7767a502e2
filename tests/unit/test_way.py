"""The doctor reads the way to store and bus from the kernel's answers and files (recorded here), and judges it."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.doctor import FAILURE, NOTE, OK, WARNING, Finding, Role, RoleKind, examine_way, routes
from isthmus.doctor.routes import Interface, Route
from isthmus.doctor.way import GLOO, NCCL, ConnectionAttempt, Way, judge, judge_ranks, proxy_for
from isthmus.errors import IsthmusError
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.urls import Place
from isthmus.store import endpoint_of, open_store

GOOD = Way(
    "store",
    "store.test",
    9000,
    0.012,
    [ConnectionAttempt("10.0.9.2", 0.031, "", "10.0.0.5", 1500)],
    Route(2, "10.0.0.5", "10.0.0.1"),
    {"lo": Interface("lo", mtu=65536), "eth0": Interface("eth0", mtu=1500, speed=10000)},
    "eth0",
)


def found(at: Way) -> dict[str, Finding]:
    return {finding.check: finding for finding in judge(at)}


def warned(at: Way) -> dict[str, str]:
    told = {check: f.said for check, f in found(at).items() if f.outcome == WARNING}
    assert all(found(at)[check].advice for check in told)
    return told


def test_a_way_is_told_in_a_line() -> None:
    assert found(GOOD) == {
        "store: way": Finding(
            "store: way",
            OK,
            "store.test is 10.0.9.2, found in 12 ms, connected in 31 ms from 10.0.0.5 by eth0 (MTU 1500, 10000 "
            "Mbit/s), "
            "gateway 10.0.0.1, path MTU 1500",
        )
    }


def test_loopback_has_neither_gateway_nor_warnings() -> None:
    attempt = ConnectionAttempt("127.0.0.1", 0.0001, "", "127.0.0.1", 1500)
    at = replace(GOOD, host="127.0.0.1", attempts=[attempt], route=Route(1, "127.0.0.1"), used="lo")
    (finding,) = judge(at)
    assert (
        finding.said == "127.0.0.1, found in 12 ms, connected in 0 ms from 127.0.0.1 by lo (MTU 65536), path MTU 1500"
    )


def test_what_a_system_does_not_tell_is_said() -> None:
    at = replace(
        GOOD, attempts=[ConnectionAttempt("10.0.9.2", 0.031, "", "10.0.0.5")], route=None, interfaces={}, used=""
    )
    (finding,) = judge(at)
    assert finding.outcome == OK
    assert finding.said.endswith("from 10.0.0.5; this system does not report the interface")


def test_an_address_that_does_not_answer_beside_one_that_does() -> None:
    at = replace(GOOD, attempts=[ConnectionAttempt("fd99::2", 3.0, "no answer in 3 s"), *GOOD.attempts])
    assert warned(at) == {
        "store: addresses": "fd99::2: no answer in 3 s; 10.0.9.2 answers: a client that tries it last loses 3.0 s each time"
    }
    assert "10.0.9.2 (and fd99::2)" in found(at)["store: way"].said


def test_nothing_answers() -> None:
    refused = ConnectionAttempt("10.0.9.2", 0.001, "connection refused")
    assert warned(replace(GOOD, attempts=[refused])) == {
        "store: way": "store.test:9000 cannot be reached: 10.0.9.2: connection refused"
    }
    unknown = replace(GOOD, what="bus", attempts=[ConnectionAttempt("", 0.2, "Name or service not known")])
    assert warned(unknown) == {"bus: way": "the name store.test cannot be resolved: Name or service not known"}
    assert found(unknown)["bus: way"].advice.startswith("correct --bus, or")


def test_a_slow_resolver() -> None:
    assert warned(replace(GOOD, resolved_s=5.01)) == {"store: name": "finding the addresses of store.test took 5.0 s"}


def test_a_path_that_is_narrower_than_the_interface() -> None:
    narrow = replace(GOOD, attempts=[replace(GOOD.attempts[0], mtu=1300)])
    assert warned(narrow) == {
        "store: MTU": "the path to 10.0.9.2 takes packets of 1300 bytes, eth0 sends up to 1500",
    }
    assert found(narrow)["store: MTU"].advice.startswith("run ip link set dev eth0 mtu 1300")


@pytest.mark.parametrize("kind", ["a VPN", "a bridge of containers"])
def test_a_way_by_an_odd_interface_where_there_is_another(kind: str) -> None:
    odd = Interface("wg0", mtu=1500, kind=kind)
    by_it = replace(GOOD, interfaces={**GOOD.interfaces, "wg0": odd}, used="wg0")
    assert warned(by_it) == {"store: interface": f"traffic goes through wg0, {kind}; there is also eth0"}
    down = {**by_it.interfaces, "eth0": replace(GOOD.interfaces["eth0"], up=False)}
    assert warned(replace(by_it, interfaces=down)) == {}, "there is no other interface"
    assert warned(replace(by_it, used="eth0")) == {}, "traffic goes through another interface"


def test_a_way_by_the_slower_interface() -> None:
    at = replace(GOOD, interfaces={**GOOD.interfaces, "eth1": Interface("eth1", mtu=1500, speed=100000)})
    assert warned(at) == {"store: speed": "traffic goes through eth0 with 10000 Mbit/s; eth1 has 100000"}
    assert warned(replace(at, used="eth1")) == {}


# --- what the kernel says ---------------------------------------------------------------------------------------------

V4 = (
    "700000001800000001000000670b000002200000fe0000010002000008000f00fe0000000800010008080808080004000400000008000700c000"
    "020208000500c0000201080019000000000024000c0002000000c5560700000000000000000000000000000000000000000000000000"
)
V6 = (
    "b00000001800000001000000670b00000a808000fe0300010000000008000f00fe0000001400010020010db800000000000000000000000114000"
    "2000000000000000000000000000000000014000700fd000000000000000000000000000002080006000004000014000500fd0000000000000000"
    "00000000000001080004000400000024000c0002000000cdea05000000000000000000000000000000000000000000000000000500140000000000"
)
NO_ROUTE = "240000000200000001000000670b00009bffffff1c0000001a0001000100000000000000"


@pytest.mark.parametrize(
    ("said", "route"),
    [
        (V4, Route(4, "192.0.2.2", "192.0.2.1")),
        (V6, Route(4, "fd00::2", "fd00::1")),
        (NO_ROUTE, None),
        ("", None),
        (V4[:40], None),
        (V4[:56] + "0000" + V4[60:], None),
    ],
    ids=["IPv4", "IPv6", "unreachable", "nothing", "cut off", "an attribute of no length"],
)
def test_answers_of_the_kernel_are_read(said: str, route: Route | None) -> None:
    assert routes.answer(bytes.fromhex(said)) == route


def test_this_kernel_knows_the_way_to_itself() -> None:
    route = routes.route_to("127.0.0.1")
    assert route is not None
    assert (routes.name_of(route.interface), route.source, route.gateway) == ("lo", "127.0.0.1", "")


def sys_class_net(folder: Path, files: Mapping[str, str]) -> dict[str, Interface]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return routes.interfaces(folder)


def test_interfaces_are_known_by_what_is_in_their_folders(tmp_path: Path) -> None:
    (tmp_path / "docker0/bridge").mkdir(parents=True)
    (tmp_path / "br0/bridge").mkdir(parents=True)
    for device in ("eth0", "eth1"):
        (tmp_path / device / "device").mkdir(parents=True)
    (tmp_path / "bonding_masters").write_text("")
    assert sys_class_net(
        tmp_path,
        {
            "eth0/operstate": "up\n", "eth0/mtu": "9001\n", "eth0/speed": "25000\n",
            "eth1/operstate": "down\n", "eth1/mtu": "1500\n", "eth1/speed": "-1\n",
            "tun0/operstate": "unknown\n", "tun0/tun_flags": "0x1001\n", "tun0/speed": "10000\n",
            "wg0/operstate": "unknown\n", "wg0/uevent": "DEVTYPE=wireguard\nINTERFACE=wg0\n",
            "docker0/operstate": "up\n", "br0/operstate": "up\n",
        },
    ) == {
        "br0": Interface("br0"),
        "docker0": Interface("docker0", kind="a bridge of containers"),
        "eth0": Interface("eth0", True, 9001, 25000),
        "eth1": Interface("eth1", False, 1500),
        "tun0": Interface("tun0", kind="a VPN"),
        "wg0": Interface("wg0", kind="a VPN"),
    }  # fmt: skip
    assert routes.interfaces(tmp_path / "not there") == {}


# --- where requests go ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    given = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "eu-west-1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def test_requests_go_to_the_host_of_the_bucket_or_to_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint_of("/a/folder") is None
    assert endpoint_of("s3://b/run") == "https://b.s3.eu-west-1.amazonaws.com"
    assert endpoint_of("s3://b.c/run") == "https://s3.eu-west-1.amazonaws.com"
    assert endpoint_of("gs://b/run") == "https://storage.googleapis.com"
    assert endpoint_of("s3://b/run?region=us-west-2") == "https://b.s3.us-west-2.amazonaws.com"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert endpoint_of("s3://b/run") == "http://127.0.0.1:9000"
    assert endpoint_of("s3://b/run?endpoint=https://far.example") == "https://far.example"
    assert endpoint_of("s3://b/run?region=us-west-2") == "https://b.s3.us-west-2.amazonaws.com"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.test:9000")
    assert endpoint_of("s3+aiobotocore://b/run") == "http://store.test:9000"


PROXY = "http://proxy.test:3128"


@pytest.mark.parametrize(
    ("scheme", "environment", "expected"),
    [
        ("s3", {}, ""),
        ("s3", {"HTTP_PROXY": PROXY}, "HTTP_PROXY"),
        ("s3", {"HTTPS_PROXY": PROXY}, ""),
        ("s3", {"ALL_PROXY": PROXY}, "ALL_PROXY"),
        ("s3+aiobotocore", {"ALL_PROXY": PROXY}, ""),
        ("s3+aiobotocore", {"http_proxy": PROXY}, "HTTP_PROXY"),
        ("s3", {"HTTP_PROXY": PROXY, "NO_PROXY": ".test"}, ""),
        ("s3", {"HTTP_PROXY": PROXY, "NO_PROXY": "other.test"}, "HTTP_PROXY"),
    ],
)
async def test_a_proxy_is_taken_as_the_client_takes_it(
    scheme: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the clients themselves: a request reaches the listener that plays the proxy, or goes nowhere."""
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    here = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for name, value in environment.items():
        monkeypatch.setenv(name, here if value == PROXY else value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.test:9000")
    said = proxy_for(Place.of("http://store.test:9000"), scheme)
    assert said == ((expected, here) if expected else ("", "http://store.test:9000"))
    with pytest.raises((IsthmusError, TimeoutError)):
        async with open_store(f"{scheme}://b/run", single_threaded()) as store, asyncio.timeout(10):
            await store.at_start.get("key")
    server.close()
    await server.wait_closed()
    assert bool(asked) == bool(expected)


async def test_a_store_behind_a_proxy_is_looked_for_at_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.test:9000")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@127.0.0.1:{port}")
        told = {f.check: f async for f in examine_way("store", "s3://b/run", single_threaded())}
    assert told["store: proxy"].outcome == NOTE
    assert told["store: proxy"].said == (
        f"requests to http://store.test:9000 go through the proxy 127.0.0.1:{port} (HTTP_PROXY)"
    )
    assert told["store: way"].said.startswith("127.0.0.1, found in ")


@pytest.mark.parametrize(("what", "url"), [("store", "/a/folder"), ("bus", "sqlite:///a/bus"), ("bus", "unix:///a")])
async def test_what_is_on_no_network_has_no_way(what: str, url: str) -> None:
    assert [f async for f in examine_way(what, url, single_threaded())] == []


# --- ranks ------------------------------------------------------------------------------------------------------------

LEARNER, NAMES = Role(RoleKind.LEARNER, "eu-1"), ["lo", "eth0", "ib0"]


def of_ranks(role: Role, environment: Mapping[str, str], addresses: tuple[str, ...] = ("10.0.0.5",)) -> dict[str, str]:
    return {f.check: f.outcome for f in judge_ranks(role, environment, NAMES, "node1", addresses)}


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({GLOO: "eth0"}, ""),
        ({GLOO: "eth0,ib0"}, ""),
        ({GLOO: "eth"}, GLOO),
        ({GLOO: "eth0,eth7"}, GLOO),
        ({NCCL: "eth"}, ""),
        ({NCCL: "eth7,ib"}, ""),
        ({NCCL: "=ib0:1"}, ""),
        ({NCCL: "=ib"}, NCCL),
        ({NCCL: "ens"}, NCCL),
        ({NCCL: "^docker,lo"}, ""),
    ],
)
def test_an_interface_that_a_variable_names_and_that_is_not_there(environment: dict[str, str], missing: str) -> None:
    expected = {f"machine: {missing}": FAILURE} if missing else {}
    assert of_ranks(LEARNER, environment) == expected
    assert of_ranks(Role(RoleKind.OPERATOR), environment) == dict.fromkeys(expected, WARNING)


def test_a_machine_that_calls_itself_loopback() -> None:
    assert of_ranks(LEARNER, {}, ("127.0.1.1", "::1")) == {"machine: own name": NOTE}
    assert of_ranks(LEARNER, {}, ()) == {"machine: own name": NOTE}, "or whose name has no address"
    assert of_ranks(LEARNER, {}, ("127.0.1.1", "10.0.0.5")) == {}
    assert of_ranks(LEARNER, {GLOO: "eth0"}, ("127.0.1.1",)) == {}
    assert of_ranks(Role(RoleKind.SYNCER), {}, ("127.0.1.1",)) == {}
