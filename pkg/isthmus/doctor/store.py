"""Check the store: access, the run and its log, permissions, atomic creation, checksums, clock and bandwidth."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from isthmus.doctor import rights
from isthmus.doctor.advice import IN_FOLDER, advice_for, freeing, what_failed, what_to_do
from isthmus.doctor.findings import (
    FAILURE,
    NOTE,
    OK,
    WARNING,
    Finding,
    Role,
    RoleKind,
    clock,
    in_the_clear,
    spread,
    untried,
)
from isthmus.doctor.folder_rights import examine_folder_rights
from isthmus.doctor.kinds import recognised
from isthmus.doctor.log import examine_log
from isthmus.errors import (
    Denied,
    InputError,
    IsthmusError,
    LogCorrupt,
    ObjectMissing,
    RunMissing,
    first_cause,
)
from isthmus.format.permissions import CREATE, LIST
from isthmus.format.records.keys import LEARNERS, RUN_KEY, commit_key
from isthmus.log.holes import Holes
from isthmus.log.run import UNREADABLE, Run, read_run, run_below
from isthmus.runtime.clock import Runtime
from isthmus.runtime.urls import Place
from isthmus.store import EdgeStore, compares_sums, endpoint_of, open_store
from isthmus.store.atomic import swept, why_not_create_only
from isthmus.wording import an

RACERS = 16
LATENCY_SAMPLES = 9
NO_RUN = (
    "correct its address; or, if it is right and there never was a run, create it: isthmus init {url}; if there was "
    "one, bring it back (is a mount or a disk lost? its processes' logs say)"
)
SLOW_BYTES_S = 1e6
LISTED_S = 1.0
"""How exactly stores date objects [s]."""


async def is_signed(url: str, runtime: Runtime) -> bool:
    """Return whether a run is signed; False if it cannot be read, which `examine_store` says."""
    if missing_folder(url) is not None:
        return False
    try:
        async with open_store(url, runtime) as store:
            return (await read_run(store)).header.owner is not None
    except IsthmusError:
        return False


def missing_folder(url: str) -> Path | None:
    """Return the folder of a run if it does not exist yet; None if it does, and for a bucket."""
    folder = Place.of(url).folder
    return None if folder is None or folder.exists() else folder


def _not_there(folder: Path, role: Role) -> Iterator[Finding]:
    """Yield the findings about a folder that does not exist, without creating it."""
    above = next(parent for parent in folder.parents if parent.exists())
    check, said = "store: access", f"there is no folder {folder} yet"
    if not os.access(above, os.W_OK | os.X_OK):
        more = f"let this user write in {above} (chown or chmod), or choose another place"
        yield Finding(check, FAILURE, f"{said}, and {above} is not writable", more)
        return
    yield Finding(check, OK, f"{said}; {above} is writable; the other checks need the folder")
    yield _no_run(str(folder), role)


def _no_run(url: str, role: Role) -> Finding:
    return Finding("store: run", WARNING if role.creates else FAILURE, f"no run at {url}", NO_RUN.format(url=url))


async def examine_store(
    url: str, role: Role, runtime: Runtime, size: int, accepted: Holes | None = None
) -> AsyncIterator[Finding | Run]:
    """Yield findings about the store of a run, and the run itself once it is read.

    `size`: bytes that are uploaded and downloaded to measure the bandwidth. `accepted`: holes that are only noted.
    """
    try:
        if (folder := missing_folder(url)) is not None:
            for missing in _not_there(folder, role):
                yield missing
            return
        async with open_store(url, runtime) as store:
            endpoint = endpoint_of(url)
            if endpoint and (said := in_the_clear(endpoint)):
                yield Finding("store: TLS", WARNING, said, advice_for(url).clear)
            for kind in recognised(url):
                yield kind
            async for finding in examine_open_store(store, role, runtime, size, accepted):
                yield finding
    except InputError as error:
        yield Finding("store: address", FAILURE, str(error), "correct the URL of the run, or what is named here")


async def examine_open_store(
    store: EdgeStore, role: Role, runtime: Runtime, size: int, accepted: Holes | None = None
) -> AsyncIterator[Finding | Run]:
    """Yield what `examine_store` does, for a store that is open already."""
    took, advice = [], advice_for(store.url)
    try:
        for _ in range(LATENCY_SAMPLES):
            started = runtime.now()
            with contextlib.suppress(ObjectMissing):
                await store.at_start.get_range(
                    f"{role.place}doctor-{runtime.new_id()}" if role.place else RUN_KEY, 0, 1
                )
            took.append(runtime.now() - started)
    except IsthmusError as error:
        refused, away = advice.refused.format(url=store.url), advice.away.format(url=store.url)
        yield Finding("store: access", FAILURE, what_failed(error), what_to_do(error, store.url, refused, away))
        return
    yield Finding("store: access", OK, f"{store.url} answers: {spread(took)} requests")

    run, signed = None, False
    try:
        run = await read_run(store)
        signed = run.header.owner is not None
        yield run
        yield Finding("store: run", OK, f"run {run.digest[:8].hex()}, {run.layout.size:,} parameters")
    except RunMissing as error:
        if error.beside:
            do = f"restore {store.url}/{RUN_KEY} from a backup, unless a syncer runs"
            yield Finding("store: run", FAILURE, str(error), do)
        elif near := await run_below(store):
            yield Finding("store: run", WARNING, str(RunMissing(store.url, near)), f"name {near}")
        else:
            yield _no_run(store.url, role)
    except InputError as error:
        yield Finding("store: run", FAILURE, str(error), "install the release of Isthmus that created the run")
    except LogCorrupt as error:
        yield Finding("store: run", FAILURE, str(error).removesuffix(f"; {UNREADABLE}"), UNREADABLE)
    except IsthmusError as error:
        refused, away = advice.refused.format(url=store.url), advice.away.format(url=store.url)
        yield Finding("store: run", FAILURE, str(error), what_to_do(error, store.url, refused, away))
    if run is not None:
        async for finding in examine_log(run, store, role, runtime, accepted):
            yield finding

    if role.place:
        listing = advice.listing.format(url=store.url, place=role.place)
        what = f"can list below {role.place}"
        yield await _may(store, store.list(role.place), "store: may list", what, listing, signed=signed)
    atomic = False
    async for finding in _write(store, role, runtime, size, signed=signed):
        yield finding
        atomic |= finding.outcome == OK and finding.check == "store: conditional PUT"
    if role.participant is not None and advice is not IN_FOLDER:
        try:
            async for finding in rights.examine_rights(store, role, runtime):
                yield finding
        except IsthmusError as error:
            yield untried("store: rights", error)
    if run is not None and (folder := Place.of(store.url).folder) is not None:
        yield await examine_folder_rights(run, role, folder, runtime)
    if role.kind != RoleKind.OPERATOR and advice is IN_FOLDER:
        said = f"anyone who can write in this folder can write all of it, not only {an(role.kind)}'s own objects"
        yield Finding("store: must not write for others", NOTE, said, advice.own)
    elif run is not None and atomic:
        async for finding in _must_not(store, role):
            yield finding


async def _may(store: EdgeStore, request: object, check: str, said: str, refused: str, *, signed: bool) -> Finding:
    try:
        await request  # type: ignore[misc]
    except IsthmusError as error:
        taken = freeing(advice_for(store.url).taken, store.url, signed=signed)
        return Finding(check, FAILURE, str(error), what_to_do(error, store.url, refused, taken, signed=signed))
    return Finding(check, OK, said)


async def _write(store: EdgeStore, role: Role, runtime: Runtime, size: int, *, signed: bool) -> AsyncIterator[Finding]:
    """Yield findings about writes: permissions, the store's clock, atomic creation, checksums, bandwidth."""
    key, words = f"{role.place}doctor-{runtime.new_id()}", advice_for(store.url)
    if not role.place:
        return  # this role writes nothing, or nothing that it may delete
    writing = words.writing.format(url=store.url, place=role.place)
    what = f"can write below {role.place}"
    written = await _may(store, store.put(key, bytes(64)), "store: may write", what, writing, signed=signed)
    yield written
    if written.outcome != OK:
        return
    try:
        wall = runtime.wall()
        listed = [entry for entry in await store.list(role.place) if entry.key == key]
    except IsthmusError:
        listed = []  # the check of listing has reported this
    if listed:
        yield clock("store: clock", wall - listed[0].modified, LISTED_S, "the store")
    deleting = words.deleting.format(url=store.url, place=role.place)
    what = f"can delete below {role.place}"
    yield await _may(store, store.delete(key), "store: may delete", what, deleting, signed=signed)

    try:
        why = await why_not_create_only(store, runtime, role.place, racers=RACERS)
        why = why and f"{store.url}: {why}"
    except (IsthmusError, BaseExceptionGroup) as error:
        why = str(first_cause(error))
    if why:
        yield Finding("store: conditional PUT", FAILURE, why, words.creating)
        return
    said = f"an object is created once and not replaced; of {RACERS} concurrent creates, one succeeded"
    yield Finding("store: conditional PUT", OK, said)
    if (sums := await _sums(store, f"{role.place}doctor-{runtime.new_id()}", runtime)) is not None:
        yield sums
    yield await _bandwidth(store, f"{role.place}doctor-{runtime.new_id()}", runtime, size, signed=signed)


