"""`isthmus syncer --wait` before there is a run waits, says so, and serves the run once it is created."""

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import NoReturn, cast

import pytest

from e2e.test_processes import processes, wait_for
from isthmus.agent.ports import LOOK_S, SAY_S, patiently
from isthmus.errors import BucketMissing, Denied, ObjectMissing, RunMissing, Unavailable
from isthmus.format.records.keys import RUN_KEY
from isthmus.log.run import read_run
from isthmus.runtime.clock import Runtime, inline
from isthmus.store import Store
from isthmus_lab.simulate.clock import Clock
from isthmus_services.main import main
from isthmus_services.servers import free_ports, redis_server

pytestmark = pytest.mark.tier("test")

HOUR_S = 3600.0


def messages(text: str) -> list[str]:
    return [json.loads(line)["message"] for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("bus", [(), ("--bus", "store:")], ids=["beside the run", "in its store"])
def test_a_syncer_that_was_started_first_serves_the_run_once_it_is_created(
    tmp_path: Path, bus: tuple[str, ...]
) -> None:
    run = str(tmp_path / "run")
    with processes(tmp_path) as p:
        syncer = p.isthmus("s", "syncer", run, "--name", "s1", "--wait", *bus)
        wait_for(lambda: "waits for the run" in p.said("s"), "the syncer says that it waits")
        assert main(["init", run]) == 0
        wait_for(lambda: "s1 serves" in p.said("s"), "it serves the run")
        syncer.send_signal(signal.SIGTERM)
        p.ends(syncer)
        waiting = [m for m in messages(p.said("s")) if "waits for the run" in m]
        assert len(waiting) == 1
        assert waiting[0].startswith(f"s1 waits for the run: no run at {run}: check the URL. If there was one, ")


def test_sigterm_ends_the_waiting(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        syncer = p.isthmus("s", "syncer", str(tmp_path / "run"), "--name", "s1", "--wait")
        wait_for(lambda: "waits for the run" in p.said("s"), "the syncer says that it waits")
        syncer.send_signal(signal.SIGTERM)
        p.ends(syncer)
        assert messages(p.said("s"))[-1] == "s1 stops: it found no run"


def test_a_syncer_that_was_started_before_the_bus_serves_once_it_is_there(tmp_path: Path) -> None:
    run, port = str(tmp_path / "run"), free_ports(1)[0]
    assert main(["init", run]) == 0
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--name", "s1", "--wait", "--bus", f"redis://127.0.0.1:{port}")
        wait_for(lambda: "s1 waits for the bus" in p.said("s"), "the syncer says that it waits")
        with redis_server(tmp_path / "redis", port=port):
            wait_for(lambda: "s1 serves" in p.said("s"), "it serves the run")


class Empty:
    """A store without a run; it raises `answers` first."""

    url = "memory://run"

    def __init__(self, *answers: Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def list(self, prefix: str) -> list[NoReturn]:
        return []

    async def get_range(self, key: str, start: int, stop: int) -> NoReturn:
        if key != RUN_KEY:  # it is also looked whether the objects of a run are there whose run object is gone
            raise ObjectMissing(key)
        self.asked += 1
        raise self.answers.pop(0) if self.answers else ObjectMissing(key)


def waited(store: Empty, for_s: float) -> tuple[bool, list[tuple[float, str]]]:
    clock, said = Clock(), []
    runtime = Runtime(clock.time, clock.time, random.Random(0), inline, lambda: "0" * 16)

    async def body() -> bool:
        stopping = asyncio.Event()
        asyncio.get_running_loop().call_later(for_s, stopping.set)
        return await patiently(
            lambda: read_run(cast(Store, store)),
            runtime,
            stopping,
            lambda error: said.append((clock.time(), type(error).__name__)),
        )

    return clock.run_until_complete(body()), said


def test_it_is_said_at_once_and_then_rarely() -> None:
    store = Empty()
    found, said = waited(store, HOUR_S)
    assert not found
    assert [at for at, _ in said] == pytest.approx([n * SAY_S for n in range(int(HOUR_S / SAY_S))], abs=LOOK_S)
    assert {name for _, name in said} == {RunMissing.__name__}
    assert store.asked == pytest.approx(HOUR_S / LOOK_S, abs=2)


def test_a_store_that_is_not_up_yet_is_waited_for_and_one_that_refuses_is_not() -> None:
    assert waited(Empty(Unavailable("refused"), Unavailable("refused")), 60.0) == (False, [(0.0, "Unavailable")])
    with pytest.raises(Denied):
        waited(Empty(Unavailable("refused"), Denied("access denied")), 60.0)


def test_a_bucket_that_is_not_there_yet_is_waited_for() -> None:
    found, said = waited(Empty(BucketMissing("s3://bucket/run", "s3://bucket/run")), 60.0)
    assert (found, [name for _, name in said]) == (False, [BucketMissing.__name__])
