"""Digests of frozen parameters. These are not sent, so every learner must store them in the same bytes.

A digest covers the bytes as they are stored, read once; quantised weights are not unpacked. For 14 GB (seven billion
parameters in bfloat16) this takes about five seconds on two cores.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from isthmus.errors import InputError
from isthmus.format.digests import digest_of
from isthmus.format.rules import FrozenCheck
from isthmus.log.run import UNTOLD
from isthmus.torch import model as torch_model


def digests_of(model: nn.Module, check: FrozenCheck) -> dict[str, bytes]:
    """Return the digest of each frozen parameter, by name; with `TRUSTED`, `UNTOLD` for each.

    Raises `InputError` if the bytes of a parameter cannot be read.
    """
    frozen = [(name, p) for name, p in torch_model.named(model) if not p.requires_grad]
    if check == FrozenCheck.TRUSTED:
        return {name: UNTOLD for name, _ in frozen}
    return {name: digest_of_stored(name, p) for name, p in frozen}


def digest_of_stored(name: str, parameter: torch.Tensor) -> bytes:
    """Return the digest [32 bytes] of a parameter's stored bytes. Raises `InputError` if they cannot be read."""
    try:
        pieces = (torch_model.bits_of(tensor).numpy().data for tensor in stored_in(parameter))
        return digest_of(pieces, all_cores=True)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        why = str(error).splitlines()[0][:200]
        raise InputError(
            f"the storage of the frozen parameter {name!r} ({type(parameter).__qualname__}, {parameter.device}) "
            f"cannot be read ({why}): join(frozen='trusted') assumes that it equals the run's"
        ) from None


def stored_in(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in which a tensor is stored.

    For a tensor subclass, these are its inner tensors; otherwise the tensor itself, and its quantisation state if any.
    """
    if hasattr(tensor, "__tensor_flatten__"):  # torch's protocol for tensor subclasses, which torchao follows
        for name in tensor.__tensor_flatten__()[0]:
            yield from stored_in(getattr(tensor, name))
        return
    yield tensor.detach()
    if (scales := getattr(tensor, "quant_state", None)) is not None:  # 4-bit weights of bitsandbytes
        for _, value in sorted(scales.as_dict(packed=False).items()):
            if isinstance(value, torch.Tensor):
                yield value.detach()
