"""`isthmus create`: a signed run with its bucket, keys, members and users, and a folder for each participant.

Every step looks at what is there and adds what is missing. So a command that was interrupted is finished by running it
again, and running it again with another learner adds that learner.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isthmus.agent.ports import open_log, open_place
from isthmus.bus import IN_STORE, default_pace, in_store
from isthmus.bus.users import require_users, set_users
from isthmus.errors import BucketMissing, Denied, InputError, RunMissing, Unavailable
from isthmus.format.permissions import Participant
from isthmus.format.records import frame
from isthmus.format.records.keys import RUN_KEY
from isthmus.format.records.objects import MemberSpec
from isthmus.format.rules import MemberRole, overdrive
from isthmus.format.signing import Signer, fingerprint
from isthmus.format.signing.keys import kept_signer, public_line, read_public
from isthmus.log.listing import heads_of
from isthmus.log.membership import Membership, changed, write
from isthmus.log.run import Run, read_run
from isthmus.log.trust import Trust
from isthmus.runtime.urls import Place, as_user, redacted
from isthmus.store import credentials
from isthmus.wording import an
from isthmus_services.commands import access, init
from isthmus_services.policies import AWS, MINIO, Identity, bus_user, has_bus, policy
from isthmus_services.settings import declared, shared
from isthmus_services.settings.resolve import fields

KEY, ENV, STORE_CA, BUS_CA = "key", "env", "store-ca.pem", "bus-ca.pem"
"""Names of files in a participant's folder, beside those of `isthmus access`."""

BUS_FILE = "bus.json"
"""Name of the file that has what earlier calls said of the bus, so that it need not be repeated."""

ROLES: Mapping[Participant, MemberRole] = {
    Participant.SYNCER: MemberRole.SYNCER,
    Participant.COLLECTOR: MemberRole.COLLECTOR,
    Participant.LEARNER: MemberRole.LEARNER,
    Participant.FOLLOWER: MemberRole.FOLLOWER,
}
"""The roles of participants that are members. The owner needs no entry, and a reader signs nothing."""

COMMANDS: Mapping[Participant, str] = {
    Participant.OWNER: "isthmus members list",
    Participant.SYNCER: "isthmus syncer",
    Participant.COLLECTOR: "isthmus gc --apply --every 600",
    Participant.LEARNER: "isthmus learner",
    Participant.FOLLOWER: "isthmus follow --exec COMMAND --series ",
    Participant.READER: "isthmus status --watch",
}

ADMINISTRATOR = "--admin-profile, --admin-credentials, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
"""How the store's administrator is named."""

VARIABLES = (
    *("ISTHMUS_RUN", "ISTHMUS_RUN_DIGEST", "ISTHMUS_OWNER", "ISTHMUS_ROLE", "ISTHMUS_LEARNER", "ISTHMUS_MODEL"),
    *("ISTHMUS_KEY", "ISTHMUS_BUS", "ISTHMUS_BUS_USER", "ISTHMUS_BUS_PASSWORD", "ISTHMUS_BUS_PASSWORD_FILE"),
    *("ISTHMUS_BUS_CA", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"),
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_CA_BUNDLE", "AWS_SHARED_CREDENTIALS_FILE"),
)
"""Variables that a participant's `env` sets, or unsets, so that none of another participant is left."""


def by_hand(run: str) -> str:
    """Return why this command cannot make a run that is not in a bucket of S3, and the commands that do."""
    return (
        f"{run}: this command serves s3:// only. A signed run elsewhere takes a key for each participant (isthmus keys "
        "new owner --folder ., isthmus keys new syncer --folder ., isthmus keys new eu-1 --folder .), isthmus init "
        f"{run} --key owner, and for each participant, as isthmus members add {run} syncer --as syncer --public-key "
        f"syncer.pub --key owner and isthmus members add {run} eu-1 --as learner --public-key eu-1.pub --key owner; "
        "then start each process with its own --key. Its rights to the store come from the tools of that store "
        "(docs/permissions.md says which)"
    )


def run(settings: declared.Create) -> int:
    """Make what is missing, and print what each participant gets. No secret is printed."""
    access.require_names(settings)
    if Place.of(settings.run).scheme in ("gs", "az") or not Place.of(settings.run).in_bucket:
        raise InputError(by_hand(settings.run))
    place = access.place_of(settings.run)
    folder = Path(settings.folder)
    try:
        settings = _as_before(settings, folder)
        bus, theirs = _bus(settings), _public_keys(settings)
        with _administrator(settings):
            said = _create(settings, folder, place, bus, theirs)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}: {error.filename}") from None
    print("\n".join(said))
    return 0


