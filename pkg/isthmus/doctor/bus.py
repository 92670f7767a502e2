"""Check the bus: access, permissions, and the version and settings of its server."""

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from isthmus.bus import Bus, in_store, open_bus
from isthmus.bus.base import VALUE_MAX, Refused
from isthmus.bus.redis import PRIMARY, RedisBus, ServerFacts
from isthmus.doctor.advice import what_failed
from isthmus.doctor.findings import (
    FAILURE,
    NOTE,
    OK,
    WARNING,
    Finding,
    Role,
    clock,
    in_the_clear,
    spread,
    untried,
)
from isthmus.errors import Denied, InputError, IsthmusError, Unavailable
from isthmus.format.records.messages import SYNCER_STREAM
from isthmus.runtime.clock import Runtime
from isthmus.runtime.urls import Place
from isthmus.store import open_store
from isthmus.wording import an

LATENCY_SAMPLES = 20
OLDEST_VERSION = (6, 0)
"""The first version with users (ACL) and HELLO."""

KEY_ACL = (7, 0)
"""The first version whose ACL tells keys that may be read from keys that may be written."""

BYPASS_FIXED = {(7, 2): (7, 2, 16), (7, 4): (7, 4, 11), (8, 6): (8, 6, 6), (8, 8): (8, 8, 2)}
"""By release line, the version that fixed XREAD and XREADGROUP. Earlier versions let them read streams that the ACL
denies."""

FULL_SHARE = 0.8
"""Share of maxmemory in use above which a warning is given."""


async def examine_bus(url: str, run: bytes, role: Role, runtime: Runtime, place: str = "") -> AsyncIterator[Finding]:
    """Yield findings about the bus of a run.

    `run`: the run's digest; `place`: the URL of the run, for a bus in its store.
    """
    if not role.on_bus:
        yield Finding("bus: access", OK, f"not needed: {an(role.kind)} does not use the bus")
        return
    try:
        if (folder := missing(url)) is not None:
            said = f"not tried: {folder}, the folder of its file, does not exist yet"
            yield Finding(
                "bus: access",
                WARNING,
                said,
                "correct --bus; or, if there is no run yet, run the doctor again once it is created",
            )
            return
        if in_store(url):
            async with open_store(place, runtime) as store, open_bus(url, run, store) as bus:
                yield await _in_store(bus, role, runtime)
            return
        async with open_bus(url, run, None) as bus:
            async for finding in _examine(bus, role, runtime):
                yield finding
    except InputError as error:
        yield Finding("bus: address", FAILURE, str(error), "correct --bus or ISTHMUS_BUS: redis://host:port")


def missing(url: str) -> Path | None:
    """Return the folder of an embedded bus if it does not exist, since opening the bus would create it; else None."""
    place = Place.of(url)
    folder = Path(place.path).parent
    return folder if place.scheme == "sqlite" and not folder.exists() else None


def _on_disk(bus: Bus, error: IsthmusError) -> str:
    """Return the advice for an embedded bus that cannot be used; empty for a server."""
    place = Place.of(bus.url)
    path = Path(place.path)
    if place.scheme != "sqlite":
        return ""
    if isinstance(error, Refused):
        return (
            f"make room on the disk of {path.parent} (df -h {path.parent}): processes then go on by themselves. If "
            f"{path}-wal is large, end all processes of the run and delete {path}, {path}-wal and {path}-shm: nothing "
            "is lost"
        )
    if isinstance(error, Unavailable):
        return "do what this says: processes then go on by themselves"
    if "it is a link" in str(error):
        return "remove the link, or name the file that it leads to"
    return f"let this user write {path} and in {path.parent} (SQLite keeps two more files beside it), on a local disk"


async def _in_store(bus: Bus, role: Role, runtime: Runtime) -> Finding:
    """Return the finding about a bus in the run's store, where the store's permissions decide who may say what."""
    try:
        started = runtime.now()
        await bus.tail(role.stream or SYNCER_STREAM)
        took_ms = 1e3 * (runtime.now() - started)
        return Finding("bus: access", OK, f"in the run's own store; a look for messages takes {took_ms:.0f} ms")
    except IsthmusError as error:
        more = "do what the checks of the store say: the bus is in it"
        return Finding("bus: access", FAILURE, what_failed(error), more)


