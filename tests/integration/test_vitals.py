"""The metrics of real agents agree with the log, and their health checks fail when they should."""

import asyncio
import json
import logging
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from prometheus_client import CollectorRegistry

from isthmus.agent.health import LOOP_S_MAX, PORT_S_MAX, Pulse
from isthmus.errors import InputError, Unavailable
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.metrics import LearnerMetrics, Metrics, SyncerMetrics, declared
from isthmus.store import Layer
from isthmus.store.layer import Send
from isthmus_services.process import logs
from isthmus_services.process.health_server import HealthServer, shown
from isthmus_services.servers import free_ports
from support.world import all_commits, in_virtual_time, serving, train, until, world

T = TypeVar("T")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"isthmus_{name}", labels) or 0.0


def total(registry: CollectorRegistry, name: str) -> float:
    return sum(s.value for m in registry.collect() for s in m.samples if s.name == f"isthmus_{name}")


@in_virtual_time
async def test_what_is_counted_is_what_the_log_says(folder: Path) -> None:
    async with world(folder) as w:
        syncer = w.syncer()
        async with serving(syncer):
            a, b = w.learner("a"), w.learner("b")
            await asyncio.gather(train(a, 30), train(b, 30))
        commits = [c.header for chain in (await all_commits(w.log)).values() for c in chain]
    m = syncer.metrics.registry
    assert len(commits) > 4
    assert total(m, "commits_total") == len(commits)
    assert total(m, "participation_ratio_count") == len(commits)
    inputs = [i for c in commits for i in c.inputs]
    assert total(m, "updates_merged_total") == len(inputs)
    assert value(m, "updates_merged_total", learner="a") == sum(i.learner == "a" for i in inputs)
    assert total(m, "merged_tokens_total") == sum(i.tokens for i in inputs)
    assert total(m, "staleness_versions_sum") == sum(c.version - 1 - i.base for c in commits for i in c.inputs)
    assert total(m, "round_seconds_sum") == pytest.approx(sum(c.waited.waited_s for c in commits))
    assert total(m, "fragment_version") == sum(max(c.version for c in commits if c.fragment == p) for p in range(4))
    assert total(m, "bus_request_seconds_count") > 0
    m = a.metrics.registry
    beat_ledger = {p: value(m, "ledger_tokens", part=p) for p in ("merged", "overwritten", "late", "pending")}
    assert sum(beat_ledger.values()) > 0


@in_virtual_time
async def test_rejections_add_up_to_the_logs(folder: Path) -> None:
    async with world(folder) as w:
        syncer = w.syncer()
        async with serving(syncer):
            await asyncio.gather(train(w.learner("a"), 40), train(w.learner("b"), 40))
        commits = await all_commits(w.log)
    logged: dict[str, int] = {}
    for chain in commits.values():
        for reason, count in chain[-1].header.rejected_total.items():
            logged[reason] = logged.get(reason, 0) + count
    counted = {
        s.labels["reason"]: s.value
        for m in syncer.metrics.registry.collect()
        for s in m.samples
        if s.name == "isthmus_rejections_total"
    }
    assert {r: n for r, n in counted.items() if n} == {r: n for r, n in logged.items() if n}


@in_virtual_time
async def test_a_syncer_that_only_watches_counts_versions_and_no_rounds(folder: Path) -> None:
    async with world(folder) as w:
        async with serving(w.syncer("s1")) as first:
            await train(w.learner("a"), 20, enough=lambda: first.tallies.commits > 0)
        second = w.syncer("s2")
        await second.recover()
        late, early = second.metrics.registry, first.metrics.registry
    assert total(late, "fragment_version") == total(early, "fragment_version") > 0
    assert total(late, "commits_total") == 0
    assert 0.0 <= value(late, "fragment_commit_age_seconds", fragment="0") < 60.0
    assert value(late, "fragments") == 4.0


class Away(Layer):
    """A store that is unavailable while `away` is true."""

    away = False

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if self.away:
            raise Unavailable("away")
        return await send()


@in_virtual_time
async def test_the_store_is_counted_and_its_silence_shows(folder: Path) -> None:
    async with world(folder) as w:
        away = Away(w.store)
        m = Metrics()
        store = w.through(lambda _: away).store.measured_by(m)
        await store.put("scratch/x", b"abc")
        assert bytes(await store.get("scratch/x")) == b"abc"
        assert store.outage.answered_at is not None
        answered = store.outage.answered_at
        away.away = True
        task = asyncio.ensure_future(store.get("scratch/x"))
        await until(lambda: store.traffic.retries >= 2, "two failures")
        assert store.outage.down_s > 0
        assert store.outage.answered_at == answered
        away.away = False
        await task
        assert store.outage.down_s == 0.0
        r = m.registry
        assert value(r, "store_bytes_total", direction="up") == 3
        assert value(r, "store_bytes_total", direction="down") == 6
        assert value(r, "store_failures_total", operation="get") >= 2
        assert value(r, "store_request_seconds_count", operation="put") == 1


