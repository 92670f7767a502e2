"""Parameters that are not trained: they do not travel, so what they are stored in must be the same bytes everywhere.

A digest is of the bytes as they are stored, read once: quantised weights are not unpacked. 14 GB (seven billion
parameters in bfloat16) take some five seconds on two cores.
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
    """Return the digest of each frozen parameter, by name; where they are trusted, `UNTOLD`. Raises `InputError`."""
    frozen = [(name, p) for name, p in torch_model.named(model) if not p.requires_grad]
    if check == FrozenCheck.TRUSTED:
        return {name: UNTOLD for name, _ in frozen}
    return {name: digest_of_stored(name, p) for name, p in frozen}


def digest_of_stored(name: str, parameter: torch.Tensor) -> bytes:
    """Return the digest [32 bytes] of what a parameter is stored in. Raises `InputError` where it is not at hand."""
    try:
        pieces = (torch_model.bits_of(tensor).numpy().data for tensor in stored_in(parameter))
        return digest_of(pieces, all_cores=True)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        why = str(error).splitlines()[0][:200]
        raise InputError(
            f"what the frozen parameter {name!r} ({type(parameter).__qualname__}, {parameter.device}) is stored in "
            f"cannot be read ({why}): join(frozen='trusted') takes it for the run's"
        ) from None


def stored_in(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that hold what a tensor is: of one that is made of others, those."""
    if hasattr(tensor, "__tensor_flatten__"):  # torch's protocol, as torchao's weights follow it
        for name in tensor.__tensor_flatten__()[0]:
            yield from stored_in(getattr(tensor, name))
        return
    yield tensor.detach()
    if (scales := getattr(tensor, "quant_state", None)) is not None:  # four bits, as bitsandbytes has them
        for _, value in sorted(scales.as_dict(packed=False).items()):
            if isinstance(value, torch.Tensor):
                yield value.detach()
