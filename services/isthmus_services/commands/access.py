"""`isthmus access`: write passwords for each participant of a run, and the servers' rules that enforce its permissions.

Each participant has a folder with only what its process needs, so that the folder can be given to that process alone.
Running the command again changes no password, and adds learners that are named later. Only file names are printed.
"""

import configparser
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from isthmus.bus.base import VALUE_MAX
from isthmus.bus.users import BusUser
from isthmus.errors import InputError
from isthmus.format.permissions import Participant
from isthmus.format.records.fields import require_name
from isthmus.runtime.urls import Place
from isthmus_services.output.report import write_json
from isthmus_services.policies import (
    AWS,
    MINIO,
    Document,
    Identity,
    acl_line,
    bus_user,
    ceph_bucket_policy,
    has_bus,
    policy,
    seaweedfs_identities,
)
from isthmus_services.settings import declared, shared

ACL_FILE = "redis/users.acl"
SETTINGS_FILE = "redis/redis.conf"
ROOT_USER, ROOT_PASSWORD = "store/root-user", "store/root-password"
SEAWEEDFS_FILE = "store/seaweedfs.json"
USERS_FILE = "store/users"
GRAFANA_PASSWORD = "grafana/password"
PLACE_FILE = "policies/run"
BUS_USER, BUS_PASSWORD, CREDENTIALS = "bus-user", "bus-password", "aws-credentials"
"""Names of files in a participant's folder."""

ROOT = "isthmus-root"

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

README = """\
Created by `isthmus access` or `isthmus create`. Everything here except `policies/` is secret. Each participant has a
folder with the settings of its process (ISTHMUS_BUS_USER, ISTHMUS_BUS_PASSWORD_FILE, AWS_SHARED_CREDENTIALS_FILE): give
it to that process alone.
To remove a participant NAME: `isthmus create RUN --folder DIR --remove NAME` removes the member, its folder, and its
users where it has made them. With `isthmus access` alone: `isthmus members remove RUN NAME --key OWNER_KEY_FILE`,
delete the folder, and run `isthmus access` again. Then install the files below on the servers again, and delete the
user there.

{redis}
store/root-*            the administrator, for a store that you run yourself
store/users             name and secret of each user, one per line, for a store that you run yourself
store/seaweedfs.json    identities with their policies
policies/aws/           an identity policy for each participant's role or user
policies/minio/         a policy for each user
policies/ceph.json      one bucket policy

How to install them (DIR is this folder; NAME is one of store/users):

{install}
SeaweedFS  weed mini -s3.config=DIR/store/seaweedfs.json (`weed s3 -config`): store/root-user is then its administrator
MinIO      for each NAME: mc admin policy create STORE NAME DIR/policies/minio/NAME.json; mc admin user add STORE, which
           reads the name and its secret from standard input; mc admin policy attach STORE NAME --user NAME
Ceph       for each NAME: radosgw-admin user create --uid NAME --display-name NAME --access-key NAME --secret SECRET;
           then, as the bucket's owner: aws s3api put-bucket-policy --bucket BUCKET --policy file://DIR/policies/ceph.json
AWS        for each NAME: aws iam create-policy --policy-name NAME --policy-document file://DIR/policies/aws/NAME.json;
           attach it to the role of the participant's machine, and delete aws-credentials from the participant's folder

Limits of policies, and how to make up for them:

AWS       No limits: if only creation is granted, a PUT needs If-None-Match (s3:if-none-match), and so do a copy and the
          completion of a multipart upload.
MinIO     No condition on If-None-Match: a user that may create a key may also overwrite it. An overwritten object is
Ceph      detected by the digest in its key, and an overwritten commit by the digest in the next commit. But the old
SeaweedFS object is lost. Versioning of the bucket keeps it (no policy here grants s3:DeleteObjectVersion), and so does
          object lock for its retention period. Both also keep the objects that `isthmus gc` deletes.
MinIO and SeaweedFS refuse a listing without a prefix. AWS and Ceph answer 404 instead of 403 for a missing key only to
users that may list, possibly without a prefix: on these stores, a participant can list all names in the bucket.
"""


REDIS = {
    True: (
        "redis/                  users.acl, redis.conf: for redis-server (digests of passwords, no passwords)",
        "Redis 7    redis-server DIR/redis/redis.conf --aclfile DIR/redis/users.acl",
    ),
    False: (
        "redis/                  redis.conf: for redis-server. All participants use it alike, as one user",
        "Redis      redis-server DIR/redis/redis.conf",
    ),
}
"""What the README says of Redis, by whether participants have users there."""


def run(settings: declared.Access) -> int:
    """Write the files and print their names. Passwords that exist are kept."""
    require_names(settings)
    place = place_of(settings.run) if settings.run else None
    folder = Path(settings.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = prepare(folder, settings.learner or (), settings.series or (), place, strict=settings.strict)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}: {error.filename}") from None
    for name in written:
        print(folder / name)
    write_json({"folder": str(folder), "files": written}, settings.json)
    return 0


def require_names(settings: shared.Participants) -> None:
    """Raise `InputError` unless the names of learners and series can be names."""
    for flag, names in (("--learner", settings.learner), ("--series", settings.series)):
        for name in names or ():
            require_name(flag, name)


def place_of(url: str) -> tuple[str, str]:
    """Return the bucket and prefix of a run. Raises `InputError` for a run that is not in a bucket."""
    place = Place.of(url)
    if not place.in_bucket or not place.authority:
        raise InputError(f"--run {place}: policies are for runs in buckets (s3://bucket/run)")
    if place.scheme in ("gs", "az"):
        raise InputError(
            f"--run {place}: this command writes policies for s3:// only: leave --run out, and give each participant "
            "its rights with the tools of this store (docs/permissions.md says which)"
        )
    return place.authority, place.path.strip("/")


