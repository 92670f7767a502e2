"""What `isthmus doctor` says of a bucket of Google, in Google's words, on an imitation."""

import re
from collections.abc import Iterator

import pytest

from advice.doctors import Doctor, small_run
from advice.gate import Gate
from advice.google import Google, google, key_file
from advice.rows import row

RUN = ("gs://bucket/run", "--role", "collector")


@pytest.fixture
def bucket(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Google, Gate]]:
    """An imitation with a small run in its bucket, and the variable that leads to it."""
    with google(tmp_path_factory.mktemp("google")) as (there, server):
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(there.key))
        monkeypatch.delenv("GOOGLE_BASE_URL", raising=False)
        small_run(RUN[0])
        yield there, server


AMAZONS = re.compile(r"s3:|AWS|isthmus access")


def finds(doctor: Doctor) -> str:
    """Return what the doctor prints, with the sentences of the test, and no word of another cloud."""
    text = doctor.finds(*RUN)
    assert not AMAZONS.search("\n".join(line for line in text.splitlines() if "→" in line)), text
    return text


def test_a_bucket_that_is_well_has_no_failure(doctor: Doctor, bucket: tuple[Google, Gate]) -> None:
    text = doctor.prints(*RUN)
    assert "ok      store: conditional PUT" in text
    assert "ok      store: access: gs://bucket/run answers" in text
    assert "ok      store: way: 127.0.0.1, " in text, "the host that the key file names is looked up"


@row(
    "doctor", "store: access: gs://… there is no such bucket (NoSuchBucket)",
    means="No bucket has this name.",
    do="check its name; if that is right, create it with an administrator's credentials: gcloud storage buckets create "
    "gs://…",
    then="`ok store: access`",
)  # fmt: skip
def test_no_bucket(doctor: Doctor, bucket: tuple[Google, Gate]) -> None:
    there, _ = bucket
    there.buckets.clear()
    there.buckets |= set(re.findall(r"→ .*buckets create gs://(\S+)", finds(doctor)))
    doctor.finds_no_more(*RUN)


@row(
    "doctor", "store: access: gs://… at …: access denied (AccessDenied) for …: Access denied. … does not have … access …",
    means="The service account may not read objects of this bucket.",
    do="use a service account with storage.objects.get and storage.objects.list on this bucket "
    "(GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT names its key file)",
    then="`ok store: access`",
)  # fmt: skip
@row(
    "doctor", "store: may write: gs://… at …: access denied (AccessDenied) for …: Access denied. … does not have … access …",
    means="The service account may not create objects.",
    do="use a service account with storage.objects.create and, to write over an object, storage.objects.delete below …",
    then="`ok store: may write`",
)  # fmt: skip
@row(
    "doctor", "store: may delete: gs://… at …: access denied (AccessDenied) for …: Access denied. … does not have … access …",
    means="The service account may not delete objects.",
    do="use a service account with storage.objects.delete below …", then="`ok store: may delete`",
)  # fmt: skip
@pytest.mark.parametrize("check", ["access", "may write", "may delete"])
def test_a_right_that_is_missing(check: str, doctor: Doctor, bucket: tuple[Google, Gate]) -> None:
    there, _ = bucket
    told = doctor.only(f"store: {check}:")
    advice = re.escape(told.rows[0].do).replace("…", ".+")
    missing = set(re.findall(r"storage\.objects\.\w+", told.rows[0].do))
    there.granted -= missing if check != "may write" else {"storage.objects.create"}
    text = finds(told)
    there.granted |= set(re.findall(r"storage\.objects\.\w+", re.findall(f"→ ({advice})", text)[0]))
    told.finds_no_more(*RUN)


@row(
    "doctor", "store: may list: gs://… at …: access denied (AccessDenied) for …: Access denied. … does not have … access …",
    means="The service account may not list objects.",
    do="use a service account with storage.objects.list on the bucket", then="`ok store: may list`",
)  # fmt: skip
@row(
    "doctor", "store: may list below: … refused: gs://… at …: access denied (AccessDenied) for …: …",
    means="The service account lacks a right that this role needs.",
    do="use a service account with storage.objects.get on what is named here, and storage.objects.list on the bucket "
    "(a missing object must be 404, not 403)",
    then="`ok store: may list below`",
)  # fmt: skip
def test_listings_that_are_refused(doctor: Doctor, bucket: tuple[Google, Gate]) -> None:
    _, server = bucket
    # Without the right to list, a missing object is 403 as well: here only the listings themselves are refused.
    server.answers = lambda method, path, size: (
        (403, b"<Error><Code>AccessDenied</Code><Message>Access denied.</Message><Details>someone does not have "
         b"storage.objects.list access to the bucket.</Details></Error>") if "prefix=" in path else None
    )  # fmt: skip
    finds(doctor)
    server.open()
    doctor.finds_no_more(*RUN)


