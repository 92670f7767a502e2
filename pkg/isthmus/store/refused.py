"""What a bucket's refusals mean, whichever client they came through: S3's codes and statuses of HTTP."""

from isthmus.errors import BucketMissing, Denied, IsthmusError, ObjectMissing, Unavailable

NO_CREDENTIALS = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

EXISTS = {"PreconditionFailed", "412"}

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId"}
"""What stores say of credentials that have been replaced since."""

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
    "NotImplemented": "the server does not implement this request (conditional PUT is needed)",
}

_MISSING = {"NoSuchKey", "404", "NotFound"}
_BEYOND = {"InvalidRange", "416"}
# A concurrent conditional write: nobody has won yet, the same request has to be sent again.
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}


class RangeBeyondEnd(IsthmusError):
    """The range starts behind the end of the object."""


def meaning(code: str, status: int | None, message: str, *, key: str, url: str, where: str) -> IsthmusError:
    """Return what to raise where a bucket at `where` refused a request for a key with this code, or status for one."""
    if code in _MISSING:
        return ObjectMissing(key)
    if code in _BEYOND:
        return RangeBeyondEnd(key)
    if code == "NoSuchBucket":
        return BucketMissing(url, where)
    if code in DENIED or status in (401, 403):
        return Denied(f"{where}: {DENIED.get(code, 'refused')} ({code})")
    return Unavailable(f"{where}: {f'{code}: {message}'.strip()}" + (" (conflict)" if code in _CONFLICT else ""))
