"""The state of a model that is not merged: buffers, parameters without a gradient, extra state of its modules.

This state belongs to one learner. It changes during training (running statistics, an EMA teacher, the bias of a
router), and checkpoints restore it. Checkpoints do not store tensors that never change: the training script builds
them again.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from isthmus.torch.frozen import stored_in
from isthmus.torch.model import named, plain_name, why_not_kept
from isthmus.torch.shard_transfer import is_sharded, local_of

logger = logging.getLogger(__name__)

SAMPLE = 1024
"""How many elements of a tensor are compared with their earlier values. A tensor with no more is compared whole."""


def local_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of `model.state_dict()` that are not merged, by their names without wrappers."""
    found: dict[str, torch.Tensor] = {name: p for name, p in named(model) if not p.requires_grad}
    known = {id(p) for p in model.parameters()}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in known:
                continue
            known.add(id(buffer))
            found[plain_name(f"{prefix}.{key}" if prefix else key)] = buffer
    return found


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield plain_name(prefix), module


class Mark:
    """A record of a tensor, to detect later changes.

    It holds torch's count of changes in place, the address and the shape. For changes that torch does not count
    (`tensor.data`), it also holds some of the elements.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._was = [_seen(part) for part in stored_in(local_of(tensor))]

    def differs(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has changed since."""
        now = [_seen(part) for part in stored_in(local_of(tensor))]
        return len(now) != len(self._was) or any(
            a[:-1] != b[:-1] or not torch.equal(a[-1], b[-1]) for a, b in zip(self._was, now, strict=True)
        )


def _seen(tensor: torch.Tensor) -> tuple[int, int, torch.Size, torch.Tensor]:
    flat = tensor.detach()
    if why_not_kept(flat) is not None or flat.is_meta:
        sample = torch.empty(0, device="cpu")
    elif flat.numel() <= SAMPLE:
        sample = flat.clone()
    else:
        places = torch.arange(SAMPLE, device=flat.device) * (flat.numel() // SAMPLE)
        sample = flat[torch.unravel_index(places, flat.shape)]
    # Compare bits, because a NaN is not equal to itself.
    bits = sample.contiguous().view(torch.uint8) if sample.numel() and sample.dim() else sample
    return version_of(tensor), tensor.data_ptr(), tensor.shape, bits


def version_of(tensor: torch.Tensor) -> int:
    """Return torch's count of a tensor's changes in place; 0 for inference tensors, which have no count."""
    return 0 if tensor.is_inference() else tensor._version


class LocalState:
    """The local state of a model. It knows which tensors have changed since `join`."""

    def __init__(self, model: nn.Module) -> None:
        """Record the model's local tensors as the training script has built them."""
        self._model = model
        self._marks = {name: Mark(tensor) for name, tensor in local_tensors(model).items()}
        self._extra = list(_with_extra_state(model))
        self._kept: set[str] = set()
        self._odd: set[str] = set()

    def changed(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint must hold: all that have changed in this or an earlier incarnation."""
        tensors = local_tensors(self._model)
        for name, tensor in tensors.items():
            if name in self._kept or name in self._odd:
                continue
            mark = self._marks.get(name)
            if mark is not None and not mark.differs(tensor):
                continue
            why = None if is_sharded(tensor) else why_not_kept(tensor.detach())
            if why is None:
                self._kept.add(name)
            else:
                self._odd.add(name)
                logger.warning("%s changes while the model trains, and is %s: checkpoints do not hold it", name, why)
        return {name: tensors[name] for name in sorted(self._kept & tensors.keys())}

    def extra(self) -> dict[str, Any]:
        """Return the extra state of modules, by their names."""
        return {name: module.get_extra_state() for name, module in self._extra}

    def load(self, saved: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Restore tensors and the modules' extra state from a checkpoint.

        Log tensors that the model no longer has, or has in another shape. One that is trained by now is merged, and
        restored with what is merged.
        """
        tensors, trained = local_tensors(self._model), {n for n, p in self._model.named_parameters() if p.requires_grad}
        for name, value in saved.items():
            here = tensors.get(name)
            if here is None and name in trained:
                continue
            if here is None or here.shape != value.shape:
                was = f"a tensor of shape {tuple(value.shape)}"
                now = (
                    "this model has none of that name"
                    if here is None
                    else f"here it is one of shape {tuple(here.shape)}"
                )
                logger.warning("the checkpoint holds %s as %s, and %s: it is not restored", name, was, now)
                continue
            with torch.no_grad():
                local_of(here).copy_(local_of(value))
            self._kept.add(name)
        for name, module in self._extra:
            if name in extra:
                module.set_extra_state(extra[name])
