"""A rehearsal at `join`, on a few small tensors, of what the optimizer does after a restart and after an adoption.

An optimizer that cannot continue after a restart should be found before weeks of training, and not at the first
restart. So a copy of the optimizer, over a few tensors like its own, takes some steps. Its state is packed, unpacked
and loaded into another copy, and both copies must take the same next step.

The rehearsal also finds tensors in the state that follow the weights: float32 master weights, averages of the weights,
the point where a search began. An adopted version must move these tensors as it moves the weights; otherwise the next
step would undo the adoption.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isthmus.errors import InputError
from isthmus.format.records import tree
from isthmus.torch import model as torch_model
from isthmus.torch import optimizers
from isthmus.torch.optimizers import Path
from isthmus.torch.shard_transfer import local_of
from isthmus.torch.weight_copies import Copies, tensors_in

logger = logging.getLogger(__name__)

LARGE = 1 << 13
"""Elements from which a tensor counts as large. Optimizers quantise the state of tensors from some thousands on."""

BEFORE, AFTER = 3, 12
"""Steps before and after a version is adopted. Some optimizers use their second copy only every few steps."""

RATE = 1e-3
"""Learning rate of these steps. It is small, so that hardly anything but the adoption changes the weights."""

FOLLOWS = 0.1
"""A tensor in the state is a copy of the weights if its distance from them is below this share of their length."""

ANSWERED = 0.5, 1.5
"""Bounds on the share of an adopted difference that must still be in the weights after `AFTER` steps."""


def rehearse(optimizer: torch.optim.Optimizer) -> Copies:
    """Rehearse a restart and an adoption; return the second copies of the weights that the optimizer's state holds.

    Raises `InputError` if the state cannot be read, or if the restart or the adoption fails. If no copy of the
    optimizer can take a step, log a warning and return no copies.
    """
    try:
        optimizer.state_dict()
    except Exception as error:
        raise InputError(
            f"the state of {optimizers.class_of(optimizer)} cannot be read on each process ({error}): no checkpoint "
            "could be taken; use an optimizer that holds the state of this process's parameters (with FSDP2, any)"
        ) from error
    try:
        with _quiet():
            first, second = Twin(optimizer), Twin(optimizer)
            for twin in (first, second):
                for number in range(BEFORE):
                    twin.step(number)
    except Exception as error:
        logger.warning(
            "no copy of %s can take a step (%r): it was not tested whether a restart restores its state",
            optimizers.class_of(optimizer), error,
        )  # fmt: skip
        return Copies(optimizer)
    with _quiet():
        _restart(optimizer, first)
        copies = frozenset(first.copies())
        _adopt(optimizer, first, second, copies)
    if copies:
        logger.info(
            "%s holds copies of the weights (%s): adopted versions move them too",
            optimizers.class_of(optimizer), ", ".join(sorted("/".join(map(str, path)) for path in copies)),
        )  # fmt: skip
    return Copies(optimizer, copies)


class Twin:
    """A copy of an optimizer over a few tensors that are like its parameters and hold random values."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        draw = torch.Generator("cpu").manual_seed(0)
        memo: dict[int, Any] = {}
        groups: list[list[nn.Parameter]] = []
        for group in optimizer.param_groups:
            groups.append([])
            chosen = {id(p) for p in _chosen(group["params"])}
            for p in group["params"]:
                held = local_of(p)
                shape = held.shape if id(p) in chosen else torch.Size([0])
                values = torch.randn(shape, generator=draw, device="cpu").to(held.device, held.dtype)
                if values.dim() == 4 and held.is_contiguous(memory_format=torch.channels_last):
                    values = values.contiguous(memory_format=torch.channels_last)
                memo[id(p)] = nn.Parameter(values, requires_grad=p.requires_grad)
                if id(p) in chosen:
                    groups[-1].append(memo[id(p)])
        self.optimizer = optimizers.twin(optimizer, memo)
        for mine, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            mine["params"] = parameters
            if isinstance(mine.get("lr"), float | int):
                mine["lr"] = RATE
            elif isinstance(mine.get("lr"), torch.Tensor):
                mine["lr"] = torch.full_like(mine["lr"], RATE)
        self.parameters = [p for group in groups for p in group]
        self._closes = _needs_closure(self.optimizer)

    def step(self, number: int) -> None:
        """Take a step with random gradients, which `number` determines."""
        draw = torch.Generator("cpu").manual_seed(1 + number)
        gradients = [torch.randn(p.shape, generator=draw, device="cpu").to(p.device, p.dtype) for p in self.parameters]

        def closure() -> torch.Tensor:
            for p, gradient in zip(self.parameters, gradients, strict=True):
                p.grad = gradient.clone(memory_format=torch.preserve_format) if p.requires_grad else None
            return torch.zeros((), device="cpu")

        closure()
        devices = sorted({p.device.index or 0 for p in self.parameters if p.device.type == "cuda"})
        with torch.random.fork_rng(devices):
            # `torch.manual_seed` would seed every GPU, also those that `fork_rng` does not restore. Before CUDA starts,
            # its seeds would wait, and then replace the program's own.
            for generator in (torch.default_generator, *(torch.cuda.default_generators[d] for d in devices)):
                generator.manual_seed(number)
            kind: Any = type(self.optimizer)
            kind.step(self.optimizer, closure) if self._closes else kind.step(self.optimizer)

    def copies(self) -> Iterator[Path]:
        """Yield the paths of tensors in the state that follow the weights."""
        for p in self.parameters:
            for path, tensor in tensors_in(self.optimizer.state.get(p, {})):
                if _is_near(tensor, p):
                    yield path

    def adopt(self, copies: frozenset[Path]) -> list[torch.Tensor]:
        """Change the weights as an adopted version does; return the difference for each parameter."""
        draw = torch.Generator("cpu").manual_seed(1 << 20)
        found = []
        with torch.no_grad(), Copies(self.optimizer, copies).move_along([(p, None) for p in self.parameters]):
            for p in self.parameters:
                before = p.detach().float().clone()
                p.add_(torch.randn(p.shape, generator=draw, device="cpu").to(p.device, p.dtype))
                found.append(p.detach().float() - before)
        return found


