"""What `isthmus doctor` says of a container of Azure, in Azure's words, on an imitation."""

import os
import re
from collections.abc import Iterator

import pytest

from advice.azure import DELETE, LIST, READ, WRITE, Azure, azure
from advice.doctors import Doctor, small_run
from advice.gate import Gate, error
from advice.rows import row

RUN = ("az://container/run", "--role", "collector")
KEY = "AZURE_STORAGE_ACCOUNT_KEY"


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Azure, Gate]]:
    """An imitation with a small run in its container, and the variables that lead to it."""
    for name in [n for n in os.environ if n.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with azure() as (there, server):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv(KEY, "a2V5")
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.url)
        small_run(RUN[0])
        yield there, server


OTHERS = re.compile(r"s3:|AWS|isthmus access|Google|GOOGLE")


def finds(doctor: Doctor) -> str:
    """Return what the doctor prints, with the sentences of the test, and no word of another cloud."""
    text = doctor.finds(*RUN)
    assert not OTHERS.search("\n".join(line for line in text.splitlines() if "→" in line)), text
    return text


def test_a_container_that_is_well_has_no_failure(doctor: Doctor, container: tuple[Azure, Gate]) -> None:
    text = doctor.prints(*RUN)
    assert "ok      store: conditional PUT" in text
    assert "ok      store: access: az://container/run answers" in text
    assert "note    store: kind: Azure Blob Storage: " in text
    assert "ok      store: way: 127.0.0.1, " in text, "the host that the variables name is looked up"


@row(
    "doctor",
    "store: access: … there is no such container (ContainerNotFound)",
    means="No container of the storage account has this name.",
    do="check its name and the storage account; if that is right, create it with an administrator's credentials: "
    'az storage container create --account-name "$AZURE_STORAGE_ACCOUNT_NAME" --name … --auth-mode login',
    then="`ok store: access`",
)  # fmt: skip
def test_no_container(doctor: Doctor, container: tuple[Azure, Gate]) -> None:
    there, _ = container
    there.containers.clear()
    there.containers |= set(re.findall(r"→ .*container create .* --name (\S+) ", finds(doctor)))
    doctor.finds_no_more(*RUN)


IDENTITIES = "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or a managed or workload identity"


@row(
    "doctor", "store: access: az://… at …: access denied (AuthorizationPermissionMismatch) for …: This request …",
    means="The identity may not read blobs of this container.",
    do=f"use credentials with the role Storage Blob Data Reader on this container ({IDENTITIES}), from a network that "
    "the storage account lets in",
    then="`ok store: access`",
)  # fmt: skip
@row(
    "doctor", "store: may write: az://… at …: access denied (AuthorizationPermissionMismatch) for …: This request …",
    means="The identity may not create blobs.",
    do="use credentials that may write below …: the role Storage Blob Data Contributor, or a SAS token with c and w",
    then="`ok store: may write`",
)  # fmt: skip
@row(
    "doctor", "store: may delete: az://… at …: access denied (403) for …, signed with …: …",
    means="The identity may not delete blobs.",
    do="use credentials that may delete below …: the role Storage Blob Data Contributor, or a SAS token with d",
    then="`ok store: may delete`",
)  # fmt: skip
@row(
    "doctor", "store: may list: az://… at …: access denied (AuthorizationPermissionMismatch) for …: This request …",
    means="The identity may not list blobs.",
    do="use credentials that may list this container: the role Storage Blob Data Reader, or a SAS token with l",
    then="`ok store: may list`",
)  # fmt: skip
@pytest.mark.parametrize(
    ("check", "lacks"), [("access", READ), ("may write", WRITE), ("may delete", DELETE), ("may list", LIST)]
)
def test_a_right_that_is_missing(check: str, lacks: str, doctor: Doctor, container: tuple[Azure, Gate]) -> None:
    there, _ = container
    told = doctor.only(f"store: {check}:")
    there.granted -= {lacks}
    finds(told)
    there.granted |= {lacks}
    told.finds_no_more(*RUN)


