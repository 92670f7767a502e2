"""What a run has moved and cost up to a moment, beside what its rules plan for it."""

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
    """What things cost here."""

    prices: Prices
    gpus: float
    """Of a learner."""
    assumed: str
    """What nobody said, in words."""


def moved(c: RunHistory, at: float, totals: Answer) -> Answer:
    """Return bytes both ways, as far as they are known, beside what the rules plan for them."""
    said, rules = c.beats.until(at)[: len(c.learners.known)], c.run.rules
    up, down, checkpoints = (said[:, BEAT.index(n)] for n in ("bytes_up", "bytes_down", "checkpoint_bytes"))
    heard = ~np.isnan(up)
    inputs, commits = time_views.by_fragment(c, at)

    def planned(name: str, times: list[int]) -> int:
        return sum(n * packed_size(codec(name), x) for n, x in zip(times, c.run.layout.fragments, strict=True))

    return {
        "merged": totals["bytes_up"],
        "merged_planned": planned(rules.codec_up, inputs),
        "up": float(up[heard].sum()) if heard.any() else None,
        "checkpoints": float(checkpoints[heard].sum()) if heard.any() else None,
        "down": float(down[heard].sum()) if heard.any() else None,
        "down_planned": max(1, totals["learners"]) * planned(rules.codec_down, commits),
    }


def cost(c: RunHistory, costs: Costs, at: float, totals: Answer, sent: Answer) -> Answer:
    """Return what a run has cost by a time, as far as the log tells, by parts [US dollars]. `sent`: see `moved`."""
    prices = costs.prices
    hours = sum(max(0.0, min(at, x.last) - x.began) for x in c.lives.values()) / 3600.0
    updates, commits = totals["updates"] + totals["late"], totals["commits"]
    # An update; a commit and its value. Each learner reads both, the syncer each update.
    puts, gets = updates + 2 * commits, updates + 2 * commits * max(1, totals["learners"])
    down = sent["down"] if sent["down"] is not None else sent["down_planned"]
    # What is stored by now was stored for half of the time, in the mean.
    months = (at - c.run.header.created_at) / MONTH_S / 2.0
    parts = {
        "gpus": hours * costs.gpus * prices.gpu_hour,
        "requests": puts / 1e3 * prices.put_per_1000 + gets / 1e3 * prices.get_per_1000,
        "egress": (sent["merged"] + down) / 1e9 * prices.egress_gb,
        "storage": sent["merged"] / 1e9 * prices.storage_gb_month * months,
    }
    return {"usd": sum(parts.values()), "parts": parts, "learner_hours": hours, "assumed": costs.assumed}
