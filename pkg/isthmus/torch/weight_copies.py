"""Second copies of the weights in an optimizer's state, which an adopted version moves as it moves the weights.

Examples are float32 master weights, averages of the weights, Lookahead's slow weights, and the point where Prodigy
began. Adoption moves each copy by the same difference as the weights. So the copy keeps its distance from the weights,
and the optimizer's next step does not undo the adoption.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from isthmus.torch.model import rows_of
from isthmus.torch.optimizers import Path
from isthmus.torch.shard_transfer import local_of

Written = Sequence[tuple[Any, tuple[int, int] | None]]
"""Parameters that are written, each with the range of rows; None means the whole parameter."""


class Copies:
    """The second copies of the weights in one optimizer's state."""

    def __init__(self, optimizer: torch.optim.Optimizer, paths: frozenset[Path] = frozenset()) -> None:
        """`paths`: where the copies are, below a parameter's entry in the state; see `rehearsal`."""
        self._optimizer = optimizer
        self.paths = paths

    @contextmanager
    def move_along(self, written: Written) -> Iterator[None]:
        """Move the copies of the written parameters by as much as the `with` block moves the parameters.

        Does not wait for a device.
        """
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
        """Set the copies to the current values of their parameters.

        This is for moments from another learner, whose copies belong to its own weights.
        """
        with torch.no_grad():
            for p in parameters:
                for tensor in self._of(p) or ():
                    tensor.copy_(local_of(p))

    def _of(self, parameter: Any) -> list[torch.Tensor] | None:
        """Return a parameter's copies, in its shape; None if it has none, or none yet."""
        entry = self._optimizer.state.get(parameter)
        if not entry:
            return None
        shape = local_of(parameter).shape
        found = [local_of(tensor) for path, tensor in tensors_in(entry) if path in self.paths]
        return [tensor.view(shape) for tensor in found if tensor.numel() == shape.numel()] or None


def tensors_in(entry: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield each tensor in a parameter's entry of an optimizer's state, with its path."""
    if isinstance(entry, torch.Tensor):
        yield path, entry
    elif isinstance(entry, dict):
        for key, value in entry.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(entry, list | tuple):
        for index, item in enumerate(entry):
            yield from tensors_in(item, (*path, index))
