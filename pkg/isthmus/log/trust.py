"""The key that a process brings to a run, and what it demands before it takes part: an owner, a digest, signatures."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import InputError, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob
from isthmus.format.rules import MemberRole
from isthmus.format.signing import Signer, fingerprint, read_signer
from isthmus.format.signing.keys import read_public
from isthmus.log.membership import Members, require_may
from isthmus.log.run import Run
from isthmus.runtime.urls import Place, redacted
from isthmus.store import endpoint_of

logger = logging.getLogger(__name__)

KEY, OWNER, INSECURE, RUN_DIGEST = "ISTHMUS_KEY", "ISTHMUS_OWNER", "ISTHMUS_INSECURE", "ISTHMUS_RUN_DIGEST"
"""Environment variables that stand in for the arguments of the same names."""


@dataclass(frozen=True, slots=True)
class Trust:
    """A key to sign with, the owner and digest that a run must have, and whether any unsigned run is allowed."""

    signer: Signer | None = None
    owner: str = ""
    """The fingerprint of the key that must own the run; empty: any owner or none."""
    insecure: bool = False
    run_digest: str = ""
    """The beginning that the run's digest, in hexadecimal, must have; empty: any digest."""

    def require(self, url: str, blob: Blob) -> None:
        """Raise `InputError` unless a run object has the required digest and owner, before its contents are decoded.

        If an owner is required, the signature is verified too.
        """
        found = frame.digest(blob).hex()
        if not found.startswith(self.run_digest):
            raise InputError(
                f"{url}: the digest of this run is {found}, and must begin with {self.run_digest}: this is another run"
            )
        author = frame.author_of(blob)
        self._require_owner(url, None if author == frame.UNSIGNED_AUTHOR else author)
        if self.owner:
            try:
                frame.head_end(blob, frame.Kind.RUN)
                frame.require_signature(blob, frame.Kind.RUN)
            except RecordInvalid as error:
                raise InputError(f"{url}: the run object there is not signed by {self.owner}: {error}") from None

    def judge(self, run: Run) -> None:
        """Raise `InputError` unless the run has the required digest and owner."""
        if not run.digest.hex().startswith(self.run_digest):
            raise InputError(f"{run.url}: this is another run than {self.run_digest}")
        self._require_owner(run.url, run.header.owner)

    def _require_owner(self, url: str, owner: bytes | None) -> None:
        found = "nobody: nothing in it is signed" if owner is None else fingerprint(owner)
        if self.owner and self.owner != found:
            hint = " (under a charter, too, --owner names the key that created the run)" if owner is not None else ""
            raise InputError(f"{url}: this run's owner is {found}, and must be {self.owner}: this is another run{hint}")

    def take_part(self, run: Run, members: Members, bus: str, role: MemberRole, name: str) -> None:
        """Raise `InputError`, which says what to do, unless a process may take part under a name.

        An unsigned run, and its bus, must be on this machine: in a folder or on loopback. `insecure` allows it
        elsewhere, with a warning in the log.
        """
        require_may(members, self.signer, role, name)
        if not members.signed:
            self.require_near(run.url, bus)
        else:
            owner = members.versions[0].owner
            logger.info("%s belongs to %s; membership %d", run.url, fingerprint(owner), members.current.version)

    def require_near(self, url: str, bus: str = "") -> None:
        """Raise `InputError` unless an unsigned run may be at these URLs. If `insecure` allows one elsewhere, log a
        warning."""
        away = [redacted(place) for place in (url, bus) if place and not is_near(place)]
        if not away:
            return
        if not self.insecure:
            raise InputError(
                f"{' and '.join(away)}: not on this machine, and nothing in the run is signed, so anyone who can "
                "write there can act as any participant: create the run with a key (isthmus init --key "
                "OWNER_KEY_FILE; `isthmus keys new NAME` makes one), or pass --insecure "
                f"({INSECURE}=1, join(insecure=True)) in every process"
            )
        logger.warning(
            "INSECURE: nothing in the run at %s is signed: anyone who can write there can act as any participant",
            " and ".join(away),
        )


def trust_of(
    key: str | Path | Signer | None = None,
    owner: str | None = None,
    insecure: bool = False,
    run_digest: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Trust:
    """Return the trust that the arguments give, or the environment where an argument is not given. Raises `InputError`.

    `key`: an OpenSSH private key file, or a signer read from one. `owner`: a fingerprint SHA256:…, the line of a public
    key or its .pub file. `run_digest`: the run's digest in hexadecimal, or at least its first half.
    """
    key = key or environment.get(KEY) or None
    owner = owner or environment.get(OWNER) or ""
    insecure = insecure or environment.get(INSECURE, "").lower() in ("1", "true", "yes", "on")
    signer = key if isinstance(key, Signer) or key is None else read_signer(key, environment)
    if owner and not owner.startswith("SHA256:"):
        owner = fingerprint(read_public(owner))
    run_digest = (run_digest or environment.get(RUN_DIGEST) or "").lower()
    if run_digest and not re.fullmatch(r"[0-9a-f]{32,64}", run_digest):
        raise InputError(f"run digest {run_digest[:80]!a}: 32 to 64 hexadecimal digits, as `isthmus init` prints them")
    return Trust(signer, owner, insecure, run_digest)


def is_near(url: str) -> bool:
    """Return whether a store or a bus is on this machine: a folder, a file, a socket, or a loopback address."""
    endpoint = endpoint_of(url)
    place = Place.of(endpoint or url)
    if endpoint is None and place.scheme not in ("redis", "rediss"):
        return True  # a folder, a file or a socket; any other URL fails when it is opened
    return place.is_loopback