def _create(
    settings: declared.Create, folder: Path, place: tuple[str, str], bus: str, theirs: Mapping[str, bytes]
) -> list[str]:
    """Make what is missing; return the lines to print."""
    before, known = _contents(folder), folder / access.PLACE_FILE
    if known.exists() and (there := json.loads(known.read_text())) and (there["bucket"], there["prefix"]) != place:
        raise InputError(f"{folder} belongs to the run s3://{there['bucket']}/{there['prefix']}: use another --folder")
    complete = (folder / Participant.OWNER / ENV).exists()  # it is written after everything that others need
    for who in access.identities_in(folder, (), (), checkpoints=True) if complete else ():
        if not (folder / who.user).exists():
            raise InputError(
                f"{folder / who.user} is missing: put a copy of it back; otherwise new credentials would replace those "
                "that its processes use"
            )
    untried = _asked_bus(settings)
    with _administering():
        made, owner = _run_of(settings, folder, bus)
        removed = asyncio.run(_removed(settings, owner, folder)) if settings.remove else ()
        members = asyncio.run(_admit(settings, owner, folder, theirs))
        if not (copy := folder / Participant.OWNER / RUN_KEY).exists():  # most syncers may not write it again
            access.write_secret(copy, asyncio.run(_run_object(settings.run)))
    _, strict = access.as_before(folder, None if known.exists() else place, settings.strict)
    named = settings.learner or (), settings.series or ()
    gone = {who.user for who in removed}
    everybody = [who for who in access.identities_in(folder, *named, checkpoints=not strict) if who.user not in gone]
    with _administering():
        on_store, strays = asyncio.run(_store_users(settings.run, place, folder, everybody, removed))
    for who in removed:  # only now: until here, its folder says that there is something to remove
        shutil.rmtree(folder / who.user, ignore_errors=True)
    access.prepare(folder, *named, strict=strict, bus_users=settings.bus_users != "none")
    access.write_secret(folder / BUS_FILE, json.dumps({"bus": bus, "bus_users": settings.bus_users}) + "\n")
    on_bus = _bus_users(settings, folder, everybody, removed) + untried
    site = _Site(settings, made, bus, credentials.access().at(Place.of(settings.run)))
    for who in everybody:
        site.write(folder / who.user, who)
    after = _contents(folder)
    lines = [
        f"{made.url}: run {made.digest[:8].hex()}, signed by its owner {fingerprint(owner.author)}",
        *([f"warning: {warning}"] if (warning := overdrive(made.rules)) else []),
        f"members: {', '.join(m.name for m in members.members)} (membership {members.version})",
        *([f"removed: {', '.join(who.user for who in removed)}"] if removed else []),
        on_store,
        on_bus,
        *_left_over(settings, members, everybody, strays),
        *_of_this_machine(site),
        "give each participant a copy of its folder, and of no other; commands, in bash or zsh:",
    ]
    for who in everybody:
        earlier, now = (
            {p.name: data for name, data in files.items() if (p := Path(name)).parts[0] == who.user}
            for files in (before, after)
        )
        state = "as before" if earlier == now else "changed" if ENV in earlier else "new"
        lines.append(f"  {state:9}  . {shlex.quote(str(folder / who.user / ENV))} && {_command(who, folder)}")
        if state == "changed":
            what = ", ".join(_differences(earlier, now))
            more = "its processes notice it by themselves" if what == access.CREDENTIALS else "restart its processes"
            lines.append(f"             differs: {what}; give it a copy again, and {more}")
    if shared.built_in(made.header.model) is None:
        lines.append(
            "`isthmus learner` trains models of bytes: for another one give it --train PACKAGE.MODULE:FUNCTION, or "
            "call isthmus.join in your own loop, with the same folder's env (docs/your-loop.md)"
        )
    if (learners := sum(who.participant == Participant.LEARNER for who in everybody)) > 1:
        lines.append(
            "each learner trains on all of the data, in an order of its own; for disjoint parts add --shard I/M to "
            f"`isthmus learner`: 0/{learners} for the first, 1/{learners} for the second; with more learners, restart "
            "all with the new M"
        )
    return lines


