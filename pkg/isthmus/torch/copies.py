"""Second copies of the weights in an optimizer's state, which an adopted version moves as it moves the weights.

Examples are float32 masters, averages of the weights, Lookahead's slow weights and the point where Prodigy began. Each
copy is moved by the same difference as the weights. So it keeps its distance from them, and the optimizer's next step
does not undo the adoption.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from isthmus.torch.model import rows_of
from isthmus.torch.optimizers import Path
from isthmus.torch.shards import local_of

Written = Sequence[tuple[Any, tuple[int, int] | None]]
"""Parameters that are written, whole or some rows of them."""


class Copies:
    """Those of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, paths: frozenset[Path] = frozenset()) -> None:
        """`paths`: where they are, below a parameter's entry in the state; see `rehearsal`."""
        self._optimizer = optimizer
        self.paths = paths

    @contextmanager
    def follow(self, written: Written) -> Iterator[None]:
        """Move the copies of parameters by as much as the block does. On a device nothing is waited for."""
        if not self.paths:
            yield
            return
        with torch.no_grad():
            before = [
                (p, rows, rows_of(local_of(p), rows).float().clone()) for p, rows in written if self._of(p) is not None
            ]
            yield
            for p, rows, was in before:
                moved = rows_of(local_of(p), rows).float() - was
                for tensor in self._of(p) or ():
                    held = rows_of(tensor, rows)
                    held.add_(moved.to(held.device, held.dtype))

    def become(self, parameters: Sequence[Any]) -> None:
        """Set the copies of parameters to what these hold: another learner's were of its own."""
        with torch.no_grad():
            for p in parameters:
                for tensor in self._of(p) or ():
                    tensor.copy_(local_of(p))

    def _of(self, parameter: Any) -> list[torch.Tensor] | None:
        """Return a parameter's copies, in its shape; None where it has none (yet)."""
        entry = self._optimizer.state.get(parameter)
        if not entry:
            return None
        shape = local_of(parameter).shape
        found = [local_of(tensor) for path, tensor in tensors_in(entry) if path in self.paths]
        return [tensor.view(shape) for tensor in found if tensor.numel() == shape.numel()] or None


def tensors_in(entry: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors in a parameter's entry of an optimizer's state, and where they are."""
    if isinstance(entry, torch.Tensor):
        yield path, entry
    elif isinstance(entry, dict):
        for key, value in entry.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(entry, list | tuple):
        for index, item in enumerate(entry):
            yield from tensors_in(item, (*path, index))
