"""A loop over `accelerate.Accelerator` in a run, of the same model as `trainer.py`: the two may share one.

pip install '.[transformers]'
accelerate launch examples/accelerate_loop.py RUN --learner eu-1 [--bus redis://host]
"""

import argparse

import torch
from accelerate import Accelerator
from trainer import Counting, make_model

import isthmus
from isthmus.integrations.accelerate import join


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("--learner", required=True)
    parser.add_argument("--bus")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make_model()
    data = torch.utils.data.DataLoader(Counting(sum(arguments.learner.encode())), batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    with join(
        accelerator, arguments.run, model, optimizer, bus=arguments.bus, learner=arguments.learner,
        create=isthmus.Rules.suited, steps=arguments.steps, checkpoint_s=2.0,
    ) as learner:  # fmt: skip
        while learner.link.steps_done < arguments.steps:
            for batch in data:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    learner.loss(loss.item())
                    optimizer.step()
                    optimizer.zero_grad()
                if learner.link.steps_done >= arguments.steps:
                    break


if __name__ == "__main__":
    main()