def _differences(earlier: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[str]:
    """Return the names of what differs between two states of a folder: variables of its `env`, and other files."""
    lines = [{*files.get(ENV, b"").decode().split("\n")} for files in (earlier, now)]
    names = {line.removeprefix("export ").partition("=")[0] for line in lines[0] ^ lines[1] if "export" in line[:6]}
    return sorted(names) + sorted(n for n in {**earlier, **now} if n != ENV and earlier.get(n) != now.get(n))


def _command(who: Identity, folder: Path) -> str:
    own = who.participant == Participant.LEARNER and not (folder / who.user / KEY).exists()
    name = who.name if who.participant == Participant.FOLLOWER else ""
    return COMMANDS[who.participant] + name + (" --key LEARNER_KEY_FILE" if own else "")


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- what was asked for -----------------------------------------------------------------------------------------------


def _as_before(settings: declared.Create, folder: Path) -> declared.Create:
    """Return the settings, completed with what earlier calls said of the bus. Raises `OSError`."""
    known, authorities = folder / BUS_FILE, folder / Participant.READER / BUS_CA
    earlier: dict[str, str] = json.loads(known.read_text()) if known.exists() else {}
    bus, users = settings.bus or earlier.get("bus", IN_STORE), settings.bus_users or earlier.get("bus_users", "file")
    if in_store(bus):
        return replace(settings, bus=bus, bus_users="none")
    if settings.bus is None and bus and (settings.bus_user or users != earlier["bus_users"]):
        bus = _without_user(bus)
    trusts = authorities.exists() and (bus or "").startswith("rediss:")
    bus_ca = settings.bus_ca or (str(authorities) if trusts else None)
    return replace(settings, bus=bus, bus_users=users, bus_ca=bus_ca)


def _without_user(bus: str) -> str:
    scheme, colon, rest = bus.partition("://")
    return f"{scheme}{colon}{rest.rpartition('@')[2]}"


def _bus(settings: declared.Create) -> str:
    """Return the URL of the bus as participants get it. Raises `InputError`."""
    assert settings.bus is not None, "the store's, if no other is given"
    place = Place.of(settings.bus)
    if in_store(settings.bus):
        return settings.bus
    if place.scheme not in ("redis", "rediss"):
        raise InputError(
            f"--bus {place}: a run in a bucket needs a bus that all reach, redis://host:port or {IN_STORE}"
        )
    if settings.bus_users == "none":
        return as_user(settings.bus, settings.bus_user, settings.bus_password, settings.bus_password_file)
    return _without_user(settings.bus)


def _public_keys(settings: declared.Create) -> dict[str, bytes]:
    """Return the public keys [32 bytes] that learners have made themselves, by name. Raises `InputError`."""
    found = {}
    for item in settings.public_key or ():
        name, equals, file = item.partition("=")
        if not equals or name not in (settings.learner or ()):
            raise InputError(f"--public-key {item}: write NAME=FILE, where --learner NAME is given too")
        found[name] = read_public(file)
    return found


@contextlib.contextmanager
def _administrator(settings: declared.Create) -> Iterator[None]:
    """Let the clients of the store use the administrator's credentials. Raises `InputError`."""
    named = {"AWS_PROFILE": settings.admin_profile, "AWS_SHARED_CREDENTIALS_FILE": settings.admin_credentials}
    given = {name: value for name, value in named.items() if value}
    if settings.admin_credentials and not Path(settings.admin_credentials).is_file():
        raise InputError(f"--admin-credentials {settings.admin_credentials}: there is no such file")
    hidden = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE") if given else ()
    before = {name: os.environ.pop(name) for name in hidden if name in os.environ}
    earlier = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in earlier.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})
        os.environ.update(before)


@contextlib.contextmanager
def _administering() -> Iterator[None]:
    """Add to what the store refuses whose credentials are needed. Raises `Denied`."""
    try:
        yield
    except BucketMissing:
        raise
    except Denied as error:
        raise Denied(f"{error}; this command needs those of the store's administrator: {ADMINISTRATOR}") from None


