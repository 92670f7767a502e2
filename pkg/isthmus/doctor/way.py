"""Check the network path to store and bus: name, addresses, interface, gateway and packet size.

This comes after the checks of store and bus: by then the kernel knows how large a packet the path takes.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.request import getproxies_environment, proxy_bypass

from isthmus.doctor import routes
from isthmus.doctor.findings import FAILURE, NOTE, OK, WARNING, CheckOutcome, Finding, Role, RoleKind
from isthmus.doctor.routes import Interface, Route
from isthmus.errors import InputError
from isthmus.runtime.clock import Runtime
from isthmus.runtime.urls import Place
from isthmus.store import endpoint_of

CONNECT_S = 3.0
"""How long to wait for a connection [s]: as long as the clients of store and bus wait."""

ADDRESSES_MAX = 8
RESOLVED_S = 1.0
_MTU_OF = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
"""IP_MTU of linux/in.h and IPV6_MTU of linux/in6.h, for which Python has no names."""

PORTS = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379}
USED_BY = {"store": "AWS_ENDPOINT_URL", "bus": "--bus"}
"""The setting that usually names the host, by what is looked for."""

NAMED_BY = {"gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_ENDPOINT"}
"""The setting that names the host, by the scheme of a store with another one."""


@dataclass(frozen=True)
class ConnectionAttempt:
    """The attempt to connect to one address of a host."""

    address: str
    took_s: float
    error: str = ""
    """Why there is no connection; empty if there is one."""
    source: str = ""
    mtu: int | None = None
    """The largest packet that the path takes, in bytes, as far as the kernel knows."""


@dataclass(frozen=True)
class Way:
    """What was found out about the network path to a host."""

    what: str
    """`store` or `bus`."""
    host: str
    port: int
    resolved_s: float
    attempts: Sequence[ConnectionAttempt]
    route: Route | None
    """Route to the first address that answers; None if it is not known."""
    interfaces: Mapping[str, Interface]
    used: str = ""
    """Name of the route's interface; empty if the route is not known."""
    named_by: str = ""
    """The environment variable that names the host, if it is not the usual one of `USED_BY`.

    It is a proxy's, or that of Google or Azure.
    """


async def examine_way(what: str, url: str, runtime: Runtime) -> AsyncIterator[Finding]:
    """Yield findings about the network path to a store or bus; none if it is not on a network."""
    try:
        target = Place.of((endpoint_of(url) if what == "store" else url) or "")
    except InputError:
        return  # the check that opened the store or bus has reported this
    if target.scheme not in PORTS:
        return
    proxy, through = ("", target.url) if what == "bus" else proxy_for(target, Place.of(url).scheme)
    try:
        via = Place.of(through if "://" in through else f"http://{through}")
        host, port = via.host or "localhost", via.port or PORTS.get(via.scheme, 80)
    except InputError as error:
        yield Finding(f"{what}: way", WARNING, f"{proxy}: {error}", f"correct {proxy}")
        return
    if proxy:
        said = f"requests to {target} go through the proxy {host}:{port} ({proxy})"
        yield Finding(f"{what}: proxy", NOTE, said, f"if none is wanted, set NO_PROXY={target.host}")
    named_by = proxy or NAMED_BY.get(Place.of(url).scheme, "")
    for finding in judge(await _look(what, host, port, named_by, runtime)):
        yield finding


def proxy_for(target: Place, scheme: str) -> tuple[str, str]:
    """Return the variable that makes a store's client use a proxy, and its URL; if none, "" and the target's URL."""
    given = getproxies_environment()
    if proxy_bypass(target.authority.rpartition("@")[2]):
        return "", target.url
    # obstore's client heeds ALL_PROXY, too; aiobotocore does not.
    for kind in (target.scheme, *(() if scheme == "s3+aiobotocore" else ("all",))):
        if kind in given:
            return f"{kind.upper()}_PROXY", given[kind]
    return "", target.url


