"""Check whether connections to store and bus are encrypted, and whether the run is signed."""

from collections.abc import Iterator

from isthmus.doctor.findings import OK, WARNING, Finding
from isthmus.format.signing import fingerprint
from isthmus.log.run import Run
from isthmus.log.trust import is_near
from isthmus.runtime.urls import Place
from isthmus.store import endpoint_of


def examine_trust(url: str, bus: str, run: Run | None) -> Iterator[Finding]:
    """Yield findings about the encryption of a run's store and bus, and about signatures if there is a run yet."""
    places = [("store: encryption", endpoint_of(url), "https", url), ("bus: encryption", bus, "rediss", bus)]
    for check, target, scheme, of in places:
        if target is None or (place := Place.of(target)).scheme in ("sqlite", "unix"):
            continue
        if place.scheme in (scheme, ""):
            yield Finding(check, OK, f"{place}: TLS")
        elif is_near(of):
            yield Finding(check, OK, f"{place}: this machine's own")
        else:
            advice = f"use {scheme}://: passwords, announcements and gradients can be read and changed in transit"
            yield Finding(check, WARNING, f"{place}: no TLS", advice)
    if run is None:
        return
    if run.header.owner is not None:
        yield Finding("run: signatures", OK, f"everything is signed; the owner is {fingerprint(run.header.owner)}")
    elif is_near(url) and is_near(bus):
        yield Finding("run: signatures", OK, "nothing is signed, in a folder or on loopback")
    else:
        said = "nothing in this run is signed: anyone who can write to its store or bus can act as any participant"
        yield Finding("run: signatures", WARNING, said, "create runs with a key: isthmus init --key FILE (SECURITY.md)")
