"""The model that a `lightning.pytorch.Trainer` and a plain loop share. No Lightning here: its import takes seconds."""

import torch
from torch import nn

LINES = 64


def make_model() -> nn.Module:
    """Return a table and a linear layer, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(LINES, 16), nn.Flatten(), nn.Linear(16, 4))
