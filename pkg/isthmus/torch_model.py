"""A torch module as Isthmus sees it: which of its tensors are merged, and how values get in and out of them.

Merged: every parameter that requires a gradient, tied ones once. Frozen parameters are not merged, but must hold the
same values everywhere. Buffers stay local and are not looked at: running statistics differ between learners.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from isthmus.errors import InputError
from isthmus.kernels import F32
from isthmus.layout import DENSE, EMBEDDING, Layout, Spec


def specs_of(model: nn.Module) -> list[Spec]:
    """Return the trainable parameters, in the module's own order; tied ones appear once, under their first name."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    return [
        Spec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), EMBEDDING if id(p) in embeddings else DENSE)
        for name, p in model.named_parameters()
        if p.requires_grad
    ]


def values_of(model: nn.Module) -> list[F32]:
    """Return the trainable parameters' values as flat float32 arrays, in the order of `specs_of`."""
    return [_flat(p) for _, p in model.named_parameters() if p.requires_grad]


def frozen_of(model: nn.Module) -> dict[str, bytes]:
    """Return the SHA-256 of each frozen parameter's values (as float32)."""
    return {name: hashlib.sha256(_flat(p).data).digest() for name, p in model.named_parameters() if not p.requires_grad}


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `InputError` where the optimizer trains a tensor that is no parameter of the model: it is not merged."""
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in known:
                raise InputError(
                    f"parameter group {number} of the optimizer holds a tensor of shape {tuple(p.shape)} that is not a "
                    "parameter of the model: join the module that owns it"
                )


class TorchReplica:
    """Reads and writes a module's parameters, fragment by fragment, on any device and in any of the dtypes."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        named = dict(model.named_parameters())
        self._places: list[list[tuple[Any, slice]]] = [
            [(named[t.spec.name], slice(t.start, t.stop)) for t in fragment.tensors] for fragment in layout.fragments
        ]

    def read(self, fragment: int, out: F32) -> None:
        """See `Replica.read`."""
        with torch.no_grad():
            for parameter, at in self._places[fragment]:
                torch.from_numpy(out[at]).copy_(parameter.detach().reshape(-1))

    def write(self, fragment: int, values: F32) -> None:
        """See `Replica.write`."""
        with torch.no_grad():
            for parameter, at in self._places[fragment]:
                parameter.copy_(torch.from_numpy(_writable(values[at])).view(parameter.shape))


def load(model: nn.Module, layout: Layout, values: Iterable[F32]) -> None:
    """Write all fragments' values into a module."""
    replica = TorchReplica(model, layout)
    for fragment, flat in enumerate(values):
        replica.write(fragment, flat)


def _flat(parameter: torch.Tensor) -> F32:
    return np.ascontiguousarray(parameter.detach().to("cpu", torch.float32).reshape(-1).numpy()).copy()


def _writable(values: F32) -> F32:
    """torch warns of read-only memory even where it only reads."""
    return values if values.flags.writeable else values.copy()
