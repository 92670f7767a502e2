"""Check whether the run is signed and is the expected one, whether this process may take part, and whether the bus is
the run's."""

import math
import os
from collections.abc import AsyncIterator, Iterator

from isthmus.bus import BUSES, Bus, open_bus
from isthmus.bus.base import READ_MAX
from isthmus.doctor.bus import missing
from isthmus.doctor.findings import FAILURE, NOTE, OK, WARNING, Finding, Role, RoleKind
from isthmus.errors import InputError, IsthmusError, RecordInvalid
from isthmus.format.records.messages import SYNCER_STREAM, Alive, AnyMessage
from isthmus.format.rules import MemberRole
from isthmus.format.signing import fingerprint
from isthmus.log import Log
from isthmus.log.bus_messages import verify_batch
from isthmus.log.membership import Members
from isthmus.log.run import Run
from isthmus.log.trust import KEY, OWNER, RUN_DIGEST, Trust, is_near, trust_of
from isthmus.runtime.clock import Runtime
from isthmus.store import open_store
from isthmus.wording import FROZEN, an, key_file, lasting

RECENT_S = 60.0
"""Somebody commits if the newest commit is not older than this [s]."""

LATELY_S = 3600.0
"""A run whose newest commit is older than this [s] is taken for over: nobody expects to hear its syncers."""

HEARTBEATS = 3
"""How many heartbeats of the run to wait for a syncer's message, and how many of silence show that there is none."""

LOOKED_AT = 8
"""In a run that is under way every fragment is committed, so so many are enough to see it."""

MEMBER = {RoleKind(role): role for role in MemberRole if role != MemberRole.FOLLOWER}
"""The roles that only members may have."""


def brought(key: str | None, owner: str | None, run_digest: str | None) -> tuple[Trust, list[Finding]]:
    """Return the trust that a process brings to a run, and a finding for each argument that cannot be used."""
    environment = {name: value for name, value in os.environ.items() if name not in (KEY, OWNER, RUN_DIGEST)}
    given: list[Trust] = []
    found: list[Finding] = []
    for flag, variable, one in (
        ("key", KEY, {"key": key}),
        ("owner", OWNER, {"owner": owner}),
        ("run-digest", RUN_DIGEST, {"run_digest": run_digest}),
    ):
        try:
            given.append(trust_of(**one, environment=environment))  # type: ignore[arg-type]
        except InputError as error:
            given.append(Trust())
            found.append(Finding(f"run: {flag}", FAILURE, str(error), f"correct --{flag} ({variable}) as this says"))
    return Trust(given[0].signer, given[1].owner, False, given[2].run_digest), found


def examine_trust(url: str, bus: str, run: Run, trust: Trust) -> Iterator[Finding]:
    """Yield findings about whether a run is signed, and whether it is the one that a process asks for."""
    owner = run.header.owner
    if owner is not None:
        yield Finding("run: signatures", OK, f"everything is signed; the owner is {fingerprint(owner)}")
    elif is_near(url) and is_near(bus):
        yield Finding("run: signatures", OK, "nothing is signed, in a folder or on loopback")
    else:
        said = "nothing in this run is signed: anyone who can write to its store or bus can act as any participant"
        yield Finding(
            "run: signatures", WARNING, said, "create runs with a key: isthmus init --key OWNER_KEY_FILE (SECURITY.md)"
        )
    try:
        Trust(owner=trust.owner).judge(run)
    except InputError as error:
        mine = f"--owner {fingerprint(owner)}" if owner else "no --owner (ISTHMUS_OWNER)"
        more = f"correct the URL; or, if this is the run you trust, pass {mine}"
        yield Finding("run: owner", FAILURE, str(error), more)
    try:
        Trust(run_digest=trust.run_digest).judge(run)
    except InputError as error:
        more = f"correct the URL; or, if this is the run you trust, pass --run-digest {run.digest.hex()}"
        yield Finding("run: digest", FAILURE, str(error), more)