# --- the run and its members ------------------------------------------------------------------------------------------


def _run_of(settings: declared.Create, folder: Path, bus: str) -> tuple[Run, Signer]:
    """Return the run, after creating a missing one, and the owner's key. Raises `InputError` if the run differs."""
    path = folder / Participant.OWNER / KEY
    copy = folder / Participant.OWNER / RUN_KEY
    there = asyncio.run(_found(settings.run, copy, copy.read_bytes() if copy.exists() else b""))
    owner = kept_signer(path, "owner") if there is None or path.exists() else None
    if there is not None and (owner is None or there.header.owner != owner.author):
        whose = f"belongs to {fingerprint(there.header.owner)}" if there.header.owner else "is signed by nobody"
        raise InputError(
            f"{settings.run}: there is a run that {whose}, and {path} is not its owner's key: use the --folder with "
            "which it was created, or another place"
        )
    assert owner is not None, "otherwise the run is another's"
    if there is not None and not (settings.model or settings.source):
        # A learner is added later without repeating the rules: those that have their default values are not compared.
        rules = fields(shared.ArithmeticOfRun)
        silent: dict[str, Any] = {s.field: None for s in rules if getattr(settings, s.field) == s.default}
        there.require_rules(shared.rules_of(replace(settings, **silent), (), there.rules))
        init.require_pace(settings, there)
        return there, owner
    made = init.create(
        settings,
        settings.run,
        shared.pace_of(settings, default_pace(bus, settings.run)),
        Trust(owner),
        model=settings.model,
        source=settings.source,
        create_bucket=True,
        vectors=settings.vectors or (),
    )
    init.require_pace(settings, made)
    return made, owner


async def _found(url: str, path: Path, copy: bytes) -> Run | None:
    """Return the run. One that is gone beside its log is put back from the owner's copy at `path`, if there is one.

    Raises `InputError` if nothing is there, and the owner's copy says that there was a run.
    """
    async with open_place(url) as store:
        try:
            return await read_run(store.at_start)
        except (BucketMissing, RunMissing) as missing:
            if not copy:
                return None
            if not (isinstance(missing, RunMissing) and missing.beside):
                raise InputError(
                    f"{url} has no run, and {path} is the copy of run {frame.digest(copy)[:8].hex()}, which was there: "
                    "was a disk lost, or is this another store? Bring its objects back, or restore a backup, and run "
                    "this again; for a new run, use another --folder"
                ) from None
        await store.at_start.create(RUN_KEY, copy)
        print(f"{url}/{RUN_KEY} was gone: it is put back from the owner's copy")
        return await read_run(store.at_start)


async def _run_object(url: str) -> bytes:
    async with open_place(url) as store:
        return bytes(await store.get(RUN_KEY))


_FIRST = {"syncer-*": Identity(Participant.SYNCER), "gc": Identity(Participant.COLLECTOR)}
"""The members of every new run. The names of syncers begin with `syncer-`, unless they are given one."""


async def _admit(settings: declared.Create, owner: Signer, folder: Path, theirs: Mapping[str, bytes]) -> Membership:
    """Make missing keys, and add missing members in one version of the membership; return the newest version.

    Syncer and collector are added only to a new run: later they were removed on purpose. Raises `InputError` if a
    member has another key or role than is in its folder, or was removed.
    """
    named = [Identity(Participant.LEARNER, name) for name in settings.learner or ()]
    named += [Identity(Participant.FOLLOWER, name) for name in settings.series or ()]
    async with open_log(settings.run, Trust(owner)) as log:
        now = log.members.current
        wanted = {_member(who): who for who in named}
        if not now.version:
            wanted |= _FIRST
        entries = list(now.members)
        for member in now.members:
            _require_key(settings, folder, member)
        for name, who in wanted.items():
            path, role = folder / who.user / KEY, ROLES[who.participant]
            there = next((m for m in now.members if m.name == name), None)
            if there is None and any(m.name == name for version in log.members.versions for m in version.members):
                kept = _public(path).exists()
                key = f"{path}.pub" if kept else f"{name}.pub"
                raise InputError(
                    f"{name} was removed from the members of {settings.run}: leave it out, or add it again with "
                    + ("" if kept else f"`isthmus keys new {name} --folder .` and ")
                    + f"`isthmus members add {settings.run} {name} --as {role} --public-key {key} --key "
                    f"{folder / Participant.OWNER / KEY}`"
                    + ("" if kept else f", then run this command again with --public-key {name}={key}")
                )
            if there is not None and who.name not in theirs and not (path.exists() or _public(path).exists()):
                raise InputError(f"{name} is a member of {settings.run}, and {path} is missing: put its folder back")
            author = _author(path, name, theirs.get(who.name))
            if there is None:
                entries = changed(entries, added=MemberSpec(name, role, author))
            elif (there.role, there.key) != (role, author):
                raise InputError(
                    f"{name} is {an(there.role)} of {settings.run} with the key {fingerprint(there.key)}, and {path} "
                    f"is the key {fingerprint(author)} of {an(role)}: choose another name, or change the member with "
                    "`isthmus members rotate`"
                )
        if entries == list(now.members):
            return now
        return await write(log.store, log.members, owner, entries, await heads_of(log), log.runtime.wall())


