"""What to do about a store's faults, worded for each kind of store. No sentence names a thing of another kind."""

from dataclasses import dataclass

from isthmus.errors import BucketMissing, Denied, IsthmusError, StoreFull
from isthmus.runtime.urls import Place
from isthmus.store.refused import DENIED
from isthmus.wording import key_flag


@dataclass(frozen=True)
class Advice:
    """What to do about each fault. `{url}` stands for the run's URL, and `{place}` for a prefix below it.

    `{key}` stands for the collector's key, as a flag after a space; it is empty if the run is not signed.
    """

    refused: str
    """For a store that denies the first read."""
    away: str
    """For a store that does not answer."""
    clear: str
    """For an address on another machine without TLS."""
    reading: str
    """For single keys that a role must be able to read, and may not."""
    listing: str
    writing: str
    deleting: str
    creating: str
    """For a store that does not honour create-only PUT."""
    slow: str
    large: str
    """For a store that refuses large objects."""
    own: str
    """For credentials that may do more than their role."""
    full: str
    taken: str
    """For a write that the store neither accepts nor denies."""


FREES = (
    "isthmus gc {url} --apply{key} frees what the run does not need any more and is over an hour old. If that is not "
    "enough, isthmus gc {url} --apply{key} --keep 8 keeps 8 versions in place of 64. In a young or small run both free "
    "little: enlarge the disk or the store while they run; or stop all learners and syncers of the run (what "
    "learners have trained since their last checkpoints is lost then: none can be stored), wait until they have ended, "
    "and isthmus gc {url} --apply{key} --keep 8 --min-age 0 keeps no young objects either"
)
_POLICY = "(`isthmus access` writes a policy for each role; if `isthmus create` made this run, run that again)"
IN_BUCKET = Advice(
    refused="use credentials with s3:GetObject below {url}, and s3:ListBucket (a missing key must be 404, not 403)",
    away="check that a store answers at this address (AWS_ENDPOINT_URL, or endpoint= in the URL)",
    clear="use an address with https:// (AWS_ENDPOINT_URL); AWS_CA_BUNDLE names a file of your own authorities",
    reading="use the role's own credentials, which `isthmus access` writes: s3:GetObject on what is named here, and "
    "s3:ListBucket (a missing key must be 404, not 403)",
    listing="use credentials with s3:ListBucket below {place} " + _POLICY,
    writing="use credentials with s3:PutObject below {place} " + _POLICY,
    deleting="use credentials with s3:DeleteObject below {place} " + _POLICY,
    creating="use a store that honours it: AWS S3, MinIO, SeaweedFS, R2; a syncer refuses this one",
    slow="find out what limits the way to the store (network, disk); if nothing can be done, create the run with a "
    "smaller codec (int4) or a larger H (--sync-every)",
    large="raise the store's limit on the size of one object, or that of a gateway before it",
    own="use the role's own credentials, which `isthmus access` writes",
    full="make room: " + FREES + ". Until then nothing is merged; learners train on",
    taken="see the store's own log: it may be full (disks, volumes, quota) or damaged. If it is full: " + FREES,
)
IN_GOOGLE = Advice(
    refused="use a service account with storage.objects.get and storage.objects.list on this bucket "
    "(GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT names its key file)",
    away="check that a store answers at this address (GOOGLE_BASE_URL, or gcs_base_url in the key file)",
    clear="use an address with https:// (GOOGLE_BASE_URL, or gcs_base_url in the key file)",
    reading="use a service account with storage.objects.get on what is named here, and storage.objects.list on the "
    "bucket (a missing object must be 404, not 403)",
    listing="use a service account with storage.objects.list on the bucket",
    writing="use a service account with storage.objects.create and, to write over an object, storage.objects.delete "
    "below {place}",
    deleting="use a service account with storage.objects.delete below {place}",
    creating="use Google's own address: this one ignores x-goog-if-generation-match, and a syncer refuses it",
    slow=IN_BUCKET.slow,
    large=IN_BUCKET.large,
    own="use the role's own service account, and bind it with conditions on object names (resource.name.startsWith)",
    full=IN_BUCKET.full,
    taken=IN_BUCKET.taken,
)
_AZURES_KEYS = "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or a managed or workload identity"
IN_AZURE = Advice(
    refused=f"use credentials with the role Storage Blob Data Reader on this container ({_AZURES_KEYS}), from a "
    "network that the storage account lets in",
    away="check that a store answers at this address (AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ENDPOINT), and that "
    f"credentials are named: {_AZURES_KEYS}",
    clear="use an address with https:// (AZURE_STORAGE_ENDPOINT)",
    reading="use credentials that may read what is named here: the role Storage Blob Data Reader, or a SAS token with "
    "r and l",
    listing="use credentials that may list this container: the role Storage Blob Data Reader, or a SAS token with l",
    writing="use credentials that may write below {place}: the role Storage Blob Data Contributor, or a SAS token with "
    "c and w",
    deleting="use credentials that may delete below {place}: the role Storage Blob Data Contributor, or a SAS token "
    "with d",
    creating="use Azure's own address: this one ignores If-None-Match, and a syncer refuses it",
    slow=IN_BUCKET.slow,
    large=IN_BUCKET.large,
    own="use the role's own identity, whose role assignment has a condition on the blobs' path "
    "(Microsoft.Storage/storageAccounts/blobServices/containers/blobs:path)",
    full=IN_BUCKET.full,
    taken=IN_BUCKET.taken,
)
IN_FOLDER = Advice(
    refused="let this user read and enter {url} and what is in it: see owner and mode (ls -ld), chown or chmod",
    clear="",  # a folder has no address
    away="see the kernel's log (dmesg): the disk or the network share of {url} may be damaged or gone",
    reading="let this user read {url} and what is in it: chown or chmod",
    listing="let this user read {url}/{place}: chown or chmod",
    writing="let this user write in {url}/{place}: chown or chmod, and a mount that is not read-only",
    deleting="let this user write in {url}/{place}: chown or chmod",
    creating="use a file system with atomic hard links (ext4, xfs; not FAT, and few network shares); a syncer refuses "
    "this one",
    slow=IN_BUCKET.slow,
    large="raise the limit on the size of a file (ulimit -f), or use another file system",
    own="if participants do not trust each other, use a bucket with a policy for each (`isthmus access`)",
    full=IN_BUCKET.full,
    taken="see the kernel's log (dmesg): the disk or the network share of {url} may be damaged or gone",
)
LINK = "put a folder in the place of the link, with what the link leads to"
KEY = (
    "look first whether the store came back empty (another disk?): then bring its data back; else get a new access key "
    "from the store's administrator; if `isthmus create` made this one, run that again"
)
SECRET = (
    "correct the secret key, where the error says that it is from; if `isthmus create` made it, give this participant "
    "a copy of its folder again"
)
CLOCK = "run an NTP client (chrony) on this machine"
BUCKET = "{check}; if that is right, create it with an administrator's credentials: {command}"


