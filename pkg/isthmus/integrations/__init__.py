"""Isthmus in the training loops of other libraries, with one line of code each.

Each module imports only its own framework.

hook           shared by all: counts steps where the optimizer takes them, and tokens where the model reads them
transformers   a callback for `transformers.Trainer`          extra `transformers`
accelerate     for a loop over `accelerate.Accelerator`       extra `accelerate`
lightning      a callback for `lightning.pytorch.Trainer`     extra `lightning`
torchtitan     for torchtitan's own trainer, unchanged
"""