def test_a_pulse_says_what_is_silent_and_only_the_loop_is_fatal() -> None:
    assert Pulse(0.1, 0.1, 0.1).trouble == ""
    assert Pulse(0.1, PORT_S_MAX + 1, 0.1).trouble == "store silent for 31 s"
    assert Pulse(0.1, 0.0, PORT_S_MAX + 1).alive
    assert not Pulse(LOOP_S_MAX + 1, 0.0, 0.0).alive


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_a_board_tells_a_stuck_loop_from_a_store_that_is_away(folder: Path) -> None:
    passed_s = 0.0
    real = single_threaded(0)
    runtime = replace(real, now=lambda: real.now() + passed_s)
    url = f"127.0.0.1:{free_ports(1)[0]}"
    board = HealthServer("syncer")

    async def ask(path: str) -> tuple[int, str]:
        return await asyncio.to_thread(get, f"http://{url}/{path}")

    with shown(board, url):
        assert (await ask("livez"))[0] == 200, "a process that starts must not be killed"
        assert (await ask("healthz"))[0] == 503
        async with world(folder, runtime=runtime) as w:
            away = Away(w.store)
            w = w.through(lambda _: away)
            syncer = w.syncer()
            async with serving(syncer):
                board.serves(syncer.vitals, syncer.metrics)
                await w.store.list("scratch/")
                assert (await ask("healthz"))[0] == 200
                status, text = await ask("metrics")
                assert status == 200
                assert "isthmus_fragments_held" in text
                away.away = True
                passed_s += PORT_S_MAX + 1.0
                await until(lambda: syncer.vitals.pulse().alive, "the loop turns once more")
                assert (await ask("livez"))[0] == 200
                status, text = await ask("healthz")
                assert status == 503
                assert "store silent" in json.loads(text)["trouble"]
                away.away = False
                # This request blocks the event loop, so the loop is stuck until the answer comes.
                passed_s += LOOP_S_MAX + 1.0
                status, text = get(f"http://{url}/livez")
                assert status == 503
                assert "event loop silent" in text
        assert (await ask("nothing"))[0] == 404


@pytest.mark.parametrize("address", ["9464", "host:port", "127.0.0.1:99999", "256.0.0.1:80"])
def test_an_address_that_cannot_be_served_is_named(address: str) -> None:
    with pytest.raises(InputError, match=f"--http {address}"), shown(HealthServer("syncer"), address):
        pass


def test_every_metric_is_declared_once_with_its_unit() -> None:
    names = [d.name for d in declared()]
    assert len(names) == len(set(names))
    units = ("_seconds", "_bytes_total", "_tokens", "_tokens_total", "_ratio", "_versions", "_total")
    plain = {
        "isthmus_fragment_version",
        "isthmus_fragments",
        "isthmus_fragments_held",
        "isthmus_fragments_broken",
        "isthmus_fragments_holed",
    }
    plain |= {
        "isthmus_process_info",
        "isthmus_learners_expected",
        "isthmus_period_steps",
        "isthmus_rounds_waiting",
        "isthmus_learner_steps",
        "isthmus_training_loss",
        "isthmus_incarnation",
    }
    for d in declared():
        assert d.name.endswith(units) or d.name in plain, d.name
        assert d.description.endswith("."), d.name
        assert (d.kind == "counter") == d.name.endswith("_total"), d.name
    assert {m.name for m in SyncerMetrics().declared} & {m.name for m in LearnerMetrics().declared} == {
        m.name for m in Metrics().declared
    }


def test_an_event_is_one_object_with_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "info", service="syncer", run="r", syncer="s1")
    try:
        logging.getLogger("isthmus.x").info("commit %d", 3, extra={"fragment": 3, "version": 17})
        logging.getLogger("isthmus.x").debug("not asked for")
        logs.serving()  # before this call, `last_word` writes text
        logs.last_word("syncer", "the end")
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert [(e["message"], e["level"]) for e in lines] == [("commit 3", "INFO"), ("the end", "CRITICAL")]
        assert (lines[0]["fragment"], lines[0]["version"], lines[0]["syncer"]) == (3, 17, "s1")
        logs.configure("text", "info", service="syncer")
        logging.getLogger("isthmus.x").info("commit %d", 3)
        logs.last_word("syncer", "the end")
        text = capsys.readouterr().err.splitlines()
        assert text[0].endswith("isthmus.x: commit 3")
        assert text[1] == "isthmus syncer: the end"
    finally:
        logging.getLogger().handlers.clear()
