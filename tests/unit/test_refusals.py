"""A refusal says what its code means. If the credentials are wrong, the refusal says what to do about them."""

import pytest

from isthmus.errors import Denied, PortError, StoreFull
from isthmus.store import refused
from isthmus.store.refused import refusal

WHOSE = "check the run's address, and whose credentials these are"
VALID = "replace them by credentials that are valid"
TABLE = [
    ("AccessDenied", "access denied", WHOSE),
    ("403", "access denied", WHOSE),
    ("AuthorizationFailure", "access denied", WHOSE),
    ("AuthorizationPermissionMismatch", "access denied", WHOSE),
    ("InsufficientAccountPermissions", "access denied", WHOSE),
    (
        "InvalidAccessKeyId",
        "access key is not known",
        "check the store's address, and use an access key that exists there",
    ),
    ("SignatureDoesNotMatch", "secret key does not fit", "correct the secret key"),
    ("AuthenticationFailed", "key or token is not accepted", "correct the key, or replace the token"),
    ("ExpiredToken", "session token has expired", VALID),
    ("ExpiredTokenException", "session token has expired", VALID),
    ("TokenRefreshRequired", "session token has expired", VALID),
    ("InvalidToken", "session token is not valid", VALID),
    ("KeyBasedAuthenticationNotPermitted", "accepts no account key", "use a managed identity"),
    ("NoAuthenticationInformation", "has no credentials", ""),
    ("PublicAccessNotPermitted", "has no credentials", ""),
    ("AccountIsDisabled", "storage account is disabled", ""),
    ("InvalidBucketName", "no valid bucket name", ""),
    ("PermanentRedirect", "in another region", ""),
    ("AuthorizationHeaderMalformed", "in another region", ""),
    ("301", "in another region", ""),
    ("RequestTimeTooSkewed", "clock is more than 15 minutes off", ""),
    ("InvalidObjectState", "in an archive", ""),
    ("BlobArchived", "in an archive", ""),
    ("BlobImmutableDueToPolicy", "policy of the container keeps this object", ""),
    ("KMS.DisabledException", "key it is encrypted with is disabled", ""),
    ("KMS.NotFoundException", "key it is encrypted with is gone", ""),
    ("KMS.KMSInvalidStateException", "key it is encrypted with cannot be used", ""),
    ("InvalidRequest", "refused as it is", ""),
    ("EntityTooLarge", "larger than this store takes", ""),
    ("MethodNotAllowed", "is that the address of an object store?", ""),
    ("405", "is that the address of an object store?", ""),
    ("NotImplemented", "does not implement this request", ""),
]
"""Code, what it says, and the advice, which only answers to the credentials have."""


def told(code: str, status: int = 403) -> PortError:
    return refusal(code, status, "", url="s3://b/run", where="HERE", signer="THIS KEY", what="reading k")


@pytest.mark.parametrize(("code", "said", "do"), TABLE, ids=[code for code, _, _ in TABLE])
def test_a_refusal_says_what_is_wrong_and_what_to_do(code: str, said: str, do: str) -> None:
    error = told(code)
    assert isinstance(error, Denied)
    assert said in str(error)
    assert f"({code})" in str(error)
    assert f", signed with THIS KEY: {do}" in str(error) if do else "credentials these are" not in str(error)


def test_each_code_that_is_known_is_in_the_table() -> None:
    assert {code for code, _, _ in TABLE} == refused.DENIED.keys()
    assert refused.NEXT.keys() - refused.DENIED.keys() == {"401"}, "a status alone says so"


@pytest.mark.parametrize("status", [401, 403])
def test_a_code_that_is_not_known_is_told_by_its_status(status: int) -> None:
    assert str(told("New", status)) == f"HERE: refused (New) for reading k, signed with THIS KEY: {WHOSE}"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("507", "507 Insufficient Storage"),
        ("XMinioStorageFull", "its disks are"),
        ("InsufficientStorage", "its disks are"),
        ("XMinioAdminBucketQuotaExceeded", "quota of the bucket is used up"),
        ("QuotaExceeded", "quota of the user or bucket is used up"),
    ],
)
def test_a_store_without_room_says_whose_room_it_is(code: str, said: str) -> None:
    error = told(code, 507 if code == "507" else 500)
    assert isinstance(error, StoreFull)
    assert said in str(error)
