"""What object stores and machines cost."""

import math
from dataclasses import dataclass

from isthmus.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Prices:
    """US dollars, as object stores ask them; see the file that comes with the package."""

    put_per_1000: float
    get_per_1000: float
    storage_gb_month: float
    egress_gb: float
    """From the store to another region."""
    gpu_hour: float = 0.0
    """Of one GPU; 0: they are there anyway, and what they learn is all that counts."""
    core_hour: float = 0.0
    """Of the syncer."""

    def check(self) -> "Prices":
        """Return self. Raises `InputError`."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0.0):
                raise InputError(f"price {name} must be at least 0, not {value}")
        return self