def prepare(
    folder: Path,
    learners: Sequence[str] = (),
    series: Sequence[str] = (),
    place: tuple[str, str] | None = None,
    *,
    strict: bool = False,
    bus_users: bool = True,
) -> list[str]:
    """Write passwords, files made from them, and policies for the run at `place` (bucket, prefix); return file names.

    If `place` is None, the place and strictness of earlier policies are kept, so that adding a learner needs neither.
    Without earlier policies none are written. `bus_users`: whether participants have users of their own on the bus;
    if not, files with earlier users are deleted. Raises `OSError`.
    """
    place, strict = as_before(folder, place, strict)
    identities = identities_in(folder, learners, series, checkpoints=not strict)
    if bus_users:
        users = [found for who in identities if (found := _bus_user(folder, who))]
        write_secret(folder / ACL_FILE, "".join(line + "\n" for line in ("user default off", *map(acl_line, users))))
    else:
        for name in (ACL_FILE, *(f"{who.user}/{file}" for who in identities for file in (BUS_USER, BUS_PASSWORD))):
            (folder / name).unlink(missing_ok=True)
    write_secret(folder / SETTINGS_FILE, REDIS_SETTINGS)
    keys = {who: _key(folder / who.user / CREDENTIALS, who) for who in identities}
    write_secret(folder / USERS_FILE, "".join(f"{name} {secret}\n" for name, secret in keys.values()))
    write_secret(folder / ROOT_USER, ROOT + "\n")
    root = _password(folder / ROOT_PASSWORD)
    _password(folder / GRAFANA_PASSWORD)
    if place is not None:
        bucket, prefix = place
        earlier = {*folder.glob("policies/*/isthmus-*.json")}
        for name, dialect in (("aws", AWS), ("minio", MINIO)):
            for who in identities:
                path = folder / "policies" / name / f"{who.access_key}.json"
                _json(path, policy(who, bucket, prefix, dialect))
                earlier.discard(path)
        for path in earlier:  # of participants that were removed
            path.unlink()
        _json(folder / "policies" / "ceph.json", ceph_bucket_policy(identities, bucket, prefix))
        _json(folder / SEAWEEDFS_FILE, seaweedfs_identities(keys, (ROOT, root), bucket, prefix))
    redis, install = REDIS[bus_users]
    write_secret(folder / "README", README.replace("{redis}", redis).replace("{install}", install))
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def as_before(folder: Path, place: tuple[str, str] | None, strict: bool) -> tuple[tuple[str, str] | None, bool]:
    """Return the place and strictness of the policies, those of an earlier call if `place` is None; keep them."""
    path = folder / PLACE_FILE
    if place is None:
        if not path.exists():
            return None, strict
        known = json.loads(path.read_text())
        place, strict = (known["bucket"], known["prefix"]), strict or known["strict"]
    _json(path, {"bucket": place[0], "prefix": place[1], "strict": strict})
    return place, strict


def identities_in(folder: Path, learners: Sequence[str], series: Sequence[str], *, checkpoints: bool) -> list[Identity]:
    """Return an identity for each role without a name, and for each learner and follower named now or earlier."""
    found = [Identity(p) for p in Participant if p not in (Participant.LEARNER, Participant.FOLLOWER)]
    for participant, names in ((Participant.LEARNER, learners), (Participant.FOLLOWER, series)):
        known = {p.name.removeprefix(f"{participant}-") for p in folder.glob(f"{participant}-*")}
        found += [Identity(participant, name, checkpoints) for name in sorted(known.union(names))]
    return found


def _bus_user(folder: Path, who: Identity) -> BusUser | None:
    """Return a participant's user of the bus, after writing missing files; None if it does not use the bus."""
    if not has_bus(who.participant):
        return None
    write_secret(folder / who.user / BUS_USER, who.user + "\n")
    return bus_user(who, _password(folder / who.user / BUS_PASSWORD))


def _key(path: Path, who: Identity) -> tuple[str, str]:
    """Return the store key and its secret from the file that AWS's clients read; make a missing file."""
    if not path.exists():
        write_key(path, who.access_key, _secret())
    return read_key(path)


def write_key(path: Path, name: str, secret: str) -> None:
    """Write the file from which AWS's clients read a store key and its secret."""
    lines = ("[default]", f"aws_access_key_id = {name}", f"aws_secret_access_key = {secret}")
    write_secret(path, "\n".join(lines) + "\n")


def read_key(path: Path) -> tuple[str, str]:
    """Return the store key and its secret from a file that AWS's clients read. Raises `InputError`, `OSError`."""
    parsed = configparser.ConfigParser(interpolation=None)
    try:
        parsed.read_string(path.read_text())
        return parsed["default"]["aws_access_key_id"], parsed["default"]["aws_secret_access_key"]
    except (configparser.Error, KeyError):
        raise InputError(f"{path}: it has no [default] with an access key: correct it, or delete it") from None


def _password(path: Path) -> str:
    if not path.exists():
        write_secret(path, _secret() + "\n")
    return path.read_text().strip()


def _secret() -> str:
    return secrets.token_hex(24)  # needs no quoting in a file of NAME = VALUE, a URL or a shell


def _json(path: Path, document: Document) -> None:
    write_secret(path, json.dumps(document, indent=2) + "\n")


def write_secret(path: Path, content: str | bytes) -> None:
    """Write a file that only its owner may read, completely or not at all. A file with this content stays as it is."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    scratch = path.with_name(f".{path.name}.new")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    scratch.replace(path)
