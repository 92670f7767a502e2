"""The entry point for a training loop: `join` a run, call `step` after each optimizer step, `close` at the end.

    link = isthmus.join("s3://bucket/run", model, optimizer, bus="redis://host", learner="eu-1")
    for batch in loader:
        loss(batch).backward(); optimizer.step(); optimizer.zero_grad()
        link.step(tokens=batch.numel())
    link.close()

In a torchrun job whose model is sharded or replicated, every rank makes the same calls.

joining    `join`                                      link      a learner's hold on a run
group      the ranks of a learner                      leader    the rank that leads, and speaks for the learner
follower_rank   a rank that follows                    following the global model without training it
agent_thread, loop_thread   where agents run
"""

from isthmus.link.joining import join
from isthmus.link.link import Link

__all__ = ["Link", "join"]
