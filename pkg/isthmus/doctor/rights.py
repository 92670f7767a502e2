"""Test the table of permissions in a bucket: what a role may do, and what it must not. No objects are left behind.

Reads and deletes are tried on keys that do not exist, since a store checks the permission first. Writes are tried only
if the store verifies checksums, with bytes that do not match theirs: the store checks the permission first, and then
refuses the bytes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext

from isthmus.doctor.advice import advice_for
from isthmus.doctor.findings import FAILURE, NOTE, OK, SOMEBODY, WARNING, Finding, Role, untried
from isthmus.errors import Denied, IsthmusError, ObjectMissing
from isthmus.format.permissions import (
    CREATE,
    DELETE,
    FRAGMENT,
    GRANTS,
    LIST,
    OWN,
    READ,
    REPLACE,
    RUN,
    Operation,
    grants,
)
from isthmus.runtime.clock import Runtime
from isthmus.store import Probe, Store, open_probe
from isthmus.wording import an

AT_ONCE = 8
SHOWN = 3
"""The most keys that a finding names."""

VERB: Mapping[Operation, str] = {
    READ: "read",
    LIST: "list",
    CREATE: "create",
    REPLACE: "write over",
    DELETE: "delete",
}


async def examine_rights(store: Store, role: Role, runtime: Runtime) -> AsyncIterator[Finding]:
    """Yield findings about what a participant's credentials allow and what they deny."""
    mark = f"doctor-{runtime.new_id()}"
    everything = dict.fromkeys(p for given in GRANTS.values() for grant in given for p in grant.patterns)
    others = [_key(pattern.replace(OWN, SOMEBODY), mark) for pattern in everything if not pattern.endswith("/")]
    others = [key for key in others if key != "run"]  # this object exists
    own = {op: [_key(p, mark) for g in _own(role) if g[0] == op for p in g[1]] for op in Operation if op != LIST}
    lists = [_key(p.rstrip("*"), mark) for operation, patterns in _own(role) if operation == LIST for p in patterns]

    async def get(key: str) -> object:
        return await store.get_range(key, 0, 1)

    # If a role may read keys, AWS must also let it list them: otherwise the answer for a missing key is 403.
    hidden = [f"updates/00000/{SOMEBODY}/", f"learners/{SOMEBODY}/", f"evaluations/{SOMEBODY}/"]
    hidden = [prefix for prefix in hidden if not (role.may(LIST, prefix) or role.may(READ, f"{prefix}x"))]
    for part in (
        _all_may(store, READ, own[READ], get),
        # Prefixes with all participants' objects are long and are not tried: a role that lists them lists short ones.
        _all_may(store, LIST, [prefix for prefix in lists if _is_short(prefix)], store.list),
        _none_may(store, READ, [key for key in others if not role.may(READ, key)], get),
        _none_may(store, LIST, hidden, store.list),
        _none_may(store, DELETE, [key for key in others if not role.may(DELETE, key)], store.delete),
    ):
        async for finding in part:
            yield finding

    free = [key for key in others if not role.may(CREATE, key)]
    once = [key for key in own[CREATE] if not role.may(REPLACE, key)]
    try:
        async with open_probe(store.url, f"{role.place}{mark}", runtime) if role.place else nullcontext() as probe:
            if probe is None:
                said = "this client sends no checksum that this store compares"
                said = f"not tried: {said if role.place else f'{an(role.kind)} has no key of its own to try it on'}"
                more = "run the doctor again with these credentials and another --role: its writes must be refused"
                yield Finding("store: must not create", NOTE, said, more)
                return
            async for finding in _writes(store, probe, free, once, [*own[CREATE], *own[REPLACE]]):
                yield finding
    except IsthmusError as error:
        yield untried("store: must not create", error)


async def _writes(
    store: Store, probe: Probe, free: Sequence[str], once: Sequence[str], needed: Sequence[str]
) -> AsyncIterator[Finding]:
    async for finding in _none_may(store, CREATE, free, lambda key: probe(key, True)):
        yield finding
    async for finding in _all_may(store, CREATE, needed, lambda key: probe(key, True)):
        yield finding
    if not once:
        return
    found, _ = await _tried(once, lambda key: probe(key, False))
    check = "store: must not write over"
    if not found:
        yield Finding(check, OK, f"created objects cannot be overwritten: {_shown(once)} only with If-None-Match")
        return
    said = f"these credentials may overwrite objects that are created only once: {_shown(found)}"
    more = "use a policy with s3:if-none-match (AWS only); on other stores, versioning keeps the old objects"
    yield Finding(check, WARNING, said, more)


async def _all_may(
    store: Store, operation: Operation, keys: Sequence[str], ask: Callable[[str], Awaitable[object]]
) -> AsyncIterator[Finding]:
    check = f"store: may {VERB[operation]}" + (" below" if operation == LIST else "")
    found, refused = await _tried(keys, ask)
    if refused:
        said = f"{_shown(list(refused))} refused: {next(iter(refused.values()))}"
        advice = advice_for(store.url)
        below = next(iter(refused)).rpartition("/")[0]
        mend = advice.writing.format(url=store.url, place=f"{below}/") if operation == CREATE else advice.reading
        yield Finding(check, FAILURE, said, mend)
    elif keys:
        yield Finding(check, OK, f"can {VERB[operation]} what it needs: {_shown(found)}")


async def _none_may(
    store: Store, operation: Operation, keys: Sequence[str], ask: Callable[[str], Awaitable[object]]
) -> AsyncIterator[Finding]:
    check = f"store: must not {VERB[operation]}"
    found, _ = await _tried(keys, ask)
    if found:
        said = f"these credentials may {VERB[operation]} {_shown(found)}"
        yield Finding(check, FAILURE, said, advice_for(store.url).own)
    elif keys:
        yield Finding(check, OK, f"{len(keys)} kinds of key are out of this role's reach")


async def _tried(
    keys: Sequence[str], ask: Callable[[str], Awaitable[object]]
) -> tuple[list[str], dict[str, IsthmusError]]:
    """Return the keys whose request was not denied, and the error of each of the others."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(key: str) -> Denied | None:
        async with slots:
            try:
                await ask(key)
            except ObjectMissing:
                return None
            except Denied as error:
                return error
            return None

    answers = dict(zip(keys, await asyncio.gather(*map(one, keys)), strict=True))
    return [key for key, why in answers.items() if why is None], {key: why for key, why in answers.items() if why}


def _own(role: Role) -> Sequence[tuple[Operation, tuple[str, ...]]]:
    """Return what the role must be able to do: operations, and patterns of keys.

    Other learners' checkpoints are left out, since strict policies deny them.
    """
    if role.participant is None:
        return []
    given = grants(role.participant, role.name, checkpoints=False)
    return [(grant.operation, grant.patterns) for grant in given]


def _is_short(prefix: str) -> bool:
    return prefix.count("/") > 1 or prefix in ("members/", "scratch/")


def _key(pattern: str, mark: str) -> str:
    """Return a key that fits a pattern; if the pattern has a `*`, no object has this key."""
    return pattern.replace(FRAGMENT, 5 * "0").replace(RUN, 16 * "0").replace("/*/", "/000000/").replace("*", mark)


def _shown(keys: Sequence[str]) -> str:
    more = len(keys) - SHOWN
    return ", ".join(keys[:SHOWN]) + (f" and {more} more" if more > 0 else "")
