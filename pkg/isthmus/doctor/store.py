"""Check the store: access, the run and its log, permissions, atomic creation, checksums, clock and bandwidth."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from isthmus.doctor import rights
from isthmus.doctor.findings import FAILURE, NOTE, OK, WARNING, Finding, Role, RoleKind, clock, in_the_clear, spread
from isthmus.doctor.log import examine_log
from isthmus.errors import (
    BucketMissing,
    Denied,
    InputError,
    IsthmusError,
    ObjectMissing,
    RunMissing,
    StoreFull,
    Unavailable,
    first_cause,
)
from isthmus.format.permissions import CREATE, LIST
from isthmus.format.records.keys import LEARNERS, RUN_KEY, commit_key
from isthmus.log.run import Run, read_run, run_below
from isthmus.runtime.clock import Runtime
from isthmus.runtime.urls import Place
from isthmus.store import EdgeStore, Store, compares_sums, endpoint_of, open_store
from isthmus.store.atomic import swept, why_not_create_only

RACERS = 16
LATENCY_SAMPLES = 9
SLOW_BYTES_S = 1e6
LISTED_S = 1.0
"""How exactly stores date objects [s]."""


@dataclass(frozen=True)
class Advice:
    """What to do about each problem, worded for one kind of store."""

    refused: str
    away: str
    listing: str
    writing: str
    deleting: str
    creating: str
    slow: str
    taken: str
    """For a write that the store neither accepts nor denies."""


IN_BUCKET = Advice(
    "check bucket, credentials and the permissions to get and to list (a missing key must be 404, not 403)",
    "check endpoint (AWS_ENDPOINT_URL), network and name",
    "grant s3:ListBucket",
    "grant s3:PutObject below {place}",
    "grant s3:DeleteObject below {place}",
    "use a store that honours it: AWS S3, MinIO, SeaweedFS, R2; a syncer refuses this one",
    "choose a closer region, a smaller codec (int4) or a larger H (--sync-every)",
    "the store answers but refuses writes: check whether it is full (disks, volumes, quota) or unhealthy; {gc}",
)
IN_FOLDER = Advice(
    "let this user read and enter {url} and what is in it: see owner and mode (ls -ld), chown or chmod",
    "check that the disk or network share of {url} is mounted and healthy",
    "let this user read {url}/{place}: chown or chmod",
    "let this user write in {url}/{place}: chown or chmod, and a mount that is not read-only",
    "let this user write in {url}/{place}: chown or chmod",
    "use a file system with atomic hard links (ext4, xfs; not FAT, and few network shares); a syncer refuses this one",
    "use a faster disk, a smaller codec (int4) or a larger H (--sync-every)",
    "check whether the file system is full or damaged (df, its quota, the kernel's log); {gc}",
)


def _advice(store: Store) -> Advice:
    return IN_BUCKET if Place.of(store.url).in_bucket else IN_FOLDER


def missing_folder(url: str) -> Path | None:
    """Return the folder of a run if it does not exist yet; None if it does, and for a bucket."""
    folder = Place.of(url).folder
    return None if folder is None or folder.exists() else folder


def _not_there(folder: Path) -> Iterator[Finding]:
    """Yield the findings about a folder that does not exist, without creating it."""
    above = next(parent for parent in folder.parents if parent.exists())
    check, said = "store: access", f"there is no folder {folder} yet"
    if not os.access(above, os.W_OK | os.X_OK):
        yield Finding(check, FAILURE, f"{said}, and {above} is not writable", "choose another place, or chown it")
        return
    yield Finding(check, OK, f"{said}; {above} is writable; the other checks need the folder")
    yield Finding("store: run", WARNING, f"no run at {folder}", "create it: isthmus init")


async def examine_store(url: str, role: Role, runtime: Runtime, size: int) -> AsyncIterator[Finding | Run]:
    """Yield findings about the store of a run, and the run itself once it is read.

    `size`: bytes that are uploaded and downloaded to measure the bandwidth.
    """
    try:
        if (folder := missing_folder(url)) is not None:
            for missing in _not_there(folder):
                yield missing
            return
        async with open_store(url, runtime) as store:
            endpoint = endpoint_of(url)
            if endpoint and (said := in_the_clear(endpoint)):
                yield Finding(
                    "store: TLS", WARNING, said, "use an endpoint with https:// (AWS_ENDPOINT_URL, AWS_CA_BUNDLE)"
                )
            async for finding in examine_open_store(store, role, runtime, size):
                yield finding
    except InputError as error:
        yield Finding("store: address", FAILURE, str(error), "correct the URL of the run")


async def examine_open_store(store: EdgeStore, role: Role, runtime: Runtime, size: int) -> AsyncIterator[Finding | Run]:
    """Yield what `examine_store` does, for a store that is open already."""
    took, advice = [], _advice(store)
    try:
        for _ in range(LATENCY_SAMPLES):
            started = runtime.now()
            with contextlib.suppress(ObjectMissing):
                await store.at_start.get_range(
                    f"{role.place}doctor-{runtime.new_id()}" if role.place else RUN_KEY, 0, 1
                )
            took.append(runtime.now() - started)
    except BucketMissing as error:
        yield Finding("store: access", FAILURE, str(error), f"create it: isthmus init {store.url} --create-bucket")
        return
    except Denied as error:
        yield Finding("store: access", FAILURE, str(error), advice.refused.format(url=store.url))
        return
    except (Unavailable, InputError) as error:
        yield Finding("store: access", FAILURE, str(error), advice.away.format(url=store.url))
        return
    yield Finding("store: access", OK, f"{store.url} answers: {spread(took)} requests")

    run = None
    try:
        run = await read_run(store)
        yield run
        yield Finding("store: run", OK, f"run {run.digest[:8].hex()}, {run.layout.size:,} parameters")
    except RunMissing as error:
        near = await run_below(store)
        said, what = (
            (str(RunMissing(store.url, near)), f"name {near}") if near else (str(error), "create it: isthmus init")
        )
        yield Finding("store: run", WARNING, said, what)
    except IsthmusError as error:
        yield Finding("store: run", FAILURE, str(error), "restore the run object, or choose another prefix")
    if run is not None:
        async for finding in examine_log(run, store, role, runtime):
            yield finding

    if role.place:
        listing = advice.listing.format(url=store.url, place=role.place)
        yield await _may(store.list(role.place), "store: may list", f"can list below {role.place}", listing)
    atomic = False
    async for finding in _write(store, role, runtime, size):
        yield finding
        atomic |= finding.outcome == OK and finding.check == "store: conditional PUT"
    if role.participant is not None and advice is IN_BUCKET:
        try:
            async for finding in rights.examine_rights(store, role, runtime):
                yield finding
        except IsthmusError as error:
            yield Finding("store: rights", WARNING, f"not all was tried: {error}", "try again")
    if role.kind != RoleKind.OPERATOR and advice is IN_FOLDER:
        said = (
            f"anyone who can write in this folder can write all of it; nothing keeps a {role.kind} to its own objects"
        )
        more = "if participants do not trust each other, use a bucket with a policy for each (`isthmus access`)"
        yield Finding("store: must not write for others", NOTE, said, more)
    elif run is not None and atomic:
        async for finding in _must_not(store, role):
            yield finding


async def _may(request: object, check: str, said: str, advice: str) -> Finding:
    try:
        await request  # type: ignore[misc]
    except IsthmusError as error:
        return Finding(check, FAILURE, str(error), advice)
    return Finding(check, OK, said)


async def _write(store: EdgeStore, role: Role, runtime: Runtime, size: int) -> AsyncIterator[Finding]:
    """Yield findings about writes: permissions, the store's clock, atomic creation, checksums, bandwidth."""
    key, words = f"{role.place}doctor-{runtime.new_id()}", _advice(store)
    if not role.place:
        return  # this role writes nothing, or nothing that it may delete
    try:
        await store.put(key, bytes(64))
    except IsthmusError as error:
        if isinstance(error, StoreFull):
            advice = "make room; until then nothing is merged, and nothing is lost"
        elif isinstance(error, Unavailable):
            collect = f"isthmus gc {store.url} --apply frees what the run does not need any more"
            advice = words.taken.format(gc=collect)
        else:
            advice = words.writing.format(url=store.url, place=role.place)
        yield Finding("store: may write", FAILURE, str(error), advice)
        return
    yield Finding("store: may write", OK, f"can write below {role.place}")
    try:
        wall = runtime.wall()
        listed = [entry for entry in await store.list(role.place) if entry.key == key]
    except IsthmusError:
        listed = []  # the check of listing has reported this
    if listed:
        yield clock("store: clock", wall - listed[0].modified, LISTED_S, "the store")
    deleting = words.deleting.format(url=store.url, place=role.place)
    yield await _may(store.delete(key), "store: may delete", f"can delete below {role.place}", deleting)

    try:
        why = await why_not_create_only(store, runtime, role.place, racers=RACERS)
    except (IsthmusError, BaseExceptionGroup) as error:
        why = str(first_cause(error))
    if why:
        yield Finding("store: conditional PUT", FAILURE, why, words.creating)
        return
    yield Finding(
        "store: conditional PUT", OK, f"If-None-Match: * is honoured; of {RACERS} concurrent creates, one succeeded"
    )
    if (sums := await _sums(store, f"{role.place}doctor-{runtime.new_id()}", runtime)) is not None:
        yield sums
    yield await _bandwidth(store, f"{role.place}doctor-{runtime.new_id()}", runtime, size)


