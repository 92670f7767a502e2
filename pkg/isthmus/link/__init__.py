"""The front door for a training loop: `join` a run, call `step` after each optimizer step, `close` at the end.

    link = isthmus.join("s3://bucket/run", model, optimizer, bus="redis://host", learner="eu-1")
    for batch in loader:
        loss(batch).backward(); optimizer.step(); optimizer.zero_grad()
        link.step(tokens=batch.numel())
    link.close()

In a torchrun job whose model is sharded or replicated, every rank makes the same calls.

joining  `join`            link   a learner's hold on a run
ranks    of the ranks of a learner that do not speak for it
"""

from isthmus.link.joining import join
from isthmus.link.link import Link

__all__ = ["Link", "join"]
