"""`transformers.Trainer` in Ray Train: its workers are one learner, and Ray starts all of them again when one dies.

python examples/ray_train.py RUN --learner eu-1 [--workers 2] [--gpu] [--bus redis://host]
"""

import argparse
import tempfile
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from trainer import Counting, make_model
from transformers import Trainer, TrainingArguments

import isthmus
from isthmus.integrations.transformers import IsthmusCallback


def train(given: dict[str, Any]) -> None:
    """Train, on each worker: the second time on it goes on at the learner's own checkpoint."""
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=given["steps"], per_device_train_batch_size=8, learning_rate=3e-3,
        logging_steps=25, save_strategy="no", report_to="none", disable_tqdm=True,
        # Without it a Trainer on CPUs does not see the workers beside it.
        use_cpu=not given["gpu"],
    )  # fmt: skip
    trainer = Trainer(model=make_model(), args=settings, train_dataset=Counting(sum(given["learner"].encode())))
    callback = IsthmusCallback(
        given["run"], bus=given["bus"], learner=given["learner"], create=isthmus.Rules.suited, checkpoint_s=2.0
    )
    callback.into(trainer).train()
    print(
        f"{given['learner']} has trained {trainer.state.global_step} steps on {settings.world_size} workers", flush=True
    )


def main() -> None:
    """Start the workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix, or a folder that all nodes see")
    parser.add_argument("--learner", required=True, help="the name of all workers together")
    parser.add_argument("--bus")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    a = parser.parse_args()
    TorchTrainer(
        train,
        train_loop_config=vars(a),
        scaling_config=ScalingConfig(num_workers=a.workers, use_gpu=a.gpu),
        run_config=RunConfig(storage_path=tempfile.mkdtemp(), failure_config=FailureConfig(max_failures=2)),
    ).fit()


if __name__ == "__main__":
    main()