async def _examine(bus: Bus, role: Role, runtime: Runtime) -> AsyncIterator[Finding]:
    took, position = [], ""
    try:
        for _ in range(LATENCY_SAMPLES):
            started = runtime.now()
            position = await bus.tail(role.stream or SYNCER_STREAM)
            took.append(runtime.now() - started)
        if role.hears_all:
            await bus.names()
    except Denied as error:
        advice = (
            _on_disk(bus, error) or f"use the {role.kind}'s own user and password, with the ACL of `isthmus access`"
        )
        yield Finding("bus: access", FAILURE, str(error), advice)
        return
    except IsthmusError as error:
        advice = (
            _on_disk(bus, error) or "correct --bus (rediss:// for TLS), or start the server that should answer there"
        )
        yield Finding("bus: access", FAILURE, str(error), advice)
        return
    yield Finding("bus: access", OK, f"{bus.url} answers: {spread(took)} requests")
    if isinstance(bus, RedisBus):
        yield _tls(bus)
        try:
            before = runtime.wall()
            facts = await bus.facts()
        except IsthmusError as error:
            more = "grant the user +info and +time (ACL SETUSER)"
            yield Finding("bus: server", WARNING, f"cannot query the server: {error}", more)
        else:
            for finding in judge(facts):
                yield finding
            yield clock("bus: clock", before - facts.time, 0.1, "the bus")
        yield await _values(bus)
    if role.stream:
        yield await _stream(bus, role, position)
    async for finding in _more_than_its_part(bus, role):
        yield finding


async def _more_than_its_part(bus: Bus, role: Role) -> AsyncIterator[Finding]:
    """Yield findings about what the user may do beyond its role: a single one if no user is named for the bus."""
    found = []
    if isinstance(bus, RedisBus) and role.participant is not None:
        found.append(await _administers(bus, role))
    if role.others_streams:
        found.append(await _must_not(bus, role))
    if isinstance(bus, RedisBus) and not role.hears_all:
        found.append(await _must_not_hear(bus, role))
    over = [finding for finding in found if finding.advice == _of_its_own(role)]
    if over and isinstance(bus, RedisBus) and not bus.user:
        alike = "no user of the bus is named, so all participants have the same rights there"
        more = "nothing, if all participants trust each other; else give each its user of `isthmus access` (Redis 7)"
        yield Finding("bus: users", WARNING, f"{alike}: {'; '.join(finding.said for finding in over)}", more)
        found = [finding for finding in found if finding not in over]
    for finding in found:
        yield finding


def _tls(bus: RedisBus) -> Finding:
    check = "bus: TLS"
    if said := in_the_clear(bus.url):
        more = "let the server listen with TLS, and use rediss://; --bus-ca FILE names your own authorities"
        return Finding(check, WARNING, said, more)
    if not bus.url.startswith("rediss:"):
        return Finding(check, OK, "none, and none is needed: the traffic stays on this machine")
    if not bus.verifies:
        said = "certificates are not verified (ssl_cert_reqs), so any server that answers is believed"
        more = "leave ssl_cert_reqs out of the URL of the bus; --bus-ca FILE names your own authorities"
        return Finding(check, WARNING, said, more)
    return Finding(check, OK, "the server's certificate is verified")


async def _administers(bus: RedisBus, role: Role) -> Finding:
    check = "bus: must not administer"
    try:
        found = await bus.administers()
    except IsthmusError as error:
        return untried(check, error)
    if found:
        return Finding(check, FAILURE, f"this user may use {', '.join(found)}", _of_its_own(role))
    return Finding(check, OK, "settings, deletions and other users are out of this user's reach")


async def _must_not_hear(bus: Bus, role: Role) -> Finding:
    check = "bus: must not hear others"
    for other in (s for s in role.others_streams if s != SYNCER_STREAM):
        try:
            await bus.tail(other)
        except Denied:
            continue
        except IsthmusError as error:
            return untried(check, error)
        return Finding(check, WARNING, f"this user may listen to {other}", _of_its_own(role))
    return Finding(check, OK, "it hears the syncers and itself")


async def _values(bus: RedisBus) -> Finding:
    """Return whether the server accepts oversized values, with which one message could fill its memory.

    Only administrators may read the setting, so the limit is tried.
    """
    check = "bus: value size"
    try:
        unbounded = await bus.takes(VALUE_MAX + 1)
    except IsthmusError as error:
        return untried(check, error)
    if unbounded:
        said = f"values over {VALUE_MAX >> 20} MiB are accepted: one message can fill the server's memory"
        return Finding(check, WARNING, said, "start the server with proto-max-bulk-len 1mb, if it allows this")
    return Finding(check, OK, f"values over {VALUE_MAX >> 20} MiB are refused")