async def examine_part(
    url: str,
    bus: str,
    run: Run,
    role: Role,
    trust: Trust,
    runtime: Runtime,
    *,
    full: bool = False,
    failed: bool = False,
) -> AsyncIterator[Finding]:
    """Yield findings about whether this key may take part in the run, and whether the syncers are heard on this bus.

    `full`: whether the store was found to be full, which silences syncers or ends them. `failed`: whether a check of
    the bus failed, which explains why nobody is heard. Faults of the store and of the
    bus themselves are found by other checks, and yield nothing here.
    """
    try:
        async with open_store(url, runtime) as store:
            log = Log(run, store.at_start, runtime)
            await log.members.refresh(log.store)
            if (finding := judge_key(log.members, role, trust)) is not None:
                yield finding
            if role.on_bus and bus and not failed and missing(bus) is None:
                async with open_bus(bus, run.digest, store, run.pace.heartbeat_s) as opened:
                    yield await _is_of_run(log, opened, runtime, role.kind, full=full)
    except IsthmusError:
        return


def judge_key(members: Members, role: Role, trust: Trust) -> Finding | None:
    """Return the finding about whether a key may take part in a role; None if there is none and the role needs none."""
    check, signer, now, url = "run: key", trust.signer, members.current, members.run.url
    owner = "the owner" if now.charter is None else "an owner"
    wanted, needs = MEMBER.get(role.kind), role.kind in MEMBER or role.kind == RoleKind.OWNER
    name = role.learner if role.kind == RoleKind.LEARNER and role.learner != Role.learner else None
    if not members.signed:
        if signer is None:
            return None
        said = "nothing in this run is signed, since it was created without an owner's key"
        return Finding(check, FAILURE, said, f"leave --key out, and unset {KEY}")
    if signer is None:
        if not needs:
            return None
        said = f"everything in this run is signed, and no key is given: {an(role.kind)} cannot take part"
        return Finding(check, FAILURE, said, f"pass the key of the {role.kind} (--key {key_file(role.kind)}, or {KEY})")
    mine = fingerprint(signer.author)
    if signer.author in now.owners and (now.charter is None or role.kind == RoleKind.OWNER):
        whose = "the owner's key" if now.charter is None else f"the key of the owner {now.owners[signer.author]}"
        return Finding(check, OK, f"{mine} is {whose}")
    if role.kind == RoleKind.OWNER and now.charter is not None:
        theirs = ", ".join(f"{owner}: {fingerprint(key)}" for key, owner in now.owners.items())
        said = f"{mine} is no owner's key; the charter names {theirs}"
        return Finding(check, FAILURE, said, "pass one of these keys; or the owners agree on another charter")
    if role.kind == RoleKind.OWNER:
        said = f"{mine} is not the owner's key; this is {fingerprint(now.owner)}"
        hands = f"isthmus members rotate {url} --successor NEW_OWNER_KEY_FILE --key OWNER_KEY_FILE"
        more = f"pass that key; or the owner hands over: {hands}"
        return Finding(check, FAILURE, said, more)
    roles = (wanted,) if wanted else tuple(MemberRole)
    if now.permits(signer.author, roles, name):
        names = [f"{n} ({r})" for r in roles for n in now.names_of(signer.author, r)]
        return Finding(check, OK, f"{mine} is a member: {', '.join(names)}")
    outcome = FAILURE if needs else WARNING
    there = now.member(name) if name else None
    names = [f"{m.name} ({m.role})" for m in now.members if m.key == signer.author]
    if there is not None and there.key != signer.author and not names:
        said = f"{there.name} has another key, {fingerprint(there.key)}, and not {mine}"
        rotate = f"isthmus members rotate {url} --member {there.name} --public-key FILE.pub"
        rotate += f" --key OWNER_KEY_FILE{now.approving}"
        return Finding(check, outcome, said, f"pass that key; or {owner} gives {there.name} this one: {rotate}")
    add = (
        f"isthmus members add {url} {name or 'NAME'} --as {wanted or 'ROLE'} --public-key FILE.pub --key OWNER_KEY_FILE"
    )
    add += now.approving
    last = next((m for m in reversed(members.versions) if m.permits(signer.author, roles, name)), None)
    if last is not None:
        said = f"{name or 'this member'} was expelled by membership {last.version + 1}, and the key is {mine}"
        return Finding(check, outcome, said, f"{owner} admits it again: {add}")
    if names:
        other = f"{name} ({wanted})" if name else an(wanted or "member")
        said = f"{mine} is the key of {', '.join(names)}, and not of {other}"
        more = f"pass the name and role of this key (--learner, --role), or the key of this {role.kind}"
        return Finding(check, outcome, said, more)
    return Finding(check, outcome, f"{mine} is no member of this run", f"{owner} admits it: {add}")


