"""Random numbers that go on where they were."""

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """The state of the generators that a training loop draws from without naming one: Python's, NumPy's and torch's, on
    the CPU and on all CUDA devices. Hand it to `isthmus.join` as one of `state`."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there. Devices that are not here any more are left out."""
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        for device, state in enumerate(state_dict["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
