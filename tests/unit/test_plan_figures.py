"""A plan's rates, gigabytes and dollars agree with figures computed by hand.

The model has 1.2 billion parameters in 12 fragments. Each fragment is merged once in 12 steps of one second: one
fragment a second, all day. With 32 bits both ways, a fragment is 0.4 GB. Headers and messages add some kilobytes, which
are within the tolerance.
"""

import math
from dataclasses import replace

import pytest

from isthmus.agent.speed import Speeds
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.planner import Plan, plan
from isthmus_lab.forecast.search import Fixed
from isthmus_services.board.prices import Prices

pytestmark = pytest.mark.tier("test")

PRICES = Prices(put_per_1000=0.005, get_per_1000=0.0004, storage_gb_month=0.03, egress_gb=0.02)
DAY_S = 86_400
FRAGMENT_GB = 0.4
CHECKPOINTS_GB_S = 24.0 / 128.0
"""A checkpoint has 24 GB. At 15 % of 10 Gbit/s, sending it takes 128 s."""
LINKED = Island(name="", up_gbit_s=10.0, down_gbit_s=10.0, latency_s=0.01)
"""Three round trips are shorter than the period, so a run keeps it."""

CLOSE = 1e-3


@pytest.fixture(scope="module")
def found() -> Plan:
    """A plan for one learner in the store's region and two slower learners in another region."""
    return plan(
        1.2e9,
        [
            replace(LINKED, name="near", region="eu"),
            replace(LINKED, name="far", count=2, region="us", step_s=2.0),
        ],
        PRICES,
        store_region="eu",
        fixed=Fixed(fragments=12, sync_every=12, merge="rda", codec="f32", codec_down="f32"),
        speeds=lambda _: Speeds(add_s=1e-10, round_s=1e-9),
    )


def test_what_restarts_read_is_counted_in_bytes_and_egress() -> None:
    failing = replace(LINKED, name="far", count=2, region="us")
    failing = replace(failing, restart_s=1800.0 - failing.reading_s(24.0 * 1.2e9))
    calm, more = (
        plan(
            1.2e9,
            [replace(failing, mtbf_hours=hours)],
            PRICES,
            store_region="eu",
            fixed=Fixed(fragments=12, sync_every=12, merge="rda", codec="f32", codec_down="f32"),
            speeds=lambda _: Speeds(add_s=1e-10, round_s=1e-9),
        )
        for hours in (math.inf, 23.5)
    )
    # Once a day, each of two learners reads its checkpoint and the newest version: 20 and 4 bytes a parameter.
    read_gb = 2 * 24.0 * 1.2
    assert more.day["restarts_gb"] == pytest.approx(read_gb)
    assert calm.day["restarts_gb"] == 0.0
    for name in ("down_gb", "egress_gb"):
        assert more.day[name] - calm.day[name] == pytest.approx(read_gb)
    assert more.day["usd"] - calm.day["usd"] == pytest.approx(read_gb * PRICES.egress_gb)


def test_rounds_go_by_the_fastest_learner(found: Plan) -> None:
    assert found.syncer["rounds_day"] == pytest.approx(DAY_S)


def test_the_syncers_rates_are_bits_per_second(found: Plan) -> None:
    # A fragment from each of three learners, every second.
    assert found.syncer["down_gbit_s"] == pytest.approx(3 * FRAGMENT_GB * 8, rel=CLOSE)
    # The new version, and half of a snapshot of 12 bytes per parameter. A snapshot is due once updates of twice its
    # size are merged. Three updates are as large as a snapshot, so it is due every two rounds.
    assert found.syncer["up_gbit_s"] == pytest.approx((FRAGMENT_GB + 1e8 * 12 / 2 / 1e9) * 8, rel=CLOSE)


def test_who_takes_over_reads_states_and_two_rounds_on_top(found: Plan) -> None:
    assert found.syncer["takeover_gb"] == pytest.approx(12 * (1.2 + 2 * 3 * FRAGMENT_GB), rel=CLOSE)
    # Reading at 10 Gbit/s, then merging two rounds of each fragment again on four cores. A round takes, for each of 1e8
    # parameters, 0.1 ns for each of three updates, and 1 ns.
    assert found.syncer["takeover_s"] == pytest.approx(12 * 3.6 * 8 / 10 + 12 * 2 * 1e8 * 1.3e-9 / 4, rel=CLOSE)


