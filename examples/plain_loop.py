"""A plain loop over the model of `trainer.py`: it shares a run with Trainers, loops over Accelerate, LightningModules.

python examples/plain_loop.py RUN --learner us-1 [--bus redis://host]
"""

import argparse

import torch
from trainer import Counting, make_model

import isthmus


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("--learner", required=True)
    parser.add_argument("--bus")
    parser.add_argument("--steps", type=int, default=200)
    a = parser.parse_args()
    model, lines = make_model(), Counting(sum(a.learner.encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    create = isthmus.Rules.suited
    with isthmus.join(a.run, model, optimizer, bus=a.bus, learner=a.learner, create=create, steps=a.steps) as link:
        while link.steps_done < a.steps:
            first = 16 * link.steps_done
            ids = torch.stack([lines[i % len(lines)]["input_ids"] for i in range(first, first + 16)])
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            link.step(tokens=ids.numel(), loss=loss.item())
            if link.steps_done % 25 == 0:
                print(
                    f"{a.learner}: step {link.steps_done}, loss {loss.item():.3f}, versions {link.versions}", flush=True
                )


if __name__ == "__main__":
    main()