def advice_for(url: str) -> Advice:
    """Return the advice for the kind of store that a URL names."""
    place = Place.of(url)
    return {"gs": IN_GOOGLE, "az": IN_AZURE}.get(place.scheme, IN_BUCKET) if place.in_bucket else IN_FOLDER


def what_failed(error: IsthmusError) -> str:
    """Return the text of an error, without advice that a finding has beside it."""
    return error.brief if isinstance(error, BucketMissing) else str(error)


def freeing(advice: str, url: str, *, signed: bool) -> str:
    """Return advice that makes room in a run's store, with its commands as this run takes them."""
    return advice.format(url=url, key=key_flag("collector", signed=signed))


def what_to_do(error: IsthmusError, url: str, refused: str, other: str, *, signed: bool = False) -> str:
    """Return the advice for a request that failed with this error.

    `refused`: the advice if the request was denied; `other`: if it failed in no way that has a name.
    `signed`: whether the run is known to be signed.
    """
    if isinstance(error, BucketMissing):
        return BUCKET.format(check=error.check, command=error.command) + (error.more and f" ({error.more})")
    if isinstance(error, Denied) and " is a link: " in str(error):
        return LINK
    if DENIED["RequestTimeTooSkewed"] in str(error):
        return CLOCK
    if DENIED["InvalidAccessKeyId"] in str(error):
        return KEY
    if DENIED["SignatureDoesNotMatch"] in str(error):
        return SECRET
    if isinstance(error, StoreFull):
        return freeing(advice_for(url).full, url, signed=signed)
    return refused if isinstance(error, Denied) else other
