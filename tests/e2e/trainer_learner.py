"""A `transformers.Trainer` in a run: RUN NAME STEPS NOTES. Each step notes the lines it read, and its rate."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import isthmus
from isthmus.integrations.transformers import IsthmusCallback

LINES = 64


class Numbered(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Lines whose first token is their number."""

    def __len__(self) -> int:
        return LINES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        line = (i + 7 * torch.arange(12)) % 80
        line[0] = i
        return {"input_ids": line, "labels": line}


class Notes(TrainerCallback):  # type: ignore[misc]
    def __init__(self, model: torch.nn.Module, path: Path, life: str) -> None:
        self.seen: list[int] = []
        self.path, self.life = path, life
        model.register_forward_pre_hook(self.read, with_kwargs=True)

    def read(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            self.seen += kwargs["input_ids"][:, 0].tolist()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        rate = given["optimizer"].param_groups[0]["lr"]
        with self.path.open("a") as notes:
            notes.write(json.dumps([self.life, state.global_step, self.seen, rate]) + "\n")
        self.seen = []


def main() -> None:
    parser = argparse.ArgumentParser()
    for what in ("run", "name"):
        parser.add_argument(what)
    parser.add_argument("steps", type=int)
    parser.add_argument("notes", type=Path)
    a = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=80, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=a.steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=10, logging_steps=10, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rank = os.environ.get("RANK", "0")
    notes = Notes(model, a.notes.with_suffix(f".{rank}"), str(os.getpid()))
    trainer = Trainer(model=model, args=settings, train_dataset=Numbered(), callbacks=[notes])
    callback = IsthmusCallback(
        a.run, learner=a.name, checkpoint_s=0.3, create=isthmus.Rules(fragments=3, sync_every=4),
        pace=isthmus.Pace(heartbeat_s=0.5),
    )  # fmt: skip
    callback.into(trainer).train()
    print(f"{a.name} has trained {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
