"""`transformers.Trainer` in a run: one line more. Start as many of these as you like, anywhere, and one syncer.

python examples/trainer.py RUN --learner eu-1 [--bus redis://host]      # the first one creates the run
isthmus syncer RUN [--bus redis://host]
torchrun --nproc-per-node 2 examples/trainer.py RUN --learner us-1      # a job of two ranks is one learner
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import isthmus
from isthmus.integrations.transformers import IsthmusCallback


class Counting(torch.utils.data.Dataset):
    """Lines that count on by seven; each learner sees lines of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + i)
        line = (torch.randint(61, (), generator=draw) + 7 * torch.arange(24)) % 61
        return {"input_ids": line, "labels": line}


def make_model() -> GPT2LMHeadModel:
    """Return a small GPT-2, with the same weights for everybody."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=24, n_embd=48, n_layer=2, n_head=4))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("--learner", required=True)
    parser.add_argument("--bus")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=arguments.steps, per_device_train_batch_size=16, learning_rate=3e-3,
        logging_steps=25, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = Counting(sum(arguments.learner.encode()))
    trainer = Trainer(model=make_model(), args=settings, train_dataset=data)
    callback = IsthmusCallback(
        arguments.run, bus=arguments.bus, learner=arguments.learner, create=isthmus.Rules.suited, checkpoint_s=2.0
    )
    callback.into(trainer).train()


if __name__ == "__main__":
    main()