async def _sums(store: EdgeStore, key: str, runtime: Runtime) -> Finding | None:
    """Return the finding about whether the store refuses bytes that were cut or changed on the way.

    Returns None for a store to which no checksum is sent.
    """
    check, sha = "store: integrity", not store.url.startswith("s3+aiobotocore:")
    what = "SHA-256" if sha else "MD5"
    try:
        compared = await compares_sums(store.url, key, runtime)
    except IsthmusError as error:
        return Finding(check, WARNING, f"not tried: {error}", "try again")
    if compared is None:
        return None
    if compared:
        return Finding(check, OK, f"a PUT whose bytes do not match its {what} is refused")
    said = f"a PUT whose bytes do not match its {what} is accepted: an interrupted PUT may leave an empty object"
    more = "use s3+aiobotocore://…, whose MD5 most stores compare" if sha else "use a store that compares Content-MD5"
    return Finding(check, WARNING, said, f"{more}; damage is found when objects are read, by their digests")


async def _bandwidth(store: EdgeStore, key: str, runtime: Runtime, size: int) -> Finding:
    try:
        async with swept(store, key):
            started = runtime.now()
            await store.put(key, bytearray(size))
            up = runtime.now()
            await store.get(key)
            down = runtime.now()
    except IsthmusError as error:
        return Finding(
            "store: bandwidth",
            FAILURE,
            str(error),
            f"the store must accept objects of {size:,} bytes: check its limits",
        )
    said = (
        f"{size / (up - started) / 1e6:.1f} MB/s up, {size / (down - up) / 1e6:.1f} MB/s down, "
        f"by one object of {size / 1e6:.1f} MB"
    )
    slow = min(size / (up - started), size / (down - up)) < SLOW_BYTES_S
    advice = _advice(store).slow if slow else ""
    return Finding("store: bandwidth", WARNING if slow else OK, said, advice)