@row(
    "doctor", "store: may list below: … refused: az://… at …: access denied (AuthorizationPermissionMismatch) for …: …",
    means="The identity lacks a right that this role needs.",
    do="use credentials that may read what is named here: the role Storage Blob Data Reader, or a SAS token with r and l",
    then="`ok store: may list below`",
)  # fmt: skip
def test_listings_that_are_refused(doctor: Doctor, container: tuple[Azure, Gate]) -> None:
    there, _ = container
    there.granted -= {LIST}
    finds(doctor)
    there.granted |= {LIST}
    doctor.finds_no_more(*RUN)


AWAY = (
    "check that a store answers at this address (AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ENDPOINT), and that "
    f"credentials are named: {IDENTITIES}"
)


@row(
    "doctor", "store: access: az://… at http://127.0.0.1:1: …",
    means="Nothing answers at the address that the variables name.",
    do=AWAY, then="`ok store: access`",
)  # fmt: skip
@row(
    "doctor", "store: way: the name azure.invalid cannot be resolved: …",
    means="No name server knows the host that the variables name.",
    do="correct AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_ENDPOINT, or give this name an address (DNS, or /etc/hosts)",
    then="`ok store: way`",
)  # fmt: skip
@row(
    "doctor", "store: TLS: http://azure.invalid: passwords and data can be read and changed in transit",
    means="The connection to another machine is not encrypted.",
    do="use an address with https:// (AZURE_STORAGE_ENDPOINT)", then="`ok store: access`, and no more word of it",
)  # fmt: skip
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://azure.invalid"])
def test_an_endpoint_that_leads_nowhere(
    endpoint: str, doctor: Doctor, container: tuple[Azure, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    told = doctor.only("store: access:") if endpoint.endswith(":1") else doctor.only("store: way:", "store: TLS:")
    finds(told)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", container[1].url)
    told.finds_no_more(*RUN)


@row(
    "doctor", "store: address: az://…: … (AZURE_STORAGE_ACCOUNT_NAME names the storage account, and …)",
    means="No variable names the storage account, or a key cannot be read.",
    do="correct the URL of the run, or what is named here", then="`ok store: access`",
)  # fmt: skip
def test_no_account(doctor: Doctor, container: tuple[Azure, Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    finds(doctor)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    doctor.finds_no_more(*RUN)


@row(
    "doctor", "store: access: az://… at …: no credentials from Azure: …",
    means="No variable names a key, a token or a client, and no service of Azure's machines gives credentials.",
    do=AWAY, then="`ok store: access`",
)  # fmt: skip
def test_no_credentials(doctor: Doctor, container: tuple[Azure, Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY)
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1/token")
    variable = re.findall(r"are named: (\w+),", finds(doctor))[0]
    monkeypatch.setenv(variable, "a2V5")
    doctor.finds_no_more(*RUN)


@row(
    "doctor", "store: conditional PUT: az://…: a second create-only PUT (If-None-Match: *) of the same key got through",
    means="The log rests on objects that are created once. This address does not honour that.",
    do="use Azure's own address: this one ignores If-None-Match, and a syncer refuses it",
    then="`ok store: conditional PUT`",
)  # fmt: skip
def test_an_address_that_ignores_the_condition(doctor: Doctor, container: tuple[Azure, Gate]) -> None:
    container[0].honours = False
    finds(doctor)
    container[0].honours = True  # stands for Azure's own address
    doctor.finds_no_more(*RUN)


@row(
    "doctor", "store: must not list: these credentials may list …",
    means="The identity may do more than this role should.",
    do="use the role's own identity, whose role assignment has a condition on the blobs' path "
    "(Microsoft.Storage/storageAccounts/blobServices/containers/blobs:path)",
    then="`ok store: must not list`",
)  # fmt: skip
def test_an_identity_that_may_do_too_much(doctor: Doctor, container: tuple[Azure, Gate]) -> None:
    finds(doctor)
    container[1].answers = lambda method, path, size: (  # the condition
        error("AuthorizationPermissionMismatch") if "comp=list" in path and "somebody-else" in path else None
    )
    assert "ok      store: must not list" in doctor.finds_no_more(*RUN)
