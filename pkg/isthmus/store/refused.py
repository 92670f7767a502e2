"""What a bucket's error answers mean, for every client: the codes of S3, Google and Azure, and HTTP statuses.

Only a read can find an object missing, and only with the store's own code (`MISSING`). Any other 404 comes from a
gateway in between, or from a route that is being reloaded, so it counts as an outage.
`tests/conformance/test_answers.py` has the table of what each answer to each request means.
"""

from isthmus.errors import BucketMissing, Denied, IsthmusError, ObjectMissing, PortError, StoreFull, Unavailable

NO_CREDENTIALS = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

EXISTS = {"PreconditionFailed", "412", "BlobAlreadyExists"}

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId"}
"""Codes with which stores answer to expired or replaced credentials."""

FULL = {
    "507": "507 Insufficient Storage",
    "XMinioStorageFull": "its disks are",
    "XMinioAdminBucketQuotaExceeded": "the quota of the bucket is used up",
    "QuotaExceeded": "the quota of the user or bucket is used up",
    "InsufficientStorage": "its disks are",
}
"""Codes of stores that have no space left. SeaweedFS answers InternalError, as to any other trouble."""

NO_UPLOAD = {"NoSuchUpload", "InvalidPart", "InvalidPartOrder"}

DENIED = {
    "AccessDenied": "access denied",
    "403": "access denied",
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret key does not fit the access key",
    "InvalidBucketName": "that is no valid bucket name",
    "PermanentRedirect": "the bucket is in another region",
    "AuthorizationHeaderMalformed": "the bucket is in another region",
    "RequestTimeTooSkewed": "this machine's clock is more than 15 minutes off the server's",
    "ExpiredToken": "the session token has expired",
    "ExpiredTokenException": "the session token has expired",
    "TokenRefreshRequired": "the session token has expired",
    "InvalidToken": "the session token is not valid",
    "InvalidObjectState": "the object is in an archive",
    "KMS.DisabledException": "the key it is encrypted with is disabled",
    "KMS.NotFoundException": "the key it is encrypted with is gone",
    "KMS.KMSInvalidStateException": "the key it is encrypted with cannot be used",
    "InvalidRequest": "the request is refused as it is (an object encrypted with a key of its owner's, for example)",
    "EntityTooLarge": "the object is larger than this store takes in one request",
    "MethodNotAllowed": "the server does not take this request: is that the address of an object store?",
    "405": "the server does not take this request: is that the address of an object store?",
    "301": "the bucket is in another region",
    "NotImplemented": "the server does not implement this request (conditional PUT is needed)",
    "AuthenticationFailed": "the key or token is not accepted",
    "AuthorizationFailure": "access denied",
    "AuthorizationPermissionMismatch": "access denied",
    "InsufficientAccountPermissions": "access denied",
    "KeyBasedAuthenticationNotPermitted": "this storage account accepts no account key",
    "NoAuthenticationInformation": "the request has no credentials",
    "PublicAccessNotPermitted": "the request has no credentials",
    "AccountIsDisabled": "the storage account is disabled",
    "BlobImmutableDueToPolicy": "a policy of the container keeps this object as it is",
    "BlobArchived": "the object is in an archive",
}

_WHOSE = "check the run's address, and whose credentials these are"
_EXPIRED = "replace them by credentials that are valid"
NEXT = {
    "AccessDenied": _WHOSE,
    "401": _WHOSE,
    "403": _WHOSE,
    "InvalidAccessKeyId": "check the store's address, and use an access key that exists there",
    "SignatureDoesNotMatch": "correct the secret key there",
    "AuthenticationFailed": "correct the key, or replace the token by one that is valid",
    "AuthorizationFailure": _WHOSE,
    "AuthorizationPermissionMismatch": _WHOSE,
    "InsufficientAccountPermissions": _WHOSE,
    "KeyBasedAuthenticationNotPermitted": "use a managed identity, a workload identity or a client secret",
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": _EXPIRED,
}
"""What to do about answers to the credentials themselves, by code."""

MISSING = {"NoSuchKey", "BlobNotFound"}
"""What stores answer if there is no such object: S3 and Google, and Azure."""

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_BEYOND = {"InvalidRange", "416"}


class RangeBeyondEnd(IsthmusError):
    """The range starts beyond the end of the object."""


def refusal(
    code: str, status: int | None, message: str, *, url: str, where: str, signer: str = "", what: str = ""
) -> PortError:
    """Return the error to raise for a request that a bucket at `where` answered with this code or HTTP status.

    `what`: the request, as `reading KEY`, which is named if access is denied. `signer`: the credentials that signed the
    request, and where they come from; empty if not known. The error is never `ObjectMissing`: writes, listings and
    deletions cannot find an object missing.
    """
    if code in _NO_BUCKET:
        return BucketMissing(url, where)
    if code in FULL or status == 507:
        return StoreFull(where, url, FULL.get(code, FULL["507"]))
    if code in DENIED or status in (401, 403, 405):
        # The messages of Google and Azure name what is missing. S3's says no more than the code.
        more = f": {message}" if message and url.startswith(("gs:", "az:")) else ""
        do = NEXT.get(code, "" if code in DENIED else NEXT.get(str(status), ""))
        why = DENIED.get(code, "refused")
        request = f" for {what}" if what and why in {"access denied", "refused"} else ""
        return Denied(f"{where}: {why} ({code or status}){request}{more}{_signed(signer, do)}")
    said = f"{code or status}: {message}".strip()
    if status == 404:
        said += " (404, but not as a store answers: a gateway in between, or a wrong endpoint)"
    # So, too, a conditional write beside another one, of which none has won yet: the same request is sent again.
    return Unavailable(f"{where}: {said}")


def doubted(code: str, *, where: str, signer: str) -> Unavailable:
    """Return the error to raise for an answer of `EXPIRED`, if newer credentials may help. See `refusal`."""
    return Unavailable(f"{where}: credentials are fetched anew: {DENIED[code]} ({code}){_signed(signer, NEXT[code])}")


def _signed(signer: str, do: str) -> str:
    return (f", signed with {signer}" if signer else "") + f": {do}" if do else ""


def refused_read(
    code: str, status: int | None, message: str, *, key: str, url: str, where: str, signer: str = "", what: str = ""
) -> PortError | RangeBeyondEnd:
    """Return the error to raise for a failed read, which may also mean a missing object or a range beyond its end."""
    if code in MISSING:
        return ObjectMissing(key)
    if code in _BEYOND:
        return RangeBeyondEnd(key)
    return refusal(code, status, message, url=url, where=where, signer=signer, what=what)