async def _look(what: str, host: str, port: int, named_by: str, runtime: Runtime) -> Way:
    began = runtime.now()
    try:
        found = await runtime.offload(socket.getaddrinfo, host, port, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        failed = ConnectionAttempt("", runtime.now() - began, getattr(error, "strerror", None) or str(error))
        return Way(what, host, port, failed.took_s, [failed], None, {}, "", named_by)
    took = runtime.now() - began
    places = list(dict.fromkeys((family, place) for family, _, _, _, place in found))[:ADDRESSES_MAX]
    attempts = await asyncio.gather(*(_attempt(family, place, runtime) for family, place in places))
    first = next((attempt for attempt in attempts if not attempt.error), None)
    route = routes.route_to(first.address) if first else None
    used = routes.name_of(route.interface) if route else ""
    return Way(what, host, port, took, attempts, route, routes.interfaces(), used, named_by)


async def _attempt(family: int, place: tuple[object, ...], runtime: Runtime) -> ConnectionAttempt:
    began, address = runtime.now(), str(place[0])
    try:
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.setblocking(False)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(s, place), CONNECT_S)
            took = runtime.now() - began
            mtu = s.getsockopt(*_MTU_OF[socket.AddressFamily(family)]) if sys.platform == "linux" else None
            return ConnectionAttempt(address, took, "", str(s.getsockname()[0]), mtu)
    except TimeoutError:
        return ConnectionAttempt(address, runtime.now() - began, f"no answer in {CONNECT_S:.0f} s")
    except OSError as error:
        return ConnectionAttempt(
            address, runtime.now() - began, os.strerror(error.errno).lower() if error.errno else str(error)
        )


def judge(way: Way) -> Iterator[Finding]:
    """Yield the findings about a network path."""
    good = [attempt for attempt in way.attempts if not attempt.error]
    bad = [attempt for attempt in way.attempts if attempt.error]
    check, where = f"{way.what}: way", f"[{way.host}]:{way.port}" if ":" in way.host else f"{way.host}:{way.port}"
    if not any(attempt.address for attempt in way.attempts):
        advice = f"correct {way.named_by or USED_BY[way.what]}, or give this name an address (DNS, or /etc/hosts)"
        yield Finding(check, WARNING, f"the name {way.host} cannot be resolved: {way.attempts[0].error}", advice)
        return
    if not good:
        said = "; ".join(f"{attempt.address}: {attempt.error}" for attempt in bad)
        advice = "start the server there, or let this machine through (routes, firewalls, security groups)"
        yield Finding(check, WARNING, f"{where} cannot be reached: {said}", advice)
        return
    yield Finding(check, OK, _told(way, good[0]))
    if way.resolved_s > RESOLVED_S:
        said = f"finding the addresses of {way.host} took {way.resolved_s:.1f} s"
        more = "remove servers that do not answer from /etc/resolv.conf"
        yield Finding(f"{way.what}: name", WARNING, said, more)
    if bad:
        yield _dead(way, good[0], bad)
    yield from _odd(way, good[0])


def _told(way: Way, attempt: ConnectionAttempt) -> str:
    others = [other.address for other in way.attempts if other is not attempt]
    also = f" (and {', '.join(others)})" if others else ""
    name = "" if way.host == attempt.address else f"{way.host} is "
    said = f"{name}{attempt.address}{also}, found in {way.resolved_s * 1e3:.0f} ms, "
    said += f"connected in {attempt.took_s * 1e3:.0f} ms from {attempt.source}"
    if way.route is None:
        return f"{said}; this system does not report the interface"
    used = way.interfaces.get(way.used, Interface(way.used))
    facts = [f"MTU {used.mtu}"] if used.mtu else []
    facts += [f"{used.speed} Mbit/s"] if used.speed else []
    said += f" by {used.name}" + (f" ({', '.join(facts)})" if facts else "")
    if not used.loopback:
        said += f", gateway {way.route.gateway}" if way.route.gateway else ", directly"
    return f"{said}, path MTU {attempt.mtu}" if attempt.mtu else said


