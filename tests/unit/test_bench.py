"""Every benchmark runs, and its figures are reported beside their limits. No figure itself is asserted."""

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from isthmus.agent.ports import open_ports
from isthmus.bus.base import START
from isthmus.errors import InputError
from isthmus.format.records.messages import SYNCER_STREAM, Call, Pass, decode, encode, learner_stream
from isthmus_lab.bench import bytes as bench_bytes
from isthmus_lab.bench import kernels as bench_kernels
from isthmus_lab.bench import learner as bench_learner
from isthmus_lab.bench import pair, report, store
from isthmus_lab.bench import recovery as bench_recovery
from isthmus_lab.bench import round as bench_round
from isthmus_lab.bench import scale as bench_scale
from isthmus_lab.bench.crowd import Crowd
from isthmus_lab.bench.measure import Case, Row, counted, in_turns, parted, quantile, row, sized
from isthmus_lab.bench.replica import STEP_TOKENS, SYNC_EVERY, Line
from isthmus_lab.bench.servers import bucket
from isthmus_services.main import main
from isthmus_services.servers import Server

pytestmark = pytest.mark.tier("test")


def ignore(_share: float) -> None:
    pass


def test_a_ratio_is_taken_within_each_repeat() -> None:
    found = row("b", "c", "s", [1.0, 4.0, 9.0], "u", limits=[2.0, 4.0, 6.0], aim=1.0)
    assert (found.value, found.limit, found.ratio, found.repeats) == (4.0, 4.0, 1.0, 3)
    assert found.spread == pytest.approx((1.5 - 0.5) / 1.0)
    assert found.reached is True
    assert row("b", "c", "s", [1.0, 4.0, 9.0], "u", limits=[2.0, 4.0, 6.0], aim=1.1).reached is False
    assert row("b", "c", "s", [3.0], "u", aim=2.0, at_most=True).reached is False
    assert row("b", "c", "s", [2.0], "u", aim=2.0, at_most=True).reached is True
    bare = row("b", "c", "s", [2.0, 3.0, 7.0], "u")
    assert (bare.ratio, bare.limit, bare.reached) == (None, None, None)
    assert bare.spread == pytest.approx(5.0 / 3.0)


def test_cases_take_turns_and_the_first_does_not_count() -> None:
    order: list[str] = []
    shares: list[float] = []
    cases = [Case("a", lambda: order.append("a"), lambda: order.append("-")), Case("b", lambda: order.append("b"))]
    found = in_turns(cases, 3, shares.append)
    assert "".join(order) == "-ab" * 4
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 3, "b": 3}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("share", "found"), [(0.0, 1.0), (0.25, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_a_quantile_is_one_of_the_values(share: float, found: float) -> None:
    assert quantile([3.0, 1.0, 4.0, 2.0], share) == found


def test_numbers_are_said_as_people_say_them() -> None:
    assert [counted(n) for n in (7, 836_736, 16_000_000, 2.9e9)] == ["7", "836.7k", "16M", "2.9G"]
    assert [sized(n) for n in (8 << 10, 3 << 20)] == ["8 KiB", "3 MiB"]
    told: list[float] = []
    for say in parted(told.append, 2):
        say(0.5)
    assert told == [0.25, 0.75]


ROWS = [
    row("kernels", "a case", "1M", [1.0, 2.0, 3.0], "GB/s", limits=[4.0, 4.0, 4.0], aim=0.4),
    row("start", "help", "", [0.2], "s", aim=0.25, at_most=True),
]


def test_tables_replace_what_stood_in_their_place_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n<!-- bench kernels -->\nold\n<!-- end -->\n\nmine\n\n<!-- bench start -->\n<!-- end -->\n")
    for _ in range(2):
        report.write_tables(ROWS, ["a machine"], page)
        text = page.read_text()
        assert "old" not in text
        assert "mine" in text
        assert "| a case | 1M | 2 | GB/s | 4 | 0.50 | 0.4 ✓ | 100% | 3 |" in text
        assert "| help |  | 0.2 | s |  |  | ≤ 0.25 ✓ | 0% | 1 |" in text
        assert text.count("(a machine)") == 2
    page.write_text("nothing")
    with pytest.raises(InputError, match="has no place for kernels"):
        report.write_tables(ROWS, [], page)


def test_a_picture_shows_what_has_something_beside_it(tmp_path: Path) -> None:
    report.draw(ROWS, tmp_path / "a" / "bench.png")
    assert (tmp_path / "a" / "bench.png").stat().st_size > 5000
    with pytest.raises(InputError, match="none of these figures"):
        report.draw([row("start", "x", "", [1.0], "s")], tmp_path / "b.png")


@pytest.mark.tier("all")
def test_the_command_writes_rows_that_make_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_bytes, "PARAMS", 1 << 14)
    assert main(["bench", "bytes", "--repeats", "1", "--json", str(tmp_path / "b.json")]) == 0
    found = json.loads((tmp_path / "b.json").read_text())
    rows = msgspec.convert(found["rows"], list[Row])
    assert {r.bench for r in rows} == {"bytes"}
    bits = {r.case: r.value for r in rows if r.case.endswith("bits a parameter")}
    assert bits["int4: bits a parameter"] == pytest.approx(4.125)
    page = tmp_path / "page.md"
    page.write_text("<!-- bench bytes -->\n<!-- end -->\n")
    assert main(["bench", "all", "--tables", str(tmp_path / "b.json"), "--into", str(page)]) == 0
    assert "int4: bits a parameter" in page.read_text()
    (tmp_path / "broken.json").write_text("[]")
    assert main(["bench", "all", "--tables", str(tmp_path / "broken.json"), "--into", str(page)]) == 2


@pytest.mark.tier("all")
def test_every_kernel_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "PARAMS", 1 << 18)
    monkeypatch.setattr(bench_kernels, "SIDE", 64)
    rows = list(bench_kernels.rows(1, ignore))
    assert set(bench_kernels.AIMS) <= {r.case for r in rows if r.aim is not None}
    assert all(r.value > 0 for r in rows)


