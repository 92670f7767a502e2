"""By default, a TLS connection to store or bus needs a server certificate of a configured authority."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from infra import graph
from isthmus.bus import open_bus
from isthmus.doctor import OK, WARNING, Role, RoleKind, examine_bus
from isthmus.doctor.findings import in_the_clear
from isthmus.errors import InputError, Unavailable
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.urls import as_environment_says, trusting
from isthmus.store import open_store
from isthmus_services.servers import Server, redis_server, s3_server
from support.authority import Authority

SCHEMES = ("s3", "s3+aiobotocore")
URL = "rediss://127.0.0.1:6379"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def https(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS's S3 gateway with a certificate that the test authority signed."""
    with s3_server(tmp_path_factory.mktemp("https"), certificate=authority.certificate("store")) as server:
        yield server


@pytest.fixture(scope="module")
def rediss(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Redis 7 that speaks TLS only."""
    binary = graph.redis_7()
    place = tmp_path_factory.mktemp("rediss")
    with redis_server(place, binary=binary, certificate=authority.certificate("bus")) as server:
        yield server


def told(server: Server, **more: str) -> Server:
    environment: Mapping[str, str] = {**server.environment, **more}
    return cast(Server, SimpleNamespace(environment=environment))


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_store_is_trusted_by_its_authority(
    scheme: str, https: Server, authority: Authority, use: Callable[[Server], None]
) -> None:
    use(told(https, AWS_CA_BUNDLE=str(authority.file)))
    async with open_store(f"{scheme}://tls-{SCHEMES.index(scheme)}/run", single_threaded(0), make=True) as store:
        assert await store.create("scratch/x", b"over TLS")
        assert bytes(await store.get("scratch/x")) == b"over TLS"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("named", ["none", "another"])
async def test_a_store_of_another_authority_gets_no_request(
    scheme: str, named: str, https: Server, tmp_path: Path, use: Callable[[Server], None]
) -> None:
    another = {"AWS_CA_BUNDLE": str(Authority(tmp_path, "another").file)} if named == "another" else {}
    use(told(https, **another))
    async with open_store(f"{scheme}://bucket/run", single_threaded(0)) as store:
        with pytest.raises(Unavailable, match=r"(?i)certificate") as caught:
            await store.at_start.get("run")
    assert https.environment["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


async def test_a_bus_is_trusted_by_its_authority(rediss: Server, authority: Authority) -> None:
    for url in (
        trusting(rediss.url, str(authority.file)),
        as_environment_says(rediss.url, {"ISTHMUS_BUS_CA": str(authority.file)}),
    ):
        async with open_bus(url, bytes(32), None) as bus:
            await bus.append("syncer", b"over TLS")
            assert (await bus.read({"syncer": ""}, 1.0))["syncer"][-1].body == b"over TLS"
        found = {f.check: f async for f in examine_bus(url, bytes(32), Role(RoleKind.OPERATOR), single_threaded())}
        assert found["bus: TLS"].outcome == OK
        assert "verified" in found["bus: TLS"].said
        assert found["bus: value size"].outcome == WARNING, "this check must run over TLS as well"


async def test_a_bus_of_another_authority_or_another_host_is_not_spoken_to(
    rediss: Server, authority: Authority, tmp_path: Path
) -> None:
    another = Authority(tmp_path, "another")
    elsewhere = rediss.url.replace("127.0.0.1", "localhost")  # the certificate names only the address
    for url in (rediss.url, trusting(rediss.url, str(another.file)), trusting(elsewhere, str(authority.file))):
        async with open_bus(url, bytes(32), None) as bus:
            with pytest.raises(Unavailable, match=r"(?i)certificate"):
                await bus.append("syncer", b"x")


async def test_who_verifies_nothing_is_warned(rediss: Server) -> None:
    url = f"{rediss.url}?ssl_cert_reqs=none&ssl_check_hostname=false"
    found = {f.check: f async for f in examine_bus(url, bytes(32), Role(RoleKind.OPERATOR), single_threaded())}
    assert found["bus: TLS"].outcome == WARNING
    assert "any server that answers is believed" in found["bus: TLS"].said


@pytest.mark.parametrize(
    ("url", "clear"),
    [
        *(("redis://127.0.0.1:6379", False), ("redis://localhost", False), ("http://[::1]:9000", False)),
        *(("rediss://bus.example.com", False), ("https://store.example.com", False)),
        *(("redis://bus.example.com", True), ("http://10.0.0.1:9000", True), ("redis://user:sesame@10.0.0.1", True)),
    ],
)
def test_what_leaves_the_machine_without_tls_is_warned_of(url: str, clear: bool) -> None:
    said = in_the_clear(url)
    assert bool(said) == clear
    assert "sesame" not in said


def test_authorities_are_named_once_and_for_what_shows_a_certificate(tmp_path: Path, authority: Authority) -> None:
    file = str(authority.file)
    assert trusting(URL, None) == URL
    assert trusting(f"{URL}?db=0", file) == f"{URL}?db=0&ssl_ca_certs={file}"
    for wrong in (f"{URL}?ssl_ca_certs=x", "redis://127.0.0.1", "sqlite:///x"):
        with pytest.raises(InputError):
            trusting(wrong, file)
    with pytest.raises(InputError, match="no such file"):
        trusting(URL, str(tmp_path / "missing.pem"))
    assert as_environment_says(f"{URL}?ssl_ca_certs=x", {"ISTHMUS_BUS_CA": file}) == f"{URL}?ssl_ca_certs=x"
