"""What a learner's inner optimizer goes on with: its own checkpoint's state, a healthy peer's moments, or none."""

import copy
import logging

import torch
from torch import nn

from isthmus import torch_model
from isthmus.errors import RecordInvalid
from isthmus.learner.checkpoint import Checkpoint, Stateful
from isthmus.records.tree import Leaf

logger = logging.getLogger(__name__)


def why_no_fit(model: nn.Module, optimizer: torch.optim.Optimizer, found: Checkpoint) -> str | None:
    """Return why a checkpoint's optimizer is not for this one, or None."""
    try:
        return torch_model.why_no_fit(model, optimizer, found.optimizer(torch_model.make_tensor))
    except RecordInvalid as error:
        return str(error)


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Stateful | None,
    own: Checkpoint | None,
    donor: Checkpoint | None,
) -> str:
    """Bring optimizer and data to where they were; return where the moments came from: `own`, `peer` or `fresh`."""
    if own is not None and data is not None:
        state = own.data(torch_model.make_tensor)
        if state is None:
            logger.warning("%s was written without data=: the data starts anew", own.key)
        else:
            data.load_state_dict(state)
    if own is not None:
        why = why_no_fit(model, optimizer, own)
        if why is None:
            torch_model.load_optimizer(optimizer, own.optimizer(torch_model.make_tensor), settings=True)
            return "own"
        logger.warning("the optimizer in %s is not used: %s", own.key, why)
    elif donor is not None:
        torch_model.load_optimizer(optimizer, donor.optimizer(torch_model.make_tensor), settings=False)
        logger.info("moments of the inner optimizer from %s", donor.key)
        return "peer"
    return "fresh"


def warmth(steps: int, warmup: int) -> float:
    """Return the factor on the learning rate so many steps after a start with fresh moments into a run in flight."""
    return min(1.0, (steps + 1) / warmup) if warmup else 1.0


class Saver:
    """Copies what a checkpoint holds besides the model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Stateful | None) -> None:
        self._model, self._optimizer, self._data = model, optimizer, data

    def save(self) -> tuple[object, object]:
        """See `checkpoint.Saver.save`."""
        data = None if self._data is None else copy.deepcopy(self._data.state_dict())
        return torch_model.optimizer_state(self._model, self._optimizer), data

    def take(self, node: object) -> Leaf | None:
        """See `checkpoint.Saver.take`."""
        return torch_model.take_tensor(node)
