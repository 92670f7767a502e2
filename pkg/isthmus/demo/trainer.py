"""The built-in trainer, and `Task`: the argument that every trainer gets, and with which it joins the run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from isthmus.demo.gpt import CONTEXT, loss_of
from isthmus.demo.text import corpus
from isthmus.errors import InputError, told
from isthmus.format.rules import CHECKPOINT_S
from isthmus.learner.checkpoint import Stateful
from isthmus.link import Link, join
from isthmus.sinks import Sink

if TYPE_CHECKING:
    from torch import nn

BATCH = 2
"""Windows of 128 bytes in one step; a step has 256 tokens."""

PEAK_LR = 1.5e-3
WARMUP = 100
FINAL_SHARE = 0.05
WEIGHT_DECAY = 0.1
CLIP = 1.0


@dataclass(frozen=True)
class Task:
    """What `isthmus learner` hands to a trainer. A trainer is a function `def train(task: Task) -> None`."""

    run: str
    bus: str | None
    learner: str
    model: "Callable[[], nn.Module]"
    steps: int
    seed: int
    data: str | None
    shard: tuple[int, int]
    """This learner's shard: index and count."""
    adopt: str
    should_stop: Callable[[], bool]
    """Returns whether the process was asked to end. The trainer then finishes its step and closes the link."""
    checkpoint_s: float = CHECKPOINT_S
    order: int = 0
    """Selects the order in which this learner reads its data. Learners with the same shard should differ in it."""
    sink: Sink | None = None
    """Receives the training metrics."""
    joined: Callable[[Link], None] = lambda _: None
    """Called with the link once the learner has joined."""
    key: str | None = None
    owner: str | None = None
    run_digest: str | None = None
    insecure: bool = False
    manifest: str | None = None
    takeover: bool = False
    """`key`, `owner`, `run_digest`, `insecure`, `manifest` and `takeover`: see `isthmus.join`."""

    def join(self, model: "nn.Module", optimizer: torch.optim.Optimizer, data: Stateful | None = None) -> Link:
        """Join the run under this task's learner name and return the link."""
        link = join(
            self.run,
            model,
            optimizer,
            bus=self.bus,
            learner=self.learner,
            adopt=self.adopt,
            steps=self.steps,
            data=data,
            checkpoint_s=self.checkpoint_s,
            sink=self.sink,
            key=self.key,
            owner=self.owner,
            run_digest=self.run_digest,
            insecure=self.insecure,
            manifest=self.manifest,
            takeover=self.takeover,
        )
        self.joined(link)
        return link


def schedule(step: int, steps: int) -> float:
    """Return the learning rate of a step in 0 … steps − 1: a linear warm-up, then a cosine down to a twentieth."""
    warmup = min(WARMUP, max(1, steps // 4))
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return PEAK_LR * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_for(model: "nn.Module") -> torch.optim.AdamW:
    """Return AdamW with two parameter groups: matrices have weight decay, gains have none."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    gains = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    # The rate that the schedule begins with is what a restart compares: the rate itself changes at every step.
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": WEIGHT_DECAY, "initial_lr": PEAK_LR},
            {"params": gains, "weight_decay": 0.0, "initial_lr": PEAK_LR},
        ],
        lr=PEAK_LR,
        betas=(0.9, 0.95),
        fused=True,
    )


def windows(text: "np.ndarray[tuple[int], np.dtype[np.uint8]]", seed: int, order: int, step: int) -> torch.Tensor:
    """Return the batch [BATCH, CONTEXT + 1] int64 of a step.

    `seed`, `order` and `step` alone determine it, so a restart does not repeat the batches of earlier steps.
    """
    draw = np.random.Generator(np.random.PCG64([seed, order, step]))
    starts = draw.integers(0, text.size - CONTEXT - 1, BATCH)
    return torch.from_numpy(np.stack([text[s : s + CONTEXT + 1] for s in starts]).astype(np.int64))


class Batches:
    """An endless iterator over the batches of a text in one order. A checkpoint can keep its position."""

    def __init__(self, text: "np.ndarray[tuple[int], np.dtype[np.uint8]]", seed: int, order: int) -> None:
        self._text, self._seed, self._order = text, seed, order
        self._next = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> torch.Tensor:
        """Return the next batch [BATCH, CONTEXT + 1] int64."""
        self._next += 1
        return windows(self._text, self._seed, self._order, self._next - 1)

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next batch."""
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue with the batch of the saved number."""
        self._next = int(state_dict["next"])


def train_step(model: "nn.Module", optimizer: torch.optim.Optimizer, batch: torch.Tensor, rate: float) -> float:
    """Take one optimizer step and return the loss of the batch, in nats per byte."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = loss_of(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _require_bytes(model: "nn.Module") -> None:
    """Raise `InputError` if this is no model of bytes. To be called before joining: nothing is stored by then."""
    was = model.training
    try:
        with torch.no_grad():
            loss_of(model.eval(), torch.full((1, CONTEXT + 1), 255))
    except Exception as error:
        raise InputError(
            "the built-in trainer trains models of bytes, which make logits [batch, length, 256] of int64 [batch, "
            f"length]; this one raises {type(error).__name__}: {told(error)}; name a trainer for it (--train "
            "PACKAGE.MODULE:FUNCTION), or call isthmus.join in your own loop (docs/your-loop.md)"
        ) from None
    model.train(was)


def train(task: Task) -> None:
    """Train the run's model on this learner's shard until all steps are done or the process is asked to stop."""
    torch.set_num_threads(1)
    text = np.frombuffer(corpus(task.data).shard(*task.shard), np.uint8)
    model = task.model()
    _require_bytes(model)
    optimizer = optimizer_for(model)
    batches = Batches(text, task.seed, task.order)
    link = task.join(model, optimizer, batches)
    done = False
    try:
        while not task.should_stop():
            if link.steps_done >= task.steps:
                done = True
                break
            rate = schedule(link.steps_done, task.steps) * link.rate
            loss = train_step(model, optimizer, next(batches), rate)
            link.step(tokens=BATCH * CONTEXT, loss=loss)
    finally:
        link.close(done=done)
