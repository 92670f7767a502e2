"""One value cannot fill a Redis that has the shipped settings, and the doctor warns of a Redis without them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as redis_client
import yaml

from isthmus.bus import open_bus
from isthmus.bus.base import VALUE_MAX
from isthmus.doctor import OK, WARNING, Finding, Role, RoleKind, examine_bus
from isthmus.errors import Unavailable
from isthmus.format.permissions import Participant
from isthmus.format.records.frame import Kind, largest
from isthmus.format.records.messages import learner_stream
from isthmus.runtime.clock import single_threaded
from isthmus_services.commands import access
from isthmus_services.policies import Identity, acl_line, bus_user
from isthmus_services.servers import Server, redis_server

ROOT = Path(__file__).parents[2]
RUN = bytes(32)
STREAM = learner_stream("eu-1")
LONGEST = largest(Kind.MESSAGE, 0)
"""Bytes of the longest valid message."""


@pytest.fixture
def shipped(tmp_path: Path) -> Iterator[Server]:
    """A Redis with the settings that `isthmus access` writes."""
    (tmp_path / "access").mkdir()
    access.prepare(tmp_path / "access", [])
    with redis_server(tmp_path, arguments=("--include", str(tmp_path / "access" / access.SETTINGS_FILE))) as server:
        yield server


def settings(words: list[str]) -> dict[str, str]:
    """Return the `--name value` pairs of a command line."""
    return {w.removeprefix("--"): words[i + 1] for i, w in enumerate(words[:-1]) if w.startswith("--")}


def test_every_redis_we_ship_has_the_same_bound() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["redis"]["command"]
    manifests = yaml.safe_load_all((ROOT / "infra" / "kubernetes" / "redis" / "redis.yaml").read_text())
    (server,) = (m["spec"]["template"]["spec"]["containers"][0] for m in manifests if m["kind"] == "StatefulSet")
    written = dict(line.split(maxsplit=1) for line in access.REDIS_SETTINGS.splitlines() if not line.startswith("#"))
    assert written["proto-max-bulk-len"] == f"{VALUE_MAX >> 20}mb"
    for given in (settings(compose), settings(server["args"])):
        for name in ("proto-max-bulk-len", "maxmemory-policy", "appendonly"):
            assert given[name] == written[name]


async def test_the_longest_message_passes_and_a_larger_value_is_refused(shipped: Server) -> None:
    async with open_bus(shipped.url, RUN, None) as bus:
        await bus.append(STREAM, bytes(LONGEST))
        await bus.append(STREAM, bytes(VALUE_MAX))
        for size in (VALUE_MAX + 1, 8 * VALUE_MAX):
            # The server sends an error and closes the connection. A client may see either first.
            with pytest.raises(Unavailable):
                await bus.append(STREAM, bytes(size))
        await bus.append(STREAM, b"goes on")
        said = (await bus.read({STREAM: ""}, 1.0))[STREAM]
        assert [len(s.body) for s in said] == [LONGEST, VALUE_MAX, len(b"goes on")]


def test_what_it_does_not_bound_is_a_message_of_many_fields(shipped: Server) -> None:
    """The bound is on one value, not on one command: therefore threats.md does not say that Redis cannot be filled."""
    with redis_client.Redis.from_url(shipped.url) as client:
        client.xadd("stream", {f"field-{i}": bytes(VALUE_MAX) for i in range(4)})
        assert client.xlen("stream") == 1


async def about_values(url: str) -> tuple[Finding, int]:
    """Return the doctor's finding about the size of values, and how many messages its stream holds afterwards."""
    role = Role(RoleKind.LEARNER, "eu-1")
    found = {f.check: f async for f in examine_bus(url, RUN, role, single_threaded())}
    async with open_bus(url, RUN, None) as bus:
        said = await bus.read({role.stream: ""}, 0.1)
    assert found["bus: streams"].outcome == OK
    assert all(s.body == b"" for s in said[role.stream]), "the doctor must leave no long value behind"
    return found["bus: value size"], len(said[role.stream])


async def test_the_doctor_finds_the_bound_by_trying_it(shipped: Server) -> None:
    finding, left = await about_values(shipped.url)
    assert (finding.outcome, left) == (OK, 1)
    assert finding.said == "values over 1 MiB are refused"


async def test_the_doctor_says_what_to_set_where_there_is_no_bound(redis: Server) -> None:
    finding, _ = await about_values(redis.url)
    assert finding.outcome == WARNING
    assert "proto-max-bulk-len 1mb" in finding.advice


async def test_the_doctor_needs_no_right_that_a_learner_does_not_have(tmp_path: Path) -> None:
    """The user has the rights that `isthmus access` gives. Redis 6 has one right for reads and writes, no selectors."""
    who = Identity(Participant.LEARNER, "eu-1")
    line = re.sub("[()]", "", re.sub("%[RW]~", "~", acl_line(bus_user(who, "sesame"))))
    (tmp_path / "users.acl").write_text(f"user default off\n{line}\n")
    arguments = ("--aclfile", str(tmp_path / "users.acl"), "--proto-max-bulk-len", "1mb")
    with redis_server(tmp_path, arguments=arguments) as server:
        finding, _ = await about_values(server.url.replace("redis://", "redis://learner-eu-1:sesame@"))
    assert finding.outcome == OK