async def _stream(bus: Bus, role: Role, position: str) -> Finding:
    try:
        await bus.append(role.stream, b"")
        said = await bus.read({role.stream: position}, 2.0)
    except Denied as error:
        return Finding("bus: streams", FAILURE, str(error), _on_disk(bus, error) or _of_its_own(role))
    except IsthmusError as error:
        more = _on_disk(bus, error)
        if not more:
            with suppress(IsthmusError):
                more = why.remedy if (why := await bus.refusing()) else ""
        more = more or "do what the server asks for; its log and INFO say more"
        return Finding("bus: streams", FAILURE, str(error), more)
    if not said.get(role.stream):
        more = "use the address of the one primary, without a proxy or load balancer that spreads requests"
        return Finding("bus: streams", FAILURE, "the appended message could not be read back", more)
    return Finding("bus: streams", OK, f"append, blocking read and look-up work on {role.stream}")


async def _must_not(bus: Bus, role: Role) -> Finding:
    check = "bus: must not write for others"
    if Place.of(bus.url).scheme == "sqlite":
        said = "anyone who can write this file can act as any participant"
        more = "if participants do not trust each other, use Redis with an ACL (`isthmus access`)"
        return Finding(check, NOTE, said, more)
    for other in role.others_streams:
        try:
            await bus.append(other, b"")
        except Denied:
            continue
        except IsthmusError as error:
            return untried(check, error)
        return Finding(check, FAILURE, f"this user may speak as {other}", _of_its_own(role))
    return Finding(check, OK, f"{' and '.join(role.others_streams)}: out of this role's reach")


def _of_its_own(role: Role) -> str:
    return f"use the {role.kind}'s own user, with the ACL that `isthmus access` writes"


def judge(facts: ServerFacts) -> list[Finding]:
    """Return the findings about what a Redis server reports about itself."""
    name = "Valkey" if facts.valkey else "Redis"
    shown = ".".join(map(str, facts.version))
    found = []
    if facts.version[:2] < OLDEST_VERSION:
        found.append(Finding("bus: version", FAILURE, f"{name} {shown}", "use Redis 7.2 or newer"))
    elif not facts.valkey and (bypass := _bypass(facts.version)):
        found.append(
            Finding("bus: version", WARNING, f"{name} {shown}: {bypass}", "use 7.2.16, 7.4.11, 8.6.6, 8.8.2 or newer")
        )
    else:
        found.append(Finding("bus: version", OK, f"{name} {shown}"))
    if facts.mode == "cluster":
        advice = "use one primary (with replicas): streams of a run are read together, across slots"
        found.append(Finding("bus: mode", FAILURE, "the server is part of a Redis Cluster", advice))
    if facts.role != PRIMARY:
        said = f"the server is a {'replica' if facts.role == 'slave' else facts.role}"
        found.append(Finding("bus: mode", FAILURE, said, "use the primary's address"))
    if facts.append_only:
        found.append(Finding("bus: persistence", OK, "append-only file"))
    else:
        said = "no append-only file: after a restart, agents repeat their messages within a heartbeat or two"
        more = "start the server with appendonly yes and appendfsync everysec"
        found.append(Finding("bus: persistence", WARNING, said, more))
    return [*found, *_memory(facts)]


def _memory(facts: ServerFacts) -> list[Finding]:
    check, policy = "bus: eviction", facts.eviction_policy
    if policy == "noeviction":
        found = [Finding(check, OK, "noeviction")]
    else:
        advice = "start the server with maxmemory-policy noeviction: if a stream is evicted, learners miss a round"
        limited = facts.memory_max > 0
        said = f"{policy} at {facts.memory_max / 1e6:.0f} MB" if limited else f"{policy}, without a limit for now"
        found = [Finding(check, FAILURE if limited else WARNING, said, advice)]
    if not facts.memory_max:
        said = "no maxmemory: messages can fill the machine's memory"
        more = "start the server with maxmemory 128mb (a managed server has its own limit)"
        found.append(Finding("bus: memory", WARNING, said, more))
    if facts.memory_max and facts.memory_used > FULL_SHARE * facts.memory_max:
        said = f"{facts.memory_used / facts.memory_max:.0%} of {facts.memory_max / 1e6:.0f} MB in use"
        more = "raise maxmemory, or delete what else is stored on this server"
        if policy == "noeviction" and facts.memory_used >= facts.memory_max:
            said = f"the server is full, and refuses messages: {said}"
            more += ": then processes go on by themselves"
            found.append(Finding("bus: memory", FAILURE, said, more))
        else:
            found.append(Finding("bus: memory", WARNING, said, more))
    return found


def _bypass(version: tuple[int, ...]) -> str:
    if version[:2] < KEY_ACL:
        return "ACLs of this version cannot allow reading a stream without writing"
    fixed = next((v for line, v in sorted(BYPASS_FIXED.items()) if version[:2] <= line), None)
    return (
        "XREAD bypasses key ACLs (fixed in later versions); this matters if learners do not trust each other"
        if (fixed is not None and version < fixed)
        else ""
    )
