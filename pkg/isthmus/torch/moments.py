"""The state that a learner's inner optimizer starts with: its own checkpoint's, a healthy peer's moments, or none."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from isthmus.errors import RecordInvalid
from isthmus.format.records.objects import CheckpointHeader
from isthmus.format.records.tree import Leaf, rebuild
from isthmus.format.rules import Hyperparameters
from isthmus.learner.checkpoint import Checkpoint
from isthmus.torch import model as torch_model
from isthmus.torch import optimizers
from isthmus.torch.loop import Loop
from isthmus.torch.optimizers import Array, Outline, Plain, Stepped, Tried, Wrapped
from isthmus.wording import an

logger = logging.getLogger(__name__)

MOVES_MAX, MOVES_OF_FRESH_MAX = 0.1, 30.0
"""Limits on how far another learner's moments may move a parameter tensor in one step without a gradient.

The first is a share of the tensor's own length. The second is a multiple of the distance that a first step with
gradients of −1 moves the tensor. The larger limit applies."""


def restore(
    loop: Loop, own: Checkpoint | None, donor: Checkpoint | None, settings: Hyperparameters = Hyperparameters.RESTORED
) -> str:
    """Restore a loop from a checkpoint; return where the moments came from: `own`, `peer` or `fresh`.

    `own` is the learner's own checkpoint. All of it is loaded unchanged, in any dtype and shape, because its digest
    vouches for it. `donor` is another learner's checkpoint that passed a `DonorCheck`. Raises `InputError` if data or
    another object cannot load its state.
    """
    optimizer = loop.optimizer
    if own is not None:
        why = _load_own(loop.model, optimizer, own, settings)
        if why is not None:
            logger.warning("the optimizer in %s is not used: %s", own.key, why)
        loop.go_on((alone_of(own, 1) or [None])[0] or {}, own.local(torch_model.make_tensor) or {}, settings)
        loop.settle_rates()
        if why is None:
            return "own"
    elif donor is not None:
        before = optimizer.state_dict()
        try:
            optimizers.load(optimizer, donor.optimizer(torch_model.make_tensor), settings=False)
        except Exception as error:  # foreign moments may raise anything; training then starts without them
            logger.warning("moments from %s cannot be loaded: %r", donor.key, error)
            optimizer.load_state_dict(before)
        else:
            logger.info("moments of the inner optimizer from %s", donor.key)
            return "peer"
    return "fresh"


def alone_of(own: Checkpoint, ranks: int) -> list[Any] | None:
    """Return, for each rank, the state that this rank alone had, such as its position in the data.

    If the checkpoint has such state of another number of ranks, log a warning and return None.
    """
    alone = own.ranks(torch_model.make_tensor)
    if len(alone) != ranks and any(one is not None for one in alone):
        logger.warning(
            "%s has the data positions of %d ranks, but this learner has %d ranks: the data starts anew; skip what "
            "the first link.steps_done steps have read",
            own.key, len(alone), ranks,
        )  # fmt: skip
        return None
    return alone if len(alone) == ranks else [None] * ranks


def warmth(steps: int, warmup: int) -> float:
    """Return the factor on the learning rate, `steps` steps after a start with fresh moments into a run in flight."""
    return min(1.0, (steps + 1) / warmup) if warmup else 1.0


# --- the learner's own checkpoint -------------------------------------------------------------------------------------


def own_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    own: Checkpoint,
    make: Callable[[Leaf], object] = torch_model.make_tensor,
) -> dict[str, Any] | str:
    """Return the optimizer's state in a learner's own checkpoint, or the reason why this optimizer cannot use it."""
    try:
        saved: dict[str, Any] = own.optimizer(make)
    except RecordInvalid as error:
        return str(error)
    return _why_another(model, optimizer, saved) or why_not_finite(saved["state"]["state"], "state") or saved


def _load_own(
    model: nn.Module, optimizer: torch.optim.Optimizer, own: Checkpoint, settings: Hyperparameters
) -> str | None:
    """Load the optimizer's state in a learner's own checkpoint. Return None, or the reason if it was not loaded."""
    saved = own_state(model, optimizer, own)
    if isinstance(saved, str):
        return saved
    choose(optimizer, saved, settings)
    try:
        optimizers.load(optimizer, saved, settings=True)
    except (RecordInvalid, ValueError) as error:
        return str(error)
    return None


CHOSEN = ("weight_decay", "betas", "momentum", "eps")
"""Settings of parameter groups that users choose, besides the learning rate. Others may be the optimizer's counters."""


CYCLED = ("betas", "momentum")

