"""The bytes that a run has moved and its cost up to a moment, beside the bytes that its rules plan."""

from dataclasses import dataclass

import numpy as np

from isthmus.codecs import codec, packed_size
from isthmus_services.board.history import time_views
from isthmus_services.board.history.history import BEAT, RunHistory
from isthmus_services.board.history.time_views import Answer
from isthmus_services.board.prices import Prices

MONTH_S = 30 * 86400.0


@dataclass(frozen=True)
class Costs:
    """The prices and assumptions from which the cost of a run is estimated."""

    prices: Prices
    gpus: float | None
    """GPUs of one learner; None: not given, so that their cost is not known."""
    assumed: str
    """In words, the values that were not given and are assumed."""


def moved(c: RunHistory, at: float, totals: Answer) -> Answer:
    """Return the bytes of merged updates, and what learners moved as far as it is known, beside what the rules plan.

    `at`: seconds since 1970; `totals`: see `time_views.totals`.
    """
    said, rules = c.beats.until(at)[: len(c.learners.known)], c.run.rules
    up, down, checkpoints = (said[:, BEAT.index(n)] for n in ("bytes_up", "bytes_down", "checkpoint_bytes"))
    heard = ~np.isnan(up)
    inputs, commits = time_views.by_fragment(c, at)

    def planned(name: str, times: list[int]) -> int:
        return sum(n * packed_size(codec(name), x) for n, x in zip(times, c.run.layout.fragments, strict=True))

    return {
        "merged": totals["bytes_merged"],
        "merged_planned": planned(rules.codec_up, inputs),
        "up": float(up[heard].sum()) if heard.any() else None,
        "checkpoints": float(checkpoints[heard].sum()) if heard.any() else None,
        "down": float(down[heard].sum()) if heard.any() else None,
        "down_planned": max(1, totals["learners"]) * planned(rules.codec_down, commits),
    }


def cost(c: RunHistory, costs: Costs, at: float, totals: Answer, sent: Answer) -> Answer:
    """Return the estimated cost of a run up to a time, in total and by parts [US dollars]. A part is None if it is not
    known, which `assumed` says; then the total is that of the others.

    `at`: seconds since 1970; `totals`: see `time_views.totals`; `sent`: see `moved`.
    """
    prices = costs.prices
    hours = sum(max(0.0, min(at, x.last) - x.began) for x in c.incarnations.values()) / 3600.0
    updates, commits = totals["updates"] + totals["missed_round"], totals["commits"]
    # Each update is written once, and so are each commit and its value. Each learner reads every commit and value. The
    # syncer reads every update.
    puts, gets = updates + 2 * commits, updates + 2 * commits * max(1, totals["learners"])
    down = sent["down"] if sent["down"] is not None else sent["down_planned"]
    up = sent["merged"] if sent["up"] is None else max(sent["merged"], sent["up"] + sent["checkpoints"])
    # An object that is stored by now has been stored for half of the time, on average.
    months = (at - c.run.header.created_at) / MONTH_S / 2.0
    parts = {
        "gpus": None if costs.gpus is None else hours * costs.gpus * prices.gpu_hour,
        "requests": puts / 1e3 * prices.put_per_1000 + gets / 1e3 * prices.get_per_1000,
        "egress": (up + down) / 1e9 * prices.egress_gb,
        "storage": sent["merged"] / 1e9 * prices.storage_gb_month * months,
    }
    return {
        "usd": sum(part for part in parts.values() if part is not None),
        "parts": parts,
        "learner_hours": hours,
        "assumed": costs.assumed,
    }