@row(
    "doctor", "store: access: gs://… at http://127.0.0.1:1: …",
    means="Nothing answers at the address that the key file or GOOGLE_BASE_URL names.",
    do="check that a store answers at this address (GOOGLE_BASE_URL, or gcs_base_url in the key file)",
    then="`ok store: access`",
)  # fmt: skip
@row(
    "doctor", "store: way: 127.0.0.1:1 cannot be reached: …",
    means="Nothing answers at the address that the key file or GOOGLE_BASE_URL names.",
    do="start the server there, or let this machine through (routes, firewalls, security groups)",
    then="`ok store: way`",
)  # fmt: skip
def test_a_key_file_that_leads_nowhere(doctor: Doctor, bucket: tuple[Google, Gate]) -> None:
    there, server = bucket
    key_file(there.key, "http://127.0.0.1:1")
    finds(doctor)
    key_file(there.key, server.url)
    doctor.finds_no_more(*RUN)


@row(
    "doctor", "store: TLS: http://store.invalid: passwords and data can be read and changed in transit",
    means="The connection to another machine is not encrypted.",
    do="use an address with https:// (GOOGLE_BASE_URL, or gcs_base_url in the key file)",
    then="`ok store: access`, and no more word of it",
)  # fmt: skip
@row(
    "doctor", "store: way: the name store.invalid cannot be resolved: …",
    means="No name server knows the host that the key file or GOOGLE_BASE_URL names.",
    do="correct GOOGLE_BASE_URL, or give this name an address (DNS, or /etc/hosts)", then="`ok store: way`",
)  # fmt: skip
def test_a_name_that_nobody_knows(doctor: Doctor, bucket: tuple[Google, Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://store.invalid")
    finds(doctor)
    monkeypatch.setenv("GOOGLE_BASE_URL", bucket[1].url)
    doctor.finds_no_more(*RUN)


@row(
    "doctor", "store: address: gs://…: … (GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT name a key file)",
    means="The key file cannot be read, or is none.",
    do="correct the URL of the run, or what is named here", then="`ok store: access`",
)  # fmt: skip
def test_a_key_file_that_is_none(doctor: Doctor, bucket: tuple[Google, Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/none/such.json")
    finds(doctor)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(bucket[0].key))
    doctor.finds_no_more(*RUN)


@row(
    "doctor", "store: access: gs://… at …: no credentials from Google: …",
    means="No variable names a key file, and no service of Google's machines gives credentials.",
    do="use a service account with storage.objects.get and storage.objects.list on this bucket "
    "(GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT names its key file)",
    then="`ok store: access`",
)  # fmt: skip
def test_no_credentials(doctor: Doctor, bucket: tuple[Google, Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    there, server = bucket
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT"):  # a service that knows nothing
        monkeypatch.setenv(name, server.url.partition("//")[2])
    server.answers = lambda method, path, size: (404, b"no such account") if "computeMetadata" in path else None
    variable = re.findall(r"or (\w+) names its key file", finds(doctor))[0]
    monkeypatch.setenv(variable, str(there.key))
    doctor.finds_no_more(*RUN)


def test_what_the_server_says_is_printed(doctor: Doctor, bucket: tuple[Google, Gate]) -> None:
    _, server = bucket
    for body, words in (
        (b'{"error": {"code": 400, "message": "User project is invalid."}}', "400: User project is invalid."),
        (b"plain words", "400: plain words"),
        (
            b"<Error><Code>InvalidArgument</Code><Message>Bad.</Message><Details>Why</Details></Error>",
            "InvalidArgument: Bad. Why",
        ),
    ):
        answer = (400, body)
        server.answers = lambda method, path, size, answer=answer: answer  # type: ignore[misc]
        assert words in doctor.prints(*RUN)


@row(
    "doctor", "store: conditional PUT: gs://…: a second create-only PUT (If-None-Match: *) of the same key got through",
    means="The log rests on objects that are created once. This address does not honour that.",
    do="use Google's own address: this one ignores x-goog-if-generation-match, and a syncer refuses it",
    then="`ok store: conditional PUT`",
)  # fmt: skip
def test_an_address_that_ignores_the_condition(doctor: Doctor, bucket: tuple[Google, Gate]) -> None:
    bucket[0].honours = False
    finds(doctor)
    bucket[0].honours = True  # stands for Google's own address
    doctor.finds_no_more(*RUN)


@row(
    "doctor", "store: must not delete: these credentials may delete …",
    means="The service account may do more than this role should.",
    do="use the role's own service account, and bind it with conditions on object names (resource.name.startsWith)",
    then="`ok store: must not delete`",
)  # fmt: skip
def test_an_account_that_may_do_too_much(doctor: Doctor, bucket: tuple[Google, Gate]) -> None:
    finds(doctor)
    bucket[1].answers = lambda method, path, size: (  # the condition: below scratch/ only
        (403, b"<Error><Code>AccessDenied</Code></Error>") if method == "DELETE" and "/scratch/" not in path else None
    )
    assert "ok      store: must not delete" in doctor.finds_no_more(*RUN)