def _require_key(settings: declared.Create, folder: Path, member: MemberSpec) -> None:
    """Raise `InputError` if a member's folder has another key than the membership: its commands would be refused."""
    who = _FIRST.get(member.name) or _identity_of(member)
    if who is None or {who.user, who.name} & {*(settings.remove or ())}:
        return
    path = folder / who.user / KEY
    if not path.exists() and not _public(path).exists():
        return
    author = read_public(str(_public(path))) if not path.exists() else kept_signer(path, member.name).author
    if author != member.key:
        raise InputError(
            f"{member.name} is {an(member.role)} of {settings.run} with the key {fingerprint(member.key)}, and {path} "
            f"is the key {fingerprint(author)}: if the member was given that key (isthmus members rotate), put it "
            f"there as {path}, with its .pub, and give that member its folder again; else rotate back to this one"
        )


async def _removed(settings: declared.Create, owner: Signer, folder: Path) -> list[Identity]:
    """Remove members, in one version of the membership; return the learners and followers that are to be removed.

    Raises `InputError` for a name that no participant has or had.
    """
    async with open_log(settings.run, Trust(owner)) as log:
        now = log.members.current
        specs = [m for version in log.members.versions for m in version.members]
        known = {who.user: who for who in access.identities_in(folder, (), (), checkpoints=True) if who.name}
        for who in map(_identity_of, specs):
            known |= {who.user: who} if who else {}
        found: list[Identity] = []
        for name in settings.remove or ():
            meant = [who for who in known.values() if name in (who.name, who.user)]
            if len(meant) != 1:
                which = " or ".join(who.user for who in meant or known.values()) or "nobody: none was made"
                raise InputError(f"--remove {name}: {'which' if meant else 'no participant has this name'}: {which}")
            found += meant
        if both := {*(settings.learner or ()), *(settings.series or ())} & {who.name for who in found}:
            raise InputError(f"{min(both)} is to be added and to be removed: leave one of the two out")
        gone = {_member(who) for who in found}
        entries = [m for m in now.members if m.name not in gone]
        if entries != list(now.members):
            await write(log.store, log.members, owner, entries, await heads_of(log), log.runtime.wall())
        return found


def _member(who: Identity) -> str:
    """Return the name under which a participant is a member."""
    return who.name if who.participant == Participant.LEARNER else who.user


def _identity_of(member: MemberSpec) -> Identity | None:
    """Return the learner or follower that a member is; None for others, and for a pattern of names."""
    if "*" in member.name:
        return None
    if member.role == MemberRole.LEARNER:
        return Identity(Participant.LEARNER, member.name)
    series = member.name.removeprefix(f"{Participant.FOLLOWER}-")
    follows = member.role == MemberRole.FOLLOWER and series != member.name
    return Identity(Participant.FOLLOWER, series) if follows else None


