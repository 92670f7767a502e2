"""What a process brings to a run, and what it demands of it before it takes part: a key, an owner, or to be told."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from isthmus.errors import InputError
from isthmus.log.membership import Members, require_may
from isthmus.log.run import Run
from isthmus.rules import MemberRole
from isthmus.signing import Signer, fingerprint, read_signer
from isthmus.signing.keys import read_public
from isthmus.store import endpoint_of
from isthmus.urls import redacted, split

logger = logging.getLogger(__name__)

KEY, OWNER, INSECURE = "ISTHMUS_KEY", "ISTHMUS_OWNER", "ISTHMUS_INSECURE"
"""Variables that say what the arguments of the same names do."""


@dataclass(frozen=True, slots=True)
class Trust:
    """A key to sign with, whose run it must be, and whether one where nothing is signed will do everywhere."""

    signer: Signer | None = None
    owner: str = ""
    """The fingerprint of the key that must own the run; empty: whoever's it is."""
    insecure: bool = False

    def judge(self, run: Run) -> None:
        """Return if the run is whose it must be. Raises `InputError`."""
        owner = run.header.owner
        found = "nobody: nothing in it is signed" if owner is None else fingerprint(owner)
        if self.owner and self.owner != found:
            raise InputError(f"{run.url}: this run's owner is {found}, and must be {self.owner}: this is another run")

    def take_part(self, run: Run, members: Members, bus: str, role: MemberRole, name: str) -> None:
        """Return if a process may take part under a name. Raises `InputError` that says what to do.

        Where nothing is signed, the run has to be in a folder or on loopback, and its bus, too; else `insecure` lets it
        go, and that is said.
        """
        require_may(members, self.signer, role, name)
        if not members.signed:
            self.require_near(run.url, bus)
        else:
            owner = members.versions[0].owner
            logger.info("%s belongs to %s; membership %d", run.url, fingerprint(owner), members.current.version)

    def require_near(self, url: str, bus: str = "") -> None:
        """Return if an unsigned run may be there. Raises `InputError`; where it is allowed all the same, says so."""
        away = [redacted(place) for place in (url, bus) if place and not is_near(place)]
        if not away:
            return
        if not self.insecure:
            raise InputError(
                f"{' and '.join(away)}: not on this machine, and nothing in the run is signed, so whoever can write "
                "there can be anybody: create the run with a key (isthmus init --key FILE; `isthmus keys new NAME` "
                f"makes one), or say --insecure ({INSECURE}=1, join(insecure=True)) in every process"
            )
        logger.warning(
            "INSECURE: nothing in the run at %s is signed: whoever can write there can be anybody", " and ".join(away)
        )


def trust_of(
    key: str | Path | Signer | None = None,
    owner: str | None = None,
    insecure: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Trust:
    """Return what arguments say, and where they say nothing the environment. Raises `InputError`.

    `key`: an OpenSSH private key file, or what was read from one. `owner`: a fingerprint SHA256:…, a public key's line
    or its .pub file.
    """
    key = key or environment.get(KEY) or None
    owner = owner or environment.get(OWNER) or ""
    insecure = insecure or environment.get(INSECURE, "").lower() in ("1", "true", "yes", "on")
    signer = key if isinstance(key, Signer) or key is None else read_signer(key, environment)
    if owner and not owner.startswith("SHA256:"):
        owner = fingerprint(read_public(owner))
    return Trust(signer, owner, insecure)


def is_near(url: str) -> bool:
    """Return whether a store or a bus is on this machine: a folder, a file, a socket, or an address of loopback."""
    endpoint = endpoint_of(url)
    parts = split(endpoint or url)
    if endpoint is None and parts.scheme not in ("redis", "rediss"):
        return True  # a folder, a file, a socket; or what whoever opens it will not know
    host = parts.hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
