"""Processes go on when their credentials end, in whatever way they get credentials."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from isthmus.errors import Denied, Unavailable
from isthmus.format.rules import Pace
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.urls import Place
from isthmus.store import Patience, open_store, s3
from isthmus_services.servers import Server
from support.identities import WAYS, Issuer, machine
from support.world import seed_of, serving, train, world

SOONEST = ("shared file", "instance (EC2)")
"""The ways that `make test` tries: the one that a person sets up, and one by a service."""

LIVES = 2
"""How many credentials the run must outlive."""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove environment variables that lead to other credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=["s3", pytest.param("s3+aiobotocore", marks=pytest.mark.tier("all"))])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.mark.parametrize(
    "way", [way if way in SOONEST else pytest.param(way, marks=pytest.mark.tier("all")) for way in WAYS]
)
async def test_a_run_outlives_its_credentials(
    way: str, client: str, tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer()
    async with machine(way, tmp_path, issuer, port_of(moto)) as (made, gate):
        made.set(monkeypatch)
        wanted = 1 if way == "environment" else LIVES + 1
        bucket = f"{client.replace('+', '-')}-{list(WAYS).index(way)}-{os.getpid()}"
        pace = Pace(heartbeat_s=0.2, silence_s=3.0)
        bus = f"sqlite://{tmp_path}/bus.sqlite"
        async with world(f"{client}://{bucket}/run", seed_of(pace=pace), bus=bus) as w, serving(w.syncer()) as syncer:

            def enough() -> bool:
                return syncer.tallies.commits >= 12 and len(gate.used) >= wanted

            await train(w.learner("l0"), 20, enough=enough)
        # botocore goes on using a metadata service's credentials, for some minutes, when they are about to end. They
        # are fetched anew once the store has denied a request.
        assert gate.refused == 0 or way == "instance (EC2)"
        assert len(gate.used) >= wanted


async def test_credentials_that_were_revoked_are_fetched_anew(
    client: str, tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer(life_s=3600.0)
    async with machine("container (EKS)", tmp_path, issuer, port_of(moto)) as (made, gate):
        made.set(monkeypatch)
        async with open_store(f"{client}://revoked-{os.getpid()}/run", single_threaded(), make=True) as store:
            await store.put("k", b"x")
            for key in issuer.issued:
                issuer.issued[key] = 0.0
            assert bytes(await store.get("k")) == b"x"
            assert 1 <= gate.refused < 6, "obstore asks for credentials ten times a second at most"
            await asyncio.sleep(0.2)
            issuer.refuses = True
            for key in issuer.issued:
                issuer.issued[key] = 0.0
            with pytest.raises((Unavailable, Denied), match=r"cannot be fetched|expired"):
                await store.with_patience(Patience(attempts=1)).get("k")


async def test_a_service_that_is_away_costs_nothing_while_credentials_are_valid(
    client: str, tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer(life_s=8.0)
    async with machine("container (ECS)", tmp_path, issuer, port_of(moto)) as (made, gate):
        made.set(monkeypatch)
        async with open_store(f"{client}://away-{os.getpid()}/run", single_threaded(), make=True) as store:
            await store.put("k", b"x")
            issuer.refuses = True
            ends = time.time() + 2.0
            while time.time() < ends:
                assert bytes(await store.with_patience(Patience(attempts=1)).get("k")) == b"x"
                await asyncio.sleep(0.05)
            await asyncio.sleep(max(issuer.issued.values()) - time.time() + 0.5)
            with pytest.raises(Unavailable, match="credentials cannot be fetched"):
                await store.with_patience(Patience(attempts=1)).get("k")
            issuer.refuses = False
            assert bytes(await store.get("k")) == b"x"
        assert gate.refused == 0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[default]\ncredential_process = /nowhere/at/all\n", "credentials cannot be fetched"),
        ("[default]\nregion = eu-west-1\n", "no credentials: set AWS_ACCESS_KEY_ID"),
        ("[default]\naws_access_key_id = alone\n", "no credentials.*alone|Partial credentials"),
    ],
)
async def test_what_is_wrong_with_credentials_is_said(
    client: str, config: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    async with open_store(f"{client}://bucket/run", single_threaded()) as store:
        with pytest.raises((Denied, Unavailable), match=said):
            await store.with_patience(Patience(attempts=1)).get("k")


async def test_a_region_in_the_url_counts_before_an_endpoint_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As access says: the client of AWS's own library must not find the endpoint by itself."""
    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:9"), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(f"AWS_{name}", value)
    place = Place.of("s3+aiobotocore://bucket/run?region=eu-west-1")
    async with s3.open_client(place, single_threaded(0)) as (client, found):
        assert found.endpoint is None
        assert client.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"