def _dead(way: Way, good: ConnectionAttempt, bad: Sequence[ConnectionAttempt]) -> Finding:
    said = "; ".join(f"{attempt.address}: {attempt.error}" for attempt in bad)
    lost = sum(attempt.took_s for attempt in bad)
    said += f"; {good.address} answers: a client that tries it last loses {lost:.1f} s each time"
    advice = f"remove addresses that do not answer from the records of {way.host}, or give this machine a route to them"
    return Finding(f"{way.what}: addresses", WARNING, said, advice)


def _odd(way: Way, attempt: ConnectionAttempt) -> Iterator[Finding]:
    used = way.interfaces.get(way.used)
    if used is None or used.loopback:
        return
    if attempt.mtu and used.mtu and attempt.mtu < used.mtu:
        said = f"the path to {attempt.address} takes packets of {attempt.mtu} bytes, {used.name} sends up to {used.mtu}"
        advice = (
            f"run ip link set dev {used.name} mtu {attempt.mtu}: transfers hang if a firewall on the path drops ICMP"
        )
        yield Finding(f"{way.what}: MTU", WARNING, said, advice)
    others = [i for i in way.interfaces.values() if i.up and not i.loopback and not i.kind and i.name != used.name]
    if used.kind and others:
        also = ", ".join(i.name for i in others)
        said = f"traffic goes through {used.name}, {used.kind}; there is also {also}"
        yield Finding(f"{way.what}: interface", WARNING, said, _elsewhere(attempt, others[0]))
    faster = [i for i in others if i.speed and used.speed and i.speed > used.speed]
    if faster:
        best = max(faster, key=lambda i: i.speed or 0)
        said = f"traffic goes through {used.name} with {used.speed} Mbit/s; {best.name} has {best.speed}"
        yield Finding(f"{way.what}: speed", WARNING, said, _elsewhere(attempt, best))


def _elsewhere(attempt: ConnectionAttempt, other: Interface) -> str:
    command = f"ip route add {attempt.address} via GATEWAY dev {other.name}"
    return f"if this is not intended, add a route through {other.name}, by its gateway: {command}"


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def examine_ranks(role: Role) -> Iterator[Finding]:
    """Yield findings about whether the ranks of a learner on several machines would find each other."""
    own = socket.gethostname()
    try:
        addresses = sorted({str(place[0]) for *_, place in socket.getaddrinfo(own, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        addresses = []
    yield from judge_ranks(role, os.environ, [name for _, name in socket.if_nameindex()], own, addresses)


def judge_ranks(
    role: Role, environment: Mapping[str, str], names: Sequence[str], own: str, addresses: Sequence[str]
) -> Iterator[Finding]:
    """Yield the findings about the interface variables and about the addresses of this machine's own name.

    `environment`: the environment variables. `names`: this machine's interfaces. `own`: its own name.
    """
    outcome: CheckOutcome = FAILURE if role.kind == RoleKind.LEARNER else WARNING
    for variable in (GLOO, NCCL):
        given = environment.get(variable, "")
        if missing := _missing(variable, given, names):
            said = f"{variable}={given}: there is no {', '.join(missing)} here, but {', '.join(names)}"
            yield Finding(
                f"machine: {variable}", outcome, said, "name an existing interface, or ranks will not find each other"
            )
    local = all(address.startswith("127.") or address == "::1" for address in addresses)
    if role.kind == RoleKind.LEARNER and not environment.get(GLOO) and local:
        leads = ", ".join(addresses) or "nowhere"
        said = f"this machine's own name, {own}, resolves to {leads}: ranks on other machines would get that address"
        advice = f"if a learner's ranks are on several machines, set {GLOO}=INTERFACE, or put the name into /etc/hosts"
        yield Finding("machine: own name", NOTE, said, advice)


def _missing(variable: str, given: str, names: Sequence[str]) -> list[str]:
    if variable == NCCL:
        if given.startswith("^"):  # NCCL uses all interfaces but these
            return []
        exact, wanted = given.startswith("="), given.removeprefix("=")
        asked = [(word.partition(":")[0] if exact else word) for word in wanted.split(",") if word]
        there = [any(name == word if exact else name.startswith(word) for name in names) for word in asked]
        return [] if any(there) else asked
    return [word for word in given.split(",") if word and word not in names]
