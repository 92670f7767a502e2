"""`isthmus access`: passwords, Redis's ACL and settings for a new installation, each password in a file of its own; and
policies of a store for each participant.

Doing it twice changes no password; a learner named later is added. Nothing is printed but file names.
"""

import hashlib
import json
import os
import secrets
from pathlib import Path

from isthmus.bus.base import VALUE_MAX
from isthmus.errors import InputError
from isthmus.permissions import Dialect, Participant, Place, policy, redis_rules
from isthmus.records.fields import require_name
from isthmus.records.messages import SYNCER_STREAM, learner_stream
from isthmus_services.output.report import write_json
from isthmus_services.settings import declared

ACL_FILE = "users.acl"
SETTINGS_FILE = "redis.conf"
CREDENTIALS_FILE = "aws-credentials"
STORE_USER = "isthmus"
SEAWEEDFS_FILE = "store-seaweedfs.json"
CEPH_FILE = "store-bucket.ceph.json"

REDIS_SETTINGS = f"""\
# What a bus needs of its Redis. Address, folder, memory and the ACL file beside this one come on the command line.
appendonly yes
appendfsync everysec
save ""
# Evicting would take whole streams. Full is an error that is seen, and streams are trimmed anyway.
maxmemory-policy noeviction
# The least it takes. The default, 512 MiB, lets one message fill all of the memory.
proto-max-bulk-len {VALUE_MAX >> 20}mb
"""

STORE_PARTICIPANTS = (
    Participant.OWNER,
    Participant.SYNCER,
    Participant.COLLECTOR,
    Participant.FOLLOWER,
    Participant.READER,
)
"""Of each of which one has credentials; of learners each."""


def run(settings: declared.Access) -> int:
    """Write what is missing."""
    names = settings.learner or []
    for name in names:
        require_name("--learner", name)
    folder = Path(settings.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = prepare(folder, names)
        if settings.bucket:
            place = Place(settings.bucket, settings.prefix.strip("/"))
            written += policies(folder, names, place, Dialect(settings.store), donors=settings.donors)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}: {error.filename}") from None
    for name in written:
        print(folder / name)
    write_json({"folder": str(folder), "files": written}, settings.json)
    return 0


def prepare(folder: Path, learners: list[str]) -> list[str]:
    """Write passwords and what is made of them; return the names of the files."""
    known = {p.name.removeprefix("bus-learner-") for p in folder.glob("bus-learner-*")}
    named = sorted(known.union(learners))
    users = {"syncer": SYNCER_STREAM, "learner": learner_stream("*"), "reader": ""}
    users |= {f"learner-{name}": learner_stream(name) for name in named}
    passwords = {user: _password(folder / f"bus-{user}") for user in users}
    _write(
        folder / ACL_FILE,
        "user default off\n"
        + "".join(acl_line(user, passwords[user], stream) + "\n" for user, stream in users.items()),
    )
    _write(folder / SETTINGS_FILE, REDIS_SETTINGS)
    store, _ = _password(folder / "store-password"), _password(folder / "grafana-password")
    _write(folder / "store-user", STORE_USER + "\n")
    _write(
        folder / CREDENTIALS_FILE,
        f"[default]\naws_access_key_id = {STORE_USER}\naws_secret_access_key = {store}\n",
    )
    return sorted(p.name for p in folder.iterdir() if p.is_file())


def acl_line(user: str, password: str, stream: str) -> str:
    """Return a user's line in a Redis 7 ACL file: it reads every stream of every run and writes only its own."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    return f"user {user} on #{digest} {redis_rules(stream)}"


def policies(folder: Path, learners: list[str], place: Place, dialect: Dialect, *, donors: bool) -> list[str]:
    """Write credentials and a policy for each participant of a store; return the names of the files.

    Learners that were named before keep theirs.
    """
    known = {p.name.removeprefix("store-learner-").partition(".")[0] for p in folder.glob("store-learner-*.key")}
    people = [(who, who.value, "") for who in STORE_PARTICIPANTS]
    people += [(Participant.LEARNER, f"learner-{name}", name) for name in sorted(known.union(learners))]
    identities, documents = [], []
    for who, user, name in people:
        secret = _password(folder / f"store-{user}.key")
        principal = f"arn:aws:iam:::user/{user}" if dialect is Dialect.CEPH else ""
        document = policy(who, name, place, dialect, donors=donors, principal=principal)
        _write(folder / f"store-{user}.{dialect.value}.json", json.dumps(document, indent=1) + "\n")
        _write(
            folder / f"store-{user}.credentials",
            f"[default]\naws_access_key_id = {user}\naws_secret_access_key = {secret}\n",
        )
        identities.append(
            {
                "name": user,
                "credentials": [{"accessKey": user, "secretKey": secret}],
                "actions": [],
                "policyNames": [user],
            }
        )
        documents.append({"name": user, "content": json.dumps(document)})
    if dialect is Dialect.SEAWEEDFS:
        operator = _password(folder / "store-password")
        identities.append(
            {
                "name": STORE_USER,
                "credentials": [{"accessKey": STORE_USER, "secretKey": operator}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            }
        )
        whole = {"identities": identities, "policies": documents}
        _write(folder / SEAWEEDFS_FILE, json.dumps(whole, indent=1) + "\n")
    elif dialect is Dialect.CEPH:
        statements = [
            {**statement, "Sid": f"{given['name']}-{statement['Sid']}"}
            for given in documents
            for statement in json.loads(given["content"])["Statement"]
        ]
        _write(folder / CEPH_FILE, json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=1) + "\n")
    return sorted(p.name for p in folder.glob("store-*") if p.is_file())


def _password(path: Path) -> str:
    if not path.exists():
        _write(path, secrets.token_urlsafe(24) + "\n")
    return path.read_text().strip()


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    scratch = path.with_name(f".{path.name}.new")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
    scratch.replace(path)
