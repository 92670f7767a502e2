"""A small model, and a learner whose steps take as long as on a device: it waits for them instead of wanting a core.

Processes that tests start share two cores; a learner that trains as fast as it can takes one from whoever is watched.
"""

import os
import time
from dataclasses import replace

from torch import nn

from isthmus.demo import trainer
from isthmus.demo.gpt import ByteGPT

STEP_S = float(os.environ.get("PACED_STEP_S", "0.01"))
"""What a step takes beside its computation."""


def small() -> nn.Module:
    """Return a byte GPT of 0.06 million parameters: its step is short next to what happens to a learner."""
    return ByteGPT(width=48, layers=1, heads=2)


def train(task: trainer.Task) -> None:
    """Train like the demo, waiting between steps."""

    def should_stop() -> bool:
        time.sleep(STEP_S)
        return task.should_stop()

    trainer.train(replace(task, should_stop=should_stop))