async def _must_not(store: EdgeStore, role: Role) -> AsyncIterator[Finding]:
    """Yield findings about whether the store denies this role writes to objects that are not its own.

    Each write repeats the stored bytes of an object, if the role may read them.
    """
    if role.kind == RoleKind.OPERATOR:
        return
    forbidden = {"the run object": RUN_KEY, "a commit": commit_key(0, 1)}
    forbidden = {what: key for what, key in forbidden.items() if not role.may(CREATE, key)}
    if role.may(LIST, LEARNERS):
        try:
            claims = [e.key for e in await store.list(LEARNERS) if e.key.endswith("/claim")]
        except IsthmusError:
            claims = []
        others = [key for key in claims if role.kind != RoleKind.LEARNER or key.split("/")[1] != role.learner]
        forbidden["another's claim"] = others[0] if others else ""
    for what, key in forbidden.items():
        yield await _refuses(store, role, what, key)


async def _refuses(store: EdgeStore, role: Role, what: str, key: str) -> Finding:
    check = f"store: must not write {what}"
    try:
        there = await store.get(key) if key else None
    except ObjectMissing:
        there = None
    except Denied:
        there = bytearray(b"isthmus: doctor")  # the object exists, and create-only bytes do not replace it
    except IsthmusError as error:
        return Finding(check, WARNING, str(error), "try again")
    if there is None:
        return Finding(
            check, WARNING, "not tried: no such object exists yet", "run the doctor again once the run is under way"
        )
    try:
        # The store was found to honour create-only PUT, so even a permitted write changes nothing.
        await store.create(key, there)
    except Denied:
        return Finding(check, OK, f"{key} is out of this role's reach")
    except IsthmusError as error:
        return Finding(check, WARNING, str(error), "try again")
    advice = f"give the {role.kind} credentials of its own (`isthmus access` writes the policies)"
    return Finding(check, FAILURE, f"these credentials may write {key}", advice)