@pytest.mark.tier("test")
def test_what_a_learner_pays_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SIZES": (1 << 16,), "BOUNDARIES": 3, "CHECKPOINT_PARAMS": 100_000, "CHECKPOINT_S": 0.2, "WATCHED_S": 1.0,
        "STEPS": ((0.01, 0.95),), "STEP_PARAMS": 10_000, "STEP_S": 0.5,
    }.items():  # fmt: skip
        monkeypatch.setattr(bench_learner, name, value)
    rows = list(bench_learner.rows(1, ignore))
    assert len(rows) == 2 + 3 + 1
    stored = next(r for r in rows if r.case.startswith("checkpoints stored"))
    assert stored.value > 0


async def test_a_crowd_is_merged(seaweedfs: Server, redis: Server, use: Callable[[Server], None]) -> None:
    use(seaweedfs)
    url = f"s3://conformance/{bucket()}"
    await bench_round.made(url, [4096, 4096], 2)
    with bench_round.syncing(url, redis.url) as syncer:
        async with open_ports(url, redis.url) as ports, asyncio.TaskGroup() as tasks:
            crowd = Crowd(ports, 2)
            background = [tasks.create_task(crowd.listen()), tasks.create_task(crowd.beat())]
            await asyncio.sleep(1.0)
            for version in (1, 2):
                for name in crowd.names:
                    for p in (0, 1):
                        await crowd.announce(name, await crowd.store(name, p))
                await crowd.until([version, version])
            commit = await ports.log.commit(0, 2)
            assert commit is not None
            assert sorted(given.learner for given in commit.header.inputs) == crowd.names
            for task in background:
                task.cancel()
        assert bench_scale._processor_s(syncer.pid) > 0.0
        assert bench_scale._memory(syncer.pid) > 1e6


async def test_a_crowd_has_nothing_newer_than_what_it_sent(tmp_path: Path) -> None:
    """On a slow machine updates grow old before they are read. Then a syncer asks for newer ones, and waits."""
    url = str(tmp_path / "run")
    await bench_round.made(url, [4096], 2)
    async with open_ports(url, f"sqlite:///{tmp_path / 'bus'}") as ports, asyncio.TaskGroup() as tasks:
        crowd, run = Crowd(ports, 2), ports.log.run.digest
        background = tasks.create_task(crowd.listen())
        await asyncio.sleep(0.1)
        for version, afresh in ((1, False), (2, True)):
            call = Call(run=run, id=str(version), syncer="s", fragment=0, version=version, afresh=afresh)
            await ports.bus.append(SYNCER_STREAM, encode(call))
        for name in crowd.names:
            said = await ports.bus.read({learner_stream(name): START}, 30.0)
            (answer,) = decode(said[learner_stream(name)][0].body)
            assert isinstance(answer, Pass)
            assert (answer.learner, answer.fragment, answer.version) == (name, 0, 2)
        background.cancel()


@pytest.mark.tier("all")
def test_how_long_a_recovery_takes_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KILLS": 1, "FRAGMENTS": 2, "PARAMS": 4096, "CALM_S": (0.1, 0.2)}.items():
        monkeypatch.setattr(bench_recovery, name, value)
    shares: list[float] = []
    rows = list(bench_recovery.rows(1, shares.append))
    assert shares[-1] == 1.0
    assert [r.aim for r in rows] == [1.0, 2.0, None, None, 1.5]
    started, without = rows[2], rows[4]
    assert started.value > without.value > 0.0, "reading the log takes some time"


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="the peers are here")
def test_without_peers_it_is_said_where_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers"]) == 2
    assert "make bench-env" in capsys.readouterr().err


def test_long_links_need_namespaces(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["bench", "links"]) == 2
    assert "it needs root" in capsys.readouterr().err


def test_what_is_useful_is_counted_from_what_replicas_say() -> None:
    def line(at: float, batches: int, together: int) -> Line:
        return Line(at=at, batches=batches, together=together, held_s=0.1)

    said = {
        "a": [line(1.0, 2, 2), line(2.0, 4, 2), line(3.0, 5, 1), line(9.0, 99, 2)],
        "b": [line(1.5, 2, 2), line(2.5, 4, 2)],
    }
    tokens, share = pair.Torchft(port=1).useful(said, 1.2, 3.5)
    assert tokens == (5 - 2) * SYNC_EVERY * STEP_TOKENS
    assert share == pytest.approx((2 + 1 + 2 + 2) / 4 / 2)
    assert pair.Torchft(port=1).useful(said, 5.0, 6.0) == (0.0, 0.0)


async def test_a_loop_that_stands_still_lags() -> None:
    import time

    async def stall(_number: int) -> None:
        time.sleep(0.05)  # noqa: ASYNC251  (that is the point)

    took, used, lag = await store.timed(stall, 4, 1)
    assert took >= 0.2
    assert lag >= 0.04
    assert used >= 0.0
