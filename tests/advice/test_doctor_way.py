"""`isthmus doctor` names the faults of a network: a learner's machine, a router, and servers, each in a namespace.

    learner 10.99.1.1 ── wire (1500) ── router ── far (1300) ── servers 10.99.2.2

The store's name also has an IPv6 address, whose packets the router drops. Packets of full size do not fit the path.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from advice.doctors import Doctor, small_run
from advice.rows import row
from e2e.test_processes import processes, wait_for
from isthmus_services.servers import ACCESS_KEY, SECRET_KEY, redis_binary, weed_binary

pytestmark = [
    pytest.mark.tier("all"),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces want root and ip"),
]

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


@pytest.fixture
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


REDIS = ("--bind", SERVERS, "--protected-mode", "no", "--port", "6379", "--save", "")


@dataclass
class Learner:
    """The learner's machine, where the doctor runs with the rows of a test."""

    name: str
    doctor: Doctor

    def prints(self, *words: str, program: tuple[str, ...] = ("-m", "isthmus_services.main")) -> str:
        done = subprocess.run(
            on(self.name, sys.executable, *program, "doctor", *words, "--size", "0.25"),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def finds(self, text: str) -> str:
        return self.doctor.of({"": text}).finds("")

    def finds_no_more(self, text: str) -> str:
        return self.doctor.of({"": text}).finds_no_more("")

    def does(self, command: str) -> None:
        """Run a command as root of this machine."""
        subprocess.run(on(self.name, *command.split()), check=True)


@row(
    "doctor", "store: addresses: …: no answer in 3 s; … answers: a client that tries it last loses … s each time",
    means="The store's name has several addresses, and one of them does not answer from here.",
    do="remove addresses that do not answer from the records of …, or give this machine a route to them",
    then="`ok store: way`, with the addresses that are left",
)  # fmt: skip
@row(
    "doctor", "store: MTU: the path to … takes packets of … bytes, … sends up to …",
    means="A tunnel or a router on the way takes smaller packets than this machine sends at first.",
    do="run ip link set dev … mtu …: transfers hang if a firewall on the path drops ICMP", then="no more word of it",
)  # fmt: skip
@pytest.mark.timeout(300)
def test_a_narrow_way_and_a_dead_address(
    machines: dict[str, str], doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    learner, servers = Learner(machines["learner"], doctor), machines["servers"]
    with processes(tmp_path) as p:
        p.start("redis", *on(servers, redis_binary(), *REDIS))
        weed = ("mini", f"-dir={tmp_path}", f"-ip={SERVERS}", f"-ip.bind={SERVERS}", "-s3.port=9000", "-admin.ui=false")
        p.start("weed", *on(servers, weed_binary(), *weed))
        init = (sys.executable, "-m", "isthmus_services.main", "init", "s3://way/run", "--create-bucket", "--insecure")
        created = on(learner.name, *init)
        wait_for(lambda: subprocess.run(created, capture_output=True, check=False).returncode == 0, "a run is created")
        words = ("s3://way/run", "--bus", "redis://bus.test")
        text = learner.finds(learner.prints(*words))
        for what, name in (("store", "store.test"), ("bus", "bus.test")):
            said = re.findall(rf"ok      {what}: way: (.*)", text)[0]
            assert f"{name} is {SERVERS}" in said
            assert "from 10.99.1.1 by wire (MTU 1500), " in said
            assert said.endswith("gateway 10.99.1.254, path MTU 1300")
        assert f"{SERVERS} (and fd99:2::2)" in text
        assert "bus: addresses" not in text, "the bus's name has only one address"
        learner.does(re.findall(r"run (ip link set dev \S+ mtu \d+)", text)[0])
        hosts = Path("/etc/netns") / learner.name / "hosts"
        hosts.write_text(
            "".join(line for line in hosts.read_text().splitlines(keepends=True) if "fd99:2::2" not in line)
        )
        learner.finds_no_more(learner.prints(*words))


OTHER = (
    "import sys; from pathlib import Path; from isthmus.doctor import routes; from isthmus_services.main import main; "
)


@row(
    "doctor", "bus: interface: traffic goes through …, a bridge of containers; there is also …",
    means="The way leads through an interface that is not made for it, and there is another one.",
    do="if this is not intended, add a route through …, by its gateway: ip route add … via GATEWAY dev …",
    then="`ok bus: way`, by the other interface",
)  # fmt: skip
@row(
    "doctor", "bus: speed: traffic goes through … with … Mbit/s; … has …",
    means="The way leads through a slower interface than this machine has.",
    do="if this is not intended, add a route through …, by its gateway: ip route add … via GATEWAY dev …",
    then="`ok bus: way`, by the other interface",
)  # fmt: skip
@pytest.mark.timeout(300)
def test_a_way_by_the_wrong_interface(machines: dict[str, str], doctor: Doctor, tmp_path: Path) -> None:
    """Kinds and speeds of the interfaces are read from a copy of /sys: they are virtual, and all of one kind."""
    learner = Learner(machines["learner"], doctor)
    wire(learner.name, machines["router"], "docker0", 1500, "10.99.5.1/24", "10.99.5.254/24")
    learner.does("ip route replace default via 10.99.5.254")
    for name, speed in (("docker0", 1000), ("wire", 25000)):
        for below in ("device", "bridge") if name == "docker0" else ("device",):
            (tmp_path / "net" / name / below).mkdir(parents=True)
        for file, value in (("operstate", "up"), ("mtu", "1500"), ("speed", speed)):
            (tmp_path / "net" / name / file).write_text(f"{value}\n")
    program = ("-c", f"{OTHER}routes.interfaces.__defaults__ = (Path('{tmp_path}/net'),); sys.exit(main())")
    words = (small_run(tmp_path / "run"), "--bus", "redis://bus.test")
    with processes(tmp_path) as p:
        p.start("redis", *on(machines["servers"], redis_binary(), *REDIS))
        text = learner.finds(learner.prints(*words, program=program))
        learner.does(re.findall(r"(ip route add .*)", text)[0].replace("GATEWAY", "10.99.1.254"))
        assert " by wire " in learner.finds_no_more(learner.prints(*words, program=program))


DNS = """
import socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind(("10.99.2.2", 53))
    while True:
        asked, who = s.recvfrom(512)
        end = asked.index(b"\\0", 12) + 5
        is_a = asked[end - 4 : end - 2] == b"\\0\\1"
        head = asked[:2] + struct.pack(">HHHHH", 0x8180, 1, is_a, 0, 0)
        found = struct.pack(">HHHIH", 0xC00C, 1, 1, 60, 4) + socket.inet_aton("10.99.2.2") if is_a else b""
        s.sendto(head + asked[12:end] + found, who)
"""


@row(
    "doctor", "bus: name: finding the addresses of … took … s",
    means="A name server does not answer, so each look-up waits before it asks the next one.",
    do="remove servers that do not answer from /etc/resolv.conf", then="no more word of it",
)  # fmt: skip
@pytest.mark.timeout(300)
def test_a_name_server_that_does_not_answer(machines: dict[str, str], doctor: Doctor, tmp_path: Path) -> None:
    learner = Learner(machines["learner"], doctor)
    ip("-n", machines["router"], "route", "add", "blackhole", "10.99.7.0/24")
    resolver = Path("/etc/netns") / learner.name / "resolv.conf"
    resolver.write_text(f"nameserver 10.99.7.7\nnameserver {SERVERS}\noptions timeout:2 attempts:1\n")
    words = (small_run(tmp_path / "run"), "--bus", "redis://slow.test")
    with processes(tmp_path) as p:
        p.start("redis", *on(machines["servers"], redis_binary(), *REDIS))
        p.start("dns", *on(machines["servers"], sys.executable, "-c", DNS))
        learner.finds(learner.prints(*words))
        resolver.write_text(
            "".join(line for line in resolver.read_text().splitlines(keepends=True) if "10.99.7.7" not in line)
        )
        assert f"slow.test is {SERVERS}" in learner.finds_no_more(learner.prints(*words))