async def _sums(store: EdgeStore, key: str, runtime: Runtime) -> Finding | None:
    """Return the finding about whether the store refuses bytes that were cut or changed on the way.

    Returns None for a store to which no checksum is sent.
    """
    check, sha = "store: integrity", not store.url.startswith("s3+aiobotocore:")
    what = "SHA-256" if sha else "MD5"
    try:
        compared = await compares_sums(store.url, key, runtime)
    except IsthmusError as error:
        return untried(check, error)
    if compared is None:
        return None
    if compared:
        return Finding(check, OK, f"a PUT whose bytes do not match its {what} is refused")
    said = f"a PUT whose bytes do not match its {what} is accepted: an interrupted PUT may leave an empty object"
    more = "use s3+aiobotocore://…, whose MD5 most stores compare" if sha else "use a store that compares Content-MD5"
    return Finding(check, WARNING, said, f"{more}; damage is found when objects are read, by their digests")


async def _bandwidth(store: EdgeStore, key: str, runtime: Runtime, size: int, *, signed: bool) -> Finding:
    try:
        async with swept(store, key):
            started = runtime.now()
            await store.put(key, bytearray(size))
            up = runtime.now()
            await store.get(key)
            down = runtime.now()
    except IsthmusError as error:
        large = advice_for(store.url).large
        mend = what_to_do(error, store.url, large, large, signed=signed)
        return Finding("store: bandwidth", FAILURE, f"{error} ({size:,} bytes)", mend)
    said = (
        f"{size / (up - started) / 1e6:.1f} MB/s up, {size / (down - up) / 1e6:.1f} MB/s down, "
        f"by one object of {size / 1e6:.1f} MB"
    )
    slow = min(size / (up - started), size / (down - up)) < SLOW_BYTES_S
    if slow:
        return Finding("store: bandwidth", WARNING, said, advice_for(store.url).slow)
    return Finding("store: bandwidth", OK, said)


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
        return untried(check, error)
    if there is None:
        more = "run the doctor again once the run is under way"
        return Finding(check, WARNING, "not tried: no such object exists yet", more)
    try:
        # The store was found to honour create-only PUT, so even a permitted write changes nothing.
        await store.create(key, there)
    except Denied:
        return Finding(check, OK, f"{key} is out of this role's reach")
    except IsthmusError as error:
        return untried(check, error)
    return Finding(check, FAILURE, f"these credentials may write {key}", advice_for(store.url).own)
