"""Recognise a store by its address, and say what is special about it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.doctor.findings import NOTE, WARNING, CheckOutcome, Finding
from isthmus.runtime.urls import Place
from isthmus.store import endpoint_of


@dataclass(frozen=True)
class Kind:
    """A kind of store, as its documents describe it (docs/deploy.md says what was tried)."""

    address: str
    """A pattern that the scheme and host of the endpoint match, with the bucket in between: `s3 bucket host`."""
    said: str
    advice: str
    outcome: CheckOutcome = NOTE


KINDS = (
    Kind(
        r"gs .*",
        "Google Cloud Storage: creates are conditional on generation 0, and one object takes about one write a second",
        "nothing is to be done; give each participant a service account of its own",
    ),
    Kind(
        r"az .*",
        "Azure Blob Storage: creates are conditional (If-None-Match: *); for an object that exists the answer is 409",
        "nothing is to be done; give each participant an identity of its own, with a role on this container",
    ),
    Kind(
        r"s3 \S+--\S+--x-s3 \S+\.amazonaws\.com",
        "S3 Express One Zone: all objects are in one zone, and sessions (s3express:CreateSession) are for all of it",
        "keep a copy of what must outlive the zone; policies by prefix do not bind participants here, so sign the run",
    ),
    Kind(
        r"s3 \S+ (\S+\.)?hf\.co",
        "Hugging Face Storage Buckets: reads are redirected to a network of copies, and tokens are for whole buckets",
        "set AWS_ENDPOINT_URL=https://s3.hf.co/NAMESPACE and AWS_REGION=us-east-1; sign the run, since no policy keeps "
        "participants apart",
    ),
    Kind(
        r"s3 \S+ \S+\.r2\.cloudflarestorage\.com",
        "Cloudflare R2: tokens are for whole buckets, and one key takes one write a second (429)",
        "set AWS_REGION=auto; sign the run, since no policy keeps participants apart",
    ),
    Kind(
        r"s3 \S+ (t3\.storage\.dev|\S+\.tigris\.dev)",
        "Tigris: a bucket of its default location (Global) is consistent only within a region",
        "use a bucket whose location is Single-region or Multi-region: the log must be the same for all participants",
    ),
    Kind(
        r"s3 \S+ storage\.googleapis\.com",
        "Google Cloud Storage through its S3 interface: it ignores If-None-Match",
        "name the run gs://BUCKET/RUN",
        WARNING,
    ),
)


def recognised(url: str) -> Iterator[Finding]:
    """Yield what is special about the store of a run, if its address tells which store it is. Raises `InputError`."""
    place = Place.of(url)
    host = Place.of(endpoint_of(url) or "").host
    address = f"{place.scheme.partition('+')[0]} {place.authority} {host}"
    for kind in KINDS:
        if re.fullmatch(kind.address, address):
            yield Finding("store: kind", kind.outcome, kind.said, kind.advice)
            return
