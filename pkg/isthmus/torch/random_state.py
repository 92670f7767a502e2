"""The state of random generators, for checkpoints."""

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """The state of the default random generators: Python's, NumPy's and torch's, on the CPU and on all CUDA devices.

    Hand it to `isthmus.join` as an entry of `state`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of each generator. States of devices that no longer exist are ignored."""
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        for device, state in enumerate(state_dict["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