async def _is_of_run(
    log: Log, bus: Bus, runtime: Runtime, role: RoleKind = RoleKind.OPERATOR, *, full: bool = False
) -> Finding:
    """Return the finding about whether this is the bus of the run's syncers.

    If they were heard here and are not any more, they have ended.
    """
    check, silence_s = "run: bus", HEARTBEATS * log.run.pace.heartbeat_s
    heads = [await log.newest(f.index) for f in log.run.layout.fragments[:LOOKED_AT]]
    age_s = min((runtime.wall() - head.header.written_at for head in heads if head is not None), default=math.inf)
    never = math.isinf(age_s)
    async for _ in _said_by_syncers(log, bus, silence_s, runtime, silence_s):
        return Finding(check, OK, "the run's syncers are heard here")
    if never:
        said = (
            "nothing was committed yet, and no syncer is heard here: this may be the bus of its syncers, or another one"
        )
        return Finding(check, NOTE, said, f"start a syncer; or, if one runs, give --bus the URL that it has: {BUSES}")
    stopped: dict[str, bool] = {}
    async for message in _said_by_syncers(log, bus, max(0.0, age_s) + RECENT_S, runtime, 0.0):
        if isinstance(message, Alive):
            stopped[message.syncer] = message.stopping
    if stopped and age_s <= LATELY_S:
        quiet_s = 2 * silence_s  # this long before the look, and as long during it, none spoke
        while quiet_s < age_s + RECENT_S and not await _spoke(log, bus, 2 * quiet_s, runtime):
            quiet_s *= 2
        said = (
            f"syncers were heard here, and the last word of one is {quiet_s:.0f} to {2 * quiet_s:.0f} s old; the last "
            f"commit is {age_s:.0f} s old"
        )
        more = (
            f"unless the run is over: if a syncer lives (pgrep -af isthmus on its machine), {FROZEN}; else start one "
            "again by its old command; its log says why it ended (nothing, if it was killed: its machine or container "
            "engine may know)"
        )
        if full:
            said += "; the store is full"
            more = (
                "make room first, as `store: may write` says. A syncer that still runs then goes on by itself; one "
                "that has ended is to be started again by its old command, unless the run is over"
            )
        meant = all(stopped.values()) or role == RoleKind.SYNCER or age_s > RECENT_S
        return Finding(check, WARNING if meant else FAILURE, said, more)
    if age_s > RECENT_S:
        since = f"the last commit is {lasting(age_s)} old"
        said = f"no syncer is heard on this bus (none runs, or it has another), and {since}"
        more = f"unless the run is over, start a syncer; or, if one runs, give --bus the URL that it has: {BUSES}"
        return Finding(check, WARNING if role == RoleKind.LEARNER else NOTE, said, more)
    said = f"the run was committed to {max(0.0, age_s):.0f} s ago, and none of its syncers is heard on this bus"
    more = (
        f"if one lives, this is not its bus: give --bus the URL that it has: {BUSES}; if none does, they have ended, "
        "and this bus was emptied: start one by its old command"
    )
    return Finding(check, FAILURE, said, more)


async def _spoke(log: Log, bus: Bus, back_s: float, runtime: Runtime) -> bool:
    """Return whether a syncer spoke in the last `back_s` seconds."""
    async for _ in _said_by_syncers(log, bus, back_s, runtime, 0.0):
        return True
    return False


async def _said_by_syncers(
    log: Log, bus: Bus, back_s: float, runtime: Runtime, wait_s: float
) -> AsyncIterator[AnyMessage]:
    """Yield what syncers said on this bus in the last `back_s` seconds, and what they say in the next `wait_s`."""
    positions = await bus.ago([SYNCER_STREAM], back_s)
    until, members = runtime.now() + wait_s, log.members if log.members.signed else None
    while found := await bus.read(positions, max(0.0, until - runtime.now())):
        said = found.get(SYNCER_STREAM, ())
        for item in said:
            positions = {SYNCER_STREAM: item.position}
            try:
                messages = verify_batch(SYNCER_STREAM, item.body, log.run.digest, members) if item.body else ()
            except RecordInvalid:
                continue
            for message in messages:
                yield message
        if runtime.now() >= until and len(said) < READ_MAX:
            return  # everything until now was read; syncers may write as fast as this reads, for ever
