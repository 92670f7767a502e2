"""`isthmus doctor` names the faults of a network: a learner's machine, a router, and servers, each in a namespace.

    learner 10.99.1.1 ── wire (1500) ── router ── far (1300) ── servers 10.99.2.2

The store's name also has an IPv6 address, whose packets the router drops. Packets of full size do not fit the path.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.test_processes import processes, wait_for
from isthmus_services.servers import ACCESS_KEY, SECRET_KEY, redis_binary, weed_binary

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces want root and ip"
)

SERVERS = "10.99.2.2"
AWS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": "http://store.test:9000",
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def wire(near: str, far: str, name: str, mtu: int, *addresses: str) -> None:
    """Connect two namespaces by a wire that is called `name` on its near side, with an address for each end."""
    ip("link", "add", name, "netns", near, "mtu", str(mtu), "type", "veth", "peer", "name", f"{name}-r", "netns", far)
    for namespace, end, address in ((near, name, addresses[0]), (far, f"{name}-r", addresses[1])):
        ip("-n", namespace, "addr", "add", address, "dev", end)
        ip("-n", namespace, "link", "set", end, "mtu", str(mtu), "up")


@pytest.fixture(scope="module")
def machines() -> Iterator[dict[str, str]]:
    """Create the three namespaces; yield their names by purpose."""
    names = {what: f"isthmus-way-{os.getpid()}-{what}" for what in ("learner", "router", "servers")}
    learner, router, servers = names.values()
    hosts = Path("/etc/netns") / learner
    with ExitStack() as stack:
        for name in names.values():
            ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True)
            ip("-n", name, "link", "set", "lo", "up")
        wire(learner, router, "wire", 1500, "10.99.1.1/24", "10.99.1.254/24")
        wire(servers, router, "far", 1300, f"{SERVERS}/24", "10.99.2.254/24")
        # If the servers' end knew its MTU, it would announce it, and no packet would ever be too large.
        ip("-n", servers, "link", "set", "far", "mtu", "1500")
        for name, gateway in ((learner, "10.99.1.254"), (servers, "10.99.2.254")):
            ip("-n", name, "route", "add", "default", "via", gateway)
        ip("netns", "exec", router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        ip("-n", learner, "addr", "add", "fd99:1::1/64", "dev", "wire", "nodad")
        ip("-n", router, "addr", "add", "fd99:1::fe/64", "dev", "wire-r", "nodad")
        ip("-n", learner, "-6", "route", "add", "default", "via", "fd99:1::fe")
        # Drop the packets silently, as a firewall does. A router without a route would send an error.
        ip("netns", "exec", router, "sysctl", "-q", "-w", "net.ipv6.conf.all.forwarding=1")
        ip("-n", router, "-6", "route", "add", "blackhole", "fd99:2::/64")
        hosts.mkdir(parents=True)
        stack.callback(shutil.rmtree, hosts)
        (hosts / "hosts").write_text(f"127.0.0.1 localhost\n{SERVERS} store.test bus.test\nfd99:2::2 store.test\n")
        yield names


def on(machine: str, *command: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", machine, *command)


@pytest.mark.timeout(300)
def test_what_is_odd_about_the_way_is_named(
    machines: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    learner, _, servers = machines.values()
    report = tmp_path / "doctor.json"
    isthmus = on(learner, sys.executable, "-m", "isthmus_services.main")
    with processes(tmp_path) as p:
        redis = (redis_binary(), "--bind", SERVERS, "--protected-mode", "no", "--port", "6379", "--save", "")
        p.start("redis", *on(servers, *redis))
        weed = ("mini", f"-dir={tmp_path}", f"-ip={SERVERS}", f"-ip.bind={SERVERS}", "-s3.port=9000", "-admin.ui=false")
        p.start("weed", *on(servers, weed_binary(), *weed))
        created = [*isthmus, "init", "s3://way/run", "--create-bucket", "--insecure"]
        wait_for(lambda: subprocess.run(created, capture_output=True, check=False).returncode == 0, "a run is created")
        arguments = ("doctor", "s3://way/run", "--bus", "redis://bus.test", "--size", "0.25", "--json", str(report))
        done = subprocess.run([*isthmus, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {f["check"]: f for f in json.loads(report.read_text())["findings"]}
    for what, name in (("store", "store.test"), ("bus", "bus.test")):
        said = found[f"{what}: way"]["said"]
        assert f"{name} is {SERVERS}" in said
        assert "from 10.99.1.1 by wire (MTU 1500), " in said
        assert said.endswith("gateway 10.99.1.254, path MTU 1300")
    assert f"{SERVERS} (and fd99:2::2)" in found["store: way"]["said"]
    assert found["store: addresses"]["said"].startswith("fd99:2::2: ")
    assert f"{SERVERS} answers" in found["store: addresses"]["said"]
    assert "bus: addresses" not in found, "the bus's name has only one address"
    assert found["store: MTU"]["said"] == f"the path to {SERVERS} takes packets of 1300 bytes, wire sends up to 1500"
