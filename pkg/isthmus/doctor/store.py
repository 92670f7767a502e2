"""The store: reachable, permitted, atomic, on time, fast enough."""

import contextlib
from collections.abc import AsyncIterator

from isthmus.doctor.findings import FAILURE, OK, WARNING, Finding, Role, clock, spread
from isthmus.errors import Denied, InputError, IsthmusError, ObjectMissing, RunMissing, Unavailable
from isthmus.records.objects import RUN_KEY, commit_key
from isthmus.run import Run, read_run
from isthmus.runtime import Runtime
from isthmus.store import AT_START, RUNNING, EdgeStore, open_store
from isthmus.store.atomic import why_not_create_only

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
    key, body = f"{role.place}doctor-{runtime.new_id()}", bytes(64)
    try:
        await store.put(key, body)
    except IsthmusError as error:
        yield Finding("store: may write", FAILURE, str(error), f"grant s3:PutObject below {role.place}")
        return
    yield Finding("store: may write", OK, f"can write below {role.place}")
    wall = runtime.wall()
    listed = [entry for entry in await store.list(role.place) if entry.key == key]
    if listed:
        yield clock("store: clock", wall - listed[0].modified, LISTED_S, "the store")
    yield await _may(store.delete(key), "store: may delete", f"can delete below {role.place}", "grant s3:DeleteObject")

    try:
        why = await why_not_create_only(store, runtime, role.place, racers=RACERS)
    except IsthmusError as error:
        why = str(error)
    if why:
        advice = "use a store that honours it: AWS S3, MinIO, SeaweedFS, R2; a syncer refuses this one"
        yield Finding("store: conditional PUT", FAILURE, why, advice)
        return
    yield Finding("store: conditional PUT", OK, f"If-None-Match: * is honoured; of {RACERS} at once, one got through")

    key = f"{role.place}doctor-{runtime.new_id()}"
    try:
        started = runtime.now()
        await store.put(key, bytearray(size))
        up = runtime.now()
        await store.get(key)
        down = runtime.now()
        await store.delete(key)
    except IsthmusError as error:
        yield Finding("store: bandwidth", FAILURE, str(error), f"objects of {size:,} bytes must get through")
        return
    slower = min(size / (up - started), size / (down - up))
    said = (
        f"{size / (up - started) / 1e6:.1f} MB/s up, {size / (down - up) / 1e6:.1f} MB/s down, "
        f"by one object of {size / 1e6:.1f} MB"
    )
    slow = slower < SLOW_BYTES_S
    advice = "choose a closer region, a smaller codec (int4) or a larger H (--sync-every)" if slow else ""
    yield Finding("store: bandwidth", WARNING if slow else OK, said, advice)


async def _must_not(store: EdgeStore, role: Role) -> AsyncIterator[Finding]:
    """Whether this role is kept from what is not its own: tried with the bytes that are there already."""
    if role.kind == "operator":
        return
    forbidden = {"the run object": RUN_KEY}
    if role.kind == "learner":
        forbidden["a commit"] = commit_key(0, 1)
    for what, key in forbidden.items():
        try:
            there = await store.get(key)
        except ObjectMissing:
            continue
        try:
            # Create-only was proved above: even where it is allowed, nothing changes.
            await store.create(key, there)
        except Denied:
            yield Finding(f"store: must not write {what}", OK, f"{key} is out of this role's reach")
        except Unavailable as error:
            yield Finding(f"store: must not write {what}", WARNING, str(error), "try again")
        else:
            advice = f"give the {role.kind} credentials of its own (infra/aws has the policies)"
            yield Finding(f"store: must not write {what}", FAILURE, f"these credentials may write {key}", advice)
