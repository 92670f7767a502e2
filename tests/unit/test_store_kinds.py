"""The doctor recognises a store by its address, and S3 Express One Zone by the name of its bucket."""

import asyncio
from collections.abc import Mapping

import pytest

from isthmus.agent.ports import open_place
from isthmus.doctor import NOTE, WARNING
from isthmus.doctor.kinds import KINDS, recognised
from isthmus.errors import InputError, Unavailable
from isthmus.store import Patience, endpoint_of

KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
EXPRESS = "base--use1-az4--x-s3"


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "GOOGLE_BASE_URL", "GOOGLE_SERVICE_ACCOUNT", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def at(endpoint: str) -> Mapping[str, str]:
    return {"AWS_ENDPOINT_URL": endpoint}


@pytest.mark.parametrize(
    ("url", "environment", "name"),
    [
        ("s3://b/run", at("https://s3.hf.co/me"), "Hugging Face Storage Buckets"),
        ("s3+aiobotocore://b/run", at("https://s3.hf.co/me"), "Hugging Face Storage Buckets"),
        ("s3://b/run?endpoint=https://0123.r2.cloudflarestorage.com", {}, "Cloudflare R2"),
        ("s3://b/run", at("https://0123.eu.r2.cloudflarestorage.com"), "Cloudflare R2"),
        ("s3://b/run", at("https://t3.storage.dev"), "Tigris"),
        ("s3://b/run", at("https://fly.storage.tigris.dev"), "Tigris"),
        ("s3://b/run", at("https://storage.googleapis.com"), "Google Cloud Storage through its S3 interface"),
        ("gs://b/run", {}, "Google Cloud Storage"),
        ("az://container/run", {"AZURE_STORAGE_ACCOUNT_NAME": "a"}, "Azure Blob Storage"),
        (f"s3://{EXPRESS}/run", {}, "S3 Express One Zone"),
        ("s3://b/run", {}, ""),
        ("s3://b/run", at("http://127.0.0.1:9000"), ""),
        ("s3://b/run", at("https://s3.not-hf.company"), ""),
        ("s3://b--x-s3/run", {}, ""),
        ("/folder/run", {}, ""),
    ],
)
def test_a_store_is_recognised_by_its_address(
    url: str, environment: Mapping[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    found = list(recognised(url))
    assert [finding.said.partition(":")[0] for finding in found] == ([name] if name else [])
    assert all(finding.outcome in (NOTE, WARNING) and "\n" not in finding.said for finding in found)


def test_each_kind_says_another_thing() -> None:
    assert len({kind.said for kind in KINDS}) == len(KINDS)
    assert [kind.said for kind in KINDS if kind.outcome == WARNING] == [
        "Google Cloud Storage through its S3 interface: it ignores If-None-Match"
    ]


def test_a_directory_bucket_has_a_host_of_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint_of(f"s3://{EXPRESS}/run") == f"https://{EXPRESS}.s3express-use1-az4.us-east-1.amazonaws.com"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert endpoint_of(f"s3://{EXPRESS}/run") == "http://127.0.0.1:9000"


@pytest.mark.parametrize("client", ["s3", "s3+aiobotocore"])
async def test_a_session_is_asked_for_at_the_host_of_the_zone(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n"))
        writer.close()

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        async with open_place(f"{client}://{EXPRESS}/run") as store:
            with pytest.raises(Unavailable):
                await store.with_patience(Patience(attempts=1)).get("k")
    host = f"{EXPRESS}.s3express-use1-az4.us-east-1.amazonaws.com:443".encode()
    assert {line.split()[1] for line in asked} == {host}


async def test_a_directory_bucket_is_not_made_here() -> None:
    with pytest.raises(InputError, match=r"create the directory bucket first: aws s3api create-bucket .*Name=use1-az4"):
        async with open_place(f"s3://{EXPRESS}/run", make=True):
            pass