def test_a_learners_rates_are_its_share_of_them(found: Plan) -> None:
    for forecast in found.forecasts:
        # 10 Gbit/s are 1.25 GB/s.
        assert forecast.up_load == pytest.approx((FRAGMENT_GB + CHECKPOINTS_GB_S) / 1.25, rel=CLOSE)
        assert forecast.down_load == pytest.approx(FRAGMENT_GB / 1.25, rel=CLOSE)
        assert forecast.up_gb_day == pytest.approx((FRAGMENT_GB + CHECKPOINTS_GB_S) * DAY_S, rel=CLOSE)
        assert forecast.down_gb_day == pytest.approx(FRAGMENT_GB * DAY_S, rel=CLOSE)


def test_a_day_moves_what_the_learners_move(found: Plan) -> None:
    assert found.day["up_gb"] == pytest.approx(3 * (FRAGMENT_GB + CHECKPOINTS_GB_S) * DAY_S, rel=CLOSE)
    assert found.day["checkpoints_gb"] == pytest.approx(3 * CHECKPOINTS_GB_S * DAY_S, rel=CLOSE)
    assert found.day["down_gb"] == pytest.approx(3 * FRAGMENT_GB * DAY_S, rel=CLOSE)


def test_what_leaves_a_region_is_paid_by_the_gigabyte_both_ways(found: Plan) -> None:
    received, sent = 2 * FRAGMENT_GB * DAY_S, 2 * (FRAGMENT_GB + CHECKPOINTS_GB_S) * DAY_S
    assert found.day["egress_gb"] == pytest.approx(received + sent, rel=CLOSE)
    assert found.day["egress_sent_gb"] == pytest.approx(sent, rel=CLOSE)
    assert found.day["egress_usd"] == pytest.approx((2 * 34_560 + 2 * 50_760) * 0.02, rel=CLOSE)
    assert found.day["checkpoints_egress_usd"] == pytest.approx(2 * (50_760 - 34_560) * 0.02, rel=CLOSE)


@pytest.mark.parametrize(("price", "usd_gb"), [(None, 0.02), (0.0, 0.0), (0.09, 0.09)])
def test_learners_in_another_cloud_may_pay_another_price_for_what_they_send(price: float | None, usd_gb: float) -> None:
    """Updates and checkpoints leave the learners' region, versions leave the store's. No region: not counted."""

    def day(region: str, store_region: str = "eu") -> dict[str, float]:
        return plan(
            1.2e9,
            [replace(LINKED, name="a", count=2, region=region, egress_gb=price)],
            PRICES,
            store_region=store_region,
            fixed=Fixed(fragments=12, sync_every=12, merge="rda", codec="f32", codec_down="f32"),
            speeds=lambda _: Speeds(add_s=1e-10, round_s=1e-9),
        ).day

    here, far = day("eu"), day("us")
    sent = 2 * (FRAGMENT_GB + CHECKPOINTS_GB_S) * DAY_S * usd_gb
    assert far["egress_usd"] == pytest.approx(2 * FRAGMENT_GB * DAY_S * 0.02 + sent, rel=CLOSE)
    assert far["usd"] - here["usd"] == pytest.approx(far["egress_usd"])
    assert (here["egress_usd"], day("")["egress_usd"]) == (0.0, 0.0)
    assert day("us", store_region="")["egress_usd"] == pytest.approx(far["egress_usd"])


def test_what_is_kept_is_paid_by_the_gigabyte_and_month(found: Plan) -> None:
    kept = 12 * 64 * (3 + 1) * FRAGMENT_GB  # 64 versions of every fragment: three updates and a value each
    snapshots = 1.2 * 12 * 64 / 2
    checkpoints = 3 * 2 * 1.2 * 20  # two checkpoints of each learner
    assert found.day["stored_gb"] == pytest.approx(kept + snapshots + checkpoints, rel=CLOSE)
    assert found.day["storage_usd"] == pytest.approx((1228.8 + 460.8 + 144.0) * 0.03 / 30, rel=CLOSE)


def test_requests_are_paid_by_the_thousand(found: Plan) -> None:
    day = found.day
    # 0.4 GB is read in 24 ranges of 16 MiB, and written in 6 parts of 64 MiB, with one request to begin and one to end.
    # For each round, every learner reads the commit and the value, and the syncer reads three updates.
    assert day["reads"] == pytest.approx((3 * (1 + 24) + 3 * 24) * DAY_S, rel=0.01)
    # For each round, every learner writes an update, and the syncer a value and a commit. Every two rounds it writes a
    # snapshot of 1.2 GB, when twice as much was merged. Each learner's checkpoint of 24 GB takes 360 requests.
    assert day["writes"] == pytest.approx((3 * 8 + 8 + 1 + 20 / 2 + 3 * 360 / 128) * DAY_S, rel=0.02)
    assert day["requests_usd"] == pytest.approx(day["reads"] * 0.0000004 + day["writes"] * 0.000005)
    assert day["usd"] == pytest.approx(day["requests_usd"] + day["egress_usd"] + day["storage_usd"])