def _left_over(
    settings: declared.Create, members: Membership, everybody: Sequence[Identity], strays: Sequence[str]
) -> list[str]:
    """Return warnings of learners and followers that have a part of what a participant has, and not the rest.

    `strays`: those that are users of the store and have no folder.
    """
    admitted = {who.user: who for who in map(_identity_of, members.members) if who}
    have = {who.user for who in everybody if who.name}
    said = []
    for user in sorted({*admitted, *strays} ^ have):
        lacks = "is not a member" if user in have else f"has no folder in {settings.folder}"
        rights = ["a member"] * (user in admitted) + ["a user of the store"] * (user not in admitted or user in strays)
        said.append(
            f"warning: {user} {lacks}, and is still {' and '.join(rights)}: if it is to take part no longer, isthmus "
            f"create {settings.run} --folder {shlex.quote(settings.folder)} --remove {user}"
        )
    return said


def _author(path: Path, name: str, theirs: bytes | None) -> bytes:
    """Return a member's public key [32 bytes], after making a missing key. `theirs`: that of a key made elsewhere."""
    public = _public(path)
    if theirs is not None and not public.exists():
        access.write_secret(public, public_line(theirs, name) + "\n")
    author = read_public(str(public)) if public.exists() and not path.exists() else kept_signer(path, name).author
    if theirs not in (None, author):
        raise InputError(f"--public-key {name}: {path.parent} has another key of {name}: delete that folder, or rotate")
    return author