OF_A_SCHEDULE = ("lr", "initial_lr", "max_lr", "min_lr")
"""The learning rate of a group, and the settings from which schedules compute it."""


def choose(optimizer: torch.optim.Optimizer, saved: dict[str, Any], settings: Hyperparameters) -> None:
    """Compare a checkpoint's settings with those that the optimizer was made with.

    With `RESTORED`, log a warning if they differ. With `PASSED`, put the optimizer's settings into `saved`.
    """
    found = []
    for number, (here, there) in enumerate(zip(optimizer.param_groups, saved["state"]["param_groups"], strict=True)):
        # A schedule that cycles the momentum, too, has its place in the checkpoint.
        chosen = [name for name in CHOSEN if name not in CYCLED or "max_momentum" not in here]
        both = [(name, there[name], here[name]) for name in chosen if name in here and name in there]
        differ = [(name, was, now) for name, was, now in both if was != now]
        if "lr" in here and "lr" in there and not math.isclose(_start(there), _start(here), rel_tol=1e-6):
            differ.append(("lr", _start(there), _start(here)))
        found += [f"{name} {was} and not {now} in group {number}" for name, was, now in differ]
        if settings is Hyperparameters.PASSED:
            there.update({name: here[name] for name in (*CHOSEN, *OF_A_SCHEDULE) if name in here})
    if found and settings is Hyperparameters.RESTORED:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        logger.warning(
            "the learner goes on with the settings of its checkpoint: %s%s; to use those that the optimizer was made "
            "with, join with hyperparameters='passed'",
            ", ".join(found[:3]), more,
        )  # fmt: skip


def _start(group: Mapping[str, Any]) -> float:
    """Return the learning rate that a group's schedule begins with; without a schedule, the group's learning rate."""
    return float(group.get("initial_lr", group["lr"]))


def _why_another(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Any) -> str | None:
    """Return why a saved state does not belong to this optimizer over these parameters, or None if it does."""
    try:
        if saved["class"] != optimizers.class_of(optimizer):
            return f"it is of {an(saved['class'])}, but the optimizer here is {an(optimizers.class_of(optimizer))}"
        if saved["names"] != optimizers.names_of(model, optimizer):
            return "its parameters or their groups differ"
        if len(saved["state"]["param_groups"]) != len(optimizer.param_groups):
            return "it has another number of parameter groups"
        saved["state"]["state"].items()
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        return f"it is no optimizer's state: {error!r}"
    return None


def why_not_finite(held: Any, path: str) -> str | None:
    """Return a message with the path at which a state holds a NaN or an infinity, or None."""
    if isinstance(held, dict):
        return next((why for key, value in held.items() if (why := why_not_finite(value, f"{path}[{key!r}]"))), None)
    if isinstance(held, list | tuple):
        return next((why for i, item in enumerate(held) if (why := why_not_finite(item, f"{path}[{i}]"))), None)
    if not isinstance(held, torch.Tensor):
        return None
    try:
        return None if optimizers.all_finite(held) else f"{path} is not finite"
    except NotImplementedError:
        return None  # only the optimizer knows the meaning of these bits


# --- another learner's checkpoint -------------------------------------------------------------------------------------


