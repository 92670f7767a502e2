"""A learner of two ranks that a framework shards by FSDP2: RUN trainer|accelerate STEPS.

Accelerate does not shard on a CPU. Here it is told to shard, and everything that follows (preparing, wrapping, stepping
and gathering) runs as on an accelerator.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

import isthmus
from isthmus.integrations.accelerate import join
from isthmus.integrations.transformers import IsthmusCallback

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from trainer import Counting, make_model  # type: ignore[import-not-found]

as_it_is = AcceleratorState.__init__


def sharding(self: AcceleratorState, *arguments: Any, fsdp_plugin: Any = None, **more: Any) -> None:
    as_it_is(self, *arguments, **more)
    if fsdp_plugin is not None:
        self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP


AcceleratorState.__init__ = sharding
RULES: Any = isthmus.Rules(fragments=3, sync_every=4)


def by_accelerate(run: str, steps: int) -> torch.nn.Module:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data: Any = torch.utils.data.DataLoader(Counting(5), batch_size=8, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    with join(accelerator, run, model, optimizer, learner="accelerate", create=RULES, steps=steps) as learner:
        while learner.link.steps_done < steps:
            for batch in data:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if learner.link.steps_done >= steps:
                    break
    return model  # type: ignore[no-any-return]


def by_trainer(run: str, steps: int) -> torch.nn.Module:
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, fsdp="full_shard auto_wrap",
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    )  # fmt: skip
    trainer = Trainer(model=make_model(), args=settings, train_dataset=Counting(3))
    IsthmusCallback(run, learner="trainer", create=RULES).into(trainer).train()
    return trainer.model_wrapped  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("how", choices=("trainer", "accelerate"))
    parser.add_argument("steps", type=int)
    a = parser.parse_args()
    model = {"trainer": by_trainer, "accelerate": by_accelerate}[a.how](a.run, a.steps)
    assert all(isinstance(p, DTensor) for p in model.parameters()), "every parameter is sharded"
    torch.distributed.destroy_process_group()
    print(f"{a.how} has trained {a.steps} steps, sharded", flush=True)


if __name__ == "__main__":
    main()
