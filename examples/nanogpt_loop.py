"""A loop in the manner of nanoGPT: accumulation, clipping, a schedule, evaluation by the way.

python examples/nanogpt_loop.py RUN text.txt --learner eu-1 [--bus redis://host] [--compile]
"""

import argparse
import math
from pathlib import Path

import torch

import isthmus
from isthmus.demo.gpt import byte_gpt

BLOCK, BATCH, MICRO_BATCHES, WARMUP, PEAK = 64, 8, 2, 20, 1e-3


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate: warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return PEAK * (0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("text", type=Path, help="what this learner trains on, each its own")
    parser.add_argument("--learner", required=True)
    parser.add_argument("--bus")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compile", action="store_true")
    a = parser.parse_args()
    data = torch.frombuffer(bytearray(a.text.read_bytes()), dtype=torch.uint8).long()
    held_out = data[-len(data) // 10 :]

    def batch(source: torch.Tensor, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(len(source) - BLOCK - 1, (BATCH, 1), generator=draw) + torch.arange(BLOCK + 1)
        return source[at][:, :-1], source[at][:, 1:]

    def loss_on(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    torch.manual_seed(0)
    model = byte_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    model = torch.compile(model) if a.compile else model
    create = isthmus.Rules.suited
    with isthmus.join(a.run, model, optimizer, bus=a.bus, learner=a.learner, create=create, steps=a.steps) as link:
        while (step := link.steps_done) < a.steps:
            draw = torch.Generator().manual_seed(step)  # by step, so that a restart repeats no batch
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, a.steps) * link.rate
            for _ in range(MICRO_BATCHES):
                loss = loss_on(*batch(data[: -len(held_out)], draw)) / MICRO_BATCHES
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            link.step(tokens=MICRO_BATCHES * BATCH * BLOCK, loss=loss.item() * MICRO_BATCHES)
            if step % 50 == 49 or link.steps_done == a.steps:
                with torch.no_grad():
                    found = loss_on(*batch(held_out, torch.Generator().manual_seed(0)))
                print(f"{a.learner}: step {link.steps_done}, held-out loss {found:.3f}, versions {link.versions}")


if __name__ == "__main__":
    main()