def _public(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


# --- users of the store and the bus -----------------------------------------------------------------------------------


async def _store_users(
    url: str, place: tuple[str, str], folder: Path, everybody: Sequence[Identity], removed: Sequence[Identity]
) -> tuple[str, list[str]]:
    """Create missing users at the store, write their credentials, and delete those of removed participants.

    Return a line that says what was done, and the participants with names that are users there without a folder here.
    """
    from isthmus.store.users import open_users  # imports botocore, which a command that fails earlier does not need

    run = hashlib.sha256("/".join(place).encode()).hexdigest()[:8]  # an account may have several runs
    prefix, strays = f"isthmus-{run}-", list[str]()
    async with open_place(url) as store, open_users(url, store.runtime) as users:
        for who in everybody:
            path = folder / who.user / access.CREDENTIALS
            known = access.read_key(path)[0] if path.exists() else ""
            document = policy(who, *place, AWS if users.conditional else MINIO)
            try:
                key = await users.ensure(prefix + who.user, document, known)
            except Denied as error:
                if who is not everybody[0]:
                    raise
                again = ", and delete there those of " + ", ".join(w.user for w in removed) if removed else ""
                return (
                    f"store: users could not be created ({error}): name the store's administrator ({ADMINISTRATOR}), "
                    f"or create them as {folder}/README says, with the names and secrets of "
                    f"{folder}/{access.USERS_FILE} and the policies of {folder}/policies{again}"
                ), []
            if key is not None:
                access.write_key(path, key.id, key.secret)
        for who in removed:
            await users.remove(prefix + who.user)
        expected = {who.user for who in everybody}
        with contextlib.suppress(Denied):  # an administrator may lack this right alone
            there = [name.removeprefix(prefix) for name in await users.named(prefix)]
            strays = [user for user in there if user not in expected and "-" in user]
    return f"store: {len(everybody)} users {prefix}…, each with its own policy and access key", strays


def _asked_bus(settings: declared.Create) -> str:
    """Ask the bus whether it takes users, before anything is made. Return what to add if it could not be asked.

    Raises `InputError` if it is too old, and `Denied` and `Unavailable` where users are to be set now.
    """
    if settings.bus_users != "none":
        try:
            asyncio.run(require_users(shared.bus_of(settings, settings.run)))
        except (Denied, Unavailable) as error:
            if settings.bus_users == "server":
                raise
            return f"; it was not asked for its version, which must be Redis 7 or newer ({error})"
    return ""


def _bus_users(
    settings: declared.Create, folder: Path, everybody: Sequence[Identity], removed: Sequence[Identity]
) -> str:
    """Set the users on the bus, if that is asked for. Return a line that says what was done or is to be done."""
    if in_store(settings.bus or ""):
        return "bus: in the run's own store, where the policies say who speaks"
    if settings.bus_users == "none":
        return "bus: all participants use it alike, without users of their own"
    acl = shlex.quote(str(folder / access.ACL_FILE))
    if settings.bus_users == "file":
        return (
            f"bus: install its users there: redis-server {shlex.quote(str(folder / access.SETTINGS_FILE))} --aclfile "
            f"{acl}; or run this command again with --bus-users server, as an administrator of the bus"
        )
    users = [
        bus_user(who, (folder / who.user / access.BUS_PASSWORD).read_text().strip())
        for who in everybody
        if has_bus(who.participant)
    ]
    done = asyncio.run(set_users(shared.bus_of(settings, settings.run), users, [who.user for who in removed]))
    return f"bus: {len(users)} users set" + (
        ", and saved in the server's ACL file" if done.saved else
        f"; they are lost when the server restarts, unless it is started with --aclfile {acl}"
    ) + (
        "; warning: its user `default` needs no password, so anyone may use it: ACL SETUSER default off"
        if done.is_open else ""
    )  # fmt: skip


def _of_this_machine(site: "_Site") -> list[str]:
    """Return a warning if the folders name addresses that other machines cannot reach."""
    named = {"AWS_ENDPOINT_URL": site.store.endpoint, "--bus": site.bus}
    found = {flag: url for flag, url in named.items() if url and Place.of(url).is_loopback}
    if not found:
        return []
    return [
        f"warning: {' and '.join(map(redacted, found.values()))} can be reached from this machine alone, and so the "
        f"folders work on no other: for other machines, run this command again with {' and '.join(found)} as they "
        "reach it"
    ]


# --- what a participant gets ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Site:
    """What the settings of all participants have in common."""

    settings: declared.Create
    run: Run
    bus: str
    store: credentials.Access

    def write(self, own: Path, who: Identity) -> None:
        """Write a participant's `env` and the certificates that it trusts. Raises `OSError`."""
        values: dict[str, str | Path] = {
            "ISTHMUS_RUN": self.settings.run,
            "ISTHMUS_RUN_DIGEST": self.run.digest.hex(),
            "ISTHMUS_OWNER": fingerprint(self.run.header.owner or b""),
            "ISTHMUS_ROLE": str(who.participant),
            "AWS_REGION": self.store.region,
        }
        if self.store.endpoint is not None:
            values["AWS_ENDPOINT_URL"] = self.store.endpoint
        if self.store.authorities is not None:
            access.write_secret(own / STORE_CA, self.store.authorities.decode())
            values["AWS_CA_BUNDLE"] = Path(STORE_CA)
        if who.participant == Participant.LEARNER:
            values["ISTHMUS_LEARNER"] = who.name
            if self.run.header.model != shared.BUILT_IN_MODEL:
                values["ISTHMUS_MODEL"] = self.run.header.model
        if (own / KEY).exists():
            values["ISTHMUS_KEY"] = Path(KEY)
        if has_bus(who.participant):
            values["ISTHMUS_BUS"] = self.bus
            if self.settings.bus_users != "none":
                values["ISTHMUS_BUS_USER"] = who.user
                values["ISTHMUS_BUS_PASSWORD_FILE"] = Path(access.BUS_PASSWORD)
            if self.settings.bus_ca is not None:
                access.write_secret(own / BUS_CA, Path(self.settings.bus_ca).read_text())
                values["ISTHMUS_BUS_CA"] = Path(BUS_CA)
        keeps = {"ISTHMUS_KEY"} if _public(own / KEY).exists() else set()  # a key made elsewhere may be named already
        lines = [
            f"# Settings of {who.user}, for bash and zsh: . FOLDER/{ENV}. In another shell: cd FOLDER && . ./{ENV}",
            'isthmus_here=$(cd "$(dirname "${BASH_SOURCE:-$0}")" && pwd)',
            f"unset {' '.join(name for name in VARIABLES if name not in values.keys() | keeps)}",
            *(
                f'export {name}="$isthmus_here/{value}"' if isinstance(value, Path) else
                f"export {name}={shlex.quote(value)}"
                for name, value in values.items()
            ),
            "# Without this file, credentials come from the machine's own identity, such as a role on AWS.",
            f'if [ -f "$isthmus_here/{access.CREDENTIALS}" ]; then',
            f'    export AWS_SHARED_CREDENTIALS_FILE="$isthmus_here/{access.CREDENTIALS}"',
            "fi",
        ]  # fmt: skip
        access.write_secret(own / ENV, "\n".join(lines) + "\n")
