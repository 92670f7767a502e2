"""The prices of object stores and machines."""

import math
from dataclasses import dataclass

from isthmus.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in US dollars, by the units in which object stores charge. `settings/prices.toml` has the defaults."""

    put_per_1000: float
    get_per_1000: float
    storage_gb_month: float
    egress_gb: float
    """For a GB from one region to another: from the store to learners elsewhere, and from them to the store."""
    gpu_hour: float = 0.0
    """For one GPU. 0 means that the GPUs are there anyway, and only what they learn counts."""
    core_hour: float = 0.0
    """For one core of the syncer."""

    def check(self) -> "Prices":
        """Return self. Raises `InputError` if a price is negative or not finite."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0.0):
                raise InputError(f"price {name} must be at least 0, not {value}")
        return self
