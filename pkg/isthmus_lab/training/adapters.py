"""Low-rank adapters (LoRA, arXiv 2106.09685) on a byte GPT that was trained on code, to be trained on prose."""

import functools
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

from isthmus.demo.gpt import Block, ByteGPT
from isthmus.demo.text import Corpus, corpus

SCALE = 2.0
"""Factor on an adapter's output, whatever its rank."""

LAYERS = ("qkv", "proj", "up", "down")
"""The linear layers of a block that have an adapter."""


class Adapted(nn.Module):
    """A frozen linear layer, plus SCALE · B A x with trainable A [rank, inputs] and B [outputs, rank]."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.a = nn.Parameter(torch.empty(rank, layer.in_features))
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [..., outputs] for inputs [..., inputs]."""
        out: Tensor = self.layer(x) + SCALE * ((x @ self.a.T) @ self.b.T)
        return out


def adapt(model: ByteGPT, rank: int) -> None:
    """Freeze a model, and give each linear layer of its blocks an adapter of this rank, which changes nothing yet."""
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        assert isinstance(block, Block), "other blocks have no such layers"
        for name in LAYERS:
            setattr(block, name, Adapted(getattr(block, name), rank))


@functools.lru_cache(maxsize=1)
def prose() -> Corpus:
    """Return the standard library's help topics, which are prose on Python: 0.7 million bytes."""
    return corpus(str(_topics()))


@functools.lru_cache(maxsize=1)
def code() -> Corpus:
    """Return the standard library's source without the help topics."""
    whole, topics = corpus(), _topics()
    train, kept_back = (tuple(p for p in of if p.path != topics) for of in (whole.train, whole.kept_back))
    return Corpus(train, kept_back, whole.source)


def _topics() -> Path:
    return Path(sysconfig.get_paths()["stdlib"], "pydoc_data", "topics.py")