def _chosen(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a few of a group's parameters: of each kind the smallest, and a large one (else the largest).

    Parameters of a kind have the same dtype, device, number of dimensions and `requires_grad`.
    """
    kinds: defaultdict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    for p in parameters:
        held = local_of(p)
        if type(held) is torch.Tensor and held.is_floating_point() and held.numel():
            kinds[held.dtype, held.device, held.dim(), p.requires_grad].append(p)
    chosen = []
    for alike in kinds.values():
        alike.sort(key=lambda p: local_of(p).numel())
        large = next((p for p in alike if local_of(p).numel() >= LARGE), alike[-1])
        chosen += [alike[0]] if large is alike[0] else [alike[0], large]
    return chosen


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


_before: list[int] = []
"""The level up to which logging was disabled before, once for each rehearsal under way."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep messages that libraries log during a rehearsal out of the log. Several threads may rehearse at once."""
    _before.append(_before[0] if _before else logging.root.manager.disable)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        level = _before.pop()
        if not _before:
            logging.disable(level)


# --- a restart --------------------------------------------------------------------------------------------------------


def _restart(optimizer: torch.optim.Optimizer, first: Twin) -> None:
    """Check that another copy, loaded with the state of `first`, takes the same step, as after a restart.

    Raises `InputError`.
    """
    name = optimizers.class_of(optimizer)
    advice = "use another optimizer, or report this: a learner that is restarted has to go on as if it had not been"
    try:
        saved = tree.unpacked(
            tree.packed(optimizers.saved_of(first.optimizer), name, torch_model.take_tensor), torch_model.make_tensor
        )
        again = Twin(optimizer)
        with torch.no_grad():
            for p, q in zip(again.parameters, first.parameters, strict=True):
                p.copy_(q)
        optimizers.load(again.optimizer, saved, settings=True)
        for twin in (first, again):
            twin.step(BEFORE)
    except Exception as error:
        raise InputError(f"the state of {name} cannot be brought back after a restart: {error}; {advice}") from error
    _require_finite(optimizer, first)
    for p, q in zip(first.parameters, again.parameters, strict=True):
        if not torch.equal(p, q):
            raise InputError(
                f"{name} takes another step after a restart than without one (by {(p - q).abs().max():.2g} on a tensor "
                f"of shape {tuple(p.shape)} and {p.dtype}): its state_dict does not hold all that it needs; {advice}"
            )


def _require_finite(optimizer: torch.optim.Optimizer, twin: Twin) -> None:
    """Raise `InputError` if the steps of the rehearsal, of usual gradients, made NaN or infinities of the weights."""
    for p in twin.parameters:
        if not torch.isfinite(p).all():
            half = (
                ": an eps of 1e-8 is 0 in float16, so give it eps=1e-4 or more, train in bfloat16, or keep float32 "
                "parameters under torch.autocast"
                if p.dtype == torch.float16
                else ": see its learning rate and its other settings"
            )
            raise InputError(
                f"{optimizers.class_of(optimizer)} makes NaN or infinities of a tensor of shape {tuple(p.shape)} and "
                f"{p.dtype} in its first steps{half}"
            )


# --- an adoption ------------------------------------------------------------------------------------------------------


def _is_near(held: torch.Tensor, weights: torch.Tensor) -> bool:
    if (
        type(held) is not torch.Tensor
        or held.numel() != weights.numel()
        or weights.numel() < 2
        or not held.is_floating_point()
    ):
        return False
    x, y = held.detach().double().reshape(-1), weights.detach().double().reshape(-1)
    return float((x - y).norm()) < FOLLOWS * float(y.norm())


def _adopt(optimizer: torch.optim.Optimizer, first: Twin, second: Twin, copies: frozenset[Path]) -> None:
    """Check that later steps do not undo an adopted version. Raises `InputError`."""
    second.step(BEFORE)
    moved = second.adopt(copies)
    for number in range(BEFORE + 1, BEFORE + 1 + AFTER):
        for twin in (first, second):
            twin.step(number)
    _require_finite(optimizer, first)
    for p, q, by in zip(first.parameters, second.parameters, moved, strict=True):
        if not p.requires_grad:
            continue
        left = float(((q.detach().float() - p.detach().float()) * by).sum() / (by * by).sum())
        if not ANSWERED[0] < left < ANSWERED[1]:
            raise InputError(
                f"{optimizers.class_of(optimizer)} keeps a hidden second copy of the weights: of an adopted version "
                f"only {left:.0%} are left in a tensor of shape {tuple(p.shape)} after {AFTER} "
                "steps; use an optimizer that steps the model's parameters, or one whose copy is in its state"
            )
