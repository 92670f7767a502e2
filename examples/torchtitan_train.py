"""torchtitan as it is, in a run: its own Trainer and its own configuration, with two lines around `train`.

torchrun --nproc-per-node 8 examples/torchtitan_train.py RUN --learner eu-1 [--bus redis://host] --model.name …
isthmus syncer RUN [--bus redis://host]
"""

import argparse

import torch
from torchtitan.config import ConfigManager

import isthmus
from isthmus.integrations.torchtitan import join


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("--learner", required=True, help="the name of the whole job, the same on every rank")
    parser.add_argument("--bus")
    a, own = parser.parse_known_args()
    config = ConfigManager().parse_args(own)
    if hasattr(config, "build"):  # 0.3
        trainer = config.build()
    else:
        from torchtitan.train import Trainer

        trainer = Trainer(config)
    try:
        with join(trainer, a.run, bus=a.bus, learner=a.learner, create=isthmus.Rules.suited):
            trainer.train()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
