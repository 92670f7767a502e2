"""Isthmus in training loops that are somebody else's, in one line each. Each module imports its framework by itself.

hook           what all of them share: an optimizer's steps counted where they are made, tokens where they are read
transformers   a callback for `transformers.Trainer`          extra `transformers`
accelerate     for a loop over `accelerate.Accelerator`       extra `accelerate`
lightning      a callback for `lightning.pytorch.Trainer`     extra `lightning`
torchtitan     for torchtitan's own trainer, as it is
"""
