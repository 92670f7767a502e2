"""`isthmus access`: write passwords for each participant of a run, and the servers' rules that enforce its permissions.

Each participant has a folder with only what its process needs, so that the folder can be given to that process alone.
Running the command again changes no password, and adds learners that are named later. Only file names are printed.
"""

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from isthmus.bus.base import VALUE_MAX
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
    ceph_bucket_policy,
    has_bus,
    policy,
    seaweedfs_identities,
)
from isthmus_services.settings import declared

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
Created by `isthmus access`. Everything here except `policies/` is secret. Each participant has a folder with the
settings of its process (ISTHMUS_BUS_USER, ISTHMUS_BUS_PASSWORD_FILE, AWS_SHARED_CREDENTIALS_FILE): give it to that
process alone.
To remove a participant: delete its folder, run the command again, and install the files below on the servers again.

redis/                  users.acl, redis.conf: for redis-server (digests of passwords, no passwords)
store/root-*            the administrator, for a store that you run yourself
store/users             name and secret of each user, one per line, for a store that you run yourself
store/seaweedfs.json    for `weed s3 -config`: identities with their policies
policies/aws/           an identity policy for each participant's role or user
policies/minio/         for `mc admin policy create`
policies/ceph.json      one bucket policy; users of Ceph are named as in store/users (radosgw-admin user create --uid)

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


def run(settings: declared.Access) -> int:
    """Write the files and print their names. Passwords that exist are kept."""
    learners, series = settings.learner or [], settings.series or []
    for flag, names in (("--learner", learners), ("--series", series)):
        for name in names:
            require_name(flag, name)
    place = _place(settings.run) if settings.run else None
    folder = Path(settings.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = prepare(folder, learners, series, place, strict=settings.strict)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}: {error.filename}") from None
    for name in written:
        print(folder / name)
    write_json({"folder": str(folder), "files": written}, settings.json)
    return 0


def _place(url: str) -> tuple[str, str]:
    """Return the bucket and prefix of a run. Raises `InputError` for a run that is not in a bucket."""
    place = Place.of(url)
    if not place.in_bucket or not place.authority:
        raise InputError(f"--run {place}: policies are for runs in buckets (s3://bucket/run)")
    return place.authority, place.path.strip("/")


def prepare(
    folder: Path,
    learners: Sequence[str] = (),
    series: Sequence[str] = (),
    place: tuple[str, str] | None = None,
    *,
    strict: bool = False,
) -> list[str]:
    """Write passwords, files made from them, and policies for the run at `place` (bucket, prefix); return file names.

    If `place` is None, the place and strictness of earlier policies are kept, so that adding a learner needs neither.
    Without earlier policies none are written. Raises `OSError`.
    """
    place, strict = _as_before(folder / PLACE_FILE, place, strict)
    identities = _identities(folder, learners, series, checkpoints=not strict)
    lines, keys = ["user default off"], {}
    for who in identities:
        if has_bus(who.participant):
            _write(folder / who.user / BUS_USER, who.user + "\n")
            lines.append(acl_line(who, _password(folder / who.user / BUS_PASSWORD)))
        keys[who] = _key(folder / who.user / CREDENTIALS, who)
    _write(folder / ACL_FILE, "".join(line + "\n" for line in lines))
    _write(folder / SETTINGS_FILE, REDIS_SETTINGS)
    _write(folder / USERS_FILE, "".join(f"{who.access_key} {secret}\n" for who, secret in keys.items()))
    _write(folder / ROOT_USER, ROOT + "\n")
    root = _password(folder / ROOT_PASSWORD)
    _password(folder / GRAFANA_PASSWORD)
    if place is not None:
        bucket, prefix = place
        for path in folder.glob("policies/*/isthmus-*.json"):  # some may be of participants that were removed
            path.unlink()
        for name, dialect in (("aws", AWS), ("minio", MINIO)):
            for who in identities:
                _json(folder / "policies" / name / f"{who.access_key}.json", policy(who, bucket, prefix, dialect))
        _json(folder / "policies" / "ceph.json", ceph_bucket_policy(identities, bucket, prefix))
        _json(folder / SEAWEEDFS_FILE, seaweedfs_identities(keys, (ROOT, root), bucket, prefix))
    _write(folder / "README", README)
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _as_before(path: Path, place: tuple[str, str] | None, strict: bool) -> tuple[tuple[str, str] | None, bool]:
    if place is None:
        if not path.exists():
            return None, strict
        known = json.loads(path.read_text())
        place, strict = (known["bucket"], known["prefix"]), strict or known["strict"]
    _json(path, {"bucket": place[0], "prefix": place[1], "strict": strict})
    return place, strict


def _identities(folder: Path, learners: Sequence[str], series: Sequence[str], *, checkpoints: bool) -> list[Identity]:
    """Return an identity for each role without a name, and for each learner and follower named now or earlier."""
    found = [Identity(p) for p in Participant if p not in (Participant.LEARNER, Participant.FOLLOWER)]
    for participant, names in ((Participant.LEARNER, learners), (Participant.FOLLOWER, series)):
        known = {p.name.removeprefix(f"{participant}-") for p in folder.glob(f"{participant}-*")}
        found += [Identity(participant, name, checkpoints) for name in sorted(known.union(names))]
    return found


def _key(path: Path, who: Identity) -> str:
    """Return the secret of an identity's store key from the file that AWS's clients read; make a missing file."""
    if not path.exists():
        lines = ("[default]", f"aws_access_key_id = {who.access_key}", f"aws_secret_access_key = {_secret()}")
        _write(path, "\n".join(lines) + "\n")
    return path.read_text().rpartition("=")[2].strip()


def _password(path: Path) -> str:
    if not path.exists():
        _write(path, _secret() + "\n")
    return path.read_text().strip()


def _secret() -> str:
    return secrets.token_hex(24)  # needs no quoting in a file of NAME = VALUE, a URL or a shell


def _json(path: Path, document: Document) -> None:
    _write(path, json.dumps(document, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner may read, completely or not at all."""
    path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    scratch = path.with_name(f".{path.name}.new")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
    scratch.replace(path)
