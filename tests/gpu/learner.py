"""One process of the training runs of `make gpu`: a learner in a run, or a loop alone that data parallel is compared with.

    python -m gpu.learner NAME --text FILE --steps N --batch B --report FILE [--run RUN --merge rda] --shape W L H CONTEXT

It appends a line of JSON to its report every few steps: the time, the step, the tokens and the loss of the batch.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isthmus
from isthmus.demo.gpt import ByteGPT, loss_of
from isthmus.demo.trainer import CLIP, WEIGHT_DECAY

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    torch.set_num_threads(1)  # several processes share the cores
PEAK_LR, FINAL_SHARE, WARMUP = 6e-4, 0.1, 100


def make_model(shape: list[int]) -> ByteGPT:
    """Return the model of a shape: width, layers, heads, context."""
    torch.manual_seed(0)
    width, layers, heads, context = shape
    return ByteGPT(width, layers, heads, context).to(DEVICE)


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return fused AdamW; gains have no weight decay."""
    groups = [[p for p in model.parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
    return torch.optim.AdamW(
        [{"params": some, "weight_decay": decay} for some, decay in zip(groups, (WEIGHT_DECAY, 0.0), strict=True)],
        lr=PEAK_LR, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine."""
    warmup = min(WARMUP, max(1, steps // 5))
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return PEAK_LR * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + float(np.cos(np.pi * progress))))


class Text:
    """The text of a file, on the device: batches by step, and a held-out part at its end."""

    def __init__(self, path: Path, held_out: int, context: int) -> None:
        whole = torch.from_numpy(np.fromfile(path, np.uint8)).to(DEVICE)
        self.train, self.held_out, self.context = whole[:-held_out], whole[-held_out:], context

    def batch(self, size: int, order: int, step: int) -> torch.Tensor:
        """Return windows [size, context + 1] int64, which `order` and `step` determine."""
        draw = np.random.Generator(np.random.PCG64([order, step]))
        starts = torch.from_numpy(draw.integers(0, len(self.train) - self.context - 1, size)).to(DEVICE)
        return self.train[starts[:, None] + torch.arange(self.context + 1, device=DEVICE)].long()

    @torch.no_grad()
    def loss(self, model: torch.nn.Module) -> float:
        """Return the mean loss on the held-out part, in nats per byte."""
        windows = self.held_out[: len(self.held_out) // (self.context + 1) * (self.context + 1)]
        losses = []
        for part in torch.split(windows.view(-1, self.context + 1).long(), 64):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                losses.append(loss_of(model, part) * len(part))
        return float(torch.stack(losses).sum()) / (len(windows) // (self.context + 1))


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, windows: torch.Tensor, lr: float
) -> torch.Tensor:
    """Take a step and return the loss, which is still on the device."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = loss_of(model, windows)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def main() -> None:
    """Train to the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--held-out", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--order", type=int, required=True)
    parser.add_argument("--shape", type=int, nargs=4, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--run")
    parser.add_argument("--merge", default="rda")
    parser.add_argument("--checkpoint-s", type=float, default=60.0)
    a = parser.parse_args()
    context = a.shape[3]
    text, model = Text(a.text, a.held_out, context), make_model(a.shape)
    optimizer = make_optimizer(model)
    every = max(1, a.steps // 40)
    link: Any = None
    if a.run:
        rules = functools.partial(isthmus.Rules.suited, merge=a.merge)
        link = isthmus.join(
            a.run, model, optimizer, learner=a.name, create=rules, steps=a.steps, checkpoint_s=a.checkpoint_s
        )
    with open(a.report, "ab", buffering=0) as report:

        def say(**line: object) -> None:
            report.write(json.dumps({"at": time.time(), **line}).encode() + b"\n")

        done = link.steps_done if link else 0
        say(step=done, tokens=done * a.batch * context, incarnation=link.incarnation if link else 0)
        while done < a.steps:
            loss = train_step(model, optimizer, text.batch(a.batch, a.order, done), rate(done, a.steps))
            done += 1
            if link:
                link.step(a.batch * context)
            if done % every == 0 or done == a.steps:
                line: dict[str, object] = {"step": done, "tokens": done * a.batch * context, "loss": float(loss)}
                if not link:
                    line["held_out"] = text.loss(model)
                say(**line)
        if link:
            link.close()
            say(end=str(link.summary), versions=link.versions)


if __name__ == "__main__":
    main()
