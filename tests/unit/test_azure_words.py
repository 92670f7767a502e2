"""A container of Azure is asked and answers in Azure's words. A stub server gives the answers to the real client."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from advice.azure import azure
from isthmus.agent.ports import open_place
from isthmus.errors import BucketMissing, Denied, InputError, ObjectMissing, Unavailable
from isthmus.store import EdgeStore, Patience
from isthmus.store.credentials import azure_host, azure_signer
from isthmus_services.commands.access import place_of
from isthmus_services.main import main
from support.identities import Answer, Request, serving

ONCE = Patience(attempts=1)


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")


def error(status: int, code: str, more: str = "") -> Answer:
    said = f"<Error><Code>{code}</Code><Message>So.\nRequestId:1\nTime:2</Message>{more}</Error>"
    return status, f'<?xml version="1.0"?>{said}'.encode()


@asynccontextmanager
async def answered(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> AsyncIterator[tuple[EdgeStore, list[Request]]]:
    left, asked = list(answers), list[Request]()

    async def answer(request: Request, _: object) -> Answer:
        asked.append(request)
        return left.pop(0)

    async with serving(answer) as url:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", url)
        async with open_place("az://container/run") as store:
            yield store.with_patience(ONCE), asked


async def test_azure_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = error(409, "BlobAlreadyExists"), error(412, "ConditionNotMet"), error(404, "BlobNotFound")
    async with answered(monkeypatch, *answers) as (store, asked):
        assert await store.create("k", b"x") is False
        assert await store.create("k", b"x") is False
        with pytest.raises(ObjectMissing):
            await store.get("k")
        assert [(r.method, r.path) for r in asked] == [("PUT", "/container/run/k")] * 2 + [("GET", "/container/run/k")]
        assert [r.headers.get("if-none-match") for r in asked] == ["*", "*", None]
        assert all(r.headers["authorization"].startswith("SharedKey account:") for r in asked)


GET: Callable[[EdgeStore], Awaitable[object]] = lambda store: store.get("k")  # noqa: E731
CREATE: Callable[[EdgeStore], Awaitable[object]] = lambda store: store.create("k", b"x")  # noqa: E731
DELETE: Callable[[EdgeStore], Awaitable[object]] = lambda store: store.delete("k")  # noqa: E731


@pytest.mark.parametrize(
    ("answer", "ask", "raised", "said"),
    [
        (
            error(403, "AuthenticationFailed", "<AuthenticationErrorDetail>Too old.</AuthenticationErrorDetail>"), GET, Denied,
            "the key or token is not accepted (AuthenticationFailed): So. Too old., signed with the account key "
            "(AZURE_STORAGE_ACCOUNT_KEY): correct the key, or replace the token by one that is valid",
        ),
        (error(403, "AuthorizationPermissionMismatch"), DELETE, Denied, "access denied (AuthorizationPermissionMismatch) for deleting k: So."),
        (error(403, "KeyBasedAuthenticationNotPermitted"), GET, Denied, "accepts no account key"),
        (error(409, "BlobImmutableDueToPolicy"), DELETE, Denied, "a policy of the container keeps this object as it is"),
        (
            error(404, "ContainerNotFound"), CREATE, BucketMissing,
            'there is no such container (ContainerNotFound): check its name and the storage account; `az storage container '
            'create --account-name "$AZURE_STORAGE_ACCOUNT_NAME" --name container --auth-mode login` creates it',
        ),
        (error(409, "ContainerBeingDeleted"), CREATE, Unavailable, "ContainerBeingDeleted: So."),
        (error(503, "ServerBusy"), CREATE, Unavailable, "ServerBusy: So."),
    ],
)  # fmt: skip
async def test_a_refusal_is_told_in_azures_words(
    answer: Answer,
    ask: Callable[[EdgeStore], Awaitable[object]],
    raised: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with answered(monkeypatch, answer) as (store, _):
        with pytest.raises(raised, match=re.escape(said)) as caught:
            await ask(store)
        assert not re.search("AWS|s3:|RequestId", str(caught.value))


async def test_a_batch_of_one_tells_whether_its_deletion_was_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: Request, writer: object) -> None:
        body = b"--b\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 %b\r\n\r\n--b--\r\n" % told.pop(
            0
        )
        head = b"HTTP/1.1 202 So\r\nContent-Type: multipart/mixed; boundary=b\r\nConnection: close\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)  # type: ignore[attr-defined]
        await writer.drain()  # type: ignore[attr-defined]

    told = [b"202 Accepted", b"404 The specified blob does not exist.", b"403 This request is not authorized."]
    async with serving(answer) as url:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", url)
        async with open_place("az://container/run") as store:
            await store.delete("k")
            await store.delete("k")
            with pytest.raises(Denied, match=r"access denied \(403\) for deleting \S+, signed with the account key"):
                await store.delete("k")


async def test_no_credentials_name_the_identity_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1/token")
    async with open_place("az://container/run") as store:
        with pytest.raises(
            Unavailable, match="no credentials from Azure: connection refused, for this machine's managed"
        ):
            await store.with_patience(ONCE).get("k")


@pytest.mark.parametrize(
    ("url", "unset", "said"),
    [
        ("az://container/run", "ACCOUNT_NAME", "Account must be specified (AZURE_STORAGE_ACCOUNT_NAME names"),
        ("az://Container_/run", "", "Container_ is no valid name of a container"),
        ("az://container@account.dfs.core.windows.net/run", "", "is no valid name of a container"),
        ("az://c", "", "c is no valid name of a container"),
    ],
)
async def test_a_url_that_leads_to_no_container_is_refused(
    url: str, unset: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(f"AZURE_STORAGE_{unset}", raising=False)
    with pytest.raises(InputError, match=re.escape(said)):
        async with open_place(url):
            pass


async def test_a_container_and_policies_are_not_made_here() -> None:
    with pytest.raises(
        InputError, match=r"create the container first: az storage container create .* --name container"
    ):
        async with open_place("az://container/run", make=True):
            pass
    with pytest.raises(InputError, match="policies for s3:// only: leave --run out"):
        place_of("az://container/run")


def test_the_demo_says_how_to_make_the_container(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with azure() as (there, server):
        there.containers.clear()
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.url)
        assert main(["demo", "--store", "az://container/demo", "--out", str(tmp_path)]) == 2
    assert "create it: az storage container create" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"AZURE_STORAGE_TOKEN": "x", "AZURE_STORAGE_ACCOUNT_KEY": "y"}, "the bearer token (AZURE_STORAGE_TOKEN)"),
        ({"AZURE_STORAGE_SAS_TOKEN": "x"}, "the SAS token (AZURE_STORAGE_SAS_TOKEN)"),
        (
            {"AZURE_CLIENT_ID": "x", "AZURE_FEDERATED_TOKEN_FILE": "y"},
            "the workload identity (AZURE_FEDERATED_TOKEN_FILE)",
        ),
        ({}, "this machine's managed identity (no variable names a key, a SAS token or a client)"),
    ],
)
def test_the_signer_is_named_and_never_its_secret(environment: dict[str, str], said: str) -> None:
    assert azure_signer(environment) == said


def test_the_host_is_the_accounts_own_unless_another_is_named() -> None:
    assert azure_host({"AZURE_STORAGE_ACCOUNT_NAME": "a"}) == "https://a.blob.core.windows.net"
    assert azure_host({"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ENDPOINT": "http://h:1/a"}) == "http://h:1/a"
