"""A LightningModule in a run, of the same model as `trainer.py`: the two, and plain loops, may share one.

pip install '.[lightning]' torchdata
python examples/lightning_module.py RUN --learner eu-1 [--bus redis://host]
"""

import argparse

import lightning.pytorch as pl
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer import Counting, make_model

import isthmus
from isthmus.integrations.lightning import IsthmusCallback


class Language(pl.LightningModule):
    """A small GPT-2 that learns to count on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.net(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what takes the steps."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("--learner", required=True)
    parser.add_argument("--bus")
    parser.add_argument("--steps", type=int, default=200)
    a = parser.parse_args()
    # A loader that can say where it is: a restart reads each line of an epoch once.
    data = StatefulDataLoader(Counting(sum(a.learner.encode())), batch_size=8, shuffle=True)
    callback = IsthmusCallback(
        a.run, bus=a.bus, learner=a.learner, module=lambda lit: lit.net, create=isthmus.Rules.suited, checkpoint_s=2.0
    )
    trainer = pl.Trainer(
        max_steps=a.steps, accumulate_grad_batches=2, callbacks=[callback], enable_checkpointing=False, logger=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Language(), data)
    print(f"{a.learner} has trained {trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
