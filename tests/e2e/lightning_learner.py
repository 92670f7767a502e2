"""A `lightning.pytorch.Trainer` in a run: RUN NAME STEPS NOTES. Each step notes the lines it read, and its rate."""

import argparse
import json
import os
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import isthmus
from e2e.lightning_model import LINES, make_model
from isthmus.integrations.lightning import IsthmusCallback


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LINES

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i])


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.net = make_model()
        self.notes, self.seen, self.life = notes, list[int](), os.getpid()

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.seen += batch[:, 0].tolist()
        time.sleep(0.01)  # about the time of a real model's step: a new version arrives within a few steps
        return torch.as_tensor((self.net(batch) - torch.sin(batch.float())).pow(2).mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self.last = self.trainer.global_step

    def on_train_batch_end(self, outputs: object, batch: torch.Tensor, number: int) -> None:
        if self.trainer.global_step == self.last:
            return
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        with self.notes.open("a") as notes:
            notes.write(json.dumps([self.life, self.last, self.seen, rate]) + "\n")
        self.seen, self.last = [], self.trainer.global_step


def main() -> None:
    parser = argparse.ArgumentParser()
    for what in ("run", "name"):
        parser.add_argument(what)
    parser.add_argument("steps", type=int)
    parser.add_argument("notes", type=Path)
    a = parser.parse_args()
    callback = IsthmusCallback(
        a.run, learner=a.name, module=lambda module: module.net, checkpoint_s=0.3,
        create=isthmus.Rules(fragments=2, sync_every=4), pace=isthmus.Pace(heartbeat_s=0.5),
    )  # fmt: skip
    trainer = pl.Trainer(
        max_steps=a.steps, accumulate_grad_batches=2, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Module(a.notes), StatefulDataLoader(Numbered(), batch_size=4, shuffle=True))
    print(f"{a.name} has trained {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
