"""A model small enough that a learner's step is short next to what chaos does to it."""

from torch import nn

from isthmus.demo.gpt import ByteGPT


def small() -> nn.Module:
    """Return a byte GPT of 0.06 million parameters."""
    return ByteGPT(width=48, layers=1, heads=2)
