"""Loading a cut of the global model into a module that serves or judges the model and is not trained."""

from typing import Any

import torch
from torch import nn

from isthmus.errors import LayoutMismatch
from isthmus.inspect.follow import Cut
from isthmus.torch import model as torch_model
from isthmus.torch.shard_transfer import block_of, local_of


def load_cut(module: nn.Module, cut: Cut) -> None:
    """Write the tensors of a cut into the parameters of the same names, in place, on any device and in any dtype.

    In a sharded module, each rank writes its own blocks. Raises `LayoutMismatch`, with the first difference, before
    anything is written.
    """
    parameters: dict[str, Any] = dict(torch_model.named(torch_model.unwrapped(module)))
    tensors = cut.tensors()
    for name in sorted(tensors):
        if name not in parameters:
            raise LayoutMismatch(f"tensor {name!r} of the run is not in the module")
        if tuple(parameters[name].shape) != tensors[name].shape:
            raise LayoutMismatch(
                f"tensor {name!r} has shape {tensors[name].shape} in the run, {tuple(parameters[name].shape)} here"
            )
    known = {spec.name for spec in cut.run.layout.specs} | cut.run.frozen.keys()
    for name in parameters:
        if name not in known:
            raise LayoutMismatch(
                f"parameter {name!r} of the module is not in the run: its values would never be updated"
            )
    with torch.no_grad():
        for name, values in tensors.items():
            p = parameters[name]
            block = block_of(p)
            if block.size:
                whole = torch.from_numpy(torch_model.writable(values.reshape(-1))).view(values.shape)
                local_of(p).view(block.shape).copy_(whole[block.slices])
