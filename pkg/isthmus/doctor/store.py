"""The store: reachable, permitted, atomic, on time, fast enough."""

import contextlib
from collections.abc import AsyncIterator

from isthmus.doctor.findings import FAILURE, OK, WARNING, Finding, Role, clock, spread
from isthmus.errors import Denied, InputError, IsthmusError, ObjectMissing, RunMissing, Unavailable, first_cause
from isthmus.records.objects import LEARNERS, RUN_KEY, commit_key
from isthmus.run import Run, read_run
from isthmus.runtime import Runtime
from isthmus.store import AT_START, RUNNING, EdgeStore, open_store
from isthmus.store.atomic import swept, why_not_create_only

RACERS = 16
LATENCY_SAMPLES = 9
SLOW_BYTES_S = 1e6
LISTED_S = 1.0
"""Stores date objects to the second."""


async def examine_store(url: str, role: Role, runtime: Runtime, size: int) -> AsyncIterator[Finding | Run]:
    """Yield findings, and the run once it is read; `size` in bytes is moved up and down to measure the bandwidth."""
    try:
        async with open_store(url, runtime) as store:
            store.patience = AT_START
            async for finding in examine_open_store(store, role, runtime, size):
                yield finding
    except InputError as error:
        yield Finding("store: address", FAILURE, str(error), "correct the URL of the run")


async def examine_open_store(store: EdgeStore, role: Role, runtime: Runtime, size: int) -> AsyncIterator[Finding | Run]:
    """See `examine_store`."""
    took = []
    try:
        for _ in range(LATENCY_SAMPLES):
            started = runtime.now()
            with contextlib.suppress(ObjectMissing):
                await store.get(f"{role.place}doctor-{runtime.new_id()}")
            took.append(runtime.now() - started)
    except Denied as error:
        advice = "check bucket, credentials and the permissions to get and to list (a missing key must be 404, not 403)"
        yield Finding("store: access", FAILURE, str(error), advice)
        return
    except (Unavailable, InputError) as error:
        yield Finding("store: access", FAILURE, str(error), "check endpoint (AWS_ENDPOINT_URL), network and name")
        return
    store.patience = RUNNING
    yield Finding("store: access", OK, f"{store.url} answers: {spread(took)} requests")

    run = None
    try:
        run = await read_run(store)
        yield run
        yield Finding("store: run", OK, f"run {run.digest[:8].hex()}, {run.layout.size:,} parameters")
    except RunMissing as error:
        yield Finding("store: run", WARNING, str(error), "create it: isthmus init")
    except IsthmusError as error:
        yield Finding("store: run", FAILURE, str(error), "restore the run object, or choose another prefix")

    yield await _may(store.list(role.place), "store: may list", f"can list below {role.place}", "grant s3:ListBucket")
    atomic = False
    async for finding in _write(store, role, runtime, size):
        yield finding
        atomic |= finding.outcome == OK and finding.check == "store: conditional PUT"
    if run is not None and atomic:
        async for finding in _must_not(store, role):
            yield finding


async def _may(request: object, check: str, said: str, advice: str) -> Finding:
    try:
        await request  # type: ignore[misc]
    except IsthmusError as error:
        return Finding(check, FAILURE, str(error), advice)
    return Finding(check, OK, said)


async def _write(store: EdgeStore, role: Role, runtime: Runtime, size: int) -> AsyncIterator[Finding]:
    """Whether this role can create and delete where it must; atomically; with which clock and bandwidth."""
    key = f"{role.place}doctor-{runtime.new_id()}"
    try:
        await store.put(key, bytes(64))
    except IsthmusError as error:
        yield Finding("store: may write", FAILURE, str(error), f"grant s3:PutObject below {role.place}")
        return
    yield Finding("store: may write", OK, f"can write below {role.place}")
    try:
        wall = runtime.wall()
        listed = [entry for entry in await store.list(role.place) if entry.key == key]
    except IsthmusError:
        listed = []  # said above already
    if listed:
        yield clock("store: clock", wall - listed[0].modified, LISTED_S, "the store")
    yield await _may(store.delete(key), "store: may delete", f"can delete below {role.place}", "grant s3:DeleteObject")

    try:
        why = await why_not_create_only(store, runtime, role.place, racers=RACERS)
    except (IsthmusError, BaseExceptionGroup) as error:
        why = str(first_cause(error))
    if why:
        advice = "use a store that honours it: AWS S3, MinIO, SeaweedFS, R2; a syncer refuses this one"
        yield Finding("store: conditional PUT", FAILURE, why, advice)
        return
    yield Finding("store: conditional PUT", OK, f"If-None-Match: * is honoured; of {RACERS} at once, one got through")
    yield await _bandwidth(store, f"{role.place}doctor-{runtime.new_id()}", runtime, size)


async def _bandwidth(store: EdgeStore, key: str, runtime: Runtime, size: int) -> Finding:
    try:
        async with swept(store, key):
            started = runtime.now()
            await store.put(key, bytearray(size))
            up = runtime.now()
            await store.get(key)
            down = runtime.now()
    except IsthmusError as error:
        return Finding("store: bandwidth", FAILURE, str(error), f"objects of {size:,} bytes must get through")
    said = (
        f"{size / (up - started) / 1e6:.1f} MB/s up, {size / (down - up) / 1e6:.1f} MB/s down, "
        f"by one object of {size / 1e6:.1f} MB"
    )
    slow = min(size / (up - started), size / (down - up)) < SLOW_BYTES_S
    advice = "choose a closer region, a smaller codec (int4) or a larger H (--sync-every)" if slow else ""
    return Finding("store: bandwidth", WARNING if slow else OK, said, advice)


async def _must_not(store: EdgeStore, role: Role) -> AsyncIterator[Finding]:
    """Whether this role is kept from what is not its own: tried with the bytes that are there already."""
    if role.kind == "operator":
        return
    forbidden = {"the run object": RUN_KEY}
    if role.kind == "learner":
        forbidden["a commit"] = commit_key(0, 1)
    try:
        claims = [e.key for e in await store.list(LEARNERS) if e.key.endswith("/claim")]
    except IsthmusError:
        claims = []
    others = [key for key in claims if role.kind != "learner" or key.split("/")[1] != role.learner]
    forbidden["another's claim"] = others[0] if others else ""
    for what, key in forbidden.items():
        yield await _refuses(store, role, what, key)


async def _refuses(store: EdgeStore, role: Role, what: str, key: str) -> Finding:
    check = f"store: must not write {what}"
    try:
        there = await store.get(key) if key else None
    except ObjectMissing:
        there = None
    except IsthmusError as error:
        return Finding(check, WARNING, str(error), "try again")
    if there is None:
        return Finding(check, WARNING, "not tried: there is none yet", "ask again once the run is under way")
    try:
        # Create-only was proved above: even where it is allowed, nothing changes.
        await store.create(key, there)
    except Denied:
        return Finding(check, OK, f"{key} is out of this role's reach")
    except IsthmusError as error:
        return Finding(check, WARNING, str(error), "try again")
    advice = f"give the {role.kind} credentials of its own (infra/aws has the policies)"
    return Finding(check, FAILURE, f"these credentials may write {key}", advice)
