"""Find how Linux routes packets (by rtnetlink, with the rules of VPNs), and its network interfaces (in /sys).

On other systems, and if the kernel may not be asked, the functions return nothing and do not raise.
"""

import ipaddress
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INTERFACES = Path("/sys/class/net")
ANSWER_S = 1.0
ANSWER_BYTES = 1 << 14

# linux/netlink.h and linux/rtnetlink.h
_NEWROUTE, _GETROUTE, _REQUEST = 24, 26, 1
_DESTINATION, _INTERFACE, _GATEWAY, _SOURCE = 1, 4, 5, 7
_HEADER, _ROUTE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBBBBBI"), struct.Struct("=HH")

_OF_CONTAINERS = re.compile(r"docker\d|br-[0-9a-f]{12}$|cni|podman|lxcbr|lxdbr|virbr")


@dataclass(frozen=True)
class Route:
    """The route by which the kernel sends to an address."""

    interface: int
    """Index of the interface."""
    source: str
    gateway: str = ""
    """Empty if the address is reached directly."""


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    up: bool = True
    mtu: int | None = None
    """The largest packet, in bytes."""
    speed: int | None = None
    """Speed in Mbit/s; None if the interface is no device or does not tell."""
    kind: str = ""
    """The kind of an interface on which traffic to other networks is not expected, in words; empty for all others."""

    @property
    def loopback(self) -> bool:
        """Whether the interface leads back to this machine."""
        return self.name == "lo"


def question(address: str) -> bytes:
    """Return the rtnetlink request for the route to an address."""
    parsed = ipaddress.ip_address(address)
    family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
    route = _ROUTE.pack(family, parsed.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
    asked = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(parsed.packed), _DESTINATION) + parsed.packed
    return _HEADER.pack(_HEADER.size + len(route) + len(asked), _GETROUTE, _REQUEST, 1, 0) + route + asked


def answer(said: bytes) -> Route | None:
    """Return the route in the kernel's answer; None if it names none."""
    if len(said) < _HEADER.size + _ROUTE.size:
        return None
    length, kind, *_ = _HEADER.unpack_from(said)
    if kind != _NEWROUTE:
        return None
    found = dict(_attributes(said[_HEADER.size + _ROUTE.size : length]))
    if len(found.get(_INTERFACE, b"")) != 4:
        return None
    (index,) = struct.unpack("=I", found[_INTERFACE])
    return Route(index, _shown(found.get(_SOURCE)), _shown(found.get(_GATEWAY)))


def _attributes(said: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(said):
        length, kind = _ATTRIBUTE.unpack_from(said, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind, said[at + _ATTRIBUTE.size : at + length]
        at += -(-length // 4) * 4


def _shown(address: bytes | None) -> str:
    return str(ipaddress.ip_address(address)) if address else ""


def route_to(address: str) -> Route | None:
    """Return the kernel's route to an address; None if it is not known."""
    if not hasattr(socket, "AF_NETLINK"):
        return None
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            kernel.settimeout(ANSWER_S)
            kernel.send(question(address.partition("%")[0]))
            return answer(kernel.recv(ANSWER_BYTES))
    except OSError:
        return None


def name_of(index: int) -> str:
    """Return an interface's name, or a text with its index if the interface is gone."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return f"interface {index}"


def interfaces(folder: Path = INTERFACES) -> dict[str, Interface]:
    """Return this machine's interfaces by name; none if they cannot be listed."""
    try:
        return {path.name: _interface(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    except OSError:
        return {}


def _interface(folder: Path) -> Interface:
    name = folder.name
    # Interfaces that are no devices (a container's pair, a tunnel) report a meaningless speed. −1 means unknown.
    speed = _number(folder / "speed") if (folder / "device").exists() else None
    # Loopback and tunnels report "unknown" while they are up.
    up = _text(folder / "operstate") in ("up", "unknown")
    if (folder / "tun_flags").exists() or "DEVTYPE=wireguard" in _text(folder / "uevent").split():
        kind = "a VPN"
    elif (folder / "bridge").is_dir() and _OF_CONTAINERS.match(name):
        kind = "a bridge of containers"
    else:
        kind = ""
    return Interface(name, up, _number(folder / "mtu"), speed if speed and speed > 0 else None, kind)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.lstrip("-").isdigit() else None
