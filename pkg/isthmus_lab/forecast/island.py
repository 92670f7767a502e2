"""The input of a plan: groups of identical learners, their links and their failures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.errors import InputError
from isthmus_services.board.prices import Prices

LATENCY_MAX_S = 10.0
"""Highest latency accepted, in seconds, one way: a larger number is most likely in milliseconds."""


START_S = 60.0
"""Assumed seconds from a failure until a new process reads its checkpoint, and from then to its first step: finding a
machine, starting the program, compiling."""


@dataclass(frozen=True, kw_only=True)
class Island:
    """A group of identical learners."""

    name: str
    count: int = 1
    step_s: float = 1.0
    """Seconds of an optimizer step."""
    up_gbit_s: float = 1.0
    down_gbit_s: float = 1.0
    latency_s: float = 0.05
    """Seconds to the store, one way."""
    region: str = ""
    """Region of the learners; traffic between the store's region and another one costs money, both ways."""
    egress_gb: float | None = None
    """Dollars for a GB that leaves the learners' region; None: as for one that leaves the store's."""
    mtbf_hours: float = math.inf
    """Mean time between two failures of one learner."""
    restart_s: float = START_S
    """Seconds from a failure to the first step after it, without those in which the checkpoint is read."""
    gpus: int = 8
    """GPUs of one learner."""

    def abroad(self, store_region: str) -> bool:
        """Return whether traffic with the store leaves a region; without a region of the learners, it is not known."""
        return bool(self.region) and self.region != store_region

    def sending_usd_gb(self, prices: Prices) -> float:
        """Return the dollars for a GB that leaves the learners' region."""
        return prices.egress_gb if self.egress_gb is None else self.egress_gb

    def reading_s(self, size: float) -> float:
        """Return the seconds that reading `size` bytes from the store takes: a request and the transfer."""
        return 2.0 * self.latency_s + size * 8.0 / (self.down_gbit_s * 1e9)

    def away_s(self, size: float) -> float:
        """Return the seconds from a failure to the next step of a learner that reads `size` bytes at its start."""
        return self.restart_s + self.reading_s(size)

    def restarts_day(self, size: float) -> float:
        """Return the failures a day of one learner that reads `size` bytes at each start."""
        return 86400.0 / (self.mtbf_hours * 3600.0 + self.away_s(size))

    def check(self, flags: Mapping[str, str] | None = None) -> "Island":
        """Return self. Raises `InputError` that names the learner and the parameter, and the value probably meant.

        `flags`: by parameter, the flag that it was given by, to be named instead.
        """

        def where(name: str) -> str:
            return (flags or {}).get(name, f"learner {self.name}: {name}")

        positive = ("count", "step_s", "up_gbit_s", "down_gbit_s", "mtbf_hours", "gpus")
        for name, value in vars(self).items():
            if isinstance(value, str) or value is None:
                continue
            endless = math.isinf(value) and name != "mtbf_hours"
            if math.isnan(value) or endless or (value <= 0 if name in positive else value < 0):
                bound = "finite and more than 0" if name in positive else "finite and at least 0"
                raise InputError(f"{where(name)} must be {bound}, not {value:g}")
            low, high, hint = BELIEVED.get(name, (-math.inf, math.inf, ""))
            if not low <= value <= high and not math.isinf(value):
                side = f"at most {high:g}" if value > high else f"at least {low:g}"
                raise InputError(f"{where(name)} {value:g} cannot be ({side}): {hint}")
        return self


BELIEVED: Mapping[str, tuple[float, float, str]] = {
    "latency_s": (0.0, LATENCY_MAX_S, "it is in seconds, one way; 50 ms are 0.05"),
    "step_s": (1e-4, 86400.0, "it is in seconds; 300 ms are 0.3"),
    "up_gbit_s": (1e-6, 1e5, "it is in Gbit/s; 100 Mbit/s are 0.1"),
    "down_gbit_s": (1e-6, 1e5, "it is in Gbit/s; 100 Mbit/s are 0.1"),
    "mtbf_hours": (1e-3, 1e7, "it is in hours, of one learner; leave it out where nothing fails"),
    "egress_gb": (0.0, 100.0, "it is in dollars for a GB that leaves the learners' region"),
    "restart_s": (0.0, 30 * 86400.0, "it is in seconds"),
    "count": (1, 100_000, "learners, not chips; a learner has many"),
    "gpus": (1, 10_000_000, "of one learner"),
}
"""By parameter: the least and the greatest plausible value, and the hint in the error for any other value."""
