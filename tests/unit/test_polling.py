"""What `isthmus plan` says of a bus in the store, beside what simulated processes ask for."""

import asyncio
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.format.layout import Spec, TensorClass
from isthmus.format.rules import Pace, Rules
from isthmus.log.creation import Seed
from isthmus_lab.forecast.polling import BEAT_S, bus_costs, costs_within
from isthmus_lab.forecast.search import PERIODS
from isthmus_lab.forecast.traffic import _Still
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import Times, World, learn, serve
from isthmus_services.main import main
from isthmus_services.settings.prices import prices_of

pytestmark = pytest.mark.tier("test")

PRICES = prices_of(None, 0.0, [])
HOURS = 0.2


def simulated(rules: Rules, learners: int, beat_s: float) -> list[Counter[str]]:
    """Return the requests to the bus of the syncer and of each learner, in `HOURS` of virtual time."""
    world, wire = World("polling"), Conditions(0.02)

    async def go() -> list[Counter[str]]:
        specs = [Spec(f"w{i}", (256,), "float32", TensorClass.DENSE) for i in range(rules.fragments)]
        pace = Pace(heartbeat_s=beat_s, silence_s=3 * beat_s)
        await world.create(Seed(specs, [np.zeros(256, np.float32) for _ in specs], {}, rules, pace))
        processes = [world.process(name) for name in ("s", *(f"l{m}" for m in range(learners)))]
        ports = [world.ports(process, wire, wire, beat_s) for process in processes]
        counts = [Counter[str]() for _ in ports]
        for port, count in zip(ports, counts, strict=True):
            _counted(port.bus, count)
        stopping, ended = asyncio.Event(), False
        tasks = [processes[0].start(serve(ports[0], "s", stopping))]
        tasks += [
            processes[m + 1].start(
                learn(ports[m + 1], f"l{m}", _Still(1.0), Times(), stopping=lambda: ended, checkpoint_s=math.inf)
            )
            for m in range(learners)
        ]
        await asyncio.sleep(2.0 * rules.sync_every)
        before = [Counter(count) for count in counts]
        await asyncio.sleep(3600.0 * HOURS)
        after = [Counter(count) for count in counts]
        ended = True
        stopping.set()
        await asyncio.gather(*tasks)
        return [late - early for early, late in zip(before, after, strict=True)]

    return world.clock.run_until_complete(go())


def _counted(bus: object, count: Counter[str]) -> None:
    store = bus._store  # type: ignore[attr-defined]
    send_through = store._through

    async def through(operation: str, key: str, send: object) -> object:
        count["get" if operation == "get_range" else operation] += 1
        return await send_through(operation, key, send)

    store._through = through


@pytest.mark.parametrize(
    ("every", "learners", "beat_s"), [(100, 2, 5.0), pytest.param(500, 14, 20.0, marks=pytest.mark.tier("all"))]
)
def test_requests_are_those_that_processes_make(every: int, learners: int, beat_s: float) -> None:
    rules = Rules(fragments=4, sync_every=every)
    expected = bus_costs(rules, learners, 1.0, PRICES, beat_s)
    syncer, *others = simulated(rules, learners, beat_s)
    for found, said in ((syncer, expected.syncer), (others[0], expected.learner)):
        for operation, count in said.items():
            # Looks are at whole steps of a tenth of a heartbeat, so there are up to a quarter fewer.
            assert 0.6 * count <= found[operation] / HOURS <= 1.25 * count, (operation, found, said)
        assert found.keys() == said.keys()


def test_a_bound_is_kept_with_the_shortest_heartbeat_that_keeps_it() -> None:
    rules = Rules(fragments=4, sync_every=500)
    for bound in (600.0, 1000.0, 3000.0, 1e6):
        found = costs_within(rules, 4, 1.0, PRICES, bound, of_objects=200.0)
        assert found is not None
        assert 200.0 + sum(found.learner.values()) <= bound
        if found.beat_s > BEAT_S:
            closer = bus_costs(rules, 4, 1.0, PRICES, found.beat_s - 1.0)
            assert 200.0 + sum(closer.learner.values()) > bound
    assert costs_within(rules, 4, 1.0, PRICES, 100.0, of_objects=90.0) is None


def test_dollars_are_the_requests_at_their_prices() -> None:
    found = bus_costs(Rules(fragments=4, sync_every=500), 3, 1.0, PRICES)
    each = [
        (of["get"] * PRICES.get_per_1000 + (of["put"] + of["list"]) * PRICES.put_per_1000) / 1000.0
        for of in (found.learner, found.syncer)
    ]
    assert found.usd_hour == pytest.approx(3 * each[0] + each[1])


def test_the_plan_chooses_a_heartbeat_for_a_bound_and_says_what_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--params", "1e8", "--learners", "4", "--fragments", "4", "--gpu-hour", "0", "--sync-every", "500"]
    assert main([*words, "--requests-per-hour", "3000"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("isthmus init"))
    given = dict(zip(line.split()[3:], line.split()[4:], strict=False))
    assert given["--bus"] == "store:"
    assert float(given["--silence"]) == 3 * float(given["--heartbeat"]) > 3 * BEAT_S
    assert main([*words, "--requests-per-hour", "50"]) == 2
    said = capsys.readouterr().err
    assert "allow at least so many" in said
    least = float(said.split(" with messages")[0].split("and ")[-1].replace(",", ""))
    assert main([*words, "--requests-per-hour", str(least + 1.0)]) == 0


def test_the_plan_counts_the_messages_of_the_run_that_it_proposes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def planned(*more: str) -> dict[str, Any]:
        words = ["plan", "--params", "1e8", "--learners", "4", "--sync-every", "500", "--gpu-hour", "2"]
        assert main([*words, "--json", str(tmp_path / "p.json"), *more]) == 0
        found: dict[str, Any] = json.loads((tmp_path / "p.json").read_text())
        return found

    without, found = planned(), planned("--requests-per-hour", "50000")
    told, bus = capsys.readouterr().out, found["bus_in_store"]
    assert "--bus store:, not counted above" in told
    assert "--bus store:, counted above" in told
    of_learner = [sum(f["forecasts"][0]["requests_day"].values()) for f in (without, found)]
    learner, syncer = (24.0 * sum(bus[who].values()) for who in ("learner", "syncer"))
    assert of_learner[1] - of_learner[0] == pytest.approx(learner)
    more = {name: found["day"][name] - without["day"][name] for name in ("reads", "writes", "requests_usd", "usd")}
    assert more["reads"] + more["writes"] == pytest.approx(4 * learner + syncer)
    assert more["reads"] == pytest.approx(24.0 * (4 * bus["learner"]["get"] + bus["syncer"]["get"]))
    assert more["requests_usd"] == pytest.approx(more["usd"]) == pytest.approx(24.0 * bus["usd_hour"])
    assert found["per_usd"] * found["day"]["usd"] == pytest.approx(without["per_usd"] * without["day"]["usd"])


@pytest.mark.tier("all")
def test_a_plan_for_too_few_requests_names_a_period_that_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--params", "1e8", "--learners", "4", "--requests-per-hour", "5000"]
    assert main(words) == 2
    named = re.search(r"give a longer period \((--sync-every) (\d+) will do\)", capsys.readouterr().err)
    assert named is not None
    assert main([*words, *named.groups()]) == 0
    shorter = max(period for period in PERIODS if period < int(named[2]))
    assert main([*words, named[1], str(shorter)]) == 2