class DonorCheck:
    """Checks whether moments that another learner wrote are like the state that this optimizer itself would hold.

    For comparison, a copy of the optimizer and of its parameters takes a step (see `Stepped` for the cost). The copy is
    made for the first donor of the same class and parameters, and dropped with this object. For each donor whose
    checkpoint is read in full, the copy takes another step with the donor's moments. If no copy can be made, no donor
    is used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Tried] | None = None,
    ) -> None:
        """`step`: has a copy of the optimizer take a step on all ranks, for a learner of several."""
        self._model, self._optimizer = model, optimizer
        self._step = step or (lambda: Stepped(optimizer))
        self._stepped: Tried | str | None = None

    def glance(self, header: CheckpointHeader) -> str | None:
        """Return why a checkpoint will not fit, judged by its header alone, or None.

        The header has the class, the parameters, the entries, and their shapes and dtypes. Raises `RecordInvalid`.
        """
        leaves = [Leaf(spec, _NOTHING) for spec in header.arrays]
        return self._why_unlike(rebuild(header.optimizer, leaves, _without_values))

    def fits(self, found: Checkpoint) -> str | None:
        """Return why this learner must not use a checkpoint's moments, or None. Raises `RecordInvalid`."""
        saved = found.optimizer(torch_model.make_tensor)
        why = self._why_unlike(saved)
        if why is not None or self._stepped is None or isinstance(self._stepped, str):
            return why
        names = [name for group in saved["names"] for name in group]
        moved, fresh, lengths = self._stepped.moved_by(saved), self._stepped.moved, self._stepped.lengths()
        for name, far, first, length in zip(names, moved, fresh, lengths, strict=True):
            limit = max(MOVES_MAX * length.rms, MOVES_OF_FRESH_MAX * first.rms)
            if not (math.isfinite(far.rms) and far.rms <= limit):
                return f"its moments alone move {name} by {far.rms:.3g} (rms) in a step; the limit is {limit:.3g}"
        return None

    def _why_unlike(self, saved: Any) -> str | None:
        why = _why_another(self._model, self._optimizer, saved)
        if why is not None:
            return why
        if self._stepped is None:
            try:
                self._stepped = self._step()
            except Exception as error:
                self._stepped = f"no copy of this optimizer can step, which would show what it keeps: {error!r}"
                logger.warning("no other learner's moments are used: %s", self._stepped)
        if isinstance(self._stepped, str):
            return self._stepped
        names = [name for group in saved["names"] for name in group]
        held, expected = saved["state"]["state"], self._stepped.outline
        for key in (*expected, *(key for key in held if key not in expected)):
            what = f"of {names[key]}" if isinstance(key, int) and 0 <= key < len(names) else f"under {key!r}"
            if key not in held or key not in expected:
                return f"it holds {'nothing' if key not in held else 'something'} {what}, unlike this optimizer"
            try:
                why = _why_unlike(held[key], expected[key], f"state {what}")
            except NotImplementedError as error:
                return f"state {what} cannot be judged: {error}"
            if why is not None:
                return why
        return None


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu").numpy()


def _without_values(leaf: Leaf) -> torch.Tensor:
    return torch.empty(leaf.spec.shape, dtype=torch_model.dtype_of(leaf.spec), device="meta")


def _why_unlike(given: Any, expected: Outline, path: str) -> str | None:
    """Return how `given` differs from the state that this optimizer would hold in its place, or None.

    The values of `meta` tensors, which have none, are not checked. Raises `NotImplementedError` for a dtype whose
    values cannot be checked.
    """
    match expected:
        case Array():
            return _why_unlike_tensor(given, expected, path)
        case Wrapped():
            if not isinstance(given, dict) or not expected.describes(given):
                return f"{path} is no {expected.kind.__qualname__} as here"
            inner = [(given["parts"][part], like, f"{path}, {part}") for part, like in expected.parts.items()]
        case dict():
            if not isinstance(given, dict) or given.keys() != expected.keys():
                there = ", ".join(map(str, given)) if isinstance(given, dict) else type(given).__name__
                return f"{path} holds {there or 'nothing'}; here it would be {', '.join(map(str, expected))}"
            inner = [(given[key], expected[key], f"{path}, {key}") for key in expected]
        case list() | tuple():
            if type(given) is not type(expected) or len(given) != len(expected):
                return f"{path} is not {an(type(expected).__name__)} of {len(expected)} as here"
            inner = [(given[i], like, f"{path}, {i}") for i, like in enumerate(expected)]
        case Plain(kind, nonnegative):
            if kind not in _PLAIN:
                return f"{path} is {an(kind.__name__)}, which cannot be judged"
            if type(given) is not kind:
                return f"{path} is {an(type(given).__name__)}, here it would be {an(kind.__name__)}"
            if isinstance(given, float) and not math.isfinite(given):
                return f"{path} is not finite"
            if nonnegative and isinstance(given, int | float) and given < 0:
                return f"{path} is {given}, where it is never below 0 here"
            return None
        case _:
            return f"{path} cannot be judged"
    return next((why for step in inner if (why := _why_unlike(*step)) is not None), None)


_PLAIN = {type(None), bool, int, float, str, bytes}


def _why_unlike_tensor(given: Any, expected: Array, path: str) -> str | None:
    if not isinstance(given, torch.Tensor):
        return f"{path} is {an(type(given).__name__)}, here it would be a tensor"
    if (tuple(given.shape), given.dtype) != (expected.shape, expected.dtype):
        return (
            f"{path} is a {given.dtype} of shape {tuple(given.shape)}, here it would be a {expected.dtype} of shape "
            f"{expected.shape}"
        )
    if given.is_meta:
        return None
    if not optimizers.all_finite(given):
        return f"{path} is not finite"
    if expected.nonnegative and not optimizers.nowhere_negative(given):
        return f"{path} is below 0 somewhere, where it never is here"
    return None
