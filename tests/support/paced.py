"""A small model, and a learner whose steps take as long as on a device: it waits instead of using a core.

The processes of tests share two cores. A learner that trains as fast as it can takes a core from the tested process.
"""

import os
import time
from dataclasses import replace

from torch import nn

from isthmus.demo import trainer
from isthmus.demo.gpt import ByteGPT

STEP_S = float(os.environ.get("PACED_STEP_S", "0.01"))
"""The time that a step takes in addition to its computation."""


def small() -> nn.Module:
    """Return a byte GPT of 0.06 million parameters: its steps are short compared to what tests do to a learner."""
    return ByteGPT(width=48, layers=1, heads=2)


def train(task: trainer.Task) -> None:
    """Train like the demo, waiting between steps."""

    def should_stop() -> bool:
        time.sleep(STEP_S)
        return task.should_stop()

    trainer.train(replace(task, should_stop=should_stop))
