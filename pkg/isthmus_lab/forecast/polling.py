"""What a bus in the store costs: requests an hour, dollars, and the time until a message is heard."""

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.bus import PACE_IN_STORE
from isthmus.bus.store import ASKED_MAX, LIST_BEATS, QUICK, QUICK_BEATS, SLOW
from isthmus.format.rules import Rules
from isthmus.syncer.holders import BEATS_PER_INTERVAL
from isthmus_services.board.prices import Prices

HOUR_S = 3600.0

BEAT_S = PACE_IN_STORE.heartbeat_s
BEAT_MAX_S = 120.0
"""Longest heartbeat that is chosen [s]: with a longer one, a process that died would be missed for many minutes."""

HEARTBEATS = 1.0 / 0.9
"""Heartbeats of a learner per `heartbeat_s`, on average: each waits for 0.8 to 1 times as long."""

STREAMS = 2
"""Streams that a learner reads: the syncers' and its own."""

Requests = Mapping[str, float]
"""Requests an hour, by operation: get, put and list."""


@dataclass(frozen=True, kw_only=True)
class BusCosts:
    """What the bus of a run costs, for one syncer."""

    beat_s: float
    learner: Requests
    syncer: Requests
    heard_s: tuple[float, float]
    """Longest time until the other side reads a message [s]: while an answer is due, and otherwise."""
    usd_hour: float
    """Dollars an hour of all learners and the syncer."""


def bus_costs(rules: Rules, learners: int, step_s: float, prices: Prices, beat_s: float = BEAT_S) -> BusCosts:
    """Return what the bus costs if it is in the store.

    `step_s`: seconds of a learner's step. An update is announced once for each fragment and period, and a syncer calls
    and commits once. Each of these makes its sender look quickly for a while, and until the round is over: a step, in
    which others answer, and two looks.
    """
    rounds = rules.fragments * HOUR_S / (rules.sync_every * step_s)
    asking_s = QUICK_BEATS * beat_s + step_s + 2.0 * QUICK * beat_s
    quick = min(1.0, rounds * asking_s / HOUR_S)
    looks = HOUR_S / beat_s * (quick / QUICK + (1.0 - quick) / SLOW)
    beats = HOUR_S / beat_s
    said = HEARTBEATS * beats + rounds
    learner = {"put": said, "get": looks, "list": STREAMS * beats / LIST_BEATS}
    syncer = {"put": BEATS_PER_INTERVAL * beats + 2.0 * rounds, "get": looks * learners, "list": beats}
    if learners > ASKED_MAX:
        syncer |= {"get": said * learners, "list": looks + beats}
    return BusCosts(
        beat_s=beat_s,
        learner=learner,
        syncer=syncer,
        heard_s=(QUICK * beat_s, SLOW * beat_s),
        usd_hour=learners * _usd(learner, prices) + _usd(syncer, prices),
    )


def _usd(requests: Requests, prices: Prices) -> float:
    """Return dollars; stores take as much for a listing as for a write."""
    reads = requests["get"]
    return (reads * prices.get_per_1000 + (sum(requests.values()) - reads) * prices.put_per_1000) / 1000.0


def costs_within(
    rules: Rules, learners: int, step_s: float, prices: Prices, requests_hour: float, of_objects: float
) -> BusCosts | None:
    """Return the costs with the shortest heartbeat that keeps a learner's requests within a bound; None if none does.

    `requests_hour`: the bound, for all requests of a learner; `of_objects`: those an hour that are not the bus's.
    """
    beat_s = BEAT_S
    while beat_s <= BEAT_MAX_S:
        found = bus_costs(rules, learners, step_s, prices, beat_s)
        if of_objects + sum(found.learner.values()) <= requests_hour:
            return found
        beat_s += 1.0
    return None
